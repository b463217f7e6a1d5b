"""The files of Iceberg tables that definitions reach.

An executor reads definitions and manifests; this module interprets them.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from trinitylake_ops.errors import FileMissingError, LocationNotAllowedError, StoragePermissionError, TrinityLakeError
from trinitylake_ops.format.checksums import CompactUuidSet, OtherNames, folded
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import OWNER_NAME, TABLES_PREFIX
from trinitylake_ops.format.locations import is_uri, to_location, to_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import DAMAGE, TableFile, files_of
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import LakehouseFiles

logger = logging.getLogger(__name__)

_REPORTED_EACH = 256

#: Matches each table folder in a text, including after a root that ends in ``tables/``.
_TABLE_FOLDER = re.compile(rf"(?<![^/\n])(?={TABLES_PREFIX}([^/\n]+)(?:/|$))", re.MULTILINE)
_TABLE_PATH = re.compile(rf"{TABLES_PREFIX}([^/]+)/.+", re.DOTALL)


class TableWalk(Protocol):
    """Yields the files of a table, like :func:`reach.files_of`."""

    def __call__(
        self,
        definition: TableDef,
        io: StorageFileIO,
        known: set[str],
        *,
        skips_missing: bool,
        failures: list[TrinityLakeError],
    ) -> Iterator[TableFile]: ...


class TableReach:
    """The files of Iceberg tables that definitions reach, as paths if they are under the root.

    Tables of all types are included, because they may share files with managed tables. Files that no scan opens are not
    reached: former metadata files, and data that all snapshots have deleted.

    Attributes:
        files: The reached files.
        managed_ids: The ids of MANAGED tables in their own folders.
        opaque_ids: The ids of tables whose files are not all known, so that their folders are kept: tables of other
            formats and folders named in their properties, tables with unreadable files, and managed tables that refer
            to files outside the root, which may be other names of files under the root.
        damaged: Why table files cannot be read, by the location of the metadata file. Tables whose metadata file is
            missing are left out.
        other_names: Other forms in which a listing may show names of reached files.
        in_table_root: The files under the table root, if any.

    Args:
        lake: The lakehouse.
        walk: Yields the files of a table, for callers that already know the files. Not used in other processes.
        executor: Reads the files.
        table_root: The URI of the table root, if any.
    """

    def __init__(self, lake: Lakehouse, walk: TableWalk = files_of, executor: Executor = LOCAL, table_root: str = ""):
        self._root = lake.root
        self._outlines = OutlineWalk(lake.files)
        self._walk = TableFilesWalk(reading_io(lake), walk)
        self._executor = executor
        self._walked_metadata: set[str] = set()
        self._walked_definitions: set[str] = set()
        self.files: set[str] = set()
        self.managed_ids = CompactUuidSet()
        self.opaque_ids = CompactUuidSet()
        self.damaged: dict[str, str] = {}
        self.other_names = OtherNames()
        self.in_table_root = TableRootReach(table_root)

    def add(self, locations: Iterable[str], progress: Progress = no_progress) -> None:
        """Add the files that the tables of definitions reach.

        If files of a table are damaged, missing or do not belong to the table, its whole folder is kept, and the walk
        continues. Missing manifests of tables of other catalogs are skipped, because no reader can read the listed
        files.

        Args:
            locations: The locations of the definitions.
            progress: Called with the unit that is counted, the number done, and the total.

        Raises:
            StoragePermissionError: The metadata file of a table in another catalog is not accessible.
            StorageError: A storage request failed.
        """
        # Sorted, so that if there are several failures, the same one is raised each time.
        missing = sorted(path for path in locations if path not in self._walked_definitions)
        window = self._executor.window
        for start in range(0, len(missing), window):
            batch = missing[start : start + window]
            tables: dict[str, list[_TableOutline]] = {}
            for done, outline in enumerate(self._new_tables(batch), start + 1):
                if outline is not None:
                    tables.setdefault(outline.id, []).append(outline)
                if done % _REPORTED_EACH == 0 or done == len(missing):
                    progress("tables", done, len(missing))
            self._add_tables(list(tables.values()), progress)
            self._walked_definitions.update(batch)

    def _new_tables(self, locations: Sequence[str]) -> Iterator[_TableOutline | None]:
        """Yield outlines of tables to walk, or None for tables without metadata or with metadata already walked."""
        walked: set[str] = set()
        for outline in self._executor.map(self._outlines, locations):
            if outline.is_managed_here:
                self.managed_ids.update([outline.id])
            self.opaque_ids.update(outline.opaque_ids)
            self.in_table_root.opaque_ids.update(outline.opaque_ids)
            is_new = outline.metadata not in walked and outline.metadata not in self._walked_metadata
            walked.add(outline.metadata)
            yield outline if outline.definition is not None and is_new else None

    def _add_tables(self, tables: Sequence[Sequence[_TableOutline]], progress: Progress) -> None:
        """Add the files of tables. Each table is represented by its new definitions."""
        definitions = [
            [outline.definition for outline in outlines if outline.definition is not None] for outlines in tables
        ]
        walked = self._executor.map(self._walk, definitions)
        for done, (outlines, result) in enumerate(zip(tables, walked, strict=True), 1):
            for outline, files in zip(outlines, result, strict=False):  # the walk ends at a failure, raised here
                self._take(outline, files)
            progress("files of tables", done, len(tables))

    def _take(self, outline: _TableOutline, walked: WalkedTable | TrinityLakeError) -> None:
        """Add the known files of a table. Raises StorageError if a storage request failed."""
        if isinstance(walked, TrinityLakeError):
            raise walked
        location = to_location(self._root, outline.metadata)
        is_managed = outline.definition is not None and outline.definition.is_managed
        damage = walked.damage
        if damage is not None:
            # Another process, with other settings or permissions, may be able to read it.
            if isinstance(damage, StoragePermissionError) and not is_managed and not walked.has_metadata:
                raise _stopped_by(damage, location) from damage
            ids = [outline.id, *_TABLE_FOLDER.findall(location)]
            self.opaque_ids.update(ids)
            self.in_table_root.opaque_ids.update(ids)
            if not _is_metadata_gone(damage, location, self._root):
                self.damaged[location] = damage.message
                logger.warning("table %s is damaged, so its whole folder is kept: %s", outline.id, damage.message)
        new_files = walked.files
        self.files |= new_files
        self.other_names.update(new_files)
        for uri in filter(is_uri, new_files):  # it may be another name of a file under this root
            self.opaque_ids.update(_TABLE_FOLDER.findall(uri))
            self.opaque_ids.update([outline.id] if is_managed else [])
        self.in_table_root.take(new_files, outline.id if is_managed else None)
        self._walked_metadata.add(outline.metadata)


class TableRootReach:
    """The files of tables under a table root that definitions reach, by path.

    A path is contained if it may be one of these files, the owner file of a table, or in the folder of a table in
    ``opaque_ids``, whose files are unknown or may have other names.

    Args:
        root: The URI of the table root; empty if there is none.
    """

    def __init__(self, root: str):
        self.root = root
        self.managed_ids = CompactUuidSet()
        self.opaque_ids = CompactUuidSet()
        self._files: set[str] = set()
        self._other_names = OtherNames()

    @property
    def paths(self) -> Collection[str]:
        """The reached files, without owner files."""
        return self._files

    def take(self, locations: Collection[str], managed_id: str | None = None) -> None:
        """Add files that a definition reaches.

        Args:
            locations: The locations of the files.
            managed_id: The id of the table, if it is MANAGED.
        """
        if not self.root:
            return
        in_table_root = {location for location in locations if location.startswith(self.root)}
        paths = {location.removeprefix(self.root) for location in in_table_root}
        self._files |= paths
        self._other_names.update(paths)
        external = [location for location in locations if location not in in_table_root]
        self.opaque_ids.update(_TABLE_FOLDER.findall("\n".join(external)))
        if managed_id is not None:
            self.managed_ids.update([managed_id] if any(table_id_in(path) == managed_id for path in paths) else [])
            self.opaque_ids.update([managed_id] if any(map(is_uri, external)) else [])

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        table_id = table_id_in(path) or ""
        if self.opaque_ids.has_like(table_id) or path in self._files:
            return True
        is_owner = path == f"{TABLES_PREFIX}{table_id}/{OWNER_NAME}"
        if is_owner and self.managed_ids.has_like(table_id):
            return True
        return folded(path) in self._files or path in self._other_names


@dataclass(frozen=True, slots=True)
class _TableOutline:
    """The fields of a table's definition that describe its files."""

    id: str
    #: The location of the Iceberg metadata, or an empty string.
    metadata: str
    is_managed_here: bool
    #: The ids of tables whose files are unknown because of this table.
    opaque_ids: tuple[str, ...]
    #: The definition, if the table has Iceberg metadata.
    definition: TableDef | None

    @classmethod
    def of(cls, definition: TableDef, root_uri: str) -> _TableOutline:
        metadata = iceberg_metadata(definition) or ""
        is_managed_here = (
            definition.is_managed and table_id_in(to_location(root_uri, metadata or "none")) == definition.id
        )
        named = (*definition.format_properties.values(), *definition.properties.values())
        opaque_ids = () if metadata else (definition.id, *_TABLE_FOLDER.findall("\n".join(named)))
        return cls(definition.id, metadata, is_managed_here, opaque_ids, definition if metadata else None)


def _is_metadata_gone(error: TrinityLakeError, metadata_location: str, root_uri: str) -> bool:
    """Whether a walk failed because the table's metadata file itself is missing."""
    return isinstance(error, FileMissingError) and to_location(root_uri, error.path or "") == metadata_location


@dataclass(frozen=True, slots=True)
class WalkedTable:
    """The known files that scans of a table open."""

    files: set[str]
    #: The first reason why not all files are known, if any.
    damage: TrinityLakeError | None
    #: Whether the metadata file of the table was read.
    has_metadata: bool


def _live_files(
    definition: TableDef, io: StorageFileIO, reached: set[str], walk: TableWalk
) -> WalkedTable | TrinityLakeError:
    """Return the files that scans of a table open, or the storage failure."""
    files: set[str] = set()
    failures: list[TrinityLakeError] = []
    has_metadata = False
    own_io = io.for_managed(definition.id) if definition.is_managed else None
    try:
        # A missing manifest of a managed table counts as damage.
        for file in walk(definition, io, reached, skips_missing=own_io is None, failures=failures):
            has_metadata = True
            if file.live:
                files.add(file.location)
            if own_io is not None and not failures:
                failures += _foreign_file(file, own_io)
    except DAMAGE as error:
        failures.append(error)
    except TrinityLakeError as error:
        return error
    return WalkedTable(files, failures[0] if failures else None, has_metadata)


def _foreign_file(file: TableFile, own_io: StorageFileIO) -> list[TrinityLakeError]:
    """Return the error if a file does not belong to a managed table, or an empty list if it does."""
    try:
        own_io.check_may_have(to_uri(own_io.root, file.location))
    except DAMAGE as error:
        return [error]
    return []


@dataclass(frozen=True, slots=True)
class OutlineWalk:
    """Work that reads table definitions by location."""

    weight: ClassVar[Weight] = Weight.DEFINITION

    files: LakehouseFiles

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.files.storage,)

    def __call__(self, locations: Sequence[str]) -> list[_TableOutline]:
        """Return the outlines of tables. Raises StorageError."""
        root_uri = self.files.storage.root
        return [_TableOutline.of(definition, root_uri) for definition in self.files.definitions.tables(locations)]


class TableFilesWalk:
    """Work that finds the files of tables. Each item contains all definitions of one table, so no file is read twice.

    In this process, files that an earlier walk of the same table has read are skipped. In other processes, no state is
    shared, because a batch may be repeated.
    """

    weight: ClassVar[Weight] = Weight.TABLE

    def __init__(self, io: StorageFileIO, walk: TableWalk = files_of, *, shares_known: bool = True):
        self._io = io
        self._walk = walk
        #: By table, so that a table that refers to files of another table is detected in any order.
        self._known: dict[str, set[str]] | None = {} if shares_known else None

    def __reduce__(self) -> tuple[object, ...]:
        return (_walk_in_task, (self._io,))

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self._io.storage,)

    def __call__(self, tables: Sequence[Sequence[TableDef]]) -> list[list[WalkedTable | TrinityLakeError]]:
        """Return the files of each definition that the definitions before it do not reach.

        The walk of a table ends at a storage failure, which is the last item in its list.
        """
        return run_parallel(self._walk_definitions, tables, self._io.storage.concurrency)

    def _walk_definitions(self, definitions: Sequence[TableDef]) -> list[WalkedTable | TrinityLakeError]:
        reached = set() if self._known is None else self._known.setdefault(definitions[0].id, set())
        results: list[WalkedTable | TrinityLakeError] = []
        for definition in definitions:
            results.append(_live_files(definition, self._io, reached, self._walk))
            if isinstance(results[-1], TrinityLakeError):
                break
        return results


def _walk_in_task(io: StorageFileIO) -> TableFilesWalk:
    return TableFilesWalk(io, shares_known=False)


def iceberg_metadata(definition: TableDef) -> str | None:
    """Return the location of a table's current metadata file, or None if there is none."""
    return definition.format_properties.get(METADATA_LOCATION) if definition.is_iceberg else None


def _stopped_by(error: TrinityLakeError, metadata_location: str) -> TrinityLakeError:
    """Return an error with instructions for a table whose metadata file is not accessible."""
    stopped = copy.copy(error)
    condition = "its root is allowed" if isinstance(error, LocationNotAllowedError) else "it may be read"
    stopped.message = (
        f"{error.message}; the table of {metadata_location!r} needs it, so nothing is deleted before {condition}, or"
        " no kept version and no export contains the table"
    )
    return stopped


def table_id_in(path: str) -> str | None:
    """Return the id of the table under whose prefix a path is, or None for other paths."""
    match = _TABLE_PATH.fullmatch(path)
    return match[1] if match else None


def table_id_at(location: str, table_root: str) -> str | None:
    """Return the id of the table in whose folder a location is, below the root or below the table root, if any."""
    return table_id_in(location.removeprefix(table_root) if table_root else location)


def is_below_tables(path: str) -> bool:
    """Whether a path is under the prefix of any table."""
    return table_id_in(path) is not None
