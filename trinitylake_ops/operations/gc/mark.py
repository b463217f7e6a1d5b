"""Decides which files are kept, which are reachable, and which may be deleted (docs/internals/protocol.md).

A file is deleted only because no kept root reaches it, never because of its age or version number alone.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    PlanChangedError,
    StorageError,
    StoragePermissionError,
)
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES, OtherNames, folded
from trinitylake_ops.format.definitions import ExpirationState, ExportState
from trinitylake_ops.format.file_names import is_immutable_path, owner_path
from trinitylake_ops.format.locations import is_uri, located, to_location
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.iceberg.io.input_file import TableFileUnreadableError, reading_table_file
from trinitylake_ops.iceberg.managed import read_owner
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.export_records import manifest_targets
from trinitylake_ops.operations.gc.survey import Pointers, Progress, Survey, SurveyedRoot, no_progress
from trinitylake_ops.operations.gc.table_files import TableReach, TableWalk, table_id_in
from trinitylake_ops.operations.gc.tables import table_root_of
from trinitylake_ops.storage import Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

_REPORTED_EACH = 256


class CatalogReach:
    """The nodes and definitions that roots reach: the pnodes in section 2, and the pvalues in sections 2 and 3.

    ``previous_root`` and ``rollback_from_root`` are not followed. Values that newer messages shadow are included. Each
    node is read once.

    A file identified by a URI may be under this root if the root has another name, for example a link. A name with
    characters other than lower-case ASCII may be listed in another form. ``other_names`` contains these names.

    Args:
        files: The files of the lakehouse.
        known: Subtrees to skip, because they have already been reached.
        skips_damaged: Whether to skip missing and damaged nodes and the nodes below them. Only for expiring roots.
        executor: Reads the nodes.
    """

    def __init__(
        self,
        files: LakehouseFiles,
        skipped: CatalogReach | None = None,
        *,
        skips_damaged: bool = False,
        executor: Executor = LOCAL,
    ):
        self._walk = NodeWalk(files)
        self._executor = executor
        self._skipped = skipped
        self._skips_damaged = skips_damaged
        self.nodes: set[str] = set()
        self.tables: set[str] = set()
        self.others: set[str] = set()
        self.other_names = OtherNames()

    def __contains__(self, path: object) -> bool:
        return path in self.nodes or path in self.tables or path in self.others

    @property
    def paths(self) -> tuple[set[str], set[str], set[str]]:
        """All reached paths: nodes, definitions of tables, and other definitions."""
        return self.nodes, self.tables, self.others

    def add(self, roots: Iterable[SurveyedRoot], progress: Progress = no_progress) -> None:
        """Add the files that roots reach. Nodes are read level by level.

        Args:
            roots: The roots.
            progress: Called with the unit that is counted, the number done, and the total.

        Raises:
            FileMissingError: A node is missing.
            CorruptFileError: A node is damaged, so the files that it reaches are unknown.
            StorageError: A storage request failed.
        """
        frontier: list[str] = []
        for root in roots:
            self._add_definitions(root.pointers)
            self.others.add(root.lakehouse_def)
            frontier += root.pointers.nodes
            self.other_names.update([root.lakehouse_def])
        walked: set[str] = set()
        while frontier := [path for path in self._without_known(frontier) if path not in walked]:
            below: list[str] = []
            results = self._executor.map(self._walk, frontier)
            for done, (path, pointers) in enumerate(zip(frontier, results, strict=True), 1):
                if isinstance(pointers, Pointers):
                    self._add_definitions(pointers)
                    below += pointers.nodes
                elif not (self._skips_damaged and isinstance(pointers, FileMissingError | CorruptFileError)):
                    raise pointers
                walked.add(path)
                if done % _REPORTED_EACH == 0 or done == len(frontier):
                    n_walked = len(self.nodes) + len(walked)
                    progress("nodes", n_walked, n_walked + len(frontier) - done)
            frontier = below
        self.nodes |= walked  # not earlier, so that a retry after a failure walks these nodes again

    def _add_definitions(self, pointers: Pointers) -> None:
        skipped = self._skipped
        self.tables.update(path for path in pointers.tables if skipped is None or path not in skipped.tables)
        self.others.update(path for path in pointers.others if skipped is None or path not in skipped.others)
        self.other_names.update((*pointers.nodes, *pointers.tables, *pointers.others))

    def _without_known(self, paths: Iterable[str]) -> list[str]:
        skipped = self._skipped
        return [
            path
            for path in dict.fromkeys(paths)
            if path not in self.nodes and (skipped is None or path not in skipped.nodes)
        ]


@dataclass(frozen=True, slots=True)
class NodeWalk:
    """Work that reads the nodes of one level by path."""

    weight: ClassVar[Weight] = Weight.NODE

    files: LakehouseFiles

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage of the lakehouse."""
        return (self.files.storage,)

    def __call__(self, paths: Sequence[str]) -> list[Pointers | StorageError]:
        """Return the pointers of each node, or the error for a node that cannot be read."""
        place = located(self.files.storage.root)
        nodes = self.files.nodes.load_available(paths)
        return [Pointers.of(node, place) if isinstance(node, NodeFile) else node for node in nodes]


@dataclass(frozen=True)
class RetainedRoots:
    """The roots whose files are kept, and individual files that are kept for exports and operations."""

    roots: tuple[SurveyedRoot, ...]
    paths: frozenset[str] = field(default_factory=frozenset)


def retained_roots(
    survey: Survey, *, without: Iterable[int] = (), without_exports: Iterable[str] = ()
) -> RetainedRoots:
    """Return the kept roots: versions that can be read or undeleted, and exports.

    Individual files are kept as well: copies listed in the manifests of unfinished exports, and plans of expired
    versions.

    Args:
        survey: The survey of all versions.
        without: Versions that are about to be removed.
        without_exports: The names of exports that are about to be removed.

    Raises:
        StorageError: The root or the manifest of an export cannot be read.
    """
    excluded = frozenset(without)
    versions = survey.live() + survey.expired(ExpirationState.EXPIRED)
    roots = [survey.roots[version] for version in versions if version not in excluded]
    kept_exports = _exports(survey, without_exports)
    records = [record for record in survey.definition.exports if record.name in kept_exports]
    root_uri = survey.lake.root
    named = (path for record in records for path in (record.root_location, record.manifest_path) if path)
    paths = {to_location(root_uri, path) for path in named}
    paths |= {batch.plan_path for batch in survey.definition.expirations if batch.plan_path}
    for record in records:
        if record.state == ExportState.COPYING and not record.target_uri:
            paths |= manifest_targets(survey.lake.storage, record.manifest_path)
    return RetainedRoots((*roots, *exported_roots(survey, kept_exports)), frozenset(paths | set(kept_exports.values())))


def _exports(survey: Survey, without: Iterable[str]) -> dict[str, str]:
    """Return the locations of exports by name, without some exports. The location of an unfinished export is empty."""
    definition, dropped = survey.definition, frozenset(without)
    names = dict.fromkeys((record.name for record in definition.exports), "") | dict(definition.exported_snapshots)
    root_uri = survey.lake.root
    return {name: to_location(root_uri, path) if path else "" for name, path in names.items() if name not in dropped}


def exported_roots(survey: Survey, names: Iterable[str]) -> list[SurveyedRoot]:
    """Return the roots of exports under this root, without exports that have been dropped since.

    Args:
        survey: The survey of all versions.
        names: The names of the exports.

    Raises:
        StorageError: A root cannot be read.
    """
    lake, snapshots = survey.lake, survey.definition.exported_snapshots
    versions = {lake.files.roots.path(version): root for version, root in survey.roots.items()}
    locations = {to_location(lake.root, snapshots[name]) for name in names if name in snapshots}
    roots = [versions.get(path) or _read_exported(lake, path) for path in sorted(locations) if not is_uri(path)]
    return [root for root in roots if root is not None]


def _read_exported(lake: Lakehouse, path: str) -> SurveyedRoot | None:
    """Return the root of an export, or None if the export has been dropped since."""
    try:
        data = lake.storage.read(path)
    except FileMissingError:
        locations = lake.snapshot().definition.exported_snapshots.values()
        if path in (to_location(lake.root, location) for location in locations):
            raise
        return None
    return SurveyedRoot.of(-1, decode_node(data, path), path, located(lake.root))


class Mark:
    """The locations that kept roots reach at one version, later extended to newer versions. A mark only grows.

    A location is contained if it may be needed: a path under the root, or a URI under the table root.

    Args:
        survey: The survey of all versions.
        without: Versions that are about to be removed.
        without_exports: The names of exports that are about to be removed.
        with_tables: Whether to mark table files from the start instead of when ``add_tables`` is called.
        walk: Yields the files of a table.
        progress: Called with the unit that is counted, the number done, and the total.

    Raises:
        MaintenanceBlockedError: Another program changed the lakehouse definition, and a reconcile is needed.
        StorageError: A kept file cannot be read.
    """

    def __init__(
        self,
        survey: Survey,
        *,
        without: Iterable[int] = (),
        without_exports: Iterable[str] = (),
        with_tables: bool = False,
        walk: TableWalk = files_of,
        progress: Progress = no_progress,
    ):
        self.survey = survey
        self.catalog = CatalogReach(survey.lake.files, executor=survey.executor)
        #: The table root, if the lakehouse definition specifies one.
        self.table_root = table_root_of(survey.lake, survey.definition)
        self.tables = TableReach(survey.lake, walk, survey.executor, self.table_root.root if self.table_root else "")
        self._named_table_root = survey.definition.table_root
        self._without = frozenset(without)
        self._without_exports = frozenset(without_exports)
        self._has_tables = with_tables
        self._paths: set[str] = set()
        self._other_names = OtherNames()
        self._progress = progress
        self._add(survey)

    def __contains__(self, path: object) -> bool:
        if not isinstance(path, str):
            return False
        if self.table_root is not None and path.startswith(self.table_root.root):
            return path.removeprefix(self.table_root.root) in self.tables.in_table_root
        if self._has(path) or self._is_of_retained_table(path):
            return True
        # A listing may show a name in another form, and files that may be needed must be kept.
        names = (self.catalog.other_names, self.tables.other_names, self._other_names)
        return self._has(folded(path)) or any(path in other_names for other_names in names)

    def _has(self, path: str) -> bool:
        return path in self.catalog or path in self._paths or path in self.tables.files

    def _is_of_retained_table(self, path: str) -> bool:
        """Whether a file belongs to a table whose files are unknown, or is the owner file of a retained table."""
        table_id = table_id_in(path)
        if table_id is None:
            return False
        return self.tables.opaque_ids.has_like(table_id) or (
            self.tables.managed_ids.has_like(table_id) and path == owner_path(table_id)
        )

    @property
    def base(self) -> Snapshot:
        """The newest version that the mark covers."""
        return self.survey.base

    def extend(self, latest: Snapshot) -> None:
        """Mark the files that newer versions up to ``latest`` reach.

        Raises PlanChangedError if another operation deleted a file meanwhile.
        """
        extended = self.survey.extended(latest)
        try:
            self._add(extended)
        except FileMissingError as error:
            if extended.lake.latest_version() == latest.version:
                raise
            raise PlanChangedError(
                "another operation deleted files while this one read them; run it again", path=error.path
            ) from error
        self.survey = extended  # not earlier, so that a retry marks these versions again

    def mark_new_commits(self) -> None:
        """Mark the files that new commits reach. Raises the errors of :meth:`extend`."""
        lake = self.survey.lake
        if lake.storage.exists(lake.files.roots.path(self.base.version + 1)):
            self.extend(lake.snapshot())

    def add_tables(self) -> None:
        """Mark table files as well from now on."""
        self._has_tables = True
        self.tables.add(self.catalog.tables, self._progress)

    def _add(self, survey: Survey) -> None:
        survey.check_reconciled()
        if survey.definition.table_root != self._named_table_root:
            raise PlanChangedError("the table root of the lakehouse has changed; run the operation again")
        kept = retained_roots(survey, without=self._without, without_exports=self._without_exports)
        self.catalog.add(kept.roots, self._progress)
        self._paths |= kept.paths
        self.tables.in_table_root.take([path for path in kept.paths if is_uri(path)])
        self._other_names.update(kept.paths)
        if self._has_tables:
            self.add_tables()


def is_deletable(path: str, owned_tables: Container[str]) -> bool:
    """Whether a listed file has a name that only this package generates: a node, a definition, or a table file.

    Args:
        path: The path under the root.
        owned_tables: The ids of tables whose folders belong to this lakehouse.
    """
    table_id = table_id_in(path)
    return is_immutable_path(path) if table_id is None else table_id in owned_tables


def owned_tables(
    storage: Storage, table_ids: Iterable[str], lakehouse_id: str, managed_ids: Container[str] = ()
) -> set[str]:
    """Return the tables that belong to a lakehouse.

    Args:
        storage: The storage with the folders of the tables.
        table_ids: The ids of the tables.
        lakehouse_id: The lakehouse id that owner files must contain.
        managed_ids: The ids of tables that belong to the lakehouse even without an owner file.
    """
    ordered = sorted(table_id for table_id in table_ids if table_id not in (".", ".."))
    owned = set()
    paths = [owner_path(table_id) for table_id in ordered]
    owners = storage.read_available(paths, limit_bytes=MAX_NOTE_BYTES)
    for table_id, path, data in zip(ordered, paths, owners, strict=True):
        try:
            if isinstance(data, StorageError):
                with reading_table_file():
                    raise data
            is_ours = read_owner(data, path) == lakehouse_id
        except FileMissingError:
            is_ours = table_id in managed_ids
        except (CorruptFileError, StoragePermissionError, TableFileUnreadableError):
            is_ours = False  # the owner is unknown
        if is_ours:
            owned.add(table_id)
    return owned
