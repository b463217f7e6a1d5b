"""What is kept, what is reachable, what may be deleted: the only definition of all three (docs/internals/protocol.md).

Nothing is ever deleted by its age or its number alone, only because no kept root reaches it.
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
    """The nodes and definitions that roots reach: pnodes of section 2, pvalues of sections 2 and 3.

    Never ``previous_root`` or ``rollback_from_root``. Values that newer messages shadow count, too. Each
    node is read once; subtrees in ``known`` are passed over. With ``skips_damaged`` so are nodes that are gone
    or cannot be decoded, with all below: only for roots that nobody keeps.

    A file that is named by a URI may be under this root by another name of it, such as a link. A name in other letters
    than ASCII's lower case may be listed otherwise. ``other_names`` are the names of such files.
    """

    def __init__(
        self,
        files: LakehouseFiles,
        known: CatalogReach | None = None,
        *,
        skips_damaged: bool = False,
        executor: Executor = LOCAL,
    ):
        self._walk = NodeWalk(files)
        self._executor = executor
        self._known = known
        self._skips_damaged = skips_damaged
        self.nodes: set[str] = set()
        self.tables: set[str] = set()
        self.others: set[str] = set()
        self.other_names = OtherNames()

    def __contains__(self, path: object) -> bool:
        return path in self.nodes or path in self.tables or path in self.others

    @property
    def paths(self) -> tuple[set[str], set[str], set[str]]:
        """All that is reached: nodes, definitions of tables, and others."""
        return self.nodes, self.tables, self.others

    def add(self, roots: Iterable[SurveyedRoot], progress: Progress = no_progress) -> None:
        """Add what roots reach, reading nodes level by level, many at once.

        Raises FileMissingError, CorruptFileError and other StorageErrors for a node that cannot be read: then
        nobody knows what it reaches.
        """
        frontier: list[str] = []
        for root in roots:
            self._add_definitions(root.pointers)
            self.others.add(root.lakehouse_def)
            frontier += root.pointers.nodes
            self.other_names.update([root.lakehouse_def])
        walked: set[str] = set()
        while frontier := [path for path in self._unknown(frontier) if path not in walked]:
            below: list[str] = []
            found = self._executor.map(self._walk, frontier)
            for done, (path, pointers) in enumerate(zip(frontier, found, strict=True), 1):
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
        self.nodes |= walked  # not before: whoever tries again after a failure walks all of it again

    def _add_definitions(self, pointers: Pointers) -> None:
        known = self._known
        self.tables.update(path for path in pointers.tables if known is None or path not in known.tables)
        self.others.update(path for path in pointers.others if known is None or path not in known.others)
        self.other_names.update((*pointers.nodes, *pointers.tables, *pointers.others))

    def _unknown(self, paths: Iterable[str]) -> list[str]:
        known = self._known
        return [
            path
            for path in dict.fromkeys(paths)
            if path not in self.nodes and (known is None or path not in known.nodes)
        ]


@dataclass(frozen=True, slots=True)
class NodeWalk:
    """Work: reads nodes of one level, by their paths."""

    weight: ClassVar[Weight] = Weight.NODE

    files: LakehouseFiles

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.files.storage,)

    def __call__(self, paths: Sequence[str]) -> list[Pointers | StorageError]:
        """Return what nodes point to; a failure stands in the place of a node that cannot be read."""
        place = located(self.files.storage.root)
        nodes = self.files.nodes.load_available(paths)
        return [Pointers.of(node, place) if isinstance(node, NodeFile) else node for node in nodes]


@dataclass(frozen=True)
class RetainedRoots:
    """The roots whose files must stay, and single files that belong to exports."""

    roots: tuple[SurveyedRoot, ...]
    paths: frozenset[str] = field(default_factory=frozenset)


def retained_roots(
    survey: Survey, *, without: Iterable[int] = (), without_exports: Iterable[str] = ()
) -> RetainedRoots:
    """Return the kept roots: versions that are live or can be undeleted, exports, and what operations need.

    Those are the copies that manifests of unfinished exports name, and the plans of expired versions. ``without``
    are versions, and ``without_exports`` exports, that are about to go. Raises StorageError where an exported root
    or a manifest cannot be read.
    """
    leaving = frozenset(without)
    versions = survey.live() + survey.expired(ExpirationState.EXPIRED)
    roots = [survey.roots[version] for version in versions if version not in leaving]
    staying = _exports(survey, without_exports)
    records = [record for record in survey.definition.exports if record.name in staying]
    root_uri = survey.lake.root
    named = (path for record in records for path in (record.root_location, record.manifest_path) if path)
    paths = {to_location(root_uri, path) for path in named}
    paths |= {batch.plan_path for batch in survey.definition.expirations if batch.plan_path}
    for record in records:
        if record.state == ExportState.COPYING and not record.target_uri:
            paths |= manifest_targets(survey.lake.storage, record.manifest_path)
    return RetainedRoots((*roots, *exported_roots(survey, staying)), frozenset(paths | set(staying.values())))


def _exports(survey: Survey, without: Iterable[str]) -> dict[str, str]:
    """Return name -> location of all exports but some; those being made have an empty one."""
    definition, dropped = survey.definition, frozenset(without)
    names = dict.fromkeys((record.name for record in definition.exports), "") | dict(definition.exported_snapshots)
    root_uri = survey.lake.root
    return {name: to_location(root_uri, path) if path else "" for name, path in names.items() if name not in dropped}


def exported_roots(survey: Survey, names: Iterable[str]) -> list[SurveyedRoot]:
    """Return the roots of exports that stand under this root, but of those dropped meanwhile. Raises StorageError."""
    lake, snapshots = survey.lake, survey.definition.exported_snapshots
    versions = {lake.files.roots.path(version): root for version, root in survey.roots.items()}
    locations = {to_location(lake.root, snapshots[name]) for name in names if name in snapshots}
    found = [versions.get(path) or _read_exported(lake, path) for path in sorted(locations) if not is_uri(path)]
    return [root for root in found if root is not None]


def _read_exported(lake: Lakehouse, path: str) -> SurveyedRoot | None:
    """Return the root of an export, None where it is gone because the export was dropped since."""
    try:
        data = lake.storage.read(path)
    except FileMissingError:
        locations = lake.snapshot().definition.exported_snapshots.values()
        if path in (to_location(lake.root, location) for location in locations):
            raise
        return None
    return SurveyedRoot.of(-1, decode_node(data, path), path, located(lake.root))


class Mark:
    """What the kept roots reach at one version, and then at later ones: what has once been reached stays marked.

    A location is in it that may be needed: a path under the root, or a URI under the table root. ``without`` and
    ``without_exports`` go, as for :func:`retained_roots`. Files of tables are marked with
    ``with_tables``, or from ``add_tables`` on. Raises MaintenanceBlockedError where another program changed the
    lakehouse definition and nobody reconciled, and what reading raises.
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
        #: The table root of the lakehouse, if its definition names one: some of its files may be there.
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
            return path.removeprefix(self.table_root.root) in self.tables.there
        if self._has(path) or self._is_of_retained_table(path):
            return True
        # A listing may show another name than a file was given: what may be needed stays.
        names = (self.catalog.other_names, self.tables.other_names, self._other_names)
        return self._has(folded(path)) or any(path in other_names for other_names in names)

    def _has(self, path: str) -> bool:
        return path in self.catalog or path in self._paths or path in self.tables.files

    def _is_of_retained_table(self, path: str) -> bool:
        """Whether a file is of a table whose files nobody can tell, or the owner file of one that is kept."""
        table_id = table_id_in(path)
        if table_id is None:
            return False
        return self.tables.opaque_ids.has_like(table_id) or (
            self.tables.managed_ids.has_like(table_id) and path == owner_path(table_id)
        )

    @property
    def base(self) -> Snapshot:
        """The version up to which all is marked."""
        return self.survey.base

    def extend(self, latest: Snapshot) -> None:
        """Mark what versions since reach, up to ``latest``.

        Raises PlanChangedError where a file vanished because another operation went on meanwhile.
        """
        extended = self.survey.extended(latest)
        try:
            self._add(extended)
        except FileMissingError as error:
            if extended.lake.latest_version() == latest.version:
                raise
            raise PlanChangedError(
                "another operation deleted files while this one looked at them: run it again", path=error.path
            ) from error
        self.survey = extended  # not before: whoever tries again marks again

    def mark_new_commits(self) -> None:
        """Mark what was committed since. Raises as ``extend`` does."""
        lake = self.survey.lake
        if lake.storage.exists(lake.files.roots.path(self.base.version + 1)):
            self.extend(lake.snapshot())

    def add_tables(self) -> None:
        """Mark the files of tables, too, from now on."""
        self._has_tables = True
        self.tables.add(self.catalog.tables, self._progress)

    def _add(self, survey: Survey) -> None:
        survey.check_reconciled()
        if survey.definition.table_root != self._named_table_root:
            raise PlanChangedError("the table root of the lakehouse was changed meanwhile: run it again")
        kept = retained_roots(survey, without=self._without, without_exports=self._without_exports)
        self.catalog.add(kept.roots, self._progress)
        self._paths |= kept.paths
        self.tables.there.take([path for path in kept.paths if is_uri(path)])
        self._other_names.update(kept.paths)
        if self._has_tables:
            self.add_tables()


def is_deletable(path: str, owned_tables: Container[str]) -> bool:
    """Whether a file that a listing of this root returned has a name we own: of a node, a definition, or a table's.

    ``owned_tables`` are the ids of tables whose prefix belongs to this lakehouse.
    """
    table_id = table_id_in(path)
    return is_immutable_path(path) if table_id is None else table_id in owned_tables


def owned_tables(
    storage: Storage, table_ids: Iterable[str], lakehouse_id: str, managed_ids: Container[str] = ()
) -> set[str]:
    """Return the tables whose owner files name this lakehouse; without such a file, those of ``managed_ids``."""
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
