"""Reject inventories and records of verified files whose declared or decompressed content is too large."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest

from tests.inventories import inventory_file
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.arrow_ipc import check_stream
from trinitylake_ops.format.file_names import new_verified_path
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.operations.gc.inventory import Inventory, InventoryQuery, InventorySearch
from trinitylake_ops.operations.verified_files import _SCHEMA, RecordedPart, VerifiedFile, read_records, write_record


def encode_record(content: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    row = {"path": "a", "kind": "file", "size_bytes": 1, "modified_millis": 1, "sha256": bytes(32), "content": content}
    with pa.ipc.new_stream(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(pa.RecordBatch.from_pylist([row], schema=_SCHEMA))
    return bytes(sink.getvalue())


def test_record_with_excessive_content_is_damaged(lake: Lakehouse) -> None:
    body = encode_record(bytes(96 << 20))
    assert len(body) < 64 << 10
    path = new_verified_path()
    lake.storage.write(path, body + hashlib.sha256(body).digest())
    records = read_records(lake.storage, [lake.storage.stat(path)])
    assert (records.files, list(records.damaged)) == ({}, [path])


def test_record_is_read_as_written(lake: Lakehouse) -> None:
    files = {f"tables/{number}": VerifiedFile(RecordedPart.CHECKSUM, 7, 8, bytes(32)) for number in range(5000)}
    path = write_record(lake.storage, files)
    assert read_records(lake.storage, [lake.storage.stat(path)]).files == files


@pytest.mark.parametrize(
    "data", [b"abc", b"\xff" * 8, encode_record(b"x")[:-40], encode_record(b"x")[4:]], ids=range(4)
)
def test_stream_with_invalid_references_is_rejected(data: bytes) -> None:
    with pytest.raises(ValueError, match="it"):
        check_stream(data, 1 << 30)


@pytest.mark.parametrize("file_format", ["CSV", "ORC", "Parquet"])
def test_inventory_with_too_many_key_bytes_is_rejected(lake: Lakehouse, file_format: str) -> None:
    def search(keys: list[str]) -> object:
        lake.storage.write("inventory", inventory_file(keys, file_format))
        uri = lake.root + "inventory"
        columns = ("bucket", "key", "versionid", "islatest", "isdeletemarker", "size", "lastmodifieddate")
        return InventorySearch(
            reading_io(lake), Inventory(uri, 0, file_format, columns, "", (uri,)), (InventoryQuery.beyond("", []),)
        )([uri])

    assert search(["a"] * 10_000)
    with pytest.raises(CorruptFileError):
        search(["x" * 8_000] * 10_000)
