"""Roll back: commit the content of an earlier version again (docs/internals/protocol.md, "Rollback to t")."""

from __future__ import annotations

import copy
import logging
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from trinitylake_ops.errors import (
    CommitConflictError,
    InvalidInputError,
    TrinityLakeError,
)
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.operations.base import (
    CommitReport,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
    uncached,
)
from trinitylake_ops.operations.definition_commits import commit_on_latest
from trinitylake_ops.operations.rendering import Table, change_rows, new_table
from trinitylake_ops.operations.rollback_target import (
    Target,
    changes_between,
    checked_changes,
    selected_objects,
    target_of,
)
from trinitylake_ops.transaction.change_set import NewNames
from trinitylake_ops.transaction.commit import DEFAULT_MAX_ATTEMPTS
from trinitylake_ops.transaction.conflicts import describe_key
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.history import Change, change_of, history
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.undone import ROLLED_BACK_TO, find_undone

logger = logging.getLogger(__name__)

_OPERATION = "rollback"
_MAX_NAMES = 10
#: The number of newest versions in which a plan searches for a rollback that undid its target, with one request each.
_MAX_SEARCHED_VERSIONS = 200


@dataclass(frozen=True, kw_only=True)
class RollbackPlan(Plan):
    """The changes that a rollback would make."""

    #: The latest version when the plan was made.
    base_version: int
    #: The version whose content is restored.
    to_version: int
    #: The selected objects, as ``namespace`` or ``namespace.table``; empty for the whole lakehouse.
    only: tuple[str, ...]
    #: The changes to namespaces and tables.
    changes: tuple[Change, ...]
    #: Restored tables with files that are damaged, missing or do not belong to the table, and the reason for each. They
    #: cannot be read afterwards.
    damaged: Mapping[str, str]
    #: The message of the commit; None for a default.
    message: str | None = None
    #: A later rollback that already undid ``to_version`` or a part of it, if it is among the newest versions.
    undone_by: int | None = None
    #: The errors of damaged tables.
    failures: Mapping[ObjectName, TrinityLakeError] = field(repr=False, compare=False)
    operation: Rollback = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` over the target, all changes, and the names of damaged tables."""
        changes = [[change.kind, change.namespace, change.table] for change in self.changes]
        damaged = [[name.namespace, name.table] for name in self.failures]
        return digest_of(
            self.base_version, self.base_id, _OPERATION, self.to_version, list(self.only), changes, damaged
        )

    @property
    def is_empty(self) -> bool:
        """Whether nothing would change."""
        return not self.changes

    @property
    def warning(self) -> str:
        """A warning about this rollback; empty if there is none."""
        if self.undone_by is None:
            return ""
        return f"warning: version {self.undone_by} already undid version {self.to_version}, which would be restored"

    def table(self) -> Table:
        """Return one row for each namespace and table that would change."""
        selected = ", ".join(self.only) if self.only else "the lakehouse"
        title = f"Rollback of {selected} from version {self.base_version} to the content of version {self.to_version}"
        if isinstance(export := self.operation.target.to, str):
            title = (
                f"Restore of {selected} from export {export}: version {self.base_version} gets the content of version"
                f" {self.to_version}"
            )
        if self.undone_by is not None:
            title += f"; {self.warning}"
        if self.damaged:
            names = ", ".join(list(self.damaged)[:_MAX_NAMES])
            title += f"; damaged tables, unreadable afterwards: {names}: {next(iter(self.damaged.values()))}"
        return new_table(title, "change", "object", rows=change_rows(self.changes))

    def execute(self, approved_digest: str | None = None, *, reapply: bool = False) -> CommitReport:
        """Plan again on the latest version and commit the rollback, or commit nothing if nothing would change.

        Args:
            approved_digest: The digest of the approved plan; None to apply the plan without approval. Only an approval
                allows damaged tables to be restored.
            reapply: Also roll back commits that happened since the plan was made.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: Another commit happened since the plan was made, and ``reapply`` is False.
            TrinityLakeError: The error of a damaged table, or another error of :func:`plan_rollback`.
        """
        return replace(self.operation, reapply=reapply).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Rollback(PlannedOperation[RollbackPlan, CommitReport]):
    """Roll back selected objects, or everything, from a base to a target."""

    telemetry_name = "rollback"

    #: The version to roll back.
    base: Snapshot
    #: The version whose content is restored.
    target: Target
    #: The objects to roll back; empty for everything.
    selected: tuple[ObjectName, ...]
    #: The message of the commit; None for a default.
    message: str | None
    #: Whether commits that happened since the plan are rolled back as well.
    reapply: bool = False

    def plan(self) -> RollbackPlan:
        """Make a plan based on ``base``. See :func:`plan_rollback` for the errors."""
        base = self.base
        check_no_gap(self.lake.files.roots, base.version)
        failures: dict[ObjectName, TrinityLakeError] = {}
        differences = checked_changes(base, self.target, self.selected, failures)
        if self.selected:  # in a whole version, names are already unique
            NewNames(base, {change.key: change.after for change in differences}).check(base)
        changes = [change_of(base.keys, difference) for difference in differences]
        return RollbackPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            to_version=self.target.snapshot.version,
            only=tuple(str(name) for name in self.selected),
            changes=tuple(change for change in changes if change is not None),
            damaged={str(name): error.message for name, error in failures.items()},
            message=self.message,
            failures=failures,
            operation=self,
        )

    def run(self, plan: RollbackPlan, approved_digest: str | None) -> CommitReport:
        """Make a new plan based on the latest version, and commit."""
        metered = MeteredLakehouse(self.lake)
        lake = metered.lake
        base = lake.snapshot()
        operation = replace(self, lake=lake, base=base, target=target_of(lake, base, self.target.to))
        current = operation.plan()
        if approved_digest is not None:
            current.check_approved(approved_digest)
        elif current.base_version != plan.base_version and not self.reapply:
            raise _outdated_plan_error(plan.base_version, current.base_version)
        return CommitReport(
            operation=_OPERATION,
            base_version=current.base_version,
            version=operation.commit(current, current.failures if approved_digest is not None else ()),
            changed=len(current.changes),
            damaged=current.damaged,
            cost=metered.cost(),
        )

    def commit(self, plan: RollbackPlan, approved_damage: Container[ObjectName] = ()) -> int:
        """Commit a plan, and return the version.

        Args:
            plan: The plan, made on the base of this operation.
            approved_damage: The damaged tables that may be restored.

        Raises:
            TrinityLakeError: See :meth:`RollbackPlan.execute`.
        """
        _check_approved(plan.failures, approved_damage)
        for name, reason in plan.damaged.items():
            logger.warning("restoring damaged table %s: %s", name, reason)
        only = f"{': ' if plan.only else ''}{', '.join(plan.only)}"
        message = (self.message or f"to version {plan.to_version}{only}")[:500]
        if self.selected:
            return commit_on_latest(
                lambda _number: self._commit_subset(message, approved_damage),
                DEFAULT_MAX_ATTEMPTS if self.reapply else 1,
            )
        info = CommitInfo(_OPERATION, message, properties=self._properties)
        change = _WholeTree(self.target, info, self.reapply, approved_damage)
        return self.lake.commit(change, self.base)

    @property
    def _properties(self) -> dict[str, str]:
        """Commit properties that name the restored version. Readers check this claim."""
        return {ROLLED_BACK_TO: str(self.target.snapshot.version)}

    def _commit_subset(self, message: str, approved_damage: Container[ObjectName]) -> int:
        with self.lake.transaction(message=message, properties=self._properties, operation=_OPERATION) as txn:
            base = txn.base
            if base.version != self.base.version and not self.reapply:
                raise _outdated_plan_error(self.base.version, base.version)
            txn.require(lambda latest: self.target.check_retained(latest.definition))
            txn.require(lambda latest: _check_unchanged(base, latest, self.selected))
            failures: dict[ObjectName, TrinityLakeError] = {}
            differences = checked_changes(base, self.target, self.selected, failures)
            _check_approved(failures, approved_damage)
            for change in differences:
                txn.restore_entry(change.key, change.after)
            txn.reset_age()  # checking table files can take a long time, and no file was written
        assert txn.committed_version is not None
        return txn.committed_version


@dataclass(frozen=True)
class _WholeTree:
    """Commit the tree of an earlier version under the current lakehouse definition.

    The definition is kept, because an older one would lack later exports, and their files would expire.
    """

    target: Target
    info: CommitInfo
    reapply: bool
    approved_damage: Container[ObjectName]

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        n_changes = len(changes_between(base, self.target.snapshot, ()))
        if not n_changes:
            return None
        info = replace(self.info, counts={"changed": n_changes})
        return draft_of_tree(base, stamp, self.target.snapshot.root, info, is_rollback=True)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        if not self.reapply:
            raise _outdated_plan_error(base.version, latest.version)
        self.target.check_retained(latest.definition)
        failures: dict[ObjectName, TrinityLakeError] = {}
        checked_changes(latest, self.target, (), failures)
        _check_approved(failures, self.approved_damage)


def _check_approved(failures: Mapping[ObjectName, TrinityLakeError], approved: Container[ObjectName]) -> None:
    """Raise the error of a damaged table that would be restored without approval."""
    for name, error in failures.items():
        if name not in approved:
            rejected = copy.copy(error)
            rejected.message = (
                f"{error.message}; table {name} would be restored damaged: select the other namespaces and tables by"
                " name, or approve the digest of a plan that lists it"
            )
            raise rejected


def _check_unchanged(base: Snapshot, latest: Snapshot, selected: Sequence[ObjectName]) -> None:
    """Raise CommitConflictError if a selected object has changed, including one that the rollback does not change."""
    changes = changes_between(base, latest, selected)
    if changes:
        conflicts = tuple(
            f"{describe_key(base.keys, change.key)}: changed by a concurrent commit" for change in changes
        )
        raise CommitConflictError(
            f"the rollback planned on version {base.version} conflicts with version {latest.version}: "
            + "; ".join(conflicts)
            + "; review the new plan, or roll back with reapply",
            conflicts=conflicts,
            base_version=base.version,
            latest_version=latest.version,
        )


def _outdated_plan_error(base_version: int, latest_version: int) -> CommitConflictError:
    return CommitConflictError(
        f"the rollback plan for version {base_version} is out of date: version {latest_version} was committed; create"
        " a new plan, or roll back with reapply",
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
    """Plan a rollback to a version, an export or a time, without writing anything.

    Args:
        lake: The lakehouse.
        to: A version number, or the name of an export within the lakehouse.
        namespaces: Roll back only these namespaces with all their tables, and ``tables``.
        tables: Roll back only these tables, as ``namespace.table``, and ``namespaces``.
        timestamp: Roll back to the version that was the latest at this time, instead of ``to``.
        message: The message of the commit.

    Returns:
        The plan. It lists damaged tables, unless ``tables`` names them.

    Raises:
        InvalidInputError: No target was specified.
        VersionNotFoundError: The version does not exist.
        VersionExpiredError: The version has expired.
        ExportNotFoundError: The export does not exist.
        NamespaceNotFoundError: A selected namespace does not exist.
        TableNotFoundError: A selected table does not exist.
        TableHasAnotherNameError: A restored table has been renamed since and would have two names.
        FileMissingError: A node or definition to restore is missing, or a file of a table in ``tables`` is missing.
        CorruptFileError: A node, a definition or a table file is damaged.
        LocationNotAllowedError: A table in ``tables`` refers to a file outside the allowed roots.
        StorageError: A storage request failed.
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
        raise InvalidInputError("a rollback needs a target: a version, the name of an export, or a timestamp")
    lake = uncached(lake)
    base = lake.snapshot()
    target = target_of(lake, base, to, timestamp)
    selected = selected_objects(base, target.snapshot, target.to, namespaces, tables)
    return Rollback(lake=lake, base=base, target=target, selected=selected, message=message).plan()


def _undone_by(rollback: Rollback) -> int | None:
    """Return the rollback that undid the target, if it is among the newest versions."""
    base, to = rollback.base, rollback.target.snapshot.version
    if to >= base.version:
        return None
    infos = list(history(base.files, min(base.version - to, _MAX_SEARCHED_VERSIONS), base))
    return find_undone(base.files, infos, oldest=to).by(to, rollback.selected)


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
    """Plan and execute a rollback, and return the new version.

    The rollback is planned only once, because committing detects an intermediate commit.

    Args:
        lake: The lakehouse.
        to: A version number, or the name of an export within the lakehouse.
        namespaces: Roll back only these namespaces with all their tables, and ``tables``.
        tables: Roll back only these tables, as ``namespace.table``, and ``namespaces``.
        timestamp: Roll back to the version that was the latest at this time, instead of ``to``.
        message: The message of the commit.
        reapply: Also roll back commits that happen in between.

    Raises:
        TrinityLakeError: See :func:`plan_rollback` and :meth:`RollbackPlan.execute`.
    """
    with operation_span(Rollback.telemetry_name):
        plan = _plan(lake, to, namespaces, tables, timestamp=timestamp, message=message)
        return replace(plan.operation, reapply=reapply).commit(plan)
