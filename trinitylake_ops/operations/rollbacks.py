"""Rolling back: a new version with the content of an earlier one (docs/internals/protocol.md, "Rollback to t")."""

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
        return digest_of(
            self.base_version, self.base_id, _OPERATION, self.to_version, list(self.only), changes, damaged
        )

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
    target: Target
    chosen: tuple[ObjectName, ...]
    message: str | None
    reapply: bool = False

    def plan(self) -> RollbackPlan:
        """Plan on the base. Raises what :func:`plan_rollback` raises."""
        base = self.base
        check_no_gap(self.lake.files.roots, base.version)
        failures: dict[ObjectName, TrinityLakeError] = {}
        differences = checked_changes(base, self.target, self.chosen, failures)
        if self.chosen:  # a whole version has each name once
            NewNames(base, {change.key: change.after for change in differences}).check(base)
        changes = [change_of(base.keys, difference) for difference in differences]
        return RollbackPlan(
            base_version=base.version,
            base_id=base_id_of(base),
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
        here = replace(self, lake=lake, base=base, target=target_of(lake, base, self.target.to))
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
            differences = checked_changes(base, self.target, self.chosen, failures)
            _check_approved(failures, approved_damage)
            for change in differences:
                txn.restore_entry(change.key, change.after)
            txn.reset_age()  # it took long to look for the files of tables, and none was written
        assert txn.committed_version is not None
        return txn.committed_version


@dataclass(frozen=True)
class _WholeTree:
    """The tree of an earlier version under the current lakehouse definition.

    The definition is carried forward: an older one would forget exports and pins, and their files
    would expire.
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
    changes = changes_between(base, latest, chosen)
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
    target = target_of(lake, base, to, timestamp)
    chosen = selected_objects(base, target.snapshot, target.to, namespaces, tables)
    return Rollback(lake=lake, base=base, target=target, chosen=chosen, message=message).plan()


def _undone_by(rollback: Rollback) -> int | None:
    """Return the rollback that undid the target, if one of the newest versions after the target did."""
    base, to = rollback.base, rollback.target.snapshot.version
    if to >= base.version:
        return None
    infos = list(history(base.files, min(base.version - to, _MOST_VERSIONS), base))
    return find_undone(base.files, infos, oldest=to).by(to, rollback.chosen)


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
