"""Copy managed tables to another location: which files a copy has, where they are, and the bytes of rewritten ones.

Iceberg writes full URIs into its own files, so a copy of a table is more than copies of its files. The metadata file,
manifest lists, manifests and position deletes are rewritten with the locations of the copies. Faulty bounds of data
files are repaired. Nothing else in them changes. The same file always gives the same bytes, so a copy that was cut off
can continue.
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
from trinitylake_ops.iceberg.properties import usable
from trinitylake_ops.iceberg.reach import FileKind, files_of
from trinitylake_ops.iceberg.validation.avro import AvroHeader, uncompressed
from trinitylake_ops.iceberg.validation.bounds import column_types, repair_record
from trinitylake_ops.iceberg.validation.checksums import sealed_table_file

#: Iceberg files that hold paths. Manifests hold the sizes of delete files, and lists those of manifests, so these come
#: before those.
REWRITTEN = (FileKind.POSITION_DELETES, FileKind.MANIFEST, FileKind.MANIFEST_LIST, FileKind.METADATA)
#: The files whose sizes a file that is written anew holds.
SIZED_IN = {FileKind.MANIFEST: FileKind.POSITION_DELETES, FileKind.MANIFEST_LIST: FileKind.MANIFEST}
_POSITION_DELETES = 1  # the content of a file, as manifests say it

#: The first bytes of an Avro file.
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

_ELSEWHERE = "elsewhere/"
_LONGEST_OWN_NAME_BYTES = 255


@dataclass(frozen=True, slots=True)
class FileCopy:
    """A file of a table to copy.

    ``source`` is a path under the root, or a URI, and ``target`` a path under the target's. ``size_bytes`` is None if
    the table does not say.
    """

    kind: FileKind
    source: str
    target: str
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class TableFileMap:
    """Where the files of one table are after the copy.

    Under another root each file keeps its path. Under the same root it goes into ``folder``. A file elsewhere, for
    example under another ``table_root``, comes into the table's folder, too. ``holder_root`` is the root of the
    lakehouse that has the copy, where the table's folder is not below it. Files under ``kept_root`` are not copied and
    keep their URIs; the copies then have a ``folder`` of their own. ``existing`` are copies that the target has
    already: source -> path there.
    """

    table_id: str
    source_root: str
    target_root: str
    table_root: str = ""
    folder: str = ""
    holder_root: str = ""
    kept_root: str = ""
    existing: Mapping[str, str] = field(default_factory=dict)

    def location(self, path: str) -> str:
        """Return the location, in the lakehouse that has the copy, of a path under ``target_root``: a path or a URI."""
        return f"{self.target_root}{path}" if self.holder_root and self.holder_root != self.target_root else path

    def keeps(self, location: str) -> bool:
        """Whether a file, given as a path or URI of the source, stays where it is."""
        return self.kept_root != "" and location.startswith(self.kept_root)

    def is_copied(self, uri: str) -> bool:
        """Whether a URI in a new file of Iceberg's is that of a copy."""
        return self.kept_root == "" or uri.startswith(f"{self.location_uri}/{self.folder}")

    def path(self, location: str) -> str:
        """Return the path, under the target's root, of the copy of a file, given as a path or URI."""
        if location in self.existing:
            return self.existing[location]
        prefix = table_prefix(self.table_id)
        path = location
        for root in (self.source_root, self.table_root):
            path = path.removeprefix(root) if root else path
        if path.startswith(prefix):
            return f"{prefix}{self.folder}{path.removeprefix(prefix)}"
        own_name = location.rpartition("/")[2].encode()[-_LONGEST_OWN_NAME_BYTES:].decode(errors="ignore")
        # The uuid is in a folder, not in the name, as checksums within files are bound to the name.
        return f"{prefix}{self.folder}{_ELSEWHERE}{derived_uuid(uuid.NAMESPACE_URL, location)}/{own_name}"

    def uri(self, io: StorageFileIO, uri: str) -> str:
        """Return the new form of a URI in a file of Iceberg's. ``io`` is that of the source."""
        location = io.location(uri)
        return location if self.keeps(location) else self.target_root + self.path(location)

    @property
    def location_uri(self) -> str:
        """The new location of the table itself: its folder under the target's root."""
        return f"{self.target_root}{table_prefix(self.table_id)}".rstrip("/")


@dataclass(frozen=True, slots=True)
class TableCopy:
    """A managed Iceberg table to copy, with all its files."""

    places: TableFileMap
    files: tuple[FileCopy, ...]

    @classmethod
    def of(cls, definition: TableDef, io: StorageFileIO, places: TableFileMap) -> TableCopy:
        """Return the copy of all files that a table needs. Former metadata files are not copied.

        Args:
            definition: The table.
            io: Reads its files.
            places: The locations of the copies.

        Raises:
            InvalidInputError: The table has position deletes in a format that cannot be written with other paths.
            StorageError: A file cannot be read.
        """
        files = []
        for file in files_of(definition, io):
            if places.keeps(file.location) or file.location in places.existing:
                continue
            if file.kind == FileKind.POSITION_DELETES and file.live and not is_copied_format(file.location):
                raise InvalidInputError(
                    f"table {definition.id} has position deletes in a format that cannot be rewritten with other paths"
                    f" ({file.location!r}); let the engine that wrote them rewrite its data files, or leave its"
                    " namespace out"
                )
            if file.live:
                files.append(FileCopy(file.kind, file.location, places.path(file.location), file.size_bytes))
        return cls(places, tuple(files))

    def metadata_location(self, definition: TableDef, io: StorageFileIO) -> str:
        """Return the location, in the lakehouse that has the copy, of the copy of the table's current metadata file."""
        return self.places.location(self.places.path(io.location(metadata_uri(definition, io.root))))


def rewritten(
    copy: FileCopy, data: bytes, io: StorageFileIO, places: TableFileMap, sizes_bytes: Mapping[str, int]
) -> bytes:
    """Return the bytes of a copy of a file that holds paths.

    ``sizes_bytes`` are those of the copies that it gives sizes of, by target. Raises CorruptFileError for a file that
    cannot be decoded, or not be written again as it was.
    """

    def new_uri(uri: str) -> str:
        return places.uri(io, uri)

    try:
        return sealed_table_file(_rewritten(copy, data, new_uri, places, sizes_bytes), copy.target)
    except TrinityLakeError:
        raise
    except Exception as error:  # for broken bytes the decoders raise any exception
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

    def place(record: dict[str, Any]) -> None:
        _relocate_data_file(record, new_uri, places, sizes_bytes)
        repair_record(record, types)

    return avro_with(copy.source, data, place)


def _position_deletes(copy: FileCopy, data: bytes, new_uri: Callable[[str], str]) -> bytes:
    if is_parquet(data):
        return parquet_deletes(data, copy.source, copy.target, new_uri)
    if is_puffin(data):
        return puffin_vectors(data, copy.source, new_uri)
    before: defaultdict[str, list[int]] = defaultdict(list)
    after: defaultdict[str, list[int]] = defaultdict(list)

    def place(record: dict[str, Any]) -> None:
        record["file_path"] = new_uri(record["file_path"])
        before[record["file_path"]].append(record["pos"])

    written = avro_with(copy.source, data, place)
    avro_with(copy.target, written, lambda record: after[record["file_path"]].append(record["pos"]))
    check_same_positions(before, after, copy.source)
    return written


def _metadata(location: str, data: bytes, new_uri: Callable[[str], str], places: TableFileMap) -> bytes:
    is_compressed = location.endswith(COMPRESSED)
    metadata: dict[str, Any] = json.loads(metadata_json(data, location))
    metadata["properties"] = usable(metadata.get("properties") or {})
    for key in SEAL_KEYS:
        metadata.pop(key, None)  # the name of the copied file
    metadata["location"] = places.location_uri
    metadata["metadata-log"] = []  # former metadata files stay behind
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
    """Return an Avro file with changed records. Its schema, codec and properties stay as they were.

    Values are read as they are stored, as dates and times may lie beyond what Python can count.
    """
    content = uncompressed(data, location)
    schema, plain = _schema_of(content.data)
    reader = fastavro.reader(io.BytesIO(_with_schema(content.data, json.dumps(plain).encode())))
    records: list[dict[str, Any]] = []
    for record in reader:
        assert isinstance(record, dict)
        change(record)
        records.append(record)
    own = {
        name: value for name, value in reader.metadata.items() if not name.startswith("avro.") and name not in SEAL_KEYS
    }
    written = io.BytesIO()
    fastavro.writer(
        written,
        plain,
        records,
        codec=content.codec,
        metadata=own,
        sync_marker=hashlib.md5(data, usedforsecurity=False).digest(),
    )
    return _with_schema(written.getvalue(), schema)


def _schema_of(data: bytes) -> tuple[bytes, Any]:
    """Return the schema of an Avro file, and the same schema without logical types."""
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
    """Return the definition of a copied table for a location of its metadata file."""
    properties = {**definition.format_properties, METADATA_LOCATION: metadata_location}
    return replace(definition, format_properties=properties)
