"""Read the files of tables that a summary does not contain, and sum the files of a table by version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, TABLE_UUID, Schema, TableDef
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.reach import FileKind
from trinitylake_ops.iceberg.snapshot_retention import SnapshotRule
from trinitylake_ops.iceberg.table_objects import TableObject, read_table_objects
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.space.model import (
    NOT_COUNTED,
    Counts,
    Group,
    StoredObject,
    TableObjects,
    location_hash,
)
from trinitylake_ops.operations.space.presence import NOWHERE, Presence, union
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.versions.snapshot import LakehouseFiles

#: The size of data files if neither the table nor the policy specifies one.
DEFAULT_TARGET_BYTES = 128 << 20
_DEFINITIONS_AT_ONCE = 256
_LONGEST_DAMAGE_CHARS = 300
#: The kinds that name other files, from the top down.
_NAMING_KINDS = (FileKind.METADATA, FileKind.MANIFEST_LIST, FileKind.MANIFEST)


@dataclass(frozen=True, slots=True)
class ReadDefinition:
    """The definition of a table, reduced to what leads to its files."""

    definition: TableDef
    #: ``NOT_COUNTED`` for a definition of another lakehouse.
    size_bytes: int
    #: The hash of the location of its Iceberg metadata; 0 for a table that is not counted.
    metadata: int


def read_definitions(
    files: LakehouseFiles, io: StorageFileIO, locations: Sequence[str]
) -> Iterator[ReadDefinition | TrinityLakeError]:
    """Yield the definitions of tables in order, or the error of one that is missing or damaged.

    Args:
        files: The files of the lakehouse.
        io: Resolves the locations of metadata files.
        locations: The locations of the definitions.

    Raises:
        StorageError: The storage failed.
    """
    for start in range(0, len(locations), _DEFINITIONS_AT_ONCE):
        batch = locations[start : start + _DEFINITIONS_AT_ONCE]
        paths = [path for path in batch if not is_uri(path)]
        contents = dict(zip(paths, files.storage.read_available(paths), strict=True))
        for location in batch:
            try:
                yield _read_definition(files, io, location, contents.get(location))
            except (FileMissingError, CorruptFileError, InvalidLocationError) as error:
                yield error


def _read_definition(
    files: LakehouseFiles, io: StorageFileIO, location: str, data: bytes | StorageError | None
) -> ReadDefinition:
    if isinstance(data, StorageError):
        raise data
    definition = files.definitions.table(location) if data is None else TableDef.from_bytes(data, location)
    metadata = iceberg_metadata(definition) if definition.is_managed else None
    names = (METADATA_LOCATION, TABLE_UUID)
    reduced = replace(
        definition,
        schema=Schema(),
        properties={},
        format_properties={
            name: definition.format_properties[name] for name in names if name in definition.format_properties
        },
    )
    number = 0 if not metadata else location_hash(io.location(metadata_uri(definition, io.root)))
    return ReadDefinition(reduced, NOT_COUNTED if data is None else len(data), number)


@dataclass(slots=True)
class TableReading:
    """A table whose definitions changed: what is known about its files, and what is left to read."""

    #: The known files. :func:`complete_objects` adds those of definitions of which all files can be read.
    objects: TableObjects
    #: Which snapshots of branches a trim retains, unless the table's properties decide.
    rule: SnapshotRule
    #: The definitions whose metadata is not known.
    unread: list[TableDef] = field(default_factory=list)
    #: The readable files of the other definitions.
    incomplete: TableObjects = field(default_factory=dict)
    #: Why not all of its files are known; empty if they are.
    damage: str = ""
    #: Whether files were read.
    has_read: bool = False


def complete_objects(readings: Sequence[TableReading], io: StorageFileIO, table_root: str) -> None:
    """Read the unknown files of tables.

    Args:
        readings: The tables, which are completed in place.
        io: Reads the files.
        table_root: The URI of the lakehouse's table root; empty if it has none.

    Raises:
        StorageError: The storage failed.
    """
    run_parallel(lambda reading: _complete(reading, io, table_root), readings, io.storage.concurrency)


def _complete(reading: TableReading, io: StorageFileIO, table_root: str) -> None:
    for definition in reading.unread:
        failures: list[TrinityLakeError] = []
        items = read_table_objects(
            definition, io, reading.rule, lambda location: location_hash(location) in reading.objects, failures
        )
        objects = {location_hash(item.location): _stored(item, table_root) for item in items}
        reading.has_read = True
        if failures:
            reading.incomplete |= objects
            reading.damage = reading.damage or failures[0].message[:_LONGEST_DAMAGE_CHARS]
        else:
            reading.objects |= objects


def _stored(item: TableObject, table_root: str) -> StoredObject:
    is_here = not is_uri(item.location) or (bool(table_root) and item.location.startswith(table_root))
    return StoredObject(
        item.kind,
        item.size_bytes if is_here else NOT_COUNTED,
        item.target_bytes,
        tuple(map(location_hash, item.names)),
        tuple(map(location_hash, item.kept)),
        tuple(map(location_hash, item.current)),
    )


def sums_of(
    states: Mapping[int, Presence], objects: TableObjects, current: int, target_bytes: int
) -> dict[Group, Counts]:
    """Sum the files of a table.

    Args:
        states: The versions that need each metadata file.
        objects: The files of the table.
        current: The metadata file of the summarized version; 0 if it does not have the table.
        target_bytes: The size of data files, if the table does not specify one.
    """
    reach, use = _presences(states, objects)
    scanned = _scanned(objects, current)
    target_bytes = objects[current].target_bytes or target_bytes if current in objects else target_bytes
    groups: dict[Group, Counts] = {}
    for number, presence in reach.items():
        item = objects[number]
        if item.size_bytes != NOT_COUNTED:
            group = Group(presence, use.get(number, NOWHERE), number in scanned)
            _count(groups.setdefault(group, Counts()), item, is_small=item.size_bytes * 4 < target_bytes * 3)
    return groups


def _presences(
    states: Mapping[int, Presence], objects: TableObjects
) -> tuple[dict[int, Presence], dict[int, Presence]]:
    """Return the versions whose metadata reaches each file, and those that need it after a trim."""
    pending: dict[int, set[Presence]] = {number: {presence} for number, presence in states.items() if number in objects}
    used: dict[int, set[Presence]] = {number: set(presences) for number, presences in pending.items()}
    for kind in _NAMING_KINDS:
        for number in [number for number in pending if objects[number].kind == kind]:
            item = objects[number]
            _push(item.names, pending[number], pending, objects)
            kept = item.kept if kind == FileKind.METADATA else item.names
            _push(kept, used.get(number, set()), used, objects)
    reach = {number: union(frozenset(presences)) for number, presences in pending.items()}
    use = {number: union(frozenset(presences)) for number, presences in used.items() if presences}
    return reach, use


def _push(
    names: Sequence[int], presences: set[Presence], pending: dict[int, set[Presence]], objects: TableObjects
) -> None:
    if presences:
        joined = union(frozenset(presences))
        for number in names:
            if number in objects:
                pending.setdefault(number, set()).add(joined)


def _scanned(objects: TableObjects, metadata: int) -> set[int]:
    """Return the files of the current snapshot of a metadata file, with itself."""
    if metadata not in objects:
        return set()
    scanned = {metadata}
    frontier = list(objects[metadata].current)
    while frontier:
        new = [number for number in dict.fromkeys(frontier) if number in objects and number not in scanned]
        scanned.update(new)
        frontier = [name for number in new for name in objects[number].names]
    return scanned


def _count(counts: Counts, item: StoredObject, *, is_small: bool) -> None:
    if item.kind == FileKind.DATA:
        counts.data_files += 1
        counts.data_bytes += item.size_bytes
        if is_small:
            counts.small_files += 1
            counts.small_bytes += item.size_bytes
    elif item.kind == FileKind.DELETES:
        counts.delete_files += 1
        counts.delete_bytes += item.size_bytes
    else:
        counts.metadata_files += 1
        counts.metadata_bytes += item.size_bytes
