"""Data and delete files that declare excessive sizes are rejected before a decoder reads them."""

from __future__ import annotations

import io
import json
import os
import struct
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import orc

from tests.fuzz.decoders import CORPUS, DECODERS, corpus, regressions
from tests.iceberg.hostile import change_metadata
from tests.iceberg.test_catalog import SCHEMA, rows
from tests.operations.format_v3_tables import puffin, vector_blob
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.copied_deletes import parquet_deletes
from trinitylake_ops.iceberg.io.checked_files import CheckedFileIO, check_parquet_pages
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.io.input_file import WHOLE_FILE_BYTES
from trinitylake_ops.iceberg.validation.files import (
    ALWAYS_ALLOWED_BYTES,
    MAX_FOOTER_BYTES,
    CheckedPages,
    check_claims,
    check_puffin,
    check_size,
    claims_bytes,
)
from trinitylake_ops.iceberg.validation.orc_tail import OrcTail
from trinitylake_ops.operations.compaction.data_files import survey_data_files
from trinitylake_ops.storage.memory import MemoryStorage

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py


def parquet_of_zeros(n_rows: int) -> bytes:
    sink = pa.BufferOutputStream()
    zeros = pa.table({"id": pa.array([0], pa.int64()).take(pa.array([0] * 1000))})
    with pq.ParquetWriter(sink, zeros.schema, compression="zstd", use_dictionary=False) as writer:
        writer.write_table(pa.concat_tables([zeros] * (n_rows // 1000)), row_group_size=n_rows)
    return bytes(sink.getvalue())


def orc_of_zeros(n_rows: int, codec: str) -> bytes:
    sink = pa.BufferOutputStream()
    zeros = pa.table({"id": pa.array([0] * 1_000_000, pa.int64())})
    writer = orc.ORCWriter(sink, compression=codec, stripe_size=1 << 30)
    for _ in range(n_rows // 1_000_000):
        writer.write(zeros)
    writer.close()
    return bytes(sink.getvalue())


@pytest.fixture(scope="module")
def parquet_bomb() -> bytes:
    return parquet_of_zeros(34_000_000)


def test_parquet_bomb_is_rejected_by_all_readers(
    lake: Lakehouse, catalog: TrinityLakeCatalog, parquet_bomb: bytes
) -> None:
    assert len(parquet_bomb) < ALWAYS_ALLOWED_BYTES // 1000
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    (task,) = table.scan().plan_files()
    path = task.file.file_path.removeprefix(lake.root)
    lake.storage.write(path, parquet_bomb)
    with pytest.raises(CorruptFileError) as caught:
        table.scan().to_arrow()
    assert path in str(caught.value.path)
    for open_file in (reading_io(lake).new_input, CheckedFileIO.like(reading_io(lake), {}).new_input):
        with pytest.raises(CorruptFileError):
            open_file(task.file.file_path).open()
    with pytest.raises(CorruptFileError):  # a copied delete file, regardless of its name
        parquet_deletes(parquet_bomb, "deletes", "copy.parquet", str)


def test_large_file_is_checked_when_its_end_is_read(lake: Lakehouse, parquet_bomb: bytes) -> None:
    # A decoder reads the footer first, regardless of how the file starts.
    data = b"something else" + bytes(WHOLE_FILE_BYTES) + parquet_bomb
    check_claims(data, len(data), "a.parquet")
    footer = struct.pack("<I", MAX_FOOTER_BYTES) + b"PAR1"
    lake.storage.create("a", bytes(WHOLE_FILE_BYTES) + footer)
    with reading_io(lake).new_input(lake.root + "a").open() as stream:
        stream.seek(-8, io.SEEK_END)
        with pytest.raises(CorruptFileError):
            stream.read(8)


def parquet_bytes(n_bytes: int) -> bytes:
    sink = pa.BufferOutputStream()
    noise = os.urandom(n_bytes)
    pq.write_table(pa.table({"id": pa.array([1], pa.int64()), "name": [noise.hex()]}), sink)
    return bytes(sink.getvalue())


def orc_bytes(n_bytes: int) -> bytes:
    sink = pa.BufferOutputStream()
    orc.write_table(pa.table({"id": pa.array([1], pa.int64()), "name": [os.urandom(n_bytes).hex()]}), sink)
    return bytes(sink.getvalue())


def with_broken_footer(data: bytes) -> bytes:
    size_bytes = int.from_bytes(data[-8:-4], "little")
    return data[: -8 - size_bytes] + b"\xff" * size_bytes + data[-8:]


@pytest.mark.parametrize("n_bytes", [100, 2 * WHOLE_FILE_BYTES], ids=["small", "large"])
@pytest.mark.parametrize(
    "make_data",
    [
        os.urandom,
        lambda n_bytes: b"",
        lambda n_bytes: parquet_bytes(n_bytes)[: -n_bytes // 2],
        lambda n_bytes: parquet_bytes(n_bytes)[:-1],
        lambda n_bytes: with_broken_footer(parquet_bytes(n_bytes)),
        orc_bytes,
        lambda n_bytes: next(file.read_bytes() for file in sorted((CORPUS / "manifest").iterdir())),
    ],
    ids=["random", "empty", "truncated in the middle", "truncated at the end", "no footer", "orc", "avro"],
)
@pytest.mark.parametrize("is_orc", [False, True], ids=["parquet", "orc"])
def test_file_without_valid_footer_raises_error_with_path(
    lake: Lakehouse, catalog: TrinityLakeCatalog, make_data: Callable[[int], bytes], n_bytes: int, is_orc: bool
) -> None:
    if is_orc:
        data = parquet_bytes(n_bytes) if make_data is orc_bytes else make_data(n_bytes)
        path = "tables/t/data/a.orc"
        lake.storage.create(path, data)
        with pytest.raises(CorruptFileError) as caught:
            orc.ORCFile(reading_io(lake).new_input(lake.root + path).open())
        assert caught.value.path == path
        return
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    (task,) = table.scan().plan_files()
    path = task.file.file_path.removeprefix(lake.root)
    lake.storage.write(path, make_data(n_bytes))
    for read in (lambda: table.scan().to_arrow(), lambda: table.scan().to_arrow_batch_reader().read_all()):
        with pytest.raises(CorruptFileError) as caught:
            read()
        assert caught.value.path == path


@pytest.mark.parametrize("codec", ["uncompressed", "zlib", "snappy", "lz4", "zstd"])
def test_orc_stripes_are_parsed_with_any_codec(codec: str) -> None:
    data = orc_of_zeros(1_000_000, codec)
    assert sum(stripe.rows for stripe in OrcTail.parse(data).stripes) == 1_000_000
    check_claims(data, len(data), "a.orc")


def test_run_length_encoded_orc_bomb_is_rejected() -> None:
    data = orc_of_zeros(34_000_000, "zlib")
    with pytest.raises(CorruptFileError):
        check_claims(data, len(data), "a.orc")


def test_page_larger_than_declared_in_footer_is_rejected() -> None:
    with pytest.raises(CorruptFileError):
        check_size(ALWAYS_ALLOWED_BYTES + 1, ALWAYS_ALLOWED_BYTES // 1000, "column 0", "a.parquet")
    check_size(ALWAYS_ALLOWED_BYTES, 1, "column 0", "a.parquet")
    data = parquet_of_zeros(1000)
    # The header of the only page contains its type and then its decompressed size.
    offset = data.index(b"\x15\x00\x15", 4)
    modified = data[: offset + 3] + b"\xfe\xff\xff\xff\x0f" + data[offset + 5 :]
    with pytest.raises(CorruptFileError):
        check_parquet_pages(len(modified), lambda offset, length: modified[offset : offset + length], "a.parquet")


def test_pages_are_checked_while_decoding() -> None:
    data = parquet_of_zeros(1000)
    parquet_file = pq.ParquetFile(io.BytesIO(data))
    column = parquet_file.metadata.row_group(0).column(0)
    start = min(column.data_page_offset, column.dictionary_page_offset or column.data_page_offset)
    size = column.total_compressed_size
    pages = CheckedPages(io.BytesIO(data), data, "a.parquet")
    read = pq.ParquetFile(pa.PythonFile(pages, mode="r"), metadata=parquet_file.metadata).read()
    assert read.equals(parquet_file.read())
    pages.seek(start)
    with pytest.raises(ValueError, match="not at the offset in its footer"):
        pages.read(size - 1)
    pages.seek(start + 1)
    with pytest.raises(ValueError, match="not at the offset in its footer"):
        pages.read(size - 1)


@pytest.mark.parametrize(
    "declared_size", [b"\xfe\xff\xff\xff\x0f", b"\x81\x80\x80\x80\x20"], ids=["two gigabytes", "negative"]
)
def test_page_with_false_size_is_not_decoded(declared_size: bytes) -> None:
    """Decoders read the size as a 32-bit number and allocate that much memory at once."""
    data = parquet_of_zeros(1000)
    size_offset = data.index(b"\x15\x00\x15", 4) + 3
    modified = data[:size_offset] + declared_size + data[size_offset + len(declared_size) :]
    metadata = pq.read_metadata(io.BytesIO(data))
    pages = CheckedPages(io.BytesIO(modified), modified, "a.parquet")
    with pytest.raises(CorruptFileError):
        pq.ParquetFile(pa.PythonFile(pages, mode="r"), metadata=metadata).read()


def test_contradictory_statistics_do_not_crash_the_process() -> None:
    decoder = DECODERS["data_parquet"]
    for data in regressions("data_parquet").values():
        with pytest.raises(CorruptFileError):
            decoder.decode(data, decoder.path)
    for data in corpus("data_parquet"):
        decoder.decode(data, decoder.path)


def vector_of(key: int, n_bitmaps: int = 1) -> bytes:
    return bytes(8) + struct.pack("<QI", n_bitmaps, key) + vector_blob(1)[20:]


def test_deletion_vector_with_too_many_positions_is_rejected() -> None:
    check_puffin(puffin(("a", vector_blob(*range(100_000))))[0], "a.puffin")
    small = vector_blob(1)
    runs = b"".join(struct.pack("<HH", number, 0xFFFF) for number in range(100))
    ranges = b"".join(struct.pack("<HHH", 1, 0, 0xFFFF) for _ in range(100))
    cookie = struct.pack("<I", 12347 | 99 << 16) + b"\xff" * 13
    bomb = small[:8] + struct.pack("<QI", 1, 0) + cookie + runs + bytes(400) + ranges + bytes(4)
    with pytest.raises(CorruptFileError, match="6553600"):
        check_puffin(puffin(("a", bomb))[0], "a.puffin")


@pytest.mark.parametrize(
    "change",
    [
        lambda blob: {**blob, "offset": 1 << 40},
        lambda blob: {**blob, "length": -1},
        lambda blob: {**blob, "length": "7"},
        lambda blob: {**blob, "compression-codec": "zstd"},
        lambda blob: {"type": blob["type"]},
    ],
)
def test_puffin_blob_beyond_file_is_rejected(change: Callable[[dict[str, object]], object]) -> None:
    data = puffin(("a", vector_blob(1, 2)))[0]
    size = int.from_bytes(data[-12:-8], "little")
    footer = json.loads(data[-12 - size : -12])
    footer["blobs"] = [change(footer["blobs"][0])]
    text = json.dumps(footer).encode()
    with pytest.raises(CorruptFileError):
        check_puffin(data[: -12 - size] + text + struct.pack("<i", len(text)) + data[-8:], "a.puffin")


@pytest.mark.parametrize("blob", [vector_of(1 << 30), vector_of(0, 1 << 60), b""], ids=lambda blob: "")
def test_bitmap_with_large_key_is_rejected(blob: bytes) -> None:
    """PyIceberg allocates a list with one item for each key up to the largest."""
    with pytest.raises(CorruptFileError):
        check_puffin(puffin(("a", blob))[0], "a.puffin")


def test_puffin_file_is_checked_when_read_whole() -> None:
    storage = MemoryStorage("memory://puffin-claims/")
    storage.write("a.puffin", puffin(("a", vector_of(1 << 30)))[0])
    with (
        StorageFileIO.on(storage).new_input(storage.root + "a.puffin").open() as stream,
        pytest.raises(CorruptFileError),
    ):
        stream.read()


def test_file_of_unknown_format_has_no_footer() -> None:
    assert claims_bytes(b"plain text", 10, "a") == 0
    assert claims_bytes(b"", 0, "a") == 0


@pytest.mark.parametrize(
    ("name", "text"),
    [
        *(
            (name, text)
            for name in ("write.parquet.row-group-limit", "commit.retry.num-retries")
            for text in ("x", "9" * 5000)
        ),
        ("write.parquet.page-size-bytes", "-1"),
        ("write.parquet.page-row-limit", "0"),  # the writer would loop forever and ignore signals
        ("write.parquet.row-group-limit", "0"),
        ("write.target-file-size-bytes", "0"),
        ("write.metadata.metrics.default", "-1"),
        ("write.metadata.metrics.column.id", "truncate(0)"),
        ("commit.manifest-merge.enabled", "text"),
        ("write.object-storage.enabled", "2"),
        ("write.object-storage.partitioned-paths", ""),
        ("write.parquet.compression-codec", "http://codec"),
        ("write.format.default", "http://format"),
        ("schema.name-mapping.default", '{"not": "a list"}'),
        ("schema.name-mapping.default", "[" * 100_000),
    ],
)
def test_property_with_invalid_value_is_ignored(
    lake: Lakehouse, catalog: TrinityLakeCatalog, name: str, text: str
) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))

    def change(content: dict[str, Any]) -> None:
        content["properties"][name] = text

    change_metadata(lake, change)
    table = catalog.load_table("ns.t")
    assert name not in table.properties
    table.append(rows(2))
    assert table.scan().to_arrow().num_rows == 2


@pytest.mark.parametrize("count", ["abc", "", "-1", "9" * 5000, None, 7, ["1"]], ids=lambda count: repr(count)[:9])
def test_invalid_summary_count_is_ignored(lake: Lakehouse, catalog: TrinityLakeCatalog, count: object) -> None:
    """Operations report such counts as unknown, and rows can still be read, written and compacted."""
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    counts = ("total-records", "total-data-files", "total-files-size", "added-records", "total-equality-deletes")

    def change(content: dict[str, Any]) -> None:
        for snapshot in content["snapshots"]:
            snapshot["summary"] |= dict.fromkeys(counts, count) | {"added-by": "an engineer"}

    change_metadata(lake, change)
    table = catalog_at(lake).load_table("ns.t")  # in a new catalog, because the first one caches the metadata
    summary = table.metadata.snapshots[0].summary
    assert summary is not None
    assert not summary.additional_properties.keys() & set(counts)
    assert summary["added-by"] == "an engineer"
    assert operations.verify(lake).findings == ()
    assert survey_data_files(lake, lake.snapshot(), 60.0).uncounted == ("ns.t",)
    table.append(rows(2))
    assert table.scan().to_arrow().num_rows == 2
    table.delete("id = 1")
    assert operations.plan_compact_tables(lake, min_input_files=2).left == {}
    assert operations.verify(lake).findings == ()


def test_unsupported_codec_is_rejected(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA, properties={"write.parquet.compression-codec": "lzo"})
    with pytest.raises(InvalidDefinitionError, match="'lzo'"):
        table.append(rows(1))
