"""Checksums in table files cover every bit and the file name. Files without checksums are accepted."""

from __future__ import annotations

import gzip
import io
import json
import random
from pathlib import Path

import duckdb
import fastavro
import google_crc32c
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.serializers import FromByteStream, GzipCompressor

from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import SEAL_KEYS, check_seals, sealed
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.checked_files import check_whole
from trinitylake_ops.iceberg.io.output_file import SPOOL_BYTES
from trinitylake_ops.iceberg.validation.avro import AvroHeader
from trinitylake_ops.iceberg.validation.checksums import PieceCheck, SealedKind, check_table_file, sealed_table_file
from trinitylake_ops.iceberg.write.arrow import stage_arrow

NAME = "00000-0a1b2c3d-0000-4000-8000-000000000000"
METADATA = b'{"format-version":2,"location":"memory://lake/t"}'


def gz_path(name: str = NAME) -> str:
    return f"tables/t/metadata/{name}.gz.metadata.json"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Return the files of a table with two appends and a staged write, by path."""
    root = tmp_path_factory.mktemp("lake")
    lake = Lakehouse.create(str(root))
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64()), ("text", pa.string())]))
    table.append(pa.table({"id": [1, 2, 3], "text": ["a", "b", "c"]}))
    table.append(pa.table({"id": [4], "text": ["d"]}))
    stage_arrow(lake, pa.table({"id": [5], "text": ["e"]}), "ns", "t", mode="append")
    paths = [info.path for info in lake.storage.list("tables/") if SealedKind.of(info.path) is not None]
    files = {path: lake.storage.read(path) for path in paths}
    files[gz_path()] = sealed_table_file(gzip.compress(METADATA), gz_path())
    return files


def of_kind(files: dict[str, bytes], kind: SealedKind) -> list[tuple[str, bytes]]:
    return [(path, data) for path, data in files.items() if SealedKind.of(path) is kind]


def test_all_written_files_have_checksums(files: dict[str, bytes]) -> None:
    assert all(of_kind(files, kind) for kind in SealedKind)
    assert all(check_table_file(data, path) for path, data in files.items())


@pytest.mark.parametrize("kind", SealedKind)
def test_every_flipped_bit_is_detected(files: dict[str, bytes], kind: SealedKind) -> None:
    rng = random.Random(23)
    path, data = of_kind(files, kind)[-1]
    bits = range(8 * len(data))
    for bit in bits if len(data) < 500 else rng.sample(bits, 1000):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptFileError):
            check_table_file(bytes(flipped), path)


@pytest.mark.parametrize("kind", [kind for kind in SealedKind if kind is not SealedKind.GZIP_METADATA])
def test_swapped_file_is_detected_and_named(files: dict[str, bytes], kind: SealedKind) -> None:
    (first, _), (second, data) = of_kind(files, kind)[:2]
    with pytest.raises(CorruptFileError, match=f"was replaced by a copy of the file '{second.rpartition('/')[2]}'"):
        check_table_file(data, first)


def test_swapped_gzip_metadata_is_detected_and_named(files: dict[str, bytes]) -> None:
    with pytest.raises(CorruptFileError, match=f"was replaced by a copy of the file '{NAME}.gz.metadata.json'"):
        check_table_file(files[gz_path()], gz_path(NAME.replace("0", "1")))


def test_files_of_other_programs_have_no_checksums(files: dict[str, bytes]) -> None:
    plain = pa.BufferOutputStream()
    pq.write_table(pa.table({"a": [1]}), plain, write_page_checksum=True)
    avro = io.BytesIO()
    fastavro.writer(avro, {"type": "record", "name": "r", "fields": []}, [{}], metadata={"a": "b"})
    foreign_files = {
        "a.metadata.json": METADATA,
        "a.gz.metadata.json": gzip.compress(METADATA),
        "a.avro": avro.getvalue(),
        "a.parquet": plain.getvalue().to_pybytes(),
        "a.puffin": b"PFA1",
        "b.parquet": b"no Parquet",
        "b.avro": b"Obj\x01\xff",
    }
    for path, data in foreign_files.items():
        assert not check_table_file(data, path)


def test_checksums_copied_by_another_program_are_ignored(files: dict[str, bytes]) -> None:
    _, data = of_kind(files, SealedKind.PARQUET)[0]
    copied = pa.BufferOutputStream()
    key_values = pq.read_metadata(pa.BufferReader(data)).metadata
    pq.write_table(pq.read_table(pa.BufferReader(data)).replace_schema_metadata(key_values), copied)
    assert SEAL_KEYS[0].encode() in pq.read_metadata(pa.BufferReader(copied.getvalue())).metadata
    assert not check_table_file(copied.getvalue().to_pybytes(), "other.parquet")
    _, data = of_kind(files, SealedKind.AVRO)[0]
    reader = fastavro.reader(io.BytesIO(data))
    other = io.BytesIO()
    meta = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
    fastavro.writer(other, reader.writer_schema, list(reader), metadata=meta)
    assert not check_table_file(other.getvalue(), "other.avro")
    _, data = of_kind(files, SealedKind.METADATA)[0]
    text = json.loads(data) | {"last-updated-ms": 1}
    assert not check_table_file(json.dumps(text, separators=(",", ":")).encode(), "other.metadata.json")
    # A new file written from such content has only the new checksums.
    for kind, other_path in ((SealedKind.METADATA, "b.metadata.json"), (SealedKind.AVRO, "b.avro")):
        resealed = sealed_table_file(of_kind(files, kind)[0][1], other_path)
        assert check_table_file(resealed, other_path)
        assert resealed.count(SEAL_KEYS[0].encode()) == len(SEAL_KEYS)


def test_name_that_json_would_escape_gets_no_checksum() -> None:
    assert sealed_table_file(METADATA, 'a"b.metadata.json') == METADATA
    data = sealed_table_file(METADATA, "Zürich.metadata.json")
    assert check_table_file(data, "Zürich.metadata.json") and json.loads(data)["format-version"] == 2


def test_large_file_is_checksummed_piece_by_piece(lakes: Lakes) -> None:
    """This includes files that exceed the in-memory buffer of a stream."""
    lake = lakes.memory()
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    noise = random.Random(1).randbytes(SPOOL_BYTES * 3 // 2)
    values = pa.array([noise[offset : offset + 4096] for offset in range(0, len(noise), 4096)], pa.binary())
    table = catalog.create_table("ns.t", pa.schema([("a", pa.binary())]))
    table.append(pa.table({"a": values}))
    (path,) = (info.path for info in lake.storage.list("tables/") if info.path.endswith(".parquet"))
    data = lake.storage.read(path)
    assert len(data) > SPOOL_BYTES and check_table_file(data, path)
    for flipped in (None, 5, len(data) // 2, len(data) - 500):
        pieces = bytearray(data)
        if flipped is not None:
            pieces[flipped] ^= 4
        check = PieceCheck(path)
        for offset in range(0, len(data), 1 << 20):
            check.add(bytes(pieces[offset : offset + (1 << 20)]))
        if flipped is None:
            assert check.finish(lambda n_bytes: data[-n_bytes:])
        else:
            with pytest.raises(CorruptFileError):
                check.finish(lambda n_bytes: data[-n_bytes:])


def test_page_checksums_are_verified_without_file_checksum(files: dict[str, bytes]) -> None:
    """Files of other programs may have page checksums, which are verified if a file has no checksum."""
    _, data = of_kind(files, SealedKind.PARQUET)[0]
    assert pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read().num_rows
    buffer = pa.BufferOutputStream()
    rows = pa.table({"a": list(range(1000)), "b": [{"c": [str(n)]} for n in range(1000)]})
    pq.write_table(rows, buffer, write_page_checksum=True, row_group_size=300, data_page_version="2.0")
    foreign = buffer.getvalue().to_pybytes()
    assert not check_whole(foreign, "a.parquet")
    first = pq.read_metadata(pa.BufferReader(foreign)).row_group(1).column(1)
    flipped = bytearray(foreign)
    flipped[first.data_page_offset + first.total_compressed_size - 100] ^= 1
    with pytest.raises(CorruptFileError):
        check_whole(bytes(flipped), "a.parquet")
    bare = pa.BufferOutputStream()
    pq.write_table(rows, bare)
    assert not check_whole(bare.getvalue().to_pybytes(), "a.parquet")
    with pytest.raises(CorruptFileError):
        check_whole(b"PAR1 and nothing else", "a.parquet")


def test_other_readers_ignore_checksums(files: dict[str, bytes]) -> None:
    for path, data in files.items():
        kind = SealedKind.of(path)
        if kind is SealedKind.AVRO:
            assert list(fastavro.reader(io.BytesIO(data)))
        elif kind is SealedKind.PARQUET:
            assert pl.read_parquet(io.BytesIO(data)).height == pq.read_table(pa.BufferReader(data)).num_rows
        elif kind is SealedKind.METADATA:
            metadata = FromByteStream.table_metadata(io.BytesIO(data))
            assert metadata.format_version == 2 and "seal" not in metadata.model_dump_json()
        else:
            assert gzip.decompress(data) == METADATA
            assert GzipCompressor().stream_decompressor(io.BytesIO(data)).read() == METADATA


@pytest.mark.local_only("DuckDB reads files from the local disk")
def test_duckdb_reads_files_with_checksums(lakes: Lakes, tmp_path: str) -> None:
    lake = lakes.local()
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", pa.schema([("id", pa.int64())]))
    table.append(pa.table({"id": [1, 2, 3]}))
    data_files = [task.file.file_path for task in table.scan().plan_files()]
    connection = duckdb.connect()
    assert connection.execute("select sum(id) from read_parquet(?)", [data_files]).fetchone() == (6,)
    connection.close()


def test_avro_header_in_several_blocks_is_parsed() -> None:
    data = io.BytesIO()
    fastavro.writer(data, {"type": "record", "name": "r", "fields": []}, [], metadata={"a": "b" * 500})
    header = AvroHeader.of(data.getvalue())
    assert header is not None and header.size_bytes == len(data.getvalue()) and header.metadata["a"] == b"b" * 500
    # A map in several blocks, one of them with its size in bytes.
    blocks = b"Obj\x01\x02\x02a\x02b\x01\x08\x02c\x02d\x00" + bytes(16)
    header = AvroHeader.of(blocks)
    assert header is not None and header.metadata == {"a": b"b", "c": b"d"} and header.size_bytes == len(blocks)
    for broken in (blocks[:-1], b"Obj\x01" + b"\xff" * 12, b"Obj\x01\x02\x01", b"Obj\x02" + blocks[4:], b""):
        assert AvroHeader.of(broken) is None


def test_only_files_of_lakehouses_have_checksums(tmp_path: str) -> None:
    """PyIceberg writes files outside lakehouses without checksums, even after it wrote to a lakehouse."""
    rows = pa.table({"a": pa.array([1], pa.int64())})
    catalog_of_lake = catalog_at(Lakehouse.create("memory://sealed-and-not/"))
    other_catalog = SqlCatalog("others", uri="sqlite:///:memory:", warehouse=f"file://{tmp_path}")
    for catalog in (catalog_of_lake, other_catalog):
        catalog.create_namespace("ns")
        catalog.create_table("ns.t", rows.schema).append(rows)
    other_catalog.close()
    (path,) = Path(tmp_path).rglob("*.parquet")
    assert SEAL_KEYS[0].encode() not in (pq.read_metadata(path).metadata or {})


def test_footer_and_file_checksum_suffice_for_verification() -> None:
    file_data = sealed(b"x" * 1000 + b"00000000 n" * 2, "n")
    seal = file_data[-10:].decode()
    assert check_seals(file_data, (seal, seal), "n")
    assert check_seals(file_data[-20:], (seal, seal), "n", crc=google_crc32c.value(file_data))
    with pytest.raises(CorruptFileError):
        check_seals(file_data[-20:], (seal, seal), "n", crc=google_crc32c.value(b"y" + file_data[1:]))
