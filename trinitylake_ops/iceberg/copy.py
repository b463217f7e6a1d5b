"""Copy managed tables to another location: list the files to copy, map their paths and rewrite files that contain
paths.

Iceberg stores full URIs in its files. Metadata files, manifest lists, manifests and position deletes are therefore
rewritten with the locations of the copies, and invalid bounds of data files are repaired. Nothing else in them changes.
Equal inputs always produce equal bytes, so an interrupted copy can be resumed.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import uuid
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import fastavro
from pyiceberg.manifest import ManifestEntryStatus

from trinitylake_ops.errors import CorruptFileError, InvalidInputError, TrinityLakeError
from trinitylake_ops.format.checksums import SEAL_KEYS
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import derived_uuid, table_prefix
from trinitylake_ops.iceberg.copied_deletes import (
    check_same_positions,
    is_copied_format,
    is_parquet,
    is_puffin,
    parquet_deletes,
    puffin_vectors,
    update_delete_entry,
)
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import COMPRESSED, metadata_json
from trinitylake_ops.iceberg.properties import settable_properties
from trinitylake_ops.iceberg.reach import FileKind, files_of
from trinitylake_ops.iceberg.validation.avro import AvroHeader, decompress
from trinitylake_ops.iceberg.validation.bounds import column_types, repair_record
from trinitylake_ops.iceberg.validation.checksums import sealed_table_file

#: Iceberg files that contain paths, in copy order: manifests record the sizes of delete files, and manifest lists the
#: sizes of manifests.
REWRITTEN = (FileKind.POSITION_DELETES, FileKind.MANIFEST, FileKind.MANIFEST_LIST, FileKind.METADATA)
#: The kind of files whose sizes a rewritten file records.
SIZED_IN = {FileKind.MANIFEST: FileKind.POSITION_DELETES, FileKind.MANIFEST_LIST: FileKind.MANIFEST}
_POSITION_DELETES = 1  # value of the field ``content`` in manifests

#: Header of an Avro file.
_HEADER = fastavro.parse_schema(
    {
        "type": "record",
        "name": "org.apache.avro.file.Header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "magic", "size": 4}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": 16}},
        ],
    }
)

_EXTERNAL_FOLDER = "elsewhere/"
_MAX_FILE_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A file of a table to copy."""

    kind: FileKind
    #: Path under the source root, or URI.
    source: str
    #: Path under the target root.
    target: str
    #: Size in bytes, or None if the table does not record it.
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class TableFileMap:
    """Maps the locations of a table's files to the locations of their copies.

    Under another root each file keeps its path. Under the same root it moves into ``folder``. An external file, for
    example one under another ``table_root``, moves into the table's folder.
    """

    table_id: str
    source_root: str
    target_root: str
    #: Root of the table's folder, if it differs from ``source_root``.
    table_root: str = ""
    #: Folder of the copies within the table's folder.
    folder: str = ""
    #: Root of the lakehouse that owns the copy, if the table's folder is not below it.
    holder_root: str = ""
    #: Files under this root are not copied and keep their URIs. The copies then have a separate ``folder``.
    kept_root: str = ""
    #: Paths of copies that already exist in the target, by source.
    existing: Mapping[str, str] = field(default_factory=dict)

    def location(self, path: str) -> str:
        """Return the path or URI by which the owning lakehouse refers to a path under ``target_root``."""
        return f"{self.target_root}{path}" if self.holder_root and self.holder_root != self.target_root else path

    def keeps(self, location: str) -> bool:
        """Whether a file, identified by its path or URI in the source, is not copied."""
        return self.kept_root != "" and location.startswith(self.kept_root)

    def is_copied(self, uri: str) -> bool:
        """Whether a URI in a rewritten Iceberg file refers to a copy."""
        return self.kept_root == "" or uri.startswith(f"{self.location_uri}/{self.folder}")

    def path(self, location: str) -> str:
        """Return the path of a copy under the target root, for a file identified by its path or URI."""
        if location in self.existing:
            return self.existing[location]
        prefix = table_prefix(self.table_id)
        path = location
        for root in (self.source_root, self.table_root):
            path = path.removeprefix(root) if root else path
        if path.startswith(prefix):
            return f"{prefix}{self.folder}{path.removeprefix(prefix)}"
        file_name = location.rpartition("/")[2].encode()[-_MAX_FILE_NAME_BYTES:].decode(errors="ignore")
        # The UUID is a folder and not part of the file name, because checksums inside files depend on the name.
        return f"{prefix}{self.folder}{_EXTERNAL_FOLDER}{derived_uuid(uuid.NAMESPACE_URL, location)}/{file_name}"

    def uri(self, io: StorageFileIO, uri: str) -> str:
        """Return the URI of the copy of a file.

        Args:
            io: File IO of the source table.
            uri: URI in an Iceberg file of the source.
        """
        location = io.location(uri)
        return location if self.keeps(location) else self.target_root + self.path(location)

    @property
    def location_uri(self) -> str:
        """The new location of the table: its folder under the target's root."""
        return f"{self.target_root}{table_prefix(self.table_id)}".rstrip("/")


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A managed Iceberg table to copy, with all its files."""

    places: TableFileMap
    files: tuple[FileCopy, ...]

    @classmethod
    def of(cls, definition: TableDef, io: StorageFileIO, places: TableFileMap) -> TableCopy:
        """Return the copy of all files that a table needs. Previous metadata files are not copied.

        Args:
            definition: Definition of the table.
            io: Reads the table's files.
            places: Maps its files to their copies.

        Raises:
            InvalidInputError: The table has position deletes in a format that cannot be rewritten.
            StorageError: A file cannot be read.
        """
        files = []
        for file in files_of(definition, io):
            if places.keeps(file.location) or file.location in places.existing:
                continue
            if file.kind == FileKind.POSITION_DELETES and file.live and not is_copied_format(file.location):
                raise InvalidInputError(
                    f"cannot copy table {definition.id}: its position deletes are in a format that cannot be rewritten"
                    f" with other paths ({file.location!r}); rewrite its data files with the engine that wrote them, or"
                    " leave its namespace out"
                )
            if file.live:
                files.append(FileCopy(file.kind, file.location, places.path(file.location), file.size_bytes))
        return cls(places, tuple(files))

    def metadata_location(self, definition: TableDef, io: StorageFileIO) -> str:
        """Return the location of the copy of the table's current metadata file in the lakehouse that owns the copy.

        Args:
            definition: Definition of the source table.
            io: File IO of the source table.
        """
        return self.places.location(self.places.path(io.location(metadata_uri(definition, io.root))))


def rewrite_file(
    copy: FileCopy, data: bytes, io: StorageFileIO, places: TableFileMap, sizes_bytes: Mapping[str, int]
) -> bytes:
    """Return the contents of the copy of a file that contains paths.

    Args:
        copy: The file.
        data: Contents of the source.
        io: File IO of the source table.
        places: Maps files to their copies.
        sizes_bytes: Sizes of the copies whose sizes the file records, by target path.

    Raises:
        CorruptFileError: The file cannot be decoded or encoded.
    """

    def new_uri(uri: str) -> str:
        return places.uri(io, uri)

    try:
        return sealed_table_file(_rewritten(copy, data, new_uri, places, sizes_bytes), copy.target)
    except TrinityLakeError:
        raise
    except Exception as error:  # decoders raise arbitrary exceptions for corrupt input
        raise CorruptFileError(
            f"{copy.source!r} cannot be copied as an Iceberg {copy.kind}: {type(error).__name__}", path=copy.source
        ) from error


def _rewritten(
    copy: FileCopy,
    data: bytes,
    new_uri: Callable[[str], str],
    places: TableFileMap,
    sizes_bytes: Mapping[str, int],
) -> bytes:
    if copy.kind == FileKind.METADATA:
        return _metadata(copy.source, data, new_uri, places)
    if copy.kind == FileKind.MANIFEST_LIST:
        return avro_with(copy.source, data, lambda record: _relocate_manifest(record, new_uri, places, sizes_bytes))
    if copy.kind == FileKind.POSITION_DELETES:
        return _position_deletes(copy, data, new_uri)
    header = AvroHeader.of(data)
    types = column_types(header.metadata.get("schema") if header is not None else None)

    def relocate(record: dict[str, Any]) -> None:
        _relocate_data_file(record, new_uri, places, sizes_bytes)
        repair_record(record, types)

    return avro_with(copy.source, data, relocate)


def _position_deletes(copy: FileCopy, data: bytes, new_uri: Callable[[str], str]) -> bytes:
    if is_parquet(data):
        return parquet_deletes(data, copy.source, copy.target, new_uri)
    if is_puffin(data):
        return puffin_vectors(data, copy.source, new_uri)
    before: defaultdict[str, list[int]] = defaultdict(list)
    after: defaultdict[str, list[int]] = defaultdict(list)

    def relocate(record: dict[str, Any]) -> None:
        record["file_path"] = new_uri(record["file_path"])
        before[record["file_path"]].append(record["pos"])

    written = avro_with(copy.source, data, relocate)
    avro_with(copy.target, written, lambda record: after[record["file_path"]].append(record["pos"]))
    check_same_positions(before, after, copy.source)
    return written


def _metadata(location: str, data: bytes, new_uri: Callable[[str], str], places: TableFileMap) -> bytes:
    is_compressed = location.endswith(COMPRESSED)
    metadata: dict[str, Any] = json.loads(metadata_json(data, location))
    metadata["properties"] = settable_properties(metadata.get("properties") or {})
    for key in SEAL_KEYS:
        metadata.pop(key, None)  # they are bound to the name of the source file
    metadata["location"] = places.location_uri
    metadata["metadata-log"] = []  # previous metadata files are not copied
    for snapshot in metadata.get("snapshots") or ():
        snapshot["manifest-list"] = new_uri(snapshot["manifest-list"])
    for kind in ("statistics", "partition-statistics"):
        for file in metadata.get(kind) or ():
            file["statistics-path"] = new_uri(file["statistics-path"])
    text = json.dumps(metadata, separators=(",", ":"), ensure_ascii=False).encode()
    return gzip.compress(text, compresslevel=zlib.Z_BEST_COMPRESSION, mtime=0) if is_compressed else text


def _relocate_manifest(
    record: dict[str, Any], new_uri: Callable[[str], str], places: TableFileMap, sizes_bytes: Mapping[str, int]
) -> None:
    record["manifest_path"] = new_uri(record["manifest_path"])
    if places.is_copied(record["manifest_path"]):
        record["manifest_length"] = sizes_bytes[record["manifest_path"].removeprefix(places.target_root)]


def _relocate_data_file(
    record: dict[str, Any], new_uri: Callable[[str], str], places: TableFileMap, sizes_bytes: Mapping[str, int]
) -> None:
    data_file = record["data_file"]
    data_file["file_path"] = new_uri(data_file["file_path"])
    if data_file.get("referenced_data_file"):
        data_file["referenced_data_file"] = new_uri(data_file["referenced_data_file"])
    is_deletes = data_file.get("content") == _POSITION_DELETES and record["status"] != ManifestEntryStatus.DELETED
    if is_deletes and places.is_copied(data_file["file_path"]):
        update_delete_entry(data_file, new_uri, sizes_bytes[data_file["file_path"].removeprefix(places.target_root)])


def avro_with(location: str, data: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """Return an Avro file with changed records, and the same schema, codec and properties.

    Values are read in their stored form because dates and times may exceed Python's range.

    Args:
        location: Location of the file, for errors.
        data: Contents of the file.
        change: Changes a record in place.
    """
    content = decompress(data, location)
    schema, plain_schema = _schema_of(content.data)
    reader = fastavro.reader(io.BytesIO(_with_schema(content.data, json.dumps(plain_schema).encode())))
    records: list[dict[str, Any]] = []
    for record in reader:
        assert isinstance(record, dict)
        change(record)
        records.append(record)
    custom_properties = {
        name: value for name, value in reader.metadata.items() if not name.startswith("avro.") and name not in SEAL_KEYS
    }
    written = io.BytesIO()
    fastavro.writer(
        written,
        plain_schema,
        records,
        codec=content.codec,
        metadata=custom_properties,
        sync_marker=hashlib.md5(data, usedforsecurity=False).digest(),
    )
    return _with_schema(written.getvalue(), schema)


def _schema_of(data: bytes) -> tuple[bytes, Any]:
    """Return the raw schema of an Avro file, and the parsed schema without logical types."""
    header: Any = fastavro.schemaless_reader(io.BytesIO(data), _HEADER, None)
    schema = header["meta"]["avro.schema"]
    return schema, json.loads(schema, object_pairs_hook=_without_logical_type)


def _without_logical_type(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name != "logicalType"}


def _with_schema(data: bytes, schema: bytes) -> bytes:
    """Return an Avro file with another schema of the same layout."""
    blocks = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(blocks, _HEADER, None)
    written = io.BytesIO()
    fastavro.schemaless_writer(written, _HEADER, {**header, "meta": {**header["meta"], "avro.schema": schema}})
    return written.getvalue() + data[blocks.tell() :]


def copied_definition(definition: TableDef, metadata_location: str) -> TableDef:
    """Return the definition of a copied table with the location of its metadata file."""
    properties = {**definition.format_properties, METADATA_LOCATION: metadata_location}
    return replace(definition, format_properties=properties)
