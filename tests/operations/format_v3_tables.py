"""Tables of Iceberg format version 3 as written by another engine, with deletion vectors and row lineage."""

from __future__ import annotations

import io
import json
import struct
import uuid
import zlib
from dataclasses import dataclass, replace
from typing import Any

import fastavro
import pyroaring
from pyiceberg.table import Table

from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.catalog import catalog_at

_MAGIC = b"PFA1"
_VECTOR_MAGIC = b"\xd1\xd3\x39\x64"
_NULL_LONG = ["null", "long"]


def vector_blob(*positions: int) -> bytes:
    """Return the blob of a deletion vector with positions below 2**32."""
    bitmap = struct.pack("<qi", 1, 0) + pyroaring.BitMap(positions).serialize()
    body = _VECTOR_MAGIC + bitmap
    return struct.pack(">i", len(body)) + body + struct.pack(">I", zlib.crc32(body))


def puffin(*blobs: tuple[str, bytes]) -> tuple[bytes, list[int]]:
    """Return a Puffin file of (data file, deletion vector) pairs, and the offsets of its blobs."""
    body, offsets, entries = _MAGIC, [], []
    for data_file, blob in blobs:
        offsets.append(len(body))
        properties = {"referenced-data-file": data_file, "cardinality": "1"}
        entries.append(
            {
                "type": "deletion-vector-v1",
                "fields": [2147483546],
                "snapshot-id": -1,
                "sequence-number": -1,
                "offset": len(body),
                "length": len(blob),
                "properties": properties,
            }
        )
        body += blob
    footer = json.dumps({"blobs": entries, "properties": {}}).encode()
    return body + _MAGIC + footer + struct.pack("<i", len(footer)) + bytes(4) + _MAGIC, offsets


@dataclass(frozen=True)
class FormatV3Table:
    """A table ``ns.<name>`` of format version 3; paths are relative to the lakehouse's root."""

    lake: Lakehouse
    name: str
    id: str
    metadata_path: str
    puffin_path: str | None

    @property
    def loaded(self) -> Table:
        return catalog_at(self.lake).load_table(("ns", self.name))

    def ids(self, version: int | str | None = None) -> list[int]:
        """Return the ids of the rows that a reader sees."""
        with catalog_at(self.lake, version) as catalog:
            result = catalog.load_table(("ns", self.name)).scan().to_arrow()["id"].to_pylist()
        return sorted(result)


def make_format_v3_table(lake: Lakehouse, name: str, *, with_vectors: bool) -> FormatV3Table:
    """Append twice to a managed table, then upgrade it to version 3 and delete the first row of each append.

    Without vectors, no row is deleted and the table only has row lineage. Each append adds the rows 1, 2 and 3.
    """
    append_rows(lake, f"ns.{name}")
    append_rows(lake, f"ns.{name}")
    return _FormatV3Writer(lake, name).commit(with_vectors=with_vectors)


class _FormatV3Writer:
    def __init__(self, lake: Lakehouse, name: str):
        self.lake = lake
        self.name = name
        self.definition = lake.snapshot().table("ns", name)
        self.prefix = f"tables/{self.definition.id}/"
        path = self.definition.format_properties[METADATA_LOCATION]
        self.metadata: dict[str, Any] = json.loads(lake.storage.read(path))
        self.snapshot = self.metadata["snapshots"][-1]
        self.snapshot_id = self.snapshot["snapshot-id"] + 1

    def commit(self, *, with_vectors: bool) -> FormatV3Table:
        schema, manifests, header = self._read(self.snapshot["manifest-list"])
        schema["fields"].append({"name": "first_row_id", "type": _NULL_LONG, "default": None, "field-id": 520})
        for number, manifest in enumerate(manifests):
            manifest["first_row_id"] = 3 * number
        puffin_path = None
        if with_vectors:
            puffin_path = self._add_vectors(manifests)
        list_path = f"{self.prefix}metadata/snap-{self.snapshot_id}-0-{uuid.uuid4()}.avro"
        self._write(list_path, schema, manifests, {**header, **self._list_header()})
        metadata_path = self._write_metadata(list_path)
        properties = {**self.definition.format_properties, METADATA_LOCATION: metadata_path}
        with self.lake.transaction(message="by another engine") as txn:
            txn.alter_table("ns", self.name, replace(self.definition, format_properties=properties))
        return FormatV3Table(self.lake, self.name, self.definition.id, metadata_path, puffin_path)

    def _list_header(self) -> dict[str, str]:
        """Return the header of a manifest list."""
        return {
            "format-version": "3",
            "snapshot-id": str(self.snapshot_id),
            "parent-snapshot-id": str(self.snapshot["snapshot-id"]),
            "sequence-number": str(self.metadata["last-sequence-number"] + 1),
        }

    def _add_vectors(self, manifests: list[dict[str, Any]]) -> str:
        """Write a Puffin file with a vector for each data file, and a manifest that lists the vectors."""
        entries: list[dict[str, Any]] = []
        for manifest in manifests:
            schema, records, header = self._read(manifest["manifest_path"])
            entries += records
        data_files = [entry["data_file"]["file_path"] for entry in entries]
        data, offsets = puffin(*((path, vector_blob(0)) for path in data_files))
        path = f"{self.prefix}data/{uuid.uuid4()}.puffin"
        self.lake.storage.create(path, data)
        fields = next(field for field in schema["fields"] if field["name"] == "data_file")["type"]["fields"]
        fields += [
            {"name": "first_row_id", "type": _NULL_LONG, "default": None, "field-id": 142},
            {"name": "referenced_data_file", "type": ["null", "string"], "default": None, "field-id": 143},
            {"name": "content_offset", "type": _NULL_LONG, "default": None, "field-id": 144},
            {"name": "content_size_in_bytes", "type": _NULL_LONG, "default": None, "field-id": 145},
        ]
        vectors = []
        for data_file, offset in zip(data_files, offsets, strict=True):
            file = {
                **dict.fromkeys(entries[0]["data_file"]),
                "content": 1,
                "file_path": self.lake.root + path,
                "file_format": "PUFFIN",
                "partition": {},
                "record_count": 1,
                "file_size_in_bytes": len(data),
                "referenced_data_file": data_file,
                "content_offset": offset,
                "content_size_in_bytes": len(vector_blob(0)),
            }
            vectors.append({**entries[0], "status": 1, "snapshot_id": self.snapshot_id, "data_file": file})
            vectors[-1] |= {"sequence_number": None, "file_sequence_number": None}
        manifest_path = f"{self.prefix}metadata/{uuid.uuid4()}-m1.avro"
        header = {**header, "content": "deletes", "format-version": "3"}
        size_bytes = self._write(manifest_path, schema, vectors, header)
        manifests.append(
            {
                **manifests[0],
                "manifest_path": self.lake.root + manifest_path,
                "manifest_length": size_bytes,
                "content": 1,
                "sequence_number": self.metadata["last-sequence-number"] + 1,
                "min_sequence_number": self.metadata["last-sequence-number"] + 1,
                "added_snapshot_id": self.snapshot_id,
                "added_files_count": len(vectors),
                "existing_files_count": 0,
                "deleted_files_count": 0,
                "added_rows_count": len(vectors),
                "existing_rows_count": 0,
                "deleted_rows_count": 0,
                "first_row_id": None,
            }
        )
        return path

    def _write_metadata(self, list_path: str) -> str:
        sequence_number = self.metadata["last-sequence-number"] + 1
        snapshot = {
            **self.snapshot,
            "snapshot-id": self.snapshot_id,
            "parent-snapshot-id": self.snapshot["snapshot-id"],
            "sequence-number": sequence_number,
            "timestamp-ms": self.snapshot["timestamp-ms"] + 1,
            "manifest-list": self.lake.root + list_path,
            "first-row-id": 6,
            "added-rows": 0,
            "key-id": "k",
        }
        metadata_json = {
            **self.metadata,
            "format-version": 3,
            "next-row-id": 6,
            "encryption-keys": [{"key-id": "k", "encrypted-key-metadata": "AA==", "properties": {}}],
            "last-sequence-number": sequence_number,
            "last-updated-ms": snapshot["timestamp-ms"],
            "current-snapshot-id": self.snapshot_id,
            "snapshots": [*self.metadata["snapshots"], snapshot],
            "refs": {"main": {"snapshot-id": self.snapshot_id, "type": "branch"}},
        }
        metadata_json["snapshot-log"] = [
            *self.metadata["snapshot-log"],
            {"snapshot-id": self.snapshot_id, "timestamp-ms": snapshot["timestamp-ms"]},
        ]
        path = f"{self.prefix}metadata/00099-{uuid.uuid4()}.metadata.json"
        self.lake.storage.create(path, json.dumps(metadata_json).encode())
        return path

    def _read(self, uri: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
        return read_avro(self.lake, uri)

    def _write(self, path: str, schema: Any, records: list[dict[str, Any]], header: dict[str, str]) -> int:
        sink = io.BytesIO()
        fastavro.writer(sink, schema, records, codec="deflate", metadata=header)
        self.lake.storage.create(path, sink.getvalue())
        return len(sink.getvalue())


def read_avro(lake: Lakehouse, uri: str) -> tuple[dict[str, Any], list[dict[str, Any]], dict[str, str]]:
    """Return the schema, the records and the custom properties of an Avro file below the root."""
    reader = fastavro.reader(io.BytesIO(lake.storage.read(uri.removeprefix(lake.root))))
    records: list[Any] = list(reader)
    header = {name: value for name, value in reader.metadata.items() if not name.startswith("avro.")}
    return json.loads(reader.metadata["avro.schema"]), records, header
