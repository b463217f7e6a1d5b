"""Run all due operations of a lakehouse, in order, within the limits of its policy."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from itertools import groupby

from trinitylake_ops.errors import ConflictError, LakehouseNotFoundError, NotFoundError, TrinityLakeError
from trinitylake_ops.operations.base import MeteredLakehouse, operation_span
from trinitylake_ops.operations.budget import Budget, BudgetSpentBeforeError, BudgetSpentError, Spending
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.maintenance import lakehouse_steps, table_steps
from trinitylake_ops.operations.maintenance.decisions import (
    UNFINISHED,
    Decision,
    DecisionState,
    MaintenanceReport,
)
from trinitylake_ops.operations.maintenance.run import MaintenanceRun, WriterFactory, in_this_process, left_by
from trinitylake_ops.operations.maintenance.state_file import MaintenanceState
from trinitylake_ops.operations.policy.document import MaintenancePolicy, Step
from trinitylake_ops.operations.policy.stored import policy_of
from trinitylake_ops.storage import background
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import utc_of

logger = logging.getLogger(__name__)

_MS_PER_SECOND = 1_000

#: The function of each step.
_STEPS: Mapping[Step, Callable[[MaintenanceRun], Iterator[Decision]]] = {
    Step.REPAIR_HINT: lakehouse_steps.check_hint,
    Step.RECONCILE: lakehouse_steps.check_reconciled,
    Step.FINISH_INTERRUPTED: lakehouse_steps.finish_interrupted,
    Step.PRUNE_EXPORTS: lakehouse_steps.prune_exports,
    Step.TRIM: table_steps.trim,
    Step.COMPACT_TABLES: table_steps.compact_tables,
    Step.COMPACT: lakehouse_steps.compact_tree,
    Step.EXPIRE: lakehouse_steps.expire,
    Step.PURGE: lakehouse_steps.purge,
    Step.ORPHANS: lakehouse_steps.remove_orphans,
    Step.DROP_OVERDUE_CLONES: lakehouse_steps.drop_overdue_clones,
    Step.VERIFY: lakehouse_steps.verify_new_files,
    Step.EXPORT: lakehouse_steps.export,
}
#: The steps that always come first, because the others depend on them. They are cheap.
_FIRST = (Step.REPAIR_HINT, Step.RECONCILE, Step.FINISH_INTERRUPTED, Step.PRUNE_EXPORTS)


def maintain(
    lake: Lakehouse,
    *,
    dry_run: bool = False,
    executor: Callable[[], Executor] = lambda: LOCAL,
    writer: WriterFactory = in_this_process,
    progress: Progress = no_progress,
) -> MaintenanceReport:
    """Run all due operations, in order, within the limits of the lakehouse's policy.

    Each step plans on the latest version right before it executes. A step, or a table, that meets a limit or another
    writer is left for the next run, which begins with it, and the others continue. What the policy does not allow
    without approval is reported with the command that approves it. A run that is interrupted at any point can be
    repeated, and two runs at once do no harm.

    Args:
        lake: The lakehouse.
        dry_run: Whether to report the decisions only, without writing.
        executor: Returns the executor that reads and deletes files.
        writer: Returns a context manager that provides the writer of data files.
        progress: Called with the counted thing, the number done, and the total.

    Raises:
        LakehouseNotFoundError: There is no lakehouse at the root.
        UnreadablePolicyError: The policy is damaged, or was written by a newer release.
        StorageError: The latest version cannot be read.
    """
    with operation_span("maintain"):
        background.drain()  # pending hints of commits of this process
        policy = policy_of(lake.snapshot().definition)
        spending = Spending(_budget(policy))
        metered = MeteredLakehouse(lake, spending, keeps_cache=True)
        base = metered.lake.snapshot()
        now_ms = lake.storage.now_ms()
        closed = policy.closed(utc_of(now_ms))
        run = MaintenanceRun(
            lake=metered.lake,
            policy=policy,
            state=MaintenanceState() if closed is not None else MaintenanceState.read(metered.lake.storage),
            spending=spending,
            is_dry_run=dry_run,
            now_ms=now_ms,
            executor=executor,
            writer=writer,
            progress=progress,
        )
        try:
            decisions = [] if closed is not None else _decisions(run)
        finally:
            run.close()
        return MaintenanceReport(
            root=lake.root,
            base_version=base.version,
            version=metered.lake.latest_version(),
            begun_at=utc_of(now_ms),
            is_dry_run=dry_run,
            has_default_policy=not base.definition.maintenance_policy,
            closed=closed,
            decisions=tuple(decisions),
            deleted_files=run.deleted.files,
            deleted_bytes=run.deleted.bytes,
            rewritten_files=run.rewritten.files,
            rewritten_bytes=run.rewritten.bytes,
            cost=metered.cost(),
        )


def _budget(policy: MaintenancePolicy) -> Budget:
    limits = policy.limits
    max_seconds = None if limits.max_duration_ms is None else limits.max_duration_ms / _MS_PER_SECOND
    return Budget(max_requests=limits.max_requests, max_seconds=max_seconds)


def _decisions(run: MaintenanceRun) -> list[Decision]:
    """Run the steps, and return their decisions."""
    decisions: list[Decision] = []
    waiting: dict[Step, MaintenanceState] = {}
    for step in (*_FIRST, *run.state.ordered(step for step in _STEPS if step not in _FIRST)):
        before = deepcopy(run.state)
        of_step = _decisions_of(run, step)
        if any(decision.state == DecisionState.WAITS for decision in of_step):
            waiting[step] = before
        for decision in of_step:
            logger.info("%s %s: %s: %s", decision.step, decision.what, decision.state, decision.why)
        decisions += of_step
    run.state.end_turns()
    run.save_state()
    return _with_current_plans(run, decisions, waiting)


def _decisions_of(run: MaintenanceRun, step: Step) -> list[Decision]:
    """Run a step if the policy and the limits allow it, and record its turn."""
    if step in run.policy.skip:
        return [Decision(step=step, state=DecisionState.SKIPPED, why="the policy leaves it out")]
    if (spent := run.spending.exhausted()) is not None:
        run.state.unfinished.add(step.value)
        return [Decision(step=step, state=DecisionState.LEFT, why=spent)]
    run.state.turns_ms[step.value] = run.now_ms
    run.state.unfinished.discard(step.value)
    of_step = list(_run_step(run, step))
    if any(decision.state in UNFINISHED for decision in of_step):
        run.state.unfinished.add(step.value)
    return of_step


def _with_current_plans(
    run: MaintenanceRun, decisions: list[Decision], waiting: Mapping[Step, MaintenanceState]
) -> list[Decision]:
    """Plan again what waits, if the run itself has committed since, so that the plans can be approved.

    Args:
        run: The run.
        decisions: Its decisions.
        waiting: The steps with plans that wait, with the state before each.
    """
    if run.is_dry_run or not waiting or run.lake.latest_version() == run.latest.version:
        return decisions
    current: list[Decision] = []
    for step, of_step in groupby(decisions, key=lambda decision: decision.step):
        kept = list(of_step)
        if step in waiting and run.spending.exhausted() is None:
            again = replace(run, is_dry_run=True, state=deepcopy(waiting[step]))
            plans = [one for one in _run_step(again, step) if one.state == DecisionState.WAITS]
            kept = [one for one in kept if one.state != DecisionState.WAITS] + plans
        current += kept
    return current


def _run_step(run: MaintenanceRun, step: Step) -> Iterator[Decision]:
    """Run a step. An error ends the step, and the others continue."""
    try:
        yield from _STEPS[step](run)
    except (BudgetSpentBeforeError, BudgetSpentError) as spent:
        why = f"{run.spending.exhausted() or spent.message}, before the step was planned"
        yield Decision(step=step, state=DecisionState.LEFT, why=why)
    except LakehouseNotFoundError:
        raise
    except (ConflictError, NotFoundError) as error:  # another writer changed or dropped it
        yield left_by(step, error)
    except TrinityLakeError as error:
        yield Decision(step=step, state=DecisionState.FAILED, why=str(error))
