"""The copies of an export: three steps, each of which can be repeated."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trinitylake_ops.errors import (
    ExportNotFoundError,
    FileMissingError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, LakehouseDef
from trinitylake_ops.format.file_names import owner_path, table_prefix
from trinitylake_ops.format.locations import to_location
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io, writing_io
from trinitylake_ops.iceberg.managed import claim_folder, claim_location
from trinitylake_ops.operations.base import MeteredLakehouse, uncached_on
from trinitylake_ops.operations.executor import Executor
from trinitylake_ops.operations.export_records import CopiedFile, begin, begin_manifest, complete, finish_manifest
from trinitylake_ops.operations.exports.content import Choice, Content, TableCopy, chosen_entries, gather
from trinitylake_ops.operations.exports.copy import Copier
from trinitylake_ops.operations.exports.outcome import (
    Destination,
    ExportReport,
    after_failure,
    clean_up_if_dropped,
    reasons,
)
from trinitylake_ops.operations.exports.roots import (
    TargetExport,
    TargetLakehouse,
    Write,
    built_root,
    copied_root,
    export_id,
    lakehouse_def_copy,
    root_in_same_lakehouse,
)
from trinitylake_ops.operations.exports.target_files import (
    IncompleteTable,
    TargetFiles,
    check_definitions,
    check_recopied,
    missing_content,
)
from trinitylake_ops.operations.gc.survey import Progress
from trinitylake_ops.storage import FileInfo, Storage, open_storage
from trinitylake_ops.storage.local.posix_files import make_root_folder
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.versions.snapshot import Snapshot


def claim_table_folders(io: StorageFileIO, tables: Sequence[TableCopy], definition: LakehouseDef) -> dict[str, Storage]:
    """Write the owner files of the folders that copies go to. Returns the storages beyond the own root, by their roots.

    ``io`` writes files of the lakehouse that has the copies, with ``definition``. Raises LocationNotAllowedError for a
    folder of another lakehouse or a table root that is that of a copy of this one, StorageError.
    """
    places = {table.places.table_id: table.places for table in tables}
    roots = sorted({one.target_root for one in places.values()})
    storages = {root: io.storage_at(root) for root in roots if root != io.root}

    def claim(table_id: str) -> None:
        root = places[table_id].target_root
        if root == io.root:
            claim_folder(io.storage, table_id, definition.id)
        else:
            io.folders.check(storages[root], owner_path(table_id))

    run_parallel(in_one_round_trip(claim), sorted(places), io.storage.concurrency)
    return storages


def existing_files_in(storages: Mapping[str, Storage], tables: Sequence[TableCopy]) -> dict[str, int]:
    """Return the sizes in bytes of the files that stand in folders of tables beyond the own root, by their paths.

    Raises StorageError.
    """
    found: dict[str, int] = {}
    for root, storage in storages.items():
        for table_id in sorted({one.places.table_id for one in tables if one.places.target_root == root}):
            found |= {info.path: info.size_bytes for info in storage.list(table_prefix(table_id))}
    return found


@dataclass(frozen=True)
class Opened:
    """The version to export, a reader of its files, and the lakehouse at another root."""

    source: Snapshot
    io: StorageFileIO
    target: TargetLakehouse | None
    target_options: Mapping[str, str] | None


@dataclass(frozen=True)
class ExportWork:
    """One export with all its copies, ready to be done."""

    opened: Opened
    record: ExportRecord
    choice: Choice
    content: Content
    executor: Executor

    @property
    def source(self) -> Snapshot:
        """The version to export."""
        return self.opened.source

    @property
    def target(self) -> TargetLakehouse | None:
        """The lakehouse at another root, None for an export that stays."""
        return self.opened.target

    @classmethod
    def on(
        cls,
        lake: Lakehouse,
        source: Snapshot,
        record: ExportRecord,
        choice: Choice,
        target_options: Mapping[str, str] | None,
        executor: Executor,
    ) -> ExportWork:
        """Find the files to copy. Raises what :func:`plan_export` raises."""
        io = reading_io(lake)
        target = None
        destination = Destination.same_root(lake.root, export_id(record))
        if record.target_uri:
            there = uncached_on(open_storage(record.target_uri, target_options), target_options)
            target = TargetLakehouse.open(there, source, choice)
            destination = Destination.other_root(record.target_uri, source.definition.id, choice.level)
        content = Content()
        if choice.level != ExportLevel.MINIMAL:
            there_already = {} if target is None else target.entries()
            own_io = io if target is None else None
            content = gather(source, choice, destination, io, there_already, executor=executor, own_io=own_io)
        if choice.copies_definitions and target is None:
            content.add_lakehouse_def(source.definition_location, lakehouse_def_copy(export_id(record)))
        return cls(Opened(source, io, target, target_options), record, choice, content, executor)

    @property
    def into_version(self) -> int | None:
        """The version that the lakehouse at the target has, None where there is none."""
        return None if self.target is None or self.target.base is None else self.target.base.version

    @property
    def known_bytes(self) -> int:
        """Bytes of the root of a minimal export, else of data files and manifests."""
        if self.choice.level == ExportLevel.MINIMAL:
            return self.source.files.storage.stat(self.source.location).size_bytes
        return self.content.known_bytes

    def run(self, lake: Lakehouse, retain_for_ms: int | None, progress: Progress) -> ExportReport:
        """Make the export in three steps. Raises what :meth:`ExportPlan.execute` raises."""
        metered = MeteredLakehouse(lake)
        retain_until_ms = None if retain_for_ms is None else lake.storage.now_ms() + retain_for_ms
        wanted = replace(self.record, created_at_millis=lake.storage.now_ms(), retain_until_millis=retain_until_ms)
        make_root_folder(wanted.target_uri)
        record, resumed = begin(metered.lake, wanted, self._check_source)
        work = replace(self, record=record)
        if record.manifest_path != self.record.manifest_path:  # another run began it since the plan
            work = ExportWork.on(lake, self.source, record, self.choice, self.opened.target_options, self.executor)
        try:
            if work.target is None:
                copied = work.copy_within(metered, progress, resumed=resumed)
            else:
                copied = work.copy_to_target(metered, progress)
            until_ms = None if retain_for_ms is None else lake.storage.now_ms() + retain_for_ms
            version = complete(metered.lake, record, copied.root_location, until_ms, self._check_source)
        except TrinityLakeError as error:
            if isinstance(error, ExportNotFoundError | FileMissingError):
                clean_up_if_dropped(metered.lake, record)
            if isinstance(error, ExportNotFoundError):
                raise
            raise after_failure(metered.lake, record, error, resumed=resumed) from error
        return ExportReport(
            name=record.name,
            version=record.version,
            level=record.level.name.lower(),
            location=copied.root_location,
            manifest_path=record.manifest_path,
            committed_version=version,
            target_version=copied.target_version,
            files=copied.files,
            copied_files=copied.copier.copied_files,
            copied_bytes=copied.copier.copied_bytes,
            resumed=resumed,
            registered=tuple(sorted(work.content.registered)),
            damaged=reasons(copied.damaged),
            cost=metered.cost(),
        )

    def _check_source(self, base: Snapshot) -> None:
        """Raise ExportNotFoundError if the source is another export that was dropped. Its files are not kept."""
        if self.source.location == base.files.roots.path(self.source.version):
            return
        exported = base.definition.exported_snapshots.values()
        if self.source.location not in (to_location(base.files.storage.root, location) for location in exported):
            raise ExportNotFoundError(
                f"the export at {self.source.location!r}, which was to be exported as {self.record.name!r}, was dropped"
                f" meanwhile; drop {self.record.name!r}, too"
            )

    def copy_within(self, metered: MeteredLakehouse, progress: Progress, *, resumed: bool) -> _Copied:
        """Copy within the lakehouse. The root of a minimal export is the source's own."""
        storage = metered.lake.storage
        there = {info.path: info.size_bytes for info in storage.list()} if resumed else {}
        copier = Copier(storage, there, progress=progress, n_expected=self.content.n_files + 1, executor=self.executor)
        copier.skips_damaged = True
        io = writing_io(metered.lake)
        if self.choice.level == ExportLevel.MINIMAL:
            root = copied_root(self.source, self.record.root_location)
        else:
            targets = [*self.content.targets(), *((None, path) for path in self._node_paths())]
            begin_manifest(storage, self.record, targets, with_definitions=self.choice.with_definitions)
            copier.table_storages = claim_table_folders(io, self.content.tables, self.source.definition)
            if resumed:
                copier.there |= existing_files_in(copier.table_storages, self.content.tables)
            copier.copy_content(self.content, io)
            tree = self._built_tree(copier.place)
            copied_def = lakehouse_def_copy(export_id(self.record))
            definition_path = copied_def if self.choice.copies_definitions else self.source.definition_location
            root = root_in_same_lakehouse(self.source, tree, definition_path, self.record.root_location)
        files = [*copier.files, CopiedFile.of(self.source.location, self.record.root_location, root)]
        finish_manifest(storage, self.record, files, with_definitions=self.choice.with_definitions)
        copier.place({self.record.root_location: root})
        return _Copied(copier, self.record.root_location, len(files), None, self.content.damaged)

    def _built_tree(self, write: Write) -> NodeFile:
        limits, created_at_ms = TreeLimits.of(self.source.definition), self.record.created_at_millis
        return built_root(self.content.entries, limits, export_id(self.record), created_at_ms, write)

    def _node_paths(self) -> list[str]:
        """Return the locations of the nodes: the manifest names them before they are written."""
        paths: list[str] = []
        self._built_tree(paths.extend)
        return paths

    def copy_to_target(self, metered: MeteredLakehouse, progress: Progress) -> _Copied:
        """Copy to another root, unless an earlier run has done so. Commit a version there."""
        assert self.target is not None
        lake = self.target.lake
        storage = metered.also(lake.storage)
        target = replace(self.target, lake=uncached_on(storage, lake.storage_options))
        writer = TargetExport(target, self.source, metered.lake.root, self.record, self.choice)
        copier = Copier(storage, progress=progress, n_expected=self.content.n_files + 1, executor=self.executor)
        copier.skips_damaged = True
        txn = writer.begin()
        listed = list(storage.list())
        copier.there = {info.path: info.size_bytes for info in listed}
        check_definitions(self.content, self.choice, lake.root, copier.there)
        state = TargetFiles()
        if self.target.base is not None and self.choice.level == ExportLevel.FULL:
            state = TargetFiles.of(target.lake, self.target.base, self.content, copier.there)
        copier.known, copier.replaced = state.known, state.lost
        content = self.content
        if txn is not None:
            content = self._unendangered_content(txn, listed, state.known | state.lost)
        if state.tables:
            content = self._with_missing_files(content, state.tables)
            copier.known = copier.known.union(*(table.known for table in state.tables))
            copier.replaced = copier.replaced.union(*(table.lost for table in state.tables))
        for table_id in self._table_ids():
            claim_location(storage, f"{storage.root}{table_prefix(table_id)}".rstrip("/"), writer.target_definition)
        copier.copy_content(content, StorageFileIO.on(metered.lake.storage, self.opened.io.storage_options))
        check_recopied(state.tables, content, target.lake, copier.sizes_bytes)
        tree = NodeFile() if txn is not None else writer.whole_tree(content.entries, copier.place)
        finish_manifest(metered.lake.storage, self.record, copier.files, with_definitions=self.choice.with_definitions)
        version = writer.put(tree) if txn is None else writer.commit(txn, content.entries)
        location = f"{storage.root}{target.lake.files.roots.path(version)}"
        return _Copied(copier, location, len(copier.files) + 1, version, self.content.damaged | content.damaged)

    def _unendangered_content(self, txn: Transaction, listed: Iterable[FileInfo], known: Container[str]) -> Content:
        """Return the files to copy into a lakehouse that others may clean up meanwhile.

        Names may be taken there by files that its latest version does not reach. These are copies of an export that was
        cut off, or files of older versions, which can be purged. Young files are taken over, and the transaction is as
        old as they are. If one is older than half its time to live, all copies get other names.
        """
        modified_ms = {info.path: info.last_modified_ms for info in listed}
        eldest_ms = txn.base.files.storage.now_ms() - txn.base.definition.txn_ttl_millis // 2
        for generation in itertools.count():
            content = self._renamed_content(generation)
            targets = {target for _, target in content.targets() if target not in known}
            oldest_ms = min((modified_ms[target] for target in targets & modified_ms.keys()), default=None)
            if oldest_ms is None:
                return content
            if oldest_ms >= eldest_ms:
                txn.backdate(oldest_ms)
                return content
        raise AssertionError("unreachable")

    def _renamed_content(self, generation: int) -> Content:
        """Return the files to copy under the names of a generation. Files that the target has keep their names."""
        if not generation:
            return self.content
        assert self.target is not None
        names = Destination.other_root(self.record.target_uri, self.source.definition.id, self.choice.level, generation)
        there = self.target.entries()
        unchanged = {key: place for key, place in self.content.entries if there.get(key) == place}
        chosen = chosen_entries(self.source, self.choice.namespaces)
        changed = [(key, location) for key, location in chosen if key not in unchanged]
        content = gather(self.source, self.choice, names, self.opened.io, entries=changed, executor=self.executor)
        content.entries = sorted([*unchanged.items(), *content.entries])
        return content

    def _with_missing_files(self, content: Content, tables: Collection[IncompleteTable]) -> Content:
        """Return the files to copy with those of unchanged tables that the target lacks."""
        names = Destination.other_root(self.record.target_uri, self.source.definition.id, self.choice.level)
        again = missing_content(tables, self.source, self.choice, names, self.opened.io, self.executor)
        left_out = {table.key for table in tables} - {key for key, _ in again.entries}
        copied = {
            key: [*content.copied.get(key, ()), *again.copied.get(key, ())] for key in content.copied | again.copied
        }
        return replace(
            content,
            entries=[(key, location) for key, location in content.entries if key not in left_out],
            tables=[*content.tables, *again.tables],
            damaged=content.damaged | again.damaged,
            copied=copied,
        )

    def _table_ids(self) -> list[str]:
        return sorted({table.places.table_id for table in self.content.tables})


@dataclass(frozen=True)
class _Copied:
    copier: Copier
    root_location: str
    files: int
    target_version: int | None
    damaged: Mapping[str, TrinityLakeError]
