"""Read and write the files of a space summary (FORMAT.md, "Space summary").

An index names the parts of the summary: files of which each contains a share of the catalog files, of the sums, or of
the files of tables. No file is ever overwritten. A run writes new files for what changed and then a new index. A file
that is damaged, missing or was written by another release only makes a run read more of the lakehouse.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from trinitylake_ops.errors import CorruptFileError, InvalidInputError, StorageError
from trinitylake_ops.format.arrow_ipc import check_stream
from trinitylake_ops.format.checksums import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.file_names import MAX_VERSION, is_space_path, new_space_part_path
from trinitylake_ops.format.keys import MAX_TIME_MS
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.iceberg.table_objects import MAX_FILE_BYTES
from trinitylake_ops.operations.space.model import (
    NOT_COUNTED,
    TABLE_FILE_KINDS,
    CatalogFile,
    CatalogKind,
    Counts,
    Group,
    PartKind,
    StoredObject,
    Summary,
    TableObjects,
    TableSums,
    location_hash,
)
from trinitylake_ops.operations.space.presence import parse, parse_all, text_of
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_fresh

logger = logging.getLogger(__name__)

_FORMAT = 1
_CHECKSUM_BYTES = 32
_ROWS_PER_BATCH = 8192
MAX_SHARDS = 4096
#: The largest file of a part, and what it may decompress to, besides a multiple of its size.
MAX_PART_BYTES = 256 << 20
_ALWAYS_ALLOWED_BYTES = 64 << 20
_MAX_RATIO = 256
_MAX_COUNT = 1 << 62

_DESCRIPTION = ("id", "namespace", "name", "definition", "is_counted", "damage")
_COUNTS = (
    "data_files",
    "data_bytes",
    "small_files",
    "small_bytes",
    "delete_files",
    "delete_bytes",
    "metadata_files",
    "metadata_bytes",
)


def _schema(part: PartKind, /, **fields: tuple[pa.DataType, bool]) -> pa.Schema:
    columns = [pa.field(name, data_type, nullable=nullable) for name, (data_type, nullable) in fields.items()]
    return pa.schema(columns, metadata={b"version": str(_FORMAT).encode(), b"kind": part.name.lower().encode()})


_NUMBERS = pa.list_(pa.field("item", pa.uint64(), nullable=False))
_SCHEMAS = {
    PartKind.CATALOG: _schema(
        PartKind.CATALOG,
        hash=(pa.uint64(), False),
        kind=(pa.uint8(), False),
        size_bytes=(pa.int64(), False),
        versions=(pa.utf8(), False),
        references=(pa.uint32(), False),
        table=(pa.uint64(), False),
        metadata=(pa.uint64(), False),
        unread_location=(pa.utf8(), True),
    ),
    PartKind.SUMS: _schema(
        PartKind.SUMS,
        id=(pa.utf8(), False),
        namespace=(pa.utf8(), False),
        name=(pa.utf8(), False),
        definition=(pa.uint64(), False),
        is_counted=(pa.bool_(), False),
        damage=(pa.utf8(), False),
        versions=(pa.utf8(), True),
        used_by=(pa.utf8(), True),
        is_current=(pa.bool_(), False),
        **{name: (pa.int64(), False) for name in _COUNTS},
    ),
    PartKind.OBJECTS: _schema(
        PartKind.OBJECTS,
        table=(pa.uint64(), False),
        hash=(pa.uint64(), False),
        kind=(pa.uint8(), False),
        size_bytes=(pa.int64(), False),
        target_bytes=(pa.int64(), False),
        names=(_NUMBERS, False),
        kept=(_NUMBERS, False),
        current=(_NUMBERS, False),
    ),
}


@dataclass(frozen=True, slots=True)
class Part:
    """A file of a summary."""

    path: str
    sha256: str


@dataclass(slots=True)
class StoredSummary:
    """A summary, and the files that it was read from."""

    summary: Summary
    #: The files by kind, one for each shard; None for an empty shard.
    parts: dict[PartKind, list[Part | None]] = field(default_factory=dict)

    def paths(self) -> set[str]:
        """Return the paths of all parts."""
        return {part.path for parts in self.parts.values() for part in parts if part is not None}


def shard_of(number: int, summary: Summary) -> int:
    """Return the shard of a table or a catalog file, by its hash."""
    return number % summary.n_shards


# The index


def encode_index(stored: StoredSummary, path: str) -> bytes:
    """Encode the index of a summary.

    Args:
        stored: The summary and its parts.
        path: The path where the index will be written.

    Raises:
        InvalidInputError: The index is too large.
    """
    summary = stored.summary
    content = {
        "format": _FORMAT,
        "lakehouse_id": summary.lakehouse_id,
        "version": summary.version,
        "version_id": summary.version_id,
        "created_millis": sorted(summary.created_ms.items()),
        "successor_millis": sorted(summary.successor_ms.items()),
        "exports": summary.exports,
        "copied_versions": summary.copied_versions,
        "next_export": summary.next_export,
        "target_bytes": summary.target_bytes,
        "shards": summary.n_shards,
        "parts": {
            kind.name.lower(): [None if part is None else [part.path, part.sha256] for part in parts]
            for kind, parts in stored.parts.items()
        },
    }
    return encode_sealed_json(content, path)


def decode_index(data: bytes, path: str) -> StoredSummary:
    """Decode an index. The summary has no content yet.

    Args:
        data: The content of the file.
        path: The path of the file.

    Raises:
        CorruptFileError: The index is damaged, or was written by another release.
    """
    content = decode_sealed_json(data, path)
    if content.get("format") != _FORMAT:
        raise CorruptFileError(f"{path!r} was written by another release", path=path)
    try:
        n_shards = _number(content["shards"], MAX_SHARDS)
        parts = {kind: [_part(part) for part in content["parts"][kind.name.lower()]] for kind in PartKind}
        if n_shards < 1 or any(len(files) != n_shards for files in parts.values()):
            raise ValueError("a part is missing")
        summary = Summary(
            lakehouse_id=_text(content["lakehouse_id"]),
            version=_number(content["version"], MAX_VERSION),
            version_id=_text(content["version_id"]),
            created_ms=_times(content["created_millis"]),
            successor_ms=_times(content["successor_millis"]),
            exports=_numbers(content["exports"]),
            copied_versions=_numbers(content["copied_versions"]),
            next_export=_number(content["next_export"], MAX_VERSION),
            target_bytes=_number(content["target_bytes"], _MAX_COUNT),
            n_shards=n_shards,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptFileError(f"{path!r} is not an index of a space summary", path=path) from error
    return StoredSummary(summary, parts)


def _number(value: object, most: int) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise ValueError(f"{value!r:.40} is not a number between 0 and {most}")
    return value


def _times(value: Any) -> dict[int, int]:
    return {_number(version, MAX_VERSION): _number(time_ms, MAX_TIME_MS) for version, time_ms in value}


def _numbers(value: Any) -> dict[str, int]:
    return {_text(path): _number(number, MAX_VERSION) for path, number in value.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a text is missing")
    return value


def _part(value: Any) -> Part | None:
    if value is None:
        return None
    path, sha256 = value
    if not is_space_path(_text(path)):
        raise ValueError("a part has the name of another file")
    return Part(path, _text(sha256))


# Parts


def encode_part(kind: PartKind, columns: Mapping[str, Sequence[object]]) -> bytes:
    """Encode a part.

    Args:
        kind: The kind of the part.
        columns: The values of each column.
    """
    schema = _SCHEMAS[kind]
    arrays = [pa.array(columns[column.name], column.type) for column in schema]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema), max_chunksize=_ROWS_PER_BATCH)
    data = bytes(sink.getvalue())
    return data + hashlib.sha256(data).digest()


def decode_part(kind: PartKind, data: bytes, path: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches of a part.

    Args:
        kind: The kind of the part.
        data: The content of the file.
        path: The path of the file.

    Raises:
        CorruptFileError: The file is damaged, or is not a part of this kind.
    """
    body = data[:-_CHECKSUM_BYTES]
    if hashlib.sha256(body).digest() != data[-_CHECKSUM_BYTES:]:
        raise CorruptFileError(f"{path!r} is damaged: its checksum does not match", path=path)
    try:
        check_stream(body, _ALWAYS_ALLOWED_BYTES + _MAX_RATIO * len(body))
        with pa.ipc.open_stream(body) as reader:
            schema = _SCHEMAS[kind]
            if not reader.schema.equals(schema, check_metadata=True):
                raise CorruptFileError(f"{path!r} was written by another release, or is another part", path=path)
            for batch in reader:
                batch.validate(full=True)
                if any(batch.column(column.name).null_count for column in schema if not column.nullable):
                    raise CorruptFileError(f"{path!r} lacks values", path=path)
                yield batch
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path!r} cannot be read", path=path) from error


def encode_catalog(files: Iterable[tuple[int, CatalogFile]]) -> bytes:
    """Encode catalog files with their hashes."""
    rows = sorted(files, key=lambda item: item[0])
    columns: dict[str, list[object]] = {
        "hash": [number for number, _ in rows],
        "kind": [int(file.kind) for _, file in rows],
        "size_bytes": [file.size_bytes for _, file in rows],
        "versions": [text_of(file.presence) for _, file in rows],
        "references": [file.references for _, file in rows],
        "table": [file.table for _, file in rows],
        "metadata": [file.metadata for _, file in rows],
        "unread_location": [file.unread_location for _, file in rows],
    }
    return encode_part(PartKind.CATALOG, columns)


def decode_catalog(data: bytes, path: str) -> dict[int, CatalogFile]:
    """Decode the result of :func:`encode_catalog`. Raises CorruptFileError."""
    files: dict[int, CatalogFile] = {}
    for arrays in decode_part(PartKind.CATALOG, data, path):
        _check_range(arrays, "size_bytes", NOT_COUNTED, MAX_FILE_BYTES, path)
        batch = arrays.to_pydict()
        try:
            presences = parse_all(batch["versions"])
            kinds = [CatalogKind(kind) for kind in batch["kind"]]
        except (InvalidInputError, ValueError) as error:
            raise CorruptFileError(f"{path!r} has an invalid row", path=path) from error
        rows = zip(
            batch["hash"],
            kinds,
            batch["size_bytes"],
            presences,
            batch["references"],
            batch["table"],
            batch["metadata"],
            batch["unread_location"],
            strict=True,
        )
        files.update((number, CatalogFile(*row)) for number, *row in rows)
    return files


def encode_sums(tables: Iterable[TableSums]) -> bytes:
    """Encode the sums of tables, with one row for each group, or one row for a table without groups."""
    rows = [
        (table, group, counts)
        for table in sorted(tables, key=lambda table: table.id)
        for group, counts in table.groups.items() or [(None, Counts())]
    ]
    columns: dict[str, list[object]] = {name: [getattr(table, name) for table, _, _ in rows] for name in _DESCRIPTION}
    columns["versions"] = [None if group is None else text_of(group.reach) for _, group, _ in rows]
    columns["used_by"] = [None if group is None else text_of(group.use) for _, group, _ in rows]
    columns["is_current"] = [group is not None and group.is_current for _, group, _ in rows]
    columns |= {name: [getattr(counts, name) for _, _, counts in rows] for name in _COUNTS}
    return encode_part(PartKind.SUMS, columns)


def decode_sums(data: bytes, path: str) -> dict[int, TableSums]:
    """Decode the result of :func:`encode_sums`. Raises CorruptFileError."""
    tables: dict[str, TableSums] = {}
    groups: dict[tuple[str, str, bool], Group] = {}
    for batch in decode_part(PartKind.SUMS, data, path):
        for name in _COUNTS:
            _check_range(batch, name, 0, _MAX_COUNT, path)
        columns = batch.to_pydict()
        described = zip(*(columns[name] for name in _DESCRIPTION), strict=True)
        grouped = zip(columns["versions"], columns["used_by"], columns["is_current"], strict=True)
        counts = zip(*(columns[name] for name in _COUNTS), strict=True)
        for description, key, numbers in zip(described, grouped, counts, strict=True):
            table = tables.get(description[0])
            if table is None:
                table = tables[description[0]] = TableSums(*description)
            if key[0] is None:
                continue
            group = groups.get(key)
            if group is None:
                group = groups[key] = _group(key, path)
            table.groups[group] = Counts(*numbers)
    return {location_hash(table_id): table for table_id, table in tables.items()}


def _group(key: tuple[str, str | None, bool], path: str) -> Group:
    reach, use, is_current = key
    try:
        return Group(parse(reach), parse(use or ""), is_current)
    except InvalidInputError as error:
        raise CorruptFileError(f"{path!r} has an invalid row", path=path) from error


def encode_objects(tables: Mapping[int, TableObjects]) -> bytes:
    """Encode the files of tables, by the hash of the table's id."""
    rows = [
        (table, number, item) for table, objects in sorted(tables.items()) for number, item in sorted(objects.items())
    ]
    columns: dict[str, list[object]] = {
        "table": [table for table, _, _ in rows],
        "hash": [number for _, number, _ in rows],
        "kind": [TABLE_FILE_KINDS.index(item.kind) for _, _, item in rows],
        "size_bytes": [item.size_bytes for _, _, item in rows],
        "target_bytes": [item.target_bytes for _, _, item in rows],
        "names": [item.names for _, _, item in rows],
        "kept": [item.kept for _, _, item in rows],
        "current": [item.current for _, _, item in rows],
    }
    return encode_part(PartKind.OBJECTS, columns)


def decode_objects(data: bytes, path: str) -> dict[int, TableObjects]:
    """Decode the result of :func:`encode_objects`. Raises CorruptFileError."""
    tables: dict[int, TableObjects] = {}
    for arrays in decode_part(PartKind.OBJECTS, data, path):
        _check_range(arrays, "size_bytes", NOT_COUNTED, MAX_FILE_BYTES, path)
        _check_range(arrays, "target_bytes", 0, _MAX_COUNT, path)
        _check_range(arrays, "kind", 0, len(TABLE_FILE_KINDS) - 1, path)
        batch = arrays.to_pydict()
        kinds = [TABLE_FILE_KINDS[kind] for kind in batch["kind"]]
        rows = zip(
            batch["table"],
            batch["hash"],
            kinds,
            batch["size_bytes"],
            batch["target_bytes"],
            *(map(tuple, batch[name]) for name in ("names", "kept", "current")),
            strict=True,
        )
        for table, number, *row in rows:
            tables.setdefault(table, {})[number] = StoredObject(*row)
    return tables


def _check_range(batch: pa.RecordBatch, name: str, least: int, most: int, path: str) -> None:
    """Raise CorruptFileError if a number in a column is too small or too large."""
    bounds = pc.min_max(batch.column(name)).as_py()
    if len(batch) and not least <= bounds["min"] <= bounds["max"] <= most:
        raise CorruptFileError(f"{path!r} has an invalid value in the column {name!r}", path=path)


# Files


def read_index(storage: Storage, path: str) -> StoredSummary:
    """Read an index and the catalog files and sums that it names, but not the files of tables.

    Args:
        storage: The storage of the lakehouse.
        path: The path of the index.

    Raises:
        CorruptFileError: A file is damaged, or was written by another release.
        StorageError: A file cannot be read.
    """
    stored = decode_index(storage.read(path, limit_bytes=MAX_FILE_LIST_BYTES), path)
    kinds = (PartKind.CATALOG, PartKind.SUMS)
    parts = [(kind, part) for kind in kinds for part in stored.parts[kind] if part is not None]
    contents = storage.read_available([part.path for _, part in parts], limit_bytes=MAX_PART_BYTES)
    for (kind, part), data in zip(parts, contents, strict=True):
        checked = _checked(data, part)
        if kind == PartKind.CATALOG:
            stored.summary.catalog |= decode_catalog(checked, part.path)
        else:
            stored.summary.tables |= decode_sums(checked, part.path)
    return stored


def read_objects(storage: Storage, part: Part | None) -> dict[int, TableObjects]:
    """Read the files of tables in a shard. None are known if the part cannot be used.

    Args:
        storage: The storage of the lakehouse.
        part: The part; None for an empty shard.
    """
    if part is None:
        return {}
    try:
        (data,) = storage.read_available([part.path], limit_bytes=MAX_PART_BYTES)
        return decode_objects(_checked(data, part), part.path)
    except StorageError as error:
        logger.info("a part of the space summary cannot be used: %s", error.message)
        return {}


def _checked(data: bytes | StorageError, part: Part) -> bytes:
    """Return the content of a part. Raises StorageError, and CorruptFileError if the index names another content."""
    if isinstance(data, StorageError):
        raise data
    if hashlib.sha256(data).hexdigest() != part.sha256:
        raise CorruptFileError(f"{part.path!r} is not the part that the index names", path=part.path)
    return data


def write_parts(storage: Storage, contents: Sequence[bytes | None]) -> list[Part | None]:
    """Write parts under new names.

    Args:
        storage: The storage of the lakehouse.
        contents: The parts; None for an empty shard.

    Returns:
        The files, in the same order.

    Raises:
        StorageError: A file cannot be written.
    """
    parts = [
        None if data is None else Part(new_space_part_path(), hashlib.sha256(data).hexdigest()) for data in contents
    ]
    create_fresh(
        storage,
        {part.path: data for part, data in zip(parts, contents, strict=True) if part is not None and data is not None},
    )
    return parts
