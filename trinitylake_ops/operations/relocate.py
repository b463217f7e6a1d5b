"""Relocate tables: after a lakehouse's files were copied or moved, update the locations in its tables' metadata.

All tables of the latest version get new metadata files, manifest lists and manifests in one commit. They are written
within the lakehouse under new names. No data file is copied. Older versions are not changed. They remain readable
without relocation, just as the latest version was before the relocation.
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
from trinitylake_ops.iceberg.relocate import DELETES_REMEDY, MovedFiles, moved_files, plan_relocated_files
from trinitylake_ops.operations.base import Cost, MeteredLakehouse, Plan, PlannedOperation, base_id_of, digest_of
from trinitylake_ops.operations.definition_commits import commit_on_latest
from trinitylake_ops.operations.gc.survey import on_latest
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.gc.tables import table_root_of, tables_of, with_definitions
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
    """A table whose files refer to the former location of its lakehouse."""

    #: The namespace.
    namespace: str
    #: The name of the table.
    table: str
    #: The id of the table.
    table_id: str
    #: The location of its definition.
    definition_location: str
    #: The files to rewrite.
    files: MovedFiles

    @property
    def name(self) -> str:
        """``namespace.table``."""
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, kw_only=True)
class RelocationPlan(Plan):
    """The tables that would get new metadata with the current location of the lakehouse."""

    #: The latest version when the plan was made.
    base_version: int
    #: The names of the tables.
    tables: tuple[str, ...]
    #: The names of tables that cannot be relocated, with the reason.
    refused: dict[str, str]
    #: The number of files to write.
    files: int
    #: The table root that the lakehouse would stop using, because it is a former location of the lakehouse or is used
    #: by a copy of it.
    left_table_root: str
    #: The new table root of this lakehouse; empty if it does not change.
    table_root: str
    #: The tables and their files.
    moved: tuple[MovedTable, ...] = field(repr=False, compare=False)
    operation: Relocation = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over all tables and their metadata files."""
        content = [[table.name, table.table_id, table.files.metadata] for table in self.moved]
        left = [self.left_table_root] if self.left_table_root else []
        left += [f"to {self.table_root}"] if self.table_root else []
        return digest_of(self.base_version, self.base_id, _OPERATION, content, sorted(self.refused), *left)

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change."""
        return not self.tables and not self.left_table_root and not self.table_root

    def table(self) -> Table:
        """Return one row for each table."""
        rows: list[tuple[object, ...]] = [(table.name, table.files.count, "") for table in self.moved]
        rows += [(name, "", f"skipped: {reason}") for name, reason in self.refused.items()]
        rows += [(f"table root {self.left_table_root}", "", "no longer used")] if self.left_table_root else []
        rows += [(f"table root {self.table_root}", "", "becomes the table root")] if self.table_root else []
        title = f"Relocation of version {self.base_version}: {self.files:,} files of {len(self.tables):,} tables"
        return new_table(title, "table", "files to write", "note", rows=rows)

    def execute(self, approved_digest: str | None = None) -> RelocationReport:
        """Write new metadata of the tables and commit it in one version, or commit nothing if there are no tables.

        The relocation is planned again whenever a concurrent commit has changed a table. Files of a failed attempt are
        deleted if possible.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: Concurrent commits conflicted in MAX_ATTEMPTS attempts.
            TrinityLakeError: Planning or the commit failed.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Relocation(PlannedOperation[RelocationPlan, "RelocationReport"]):
    """Relocate all tables of the latest version."""

    telemetry_name = "relocation"

    #: The new table root; empty to keep the current table root.
    table_root: str = ""

    def plan(self) -> RelocationPlan:
        """Make a plan based on the latest version. See :func:`plan_relocation` for the errors."""
        return on_latest(self.lake, self._plan_on)

    def _plan_on(self, base: Snapshot) -> RelocationPlan:
        io = self._relocated_io(base)
        if self.table_root and self.table_root != _normalized_table_root(base):
            check_files_exist(base, io, self.table_root)
        tables, damaged = moved_tables(self.lake, base, io)
        self._check_not_under_root(tables)
        moved = tuple(table for table in tables if not table.files.unmoved_deletes)
        deletes = {table.name: table.files.unmoved_deletes for table in tables if table.files.unmoved_deletes}
        return RelocationPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            left_table_root="" if self.table_root else _left_table_root(self.lake, base, tables),
            table_root=self.table_root if self._changes_table_root(base) else "",
            tables=tuple(table.name for table in moved),
            refused={
                name: f"its position deletes refer to data files by path ({path!r}); {DELETES_REMEDY}"
                for name, path in deletes.items()
            }
            | {name: error.message for name, error in damaged.items()},
            files=sum(table.files.count for table in moved),
            moved=moved,
            operation=self,
        )

    def _check_not_under_root(self, tables: Sequence[MovedTable]) -> None:
        """Raise InvalidInputError if tables under the lakehouse root used to be below the new table root."""
        under_root = [table for table in tables if table.files.home == self.lake.root]
        uris = [uri for table in under_root for uri in table.files.uris]
        if self.table_root and any(uri.startswith(self.table_root) for uri in uris):
            raise InvalidInputError(
                f"{self.table_root} cannot become the table root: tables such as {under_root[0].name} were moved from"
                " there to the root of this lakehouse; relocate without a table root"
            )

    def _relocated_io(self, base: Snapshot) -> StorageFileIO:
        """Return a reader of the tables' files at their locations after the relocation."""
        if not self.table_root:
            return reading_io(self.lake)
        names = NamedRoots.of(replace(base.definition, table_root=self.table_root))
        io = StorageFileIO.on(self.lake.storage, self.lake.storage_options, read_only=True, names=names)
        io.allowed_roots.check_root(self.table_root)
        io.folders.check_is_of_no_copy(io.storage_at(self.table_root))
        return io

    def _changes_table_root(self, base: Snapshot) -> bool:
        """Whether the relocation changes the table root or its owner."""
        if not self.table_root:
            return False
        existing = table_root_of(self.lake, replace(base.definition, table_root=self.table_root))
        return self.table_root != _normalized_table_root(base) or existing is None or bool(existing.refusal)

    def run(self, plan: RelocationPlan, approved_digest: str | None) -> RelocationReport:
        """Make a new plan based on the latest version, and relocate."""
        metered = MeteredLakehouse(self.lake)
        operation = replace(self, lake=metered.lake)
        first_plan = operation.plan()
        if approved_digest is not None:
            first_plan.check_approved(approved_digest)

        def attempt(number: int) -> RelocationReport:
            current = first_plan if number == 1 else operation.plan()
            if approved_digest is not None:  # the approval covers the same effects on any later version
                replace(current, base_version=first_plan.base_version, base_id=first_plan.base_id).check_approved(
                    approved_digest
                )
            version = current.base_version if current.is_empty else _commit(metered.lake, current)
            return RelocationReport(
                version=version,
                tables=current.tables,
                refused=current.refused,
                files=current.files,
                table_root=current.table_root,
                cost=metered.cost(),
            )

        return commit_on_latest(attempt)


@dataclass(frozen=True, kw_only=True)
class RelocationReport(Document):
    """The result of a relocation."""

    #: The version that contains the relocated tables; the latest version if there was nothing to do.
    version: int
    #: The names of the relocated tables.
    tables: tuple[str, ...]
    #: The names of tables that could not be relocated, with the reason.
    refused: dict[str, str]
    #: The number of files written.
    files: int
    #: The new table root of this lakehouse; empty if it did not change.
    table_root: str
    #: The requests and time that the relocation took.
    cost: Cost

    def table(self) -> Table:
        """Return one row for each table."""
        rows = [("table root changed", self.table_root)] if self.table_root else []
        rows += [*(("relocated", name) for name in self.tables), *(("skipped", name) for name in self.refused)]
        result = "table root changed" if self.table_root else "nothing to do"
        result = f"committed as version {self.version}" if self.tables else f"{result}, version {self.version}"
        return new_table(f"Relocation, {result}: {self.files:,} files written", "result", "table", rows=rows)


def plan_relocation(lake: Lakehouse, table_root: str | None = None) -> RelocationPlan:
    """Plan to rewrite the metadata of all tables for their current location, without writing anything.

    Only tables of the latest version are relocated. Tables with position deletes and damaged tables are listed as
    refused.

    Args:
        lake: The lakehouse at its current location.
        table_root: The location to which the files under the table root were moved. It becomes the table root of this
            lakehouse, which can delete files there from then on. For a lakehouse that was moved itself, the current
            table root can be passed as well; copies of the lakehouse must no longer use it.

    Raises:
        InvalidInputError: ``table_root`` is the root of the lakehouse, or tables were moved away from it.
        FileMissingError: A file is not below ``table_root``.
        LocationNotAllowedError: ``table_root`` belongs to another copy, or is outside the allowed roots.
        StorageError: A storage request failed.
    """
    root = "" if table_root is None else normalize_root_uri(table_root)
    if root == lake.root:
        raise InvalidInputError(f"{root} is the root of the lakehouse; use another table root")
    return Relocation(lake=lake, table_root=root).plan()


def moved_tables(
    lake: Lakehouse, base: Snapshot, io: StorageFileIO | None = None
) -> tuple[list[MovedTable], dict[str, TrinityLakeError]]:
    """Return the MANAGED Iceberg tables of a version that refer to a former location of the lakehouse.

    Args:
        lake: The lakehouse.
        base: The version.
        io: Reads the files of the tables; None to read them at the current location.

    Returns:
        The tables, and the errors of damaged tables by name.

    Raises:
        StorageError: A storage request failed.
    """
    io = io or reading_io(lake)

    def inspect_table(definition: TableDef) -> MovedFiles | TrinityLakeError | None:
        is_managed = definition.is_managed and iceberg_metadata(definition)
        try:
            return moved_files(definition, io) if is_managed else None
        except DAMAGE as error:
            return error

    tables: list[MovedTable] = []
    damaged: dict[str, TrinityLakeError] = {}
    for entries in with_definitions(base, tables_of(base)):
        results = run_parallel(
            in_one_round_trip(inspect_table), [definition for _, _, definition in entries], lake.storage.concurrency
        )
        for (name, location, definition), files in zip(entries, results, strict=True):
            if isinstance(files, TrinityLakeError):
                damaged[str(name)] = files
            elif files is not None:
                tables.append(MovedTable(name.namespace, name.table or "", definition.id, location, files))
    return tables, damaged


def _left_table_root(lake: Lakehouse, base: Snapshot, tables: Sequence[MovedTable]) -> str:
    """Return the table root if this lakehouse must stop using it, or an empty string.

    Otherwise, a copy of the lakehouse that uses the table root would remove new files, or a former location would be
    created again.
    """
    table_root, root = base.definition.table_root, _normalized_table_root(base)
    if root in ("", lake.root):
        return ""
    if any(uri.startswith(root) for table in tables for uri in table.files.uris):
        return table_root
    try:
        writing_io(lake).folders.check_is_of_no_copy(open_storage(root, options_for(lake, root)))
    except LocationNotAllowedError:
        return table_root
    return ""


def check_files_exist(base: Snapshot, io: StorageFileIO, table_root: str) -> None:
    """Check that the files of a version's managed tables exist below a table root.

    Args:
        base: The version.
        io: Reads the files below the table root.
        table_root: The table root.

    Raises:
        FileMissingError: A file does not exist.
        CorruptFileError: The size of a file differs from the size recorded in its table's metadata.
        StorageError: Another storage request failed.
    """
    for entries in with_definitions(base, tables_of(base)):
        for name, _, definition in entries:
            if not (definition.is_managed and iceberg_metadata(definition)):
                continue
            listed = io.storage_at(table_root).list(table_prefix(definition.id))
            sizes_bytes = {info.path: info.size_bytes for info in listed}
            try:
                live = [file for file in files_of(definition, io) if file.live]
                missing = next(
                    (file.location for file in live if _is_missing(file.location, table_root, sizes_bytes)), None
                )
            except FileMissingError as error:
                missing, live = error.path, []
            if missing is not None:
                message = f"a file of table {name} is not under {table_root}; copy all files there first"
                raise FileMissingError(message, path=missing)
            for file in live:
                _check_size(file, str(name), table_root, sizes_bytes)


def _check_size(file: TableFile, table: str, table_root: str, sizes_bytes: Mapping[str, int]) -> None:
    """Raise CorruptFileError if the size of a file under the table root differs from the table's metadata."""
    size_bytes = sizes_bytes.get(file.location.removeprefix(table_root))
    if file.location.startswith(table_root) and file.size_bytes is not None and file.size_bytes != size_bytes:
        raise CorruptFileError(
            f"a file of table {table} has {size_bytes} bytes under {table_root}, but {file.size_bytes} according to the"
            " table's metadata; copy it again",
            path=file.location,
        )


def _is_missing(location: str, table_root: str, sizes_bytes: Container[str]) -> bool:
    return location.startswith(table_root) and location.removeprefix(table_root) not in sizes_bytes


def _normalized_table_root(base: Snapshot) -> str:
    table_root = base.definition.table_root
    return normalize_root_uri(table_root) if table_root else ""


def _relocation_io(lake: Lakehouse, plan: RelocationPlan, base: Snapshot) -> StorageFileIO:
    """Return a writer of the tables' files. A new table root is claimed for the lakehouse, as the operator requests."""
    if not plan.table_root:
        return writing_io(lake)
    names = NamedRoots.of(replace(base.definition, table_root=plan.table_root))
    io = StorageFileIO.on(lake.storage, lake.storage_options, names=names)
    claim_table_root(io.storage_at(plan.table_root), base.definition.id, lake.root, replaces_others=True)
    return io


def _check_base(plan: RelocationPlan, base: Snapshot) -> None:
    """Raise CommitConflictError if the plan has a new table root and another commit could have added a table."""
    if plan.table_root and base.version != plan.base_version:
        raise CommitConflictError(
            f"the relocation plan is out of date: version {base.version} was committed; stop all writers, then retry",
            conflicts=(f"version {base.version}",),
            base_version=plan.base_version,
            latest_version=base.version,
        )


def _commit(lake: Lakehouse, plan: RelocationPlan) -> int:
    """Write the new files and commit. Raises CommitConflictError if the plan is out of date."""
    base = lake.snapshot()
    _check_base(plan, base)
    io = _relocation_io(lake, plan, base)
    if not plan.moved and not plan.left_table_root and plan.table_root == _normalized_table_root(base):
        return base.version
    with (
        discarded_on_failure(io) as written,
        lake.transaction(message=f"{len(plan.moved)} tables", operation=_OPERATION) as txn,
    ):
        txn.require(lambda latest: _check_base(plan, latest))
        check_tables(txn, plan.moved, "relocation")
        base = txn.base

        def relocate_table(table: MovedTable) -> tuple[TableCopy, TableDef]:
            return plan_relocated_files(base.table_at(table.definition_location), table.files, io)

        copies = run_parallel(in_one_round_trip(relocate_table), plan.moved, lake.storage.concurrency)
        selection = Selection(tables=[copy for copy, _ in copies])
        written += [target for _, target in selection.targets()]
        former_roots = {table.files.home for table in plan.moved} - {lake.root}
        transfer = Transfer(lake.storage, io, reads_back=False)
        transfer.table_storages = {home: io.storage_at(home) for home in former_roots}
        transfer.copy(selection)
        for table, (_, definition) in zip(plan.moved, copies, strict=True):
            txn.alter_table(table.namespace, table.table, definition)
        if plan.left_table_root and base.definition.table_root == plan.left_table_root:
            txn.alter_definition(replace(txn.definition, table_root=""))
        elif plan.table_root:
            txn.alter_definition(replace(txn.definition, table_root=plan.table_root))
    assert txn.committed_version is not None
    return txn.committed_version
