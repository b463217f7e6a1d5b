"""The steps of maintenance that concern the whole lakehouse, each as a function that decides and executes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from trinitylake_ops.errors import (
    ConflictError,
    ExportExistsError,
    LocationNotAllowedError,
    NotFoundError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import ExportRecord, ExportState
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.operations.clones.clone_records import overdue_clones
from trinitylake_ops.operations.clones.drop import plan_drop_clone
from trinitylake_ops.operations.compaction.tree import CompactionPlan, plan_compact
from trinitylake_ops.operations.exports.drop import plan_prune_exports
from trinitylake_ops.operations.exports.export import plan_export
from trinitylake_ops.operations.gc.delete import DeletionReport
from trinitylake_ops.operations.gc.expire import plan_expiration
from trinitylake_ops.operations.gc.orphans import plan_orphan_removal
from trinitylake_ops.operations.gc.purge import plan_purge
from trinitylake_ops.operations.gc.reconcile import plan_reconcile
from trinitylake_ops.operations.gc.survey import is_lapsed
from trinitylake_ops.operations.hint import HintState, inspect_hint, repair_hint
from trinitylake_ops.operations.maintenance.decisions import Approval, Decision, DecisionState, counted
from trinitylake_ops.operations.maintenance.run import MaintenanceRun, names_text, nothing
from trinitylake_ops.operations.policy.document import ExportRule, ExportTarget, Step
from trinitylake_ops.operations.policy.values import duration_text
from trinitylake_ops.operations.retention import RetentionPolicy, span_text
from trinitylake_ops.operations.status.due import newest_export_ms
from trinitylake_ops.operations.verification.verify import verify
from trinitylake_ops.versions.snapshot import utc_of

#: The tree is checked after this number of versions.
_VERSIONS_BETWEEN_TREE_CHECKS = 100
#: A tree is compacted if its leaves are emptier than this, or if its buffers have more than this share of its keys.
_MIN_FILL, _MAX_BUFFERED_SHARE = 0.6, 0.1


def check_hint(run: MaintenanceRun) -> Iterator[Decision]:
    """Repair the hint if it does not name the latest version."""
    report = inspect_hint(run.lake)
    if report.state == HintState.RIGHT:
        yield nothing(Step.REPAIR_HINT, "the hint names the latest version")
        return
    why = f"the hint is {report.state.value}, which costs readers requests"
    planned = Decision(step=Step.REPAIR_HINT, state=DecisionState.PLANNED, why=why)
    if run.is_dry_run:
        yield planned
        return
    repaired = repair_hint(run.lake)
    yield planned.done(f"it was {report.state.value}, and names version {repaired.latest} now")


def check_reconciled(run: MaintenanceRun) -> Iterator[Decision]:
    """Reconcile settings that another program replaced, if a step depends on them."""
    if run.why_nothing_expires and not run.purgeable and not run.orphans_due:
        yield nothing(Step.RECONCILE, "no step that deletes is due")
        return
    steps = run.survey().foreign_steps()
    if not steps:
        yield nothing(Step.RECONCILE, "no other program replaced the settings")
        return
    plan = plan_reconcile(run.lake)
    planned = Decision(
        step=Step.RECONCILE,
        state=DecisionState.PLANNED,
        why=f"another program replaced the settings in versions {names_text(steps)}",
    )

    def execute() -> Decision:
        report = plan.execute()
        run.forget_survey()
        return planned.done(f"exports, pins and expirations of both sides are in version {report.version}")

    yield run.apply(planned, execute, approval=Approval(job="reconcile", digest=plan.digest))


def finish_interrupted(run: MaintenanceRun) -> Iterator[Decision]:
    """Resume interrupted exports, and name interrupted clones. An interrupted purge is due in its own step."""
    definition = run.lake.snapshot().definition
    oldest_ms = run.now_ms - run.policy.targets.unfinished_after_ms
    records = [
        record
        for record in definition.exports
        if record.state == ExportState.COPYING and record.created_at_millis < oldest_ms
    ]
    for record in records:
        kind = "clone" if record.clone_id else "export"
        age = span_text(max(0, run.now_ms - record.created_at_millis))
        planned = Decision(
            step=Step.FINISH_INTERRUPTED,
            state=DecisionState.PLANNED,
            what=record.name,
            why=f"the {kind} was started {age} ago and is not finished",
        )
        if record.clone_id:
            yield replace(planned, state=DecisionState.LEFT, why=f"{planned.why}; clone again, or drop it")
        elif run.is_dry_run:
            yield planned
        else:
            yield _outcome_of(planned, partial(_resume_export, run, record, planned))
    if not records:
        yield nothing(Step.FINISH_INTERRUPTED, "no export or clone was interrupted")


def _outcome_of(planned: Decision, execute: Callable[[], Decision]) -> Decision:
    """Return the outcome of one of several executions of a step. An error of one does not end the step."""
    try:
        return execute()
    except (ConflictError, NotFoundError) as error:  # another writer changed or dropped it
        return replace(planned, state=DecisionState.LEFT, why=error.message)
    except TrinityLakeError as error:
        return replace(planned, state=DecisionState.FAILED, why=str(error))


def _resume_export(run: MaintenanceRun, record: ExportRecord, planned: Decision) -> Decision:
    """Resume an export."""
    if record.target_uri and not _is_allowed(run, record.target_uri):
        why = f"{planned.why}; allow its target, or export it again, or drop it"
        return replace(planned, state=DecisionState.LEFT, why=why)
    plan = plan_export(
        run.lake,
        record.name,
        record.level.name.lower(),
        target=record.target_uri or None,
        namespaces=record.namespaces,
        executor=run.executor(),
    )
    report = plan.execute(progress=run.progress)
    return planned.done(f"version {report.version} is exported")


def _is_allowed(run: MaintenanceRun, target: str) -> bool:
    """Whether the operator allows a target. The content of a lakehouse, such as its policy, does not allow any."""
    return run.lake.external_storages.allowed_roots.is_allowed(normalize_root_uri(target))


def prune_exports(run: MaintenanceRun) -> Iterator[Decision]:
    """Drop exports that no rule of the policy keeps. The first rule that matches an export applies."""
    rules = run.policy.retention.exports
    if not rules:
        yield nothing(Step.PRUNE_EXPORTS, "the policy has no rules for exports")
        return
    has_pruned = False
    for number, rule in enumerate(rules):
        excluded = [earlier.pattern for earlier in rules[:number]]
        if not any(_matches(record, rule, excluded) for record in run.lake.snapshot().definition.exports):
            continue
        retention = rule.retention
        policy = replace(retention, maximum_age_ms=max(retention.maximum_age_ms, run.min_age_ms))
        plan = plan_prune_exports(run.lake, rule.pattern, policy, excluded=excluded)
        if plan.is_empty:
            continue
        has_pruned = True
        planned = Decision(
            step=Step.PRUNE_EXPORTS,
            state=DecisionState.PLANNED,
            what=rule.pattern,
            why=f"no rule keeps {names_text(plan.names)}",
        )

        def execute(plan: Any = plan, planned: Decision = planned) -> Decision:
            report = plan.execute()
            run.forget_survey()
            return planned.done(f"{counted(report.changed, 'export')} dropped in version {report.version}")

        options = {"pattern": rule.pattern, **({"exclude": excluded} if excluded else {}), **_rule_options(policy)}
        approval = Approval(job="prune_exports", arguments=(rule.pattern,), options=options, digest=plan.digest)
        yield run.apply(planned, execute, approval=approval)
    if not has_pruned:
        yield nothing(Step.PRUNE_EXPORTS, "the rules keep all exports")


def _matches(record: ExportRecord, rule: ExportRule, excluded: list[str]) -> bool:
    return fnmatchcase(record.name, rule.pattern) and not any(fnmatchcase(record.name, other) for other in excluded)


def _rule_options(policy: RetentionPolicy) -> dict[str, Any]:
    """Return retention rules as the options of prune-exports."""
    options: dict[str, Any] = {"max_age": duration_text(policy.maximum_age_ms)} if policy.maximum_age_ms else {}
    numbers = {
        "min_versions": policy.minimum_versions,
        "keep_last": policy.keep_last,
        "keep_hourly": policy.keep_hourly,
        "keep_daily": policy.keep_daily,
        "keep_weekly": policy.keep_weekly,
        "keep_monthly": policy.keep_monthly,
    }
    return options | {name: number for name, number in numbers.items() if number}


def compact_tree(run: MaintenanceRun) -> Iterator[Decision]:
    """Compact the tree if its leaves are thin, or its buffers full."""
    base = run.lake.snapshot()
    checked = run.state.tree_checked_version
    if checked is not None and base.version - checked < _VERSIONS_BETWEEN_TREE_CHECKS:
        yield nothing(Step.COMPACT, f"the tree was checked at version {checked}")
        return
    with run.planning():
        plan = plan_compact(run.lake)
    if not run.is_dry_run:
        run.state.tree_checked_version = base.version
    if plan.is_empty:
        yield nothing(Step.COMPACT, "all nodes are full, and all buffers empty")
        return
    if not _is_worth(plan):
        yield nothing(Step.COMPACT, f"leaves are {plan.before.leaf_fill:.0%} full, and buffers are small")
        return
    before = plan.before
    planned = Decision(
        step=Step.COMPACT,
        state=DecisionState.PLANNED,
        why=f"leaves are {before.leaf_fill:.0%} full, with {before.messages:,} messages in buffers",
    )

    def execute() -> Decision:
        report = plan.execute()
        return planned.done(
            f"leaves are {report.after.leaf_fill:.0%} full in version {report.version}, with"
            f" {report.after.messages:,} messages in buffers"
        )

    yield run.apply(planned, execute, approval=Approval(job="compact", digest=plan.digest))


def _is_worth(plan: CompactionPlan) -> bool:
    n_keys = sum(level.keys for level in plan.before.levels)
    return plan.before.leaf_fill < _MIN_FILL or plan.before.messages > _MAX_BUFFERED_SHARE * n_keys


def expire(run: MaintenanceRun) -> Iterator[Decision]:
    """Expire versions that no rule keeps."""
    if run.why_nothing_expires:
        yield nothing(Step.EXPIRE, run.why_nothing_expires)
        return
    lapsed = [record.name for record in run.latest.definition.exports if is_lapsed(record, run.now_ms)]
    if not run.expiring() and not lapsed:
        yield nothing(Step.EXPIRE, run.why_none_is_expiring())
        return
    definition = run.lake.snapshot().definition
    with run.planning() as progress:
        plan = plan_expiration(run.lake, run.retention(definition), progress=progress, executor=run.executor())
    if plan.is_empty:
        yield nothing(Step.EXPIRE, "the rules keep all versions")
        return
    what = f"versions {plan.versions}" if plan.versions else ""
    exports = f"exports {names_text(plan.exports)}" if plan.exports else ""
    planned = Decision(
        step=Step.EXPIRE,
        state=DecisionState.PLANNED,
        what=plan.versions,
        why=f"no rule keeps {' and '.join(filter(None, (what, exports)))}",
        files=sum(plan.files.values()),
        bytes=plan.bytes,
    )

    def execute() -> Decision:
        report = plan.execute(progress=run.progress)
        run.forget_survey()
        if report.version is None:
            return nothing(Step.EXPIRE, "the rules keep all versions now")
        until = utc_of(run.lake.storage.now_ms() + run.grace_ms(definition))
        why = f"expired in version {report.version}; undelete restores them until {until:%Y-%m-%d %H:%M} UTC"
        return replace(planned.done(why, files=report.files, size_bytes=report.bytes), what=report.versions)

    approval = Approval(job="expire", options=run.max_age_option(), digest=plan.digest)
    yield run.apply(planned, execute, approval=approval)


def purge(run: MaintenanceRun) -> Iterator[Decision]:
    """Delete the files of versions that expired long enough ago."""
    versions = run.purgeable
    if not versions:
        waiting = [batch.versions for batch in run.latest.definition.expirations if batch.state.name == "EXPIRED"]
        why = f"versions {names_text(waiting)} did not expire long enough ago" if waiting else "no version is expired"
        yield nothing(Step.PURGE, why)
        return
    grace_ms = run.min_age_ms
    plan = plan_purge(run.lake, grace_ms, budget=run.spending, progress=run.progress, executor=run.executor())
    if plan.is_empty:
        yield nothing(Step.PURGE, "no version is purgeable now")
        return
    planned = Decision(
        step=Step.PURGE,
        state=DecisionState.PLANNED,
        what=plan.versions,
        why=f"versions {plan.versions} expired long enough ago",
        files=plan.files,
        bytes=plan.bytes,
    )

    def execute() -> Decision:
        report = plan.execute(budget=run.spending, progress=run.progress)
        run.forget_survey()
        return _deletion_outcome(planned, report)

    approval = Approval(job="purge", options=_named_age("grace", grace_ms), digest=plan.digest)
    yield run.apply(planned, execute, approval=approval, allowance=run.deleted)


def _named_age(name: str, age_ms: int) -> dict[str, Any]:
    return {name: duration_text(age_ms)} if age_ms else {}


def _deletion_outcome(planned: Decision, report: DeletionReport) -> Decision:
    """Return the outcome of a deletion."""
    kept = f"; {counted(report.still_needed, 'file')} of the plan became needed" if report.still_needed else ""
    done = planned.done(f"{planned.why}{kept}", files=report.files, size_bytes=report.bytes)
    if report.failures:
        path, reason = next(iter(sorted(report.failures.items())))
        why = f"{counted(len(report.failures), 'file')} not deleted, for example {path}: {reason}"
        return replace(done, state=DecisionState.FAILED, why=why)
    return done if report.stopped is None else replace(done, state=DecisionState.PARTLY, why=report.stopped)


def remove_orphans(run: MaintenanceRun) -> Iterator[Decision]:
    """Delete the files that failed commits and aborted writes left."""
    if not run.orphans_due:
        checked_ms = run.state.orphans_checked_ms
        why = run.due["orphans"].why
        if checked_ms is not None and run.due["orphans"].state.value != "fine":
            why = f"orphans were checked {span_text(max(0, run.now_ms - checked_ms))} ago"
        yield nothing(Step.ORPHANS, why)
        return
    age_ms = run.min_age_ms
    plan = plan_orphan_removal(run.lake, age_ms, budget=run.spending, progress=run.progress, executor=run.executor())
    if plan.is_empty:
        if not run.is_dry_run:
            run.state.orphans_checked_ms = run.now_ms
        yield nothing(Step.ORPHANS, "there are no orphans")
        return
    planned = Decision(
        step=Step.ORPHANS,
        state=DecisionState.PLANNED,
        why=f"no version needs these files, which are at least {span_text(plan.older_than_ms)} old",
        files=len(plan.paths),
        bytes=plan.bytes,
    )

    def execute() -> Decision:
        outcome = _deletion_outcome(planned, plan.execute(budget=run.spending, progress=run.progress))
        if outcome.state == DecisionState.DONE:
            run.state.orphans_checked_ms = run.now_ms
        return outcome

    approval = Approval(job="orphans", options=_named_age("older_than", age_ms), digest=plan.digest)
    yield run.apply(planned, execute, approval=approval, allowance=run.deleted)


def drop_overdue_clones(run: MaintenanceRun) -> Iterator[Decision]:
    """Drop clones whose retention is over, with their files."""
    names = overdue_clones(run.lake)
    for name in names:
        planned = Decision(
            step=Step.DROP_OVERDUE_CLONES,
            state=DecisionState.PLANNED,
            what=name,
            why="the retention of the clone is over",
        )
        yield _outcome_of(planned, partial(_drop_clone, run, planned))
    if not names:
        yield nothing(Step.DROP_OVERDUE_CLONES, "no clone is overdue")


def _drop_clone(run: MaintenanceRun, clone: Decision) -> Decision:
    plan = plan_drop_clone(run.lake, clone.what, delete_files=True)
    planned = replace(clone, files=plan.files, bytes=plan.bytes)

    def execute() -> Decision:
        report = plan.execute(progress=run.progress)
        run.forget_survey()
        return _deletion_outcome(planned, report)

    options = {"name": clone.what, "delete_files": True}
    approval = Approval(job="drop_clone", arguments=(clone.what,), options=options, digest=plan.digest)
    return run.apply(planned, execute, approval=approval, allowance=run.deleted)


def verify_new_files(run: MaintenanceRun) -> Iterator[Decision]:
    """Verify files that are new since the last verification, and that all others still exist."""
    due = run.due["verify"]
    if due.state.value != "due" and not run.state.is_verify_unfinished:
        yield nothing(Step.VERIFY, due.why)
        return
    why = "the last verification did not finish" if run.state.is_verify_unfinished else due.why
    planned = Decision(step=Step.VERIFY, state=DecisionState.PLANNED, why=why)
    if run.is_dry_run:
        yield planned
        return
    report = verify(
        run.lake, lambda done, total: run.progress("versions", done, total), incremental=True, budget=run.spending
    )
    run.state.is_verify_unfinished = report.stopped is not None
    errors = [finding for finding in report.findings if finding.severity == "error"]
    if errors:
        why = f"{counted(len(errors), 'error')}, the first: {errors[0].message}; run: trinitylake verify"
        yield replace(planned, state=DecisionState.FAILED, why=why)
    elif report.stopped is not None:
        yield replace(planned, state=DecisionState.PARTLY, why=f"no errors so far; {report.stopped}")
    else:
        warnings = f", with {counted(len(report.findings), 'warning')}" if report.findings else ""
        files = counted(report.table_files, "table file")
        yield planned.done(f"{counted(report.versions, 'version')} and {files} are intact{warnings}")


def export(run: MaintenanceRun) -> Iterator[Decision]:
    """Export the latest version, if the newest export is too old."""
    target = run.policy.targets.export
    if target is None:
        yield nothing(Step.EXPORT, "the policy has no export")
        return
    newest_ms = newest_export_ms(run.lake.snapshot().definition, target)
    if newest_ms is not None and run.now_ms - newest_ms <= target.every_ms:
        yield nothing(Step.EXPORT, f"the last was {span_text(max(0, run.now_ms - newest_ms))} ago")
        return
    if target.target is not None and not _is_allowed(run, target.target):
        raise LocationNotAllowedError(
            f"the policy exports to {target.target}, which is not an allowed root; if you trust all writers of this"
            " lakehouse with it, allow it by --allow-root, TRINITYLAKE_ALLOWED_ROOTS or the storage option"
            " 'allowed_roots'"
        )
    name = export_name(target, run.now_ms)
    why = "there is none so far" if newest_ms is None else f"the last was {span_text(run.now_ms - newest_ms)} ago"
    planned = Decision(step=Step.EXPORT, state=DecisionState.PLANNED, what=name, why=why)
    if run.is_dry_run:
        yield planned
        return
    try:
        with run.planning():
            plan = plan_export(
                run.lake,
                name,
                target.level,
                target=target.target,
                retain_for=target.retain_for_ms,
                executor=run.executor(),
            )
        report = plan.execute(progress=run.progress)
    except ExportExistsError:  # made by another run meanwhile
        yield nothing(Step.EXPORT, f"export {name} exists")
        return
    yield planned.done(f"version {report.version} is exported; {counted(report.copied_files, 'file')} copied")


def export_name(target: ExportTarget, now_ms: int) -> str:
    """Return the name of the export that is due at a time. Runs at the same time use the same name.

    Args:
        target: The export of the policy.
        now_ms: The storage's time, in milliseconds since the epoch.
    """
    begun_ms = now_ms - now_ms % target.every_ms
    return f"maintenance-{utc_of(begun_ms):%Y%m%dT%H%M%S}"
