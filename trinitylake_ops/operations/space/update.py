"""Bring a space summary up to date: read what was committed since, and write what changed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import is_space_path, new_space_index_path, parse_space_index_path
from trinitylake_ops.iceberg.snapshot_retention import SnapshotRule
from trinitylake_ops.operations.gc.survey import Progress
from trinitylake_ops.operations.space.catalog_update import CatalogUpdate
from trinitylake_ops.operations.space.catalog_walk import OutdatedSummaryError
from trinitylake_ops.operations.space.model import CatalogFile, PartKind, Summary, TableObjects, TableSums
from trinitylake_ops.operations.space.presence import Presence, intersects
from trinitylake_ops.operations.space.stored import (
    MAX_SHARDS,
    Part,
    StoredSummary,
    encode_catalog,
    encode_index,
    encode_objects,
    encode_sums,
    read_index,
    read_objects,
    shard_of,
    write_parts,
)
from trinitylake_ops.operations.space.table_update import TableUpdate
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

logger = logging.getLogger(__name__)

#: The number of tables for each shard.
_TABLES_PER_SHARD = 2_048
#: The age from which files that the newest index does not name are deleted. Concurrent runs may still read them.
_SUPERSEDED_AFTER_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class UpdatedSummary:
    """A summary of the latest version, and how it was made."""

    summary: Summary
    #: The version of the stored summary that was used; None if the summary was made from scratch.
    from_version: int | None
    #: The number of tables whose files were read.
    tables_read: int
    #: Whether the summary is stored, so that the next run reads only what changed.
    is_stored: bool
    #: The versions that exports are copies of, by the path of the export's root.
    exported_versions: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SummaryInputs:
    """What a run updates a summary to."""

    lake: Lakehouse
    #: The version to summarize.
    base: Snapshot
    #: The files with names that begin with ``_``, by path.
    listed: Mapping[str, FileInfo]
    #: The versions that can be read or undeleted, in ascending order.
    versions: Sequence[int]
    #: The size of data files of tables that do not specify one.
    target_bytes: int
    #: Returns which snapshots a trim retains in a table, by its namespace and name.
    rule_of: Callable[[str, str], SnapshotRule]
    progress: Progress
    #: Whether to write the summary, best effort.
    writes: bool


def update_summary(inputs: SummaryInputs) -> UpdatedSummary:
    """Return the summary of a version. Reads the stored summary, and what changed since.

    Raises:
        CorruptFileError: A root or a node is damaged.
        FileMissingError: A node is missing.
        StorageError: The storage failed.
    """
    stored = _read_stored(inputs)
    if stored is not None:
        version = stored.summary.version
        try:
            return _updated(inputs, stored, version)
        except OutdatedSummaryError:
            logger.info("the space summary of version %d cannot be used, so it is made again", version)
    return _updated(inputs, StoredSummary(Summary(inputs.base.definition.id)), None)


def _read_stored(inputs: SummaryInputs) -> StoredSummary | None:
    """Return the newest stored summary that may belong to this lakehouse, or None."""
    versions = {path: parse_space_index_path(path) for path in inputs.listed}
    indexes = [
        (version, inputs.listed[path].last_modified_ms, path)
        for path, version in versions.items()
        if version is not None and version <= inputs.base.version
    ]
    for _, _, path in sorted(indexes, reverse=True):
        try:
            stored = read_index(inputs.lake.storage, path)
        except StorageError as error:  # damaged, written by another release, or deleted by a concurrent run
            logger.info("a space summary cannot be used: %s", error.message)
            continue
        summary = stored.summary
        known = [version for version in inputs.versions if version <= summary.version]
        if summary.lakehouse_id == inputs.base.definition.id and summary.created_ms.keys() >= set(known):
            return stored
    return None


def _updated(inputs: SummaryInputs, stored: StoredSummary, from_version: int | None) -> UpdatedSummary:
    """Update a summary in place, and write it.

    Raises:
        OutdatedSummaryError: The stored summary contradicts the lakehouse.
        StorageError: The storage failed.
    """
    summary = stored.summary
    before = (summary.version, set(summary.created_ms), dict(summary.exports))
    catalog = CatalogUpdate(inputs.lake, inputs.base, inputs.listed, inputs.versions, inputs.progress)
    catalog.run(summary)
    tables = TableUpdate(summary, catalog, inputs.target_bytes, inputs.rule_of, inputs.progress)
    writer = _Writer(inputs, stored)
    writer.choose_shards()
    for shard, changed in writer.shards_of(tables.changed()):
        objects = writer.objects(shard)
        if tables.update(changed, objects) or writer.is_resharding:
            writer.put_objects(shard, objects)
    _prune(summary, inputs.versions)
    is_same = before == (summary.version, set(summary.created_ms), dict(summary.exports))
    is_stored = writer.finish(is_needed=not is_same or from_version is None)
    return UpdatedSummary(summary, from_version, tables.n_read, is_stored, catalog.exported_versions)


def _prune(summary: Summary, versions: Sequence[int]) -> None:
    """Remove what no existing version and no export reaches any more."""
    existing = sorted({*versions, *summary.export_numbers()})
    kept: dict[Presence, bool] = {}

    def is_kept(presence: Presence) -> bool:
        if presence not in kept:
            kept[presence] = intersects(presence, existing)
        return kept[presence]

    for number in [number for number, file in summary.catalog.items() if not is_kept(file.presence)]:
        del summary.catalog[number]
        summary.changed_catalog.add(number)
    needed = {file.table for file in summary.catalog.values()}
    for number, table in list(summary.tables.items()):
        gone = [group for group in table.groups if not is_kept(group.reach)]
        for group in gone:
            del table.groups[group]
        if number not in needed:
            del summary.tables[number]
        if gone or number not in needed:
            summary.changed_tables.add(number)


class _Writer:
    """Writes the parts that changed, and the index. A failure to write only makes the next run read more."""

    def __init__(self, inputs: SummaryInputs, stored: StoredSummary):
        self._storage: Storage = inputs.lake.storage
        self._inputs = inputs
        self._stored = stored
        self._is_writing = inputs.writes
        #: The files of all tables, while the number of shards changes.
        self._resharded: dict[int, TableObjects] | None = None
        for kind in PartKind:
            stored.parts.setdefault(kind, [None] * stored.summary.n_shards)

    def choose_shards(self) -> None:
        """Increase the number of shards if there are many more tables than before."""
        summary, n_shards = self._stored.summary, 1
        while n_shards < MAX_SHARDS and n_shards * _TABLES_PER_SHARD < len(summary.tables):
            n_shards *= 2
        if n_shards <= summary.n_shards:
            return
        self._resharded = {}
        for part in self._stored.parts[PartKind.OBJECTS]:
            self._resharded |= read_objects(self._storage, part)
        summary.n_shards = n_shards
        self._stored.parts = {kind: [None] * n_shards for kind in PartKind}
        summary.changed_catalog.update(summary.catalog)
        summary.changed_tables.update(summary.tables)

    @property
    def is_resharding(self) -> bool:
        """Whether the files of all tables have to be written."""
        return self._resharded is not None

    def shards_of(self, changed: Sequence[int]) -> list[tuple[int, list[int]]]:
        """Return each shard whose files of tables have to be written, with the changed tables in it."""
        summary = self._stored.summary
        by_shard: dict[int, list[int]] = {shard: [] for shard in range(summary.n_shards)} if self._resharded else {}
        for number in changed:
            by_shard.setdefault(shard_of(number, summary), []).append(number)
        return sorted(by_shard.items())

    def objects(self, shard: int) -> dict[int, TableObjects]:
        """Return the known files of the tables in a shard."""
        if self._resharded is None:
            return read_objects(self._storage, self._stored.parts[PartKind.OBJECTS][shard])
        summary = self._stored.summary
        return {table: objects for table, objects in self._resharded.items() if shard_of(table, summary) == shard}

    def put_objects(self, shard: int, objects: Mapping[int, TableObjects]) -> None:
        """Write the files of the tables in a shard."""
        tables = self._stored.summary.tables
        kept = {table: files for table, files in objects.items() if files and table in tables}
        (part,) = self._written([encode_objects(kept) if kept else None])
        self._stored.parts[PartKind.OBJECTS][shard] = part

    def finish(self, *, is_needed: bool) -> bool:
        """Write the other parts and the index, if anything changed. Return whether the summary is stored."""
        stored, summary = self._stored, self._stored.summary
        if not (is_needed or summary.changed_catalog or summary.changed_tables):
            return True
        catalog_shards = sorted({shard_of(number, summary) for number in summary.changed_catalog})
        sums_shards = sorted({shard_of(number, summary) for number in summary.changed_tables})
        files: dict[int, list[tuple[int, CatalogFile]]] = {shard: [] for shard in catalog_shards}
        for number, file in summary.catalog.items():
            if (shard := shard_of(number, summary)) in files:
                files[shard].append((number, file))
        tables: dict[int, list[TableSums]] = {shard: [] for shard in sums_shards}
        for number, table in summary.tables.items():
            if (shard := shard_of(number, summary)) in tables:
                tables[shard].append(table)
        contents = [
            *(encode_catalog(rows) if rows else None for rows in files.values()),
            *(encode_sums(rows) if rows else None for rows in tables.values()),
        ]
        places = [
            *((PartKind.CATALOG, shard) for shard in catalog_shards),
            *((PartKind.SUMS, shard) for shard in sums_shards),
        ]
        for (kind, shard), part in zip(places, self._written(contents), strict=True):
            stored.parts[kind][shard] = part
        return self._write_index()

    def _written(self, contents: Sequence[bytes | None]) -> list[Part | None]:
        if not self._is_writing:
            return [None] * len(contents)
        try:
            return write_parts(self._storage, contents)
        except StorageError as error:
            self._fail(error)
            return [None] * len(contents)

    def _write_index(self) -> bool:
        if not self._is_writing:
            return False
        path = new_space_index_path(self._stored.summary.version)
        try:
            create_fresh(self._storage, {path: encode_index(self._stored, path)})
        except StorageError as error:
            self._fail(error)
            return False
        self._delete_superseded(path)
        return True

    def _fail(self, error: StorageError) -> None:
        self._is_writing = False
        logger.warning("the space summary was not stored, so the next run reads more: %s", error.message)

    def _delete_superseded(self, index: str) -> None:
        """Delete old files of summaries that the new index does not name, best effort."""
        before_ms = self._storage.now_ms() - _SUPERSEDED_AFTER_MS
        kept = self._stored.paths() | {index}
        superseded = [
            path
            for path, info in self._inputs.listed.items()
            if is_space_path(path) and path not in kept and info.last_modified_ms < before_ms
        ]
        for path, error in self._storage.delete_many(superseded).items() if superseded else ():
            logger.info("the superseded file %r was not deleted: %s", path, error.message)
