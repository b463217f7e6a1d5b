"""Test the status of a lakehouse: due operations, committers, findings, and a bounded number of requests."""

from __future__ import annotations

import uuid
from dataclasses import replace

import pytest

from tests.clock import AgingStorage
from tests.operations.aging import DAY_MS, HOUR_MS, Aging, keeping
from tests.operations.changes import alter, create, truncate
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, LakehouseNotFoundError
from trinitylake_ops.format.definitions import ExpirationBatch, ExportLevel, ExportRecord, ExportState
from trinitylake_ops.format.file_names import HINT_PATH, new_table_path
from trinitylake_ops.operations import DueAges, Status, lakehouse_status
from trinitylake_ops.operations.hint import HintState
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.operations.status.state import MAX_OTHER_REQUESTS
from trinitylake_ops.storage import MemoryStorage
from trinitylake_ops.versions.commit_info import acting_for_run

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def old_lake() -> Aging:
    """A lakehouse with five versions that keeps versions for one day, and at least one version."""
    old_lake = Aging.on(
        MemoryStorage(f"memory://status-{uuid.uuid4().hex}/"),
        maximum_version_age_millis=DAY_MS,
        minimum_versions_to_keep=1,
        txn_ttl_millis=HOUR_MS,
    )
    create(old_lake.lake, "ns", "t")
    for _ in range(3):
        old_lake.later(HOUR_MS)
        alter(old_lake.lake, "ns", "t")
    return old_lake


def states(status: Status) -> dict[str, str]:
    return {entry.what: entry.state.value for entry in status.due}


def command_of(status: Status, operation: str) -> str:
    return next(entry.command for entry in status.due if entry.what == operation)


def add_export_record(lake: Lakehouse, **fields: object) -> None:
    record = {"name": "e", "version": 1, "level": ExportLevel.MINIMAL, "state": ExportState.COMPLETE, **fields}
    definition = lake.snapshot().definition
    lake.alter_definition(exports=(*definition.exports, ExportRecord(**record)))  # type: ignore[arg-type]


def test_new_lakehouse_has_nothing_due(old_lake: Aging) -> None:
    status = lakehouse_status(old_lake.lake)
    assert (status.version, status.kept, status.expired, status.hint) == (4, 5, 0, HintState.RIGHT)
    assert set(states(status).values()) == {"fine"}
    assert (status.commands, status.findings, status.running, status.tone) == ((), (), None, "good")
    assert status.headline == "Version 4, 0 s old: nothing to do"
    assert status.space.reclaimable_bytes == 0
    assert status.ages.verify_seconds is status.ages.expiry_seconds is None


def test_due_operations_have_commands(old_lake: Aging) -> None:
    old_lake.later(10 * DAY_MS)
    status = lakehouse_status(old_lake.lake)
    assert states(status) == {
        "expiry": "due", "purge": "fine", "orphans": "fine", "verify": "due", "exports": "fine", "clones": "fine",
    }  # fmt: skip
    root = old_lake.lake.root
    assert status.commands == (
        f"trinitylake --root {root} expire",
        f"trinitylake --root {root} verify --incremental",
    )
    (expiry, *_) = status.due
    assert expiry.since_seconds == pytest.approx((9 * DAY_MS + 2 * HOUR_MS + HOUR_MS) / 1000, abs=2 * HOUR_MS / 1000)
    assert status.headline == "Version 4, 10 d old: expiry, verify due"
    operations.verify(old_lake.lake, incremental=True)
    assert states(lakehouse_status(old_lake.lake))["verify"] == "fine"
    old_lake.expire()
    status_before_purge = lakehouse_status(old_lake.lake)
    assert states(status_before_purge)["purge"] == "later"
    assert status_before_purge.expired == 4
    purge_plan = operations.plan_purge(old_lake.lake)
    assert purge_plan.is_empty
    old_lake.later(DAY_MS)
    status_with_due_purge = lakehouse_status(old_lake.lake)
    assert (states(status_with_due_purge)["purge"], command_of(status_with_due_purge, "purge")) == ("due", "purge")
    assert status_with_due_purge.space.purgeable_bytes == operations.plan_purge(old_lake.lake).bytes > 0
    old_lake.purge()
    status_after_purge = lakehouse_status(old_lake.lake)
    assert (
        states(status_after_purge)["purge"],
        status_after_purge.space.purgeable_bytes,
        status_after_purge.expired,
    ) == ("fine", 0, 0)
    old_lake.later(40 * DAY_MS)
    status_with_old_orphans = lakehouse_status(old_lake.lake)
    assert (states(status_with_old_orphans)["orphans"], command_of(status_with_old_orphans, "orphans")) == (
        "look",
        "orphans",
    )
    assert not any("orphans" in command for command in status_with_old_orphans.commands)
    old_lake.lake.storage.create(new_table_path("ns", "orphan", 200), b"x")
    old_lake.later(2 * DAY_MS)
    assert old_lake.remove_orphans().files == 1
    assert states(lakehouse_status(old_lake.lake))["orphans"] == "fine"


def test_bytes_are_planned_without_recorded_plans(old_lake: Aging) -> None:
    old_lake.later(10 * DAY_MS)
    status = lakehouse_status(old_lake.lake, plan_seconds=60)
    assert status.space.expirable_bytes == operations.plan_expiration(old_lake.lake).bytes > 0
    assert "takes more than" in lakehouse_status(old_lake.lake, plan_seconds=1e-9).space.note


def test_overdue_and_interrupted_exports_and_clones_are_due(old_lake: Aging) -> None:
    now_ms = old_lake.lake.storage.now_ms()
    add_export_record(old_lake.lake, retain_until_millis=now_ms + HOUR_MS, created_at_millis=now_ms)
    assert states(lakehouse_status(old_lake.lake))["exports"] == "fine"
    assert states(lakehouse_status(old_lake.lake, ages=DueAges(export_ms=HOUR_MS)))["exports"] == "fine"
    old_lake.later(3 * HOUR_MS)
    status = lakehouse_status(old_lake.lake)
    assert (states(status)["exports"], command_of(status, "exports")) == ("due", "prune-exports")
    add_export_record(old_lake.lake, name="odd name", clone_id="c", state=ExportState.COPYING, created_at_millis=now_ms)
    old_lake.later(2 * DAY_MS)
    status = lakehouse_status(old_lake.lake)
    assert (states(status)["clones"], command_of(status, "clones")) == ("due", "drop-clone 'odd name'")
    assert (status.exports, status.clones) == (1, 1)


def test_export_is_due_if_an_interval_is_set(old_lake: Aging) -> None:
    old_lake.later(10 * DAY_MS)
    status = lakehouse_status(old_lake.lake, ages=DueAges(verify_ms=None, orphans_ms=None, export_ms=DAY_MS))
    assert states(status)["exports"] == "due"
    assert command_of(status, "exports").startswith("export kept-2")
    assert states(status)["verify"] == states(status)["orphans"] == "fine"


def test_committers_and_conflicts_are_counted(old_lake: Aging) -> None:
    with acting_for_run("run-1"):
        alter(old_lake.lake, "ns", "t")
    other = Lakehouse(old_lake.lake.storage)
    with old_lake.lake.transaction() as txn:
        txn.create_namespace("a")
        create(other, "b")
    commits = lakehouse_status(old_lake.lake).commits
    assert (commits.versions, commits.transactions, commits.attempts, commits.lost) == (8, 8, 9, 1)
    (committer,) = commits.committers
    assert (committer.versions, committer.lost) == (8, 1)
    assert "alter-table" in committer.operations
    assert lakehouse_status(old_lake.lake, last=2).commits.versions == 2


def test_problems_are_reported_as_findings(old_lake: Aging) -> None:
    old_lake.lake.close()
    old_lake.lake.storage.write(HINT_PATH, b"1")
    status = lakehouse_status(old_lake.lake)
    assert (status.hint, status.tone) == (HintState.BEHIND, "warn")
    assert [entry.command for entry in status.findings] == ["repair-hint"]
    with lease(old_lake.lake.storage, "purge"):
        running = lakehouse_status(old_lake.lake).running
    assert running is not None and "purge is running" in running
    assert lakehouse_status(old_lake.lake).running is None


def test_unreadable_root_is_a_finding_and_other_parts_are_reported(old_lake: Aging) -> None:
    truncate(old_lake.lake.storage, old_lake.lake.files.roots.path(2))
    status = lakehouse_status(Lakehouse(old_lake.lake.storage))
    assert status.version == 4
    assert status.tone == "bad"
    assert [entry.command for entry in status.findings] == ["verify"]
    assert "the newest versions cannot be read" in status.findings[0].message
    assert len(status.due) == 6
    truncate(old_lake.lake.storage, old_lake.lake.files.roots.path(4))
    with pytest.raises(CorruptFileError):
        lakehouse_status(Lakehouse(old_lake.lake.storage))


def test_invalid_settings_are_reported_as_findings(old_lake: Aging) -> None:
    batch = ExpirationBatch(id="x", versions="not a range", expired_at_millis=2**62)
    old_lake.lake.alter_definition(expirations=(batch,))
    status = lakehouse_status(old_lake.lake)
    assert (status.version, status.tone, len(status.due)) == (5, "bad", 6)
    assert states(status)["expiry"] == "look"
    assert "the expired versions" in {entry.message.partition(" cannot be read")[0] for entry in status.findings}


def test_status_without_lakehouse_fails() -> None:
    with pytest.raises(LakehouseNotFoundError):
        lakehouse_status(Lakehouse(AgingStorage(MemoryStorage("memory://no-status/"), 1)))


def test_plan_with_another_digest_is_not_counted(old_lake: Aging) -> None:
    old_lake.later(10 * DAY_MS)
    old_lake.expire(keeping(1))
    definition = old_lake.lake.snapshot().definition
    (batch,) = definition.expirations
    old_lake.lake.alter_definition(expirations=(replace(batch, digest="another"),))
    space = lakehouse_status(old_lake.lake).space
    assert (space.purgeable_bytes, "1 of them were not read" in space.note) == (0, True)


def test_number_of_requests_does_not_grow_with_the_lakehouse(old_lake: Aging) -> None:
    first = lakehouse_status(old_lake.lake).cost.total_requests
    for _ in range(40):
        alter(old_lake.lake, "ns", "t")
    batches = tuple(
        replace(batch, id=str(uuid.uuid4())) for batch in old_lake.lake.snapshot().definition.expirations * 30
    )
    old_lake.lake.alter_definition(expirations=batches)
    status = lakehouse_status(old_lake.lake)
    assert status.cost.requests.keys() <= {"read", "list", "stat"}
    assert first < status.cost.total_requests <= status.commits.versions + MAX_OTHER_REQUESTS
    assert status.cost.total_requests <= 20 + 16
    for _ in range(20):
        old_lake.later(2 * DAY_MS)
        alter(old_lake.lake, "ns", "t")
        old_lake.expire()
    status_with_many_batches = lakehouse_status(old_lake.lake)
    assert (
        status_with_many_batches.cost.total_requests <= status_with_many_batches.commits.versions + MAX_OTHER_REQUESTS
    )


def test_undone_versions_are_reported_within_the_request_limit(old_lake: Aging) -> None:
    first = lakehouse_status(old_lake.lake)
    assert first.undone == ()
    for _ in range(6):
        alter(old_lake.lake, "ns", "t")
        alter(old_lake.lake, "ns", "t")
        operations.rollback(old_lake.lake, old_lake.lake.latest_version() - 2)
    latest = old_lake.lake.latest_version()
    status = lakehouse_status(old_lake.lake)
    assert [(undone.versions, undone.by) for undone in status.undone[:2]] == [
        (f"{latest - 2}-{latest - 1}", latest),
        (f"{latest - 5}-{latest - 4}", latest - 3),
    ]
    assert status.cost.total_requests <= status.commits.versions + MAX_OTHER_REQUESTS


def test_status_is_rendered_as_json(old_lake: Aging) -> None:
    document = lakehouse_status(old_lake.lake).to_dict()
    assert document["headline"] == "Version 4, 0 s old: nothing to do"
    assert {"version", "due", "next", "commits", "space", "findings", "ages", "cost"} <= document.keys()
    assert "what" in str(lakehouse_status(old_lake.lake))
