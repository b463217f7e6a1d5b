"""Load and write the metadata of Iceberg tables. No other module parses metadata JSON.

Metadata files are untrusted: their JSON is inflated and parsed within bounds, properties that name classes or
connections or have invalid values are dropped, and metadata loaded for a definition must be that of the definition's
table.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from pydantic import PrivateAttr
from pydantic import ValidationError as PydanticError
from pyiceberg.io import FileIO, OutputFile
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.schema import index_by_id
from pyiceberg.serializers import Compressor
from pyiceberg.table.metadata import TableMetadata, TableMetadataUtil
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.types import DecimalType, FixedType
from pyiceberg.utils.config import Config

from trinitylake_ops.errors import CorruptFileError, MetadataTooLargeError, TrinityLakeError
from trinitylake_ops.format.definitions import TABLE_UUID, TableDef
from trinitylake_ops.format.file_names import is_table_metadata_path, table_prefix
from trinitylake_ops.iceberg.io.checked_files import at_managed_location
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import metadata_uri, table_id_of
from trinitylake_ops.iceberg.properties import (
    PATH_PROPERTIES,
    invalid_properties,
    naming_code,
    not_allowed,
    remove_invalid_counts,
)
from trinitylake_ops.iceberg.types import with_typed_specs
from trinitylake_ops.iceberg.validation.inflate import (
    InflatedTooLargeError,
    inflate_gzip,
    inflated_limit_bytes,
    too_large,
)
from trinitylake_ops.iceberg.validation.metadata_size import (
    PARSE_GATE,
    check_served_size,
    excess_of,
    is_smaller,
    metadata_too_large,
)
from trinitylake_ops.iceberg.validation.thrift import MAX_NAME_CHARS, full_name_chars
from trinitylake_ops.storage.cache.memory import ByteLru

#: Suffixes of compressed metadata files.
COMPRESSED = (".gz.metadata.json", ".metadata.json.gz")
#: Maximum number of values in the JSON of one file. A value takes tens of bytes in a parser, even if it has only two
#: bytes in the file.
MAX_VALUES = 4_000_000
_FILE_BYTES_PER_VALUE = 4
_ALWAYS_ALLOWED_VALUES = 250_000
#: Maximum number of entries of any list or mapping in metadata, such as snapshots or properties. Each entry becomes an
#: object.
MAX_ITEMS = 100_000
#: Maximum number of fields and nested types in all schemas together. These become the most expensive objects.
MAX_SCHEMA_PARTS = 200_000
_MAX_INT32 = 2**31 - 1
#: Number of digits of the widest decimal. PyIceberg allocates as many digits as a scale declares.
_MAX_DECIMAL_DIGITS = 38
#: Number of bytes that each part of a schema adds to the cached size, in addition to its JSON, because it takes three
#: times as much memory as other JSON. The largest accepted schemas fit into :data:`LARGE_PARSED_BYTES`.
_BYTES_PER_SCHEMA_PART = 64
#: Maximum total JSON size of large metadata that a process caches in parsed form. Parsed metadata takes about six times
#: as much memory.
LARGE_PARSED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LoadedMetadata:
    """Validated metadata, and the names of dropped properties."""

    metadata: TableMetadata
    #: Dropped properties whose values engines would load as classes.
    naming_code: tuple[str, ...]
    #: Dropped properties that clients could interpret as connection settings.
    connecting: tuple[str, ...] = ()
    #: Size in bytes that counts against the capacity of a cache.
    kept_bytes: int = 0


class InlineSnapshot(Snapshot):
    """A snapshot of format version 1 that lists its manifests directly, without a manifest list."""

    _inline: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def of(cls, snapshot: Snapshot, manifests: tuple[str, ...]) -> InlineSnapshot:
        """Return a snapshot with the given manifest URIs."""
        inline = cls.model_construct(snapshot.model_fields_set, **dict(snapshot))
        inline._inline = manifests
        return inline

    @property
    def manifest_paths(self) -> tuple[str, ...]:
        """The URIs of the manifests."""
        return self._inline

    def manifests(self, io: FileIO) -> list[ManifestFile]:
        """Return the manifests with the fields that are known without reading them."""
        return [
            ManifestFile.from_args(
                manifest_path=path,
                manifest_length=len(io.new_input(path)),
                partition_spec_id=0,
                content=ManifestContent.DATA,
                sequence_number=0,
                min_sequence_number=0,
                added_snapshot_id=None,  # it may be an earlier snapshot
            )
            for path in self._inline
        ]


def metadata_json(data: bytes, location: str, served_bytes: int | None = None) -> bytes:
    """Return the JSON text of a metadata file.

    Args:
        data: Contents of the file.
        location: URI of the file.
        served_bytes: Maximum size of the text that the caller accepts; None for any.

    Raises:
        CorruptFileError: The file is corrupt or has too many values.
        MetadataTooLargeError: The text is larger than ``served_bytes``.
    """
    limit_bytes = inflated_limit_bytes(len(data))
    if served_bytes is not None:
        limit_bytes = min(limit_bytes, served_bytes)
    try:
        is_compressed = location.endswith(COMPRESSED)
        text = inflate_gzip(data, limit_bytes) if is_compressed else data
    except InflatedTooLargeError as error:
        if limit_bytes == served_bytes:
            raise metadata_too_large(location, limit_bytes + 1, limit_bytes) from error
        raise too_large(location, len(data)) from error
    except Exception as error:
        raise _invalid_metadata(location, type(error).__name__) from error
    if served_bytes is not None:
        check_served_size(text, location, served_bytes)
    # Counting the value separators, including those in strings, is cheap.
    n_values = sum(text.count(separator) for separator in (b",", b"[", b"{"))
    if n_values > min(MAX_VALUES, _ALWAYS_ALLOWED_VALUES + len(data) // _FILE_BYTES_PER_VALUE):
        raise too_large(location, len(data))
    return text


class ParsedMetadata:
    """A cache of parsed metadata files, for a process that loads the same tables repeatedly.

    Only files of the lakehouse itself are cached, whose names are never reused and whose contents never change.

    Args:
        capacity_bytes: Maximum total JSON size. Parsed metadata takes several times as much memory. Files larger than
            an eighth of the capacity share :data:`LARGE_PARSED_BYTES` instead.
    """

    def __init__(self, capacity_bytes: int):
        self._cache: ByteLru[str, LoadedMetadata] = ByteLru(capacity_bytes, LARGE_PARSED_BYTES)

    def get(self, uri: str) -> LoadedMetadata | None:
        """Return the cached metadata of a file. Callers must not change it."""
        return self._cache.get(uri)

    def put(self, root: str, uri: str, loaded: LoadedMetadata) -> None:
        """Cache the metadata of a file of the lakehouse at ``root``. Other files are ignored.

        Args:
            root: Root of the lakehouse.
            uri: URI of the file.
            loaded: The metadata in the file.
        """
        if uri.startswith(root) and is_table_metadata_path(uri.removeprefix(root)):
            self._cache.put(uri, loaded, loaded.kept_bytes)


def write_metadata(metadata: TableMetadata, output: OutputFile, before: TableMetadata | None = None) -> None:
    """Write a metadata file.

    PyIceberg's own function reads all environment variables at each call, so it is not used.

    Args:
        metadata: The metadata.
        output: The file.
        before: The previous metadata. If it is already too large, smaller metadata is accepted.

    Raises:
        MetadataTooLargeError: The metadata is too large for a server to read, and not smaller than before.
        StorageError: The file cannot be written.
    """
    text = _to_json(metadata)
    excess = excess_of(text)
    if excess is not None and (before is None or not is_smaller(text, _to_json(before))):
        raise MetadataTooLargeError(
            f"metadata of the table was not written: it would have {excess}; drop snapshots with 'trinitylake trim',"
            " remove refs, properties and statistics, or use shorter strings"
        )
    with output.create() as stream:
        stream.write(Compressor.get_compressor(output.location).bytes_compressor()(text))


def _to_json(metadata: TableMetadata) -> bytes:
    return metadata.model_dump_json(exclude_none=not _writes_missing_snapshots()).encode()


@functools.cache
def _writes_missing_snapshots() -> bool:
    """Whether PyIceberg is configured to write a current snapshot id of -1 for tables without snapshots."""
    return bool(Config().get_bool("legacy-current-snapshot-id"))


def load_metadata(io: StorageFileIO, uri: str, parsed: ParsedMetadata | None = None) -> LoadedMetadata:
    """Read an Iceberg metadata file, or return it from the cache.

    Args:
        io: The table's file IO.
        uri: URI of the file.
        parsed: The cache, if any.

    Raises:
        CorruptFileError: The file is not valid metadata.
        FileMissingError: The file does not exist.
        StorageError: The file cannot be read.
    """
    cached = None if parsed is None else parsed.get(uri)
    if cached is not None:
        return cached
    text = metadata_json(io.new_input(uri).read_whole(io.metadata_limit_bytes), uri, io.metadata_limit_bytes)
    if parsed is None:
        return parse_metadata(text, uri)
    with PARSE_GATE.admit(len(text)):
        cached = parsed.get(uri)  # another thread may have parsed it while this one read or waited
        if cached is not None:
            return cached
        loaded = _parse(text, uri)
        parsed.put(io.root, uri, loaded)
    return loaded


def parse_metadata(text: bytes, uri: str) -> LoadedMetadata:
    """Parse a metadata file.

    Args:
        text: The JSON text of the file.
        uri: The URI of the file, for errors.

    Raises:
        CorruptFileError: The text is not valid metadata.
    """
    with PARSE_GATE.admit(len(text)):
        return _parse(text, uri)


def _parse(text: bytes, uri: str) -> LoadedMetadata:
    try:
        decoded = text.decode()
        content = json.loads(decoded, object_hook=_yield_interpreter)
        del decoded
        n_parts = _check_items(content, uri)
        inline = _inline_manifests(content) if b'"manifests"' in text else {}
        for snapshot in content["snapshots"] if inline else ():
            snapshot.setdefault("manifest-list", "")  # PyIceberg requires it
        parsed = TableMetadataUtil.parse_obj(content)
        del content
        if inline:
            snapshots = [
                InlineSnapshot.of(snapshot, inline[snapshot.snapshot_id])
                if snapshot.snapshot_id in inline
                else snapshot
                for snapshot in parsed.snapshots
            ]
            parsed = parsed.model_copy(update={"snapshots": snapshots})
        _check_semantics(parsed)
    except TrinityLakeError:
        raise
    except Exception as error:  # PyIceberg's validators raise arbitrary exceptions for invalid JSON
        raise _invalid_metadata(uri, _reason(error)) from error
    remove_invalid_counts(parsed.snapshots)
    loaded = _without_rejected(with_typed_specs(parsed))
    return replace(loaded, kept_bytes=len(text) + _BYTES_PER_SCHEMA_PART * n_parts)


def _yield_interpreter(value: dict[str, Any]) -> dict[str, Any]:
    """Return the value unchanged. Calling it lets other threads acquire the interpreter lock during decoding."""
    return value


def read_table_metadata(io: StorageFileIO, uri: str) -> TableMetadata:
    """Read a metadata file of any table, without properties that name classes.

    If you have a definition, use :func:`table_metadata`.

    Args:
        io: The table's file IO.
        uri: URI of the file.

    Raises:
        CorruptFileError: The file is not valid metadata.
        FileMissingError: The file does not exist.
        StorageError: The file cannot be read.
    """
    return load_metadata(io, uri).metadata


def table_metadata(definition: TableDef, io: StorageFileIO, parsed: ParsedMetadata | None = None) -> TableMetadata:
    """Read the metadata of a definition's table. A MANAGED table must be at its managed location.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.
        parsed: Cache of parsed files, used for MANAGED tables.

    Raises:
        InvalidDefinitionError: The definition has no metadata file.
        CorruptFileError: The file is not valid metadata, or is metadata of another table.
        LocationNotAllowedError: The file is at a location that may not be read.
        FileMissingError: The file does not exist.
        StorageError: The file cannot be read.
    """
    return load_table_metadata(definition, io, parsed).metadata


def load_table_metadata(
    definition: TableDef, io: StorageFileIO, parsed: ParsedMetadata | None = None
) -> LoadedMetadata:
    """Return the result of :func:`table_metadata` with the names of dropped properties."""
    uri = metadata_uri(definition, io.root)
    reader = io if definition.is_managed else io.strict()
    loaded = load_metadata(reader, uri, parsed if definition.is_managed else None)
    metadata = loaded.metadata
    check_identity(definition, metadata, uri)
    if any(name in metadata.properties for name in PATH_PROPERTIES):
        kept = {name: value for name, value in metadata.properties.items() if name not in PATH_PROPERTIES}
        metadata = metadata.model_copy(update={"properties": kept})
    if definition.is_managed:
        metadata = at_managed_location(metadata, definition, io)
    return replace(loaded, metadata=metadata)


def walked_metadata(definition: TableDef, io: StorageFileIO) -> TableMetadata:
    """Read metadata to find the files that a definition refers to. It may be another table's metadata file.

    In a table's own folder it must be metadata of that table, because swapped files would not name all files that the
    table needs. Raises the errors of :func:`table_metadata`.
    """
    uri = metadata_uri(definition, io.root)
    if definition.is_managed and f"/{table_prefix(definition.id)}" in uri:
        return table_metadata(definition, io)
    return at_managed_location(read_table_metadata(io, uri), definition, io)


def check_identity(definition: TableDef, metadata: TableMetadata, uri: str) -> None:
    """Raise CorruptFileError if metadata does not belong to the table of a definition.

    Args:
        definition: Definition of the table.
        metadata: The metadata.
        uri: URI of the metadata file.

    Raises:
        CorruptFileError: The location or table UUID differs.
    """
    if definition.is_managed and table_id_of(metadata.location) != definition.id:
        raise misplaced_error(definition, uri, f"its location is {metadata.location[:200]!r}")
    expected_uuid = definition.format_properties.get(TABLE_UUID)
    if expected_uuid is not None and expected_uuid != str(metadata.table_uuid):
        raise misplaced_error(
            definition, uri, f"its table-uuid is {metadata.table_uuid}, expected {expected_uuid[:36]}"
        )


def misplaced_error(definition: TableDef, uri: str, how: str) -> CorruptFileError:
    """Return the error for metadata that does not belong to the table of a definition.

    Args:
        definition: Definition of the table.
        uri: URI of the metadata file.
        how: What differs.
    """
    return CorruptFileError(
        f"{uri!r} is not the metadata of table {definition.id!r}: {how}; files were swapped or moved, restore the file",
        path=uri,
    )


def _without_rejected(metadata: TableMetadata) -> LoadedMetadata:
    code_names = naming_code(metadata.properties)
    connecting = tuple(name for name in not_allowed(metadata.properties) if name not in code_names)
    dropped = {*code_names, *connecting, *invalid_properties(metadata.properties)}
    if dropped:
        kept = {name: value for name, value in metadata.properties.items() if name not in dropped}
        metadata = metadata.model_copy(update={"properties": kept})
    return LoadedMetadata(metadata, code_names, connecting)


def _check_items(content: Any, location: str) -> int:
    """Return the number of parts of the schemas in metadata JSON.

    Raises CorruptFileError if there are too many values or duplicate snapshot ids.
    """
    if not isinstance(content, dict):
        return 0
    _count_mappings(content, location)
    n_parts = _count_mappings([content.get("schemas"), content.get("schema")], location)
    if n_parts > MAX_SCHEMA_PARTS:
        raise _too_many(f"{MAX_SCHEMA_PARTS} fields in its schemas", location)
    if sum(map(full_name_chars, _schemas_in(content))) > MAX_NAME_CHARS:
        raise _too_many(f"{MAX_NAME_CHARS} characters in the full names of its fields", location)
    snapshots = content.get("snapshots")
    ids = Counter(shot.get("snapshot-id") for shot in snapshots or () if isinstance(shot, dict))
    duplicate = next((snapshot_id for snapshot_id, count in ids.items() if count > 1), None)
    if duplicate is not None:
        raise CorruptFileError(f"{location!r} has snapshot {duplicate!r:.40} more than once; restore it", path=location)
    return n_parts


def _check_semantics(metadata: TableMetadata) -> None:
    """Raise ValueError for an invalid type, transform or sort column, on which readers would fail only later."""
    # Two schemas may use the same id for different columns.
    columns = [column for schema in metadata.schemas for column in index_by_id(schema).values()]
    for column in columns:
        if isinstance(column.field_type, FixedType) and not 0 < column.field_type.root <= _MAX_INT32:
            raise ValueError(f"column {column.field_id} has an invalid fixed size")
        if isinstance(column.field_type, DecimalType) and not 0 <= column.field_type.scale <= _MAX_DECIMAL_DIGITS:
            raise ValueError(f"column {column.field_id} has an invalid decimal scale")
    sorted_by = [field for order in metadata.sort_orders for field in order.fields]
    parted_by = [field for spec in metadata.partition_specs for field in spec.fields]
    for transform in (*(field.transform for field in parted_by), *(field.transform for field in sorted_by)):
        if not 0 < getattr(transform, "num_buckets", getattr(transform, "width", 1)) <= _MAX_INT32:
            raise ValueError(f"transform {str(transform)[:40]!r} has an invalid parameter")
    column_ids = {column.field_id for column in columns}
    if unknown := next((field.source_id for field in sorted_by if field.source_id not in column_ids), None):
        raise ValueError(f"a sort order refers to column {unknown}, which no schema has")


def _schemas_in(content: dict[str, Any]) -> list[Any]:
    schemas = content.get("schemas")
    return [*(schemas if isinstance(schemas, list) else ()), content.get("schema")]


def _count_mappings(value: Any, location: str) -> int:
    """Return the number of mappings in a value. Raises CorruptFileError for a part with too many items."""
    n_mappings = 0
    rest = [value]
    while rest:
        part = rest.pop()
        if len(part) > MAX_ITEMS:
            raise _too_many(f"{MAX_ITEMS} items in one list or mapping", location)
        n_mappings += isinstance(part, dict)
        items = part.values() if isinstance(part, dict) else part
        rest += (item for item in items if isinstance(item, dict | list))
    return n_mappings


def _too_many(most: str, location: str) -> CorruptFileError:
    return CorruptFileError(
        f"{location!r} has more than {most}, unlike any table's metadata; restore it", path=location
    )


def _inline_manifests(content: Any) -> dict[int, tuple[str, ...]]:
    """Return the manifests of snapshots without a manifest list, by snapshot id."""
    snapshots: Any = content.get("snapshots") or ()
    return {
        int(shot["snapshot-id"]): tuple(map(str, shot["manifests"]))
        for shot in snapshots
        if not shot.get("manifest-list") and shot.get("manifests")
    }


def _reason(error: Exception) -> str:
    """Describe an error without quoting the file, because it may be an arbitrary file that contains secrets."""
    cause = error.__cause__ if isinstance(error.__cause__, PydanticError) else error
    if isinstance(error, json.JSONDecodeError):
        return "Invalid JSON"
    if isinstance(cause, PydanticError):
        is_single = cause.error_count() == 1  # the text of many errors is longer than the file
        if is_single and cause.errors(include_input=False)[0]["type"] == "json_invalid":
            return "Invalid JSON"
        return f"{cause.error_count()} of its fields are invalid"
    return type(error).__name__


def _invalid_metadata(location: str, reason: str) -> CorruptFileError:
    return CorruptFileError(f"{location!r} is not valid Iceberg table metadata: {reason}; restore it", path=location)
