"""Rolling back: a new version with the content of an earlier one (docs/protocol.md, "Rollback to t")."""

from __future__ import annotations

import copy
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from trinitylake_ops.errors import (
    CommitConflictError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    NamespaceNotFoundError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, ObjectName
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.operations.base import (
    CommitReport,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    digest_of,
    operation_span,
    uncached,
)
from trinitylake_ops.operations.export_records import record_of
from trinitylake_ops.operations.gc.tables import check_table_files, missing_file_error
from trinitylake_ops.operations.records import commit_on_latest
from trinitylake_ops.operations.rendering import Table, change_rows, new_table
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.change_set import NewNames
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS
from trinitylake_ops.transaction.conflicts import describe_key
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.history import Change, change_of, history
from trinitylake_ops.versions.latest import latest_snapshot
from trinitylake_ops.versions.lookup import check_not_expired
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import OneName, resolve_table, table_ids
from trinitylake_ops.versions.undone import ROLLED_BACK_TO, find_undone

logger = logging.getLogger(__name__)

_OPERATION = "rollback"
_MOST_NAMED = 10
#: The newest versions among which a plan looks for rollbacks that undid its target; each is a request.
_MOST_VERSIONS = 200


@dataclass(frozen=True, kw_only=True)
class RollbackPlan(Plan):
    """The changes of a rollback: ``changes`` lead from the latest version, ``base_version``, to ``to_version``.

    ``only`` names the namespaces and tables it is limited to, as ``namespace`` and
    ``namespace.table``; empty for the whole lakehouse. ``damaged`` are tables that ``to_version`` has with files that
    are damaged, missing or not the table's own, with the reason. They come back as they are there, and cannot be read.
    ``undone_by`` is a later rollback that already undid ``to_version``, or a part of what would come back, if one of
    the newest versions is such a rollback.
    """

    base_version: int
    to_version: int
    only: tuple[str, ...]
    changes: tuple[Change, ...]
    damaged: Mapping[str, str]
    message: str | None = None
    undone_by: int | None = None
    failures: Mapping[ObjectName, TrinityLakeError] = field(repr=False, compare=False)
    operation: Rollback = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the target, all changes and the names of damaged tables."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        damaged = [[name.namespace, name.table] for name in self.failures]
        return digest_of(self.base_version, _OPERATION, self.to_version, list(self.only), changes, damaged)

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change."""
        return not self.changes

    @property
    def warning(self) -> str:
        """What speaks against this rollback; an empty text if nothing does."""
        if self.undone_by is None:
            return ""
        return f"warning: version {self.to_version} was undone by version {self.undone_by}, and would come back"

    def table(self) -> Table:
        """Return one row for each namespace and table that would change."""
        what = ", ".join(self.only) if self.only else "the lakehouse"
        title = f"Rollback of {what} from version {self.base_version} to the content of version {self.to_version}"
        if isinstance(export := self.operation.target.to, str):
            title = (
                f"Restore of {what} from export {export}: version {self.base_version} gets the content of version"
                f" {self.to_version}"
            )
        if self.undone_by is not None:
            title += f"; {self.warning}"
        if self.damaged:
            named = ", ".join(list(self.damaged)[:_MOST_NAMED])
            title += f"; damaged tables, unreadable afterwards: {named}: {next(iter(self.damaged.values()))}"
        return new_table(title, "change", "object", rows=change_rows(self.changes))

    def execute(self, approved_digest: str | None = None, *, reapply: bool = False) -> CommitReport:
        """Commit the rollback; nothing is committed when nothing would change.

        It is planned again first, on what is there now. With ``reapply`` commits made since the plan are rolled back
        too. Raises PlanChangedError when an approved digest is not that of the new plan. Raises CommitConflictError
        when, without ``reapply``, another commit was made since. Raises the error of a damaged table, unless the plan
        that names it was approved by its digest. Raises the errors of planning.
        """
        return replace(self.operation, reapply=reapply).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Rollback(PlannedOperation[RollbackPlan, CommitReport]):
    """A rollback of chosen objects, or of all, from a base to a target, both of which were read."""

    telemetry_name = "rollback"

    base: Snapshot
    target: _Target
    chosen: tuple[ObjectName, ...]
    message: str | None
    reapply: bool = False

    def plan(self) -> RollbackPlan:
        """Plan on the base. Raises what :func:`plan_rollback` raises."""
        base = self.base
        check_no_gap(self.lake.files.roots, base.version)
        failures: dict[ObjectName, TrinityLakeError] = {}
        differences = _checked_differences(base, self.target, self.chosen, failures)
        if self.chosen:  # a whole version has each name once
            NewNames(base, {change.key: change.after for change in differences}).check(base)
        changes = [change_of(base.keys, difference) for difference in differences]
        return RollbackPlan(
            base_version=base.version,
            to_version=self.target.snapshot.version,
            only=tuple(str(name) for name in self.chosen),
            changes=tuple(change for change in changes if change is not None),
            damaged={str(name): error.message for name, error in failures.items()},
            message=self.message,
            failures=failures,
            operation=self,
        )

    def run(self, plan: RollbackPlan, approved_digest: str | None) -> CommitReport:
        """Commit what is planned again."""
        metered = MeteredLakehouse(self.lake)
        lake = metered.lake
        base = lake.snapshot()
        here = replace(self, lake=lake, base=base, target=_target(lake, base, self.target.to))
        now = here.plan()
        if approved_digest is not None:
            now.check_approved(approved_digest)
        elif now.base_version != plan.base_version and not self.reapply:
            raise _outdated_plan_error(plan.base_version, now.base_version)
        return CommitReport(
            operation=_OPERATION,
            base_version=now.base_version,
            version=here.commit(now, now.failures if approved_digest is not None else ()),
            changed=len(now.changes),
            damaged=now.damaged,
            cost=metered.cost(),
        )

    def commit(self, plan: RollbackPlan, approved_damage: Container[ObjectName] = ()) -> int:
        """Commit a plan; returns the version.

        Args:
            plan: The plan, made on the base of this operation.
            approved_damage: The damaged tables that may come back.

        Raises:
            TrinityLakeError: The errors of :meth:`RollbackPlan.execute`.
        """
        _check_approved(plan.failures, approved_damage)
        for name, reason in plan.damaged.items():
            logger.warning("table %s comes back damaged: %s", name, reason)
        only = f"{': ' if plan.only else ''}{', '.join(plan.only)}"
        message = (self.message or f"to version {plan.to_version}{only}")[:500]
        if self.chosen:
            return commit_on_latest(
                lambda _number: self._commit_subset(message, approved_damage),
                DEFAULT_MAX_ATTEMPTS if self.reapply else 1,
            )
        info = CommitInfo(_OPERATION, message, properties=self._properties)
        change = _WholeTree(self.target, info, self.reapply, approved_damage)
        return self.lake.commit(change, self.base)

    @property
    def _properties(self) -> dict[str, str]:
        """The claim of the commit, which readers check: it names the version whose content comes back."""
        return {ROLLED_BACK_TO: str(self.target.snapshot.version)}

    def _commit_subset(self, message: str, approved_damage: Container[ObjectName]) -> int:
        with self.lake.transaction(message=message, properties=self._properties, operation=_OPERATION) as txn:
            base = txn.base
            if base.version != self.base.version and not self.reapply:
                raise _outdated_plan_error(self.base.version, base.version)
            txn.require(lambda latest: self.target.check_retained(latest.definition))
            txn.require(lambda latest: _check_unchanged(base, latest, self.chosen))
            failures: dict[ObjectName, TrinityLakeError] = {}
            differences = _checked_differences(base, self.target, self.chosen, failures)
            _check_approved(failures, approved_damage)
            for change in differences:
                txn.restore_entry(change.key, change.after)
            txn.reset_age()  # it took long to look for the files of tables, and none was written
        assert txn.committed_version is not None
        return txn.committed_version


@dataclass(frozen=True)
class _Target:
    """The target of a rollback: a snapshot, the version or export's name by which it was found, and files of tables."""

    to: int | str
    snapshot: Snapshot
    io: StorageFileIO

    def check_retained(self, latest: LakehouseDef) -> None:
        """Raise VersionExpiredError or ExportNotFoundError when the files of the target are not kept any more."""
        if isinstance(self.to, int):
            check_not_expired(self.to, latest)
        elif self.to not in latest.exported_snapshots:
            raise ExportNotFoundError(f"export {self.to!r} was dropped since the rollback was planned")


@dataclass(frozen=True)
class _WholeTree:
    """The tree of an earlier version under the current lakehouse definition.

    The definition is carried forward: an older one would forget exports and pins, and their files
    would expire.
    """

    target: _Target
    info: CommitInfo
    reapply: bool
    approved_damage: Container[ObjectName]

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        n_changes = len(_differences(base, self.target.snapshot, ()))
        if not n_changes:
            return None
        info = replace(self.info, counts={"changed": n_changes})
        return draft_of_tree(base, stamp, self.target.snapshot.root, info, is_rollback=True)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        if not self.reapply:
            raise _outdated_plan_error(base.version, latest.version)
        self.target.check_retained(latest.definition)
        failures: dict[ObjectName, TrinityLakeError] = {}
        _checked_differences(latest, self.target, (), failures)
        _check_approved(failures, self.approved_damage)


def _check_approved(failures: Mapping[ObjectName, TrinityLakeError], approved: Container[ObjectName]) -> None:
    """Raise the error of a damaged table that would come back without approval."""
    for name, error in failures.items():
        if name not in approved:
            refused = copy.copy(error)
            refused.message = (
                f"{error.message}; table {name} would come back damaged: roll back the other namespaces and tables by"
                " their names, or approve a plan that names it by its digest"
            )
            raise refused


def _check_unchanged(base: Snapshot, latest: Snapshot, chosen: Sequence[ObjectName]) -> None:
    """Raise CommitConflictError when a chosen object has changed, also one that the rollback leaves as it is."""
    changes = _differences(base, latest, chosen)
    if changes:
        conflicts = tuple(
            f"{describe_key(base.keys, change.key)}: a concurrent commit changed it" for change in changes
        )
        raise CommitConflictError(
            f"version {latest.version} changed what was to be rolled back, as planned on version {base.version}: "
            + "; ".join(conflicts)
            + "; look at the new plan, or ask to re-apply",
            conflicts=conflicts,
            base_version=base.version,
            latest_version=latest.version,
        )


def _outdated_plan_error(base_version: int, latest_version: int) -> CommitConflictError:
    return CommitConflictError(
        f"version {latest_version} was committed after version {base_version}, on which the rollback was planned;"
        " look at the new plan, or ask to re-apply",
        conflicts=(f"version {latest_version}",),
        base_version=base_version,
        latest_version=latest_version,
    )


def plan_rollback(
    lake: Lakehouse,
    to: int | str | None = None,
    namespaces: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    *,
    timestamp: datetime | int | None = None,
    message: str | None = None,
) -> RollbackPlan:
    """Plan a rollback to a version, an export's name or a time; reads only.

    ``namespaces`` with all their tables, and ``tables`` as ``namespace.table``, limit it. Raises
    VersionNotFoundError, VersionExpiredError, ExportNotFoundError, NamespaceNotFoundError,
    TableNotFoundError, InvalidInputError without a target, and FileMissingError, naming it, when
    a node or definition that it would bring back is gone. Raises TableHasAnotherNameError when a table that it
    would bring back was renamed since, and would keep its new name as well. Raises FileMissingError, CorruptFileError,
    LocationNotAllowedError for a damaged table that ``tables`` names. Other damaged tables are listed in the plan.
    """
    plan = _plan(lake, to, namespaces, tables, timestamp=timestamp, message=message)
    return replace(plan, undone_by=_undone_by(plan.operation))


def _plan(
    lake: Lakehouse,
    to: int | str | None,
    namespaces: Sequence[str] | None,
    tables: Sequence[str] | None,
    *,
    timestamp: datetime | int | None,
    message: str | None,
) -> RollbackPlan:
    if to is None and timestamp is None:
        raise InvalidInputError("a rollback needs a version, the name of an export or a timestamp to go back to")
    lake = uncached(lake)
    base = lake.snapshot()
    target = _target(lake, base, to, timestamp)
    chosen = selected_objects(base, target.snapshot, target.to, namespaces, tables)
    return Rollback(lake=lake, base=base, target=target, chosen=chosen, message=message).plan()


def _undone_by(rollback: Rollback) -> int | None:
    """Return the rollback that undid the target, if one of the newest versions after the target did."""
    base, to = rollback.base, rollback.target.snapshot.version
    if to >= base.version:
        return None
    infos = list(history(base.files, min(base.version - to, _MOST_VERSIONS), base))
    return find_undone(base.files, infos, oldest=to).by(to, rollback.chosen)


def selected_objects(
    base: Snapshot,
    target: Snapshot,
    to: int | str,
    namespaces: Sequence[str] | None,
    tables: Sequence[str] | None,
) -> tuple[ObjectName, ...]:
    """Return what was named, else the namespaces that an export is limited to; nothing where all comes back.

    Raises InvalidInputError for what a limited export does not hold: that would be dropped; NamespaceNotFoundError
    and the like.
    """
    record = record_of(base.definition, to) if isinstance(to, str) else None
    held = () if record is None else record.namespaces
    chosen = chosen_objects(base, target, namespaces or (() if tables else held), tables or ())
    for name in chosen:
        if held and name.namespace not in held:
            raise InvalidInputError(
                f"export {to!r} holds only the namespaces {', '.join(held)}, not that of {str(name)!r}"
            )
    return chosen


def _target(lake: Lakehouse, base: Snapshot, to: int | str | None, timestamp: datetime | int | None = None) -> _Target:
    snapshot = lake.snapshot(to, timestamp, latest=base)
    if snapshot.files is not lake.files:
        is_export = isinstance(to, str) and to in base.definition.exported_snapshots
        if base.definition.parent is not None and not is_export:
            raise InvalidInputError(
                f"version {snapshot.version} of {snapshot.files.storage.root} is from before the beginning of this"
                " clone, which goes back to versions of its own; the first of them, 0, is the version that was cloned"
            )
        raise InvalidInputError(
            f"export {to!r} is a lakehouse of its own, at {snapshot.files.storage.root}; what it holds is brought back"
            f" by: trinitylake restore {to}"
        )
    if snapshot.root.is_sealed:
        raise VersionExpiredError(f"version {snapshot.version} was expired and purged", path=snapshot.location)
    is_name = isinstance(to, str) and not (to.isascii() and to.isdecimal())
    io = reading_io(lake)
    return _Target(str(to) if is_name else snapshot.version, snapshot, io)


def rollback(
    lake: Lakehouse,
    to: int | str | None = None,
    namespaces: Sequence[str] | None = None,
    tables: Sequence[str] | None = None,
    *,
    timestamp: datetime | int | None = None,
    message: str | None = None,
    reapply: bool = False,
) -> int:
    """Plan and execute a rollback; returns the new version. Raises what both raise.

    It is planned once: another commit in between is met when this one is made.
    """
    with operation_span(Rollback.telemetry_name):
        plan = _plan(lake, to, namespaces, tables, timestamp=timestamp, message=message)
        return replace(plan.operation, reapply=reapply).commit(plan)


def chosen_objects(
    base: Snapshot, target: Snapshot, namespaces: Sequence[str], tables: Sequence[str]
) -> tuple[ObjectName, ...]:
    """Return what was named: namespaces with their tables, and tables. Raises NamespaceNotFoundError and the like."""
    for namespace in namespaces:
        if not base.has_namespace(namespace) and not target.has_namespace(namespace):
            raise NamespaceNotFoundError(
                f"there is no namespace {namespace!r}, neither in version {base.version} nor in {target.version}"
            )
    named = [ObjectName(*resolve_table(table, base, target)) for table in tables]
    return (*map(ObjectName, namespaces), *named)


def _differences(base: Snapshot, target: Snapshot, chosen: Sequence[ObjectName]) -> list[KeyChange]:
    """Return what leads from ``base`` to ``target``, of the chosen objects or of all."""
    try:
        differences = diff_trees(base.files.nodes, base.root, target.root)
    except FileMissingError as error:
        raise FileMissingError(
            f"cannot go from version {base.version} back to version {target.version}: a node of one of them is missing;"
            " nothing was changed",
            path=error.path,
        ) from error
    return [change for change in differences if is_chosen(base, change.key, chosen)]


def is_chosen(base: Snapshot, key: str, chosen: Sequence[ObjectName]) -> bool:
    """Whether a key is that of a chosen object, or of a table in a chosen namespace; without a choice all are."""
    if not chosen:
        return True
    name = base.keys.decode(key)
    return name is not None and any(wanted in (name, ObjectName(name.namespace)) for wanted in chosen)


def _checked_differences(
    base: Snapshot, target: _Target, chosen: Sequence[ObjectName], failures: dict[ObjectName, TrinityLakeError]
) -> list[KeyChange]:
    """Return the changes that lead from ``base`` to ``target`` after checking that they can be made.

    Args:
        base: The version to roll back.
        target: The version to return to.
        chosen: The objects to roll back, empty for all.
        failures: The errors of damaged tables that would come back are added to it, by the tables' names.

    Raises:
        FileMissingError, CorruptFileError, LocationNotAllowedError: A node or a definition is missing or damaged, or
            a table that was chosen by its name is.
        VersionExpiredError: The target has expired meanwhile.
    """
    try:
        differences = _differences(base, target.snapshot, chosen)
        _check_namespaces(base, differences)
        failures |= _damaged_tables(target, differences)
        for error in (failures[name] for name in chosen if name in failures):
            raise error
        if any(isinstance(error, FileMissingError) for error in failures.values()):
            target.check_retained(latest_snapshot(base.files).definition)  # it may have been purged meanwhile
        _check_names(base, target, differences)
    except FileMissingError:
        target.check_retained(latest_snapshot(base.files).definition)  # it may have been purged meanwhile
        raise
    return differences


def _check_namespaces(base: Snapshot, differences: Sequence[KeyChange]) -> None:
    """Raise NamespaceNotFoundError when a table would come back into a namespace that is not there."""
    restored = [name for change in differences if change.after is not None and (name := base.keys.decode(change.key))]
    coming = {name.namespace for name in restored if name.table is None}
    for name in restored:
        if name.namespace not in coming and not base.has_namespace(name.namespace):
            raise NamespaceNotFoundError(
                f"table {name} needs namespace {name.namespace!r}, which version {base.version} does not have;"
                " bring the namespace back instead"
            )


def _check_names(base: Snapshot, target: _Target, differences: Sequence[KeyChange]) -> None:
    """Raise TableHasAnotherNameError when a table would come back that now has another name, and keeps it."""
    tables = {change.key: change.after for change in differences if change.key.startswith(TABLE_KEY_PREFIX)}
    restored = table_ids(target.snapshot, tables)
    OneName({key: restored.get(key) for key in tables})(base)


def _damaged_tables(target: _Target, differences: Sequence[KeyChange]) -> dict[ObjectName, TrinityLakeError]:
    """Return the errors of damaged tables that would come back, by their names.

    Raises FileMissingError, CorruptFileError for a definition.
    """
    snapshot = target.snapshot
    files = snapshot.files
    namespaces: list[str] = []
    tables: dict[ObjectName, str] = {}
    for change in differences:
        name = snapshot.keys.decode(change.key)
        if change.after is not None and name is not None:
            if name.table is None:
                namespaces.append(change.after)
            else:
                tables[name] = change.after
    try:
        run_parallel(files.definitions.namespace, namespaces, files.storage.concurrency)
        definitions = files.definitions.tables(list(tables.values()))
    except FileMissingError as error:
        raise missing_file_error(snapshot.version, "a definition", error.path) from error
    failures: dict[ObjectName, TrinityLakeError] = {}
    for name, definition in zip(tables, definitions, strict=True):
        try:
            check_table_files(snapshot.version, target.io, definition)
        except DAMAGE as error:
            failures[name] = error
    return failures
