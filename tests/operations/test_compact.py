"""Compaction of the tree commits a version without changes of objects."""

from __future__ import annotations

import json

import pytest

from tests.faults import FaultyStorage
from tests.lakes import Lakes, entries, listed, objects
from tests.operations.changes import create, make_untidy, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import PlanChangedError
from trinitylake_ops.tree.shape import walk

pytestmark = pytest.mark.usefixtures("fixed_requests")


def create_untidy_lake(lakes: Lakes) -> Lakehouse:
    """Create a lakehouse whose tree has several levels, sparse nodes and buffered messages."""
    lake = lakes.memory(order=4, **small_sizes(4))
    make_untidy(lake)
    return lake


def test_compact_keeps_objects_and_removes_messages(lakes: Lakes) -> None:
    lake = create_untidy_lake(lakes)
    before, latest = entries(lake), lake.latest_version()
    ids = objects(lake.snapshot())
    report = operations.compact(lake, "nightly compaction")
    assert (report.base_version, report.version, report.has_changed) == (latest, latest + 1, True)
    assert report.before.messages > report.after.messages == 0
    assert report.after.nodes == len(list(walk(lake.snapshot().files.nodes, lake.snapshot().root, "root")))
    assert entries(lake) == before
    assert objects(lake.snapshot()) == ids
    assert lake.diff(latest, latest + 1) == []
    info = next(iter(lake.history(1)))
    assert (info.operation, info.message) == ("compact", "nightly compaction")
    assert operations.verify(lake).is_clean
    assert json.loads(report.to_json())["after"]["levels"][0]["depth"] == 0
    assert "messages in buffers" in str(report)


def test_compact_commits_nothing_if_not_needed(lakes: Lakes) -> None:
    lake = create_untidy_lake(lakes)
    operations.compact(lake)
    files, latest = listed(lake.storage), lake.latest_version()
    repeated = operations.compact(lake)
    assert (repeated.has_changed, repeated.version, repeated.nodes_written) == (False, latest, 0)
    assert repeated.before == repeated.after
    assert listed(lake.storage) == files
    assert "nothing to do" in str(repeated)


def test_compact_plan_predicts_writes_and_binds_approval(lakes: Lakes) -> None:
    lake = create_untidy_lake(lakes)
    files, latest = listed(lake.storage), lake.latest_version()
    plan = operations.plan_compact(lake)
    assert (plan.is_empty, plan.base_version, plan.before) == (False, latest, lake.snapshot().tree_shape())
    assert listed(lake.storage) == files, "a plan writes nothing"
    assert operations.plan_compact(lake).digest == plan.digest
    report = plan.execute(plan.digest)
    assert (report.version, report.nodes_written) == (latest + 1, plan.nodes_written)
    assert operations.plan_compact(lake).is_empty
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)


def test_compact_of_a_new_lakehouse_is_not_needed(lakes: Lakes) -> None:
    assert not operations.compact(lakes.memory()).has_changed


def test_compact_keeps_concurrent_commits(lakes: Lakes) -> None:
    lake = create_untidy_lake(lakes)
    latest = lake.latest_version()

    class InterferingStorage(FaultyStorage):
        """Commits the next version just before the first root of the compaction is created."""

        def create(self, path: str, data: bytes) -> None:
            if path == lake.files.roots.path(latest + 1):
                create(Lakehouse(lake.storage), "d", "t")
            super().create(path, data)

    report = operations.compact(Lakehouse(InterferingStorage(lake.storage)))
    assert (report.base_version, report.version) == (latest + 1, latest + 2)
    assert report.after.messages == 0
    assert lake.snapshot().tables("d") == ["t"]
    assert operations.verify(lake).is_clean
