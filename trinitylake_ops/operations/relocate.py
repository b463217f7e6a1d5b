"""Relocates tables: after a lakehouse's files were copied or moved, its tables' metadata names the new place.

All tables of the latest version get new metadata files, manifest lists and manifests in one commit: a transfer of these
files within the lakehouse, under new names. No data file is copied. Older versions stay as they are. They are readable
without it, as the latest one was before.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace

from trinitylake_ops.access.allowed_roots import NamedRoots
from trinitylake_ops.access.table_owners import claim_table_root
from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    LocationNotAllowedError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.iceberg.copy import TableCopy
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io, writing_io
from trinitylake_ops.iceberg.reach import DAMAGE, TableFile, files_of
from trinitylake_ops.iceberg.relocate import DELETES_REMEDY, MovedFiles, moved_files, relocated
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, Plan, PlannedOperation, base_id_of, digest_of
from trinitylake_ops.operations.definition_commits import commit_on_latest
from trinitylake_ops.operations.gc.survey import on_latest
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.gc.tables import defined, table_root_of, tables_of
from trinitylake_ops.operations.metadata_rewrites import check_tables, discarded_on_failure
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.transfer.copy import Transfer
from trinitylake_ops.operations.transfer.selection import Selection
from trinitylake_ops.storage.opening import open_storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "relocate"


@dataclass(frozen=True, slots=True)
class MovedTable:
    """A table whose files name the former place of its lakehouse. ``files`` are written anew."""

    namespace: str
    table: str
    table_id: str
    definition_location: str
    files: MovedFiles

    @property
    def name(self) -> str:
        """Namespace and table."""
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class RelocationPlan(Plan):
    """The tables that would get metadata for the lakehouse's place, and ``refused`` ones with the reasons.

    ``left_table_root`` is a table root that would be given up. The lakehouse, or a copy, was or is there.
    ``table_root`` is the one that would become that of this lakehouse, empty if none would.
    """

    base_version: int
    tables: tuple[str, ...]
    refused: dict[str, str]
    files: int
    left_table_root: str
    table_root: str
    moved: tuple[MovedTable, ...] = field(repr=False, compare=False)
    operation: Relocation = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all tables and their metadata files."""
        content = [[one.name, one.table_id, one.files.metadata] for one in self.moved]
        left = [self.left_table_root] if self.left_table_root else []
        left += [f"to {self.table_root}"] if self.table_root else []
        return digest_of(self.base_version, self.base_id, _OPERATION, content, sorted(self.refused), *left)

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change."""
        return not self.tables and not self.left_table_root and not self.table_root

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [(one.name, one.files.count, "") for one in self.moved]
        rows += [(name, "", f"left: {reason}") for name, reason in self.refused.items()]
        rows += [(f"table root {self.left_table_root}", "", "given up")] if self.left_table_root else []
        rows += [(f"table root {self.table_root}", "", "is this lakehouse's from then on")] if self.table_root else []
        title = f"Relocation of version {self.base_version}: {self.files:,} files of {len(self.tables):,} tables"
        return new_table(title, "table", "files to write", "", rows=rows)

    def execute(self, approved_digest: str | None = None) -> RelocationReport:
        """Write the tables' new metadata and point to all of it in one commit. Without tables nothing is committed.

        The relocation is planned again whenever a concurrent commit touched a table. Raises PlanChangedError when an
        approved digest is not that of the new plan, CommitConflictError after MAX_ATTEMPTS. Raises the errors of
        planning and of a commit. Files of a failed attempt are deleted, best effort.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Relocation(PlannedOperation[RelocationPlan, "RelocationReport"]):
    """The relocation of all tables of the latest version, to ``table_root`` if that is given."""

    telemetry_name = "relocation"

    table_root: str = ""

    def plan(self) -> RelocationPlan:
        """Plan on the latest version. Raises what :func:`plan_relocation` raises."""
        return on_latest(self.lake, self._plan_on)

    def _plan_on(self, base: Snapshot) -> RelocationPlan:
        io = self._reading(base)
        if self.table_root and self.table_root != _named_table_root(base):
            check_files_exist(base, io, self.table_root)
        found, damaged = moved_tables(self.lake, base, io)
        self._check_none_left(found)
        moved = tuple(one for one in found if not one.files.unmoved_deletes)
        deletes = {one.name: one.files.unmoved_deletes for one in found if one.files.unmoved_deletes}
        return RelocationPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            left_table_root="" if self.table_root else _left_table_root(self.lake, base, found),
            table_root=self.table_root if self._changes(base) else "",
            tables=tuple(one.name for one in moved),
            refused={
                name: f"its position deletes name data files by their paths ({path!r}); {DELETES_REMEDY}"
                for name, path in deletes.items()
            }
            | {name: error.message for name, error in damaged.items()},
            files=sum(one.files.count for one in moved),
            moved=moved,
            operation=self,
        )

    def _check_none_left(self, found: Sequence[MovedTable]) -> None:
        """Raise InvalidInputError for tables under the own root whose former place is the given table root."""
        left = [one for one in found if one.files.home == self.lake.root]
        if self.table_root and any(uri.startswith(self.table_root) for one in left for uri in one.files.uris):
            raise InvalidInputError(
                f"tables such as {left[0].name} stand under the root of this lakehouse, and name {self.table_root} as"
                " their former place; run it without a table root, which gives that one up"
            )

    def _reading(self, base: Snapshot) -> StorageFileIO:
        """Return what reads the tables' files where they are after the relocation."""
        io = reading_io(self.lake)
        if not self.table_root:
            return io
        names = NamedRoots.of(replace(base.definition, table_root=self.table_root))
        there = StorageFileIO.on(self.lake.storage, self.lake.storage_options, read_only=True, names=names)
        there.allowed_roots.check_root(self.table_root)
        there.folders.check_is_of_no_copy(there.storage_at(self.table_root))
        return there

    def _changes(self, base: Snapshot) -> bool:
        """Whether the given table root would become another one's or this lakehouse's own."""
        if not self.table_root:
            return False
        existing = table_root_of(self.lake, replace(base.definition, table_root=self.table_root))
        return self.table_root != _named_table_root(base) or existing is None or bool(existing.refusal)

    def run(self, plan: RelocationPlan, approved_digest: str | None) -> RelocationReport:
        """Plan again and relocate."""
        metered = MeteredLakehouse(self.lake)
        here = replace(self, lake=metered.lake)
        first = here.plan()
        if approved_digest is not None:
            first.check_approved(approved_digest)

        def attempt(number: int) -> RelocationReport:
            now = first if number == 1 else here.plan()
            if approved_digest is not None:  # the approval is of these effects, on any later version
                replace(now, base_version=first.base_version, base_id=first.base_id).check_approved(approved_digest)
            version = now.base_version if now.is_empty else _commit(metered.lake, now)
            return RelocationReport(
                version=version,
                tables=now.tables,
                refused=now.refused,
                files=now.files,
                table_root=now.table_root,
                cost=metered.cost(),
            )

        return commit_on_latest(attempt)


@dataclass(frozen=True, kw_only=True)
class RelocationReport(Document):
    """The relocated tables.

    ``version`` holds them, or is the latest version at that time if there was nothing to do. ``table_root`` became
    that of this lakehouse, if any did.
    """

    version: int
    tables: tuple[str, ...]
    refused: dict[str, str]
    files: int
    table_root: str
    cost: Cost

    def table(self) -> Table:
        """Return one row for each table."""
        rows = [("table root taken", self.table_root)] if self.table_root else []
        rows += [*(("relocated", name) for name in self.tables), *(("left", name) for name in self.refused)]
        what = "table root taken" if self.table_root else "nothing to do"
        done = f"committed as version {self.version}" if self.tables else f"{what}, version {self.version}"
        return new_table(f"Relocation, {done}: {self.files:,} files written", "", "table", rows=rows)


def plan_relocation(lake: Lakehouse, table_root: str | None = None) -> RelocationPlan:
    """Plan to write the metadata of all tables of the latest version for the lakehouse's place. Only reads.

    ``table_root`` is where the files under the table root stand now, as they were moved there. It becomes the table
    root of this lakehouse, which frees files there from then on. That of now may be given, too, for a lakehouse that
    was moved itself. Copies of it must not use that table root any more. Tables with position deletes and
    damaged tables are refused by name. Raises StorageError. Raises FileMissingError if a file is not there,
    LocationNotAllowedError for the root of another copy or a root that content may not name. Raises InvalidInputError
    for the own root.
    """
    root = "" if table_root is None else normalize_root_uri(table_root)
    if root == lake.root:
        raise InvalidInputError(f"{root} is the root of the lakehouse, and no table root of it")
    return Relocation(lake=lake, table_root=root).plan()


def moved_tables(
    lake: Lakehouse, base: Snapshot, io: StorageFileIO | None = None
) -> tuple[list[MovedTable], dict[str, TrinityLakeError]]:
    """Return the MANAGED Iceberg tables of a version that name a former place of the lakehouse.

    Args:
        lake: The lakehouse.
        base: The version.
        io: Reads the files of the tables, None for the place of the lakehouse.

    Returns:
        The tables, and the errors of damaged tables by their names.

    Raises:
        StorageError: If the storage fails.
    """
    io = io or reading_io(lake)

    def inspect_table(definition: TableDef) -> MovedFiles | TrinityLakeError | None:
        is_ours = definition.is_managed and iceberg_metadata(definition)
        try:
            return moved_files(definition, io) if is_ours else None
        except DAMAGE as error:
            return error

    found: list[MovedTable] = []
    damaged: dict[str, TrinityLakeError] = {}
    for entries in defined(base, tables_of(base)):
        moved = run_parallel(
            in_one_round_trip(inspect_table), [definition for _, _, definition in entries], lake.storage.concurrency
        )
        for (name, location, definition), files in zip(entries, moved, strict=True):
            if isinstance(files, TrinityLakeError):
                damaged[str(name)] = files
            elif files is not None:
                found.append(MovedTable(name.namespace, name.table or "", definition.id, location, files))
    return found, damaged


def _left_table_root(lake: Lakehouse, base: Snapshot, found: Sequence[MovedTable]) -> str:
    """Return the table root where this lakehouse was before, or where another copy of it is, else nothing.

    That copy would remove files that are written there. Or they would make the former place anew.
    """
    table_root, root = base.definition.table_root, _named_table_root(base)
    if root in ("", lake.root):
        return ""
    if any(uri.startswith(root) for one in found for uri in one.files.uris):
        return table_root
    try:
        writing_io(lake).folders.check_is_of_no_copy(open_storage(root, options_for(lake, root)))
    except LocationNotAllowedError:
        return table_root
    return ""


def check_files_exist(base: Snapshot, io: StorageFileIO, table_root: str) -> None:
    """Raise FileMissingError if a file of the tables of a version that is to be under a table root is not there."""
    for entries in defined(base, tables_of(base)):
        for name, _, definition in entries:
            if not (definition.is_managed and iceberg_metadata(definition)):
                continue
            listed = io.storage_at(table_root).list(table_prefix(definition.id))
            there = {info.path: info.size_bytes for info in listed}
            try:
                live = [file for file in files_of(definition, io) if file.live]
                lost = next((one.location for one in live if _is_missing(one.location, table_root, there)), None)
            except FileMissingError as error:
                lost, live = error.path, []
            if lost is not None:
                message = f"a file of table {name} is not under {table_root}: copy all files there first"
                raise FileMissingError(message, path=lost)
            for file in live:
                _check_size(file, str(name), table_root, there)


def _check_size(file: TableFile, table: str, table_root: str, there: Mapping[str, int]) -> None:
    """Raise CorruptFileError if a file under the table root has another size than the table's metadata records."""
    size_bytes = there.get(file.location.removeprefix(table_root))
    if file.location.startswith(table_root) and file.size_bytes is not None and file.size_bytes != size_bytes:
        raise CorruptFileError(
            f"a file of table {table} has {size_bytes} bytes under {table_root} and {file.size_bytes} by the table's"
            " metadata: copy it there again",
            path=file.location,
        )


def _is_missing(location: str, table_root: str, there: Container[str]) -> bool:
    return location.startswith(table_root) and location.removeprefix(table_root) not in there


def _named_table_root(base: Snapshot) -> str:
    table_root = base.definition.table_root
    return normalize_root_uri(table_root) if table_root else ""


def _writing(lake: Lakehouse, plan: RelocationPlan, base: Snapshot) -> StorageFileIO:
    """Return what writes the tables' files. A given table root is made that of the lakehouse, as the operator says."""
    if not plan.table_root:
        return writing_io(lake)
    names = NamedRoots.of(replace(base.definition, table_root=plan.table_root))
    io = StorageFileIO.on(lake.storage, lake.storage_options, names=names)
    claim_table_root(io.storage_at(plan.table_root), base.definition.id, lake.root, instead_of_others=True)
    return io


def _check_base(plan: RelocationPlan, base: Snapshot) -> None:
    """Raise CommitConflictError if a table may have come that a plan to another table root does not have."""
    if plan.table_root and base.version != plan.base_version:
        raise CommitConflictError(
            f"version {base.version} was committed since the relocation was planned; let writers rest until it is done",
            conflicts=(f"version {base.version}",),
            base_version=plan.base_version,
            latest_version=base.version,
        )


def _commit(lake: Lakehouse, plan: RelocationPlan) -> int:
    """Write the new files and commit. Raises CommitConflictError when the plan is out of date."""
    base = lake.snapshot()
    _check_base(plan, base)
    io = _writing(lake, plan, base)
    if not plan.moved and not plan.left_table_root and plan.table_root == _named_table_root(base):
        return base.version
    with (
        discarded_on_failure(io) as written,
        lake.transaction(message=f"{len(plan.moved)} tables", operation=_OPERATION) as txn,
    ):
        txn.require(lambda latest: _check_base(plan, latest))
        check_tables(txn, plan.moved, "relocation")
        base = txn.base

        def renamed(one: MovedTable) -> tuple[TableCopy, TableDef]:
            return relocated(base.table_at(one.definition_location), one.files, io)

        copies = run_parallel(in_one_round_trip(renamed), plan.moved, lake.storage.concurrency)
        selection = Selection(tables=[copy for copy, _ in copies])
        written += [target for _, target in selection.targets()]
        homes = {one.files.home for one in plan.moved} - {lake.root}
        transfer = Transfer(lake.storage, io, reads_back=False)
        transfer.table_storages = {home: io.storage_at(home) for home in homes}
        transfer.copy(selection)
        for one, (_, definition) in zip(plan.moved, copies, strict=True):
            txn.alter_table(one.namespace, one.table, definition)
        if plan.left_table_root and base.definition.table_root == plan.left_table_root:
            txn.alter_definition(replace(txn.definition, table_root=""))
        elif plan.table_root:
            txn.alter_definition(replace(txn.definition, table_root=plan.table_root))
    assert txn.committed_version is not None
    return txn.committed_version
