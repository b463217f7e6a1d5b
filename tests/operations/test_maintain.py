"""Maintenance: what is due is done in order, within every limit, and explained; what is not allowed waits."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from click import Context

from tests.foreign import ForeignLake
from tests.lakes import Lakes, listed
from tests.operations.aging import DAY_MS, HOUR_MS, Aging
from tests.operations.changes import append_rows, create
from tests.operations.neglected import decision_of, neglect, new_lake, states, with_policy
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli.app import trinitylake
from trinitylake_ops.declarations.registry import BY_NAME
from trinitylake_ops.errors import LakehouseNotFoundError, StorageError, UnreadablePolicyError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    MAINTENANCE_STATE_PATH,
    TABLES_PREFIX,
    VERIFIED_PREFIX,
    new_manifest_path,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import maintain
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.operations.maintenance.decisions import DecisionState
from trinitylake_ops.operations.policy.document import Step
from trinitylake_ops.storage import FileInfo, MemoryStorage, StorageWrapper, drop_memory_root

DONE, NOTHING, PLANNED, WAITS, LEFT, PARTLY, FAILED, SKIPPED = (
    DecisionState.DONE,
    DecisionState.NOTHING,
    DecisionState.PLANNED,
    DecisionState.WAITS,
    DecisionState.LEFT,
    DecisionState.PARTLY,
    DecisionState.FAILED,
    DecisionState.SKIPPED,
)
#: The steps that are due in a neglected lakehouse. The others depend on them, or on another program.
DUE = {
    Step.REPAIR_HINT,
    Step.FINISH_INTERRUPTED,
    Step.PRUNE_EXPORTS,
    Step.TRIM,
    Step.COMPACT_TABLES,
    Step.EXPIRE,
    Step.PURGE,
    Step.ORPHANS,
    Step.DROP_OVERDUE_CLONES,
    Step.VERIFY,
}


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse with the policy of the tests and a namespace."""
    aging_lake = new_lake(lakes.storage())
    lakes.watch(aging_lake.lake)
    create(aging_lake.lake, "ns")
    return aging_lake


@pytest.fixture
def clone_root() -> Iterator[str]:
    root = f"memory://maintained-clone-{uuid.uuid4().hex}/"
    yield root
    drop_memory_root(root)


def rows_of(lake: Lakehouse) -> dict[str, list[int]]:
    """Return the rows of every table with files."""
    latest = lake.snapshot()
    names = [f"ns.{name}" for name in latest.tables("ns")]
    return {name: sorted(catalog_at(lake).load_table(name).scan().to_arrow()["id"].to_pylist()) for name in names}


def files_of(lake: Lakehouse) -> dict[str, bytes]:
    return {path: lake.storage.read(path) for path in listed(lake.storage)}


def test_new_lakehouse_needs_nothing(aging: Aging) -> None:
    before = listed(aging.lake.storage)
    version = aging.lake.latest_version()
    report = maintain(aging.lake)
    export = states(report).pop(Step.EXPORT)
    assert export == {DONE}, "the policy wants an export, and there is none"
    with_policy(aging.lake, targets={"export": None})
    report = maintain(aging.lake)
    assert {state for step in states(report).values() for state in step} == {NOTHING}
    assert [decision.step for decision in report.decisions] == list(Step), "each step says why"
    assert all(decision.why for decision in report.decisions)
    assert report.headline == f"Maintenance of version {report.base_version}: nothing to do"
    assert (report.is_complete, report.waiting, report.left) == (True, (), ())
    assert report.version == report.base_version == version + 3
    assert {path for path in listed(aging.lake.storage) - before if path.startswith("_ops/")} >= {
        MAINTENANCE_STATE_PATH
    }


def test_everything_that_is_due_is_done_once(aging: Aging, clone_root: str) -> None:
    neglect(aging, clone_root)
    rows = rows_of(aging.lake)
    report = maintain(aging.lake)
    done = {step for step, of_step in states(report).items() if of_step == {DONE}}
    assert done >= DUE, str(report)
    assert report.is_complete and not report.left and not report.waiting
    assert [decision.step for decision in report.decisions] == sorted(
        (decision.step for decision in report.decisions), key=list(Step).index
    )
    assert rows_of(aging.lake) == rows
    assert report.deleted_files == sum(d.files for d in report.decisions if d.step in ("purge", "orphans")) + (
        decision_of(report, Step.DROP_OVERDUE_CLONES).files
    )
    assert report.rewritten_files == 24
    assert report.version == aging.lake.latest_version() > report.base_version
    assert aging.lake.storage.read(HINT_PATH) == str(report.version).encode()
    assert {info.name: info.state for info in operations.list_exports(aging.lake)} == {
        "interrupted": "complete",
        "nightly-2": "complete",
    }
    assert operations.list_clones(aging.lake) == []
    again = maintain(aging.lake)
    assert {state for step in states(again).values() for state in step} == {NOTHING}, str(again)
    assert again.version == report.version
    assert operations.verify(aging.lake, deep=True).is_clean


def test_reported_deletions_are_those_of_the_storage(aging: Aging) -> None:
    """Besides, operations delete plans, manifests and roots of exports that they no longer need."""
    neglect(aging)
    for _ in range(4):
        sizes = {info.path: info.size_bytes for info in aging.lake.storage.list()}
        report = maintain(aging.lake)
        missing = sizes.keys() - listed(aging.lake.storage)
        own = {path for path in missing if path.startswith(("_ops/", "_export_"))}
        assert report.deleted_files == len(missing - own)
        assert report.deleted_bytes == sum(sizes[path] for path in missing - own)
        aging.later(2 * DAY_MS)


def test_dry_run_shows_the_same_decisions_and_writes_nothing(aging: Aging, clone_root: str) -> None:
    neglect(aging, clone_root)
    before, clone_before = files_of(aging.lake), files_of(Lakehouse.open(clone_root))
    plan = maintain(aging.lake, dry_run=True)
    assert files_of(aging.lake) == before
    assert files_of(Lakehouse.open(clone_root)) == clone_before
    planned = {step for step, of_step in states(plan).items() if PLANNED in of_step}
    assert planned >= DUE
    assert DONE not in {decision.state for decision in plan.decisions}
    assert "would delete" in plan.headline
    report = maintain(aging.lake)
    executed = {step for step, of_step in states(report).items() if DONE in of_step}
    assert planned == executed
    for step in (Step.PURGE, Step.ORPHANS, Step.DROP_OVERDUE_CLONES):
        assert decision_of(plan, step).files == decision_of(report, step).files > 0
    assert (plan.rewritten_files, plan.rewritten_bytes) == (report.rewritten_files, report.rewritten_bytes)


def test_thin_tree_is_compacted(lakes: Lakes) -> None:
    aging = new_lake(lakes.storage(), targets={"export": None})
    with aging.lake.transaction() as txn:
        for namespace in range(60):
            txn.create_namespace(f"n{namespace}")
    with aging.lake.transaction() as txn:
        for namespace in range(60):
            if namespace % 3:
                txn.drop_namespace(f"n{namespace}")
    before = operations.plan_compact(aging.lake).before
    assert before.messages > 0
    decision = decision_of(maintain(aging.lake), Step.COMPACT)
    assert (decision.state, aging.lake.snapshot().tree_shape().messages) == (DONE, 0)
    again = decision_of(maintain(aging.lake), Step.COMPACT)
    assert again.state == NOTHING
    assert again.why.startswith("the tree was checked at version")


# Limits


def purgeable(aging: Aging) -> None:
    """Make a purge and a removal of orphans due, and nothing else that deletes."""
    neglect(aging)
    with_policy(aging.lake, skip=["drop_overdue_clones"])


@pytest.mark.parametrize("limit", ["max_deleted_files", "max_deleted_bytes"])
def test_larger_deletion_waits_and_its_command_applies_it(aging: Aging, limit: str) -> None:
    purgeable(aging)
    with_policy(aging.lake, limits={limit: 1, "min_age": "2s"})
    report = maintain(aging.lake)
    purge, orphans = decision_of(report, Step.PURGE), decision_of(report, Step.ORPHANS)
    assert purge.state == WAITS
    assert "more than the limit of 1" in purge.why
    assert (report.deleted_files, report.deleted_bytes) == (orphans.files * (orphans.state == DONE), 0) or (
        limit == "max_deleted_files"
    )
    assert report.deleted_files <= 1
    assert report.is_complete, "a plan that waits is no failure"
    assert purge.approval is not None
    assert purge.approval.command == f"purge --grace 2s --apply {purge.approval.digest}"
    plan = operations.plan_purge(aging.lake, timedelta(seconds=2))
    assert plan.execute(purge.approval.digest).is_complete
    if limit == "max_deleted_files":
        assert orphans.state == DONE, "one file is within the limit"
    after = maintain(aging.lake)
    assert decision_of(after, Step.PURGE).state == NOTHING


def test_deletion_that_exceeds_what_is_left_of_the_run_comes_first_next_time(aging: Aging, clone_root: str) -> None:
    neglect(aging, clone_root)
    plan = maintain(aging.lake, dry_run=True)
    purge, clone = (decision_of(plan, step).files for step in (Step.PURGE, Step.DROP_OVERDUE_CLONES))
    with_policy(aging.lake, limits={"max_deleted_files": max(purge, clone)})
    report = maintain(aging.lake)
    assert decision_of(report, Step.PURGE).state == DONE
    left = decision_of(report, Step.DROP_OVERDUE_CLONES)
    assert (left.state, left.what) == (LEFT, "branch")
    assert "more than what is left of the limit" in left.why
    assert report.deleted_files <= max(purge, clone)
    second = maintain(aging.lake)
    assert decision_of(second, Step.DROP_OVERDUE_CLONES).state == DONE
    later = [decision.step for decision in second.decisions][4:]
    assert set(later[: len(report.left)]) == {decision.step for decision in report.left}, "what was left comes first"


def test_compaction_is_done_in_parts_within_the_limit(aging: Aging) -> None:
    for name in ("t", "u", "v"):
        for _ in range(12):
            append_rows(aging.lake, f"ns.{name}")
    # Each file has its own row group, and a group is limited to the target size, so a table has several groups.
    size = next(info.size_bytes for info in aging.lake.storage.list(TABLES_PREFIX) if info.path.endswith(".parquet"))
    targets = {"export": None, "file_size": 4 * size, "small_files": 2}
    with_policy(aging.lake, targets=targets, limits={"max_rewritten_files": 7})
    rows = rows_of(aging.lake)
    turns: list[set[str]] = []
    for _ in range(12):
        report = maintain(aging.lake)
        assert report.rewritten_files <= 7
        changed = {d.what for d in report.decisions if d.step == Step.COMPACT_TABLES and d.state in (DONE, PARTLY)}
        if not changed:
            break
        turns.append(changed)
    assert [min(names) for names in turns[:3]] == ["ns.t", "ns.u", "ns.v"], "tables take turns"
    assert set().union(*turns) == {"ns.t", "ns.u", "ns.v"}
    assert decision_of(maintain(aging.lake), Step.COMPACT_TABLES).state == NOTHING
    assert rows_of(aging.lake) == rows


def test_group_that_exceeds_the_limit_of_a_run_waits(aging: Aging) -> None:
    for _ in range(6):
        append_rows(aging.lake, "ns.t")
    with_policy(aging.lake, targets={"export": None}, limits={"max_rewritten_files": 5})
    decision = decision_of(maintain(aging.lake), Step.COMPACT_TABLES)
    assert (decision.state, decision.what) == (WAITS, "ns.t")
    assert decision.approval is not None
    plan = operations.plan_compact_tables(aging.lake, ["ns.t"])
    assert plan.digest == decision.approval.digest
    assert decision.approval.command == f"compact-tables ns.t --min-input-files 5 --apply {plan.digest}"


def test_limit_on_requests_is_kept_and_later_runs_finish(aging: Aging) -> None:
    neglect(aging)
    rows = rows_of(aging.lake)
    unlimited = maintain(aging.lake, dry_run=True).cost.total_requests
    limit = unlimited // 2
    with_policy(aging.lake, limits={"max_requests": limit})
    reports = []
    for _ in range(40):
        reports.append(maintain(aging.lake))
        # A step that has begun to write is completed, and a batch of parallel requests is sent at once.
        assert reports[-1].cost.total_requests <= limit + 150
        if not reports[-1].left:
            break
    assert not reports[-1].left, str(reports[-1])
    assert reports[0].left, "the first run left something"
    done = {decision.step for report in reports for decision in report.decisions if decision.state == DONE}
    assert done >= DUE - {Step.DROP_OVERDUE_CLONES, Step.REPAIR_HINT}
    assert rows_of(aging.lake) == rows
    assert operations.verify(aging.lake).is_clean


def test_limit_on_time_ends_the_run(aging: Aging, monkeypatch: pytest.MonkeyPatch) -> None:
    neglect(aging)
    with_policy(aging.lake, limits={"max_duration": "30s"})
    begun: list[float] = []

    class Clock:
        """The budget's clock: each look takes a second."""

        now_s = 0.0

        def monotonic(self) -> float:
            self.now_s += 1.0
            return self.now_s

    monkeypatch.setattr("trinitylake_ops.operations.budget.time", Clock())
    report = maintain(aging.lake)
    begun.append(report.cost.duration_ms)
    assert LEFT in states(report)[Step.EXPORT] | states(report)[Step.VERIFY]
    assert any("the budget of 30 seconds is spent" in decision.why for decision in report.left)
    assert report.is_complete


def test_least_age_protects_versions_files_and_exports(aging: Aging) -> None:
    neglect(aging)
    with_policy(aging.lake, limits={"min_age": "365d"})
    report = maintain(aging.lake)
    for step in (Step.PRUNE_EXPORTS, Step.EXPIRE, Step.PURGE, Step.ORPHANS):
        assert states(report)[step] == {NOTHING}, decision_of(report, step).why
    assert report.deleted_files == 0


def test_plan_for_the_least_age_can_be_approved(aging: Aging) -> None:
    neglect(aging)
    aging.later(4 * DAY_MS)
    with_policy(aging.lake, limits={"min_age": "3d"}, approval=["expire", "orphans", "prune_exports", "trim"])
    report = maintain(aging.lake)
    expire = decision_of(report, Step.EXPIRE).approval
    assert expire is not None
    assert expire.command == f"expire --max-age 3d --apply {expire.digest}"
    policy = operations.RetentionPolicy.of(aging.lake.snapshot().definition)
    plan = operations.plan_expiration(aging.lake, replace(policy, maximum_age_ms=3 * DAY_MS))
    assert plan.execute(expire.digest).versions == decision_of(report, Step.EXPIRE).what
    prune = decision_of(report, Step.PRUNE_EXPORTS).approval
    assert prune is not None
    assert prune.command == f"prune-exports 'nightly-*' --max-age 3d --min-versions 1 --apply {prune.digest}"


# Approval, windows and other settings


def test_steps_that_need_approval_wait_and_their_commands_are_valid(aging: Aging, clone_root: str) -> None:
    neglect(aging, clone_root)
    steps = ["prune_exports", "trim", "compact_tables", "expire", "purge", "orphans", "drop_overdue_clones"]
    with_policy(aging.lake, approval=steps)
    version = aging.lake.latest_version()
    report = maintain(aging.lake)
    waiting = {decision.step for decision in report.waiting}
    assert waiting == {Step(step) for step in steps}
    done = {decision.step for decision in report.decisions if decision.state == DONE}
    assert done == {Step.FINISH_INTERRUPTED, Step.COMPACT, Step.VERIFY}
    assert report.version == version + 2, "the interrupted export is completed, and the tree compacted"
    for decision in report.waiting:
        assert decision.approval is not None
        assert "the policy requires an approval" in decision.why
        name, *arguments = decision.approval.command.split()
        command = trinitylake.get_command(Context(trinitylake), name)
        assert command is not None
        command.make_context(name, [argument.strip("'") for argument in arguments])
        job = BY_NAME[decision.approval.job]
        assert job.options is not None
        job.options(**decision.approval.options, approval={"digest": decision.approval.digest, "approved_by": "Ann"})
    assert json.loads(report.to_json())["waiting"] == [d.approval.command for d in report.waiting if d.approval]


def test_skipped_steps_are_left_out(aging: Aging) -> None:
    neglect(aging)
    with_policy(aging.lake, skip=["purge", "verify"])
    report = maintain(aging.lake)
    assert states(report)[Step.PURGE] == states(report)[Step.VERIFY] == {SKIPPED}
    assert states(report)[Step.ORPHANS] == {DONE}
    assert not list(aging.lake.storage.list(VERIFIED_PREFIX))


def test_nothing_is_done_outside_of_windows(aging: Aging) -> None:
    neglect(aging)
    with_policy(aging.lake, blackouts=[{"start": "00:00", "end": "00:00"}])
    before = files_of(aging.lake)
    report = maintain(aging.lake)
    assert (report.decisions, report.is_complete) == ((), True)
    assert report.closed is not None and "is within the blackout every day from 00:00 to 00:00 UTC" in report.closed
    assert report.headline == f"Maintenance did nothing: {report.closed}"
    assert files_of(aging.lake) == before


def test_unreadable_policy_stops_maintenance(aging: Aging) -> None:
    neglect(aging)
    aging.lake.alter_definition(maintenance_policy='{"future":1}')
    before = files_of(aging.lake)
    with pytest.raises(UnreadablePolicyError):
        maintain(aging.lake)
    assert files_of(aging.lake) == before
    with pytest.raises(LakehouseNotFoundError):
        maintain(Lakehouse(MemoryStorage(f"memory://no-lake-{uuid.uuid4().hex}/")))


def test_default_policy_deletes_nothing_younger_than_a_week(lakes: Lakes) -> None:
    aging = Aging.on(lakes.storage(), maximum_version_age_millis=0, minimum_versions_to_keep=1, txn_ttl_millis=1)
    lakes.watch(aging.lake)
    neglect(aging)
    for days in range(6):
        report = maintain(aging.lake)
        assert report.has_default_policy
        if days == 0:
            assert decision_of(report, Step.PURGE).state in (DONE, NOTHING)
        aging.later(DAY_MS)
    fresh = Aging.on(lakes.storage("fresh"), maximum_version_age_millis=0, minimum_versions_to_keep=1, txn_ttl_millis=1)
    for _ in range(6):
        append_rows(fresh.lake, "ns.t")
        fresh.later(DAY_MS)
        report = maintain(fresh.lake)
        assert report.deleted_files == 0
        assert states(report)[Step.EXPIRE] == {NOTHING}


# Errors and other operations


class BrokenStorage(StorageWrapper):
    """A storage that fails requests for which ``fails`` is true."""

    def __init__(self, inner: Any, fails: Callable[[str, str], bool]):
        super().__init__(inner)
        self._fails = fails

    def _check(self, kind: str, path: str) -> None:
        if self._fails(kind, path):
            raise StorageError("broken", path=path)

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._check("read", path)
        return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        self._check("list", prefix)
        return super().list(prefix)

    def create(self, path: str, data: bytes) -> None:
        self._check("create", path)
        super().create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self._check("write", path)
        super().write(path, data)


def test_error_of_one_step_does_not_stop_the_others(aging: Aging) -> None:
    neglect(aging)
    lake = Lakehouse(BrokenStorage(aging.lake.storage, lambda kind, path: kind == "list" and path == ""))
    report = maintain(lake)
    assert states(report)[Step.ORPHANS] == {FAILED}
    assert "broken" in decision_of(report, Step.ORPHANS).why
    assert not report.is_complete
    assert states(report)[Step.PURGE] == {DONE}
    assert "1 failed" in report.headline or "failed" in report.headline


def test_damaged_table_fails_alone(aging: Aging) -> None:
    neglect(aging)
    folder = f"{TABLES_PREFIX}{aging.lake.snapshot().table('ns', 't').id}/"
    for info in list(aging.lake.storage.list(folder)):
        if info.path.endswith(".parquet"):
            aging.lake.storage.write(info.path, b"garbage")
    report = maintain(aging.lake)
    table = decision_of(report, Step.COMPACT_TABLES, "ns.t")
    assert table.state == FAILED
    assert decision_of(report, Step.COMPACT_TABLES, "ns.u").state == DONE


def test_steps_that_delete_are_left_while_another_operation_holds_the_lease(aging: Aging) -> None:
    neglect(aging)
    with lease(aging.lake.storage, "purge"):
        report = maintain(aging.lake)
    assert states(report)[Step.PURGE] == states(report)[Step.ORPHANS] == {LEFT}
    assert "is running" in decision_of(report, Step.PURGE).why
    assert states(report)[Step.TRIM] == {DONE}
    second = maintain(aging.lake)
    assert states(second)[Step.PURGE] == states(second)[Step.ORPHANS] == {DONE}


def test_settings_that_another_program_replaced_are_reconciled_first(aging: Aging) -> None:
    neglect(aging)
    foreign = ForeignLake(aging.lake.storage)
    before = operations.list_exports(aging.lake)
    (expired,) = (info.version for info in aging.lake.history() if info.operation == "expire")
    foreign.rollback(expired - 1, keeps_unknown=False)
    aging.later(HOUR_MS)
    report = maintain(Lakehouse(aging.lake.storage))
    decision = decision_of(report, Step.RECONCILE)
    assert decision.state == DONE, str(report)
    assert states(report)[Step.EXPIRE] == {DONE}
    assert before
    assert operations.plan_reconcile(aging.lake).is_empty


def test_findings_of_verify_fail_the_run(aging: Aging) -> None:
    neglect(aging)
    definition = aging.lake.snapshot().table("ns", "t")
    aging.lake.storage.delete(definition.format_properties["metadata_location"])
    report = maintain(aging.lake)
    assert states(report)[Step.VERIFY] == {FAILED}
    assert "error" in decision_of(report, Step.VERIFY).why
    assert not report.is_complete


def test_verification_that_a_limit_ended_continues_in_the_next_run(aging: Aging) -> None:
    neglect(aging)
    steps = [step.value for step in Step if step not in (Step.VERIFY, Step.EXPORT)]
    with_policy(aging.lake, limits={"max_requests": 60}, skip=steps, targets={"export": None})
    first = maintain(aging.lake)
    assert states(first)[Step.VERIFY] == {PARTLY}
    runs = 1
    while decision_of(report := maintain(aging.lake), Step.VERIFY).state == PARTLY:
        runs += 1
        assert runs < 30
    assert states(report)[Step.VERIFY] == {DONE}
    assert states(maintain(aging.lake))[Step.VERIFY] == {NOTHING}


def test_export_is_made_when_due_and_only_to_allowed_roots(aging: Aging, clone_root: str) -> None:
    with_policy(aging.lake, targets={"export": {"every": "1d", "level": "full", "target": clone_root}})
    append_rows(aging.lake, "ns.t")
    outside = maintain(aging.lake)
    assert states(outside)[Step.EXPORT] == {FAILED}
    assert "allow" in decision_of(outside, Step.EXPORT).why
    lake = Lakehouse(aging.lake.storage, {"allowed_roots": clone_root})
    report = maintain(lake)
    assert states(report)[Step.EXPORT] == {DONE}
    assert rows_of(Lakehouse.open(clone_root)) == rows_of(aging.lake)
    assert states(maintain(lake))[Step.EXPORT] == {NOTHING}
    aging.later(DAY_MS + HOUR_MS)
    assert states(maintain(lake))[Step.EXPORT] == {DONE}


def test_only_exports_that_meet_the_policy_count(aging: Aging, clone_root: str) -> None:
    append_rows(aging.lake, "ns.t")
    lake = Lakehouse(aging.lake.storage, {"allowed_roots": clone_root})
    with_policy(lake, targets={"export": {"every": "1d", "level": "full", "target": clone_root}})
    operations.plan_export(lake, "here", "full").execute()
    assert states(maintain(lake, dry_run=True))[Step.EXPORT] == {PLANNED}
    due = {entry.what: entry for entry in operations.lakehouse_status(lake).due}
    assert due["exports"].why == "the lakehouse is new; due every 1 d", "no export counts"
    operations.plan_export(lake, "all", "full", target=clone_root).execute()
    assert states(maintain(lake, dry_run=True))[Step.EXPORT] == {NOTHING}


def test_interrupted_export_to_a_root_that_is_not_allowed_is_not_resumed(aging: Aging, clone_root: str) -> None:
    append_rows(aging.lake, "ns.t")
    record = ExportRecord(
        name="away",
        version=aging.lake.latest_version(),
        level=ExportLevel.FULL,
        target_uri=clone_root,
        manifest_path=new_manifest_path(),
        created_at_millis=aging.clock.time_ms,
    )
    aging.lake.alter_definition(exports=(record,))
    aging.later(2 * DAY_MS)
    decision = decision_of(maintain(aging.lake), Step.FINISH_INTERRUPTED)
    assert (decision.state, decision.what) == (LEFT, "away")
    assert "allow its target" in decision.why
    resumed = maintain(Lakehouse(aging.lake.storage, {"allowed_roots": clone_root}))
    assert decision_of(resumed, Step.FINISH_INTERRUPTED).state == DONE
    assert rows_of(Lakehouse.open(clone_root)) == rows_of(aging.lake)


def test_plan_that_waits_is_reported_in_each_run(aging: Aging) -> None:
    neglect(aging)
    with_policy(aging.lake, approval=["trim", "compact_tables"])
    first = maintain(aging.lake)
    assert states(first)[Step.EXPIRE] == {DONE}
    for _ in range(3):
        report = maintain(aging.lake)
        assert {decision.step for decision in report.waiting} == {Step.TRIM, Step.COMPACT_TABLES}, str(report)
        aging.later(HOUR_MS)
    with_policy(aging.lake, approval=[])
    report = maintain(aging.lake)
    assert states(report)[Step.TRIM] == states(report)[Step.COMPACT_TABLES] == {DONE}


def test_object_that_another_writer_drops_meanwhile_is_left(aging: Aging) -> None:
    neglect(aging)
    with_policy(aging.lake, skip=["finish_interrupted"])
    dropped: list[str] = []

    def drop(kind: str, path: str) -> bool:
        if kind == "create" and path.startswith("_lakehouse_def") and not dropped:
            dropped.append("nightly-1")
            operations.drop_export(aging.lake, "nightly-1")
        return False

    report = maintain(Lakehouse(BrokenStorage(aging.lake.storage, drop)))
    assert dropped
    assert not report.failed, str(report)
    assert states(report)[Step.PRUNE_EXPORTS] == {LEFT}
    assert "export 'nightly-1' does not exist" in decision_of(report, Step.PRUNE_EXPORTS).why
    assert states(report)[Step.PURGE] == {DONE}


def test_first_matching_rule_decides_about_an_export(aging: Aging) -> None:
    rules = [{"pattern": "yearly-*", "keep_monthly": 120}, {"pattern": "*", "min_exports": 1}]
    with_policy(aging.lake, retention={"exports": rules}, targets={"export": None})
    for name in ("yearly-1", "yearly-2", "daily-1", "daily-2"):
        operations.plan_export(aging.lake, name).execute()
        aging.later(40 * DAY_MS)
    report = maintain(aging.lake)
    assert {info.name for info in operations.list_exports(aging.lake)} == {"yearly-1", "yearly-2", "daily-2"}
    decision = decision_of(report, Step.PRUNE_EXPORTS)
    assert decision.what == "*"
    assert decision.why.startswith("1 export dropped in version ")


# Repeated runs


def test_unchanged_lakehouse_is_left_alone(aging: Aging) -> None:
    with_policy(aging.lake, targets={"export": None})
    append_rows(aging.lake, "ns.t")
    versions = []
    for _ in range(40):
        maintain(aging.lake)
        versions.append(aging.lake.latest_version())
        aging.later(DAY_MS)
    assert versions[-1] == versions[10], "maintenance does not commit versions only to expire its own"
    assert versions[-1] - versions[0] < 12


def test_only_changed_tables_are_checked_again(aging: Aging) -> None:
    with_policy(aging.lake, targets={"export": None})
    for number in range(8):
        append_rows(aging.lake, f"ns.t{number}")
    maintain(aging.lake)
    idle = maintain(aging.lake)
    assert decision_of(idle, Step.COMPACT_TABLES).why == "no table changed since the last check"
    append_rows(aging.lake, "ns.t3")
    one = maintain(aging.lake)
    assert decision_of(one, Step.COMPACT_TABLES).why.startswith("the data files of 1 table that changed")
    assert one.cost.total_requests - idle.cost.total_requests < 30
    aging.lake.storage.delete(MAINTENANCE_STATE_PATH)
    everything = maintain(aging.lake)
    assert decision_of(everything, Step.COMPACT_TABLES).why.startswith("the data files of 8 tables")


def test_requests_do_not_depend_on_unchanged_tables(aging: Aging) -> None:
    with_policy(aging.lake, targets={"export": None})
    create(aging.lake, "x", "t")
    maintain(aging.lake)
    few = maintain(aging.lake).cost.total_requests
    for number in range(20):
        create(aging.lake, f"y{number}", *(f"t{table}" for table in range(20)))
    maintain(aging.lake)
    assert maintain(aging.lake).cost.total_requests <= few + 10


def test_report_is_stable_json(aging: Aging) -> None:
    document = json.loads(maintain(aging.lake, dry_run=True).to_json())
    assert list(document) == [
        "headline", "root", "base_version", "version", "begun_at", "is_dry_run", "has_default_policy", "closed",
        "decisions", "deleted_files", "deleted_bytes", "rewritten_files", "rewritten_bytes", "cost", "waiting",
    ]  # fmt: skip
    assert list(document["decisions"][0]) == ["step", "state", "what", "why", "files", "bytes", "approval"]


def test_failure_to_write_the_state_is_harmless(aging: Aging) -> None:
    neglect(aging)
    lake = Lakehouse(BrokenStorage(aging.lake.storage, lambda kind, path: path == MAINTENANCE_STATE_PATH))
    report = maintain(lake)
    assert {decision.step for decision in report.failed} <= {Step.VERIFY, Step.ORPHANS}
    assert states(report)[Step.TRIM] == {DONE}
