"""Loads and writes the metadata of Iceberg tables. Only here its JSON is read, and doubted.

The JSON is inflated and parsed within bounds. Properties that name code or a connection, or mean nothing, are left out.
By a definition, it must be the metadata of that definition's table.
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
    leave_out_meaningless_counts,
    meaningless,
    naming_code,
    not_allowed,
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

#: The endings of names of compressed metadata files.
COMPRESSED = (".gz.metadata.json", ".metadata.json.gz")
#: The most values in the JSON of one file. Each takes a parser tens of bytes, even if the file has two.
MAX_VALUES = 4_000_000
_FILE_BYTES_PER_VALUE = 4
_ALWAYS_ALLOWED_VALUES = 250_000
#: The most entries of any list or mapping in metadata, such as snapshots or properties. Each becomes an object.
MAX_ITEMS = 100_000
#: The most fields, and types that have parts, of all schemas together. They become the most expensive objects.
MAX_SCHEMA_PARTS = 200_000
_MOST = 2**31 - 1
#: The digits of the widest decimal. pyiceberg allocates memory for as many digits as a scale says.
_MOST_DECIMAL_DIGITS = 38
#: The bytes that a part of a schema counts in a cache, in addition to its JSON. It takes three times as much memory as
#: other JSON. The largest schemas that are accepted fit into :data:`LARGE_PARSED_BYTES`.
_BYTES_PER_SCHEMA_PART = 64
#: JSON of large metadata that a process keeps parsed. This takes about six times as much memory.
LARGE_PARSED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class LoadedMetadata:
    """Metadata as it may be used, and the names of removed properties.

    ``naming_code`` are those that named code, ``connecting`` those that clients could take for connection settings.
    ``kept_bytes`` is the size with which it counts in a cache.
    """

    metadata: TableMetadata
    naming_code: tuple[str, ...]
    connecting: tuple[str, ...] = ()
    kept_bytes: int = 0


class InlineSnapshot(Snapshot):
    """A snapshot of format version 1 that lists its manifests itself, without a manifest list."""

    _inline: tuple[str, ...] = PrivateAttr(default=())

    @classmethod
    def of(cls, snapshot: Snapshot, manifests: tuple[str, ...]) -> InlineSnapshot:
        """Return a snapshot with manifests, given by their URIs."""
        made = cls.model_construct(snapshot.model_fields_set, **dict(snapshot))
        made._inline = manifests
        return made

    def manifests(self, io: FileIO) -> list[ManifestFile]:
        """Return the manifests, as far as the metadata knows them. Each manifest itself names its spec."""
        return [
            ManifestFile.from_args(
                manifest_path=path,
                manifest_length=len(io.new_input(path)),
                partition_spec_id=0,
                content=ManifestContent.DATA,
                sequence_number=0,
                min_sequence_number=0,
                added_snapshot_id=None,  # each may belong to an earlier snapshot
            )
            for path in self._inline
        ]


def metadata_json(data: bytes, location: str, served_bytes: int | None = None) -> bytes:
    """Return the JSON text of a metadata file.

    Args:
        data: The bytes of the file.
        location: Its URI.
        served_bytes: The largest text that the caller parses, None for any.

    Raises:
        CorruptFileError: If the file is broken or holds too much.
        MetadataTooLargeError: If the caller parses no text of this size.
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
        raise _no_metadata(location, type(error).__name__) from error
    if served_bytes is not None:
        check_served_size(text, location, served_bytes)
    # A count of the separators of values, also of those in strings, costs next to nothing.
    n_values = sum(text.count(mark) for mark in (b",", b"[", b"{"))
    if n_values > min(MAX_VALUES, _ALWAYS_ALLOWED_VALUES + len(data) // _FILE_BYTES_PER_VALUE):
        raise too_large(location, len(data))
    return text


class ParsedMetadata:
    """Metadata that was parsed before, by the URI of its file, for a process that loads tables again and again.

    Only files of a lakehouse's own are kept: their names are used once, and nothing changes them. ``capacity_bytes``
    bounds the JSON of all that is kept, except metadata of more than an eighth of that, for which there are
    :data:`LARGE_PARSED_BYTES`. What is parsed takes several times as much.
    """

    def __init__(self, capacity_bytes: int):
        self._kept: ByteLru[str, LoadedMetadata] = ByteLru(capacity_bytes, LARGE_PARSED_BYTES)

    def get(self, uri: str) -> LoadedMetadata | None:
        """Return the metadata of a file. Nobody may change it."""
        return self._kept.get(uri)

    def put(self, root: str, uri: str, loaded: LoadedMetadata) -> None:
        """Keep the metadata of a file, if it is one of the lakehouse at ``root``."""
        if uri.startswith(root) and is_table_metadata_path(uri.removeprefix(root)):
            self._kept.put(uri, loaded, loaded.kept_bytes)


def write_metadata(metadata: TableMetadata, output: OutputFile, before: TableMetadata | None = None) -> None:
    """Write a metadata file as pyiceberg does, which looks through all variables of the environment each time.

    Args:
        metadata: The metadata.
        output: The file.
        before: The metadata so far. Metadata that is too large may become smaller.

    Raises:
        MetadataTooLargeError: If the metadata is too large for a server to read, and no smaller than before.
        StorageError: If the file cannot be written.
    """
    text = _dumped(metadata)
    excess = excess_of(text)
    if excess is not None and (before is None or not is_smaller(text, _dumped(before))):
        raise MetadataTooLargeError(
            f"the metadata of the table is not written: it would have {excess}; drop snapshots with 'trinitylake trim',"
            " remove refs, properties and statistics, or use shorter texts"
        )
    with output.create() as stream:
        stream.write(Compressor.get_compressor(output.location).bytes_compressor()(text))


def _dumped(metadata: TableMetadata) -> bytes:
    return metadata.model_dump_json(exclude_none=not _writes_missing_snapshots()).encode()


@functools.cache
def _writes_missing_snapshots() -> bool:
    """Whether pyiceberg's configuration wants a snapshot of -1 where a table has none, for older readers."""
    return bool(Config().get_bool("legacy-current-snapshot-id"))


def load_metadata(io: StorageFileIO, uri: str, parsed: ParsedMetadata | None = None) -> LoadedMetadata:
    """Read an Iceberg metadata file, unless it was parsed before.

    Raises CorruptFileError, FileMissingError and other StorageErrors.
    """
    known = None if parsed is None else parsed.get(uri)
    if known is not None:
        return known
    text = metadata_json(io.new_input(uri).read_whole(io.metadata_limit_bytes), uri, io.metadata_limit_bytes)
    if parsed is None:
        return parse_metadata(text, uri)
    with PARSE_GATE.admit(len(text)):
        known = parsed.get(uri)  # another thread may have parsed it while this one read or waited
        if known is not None:
            return known
        loaded = _parse(text, uri)
        parsed.put(io.root, uri, loaded)
    return loaded


def parse_metadata(text: bytes, uri: str) -> LoadedMetadata:
    """Return the metadata in a JSON text, which has its place at ``uri``. Raises CorruptFileError."""
    with PARSE_GATE.admit(len(text)):
        return _parse(text, uri)


def _parse(text: bytes, uri: str) -> LoadedMetadata:
    try:
        decoded = text.decode()
        content = json.loads(decoded, object_hook=_yield_interpreter)
        del decoded
        n_parts = _check_items(content, uri)
        inline = _inline_manifests(content) if b'"manifests"' in text else {}
        for shot in content["snapshots"] if inline else ():
            shot.setdefault("manifest-list", "")  # which pyiceberg requires
        parsed = TableMetadataUtil.parse_obj(content)
        del content
        if inline:
            shots = [
                InlineSnapshot.of(shot, inline[shot.snapshot_id]) if shot.snapshot_id in inline else shot
                for shot in parsed.snapshots
            ]
            parsed = parsed.model_copy(update={"snapshots": shots})
        _check_meaning(parsed)
    except TrinityLakeError:
        raise
    except Exception as error:  # for broken JSON pyiceberg's validators raise any exception
        raise _no_metadata(uri, _reason(error)) from error
    leave_out_meaningless_counts(parsed.snapshots)
    loaded = _without_refused(with_typed_specs(parsed))
    return replace(loaded, kept_bytes=len(text) + _BYTES_PER_SCHEMA_PART * n_parts)


def _yield_interpreter(value: dict[str, Any]) -> dict[str, Any]:
    """Return a value of JSON. Between two objects, other threads get the interpreter that the decoder occupies."""
    return value


def read_table_metadata(io: StorageFileIO, uri: str) -> TableMetadata:
    """Read a metadata file of any table, without properties that name code.

    If there is a definition, use :func:`table_metadata`. Raises CorruptFileError, FileMissingError and other
    StorageErrors.
    """
    return load_metadata(io, uri).metadata


def table_metadata(definition: TableDef, io: StorageFileIO, parsed: ParsedMetadata | None = None) -> TableMetadata:
    """Read the metadata of the table of a definition, and of no other. A MANAGED table is at its own place.

    ``parsed`` keeps files that were read before, for MANAGED tables.

    Raises InvalidDefinitionError when the definition names no file, CorruptFileError also for metadata of another
    table. Raises LocationNotAllowedError, FileMissingError and other StorageErrors.
    """
    return load_table_metadata(definition, io, parsed).metadata


def load_table_metadata(
    definition: TableDef, io: StorageFileIO, parsed: ParsedMetadata | None = None
) -> LoadedMetadata:
    """Return the result of :func:`table_metadata`, and the properties in it that name code."""
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
    """Read metadata to find the files that a definition keeps. It may share another table's metadata file.

    In a table's own folder the metadata must be that of the table. Otherwise files were swapped, and it does not name
    all files that the table needs. Raises as :func:`table_metadata`.
    """
    uri = metadata_uri(definition, io.root)
    if definition.is_managed and f"/{table_prefix(definition.id)}" in uri:
        return table_metadata(definition, io)
    return at_managed_location(read_table_metadata(io, uri), definition, io)


def check_identity(definition: TableDef, metadata: TableMetadata, uri: str) -> None:
    """Raise CorruptFileError when metadata is not that of the table of a definition."""
    if definition.is_managed and table_id_of(metadata.location) != definition.id:
        raise misplaced(definition, uri, f"its location is {metadata.location[:200]!r}")
    known = definition.format_properties.get(TABLE_UUID)
    if known is not None and known != str(metadata.table_uuid):
        raise misplaced(definition, uri, f"its table-uuid is {metadata.table_uuid}, that of the table is {known[:36]}")


def misplaced(definition: TableDef, uri: str, how: str) -> CorruptFileError:
    """Return the error for metadata that is not that of the table of a definition."""
    return CorruptFileError(
        f"{uri!r} is not the metadata of table {definition.id!r}: {how}; files were swapped or moved, restore it",
        path=uri,
    )


def _without_refused(metadata: TableMetadata) -> LoadedMetadata:
    found = naming_code(metadata.properties)
    connecting = tuple(name for name in not_allowed(metadata.properties) if name not in found)
    left_out = {*found, *connecting, *meaningless(metadata.properties)}
    if left_out:
        kept = {name: value for name, value in metadata.properties.items() if name not in left_out}
        metadata = metadata.model_copy(update={"properties": kept})
    return LoadedMetadata(metadata, found, connecting)


def _check_items(content: Any, location: str) -> int:
    """Return how many parts the schemas in the JSON of metadata have.

    Raises CorruptFileError for JSON that holds more than any table's metadata, or a snapshot twice.
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
    twice = next((number for number, count in ids.items() if count > 1), None)
    if twice is not None:
        raise CorruptFileError(
            f"{location!r} has snapshot {twice!r:.40} more than once, which no writer leaves; restore it", path=location
        )
    return n_parts


def _check_meaning(metadata: TableMetadata) -> None:
    """Raise ValueError for JSON that is no schema, partition or order of any table.

    Readers would fail by it much later.
    """
    # Two schemas may give one id to different columns.
    columns = [column for schema in metadata.schemas for column in index_by_id(schema).values()]
    for column in columns:
        if isinstance(column.field_type, FixedType) and not 0 < column.field_type.root <= _MOST:
            raise ValueError(f"column {column.field_id} is of a fixed size that nothing has")
        if isinstance(column.field_type, DecimalType) and not 0 <= column.field_type.scale <= _MOST_DECIMAL_DIGITS:
            raise ValueError(f"column {column.field_id} is a decimal with a scale that no value has")
    sorted_by = [field for order in metadata.sort_orders for field in order.fields]
    parted_by = [field for spec in metadata.partition_specs for field in spec.fields]
    for transform in (*(field.transform for field in parted_by), *(field.transform for field in sorted_by)):
        if not 0 < getattr(transform, "num_buckets", getattr(transform, "width", 1)) <= _MOST:
            raise ValueError(f"its transform {str(transform)[:40]!r} makes nothing of a value")
    column_ids = {column.field_id for column in columns}
    if unknown := next((field.source_id for field in sorted_by if field.source_id not in column_ids), None):
        raise ValueError(f"a sort order is by column {unknown}, which no schema has")


def _schemas_in(content: dict[str, Any]) -> list[Any]:
    schemas = content.get("schemas")
    return [*(schemas if isinstance(schemas, list) else ()), content.get("schema")]


def _count_mappings(value: Any, location: str) -> int:
    """Return how many mappings are in a value. Raises CorruptFileError for any part with too many items."""
    n_mappings = 0
    rest = [value]
    while rest:
        found = rest.pop()
        if len(found) > MAX_ITEMS:
            raise _too_many(f"{MAX_ITEMS} items in one list or mapping", location)
        n_mappings += isinstance(found, dict)
        items = found.values() if isinstance(found, dict) else found
        rest += (item for item in items if isinstance(item, dict | list))
    return n_mappings


def _too_many(most: str, location: str) -> CorruptFileError:
    return CorruptFileError(f"{location!r} holds more than {most}: no table's metadata does; restore it", path=location)


def _inline_manifests(content: Any) -> dict[int, tuple[str, ...]]:
    """Return the manifests of snapshots that have no manifest list, by snapshot."""
    snapshots: Any = content.get("snapshots") or ()
    return {
        int(shot["snapshot-id"]): tuple(map(str, shot["manifests"]))
        for shot in snapshots
        if not shot.get("manifest-list") and shot.get("manifests")
    }


def _reason(error: Exception) -> str:
    """Say what is wrong, without quoting the file: it may be any file, with secrets."""
    cause = error.__cause__ if isinstance(error.__cause__, PydanticError) else error
    if isinstance(error, json.JSONDecodeError):
        return "Invalid JSON"
    if isinstance(cause, PydanticError):
        is_single = cause.error_count() == 1  # the text of many errors is longer than the file
        if is_single and cause.errors(include_input=False)[0]["type"] == "json_invalid":
            return "Invalid JSON"
        return f"{cause.error_count()} of its fields are not as they must be"
    return type(error).__name__


def _no_metadata(location: str, reason: str) -> CorruptFileError:
    return CorruptFileError(f"{location!r} is no Iceberg table metadata: {reason}; restore it", path=location)
