"""Modify table files as a hostile writer could."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import fastavro

from trinitylake_ops import Lakehouse
from trinitylake_ops.format.checksums import SEAL_KEYS
from trinitylake_ops.format.definitions import METADATA_LOCATION


def metadata_path(lake: Lakehouse, namespace: str = "ns", table: str = "t") -> str:
    """Return the path of the current metadata file of a managed table."""
    return lake.snapshot().table(namespace, table).format_properties[METADATA_LOCATION]


def change_metadata(lake: Lakehouse, change: Callable[[dict[str, Any]], None], table: str = "t") -> str:
    """Change a table's metadata in place, without checksums, as other programs write it. Return its path."""
    path = metadata_path(lake, table=table)
    content = without_seals(json.loads(lake.storage.read(path)))
    change(content)
    lake.storage.write(path, json.dumps(content).encode())
    return path


def without_seals(content: dict[str, Any]) -> dict[str, Any]:
    """Return the properties other than checksums."""
    return {name: value for name, value in content.items() if name not in SEAL_KEYS}


def manifest_list_path(lake: Lakehouse, table: str = "t") -> str:
    """Return the path of the manifest list of a table's current snapshot."""
    content = json.loads(lake.storage.read(metadata_path(lake, table=table)))
    current = content["current-snapshot-id"]
    (uri,) = (snapshot["manifest-list"] for snapshot in content["snapshots"] if snapshot["snapshot-id"] == current)
    return str(uri).removeprefix(lake.root)


def avro_records(data: bytes) -> tuple[Any, list[Any], dict[str, bytes]]:
    """Return the schema, the records and the custom header fields of an Avro file."""
    reader = fastavro.reader(io.BytesIO(data))
    records = list(reader)
    custom_fields = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
    return reader.writer_schema, records, without_seals(custom_fields)


def avro_bytes(schema: Any, records: list[Any], custom_fields: dict[str, Any], codec: str = "deflate") -> bytes:
    """Encode an Avro file."""
    out = io.BytesIO()
    fastavro.writer(out, schema, records, codec=codec, metadata=custom_fields)
    return out.getvalue()


def unsealed(data: bytes) -> bytes:
    """Return a metadata file, manifest or manifest list without checksums, as other programs write it."""
    if data.startswith(b"{"):
        return json.dumps(without_seals(json.loads(data))).encode()
    return avro_bytes(*avro_records(data))
