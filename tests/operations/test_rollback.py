"""Test rollbacks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.faults import FaultyStorage
from tests.lakes import Lakes, entries, objects, seal, table
from tests.operations.changes import alter, append_rows, content, create, drop, expire, small_sizes
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    NamespaceNotFoundError,
    ObjectExistsError,
    PlanChangedError,
    TableNotFoundError,
    TrinityLakeError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.storage import MeteredStorage, Storage
from trinitylake_ops.transaction.change_set import VIEW_PREFIX, views_in
from trinitylake_ops.tree.shape import walk
from trinitylake_ops.versions.history import Change

pytestmark = pytest.mark.usefixtures("fixed_requests")


class InterferingStorage(FaultyStorage):
    """A storage that runs an action just before the first root is created."""

    action: Callable[[], Any] | None = None

    def create(self, path: str, data: bytes) -> None:
        if self.action is not None and path.startswith("_") and path.endswith(".arrow"):
            action, self.action = self.action, None
            action()
        super().create(path, data)


def with_interference(lake: Lakehouse, action: Callable[[], Any]) -> Lakehouse:
    """Return a lakehouse whose next commit conflicts with the commit of ``action``."""
    storage = InterferingStorage(lake.storage)
    storage.action = action
    return Lakehouse(storage)


def assert_rejected(lake: Lakehouse, error: type[TrinityLakeError], action: Callable[[], Any]) -> TrinityLakeError:
    """Assert that an action raises and leaves all files unchanged."""
    before = content(lake)
    with pytest.raises(error) as raised:
        action()
    assert content(lake) == before
    assert "\n" not in str(raised.value)
    return raised.value


def test_rollback_commits_old_content_as_new_version(lake: Lakehouse) -> None:
    target = create(lake, "a", "t1", "t2")
    alter(lake, "a", "t1")
    drop(lake, "a", "t2")
    latest = create(lake, "b", "t")
    assert operations.rollback(lake, target) == latest + 1
    assert entries(lake) == entries(lake, target)
    system = lake.snapshot().root.system
    assert system["previous_root"] == system["rollback_from_root"] == root_path(latest)
    (info,) = lake.history(limit=1)
    assert (info.operation, info.message, info.rollback_from) == ("rollback", f"to version {target}", latest)
    assert (info.counts, info.properties) == ({"changed": 4}, {"to_version": str(target)})
    assert operations.rollback(lake, latest) == latest + 2, "a rollback can be undone"
    assert entries(lake) == entries(lake, latest)
    assert operations.verify(lake).findings == ()


def test_plan_shows_changes_and_only_reads(lake: Lakehouse) -> None:
    target = create(lake, "a", "t1", "t2")
    alter(lake, "a", "t1")
    drop(lake, "a", "t2")
    create(lake, "b")
    before = content(lake)
    plan = operations.plan_rollback(lake, str(target))
    assert content(lake) == before
    expected = {Change("changed", "a", "t1"), Change("added", "a", "t2"), Change("removed", "b")}
    assert set(plan.changes) == expected
    assert (plan.base_version, plan.to_version, plan.only) == (target + 3, target, ())
    assert plan.to_dict()["digest"] == plan.digest
    assert plan.digest.startswith(f"{target + 3}-")
    assert "a.t2" in str(plan)
    assert "namespace b" in str(plan)
    fields = {"base_version", "to_version", "only", "changes", "damaged", "message", "undone_by", "digest"}
    assert set(plan.to_dict()) == fields


def test_rollback_keeps_current_lakehouse_definition(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    alter(lake, "a", "t")
    operations.plan_export(lake, "later-export").execute()
    lake.alter_definition(properties={"changed": "later"})
    exported = entries(lake, "later-export")
    definition = lake.snapshot().definition
    operations.rollback(lake, target)
    assert lake.snapshot().definition == definition
    assert [info.name for info in operations.list_exports(lake)] == ["later-export"]
    assert entries(lake, "later-export") == exported


def test_rollback_by_timestamp_and_by_export(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    operations.plan_export(lake, "kept", version=target).execute()
    drop(lake, "a")
    assert operations.plan_rollback(lake, "kept").to_version == target
    title = operations.plan_restore(lake, "kept").table().title
    assert title.startswith("Restore of ") and "export kept" in title
    created_at_ms = lake.snapshot(target).created_at_ms
    assert operations.plan_rollback(lake, timestamp=created_at_ms).to_version == target
    operations.rollback(lake, "kept")
    assert entries(lake) == entries(lake, target)


def test_rollback_without_changes_commits_nothing(lake: Lakehouse) -> None:
    latest = create(lake, "a", "t")
    before = content(lake)
    assert operations.rollback(lake, latest) == latest
    assert operations.rollback(lake, latest, namespaces=["a"]) == latest
    assert content(lake) == before
    plan = operations.plan_rollback(lake, latest)
    create(lake, "b")
    assert_rejected(lake, CommitConflictError, plan.execute)


def test_selected_namespaces_and_tables_are_rolled_back(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        for namespace in ("a", "b", "c.d"):
            txn.create_namespace(namespace)
            for name in ("t", "u.v"):
                txn.create_table(namespace, name, table())
    target = lake.latest_version()
    drop(lake, "a")
    for namespace in ("b", "c.d"):
        alter(lake, namespace, "t")
        alter(lake, namespace, "u.v")
    create(lake, "new", "t")
    latest = entries(lake)
    plan = operations.plan_rollback(lake, target, namespaces=["a"], tables=["b.u.v", "c.d.t"])
    assert plan.only == ("a", "b.u.v", "c.d.t")
    assert set(plan.changes) == {
        Change("added", "a"),
        Change("added", "a", "t"),
        Change("added", "a", "u.v"),
        Change("changed", "b", "u.v"),
        Change("changed", "c.d", "t"),
    }
    version = plan.execute().version
    keys = lake.snapshot().keys
    restored_keys = {keys.namespace_key("a"), keys.table_key("a", "t"), keys.table_key("a", "u.v")}
    restored_keys |= {keys.table_key("b", "u.v"), keys.table_key("c.d", "t")}
    assert entries(lake) == {**latest, **{key: entries(lake, target)[key] for key in restored_keys}}
    assert "rollback_from_root" not in lake.snapshot().root.system, "a partial rollback is an ordinary commit"
    assert next(iter(lake.history())).operation == "rollback"
    assert operations.rollback(lake, target, namespaces=["new"]) == version + 1
    assert not lake.snapshot().has_namespace("new")


def test_table_with_name_of_a_view_is_not_restored(lake: Lakehouse, lakes: Lakes) -> None:
    """Neither a rollback nor a restore of the table alone succeeds. Names within a version are unique, so the namespace
    can be rolled back.
    """
    create(lake, "views", "v")
    version_with_table = lake.latest_version()
    operations.plan_export(lake, "full", "full").execute()
    drop(lake, "views", "v")
    with lake.transaction() as txn:
        txn.alter_namespace("views", {f"{VIEW_PREFIX}v": "{}"})
    assert_rejected(
        lake, ObjectExistsError, lambda: operations.plan_rollback(lake, version_with_table, tables=["views.v"])
    )
    assert_rejected(lake, ObjectExistsError, lambda: operations.plan_restore(lake, "full", tables=["views.v"]))
    operations.plan_rollback(lake, version_with_table, namespaces=["views"]).execute()
    assert lake.snapshot().tables("views") == ["v"]
    assert views_in(lake.snapshot().namespace("views").properties) == []


def test_plan_rejects_table_without_namespace(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    drop(lake, "a")
    error = assert_rejected(
        lake, NamespaceNotFoundError, lambda: operations.plan_rollback(lake, target, tables=["a.t"])
    )
    assert "'a'" in str(error)
    operations.rollback(lake, target, namespaces=["a"])
    assert entries(lake) == entries(lake, target)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (InvalidInputError, {}),
        (InvalidInputError, {"to": 0, "timestamp": 1}),
        (VersionNotFoundError, {"to": 99}),
        (VersionNotFoundError, {"to": -1}),
        (VersionNotFoundError, {"timestamp": 0}),
        (ExportNotFoundError, {"to": "missing"}),
        (ExportNotFoundError, {"to": ""}),
        (NamespaceNotFoundError, {"to": 0, "namespaces": ["missing"]}),
        (TableNotFoundError, {"to": 0, "tables": ["a.missing"]}),
        (InvalidInputError, {"to": 0, "tables": ["without-dot"]}),
    ],
)
def test_invalid_targets_and_names_are_rejected(
    lake: Lakehouse, error: type[TrinityLakeError], arguments: dict[str, Any]
) -> None:
    create(lake, "a")
    assert_rejected(lake, error, lambda: operations.rollback(lake, **arguments))


def test_rollback_to_expired_or_sealed_version_fails(lake: Lakehouse) -> None:
    create(lake, "a", "t")
    create(lake, "b")
    plan = operations.plan_rollback(lake, 1)
    expire(lake, "1")
    error = assert_rejected(lake, VersionExpiredError, lambda: operations.rollback(lake, 1))
    assert "undelete" in str(error)
    assert_rejected(lake, VersionExpiredError, lambda: operations.rollback(lake, 1, namespaces=["b"]))
    assert_rejected(lake, VersionExpiredError, lambda: plan.execute(reapply=True))
    lake.alter_definition(expirations=())
    seal(lake, 1)
    assert_rejected(lake, VersionExpiredError, lambda: operations.rollback(lake, 1))
    lake.alter_definition(exported_snapshots={"foreign": root_path(1)})
    assert_rejected(lake, VersionExpiredError, lambda: operations.rollback(lake, "foreign"))


def test_export_of_expired_version_can_be_rolled_back_to(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    operations.plan_export(lake, "kept").execute()
    create(lake, "b")
    expire(lake, str(target))
    operations.rollback(lake, "kept", namespaces=["b"])
    operations.rollback(lake, "kept")
    assert set(objects(lake.snapshot())) == {("a",), ("a", "t")}


def _definition_of(lake: Lakehouse, version: int, namespace: str, name: str | None) -> str:
    snapshot = lake.snapshot(version)
    key = snapshot.keys.namespace_key(namespace) if name is None else snapshot.keys.table_key(namespace, name)
    location = snapshot.entry(key)
    assert location is not None
    return location


@pytest.mark.parametrize("file_kind", ["namespace", "table", "node", "metadata"])
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("is_partial", [False, True])
def test_missing_file_is_reported_and_nothing_is_committed(
    lakes: Lakes, file_kind: str, is_planned: bool, is_partial: bool
) -> None:
    lake = lakes.local(order=3, **small_sizes(3))
    append_rows(lake)
    long_message = "m" * 3_400  # fills the root, so that nodes are written
    with lake.transaction(message=long_message) as txn:
        txn.create_namespace("big")
        for number in range(24):
            txn.create_table("big", f"t{number}", table())
    target = lake.latest_version()
    with lake.transaction(message=long_message) as txn:
        for number in range(24):
            txn.alter_table("big", f"t{number}", table(changed="yes"))
    drop(lake, "big")
    drop(lake, "ns")
    namespaces = ["big", "ns"] if is_partial else None
    plan = operations.plan_rollback(lake, target, namespaces)
    snapshot = lake.snapshot(target)
    if file_kind == "node":
        nodes = {visited.location for visited in walk(lake.files.nodes, snapshot.root, snapshot.location)}
        node_paths = {
            visited.location for visited in walk(lake.files.nodes, lake.snapshot().root, lake.snapshot().location)
        }
        path = min(nodes - node_paths - {snapshot.location})
    elif file_kind == "metadata":
        path = snapshot.table("ns", "t").format_properties["metadata_location"]
    else:
        path = _definition_of(lake, target, "big", None if file_kind == "namespace" else "t3")
    saved = lake.storage.read(path)
    lake.storage.delete(path)
    action = plan.execute if is_planned else lambda: operations.rollback(lake, target, namespaces)
    error = assert_rejected(lake, FileMissingError, action)
    assert error.path == path
    assert path in str(error)
    lake.storage.create(path, saved)
    action()
    assert entries(lake) == entries(lake, target)


@pytest.mark.local_only("uses a local table root")
@pytest.mark.parametrize("kind", ["metadata", "manifest list", "manifest", "data"])
def test_missing_external_file_fails_rollback(lakes: Lakes, tmp_path: Path, kind: str) -> None:
    lake = lakes.local(table_root=f"file://{tmp_path}/outside")
    target = append_rows(lake)
    definition = lake.snapshot().table("ns", "t")
    uris = {str(file.kind): file.location for file in files_of(definition, StorageFileIO.on(lake.storage)) if file.live}
    drop(lake, "ns")
    plan = operations.plan_rollback(lake, target)
    file, saved_path = Path(uris[kind].removeprefix("file://")), tmp_path / "saved"
    file.rename(saved_path)
    for action in (plan.execute, lambda: operations.rollback(lake, target), lambda: plan.execute(reapply=True)):
        error = assert_rejected(lake, FileMissingError, action)
        assert error.path == uris[kind]
        assert f"version {target}" in str(error)
    saved_path.rename(file)
    plan.execute()
    assert entries(lake) == entries(lake, target)


@pytest.mark.parametrize("namespaces", [None, ["ns"]])
def test_external_files_are_checked_with_options_of_the_lakehouse(moto: S3Server, namespaces: list[str] | None) -> None:
    bucket = moto.make_bucket()
    root = moto.fresh_root()
    try:
        lake = Lakehouse.create(root, moto.storage_options, table_root=f"s3://{bucket}/")
        target = append_rows(lake)
        drop(lake, "ns")
        assert operations.rollback(lake, target, namespaces) == lake.latest_version()
        assert entries(lake) == entries(lake, target)
        drop(lake, "ns")
        moto.delete_all(f"s3://{bucket}/")
        assert_rejected(lake, FileMissingError, lambda: operations.rollback(lake, target, namespaces))
    finally:
        moto.drop_bucket(bucket)
        moto.delete_all(root)


def test_files_of_external_table_are_not_checked(lakes: Lakes) -> None:
    lake = lakes.memory()
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        location = {"metadata_location": "missing/metadata.json"}
        for table_type in ("EXTERNAL", "FEDERATED"):
            txn.create_table("ns", table_type, replace(table(), table_type=table_type, format_properties=location))
    target = lake.latest_version()
    drop(lake, "ns")
    operations.rollback(lake, target)
    assert entries(lake) == entries(lake, target)


def test_corrupt_definition_fails_rollback(lakes: Lakes) -> None:
    lake = lakes.memory()
    target = create(lake, "a", "t")
    drop(lake, "a", "t")
    path = _definition_of(lake, target, "a", "t")
    saved = lake.storage.read(path)
    lake.storage.write(path, b"\xff\xff")
    assert assert_rejected(lake, CorruptFileError, lambda: operations.rollback(lake, target)).path == path
    lake.storage.write(path, saved)


def test_concurrent_commit_is_a_conflict(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    alter(lake, "a", "t")
    plan = operations.plan_rollback(lake, target)
    alter(lake, "a", "t")
    error = assert_rejected(lake, CommitConflictError, plan.execute)
    assert "reapply" in str(error)
    create(lake, "b")
    for namespaces in (None, ["a"]):
        lake_with_interference = with_interference(lake, lambda: alter(lake, "a", "t"))
        with pytest.raises(CommitConflictError):
            operations.rollback(lake_with_interference, target, namespaces)
        assert next(iter(lake.history())).operation == "alter-table"


def test_reapply_rolls_back_intermediate_commits(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    alter(lake, "a", "t")
    plan = operations.plan_rollback(lake, target)
    create(lake, "b", "t")
    plan.execute(reapply=True)
    assert entries(lake) == entries(lake, target)
    alter(lake, "a", "t")
    lake_with_interference = with_interference(lake, lambda: create(lake, "c", "t"))
    version = operations.rollback(lake_with_interference, target, reapply=True)
    assert entries(lake) == entries(lake, target)
    assert lake.snapshot().root.system["rollback_from_root"] == root_path(version - 1)
    assert next(iter(lake.history())).counts == {"changed": 3}, "counted relative to the version before the rollback"


def test_partial_rollback_does_not_conflict_with_other_commits(lake: Lakehouse) -> None:
    target = create(lake, "a", "t")
    alter(lake, "a", "t")
    lake_with_interference = with_interference(lake, lambda: create(lake, "b", "t"))
    operations.rollback(lake_with_interference, target, ["a"])
    assert lake.snapshot().has_table("b", "t")
    assert entries(lake, target).items() <= entries(lake).items()


@pytest.mark.parametrize("selection", [{"namespaces": ["a"]}, {"tables": ["a.t", "a.u"]}], ids=["namespace", "tables"])
def test_selected_objects_are_rolled_back_atomically(lake: Lakehouse, selection: dict[str, list[str]]) -> None:
    """A concurrent change of a selected table is a conflict even if the plan does not change the table."""
    target = create(lake, "a", "t", "u")
    alter(lake, "a", "t")
    lake_with_interference = with_interference(lake, lambda: alter(lake, "a", "u"))
    with pytest.raises(CommitConflictError, match=r"a\.u"):
        operations.rollback(lake_with_interference, target, **selection)
    assert next(iter(lake.history())).operation == "alter-table"
    lake_with_interference = with_interference(lake, lambda: alter(lake, "a", "u"))
    operations.rollback(lake_with_interference, target, **selection, reapply=True)
    assert entries(lake) == entries(lake, target)


@pytest.mark.parametrize("is_partial", [False, True])
def test_target_that_expires_before_commit_fails(lake: Lakehouse, is_partial: bool) -> None:
    target = create(lake, "a", "t")
    alter(lake, "a", "t")
    lake_with_interference = with_interference(lake, lambda: expire(lake, str(target)))
    with pytest.raises(VersionExpiredError):
        operations.rollback(lake_with_interference, target, ["a"] if is_partial else None, reapply=True)
    operations.plan_export(lake, "kept", version=target + 1).execute()
    drop(lake, "a")
    lake_with_interference = with_interference(lake, lambda: operations.drop_export(lake, "kept"))
    with pytest.raises(ExportNotFoundError):
        operations.rollback(lake_with_interference, "kept", ["a"] if is_partial else None, reapply=True)


@pytest.mark.parametrize("is_partial", [False, True])
def test_only_approved_plan_is_executed(lake: Lakehouse, is_partial: bool) -> None:
    target = create(lake, "a", "t")
    alter(lake, "a", "t")
    namespaces = ["a"] if is_partial else None
    plan = operations.plan_rollback(lake, target, namespaces)
    assert plan.digest == operations.plan_rollback(lake, target, namespaces).digest
    assert plan.digest != operations.plan_rollback(lake, 0, namespaces).digest
    assert plan.digest != operations.plan_rollback(lake, target, tables=["a.t"]).digest
    assert_rejected(lake, PlanChangedError, lambda: plan.execute("nonsense"))
    assert_rejected(lake, PlanChangedError, lambda: plan.execute(""))
    create(lake, "b")
    assert_rejected(lake, PlanChangedError, lambda: plan.execute(plan.digest))
    assert_rejected(lake, PlanChangedError, lambda: plan.execute(plan.digest, reapply=True))
    repeated = operations.plan_rollback(lake, target, namespaces)
    plan.execute(repeated.digest)
    assert entries(lake, target).items() <= entries(lake).items()


def test_rollback_to_full_root_does_not_exceed_node_size_limit(lake: Lakehouse) -> None:
    """A rollback to a full root with the longest message must not exceed the size limit of node files."""
    create(lake, "ns")
    for number in range(30):
        with lake.transaction() as txn:
            txn.create_table("ns", f"t{number}", table())
    targets = range(2, lake.latest_version(), 3)
    limit_bytes = lake.snapshot().definition.node_file_max_size_bytes
    for target in targets:
        operations.rollback(lake, target, message="m" * 3_500)
        assert entries(lake) == entries(lake, target)
        assert lake.storage.stat(lake.snapshot().location).size_bytes <= limit_bytes
    assert operations.verify(lake).findings == ()


def test_requests_do_not_grow_with_shared_content(lake: Lakehouse) -> None:
    """The number of requests does not grow with the content that both versions share."""
    target = create(lake, "a", *(f"t{number}" for number in range(40)))
    alter(lake, "a", "t1")
    faulty_storage: Storage = FaultyStorage(lake.storage)
    operations.rollback(Lakehouse(faulty_storage), target)
    assert isinstance(faulty_storage, FaultyStorage)
    assert len(faulty_storage.log) < 40


def test_requests_grow_only_with_tree_height(lakes: Lakes) -> None:
    """Nodes that both versions share are not read."""
    lake = lakes.memory(order=8, **small_sizes(8))
    create(lake, "ns", *(f"t{number:03}" for number in range(600)))
    operations.compact(lake)
    alter(lake, "ns", "t300")
    height = lake.snapshot().tree_shape().height
    meter = MeteredStorage(lake.storage)
    operations.rollback(Lakehouse(meter), lake.latest_version() - 1)
    assert height >= 3
    assert meter.snapshot().total <= 2 * height + 10


def test_missing_root_blocks_rollback_and_namespace_drop(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "damaged"), {"fsync": "false"})
    for number in range(4):
        create(lake, f"n{number}")
    lake.storage.delete(root_path(2))
    lake.storage.delete(HINT_PATH)
    lake = Lakehouse(lake.storage)  # does not know the latest version, which is after the gap
    for make_plan in (lambda: operations.plan_rollback(lake, 0), lambda: operations.plan_drop_namespace(lake, "n0")):
        with pytest.raises(CorruptFileError) as raised:
            make_plan()
        assert raised.value.path == root_path(2)
    assert not lake.storage.exists(root_path(2))


def test_rollback_requires_every_table_file(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "damaged"), {"fsync": "false"})
    target = append_rows(lake)
    drop(lake, "ns", "t")
    definition = lake.snapshot(target).table("ns", "t")
    locations_by_kind = {
        str(file.kind): file.location for file in files_of(definition, StorageFileIO.on(lake.storage)) if file.live
    }
    assert {"metadata", "manifest list", "manifest", "data"} <= locations_by_kind.keys()
    latest = lake.latest_version()
    for path in locations_by_kind.values():
        data = lake.storage.read(path)
        lake.storage.delete(path)
        with pytest.raises(FileMissingError, match=f"cannot go back to version {target}") as raised:
            operations.rollback(lake, target)
        assert raised.value.path == path
        lake.storage.create(path, data)
    assert lake.latest_version() == latest
    operations.rollback(lake, target)
    assert lake.snapshot().has_table("ns", "t")
