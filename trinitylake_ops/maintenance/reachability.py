"""What is kept, what is reachable, what may be deleted: the only definition of all three (docs/protocol.md).

Nothing is ever deleted by its age or its number alone, only because no kept root reaches it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidLocationError,
    PlanChangedError,
    StorageError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, ExpirationState, ExportState, TableDef
from trinitylake_ops.format.file_names import TABLES_PREFIX, is_immutable_path
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.maintenance.export_manifest import manifest_targets
from trinitylake_ops.maintenance.survey import Pointers, Progress, Survey, SurveyedRoot, no_progress
from trinitylake_ops.tables.file_io import StorageFileIO
from trinitylake_ops.tables.ownership import owner_path, read_owner
from trinitylake_ops.tables.reach import TableFile, files_of
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.snapshot import LakehouseFiles, Snapshot

_BATCH = 256


class TableWalk(Protocol):
    """Tells the files of a table as :func:`reach.files_of` does."""

    def __call__(
        self, definition: TableDef, io: StorageFileIO, known: set[str], *, skips_missing: bool
    ) -> Iterator[TableFile]: ...


class CatalogReach:
    """The nodes and definitions that roots reach: pnodes of section 2, pvalues of sections 2 and 3.

    Never ``previous_root`` or ``rollback_from_root``. Values that newer messages shadow count, too. Each
    node is read once; subtrees in ``known`` are passed over. With ``skips_damaged`` so are nodes that are gone
    or cannot be decoded, with all below: only for roots that nobody keeps.

    What is named by a URI may stand under this root by another name of it, such as a link: ``alias_names`` are the
    last parts of such paths, each of which holds a uuid.
    """

    def __init__(self, files: LakehouseFiles, known: CatalogReach | None = None, *, skips_damaged: bool = False):
        self._files = files
        self._known = known
        self._skips_damaged = skips_damaged
        self.nodes: set[str] = set()
        self.tables: set[str] = set()
        self.others: set[str] = set()
        self.alias_names: set[str] = set()

    def __contains__(self, path: object) -> bool:
        return path in self.nodes or path in self.tables or path in self.others

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
            self._add_aliases([root.lakehouse_def])
        while frontier := self._unknown(frontier):
            below: list[str] = []
            for start in range(0, len(frontier), _BATCH):
                batch = frontier[start : start + _BATCH]
                for node in self._load(batch):
                    pointers = Pointers.of(node, self._files.storage.root)
                    self._add_definitions(pointers)
                    below += pointers.nodes
                self.nodes.update(batch)
                progress("nodes", len(self.nodes), len(self.nodes) + len(frontier) - start - len(batch))
            frontier = below

    def _load(self, paths: Sequence[str]) -> list[NodeFile]:
        nodes = []
        for node in self._files.nodes.load_available(paths):
            if isinstance(node, NodeFile):
                nodes.append(node)
            elif not (self._skips_damaged and isinstance(node, FileMissingError | CorruptFileError)):
                raise node
        return nodes

    def _add_definitions(self, pointers: Pointers) -> None:
        known = self._known
        self.tables.update(path for path in pointers.tables if known is None or path not in known.tables)
        self.others.update(path for path in pointers.others if known is None or path not in known.others)
        self._add_aliases((*pointers.nodes, *pointers.tables, *pointers.others))

    def _add_aliases(self, locations: Iterable[str]) -> None:
        self.alias_names.update(map(_name_of, filter(is_uri, locations)))

    def _unknown(self, paths: Iterable[str]) -> list[str]:
        known = self._known
        return [
            path
            for path in dict.fromkeys(paths)
            if path not in self.nodes and (known is None or path not in known.nodes)
        ]


class TableReach:
    """The files of Iceberg tables that definitions reach, as a path where they lie under the root.

    Tables of every type count: whoever shares files with a managed table keeps them. What no scan opens - former
    metadata files, data that all snapshots have deleted - is reached by nobody. ``managed_ids`` are the ids of all
    MANAGED tables seen that stand in their own folders; ``opaque_ids`` of those whose files nobody can tell: tables
    of other formats, with those whose folders their properties name, those whose metadata file is gone, and managed
    ones that name files beyond this root. Files beyond it may be files under it by another name of the root, or of a
    folder in it: ``alias_names`` are their names, each of which holds a uuid. ``walk`` is how a table's files are
    told, for those who know them already.
    """

    def __init__(self, lake: Lakehouse, walk: TableWalk = files_of):
        self._io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
        self._walk = walk
        self._files = lake.files
        self._known_lists: set[str] = set()
        self._walked_metadata: set[str] = set()
        self._walked_definitions: set[str] = set()
        self.files: set[str] = set()
        self.managed_ids: set[str] = set()
        self.opaque_ids: set[str] = set()
        self.alias_names: set[str] = set()

    def add(self, locations: Iterable[str], progress: Progress = no_progress) -> None:
        """Add what the tables of definitions reach.

        A table whose metadata file is gone stops nobody, nor does a snapshot of somebody else's table whose manifests
        are gone: nobody can read it. Raises StorageError for anything else that cannot be read, with what to do.
        """
        missing = [path for path in locations if path not in self._walked_definitions]
        for start in range(0, len(missing), _BATCH):
            batch = missing[start : start + _BATCH]
            for definition in self._files.definitions.tables(batch):
                self._add_table(definition)
            self._walked_definitions.update(batch)
            progress("tables", start + len(batch), len(missing))

    def _add_table(self, definition: TableDef) -> None:
        metadata = iceberg_metadata(definition)
        if definition.is_managed and table_id_in(to_location(self._io.root, metadata or "none")) == definition.id:
            self.managed_ids.add(definition.id)
        if not metadata:
            named = (*definition.format_properties.values(), *definition.properties.values())
            self.opaque_ids.update((definition.id, *_TABLE_FOLDER.findall("\n".join(named))))
            return
        if metadata in self._walked_metadata:
            return
        location = to_location(self._io.root, metadata)
        # Of our own tables a manifest that is gone is a loss that somebody has to look at.
        skips_missing = not definition.is_managed
        try:
            walk = self._walk(definition, self._io, self._known_lists, skips_missing=skips_missing)
            found = {file.location for file in walk if file.live}
        except FileMissingError as error:
            if to_location(self._io.root, error.path or "") != location:
                raise _stopped_by(error, location) from error
            self.opaque_ids |= {definition.id, table_id_in(location) or definition.id}
        except (CorruptFileError, InvalidLocationError) as error:
            raise _stopped_by(error, location) from error
        else:
            self.files |= found
            for uri in filter(is_uri, found):
                self.alias_names.add(_name_of(uri))
                self.opaque_ids.update(_TABLE_FOLDER.findall(uri))
                self.opaque_ids |= {definition.id} if definition.is_managed else set()
        self._walked_metadata.add(metadata)


def iceberg_metadata(definition: TableDef) -> str | None:
    """Return the location of a table's current metadata file, None for a table of another format or without one."""
    return definition.format_properties.get(METADATA_LOCATION) if definition.is_iceberg else None


@dataclass(frozen=True)
class KeptRoots:
    """The roots whose files must stay, and single files that belong to exports."""

    roots: tuple[SurveyedRoot, ...]
    paths: frozenset[str] = field(default_factory=frozenset)


def kept_roots(survey: Survey, *, without: Iterable[int] = (), without_exports: Iterable[str] = ()) -> KeptRoots:
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
    paths = {path for record in records for path in (record.root_location, record.manifest_path) if path}
    paths |= {batch.plan_path for batch in survey.definition.expirations if batch.plan_path}
    for record in records:
        if record.state == ExportState.COPYING and not record.target_uri:
            paths |= manifest_targets(survey.lake.storage, record.manifest_path)
    return KeptRoots((*roots, *exported_roots(survey, staying)), frozenset(paths | set(staying.values())))


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
    return SurveyedRoot.of(-1, decode_node(data, path), path, lake.root)


class Mark:
    """What the kept roots reach at one version, and then at later ones: what has once been reached stays marked.

    ``without`` and ``without_exports`` go, as for :func:`kept_roots`. Files of tables are marked with
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
        self.catalog = CatalogReach(survey.lake.files)
        self.tables = TableReach(survey.lake, walk)
        self._without = frozenset(without)
        self._without_exports = frozenset(without_exports)
        self._has_tables = with_tables
        self._paths: set[str] = set()
        self._progress = progress
        self._add(survey)

    def __contains__(self, path: object) -> bool:
        if path in self.catalog or path in self._paths or path in self.tables.files:
            return True
        if not isinstance(path, str):
            return False
        name = _name_of(path)
        return name in self.catalog.alias_names or name in self.tables.alias_names or self._is_of_kept_table(path)

    def _is_of_kept_table(self, path: str) -> bool:
        """Whether a file is of a table whose files nobody can tell, or the owner file of one that is kept."""
        table_id = table_id_in(path)
        if table_id is None:
            return False
        return table_id in self.tables.opaque_ids or (
            table_id in self.tables.managed_ids and path == owner_path(table_id)
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

    def look(self) -> None:
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
        kept = kept_roots(survey, without=self._without, without_exports=self._without_exports)
        self.catalog.add(kept.roots, self._progress)
        self._paths |= kept.paths
        if self._has_tables:
            self.add_tables()


_TABLE_FOLDER = re.compile(rf"(?<![^/\n]){TABLES_PREFIX}([^/\n]+)(?=/|$)", re.MULTILINE)
_TABLE_PATH = re.compile(rf"{TABLES_PREFIX}([^/]+)/.+", re.DOTALL)


def _name_of(location: str) -> str:
    return location.rpartition("/")[2]


def _stopped_by(error: TrinityLakeError, metadata_location: str) -> TrinityLakeError:
    """Return an error with what to do about a table whose files cannot be told."""
    stopped = copy.copy(error)
    stopped.message = (
        f"{error.message}; the table of {metadata_location!r} needs it: nothing is deleted before that file is"
        " restored, or no kept version and no export has the table"
    )
    return stopped


def table_id_in(path: str) -> str | None:
    """Return the id of the table under whose prefix a path lies, None for other paths."""
    match = _TABLE_PATH.fullmatch(path)
    return match[1] if match else None


def is_table_path(path: str) -> bool:
    """Whether a path lies under the prefix of some table."""
    return table_id_in(path) is not None


def is_deletable(path: str, owned_tables: Container[str]) -> bool:
    """Whether a file that a listing of this root returned has a name we own: of a node, a definition, or a table's.

    ``owned_tables`` are the ids of tables whose prefix belongs to this lakehouse.
    """
    table_id = table_id_in(path)
    return is_immutable_path(path) if table_id is None else table_id in owned_tables


def owned_tables(lake: Lakehouse, table_ids: Iterable[str], lakehouse_id: str, managed_ids: Container[str]) -> set[str]:
    """Return the tables whose owner files name this lakehouse; without such a file, those that it defines."""
    ordered = sorted(table_id for table_id in table_ids if table_id not in (".", ".."))
    owned = set()
    paths = [owner_path(table_id) for table_id in ordered]
    for table_id, path, data in zip(ordered, paths, lake.storage.read_available(paths), strict=True):
        try:
            if isinstance(data, StorageError):
                raise data
            is_ours = read_owner(data, path) == lakehouse_id
        except FileMissingError:
            is_ours = table_id in managed_ids
        except CorruptFileError:
            is_ours = False  # nobody says that it is ours
        if is_ours:
            owned.add(table_id)
    return owned


def readable_tables(lake: Lakehouse, locations: Iterable[str]) -> list[TableDef]:
    """Return the table definitions at locations, without those that are gone or cannot be decoded.

    Raises other StorageErrors.
    """
    found = []
    paths = [location for location in locations if not is_uri(location)]
    for path, data in zip(paths, lake.files.storage.read_available(paths), strict=True):
        try:
            if isinstance(data, StorageError):
                raise data
            found.append(TableDef.from_bytes(data, path))
        except (FileMissingError, CorruptFileError):
            continue
    return found


def table_files(definitions: Sequence[TableDef], io: StorageFileIO) -> dict[str, TableFile]:
    """Return the files that MANAGED Iceberg tables reach under their own prefixes, by path, live or not.

    A table part of which cannot be decoded or is gone yields what was found until then: what it
    shares with nobody becomes an orphan.
    """
    known: dict[str, set[str]] = {}  # by table: one that has another's metadata yields none of the other's files
    found: dict[str, TableFile] = {}
    walked: set[tuple[str, str]] = set()
    for definition in definitions:
        metadata = iceberg_metadata(definition)
        if not definition.is_managed or not metadata or (definition.id, metadata) in walked:
            continue
        walked.add((definition.id, metadata))
        try:
            for file in files_of(definition, io, known.setdefault(definition.id, set())):
                if table_id_in(file.location) == definition.id:
                    found.setdefault(file.location, file)
        except (FileMissingError, CorruptFileError):
            continue
    return found
