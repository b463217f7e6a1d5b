"""Rewritten manifests differ from their originals only in paths."""

from __future__ import annotations

import io
from typing import Any

import fastavro
import pytest

from tests.lakes import Lakes
from trinitylake_ops.format.checksums import SEAL_KEYS
from trinitylake_ops.iceberg.copy import FileCopy, TableFileMap, rewrite_file
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import FileKind

MANIFEST = "tables/t/metadata/m.avro"
# A simplified manifest schema with a partition field of each logical type of Avro.
VALUES = {
    "date": {"type": "int", "logicalType": "date"},
    "time": {"type": "long", "logicalType": "time-micros"},
    "timestamp": {"type": "long", "logicalType": "timestamp-micros", "adjust-to-utc": True},
    "decimal": {"type": "fixed", "name": "d", "size": 17, "logicalType": "decimal", "precision": 40, "scale": 2},
    "uuid": {"type": "fixed", "name": "u", "size": 16, "logicalType": "uuid"},
}
SCHEMA = {
    "type": "record",
    "name": "manifest_entry",
    "fields": [
        {
            "name": "data_file",
            "field-id": 2,
            "type": {
                "type": "record",
                "name": "r2",
                "fields": [
                    {"name": "file_path", "type": "string", "field-id": 100},
                    *({"name": name, "type": ["null", kind], "field-id": 1} for name, kind in VALUES.items()),
                ],
            },
        }
    ],
}
PHYSICAL = b"logicalTypo"  # an attribute that Avro ignores, with the same length as "logicalType"


def manifest(codec: str, data_file: dict[str, Any]) -> bytes:
    """Encode a manifest whose data file has the physical values ``data_file``."""
    physical_schema = fastavro.parse_schema(_renamed(SCHEMA))
    buffer = io.BytesIO()
    fastavro.writer(buffer, physical_schema, [{"data_file": data_file}], codec=codec, metadata={"format-version": "2"})
    return buffer.getvalue().replace(PHYSICAL, b"logicalType")


def physical_values(data: bytes) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the physical values of a manifest, and its properties."""
    reader = fastavro.reader(io.BytesIO(data.replace(b"logicalType", PHYSICAL)))
    (record,) = reader
    assert isinstance(record, dict)
    return record["data_file"], {name: value for name, value in reader.metadata.items() if name not in SEAL_KEYS}


def _renamed(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {key.replace("logicalType", PHYSICAL.decode()): _renamed(value) for key, value in schema.items()}
    return [_renamed(value) for value in schema] if isinstance(schema, list) else schema


@pytest.mark.parametrize("codec", ["null", "deflate", "zstandard"])
def test_rewritten_manifest_preserves_values_beyond_python_range(lakes: Lakes, codec: str) -> None:
    """Some engines use such values for infinite dates and times."""
    lake = lakes.local()
    values = {
        "date": 106_751_991,
        "time": 2**62,
        "timestamp": -(2**63),
        "decimal": b"\x00\x7f" + b"\xff" * 15,
        "uuid": bytes(range(16)),
    }
    data = manifest(codec, {"file_path": f"{lake.root}tables/t/data/a.parquet", **values})
    file_map = TableFileMap("t", lake.root, "s3://bucket/backup/")
    copy = FileCopy(FileKind.MANIFEST, MANIFEST, MANIFEST, len(data))
    copied = rewrite_file(copy, data, StorageFileIO.on(lake.storage), file_map, {})
    expected = {"file_path": "s3://bucket/backup/tables/t/data/a.parquet", **values}
    properties = physical_values(data)[1]
    assert physical_values(copied) == (expected, properties)
    assert copied == rewrite_file(copy, data, StorageFileIO.on(lake.storage), file_map, {})
