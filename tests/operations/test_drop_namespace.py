"""Drops of namespaces are planned, approved and atomic."""

from __future__ import annotations

import pytest

from tests.lakes import Lakes, table
from tests.operations.changes import create, drop
from tests.operations.reads import ReadPaths
from tests.operations.test_rollback import assert_rejected, with_interference
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    InvalidNameError,
    NamespaceNotEmptyError,
    NamespaceNotFoundError,
    PlanChangedError,
)


def test_empty_namespace_is_dropped(lake: Lakehouse) -> None:
    create(lake, "a")
    version = create(lake, "b")
    plan = operations.plan_drop_namespace(lake, "a")
    assert lake.latest_version() == version
    assert (plan.base_version, plan.tables) == (version, ())
    assert plan.execute(plan.digest).version == version + 1
    assert lake.snapshot().namespaces() == ["b"]
    assert lake.snapshot(version).has_namespace("a"), "older versions keep the namespace"
    assert next(iter(lake.history())).operation == "drop-namespace"


def test_drop_with_tables_needs_cascade(lake: Lakehouse) -> None:
    create(lake, "a", "t", "u")
    assert_rejected(lake, NamespaceNotEmptyError, lambda: operations.plan_drop_namespace(lake, "a"))
    plan = operations.plan_drop_namespace(lake, "a", cascade=True)
    assert plan.to_dict() == {"base_version": 1, "namespace": "a", "tables": ["t", "u"], "digest": plan.digest}
    assert "a.u" in str(plan)
    plan.execute()
    assert lake.snapshot().namespaces() == []
    operations.rollback(lake, 1)
    assert lake.snapshot().tables("a") == ["t", "u"]


def test_drop_executes_only_the_approved_plan(lake: Lakehouse) -> None:
    create(lake, "a", "t")
    plan = operations.plan_drop_namespace(lake, "a", cascade=True)
    assert_rejected(lake, PlanChangedError, lambda: plan.execute("nonsense"))
    create(lake, "b")
    assert_rejected(lake, PlanChangedError, lambda: plan.execute(plan.digest))
    repeated = operations.plan_drop_namespace(lake, "a", cascade=True)
    assert repeated.digest != plan.digest
    assert repeated.execute(repeated.digest).version == 3


def test_drop_rejects_changed_tables(lake: Lakehouse) -> None:
    create(lake, "a", "t")
    plan = operations.plan_drop_namespace(lake, "a", cascade=True)
    drop(lake, "a", "t")
    assert_rejected(lake, PlanChangedError, plan.execute)
    drop(lake, "a")
    assert_rejected(lake, NamespaceNotFoundError, plan.execute)


def test_drop_conflicts_with_a_concurrent_commit(lake: Lakehouse) -> None:
    create(lake, "a", "t")
    lake_with_interference = with_interference(lake, lambda: drop(lake, "a", "t"))
    with pytest.raises(CommitConflictError):
        operations.plan_drop_namespace(lake_with_interference, "a", cascade=True).execute()
    lake_with_interference = with_interference(lake, lambda: create(lake, "b"))
    operations.plan_drop_namespace(lake_with_interference, "a").execute()
    assert lake.snapshot().namespaces() == ["b"], "commits to other namespaces do not conflict"


def test_drop_rejects_invalid_names(lake: Lakehouse) -> None:
    assert_rejected(lake, NamespaceNotFoundError, lambda: operations.plan_drop_namespace(lake, "missing"))
    for name in ("", "with space", "n" * 17):
        assert_rejected(lake, InvalidNameError, lambda name=name: operations.plan_drop_namespace(lake, name))


def test_drop_does_not_read_files_of_the_plan_again(lakes: Lakes) -> None:
    reads = ReadPaths(lakes.storage())
    create(Lakehouse.create(reads.root, storage=reads), "a", *(f"t{number}" for number in range(9)))
    plan = operations.plan_drop_namespace(Lakehouse.open(reads.root, storage=reads), "a", cascade=True)
    reads.check_nothing_is_read_again(plan)


def test_namespace_with_long_name_can_be_dropped(lakes: Lakes) -> None:
    lake = lakes.memory(
        namespace_name_max_size_bytes=6000, table_name_max_size_bytes=6000, node_file_max_size_bytes=10_000_000
    )
    name = "q" * 5000
    txn = lake.transaction()
    txn.create_namespace(name)
    txn.create_table(name, "t" * 5000, table())
    txn.commit()
    operations.plan_drop_namespace(lake, name, cascade=True).execute()
    assert lake.snapshot().namespaces() == []
