"""Small files that inflate to a large size, or declare one, are rejected before they use much memory or time."""

from __future__ import annotations

import bz2
import gzip
import json
import os
import subprocess
import sys
import time
import zlib
from typing import Any

import pyarrow as pa
import pytest
import zstandard

from tests.iceberg.hostile import avro_bytes, avro_records, change_metadata, manifest_list_path, metadata_path
from tests.iceberg.test_catalog import SCHEMA, ids_of, rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import metadata_json, read_table_metadata
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.iceberg.validation.avro import (
    MAX_HEADER_BYTES,
    avro_limit_bytes,
    check_header_size,
    decompress,
    header_bytes,
)
from trinitylake_ops.iceberg.validation.inflate import (
    ALWAYS_ALLOWED_BYTES,
    AVRO_CODECS,
    MAX_INFLATED_BYTES,
    InflatedTooLargeError,
    inflate_gzip,
    inflated_limit_bytes,
)

ON_DISK_IN_SOAK = True  # tests/iceberg/conftest.py

#: Maximum additional memory of a reader in bytes, and its maximum CPU time in seconds.
MAX_EXTRA_BYTES = 256 << 20
MAX_CPU_SECONDS = 10

_CHILD = """
import resource, sys, time
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.iceberg.validation.avro import avro_limit_bytes, decompress
from trinitylake_ops.iceberg.metadata import metadata_json
path = sys.argv[1]
data = open(path, "rb").read()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
started = time.process_time()
try:
    (decompress if path.endswith(".avro") else metadata_json)(data, path)
except CorruptFileError:
    pass
else:
    raise SystemExit("the file was accepted")
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10, time.process_time() - started)
"""
RECORD = {"type": "record", "name": "r", "fields": [{"name": "text", "type": "bytes"}]}


def gzip_members(n_bytes: int) -> bytes:
    member = gzip.compress(b" " * (64 << 20))
    return member * (n_bytes // (64 << 20))


def compressed_block(codec: str, data: bytes) -> bytes:
    """Return the bytes of a block of an Avro file, compressed."""
    if codec == "deflate":
        return zlib.compress(data, 9)[2:-4]
    if codec == "bzip2":
        return bz2.compress(data)
    if codec == "zstandard":
        return zstandard.compress(data)
    if codec == "snappy":
        return bytes(pa.Codec("snappy").compress(data, asbytes=True)) + zlib.crc32(data).to_bytes(4, "big")
    return data


def avro_bomb(codec: str, n_bytes: int) -> bytes:
    """Return an Avro file with one block that inflates to ``n_bytes`` of zeros."""
    return avro_file({"avro.codec": codec.encode()}, [(1, compressed_block(codec, b"\0" * n_bytes))])


def avro_file(meta: dict[str, bytes], blocks: list[tuple[int, bytes]], sync: bytes = b"s" * 16) -> bytes:
    fields = {"avro.schema": json.dumps(RECORD).encode(), "avro.codec": b"null", **meta}
    header = b"".join(
        encoded_long(len(text)) + text for item in fields.items() for text in (as_bytes(item[0]), item[1])
    )
    body = b"".join(encoded_long(count) + encoded_long(len(block)) + block + sync for count, block in blocks)
    return b"Obj\x01" + encoded_long(len(fields)) + header + encoded_long(0) + sync + body


def as_bytes(text: str) -> bytes:
    return text.encode()


def encoded_long(number: int) -> bytes:
    remaining = (number << 1) ^ (number >> 63)
    encoded = bytearray()
    while remaining > 0x7F:
        encoded.append(remaining & 0x7F | 0x80)
        remaining >>= 7
    return bytes([*encoded, remaining])


@pytest.mark.parametrize("kind", ["gzip", "deflate"])
def test_decompression_bomb_is_rejected_within_memory_and_time_limits(kind: str, tmp_path: Any) -> None:
    path = tmp_path / ("00001-x.gz.metadata.json" if kind == "gzip" else "x.avro")
    path.write_bytes(gzip_members(1 << 30) if kind == "gzip" else avro_bomb(kind, 192 << 20))
    assert path.stat().st_size < 2 << 20
    completed = subprocess.run([sys.executable, "-c", _CHILD, str(path)], capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    extra_bytes, seconds = map(float, completed.stdout.split())
    assert extra_bytes < MAX_EXTRA_BYTES
    assert seconds < MAX_CPU_SECONDS


@pytest.mark.parametrize("codec", sorted(AVRO_CODECS))
def test_codec_stops_at_size_limit(codec: str) -> None:
    block = compressed_block(codec, b"\0" * 1000)
    assert AVRO_CODECS[codec](block, 1000) == b"\0" * 1000
    with pytest.raises(InflatedTooLargeError):
        AVRO_CODECS[codec](block, 999)


@pytest.mark.parametrize("codec", ["deflate", "bzip2"])
def test_truncated_block_is_corrupt(codec: str) -> None:
    block = compressed_block(codec, bytes(range(256)) * 8)[:-20]
    with pytest.raises(CorruptFileError):
        decompress(avro_file({"avro.codec": codec.encode()}, [(1, block)]), "x.avro")


def test_oversized_header_is_corrupt() -> None:
    def with_schema(n_chars: int) -> bytes:
        schema = json.dumps({"type": "record", "name": "r", "fields": [], "doc": "x" * n_chars}).encode()
        return header_bytes({"avro.schema": schema, "avro.codec": b"null"}, b"s" * 16)

    assert decompress(with_schema(MAX_HEADER_BYTES - 1_000), "small.avro").n_records == 0
    with pytest.raises(CorruptFileError):
        decompress(with_schema(MAX_HEADER_BYTES), "large.avro")
    check_header_size(with_schema(MAX_HEADER_BYTES - 1_000)[: 1 << 20], "small.avro")
    with pytest.raises(CorruptFileError):  # detected in the first bytes, without reading the rest
        check_header_size(with_schema(MAX_HEADER_BYTES)[: 1 << 20], "large.avro")


def test_limit_applies_to_all_members_and_blocks_together() -> None:
    member = gzip.compress(b"x" * 600)
    assert inflate_gzip(member * 2 + b"\0" * 512, 1200) == b"x" * 1200
    with pytest.raises(InflatedTooLargeError):
        inflate_gzip(member * 2, 1199)
    half = compressed_block("deflate", b"\0" * (avro_limit_bytes(0) // 2 + 1))
    with pytest.raises(CorruptFileError):
        decompress(avro_file({"avro.codec": b"deflate"}, [(1, half), (1, half)]), "x.avro")


def test_limit_grows_with_file_size_up_to_maximum() -> None:
    assert inflated_limit_bytes(1 << 20) == ALWAYS_ALLOWED_BYTES
    assert inflated_limit_bytes(4 << 20) == 128 << 20
    assert inflated_limit_bytes(1 << 40) == MAX_INFLATED_BYTES
    assert avro_limit_bytes(1 << 20) == avro_limit_bytes(0) == 8 << 20
    assert avro_limit_bytes(4 << 20) == 56 << 20
    assert avro_limit_bytes(1 << 40) == MAX_INFLATED_BYTES


EMPTY_ITEMS = {"type": "array", "items": {"type": "record", "name": "e", "fields": []}}
NULL_ITEMS = {"type": "array", "items": "null"}


def schema_with(field: object) -> bytes:
    return json.dumps({**RECORD, "fields": [{"name": "f", "type": field}]}).encode()


@pytest.mark.parametrize(
    "data",
    [
        avro_file({}, [(1 << 60, b"\0" * 100)]),
        avro_file({}, [(100_000, b"\0" * 200_000)]),
        avro_file({}, [(-1, b"\0")]),
        avro_file({"avro.schema": schema_with(EMPTY_ITEMS)}, [(1, encoded_long(1 << 60) + encoded_long(0))]),
        avro_file({"avro.schema": schema_with(["null", NULL_ITEMS])}, [(1, encoded_long(1 << 60) + encoded_long(0))]),
        avro_file({"avro.schema": b"[" * 100_000}, []),
        avro_file({"avro.schema": b"{}"}, [(1, b"")]),
        avro_file({"avro.codec": b"xz"}, []),
        avro_file({"avro.codec": b"os.system"}, []),
        avro_file({}, [(1, b"12")])[:-1],
        avro_file({}, [])[:-1],
        b"Obj\x01" + encoded_long(1 << 60),
        b"Obj\x01" + encoded_long(1) + encoded_long(1 << 40) + b"abc",
        b"Obj\x01" + b"\xff" * 30,
        b"Obj\x02" + avro_file({}, [])[4:],
        b"",
    ],
    ids=lambda data: "",
)
def test_avro_file_with_invalid_declared_sizes_is_corrupt(data: bytes) -> None:
    started = time.process_time()
    with pytest.raises(CorruptFileError, match=r"'x\.avro'"):
        decompress(data, "x.avro")
    assert time.process_time() - started < MAX_CPU_SECONDS


@pytest.mark.parametrize("codec", ["null", "deflate", "bzip2", "zstandard"])
def test_avro_file_of_another_writer_is_decompressed_unchanged(codec: str) -> None:
    records = [{"text": os.urandom(200)} for _ in range(500)]
    content = decompress(avro_bytes(RECORD, records, {"snapshot-id": "7"}, codec), "x.avro")
    assert (content.codec, content.meta_int("snapshot-id"), content.meta_int("none")) == (codec, 7, None)
    schema, decoded, custom_fields = avro_records(content.data)
    assert decoded == records
    assert custom_fields == {"snapshot-id": "7"}
    assert [field["name"] for field in schema["fields"]] == ["text"]


@pytest.mark.parametrize("reader", ["scan", "append", "orphans", "verify"])
def test_manifest_list_bomb_is_rejected_by_all_readers(
    lake: Lakehouse, catalog: TrinityLakeCatalog, reader: str
) -> None:
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    path = manifest_list_path(lake)
    schema, (record,), custom_fields = avro_records(lake.storage.read(path))
    record["manifest_path"] = "x" * (ALWAYS_ALLOWED_BYTES + 1)
    lake.storage.write(path, avro_bytes(schema, [record], custom_fields))
    if reader == "verify":
        assert {"table-unreadable"} == {finding.code for finding in operations.verify(lake).findings}
        return
    with pytest.raises(CorruptFileError):
        if reader == "scan":
            catalog_at(lake).load_table("ns.t").scan().to_arrow()
        elif reader == "append":
            catalog_at(lake).load_table("ns.t").append(rows(2))
        else:
            list(files_of(lake.snapshot().table("ns", "t"), StorageFileIO.on(lake.storage)))


@pytest.mark.parametrize("name", ["x.avro", "x.parquet"])
def test_avro_bomb_with_other_name_or_magic_is_rejected(lake: Lakehouse, name: str) -> None:
    for magic, path in ((b"Obj\x01", name), (b"PAR1", "y" + name)):
        lake.storage.create(path, magic + avro_bomb("deflate", ALWAYS_ALLOWED_BYTES + 1)[4:])
        with pytest.raises(CorruptFileError), StorageFileIO.on(lake.storage).new_input(lake.root + path).open() as file:
            file.read()


def test_metadata_json_with_too_many_values_is_corrupt() -> None:
    values = b'{"x":[' + b"0," * 3_000_000 + b"0]}"
    with pytest.raises(CorruptFileError):
        metadata_json(gzip.compress(values), "1.gz.metadata.json")
    with pytest.raises(CorruptFileError):
        metadata_json(gzip.compress(values)[:-20], "1.gz.metadata.json")


@pytest.mark.parametrize(
    "text", [b"[" * 200_000, b'{"a":' * 100_000, b'{"format-version":2,"schemas":[' + b"{}," * 50_000]
)
def test_deeply_nested_or_invalid_metadata_is_corrupt(lake: Lakehouse, text: bytes) -> None:
    lake.storage.create("1.metadata.json", text)
    started = time.process_time()
    with pytest.raises(CorruptFileError) as caught:
        read_table_metadata(StorageFileIO.on(lake.storage), lake.root + "1.metadata.json")
    assert time.process_time() - started < MAX_CPU_SECONDS
    assert len(str(caught.value)) < 400


def test_inline_manifests_are_listed_and_read(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    table.append(rows(2))
    _, records, _ = avro_records(lake.storage.read(manifest_list_path(lake)))

    def inline(content: dict[str, Any]) -> None:
        content["format-version"] = 1
        content["snapshots"] = [
            snapshot for snapshot in content["snapshots"] if snapshot["snapshot-id"] == content["current-snapshot-id"]
        ]
        content["snapshots"][0].pop("manifest-list")
        content["snapshots"][0]["manifests"] = [record["manifest_path"] for record in records]
        content["schema"], content["partition-spec"] = content["schemas"][0], []

    before = {file.location for file in files_of(lake.snapshot().table("ns", "t"), StorageFileIO.on(lake.storage))}
    path = change_metadata(lake, inline)
    assert path == metadata_path(lake)
    after = {file.location for file in files_of(lake.snapshot().table("ns", "t"), StorageFileIO.on(lake.storage))}
    assert {location for location in before if location.endswith((".parquet", "m0.avro"))} <= after
    table = catalog_at(lake).load_table("ns.t")
    assert ids_of(table) == [1, 2]
    with pytest.raises(InvalidDefinitionError):
        table.append(rows(3))
    assert {"table-unreadable"} == {finding.code for finding in operations.verify(lake).findings}
    assert lake.snapshot().table("ns", "t").format_properties[METADATA_LOCATION] == path
