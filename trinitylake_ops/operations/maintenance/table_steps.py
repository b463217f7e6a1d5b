"""The steps of maintenance that concern single tables: trim and compaction.

Each is a pass over the tables in the order of their names, after the tables that earlier runs left. A pass that a limit
ends continues in the next run, so every table has its turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_random_exponential

from trinitylake_ops.errors import (
    CommitConflictError,
    CommitOutcomeUnknownError,
    ConflictError,
    ContentChangedError,
    InvalidDefinitionError,
    NotFoundError,
    TableNotFoundError,
)
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.iceberg.write.compact import FileGroup, RewriteRules
from trinitylake_ops.operations.compaction.tables import CompactTables, CompactTablesPlan, TableCompaction
from trinitylake_ops.operations.gc.tables import tables_of
from trinitylake_ops.operations.gc.trim import Trim, TrimPlan
from trinitylake_ops.operations.gc.trim_candidates import RetainedDefinitions
from trinitylake_ops.operations.maintenance.decisions import Approval, Decision, DecisionState, counted
from trinitylake_ops.operations.maintenance.run import Allowance, MaintenanceRun, left_by, names_text, nothing
from trinitylake_ops.operations.maintenance.state_file import TablePass
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage import process_clock
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.snapshot import Snapshot

#: Decisions about single tables in a report; the others are summarized.
_MAX_DECISIONS = 1_000
_MAX_ATTEMPTS = 3
_PAUSE = wait_random_exponential(multiplier=0.2, max=3.0)
#: Errors that concern one table. The other tables are compacted.
_ERRORS_OF_ONE_TABLE = (InvalidDefinitionError, ContentChangedError, *DAMAGE)


def _all_tables(base: Snapshot) -> list[str]:
    return [str(name) for name, _ in tables_of(base)]


def _changed_since(run: MaintenanceRun, base: Snapshot, version: int | None) -> list[str] | None:
    """Return the tables that changed since a version, in order; None if that version cannot be read."""
    if version is None or version > base.version:
        return None
    try:
        before = run.lake.snapshot(version, latest=base)
    except NotFoundError:
        return None
    changes = diff_trees(run.lake.files.nodes, before.root, base.root)
    names = (base.keys.decode(change.key) for change in changes if change.after is not None)
    return sorted(str(name) for name in names if name is not None and name.table is not None)


def _batches(run: MaintenanceRun, names: Sequence[str]) -> Iterator[list[str]]:
    """Yield tables in batches that are planned together."""
    begin = 0
    while begin < len(names):
        end = begin + run.tables_at_once()
        yield list(names[begin:end])
        begin = end


def _advance(tables: TablePass, batch: Sequence[str], remembered: Collection[str]) -> None:
    """Record that a batch was handled. Tables that earlier runs remembered do not move the position of the pass."""
    ordered = [name for name in batch if name not in remembered]
    if ordered:
        tables.advance(ordered[-1])


class _Decisions:
    """The decisions of a step about its tables, of which only so many are reported one by one."""

    def __init__(self, step: Step):
        self._step = step
        self._n_reported = 0
        self._omitted: dict[DecisionState, list[Decision]] = {}

    def of(self, decision: Decision) -> Iterator[Decision]:
        if self._n_reported < _MAX_DECISIONS:
            self._n_reported += 1
            yield decision
        else:
            self._omitted.setdefault(decision.state, []).append(decision)

    def omitted(self) -> Iterator[Decision]:
        """Yield one decision for each state of the omitted ones."""
        for state, decisions in self._omitted.items():
            yield Decision(
                step=self._step,
                state=state,
                why=f"{len(decisions):,} more tables",
                files=sum(decision.files for decision in decisions),
                bytes=sum(decision.bytes for decision in decisions),
            )


# Trim


def trim(run: MaintenanceRun) -> Iterator[Decision]:
    """Drop Iceberg snapshots that no kept version needs, if versions expire."""
    tables = run.state.trim
    why_not = run.why_nothing_expires or ("" if run.expiring() else run.why_none_is_expiring())
    if why_not and not tables.is_pending:
        yield nothing(Step.TRIM, f"{why_not}, so versions need all snapshots")
        return
    base = run.lake.snapshot()
    has_only_remembered = bool(why_not) and tables.begun_version is None
    names, remembered = tables.ordered([] if has_only_remembered else _all_tables(base)), tables.remembered
    tables.begin(base.version)
    policy = run.retention(base.definition)
    retained = RetainedDefinitions(policy)
    decisions = _Decisions(Step.TRIM)
    n_trimmed = 0
    for batch in _batches(run, names):
        if (spent := run.spending.exhausted()) is not None:
            yield Decision(step=Step.TRIM, state=DecisionState.LEFT, why=f"{spent}; tables from {batch[0]} on remain")
            run.save_state()
            return
        operation = Trim(lake=run.lake, policy=policy, only=tuple(batch), skips_unsuitable=True, retained=retained)
        with run.planning():
            plan = _plan_trim(operation, batch)
        if not plan.is_empty:
            outcome = _trim_tables(run, plan)
            n_trimmed += len(plan.tables)
            for decision in outcome:
                yield from decisions.of(decision)
        for name in {*batch} - {table.name for table in plan.tables}:
            tables.settle(name)
        _advance(tables, batch, remembered)
        run.save_state()
    yield from decisions.omitted()
    tables.finish()
    if not n_trimmed:
        yield nothing(Step.TRIM, f"kept versions need all snapshots of {counted(len(names), 'table')}")


def _plan_trim(operation: Trim, batch: list[str]) -> TrimPlan:
    """Plan a trim of tables, without those that were dropped meanwhile."""
    try:
        return operation.plan()
    except TableNotFoundError:
        existing = {str(name) for name, _ in tables_of(operation.lake.snapshot())}
        return replace(operation, only=tuple(name for name in batch if name in existing)).plan()


def _trim_tables(run: MaintenanceRun, plan: TrimPlan) -> list[Decision]:
    """Trim the tables of a plan, and return a decision about those that were trimmed, and about each other one."""
    tables = run.state.trim
    names = [table.name for table in plan.tables]
    planned = Decision(
        step=Step.TRIM,
        state=DecisionState.PLANNED,
        what=names_text(names),
        why=f"no kept version needs {counted(plan.snapshots_dropped, 'snapshot')} of {counted(len(names), 'table')}",
    )
    left: list[Decision] = []

    def execute() -> Decision:
        try:
            report = plan.execute()
        except CommitConflictError as error:
            return left_by(Step.TRIM, error, names_text(names))
        for name in report.tables:
            tables.settle(name)
        for name in report.left:
            tables.leave_unfinished(name, run.now_ms)
            why = "other writers changed it during each attempt"
            left.append(Decision(step=Step.TRIM, state=DecisionState.LEFT, what=name, why=why))
        done = planned.done(
            f"dropped {counted(report.snapshots_dropped, 'snapshot')} of {counted(len(report.tables), 'table')} in"
            f" version {report.version}"
        )
        return replace(done, what=names_text(report.tables))

    options = {"tables": names, **run.max_age_option()}
    approval = Approval(job="trim", arguments=tuple(names), options=options, digest=plan.digest)
    decision = run.apply(planned, execute, approval=approval)
    if decision.state in (DecisionState.WAITS, DecisionState.LEFT):
        for name in names:
            tables.leave_unfinished(name, run.now_ms)
    return [decision, *left]


# Compaction


def compact_tables(run: MaintenanceRun) -> Iterator[Decision]:
    """Merge small data files, and rewrite data files with deleted rows."""
    tables = run.state.compaction
    base = run.lake.snapshot()
    changed = _changed_since(run, base, tables.checked_version)
    names, remembered = tables.ordered(_all_tables(base) if changed is None else changed), tables.remembered
    tables.begin(base.version)
    if not names:
        tables.finish()
        yield nothing(Step.COMPACT_TABLES, "no table changed since the last check")
        return
    decisions = _Decisions(Step.COMPACT_TABLES)
    n_due = 0
    for batch in _batches(run, names):
        if (spent := run.spending.exhausted()) is not None:
            why = f"{spent}; tables from {batch[0]} on remain"
            yield Decision(step=Step.COMPACT_TABLES, state=DecisionState.LEFT, why=why)
            run.save_state()
            return
        with run.planning():
            plan = _plan_compaction(run, batch)
        due = [table for table in plan.tables if _is_due(run, table)]
        n_due += len(due)
        for decision in _compact_batch(run, plan, due):
            yield from decisions.of(decision)
        for name in {*batch} - {table.name for table in due}:
            tables.settle(name)
        _advance(tables, batch, remembered)
        run.save_state()
    yield from decisions.omitted()
    tables.finish()
    if not n_due:
        checked = counted(len(names), "table")
        yield nothing(Step.COMPACT_TABLES, f"the data files of {checked} that changed or were left are in shape")


def _plan_compaction(run: MaintenanceRun, batch: list[str]) -> CompactTablesPlan:
    targets = run.policy.targets
    rules = RewriteRules(min_input_files=targets.small_files)
    if targets.file_size_bytes is not None:
        rules = replace(rules, default_file_size_bytes=targets.file_size_bytes)
    operation = CompactTables(lake=run.lake, rules=rules, only=tuple(batch), skips_unsuitable=True)
    try:
        return operation.plan()
    except TableNotFoundError:
        existing = {str(name) for name, _ in tables_of(run.lake.snapshot())}
        return replace(operation, only=tuple(name for name in batch if name in existing)).plan()


def _is_due(run: MaintenanceRun, table: TableCompaction) -> bool:
    """Whether a table has groups of small files, or enough delete files."""
    deletes = {file.file_path for group in table.file_groups for files in group.deletes.values() for file in files}
    has_small = any(not group.deletes for group in table.file_groups)
    return has_small or len(deletes) >= run.policy.targets.delete_files


def _compact_batch(run: MaintenanceRun, plan: CompactTablesPlan, due: Sequence[TableCompaction]) -> Iterator[Decision]:
    """Compact tables one by one, because each has its own files and conflicts."""
    if due and Step.COMPACT_TABLES in run.policy.approval:
        for table in due:
            run.state.compaction.leave_unfinished(table.name, run.now_ms)
        yield _waiting_decision(run, plan, due, "the policy requires an approval")
        return
    for table in due:
        part = within(table, run.rewritten)
        if part is None:
            too_large = all(run.rewritten.exceeds_limit(len(group.files), group.bytes) for group in table.file_groups)
            if too_large:
                run.state.compaction.leave_unfinished(table.name, run.now_ms)
                yield _waiting_decision(run, plan, [table], f"more than the limit of {run.rewritten} of a run")
                continue
            run.state.compaction.wait(table.name, run.now_ms)
            why = f"{_reason(table)}; more than what is left of the limit of {run.rewritten} of this run"
            yield replace(_planned_decision(table), state=DecisionState.LEFT, why=why)
            continue
        yield from _compact_table(run, plan, part, is_whole=part.files == table.files)


def _waiting_decision(
    run: MaintenanceRun, plan: CompactTablesPlan, due: Sequence[TableCompaction], why: str
) -> Decision:
    names = [table.name for table in due]
    options = {"tables": names, "min_input_files": run.policy.targets.small_files}
    return Decision(
        step=Step.COMPACT_TABLES,
        state=DecisionState.WAITS,
        what=names_text(names),
        why=f"{_reason(due[0]) if len(due) == 1 else f'{len(due):,} tables have small files'}; {why}",
        files=sum(table.files for table in due),
        bytes=sum(table.bytes for table in due),
        approval=Approval(
            job="compact_tables",
            arguments=tuple(names),
            options=options,
            digest=replace(plan, tables=tuple(due)).digest,
        ),
    )


def _reason(table: TableCompaction) -> str:
    return f"{table.files:,} of {table.data_files:,} data files are small or have deleted rows"


def _planned_decision(table: TableCompaction) -> Decision:
    return Decision(
        step=Step.COMPACT_TABLES,
        state=DecisionState.PLANNED,
        what=table.name,
        why=_reason(table),
        files=table.files,
        bytes=table.bytes,
    )


def within(table: TableCompaction, allowance: Allowance) -> TableCompaction | None:
    """Return a compaction of as many file groups as fit into an allowance; None if none does.

    Args:
        table: The compaction.
        allowance: The files and bytes that the run may rewrite.
    """
    groups: list[FileGroup] = []
    files = size_bytes = 0
    for group in table.file_groups:
        if allowance.fits(files + len(group.files), size_bytes + group.bytes):
            groups.append(group)
            files += len(group.files)
            size_bytes += group.bytes
    if not groups:
        return None
    if len(groups) == len(table.file_groups):
        return table
    return replace(
        table,
        files=files,
        groups=len(groups),
        partitions=len({group.partition for group in groups}),
        rows=sum(group.rows for group in groups),
        bytes=size_bytes,
        file_groups=tuple(groups),
    )


def _compact_table(
    run: MaintenanceRun, plan: CompactTablesPlan, table: TableCompaction, *, is_whole: bool
) -> Iterator[Decision]:
    """Compact one table, and plan it again if another writer changed its files meanwhile."""
    tables, planned = run.state.compaction, _planned_decision(table)
    if run.is_dry_run:
        run.rewritten.spend(planned.files, planned.bytes)
        yield planned
        return
    if (spent := run.spending.exhausted()) is not None:
        tables.wait(table.name, run.now_ms)
        yield replace(planned, state=DecisionState.LEFT, why=f"{planned.why}; {spent}")
        return
    try:
        decision = _commit_compaction(run, plan, table)
    except CommitOutcomeUnknownError:
        raise
    except ConflictError as error:
        tables.leave_unfinished(table.name, run.now_ms)
        yield replace(planned, state=DecisionState.LEFT, why=error.message)
        return
    except _ERRORS_OF_ONE_TABLE as error:
        tables.settle(table.name)
        yield replace(planned, state=DecisionState.FAILED, why=str(error))
        return
    run.rewritten.spend(decision.files, decision.bytes)
    if is_whole:
        tables.settle(table.name)
    else:
        tables.leave_unfinished(table.name, run.now_ms)
        decision = replace(decision, state=DecisionState.PARTLY, why=f"{decision.why}; the rest exceeds the limit")
    yield decision


def _commit_compaction(run: MaintenanceRun, plan: CompactTablesPlan, table: TableCompaction) -> Decision:
    """Compact a table by its plan, or by a new plan after a conflict. Raises ConflictError after too many conflicts."""
    current: CompactTablesPlan | None = replace(plan, tables=(table,), left={}, older_spec_files={})

    def attempt() -> Decision:
        nonlocal current
        if current is None:
            again = _plan_compaction(run, [table.name])
            parts = [part for one in again.tables if (part := within(one, run.rewritten)) is not None]
            current = replace(again, tables=tuple(parts), left={}, older_spec_files={})
        if current.is_empty:
            return nothing(Step.COMPACT_TABLES, f"the data files of {table.name} are in shape now")
        now, current = current, None
        report = now.execute(run.group_writer())
        (compacted,) = report.tables
        return Decision(
            step=Step.COMPACT_TABLES,
            state=DecisionState.DONE,
            what=table.name,
            why=f"{compacted.files_before:,} files became {compacted.files_after:,} in version {report.version}",
            files=compacted.files_before,
            bytes=compacted.bytes_before,
        )

    repeat_attempts = Retrying(
        stop=stop_after_attempt(_MAX_ATTEMPTS),
        wait=_PAUSE,
        sleep=process_clock.sleep,
        retry=retry_if_exception_type(CommitConflictError),
        reraise=True,
    )
    return repeat_attempts(attempt)
