"""Exports: a version kept under a name, in its own lakehouse or as another one (docs/protocol.md, "Export").

An export takes three steps, each of which can be repeated. A commit records it as COPYING, which keeps the version from
expiring. The files are copied, the root last. A commit records it as COMPLETE. An export that was cut off goes on where
it stopped when it is executed again.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from trinitylake_ops.errors import ExportNotFoundError, FileMissingError, InvalidInputError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState
from trinitylake_ops.format.file_names import new_export_root_path, new_manifest_path, table_prefix
from trinitylake_ops.format.locations import is_uri, normalize_root_uri, to_location
from trinitylake_ops.format.nodes.node_file import NodeFile
from trinitylake_ops.format.nodes.system_rows import MAX_TIME_MS
from trinitylake_ops.maintenance.exports.content import Choice, Content, chosen_entries, gather
from trinitylake_ops.maintenance.exports.copy import Copier
from trinitylake_ops.maintenance.exports.destination import Destination
from trinitylake_ops.maintenance.exports.roots import (
    TargetExport,
    TargetLakehouse,
    Write,
    built_root,
    copied_root,
    export_id,
    lakehouse_def_copy,
    root_in_same_lakehouse,
)
from trinitylake_ops.maintenance.plans.cost import Cost, MeteredLakehouse, uncached_on
from trinitylake_ops.maintenance.plans.document import Document, Table, new_table
from trinitylake_ops.maintenance.plans.executor import LOCAL, Executor
from trinitylake_ops.maintenance.plans.plan import Plan, digest_of
from trinitylake_ops.maintenance.plans.retention import duration_ms
from trinitylake_ops.maintenance.reach.survey import Progress, no_progress
from trinitylake_ops.maintenance.state.export_manifest import CopiedFile, begin_manifest, finish_manifest
from trinitylake_ops.maintenance.state.export_records import (
    EXPORT,
    begin,
    check_copying,
    check_name,
    check_unused,
    complete,
    is_cut_off,
    record_of,
)
from trinitylake_ops.storage import FileInfo, open_storage
from trinitylake_ops.tables.files.reach import files_of
from trinitylake_ops.tables.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.tables.ownership import claim_location
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree.nodes.node import TreeLimits
from trinitylake_ops.versions.snapshot import Snapshot

LEVELS = tuple(level.name.lower() for level in ExportLevel)


@dataclass(frozen=True, kw_only=True)
class ExportReport(Document):
    """A finished export: its root's location, and the copies that this run sent.

    ``files`` are all its files. ``target_version`` is the version of the lakehouse at another root.
    """

    name: str
    version: int
    level: str
    location: str
    manifest_path: str
    committed_version: int
    target_version: int | None
    files: int
    copied_files: int
    copied_bytes: int
    resumed: bool
    cost: Cost

    def table(self) -> Table:
        """Return one row."""
        row = (self.name, self.version, self.level, self.location, self.files, self.copied_files, self.copied_bytes)
        columns = ("name", "version", "level", "root", "files", "files copied", "bytes copied")
        return new_table("Export", *columns, rows=[row])


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """The copies that an export would make. ``files`` includes the root, but not nodes, which are built anew.

    ``bytes`` counts the sizes known before: the root of a minimal export, else data files and manifests. ``resumes``
    says that a cut-off export of this name goes on. ``into_version`` is the present version of the lakehouse at the
    target, None if there is none.
    """

    base_version: int
    name: str
    version: int
    level: str
    namespaces: tuple[str, ...]
    definitions: bool
    target: str | None
    into_version: int | None
    retain_for_ms: int | None
    files: int
    bytes: int
    resumes: bool
    _lake: Lakehouse = field(repr=False, compare=False)
    work: _Work = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the name, the version, the copied files and their targets."""
        choice = (self.version, self.level, list(self.namespaces), self.definitions, self.target, self.into_version)
        return digest_of(self.base_version, EXPORT, self.name, *choice, self.retain_for_ms, self.files, self.bytes)

    @property
    def is_empty(self) -> bool:
        """Always False: an export is recorded in any case."""
        return False

    def table(self) -> Table:
        """Return one row."""
        where = self.target or "its own lakehouse"
        state = "goes on" if self.resumes else "new"
        row = (self.name, self.version, self.level, ", ".join(self.namespaces), where, self.files, self.bytes, state)
        columns = ("name", "version", "level", "namespaces", "to", "files", "bytes", "state")
        return new_table("Export plan", *columns, rows=[row])

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> ExportReport:
        """Export, or finish an export that was cut off. The run that finishes it says how long it is retained.

        Raises PlanChangedError when an approved digest is not that of the plan made again now. Raises CorruptFileError
        when a copy is not the source, ExportExistsError, VersionExpiredError, CommitConflictError, StorageError.
        """
        plan = self
        if approved_digest is not None:
            plan = self._again()
            plan.check_approved(approved_digest)
        return plan.work.run(self._lake, self.retain_for_ms, progress)

    def _again(self) -> ExportPlan:
        return plan_export(
            self._lake,
            self.name,
            self.level,
            self.version,
            self.target,
            self.retain_for_ms,
            namespaces=self.namespaces,
            definitions=self.definitions,
            target_options=self.work.target_options,
            executor=self.work.executor,
        )


def plan_export(
    lake: Lakehouse,
    name: str,
    level: str = "minimal",
    version: int | str | None = None,
    target: str | None = None,
    retain_for: timedelta | int | None = None,
    *,
    namespaces: Sequence[str] = (),
    definitions: bool = False,
    target_options: Mapping[str, str] | None = None,
    executor: Executor = LOCAL,
) -> ExportPlan:
    """Plan an export of a version, by default the latest. Only reads.

    ``level`` "minimal" copies the root. "partial" copies the nodes, too, and with ``definitions`` these. "full" copies
    everything, with the files of managed tables. Partial and full ones can be limited to ``namespaces``. ``target`` is
    another root, where the export becomes a lakehouse of its own. ``target_options`` are for its storage. By default
    they are those of this storage if the scheme is the same. If earlier exports of this lakehouse made one there, it
    gets one more version, and only new files are copied. ``retain_for``, a timedelta or milliseconds, is how long the
    export keeps its version from expiring. None means until it is dropped, or for a full one until it is complete.
    ``executor`` finds the files to copy, and copies them when the plan is executed.

    Raises InvalidNameError, ExportExistsError, NamespaceNotFoundError, VersionNotFoundError, VersionExpiredError,
    StorageError. Raises InvalidInputError for an impossible export.
    """
    check_name(name)
    choice = _choice(level, namespaces, definitions)
    retain_for_ms = _retained_ms(lake, retain_for)
    target_uri = _target_uri(lake, target)
    latest = lake.snapshot()
    existing = record_of(latest.definition, name)
    if version is None and existing is not None and existing.state == ExportState.COPYING:
        version = existing.version
    source = latest if version is None else lake.snapshot(version)
    if source.files is not lake.files:
        raise InvalidInputError(f"export {version!r} is a lakehouse of its own; export from there")
    wanted = ExportRecord(
        name=name,
        version=source.version,
        level=choice.level,
        target_uri=target_uri,
        root_location="" if target_uri else new_export_root_path(),
        namespaces=choice.namespaces,
        manifest_path=new_manifest_path(),
    )
    resumes = existing is not None and is_cut_off(existing, wanted)
    if not resumes:
        check_unused(latest.definition, name)
    target_options = target_options if target_options is not None else options_for(lake, target_uri)
    record = existing if resumes and existing else wanted
    work = _Work.on(lake, source, record, choice, target_options, executor)
    return ExportPlan(
        base_version=latest.version,
        name=name,
        version=source.version,
        level=level,
        namespaces=choice.namespaces,
        definitions=choice.with_definitions,
        target=target_uri or None,
        into_version=work.into_version,
        retain_for_ms=retain_for_ms,
        files=work.content.n_files + 1,
        bytes=work.known_bytes,
        resumes=resumes,
        _lake=lake,
        work=work,
    )


def _choice(level: str, namespaces: Sequence[str], definitions: bool) -> Choice:
    if level not in LEVELS:
        raise InvalidInputError(f"level {level!r} cannot be exported; levels: {', '.join(LEVELS)}")
    if level == "minimal" and namespaces:
        raise InvalidInputError("a minimal export is that of all namespaces; choose some for a partial or full one")
    if level != "partial" and definitions:
        raise InvalidInputError(f"only for partial exports there is a choice of definitions, not for a {level} one")
    return Choice(ExportLevel[level.upper()], tuple(sorted(set(namespaces))), definitions)


def _retained_ms(lake: Lakehouse, retain_for: timedelta | int | None) -> int | None:
    if retain_for is None:
        return None
    retain_for_ms = duration_ms(retain_for, "retain_for")
    if retain_for_ms == 0:
        raise InvalidInputError(f"an export is retained for more than 0 ms, not for {retain_for_ms}")
    if lake.storage.now_ms() + retain_for_ms > MAX_TIME_MS:
        raise InvalidInputError("an export is retained until the year 9999 at most; leave the duration out for ever")
    return retain_for_ms


def _target_uri(lake: Lakehouse, target: str | None) -> str:
    if target is None:
        return ""
    root = normalize_root_uri(target)
    if root.startswith(lake.root) or lake.root.startswith(root):
        raise InvalidInputError(
            f"target {root!r} is, or lies in, or holds the lakehouse itself; leave it out for an export that stays here"
        )
    return root


@dataclass(frozen=True)
class _Work:
    """One export with all its copies, ready to be done."""

    source: Snapshot
    record: ExportRecord
    choice: Choice
    content: Content
    io: StorageFileIO
    target: TargetLakehouse | None
    target_options: Mapping[str, str] | None
    executor: Executor

    @classmethod
    def on(
        cls,
        lake: Lakehouse,
        source: Snapshot,
        record: ExportRecord,
        choice: Choice,
        target_options: Mapping[str, str] | None,
        executor: Executor,
    ) -> _Work:
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
            content = gather(source, choice, destination, io, there_already, executor=executor)
        if choice.copies_definitions and target is None:
            content.add_lakehouse_def(source.definition_location, lakehouse_def_copy(export_id(record)))
        return cls(source, record, choice, content, io, target, target_options, executor)

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
        record, resumed = begin(metered.lake, wanted, self._check_source)
        work = replace(self, record=record)
        if record.manifest_path != self.record.manifest_path:  # another run began it since the plan
            work = _Work.on(lake, self.source, record, self.choice, self.target_options, self.executor)
        try:
            if work.target is None:
                copied = work.copy_here(metered, progress, resumed=resumed)
            else:
                copied = work.copy_elsewhere(metered, progress)
            until_ms = None if retain_for_ms is None else lake.storage.now_ms() + retain_for_ms
            version = complete(metered.lake, record, copied.root_location, until_ms, self._check_source)
        except (ExportNotFoundError, FileMissingError):
            _clean_up_if_dropped(metered.lake, work)
            raise
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

    def copy_here(self, metered: MeteredLakehouse, progress: Progress, *, resumed: bool) -> _Copied:
        """Copy within the lakehouse. The root of a minimal export is the source's own."""
        storage = metered.lake.storage
        there = {info.path: info.size_bytes for info in storage.list()} if resumed else {}
        copier = Copier(storage, there, progress=progress, n_expected=self.content.n_files + 1, executor=self.executor)
        if self.choice.level == ExportLevel.MINIMAL:
            root = copied_root(self.source, self.record.root_location)
        else:
            targets = [*self.content.targets(), *((None, path) for path in self._node_paths())]
            begin_manifest(storage, self.record, targets, with_definitions=self.choice.with_definitions)
            for table_id in self._table_ids():
                claim_location(storage, f"{storage.root}{table_prefix(table_id)}".rstrip("/"), self.source.definition)
            copier.copy_content(self.content, StorageFileIO.on(storage, self.io.storage_options, read_only=True))
            tree = self._built_tree(copier.place)
            copied_def = lakehouse_def_copy(export_id(self.record))
            definition_path = copied_def if self.choice.copies_definitions else self.source.definition_location
            root = root_in_same_lakehouse(self.source, tree, definition_path, self.record.root_location)
        files = [*copier.files, CopiedFile.of(self.source.location, self.record.root_location, root)]
        finish_manifest(storage, self.record, files, with_definitions=self.choice.with_definitions)
        copier.place({self.record.root_location: root})
        return _Copied(copier, self.record.root_location, len(files), None)

    def _built_tree(self, write: Write) -> NodeFile:
        limits, created_at_ms = TreeLimits.of(self.source.definition), self.record.created_at_millis
        return built_root(self.content.entries, limits, export_id(self.record), created_at_ms, write)

    def _node_paths(self) -> list[str]:
        """Return the locations of the nodes: the manifest names them before they are written."""
        paths: list[str] = []
        self._built_tree(paths.extend)
        return paths

    def copy_elsewhere(self, metered: MeteredLakehouse, progress: Progress) -> _Copied:
        """Copy to another root, unless an earlier run has done so. Commit a version there."""
        assert self.target is not None
        lake = self.target.lake
        storage = metered.also(lake.storage)
        target = replace(self.target, lake=uncached_on(storage, lake.storage_options))
        writer = TargetExport(target, self.source, metered.lake.root, self.record, self.choice)
        copier = Copier(storage, progress=progress, n_expected=self.content.n_files + 1, executor=self.executor)
        txn = writer.begin()
        listed = list(storage.list())
        copier.there = {info.path: info.size_bytes for info in listed}
        copier.known = self._known() & copier.there.keys()
        self._check_standing(copier.there)
        content = self.content if txn is None else self._unendangered_content(txn, listed, copier.known)
        for table_id in self._table_ids():
            claim_location(storage, f"{storage.root}{table_prefix(table_id)}".rstrip("/"), writer.target_definition)
        copier.copy_content(content, StorageFileIO.on(metered.lake.storage, self.io.storage_options))
        tree = NodeFile() if txn is not None else writer.whole_tree(content.entries, copier.place)
        finish_manifest(metered.lake.storage, self.record, copier.files, with_definitions=self.choice.with_definitions)
        version = writer.put(tree) if txn is None else writer.commit(txn, content.entries)
        location = f"{storage.root}{target.lake.files.roots.path(version)}"
        return _Copied(copier, location, len(copier.files) + 1, version)

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
                txn.date_back(oldest_ms)
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
        content = gather(self.source, self.choice, names, self.io, entries=changed, executor=self.executor)
        content.entries = sorted([*unchanged.items(), *content.entries])
        return content

    def _check_standing(self, there: Container[str]) -> None:
        """Raise FileMissingError if the target has lost a definition that its tree points to."""
        assert self.target is not None
        new = {copy.target for copy in self.content.definitions}
        for _, place in self.content.entries:
            if self.choice.copies_definitions and not is_uri(place) and place not in new and place not in there:
                raise FileMissingError(
                    f"the lakehouse at {self.target.lake.root} has lost {place!r}, which an earlier export copied:"
                    " restore it there, or export to another target",
                    path=place,
                )

    def _table_ids(self) -> list[str]:
        return sorted({table.places.table_id for table in self.content.tables})

    def _known(self) -> frozenset[str]:
        """Return the files of the tables to copy that the target's version already has.

        Its definitions are only read if there are such tables. Definitions that a partial export left at its source
        vanish from there with that export.
        """
        ids = set(self._table_ids())
        if self.target is None or self.target.base is None or not ids:
            return frozenset()
        base, lake = self.target.base, self.target.lake
        io = reading_io(lake)
        found: set[str] = set()
        for key, location in self.target.entries().items():
            name = base.keys.decode(key)
            if name is not None and name.table is not None:
                definition = base.table_at(location)
                if definition.id in ids:
                    found.update(file.location for file in files_of(definition, io) if file.live)
        return frozenset(found)


@dataclass(frozen=True)
class _Copied:
    copier: Copier
    root_location: str
    files: int
    target_version: int | None


def _clean_up_if_dropped(lake: Lakehouse, work: _Work) -> None:
    """Delete root and manifest of an export that was dropped meanwhile, and raise ExportNotFoundError for it.

    A removal of orphans deletes the other copies.
    """
    latest = lake.snapshot()
    try:
        check_copying(latest, work.record)
    except ExportNotFoundError:
        discard(lake.storage, [path for path in (work.record.root_location, work.record.manifest_path) if path])
        raise
