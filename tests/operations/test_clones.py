"""Test clones of lakehouses."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from tests.clock import AgingStorage
from tests.faults import FaultyStorage
from tests.lakes import Lakes, allowing, objects
from tests.operations.aging import DAY_MS, Aging, keeping
from tests.operations.changes import append_rows, create, drop, expire, overwrite_rows
from tests.operations.copies import copy_lakehouse, files, rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CommitConflictError,
    ExportExistsError,
    ExportNotFoundError,
    InvalidInputError,
    InvalidNameError,
    LakehouseExistsError,
    LocationNotAllowedError,
    MaintenanceBlockedError,
    NamespaceNotFoundError,
    PlanChangedError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.operations import CloneInfo, CloneState

pytestmark = [pytest.mark.usefixtures("targets"), pytest.mark.usefixtures("fixed_requests")]
NAMES = ("clone-a", "clone-b", "clone-c")


@pytest.fixture
def targets(lakes: Lakes) -> None:
    for name in NAMES:
        lakes.named_root(name)  # deleted at the end of the test


def root_of(lakes: Lakes, name: str = "clone-a") -> str:
    return lakes.named_root(name)


def create_clone(lakes: Lakes, lake: Lakehouse, name: str = "clone-a", **options: object) -> Lakehouse:
    operations.plan_clone(lake, root_of(lakes, name), **options).execute()  # type: ignore[arg-type]
    return Lakehouse.open(root_of(lakes, name))


def with_parent_clock(clone: Lakehouse, parent: Aging) -> Lakehouse:
    """Return a clone whose storage uses the parent's clock."""
    return Lakehouse(AgingStorage(clone.storage, parent.clock.time_ms))


def get_only_clone(lake: Lakehouse) -> CloneInfo:
    (info,) = operations.list_clones(lake)
    return info


@pytest.fixture
def parent(aging: Aging) -> Aging:
    append_rows(aging.lake)
    return aging


def test_clone_has_all_objects_and_writes_below_its_root(parent: Aging, lakes: Lakes) -> None:
    before = files(parent.lake)
    clone = create_clone(lakes, parent.lake)
    after = files(parent.lake)
    assert not [path for path in after - before if path.startswith("tables/")]
    assert not [path for path in files(clone) if path.startswith("tables/")]
    assert objects(clone.snapshot()) == objects(parent.lake.snapshot())
    append_rows(clone)
    create(clone, "own", "t")
    drop(clone, "n0")
    assert rows(clone) == [1, 1, 2, 2, 3, 3]
    assert rows(parent.lake) == [1, 2, 3]
    assert files(parent.lake) == after
    assert operations.verify(clone).is_clean
    assert operations.verify(parent.lake).is_clean
    info = get_only_clone(parent.lake)
    assert (info.state, info.name, info.versions) == (CloneState.ACTIVE, info.root.rstrip("/").split("/")[-1], 3)
    assert info.own_bytes == sum(file.size_bytes for file in clone.storage.list())


def test_clone_sends_constant_number_of_requests(parent: Aging, lakes: Lakes) -> None:
    def requests(name: str) -> tuple[int, int]:
        cost = operations.plan_clone(parent.lake, root_of(lakes, name)).execute().cost
        return cost.total_requests, cost.bytes_read

    first = requests("clone-a")
    with parent.lake.transaction() as txn:
        txn.create_namespace("many")
    create(parent.lake, "more", *(f"t{number:03}" for number in range(200)))
    second = requests("clone-b")
    assert second[0] <= first[0] + 2
    assert second[1] < 2 * first[1]


def test_parent_keeps_cloned_version_until_clone_is_dropped(parent: Aging, lakes: Lakes) -> None:
    version = parent.lake.latest_version()
    clone = create_clone(lakes, parent.lake)
    overwrite_rows(parent.lake, "ns.t")
    drop(parent.lake, "n1")
    operations.compact(parent.lake)
    operations.plan_trim_tables(parent.lake, keeping(1)).execute()
    parent.clean_up()
    assert parent.lake.snapshot(version).version == version
    with pytest.raises(VersionExpiredError):
        parent.lake.snapshot(version - 1)
    clone = Lakehouse.open(clone.root)
    assert rows(clone) == [1, 2, 3]
    assert clone.snapshot().has_namespace("n1")
    assert operations.verify(clone).is_clean

    operations.drop_clone(parent.lake, get_only_clone(parent.lake).name)
    parent.clean_up()
    with pytest.raises(VersionExpiredError):
        parent.lake.snapshot(version)
    assert operations.list_clones(parent.lake) == []


def test_clone_deletes_only_its_own_files(parent: Aging, lakes: Lakes) -> None:
    clock = AgingStorage(create_clone(lakes, parent.lake).storage, parent.clock.time_ms)
    clone = Aging(Lakehouse(clock), clock)
    contents = {path: parent.lake.storage.read(path) for path in files(parent.lake)}
    for _ in range(2):
        overwrite_rows(clone.lake, "ns.t")
        operations.plan_compact_tables(clone.lake, min_input_files=2).execute()
        operations.plan_trim_tables(clone.lake, keeping(1)).execute()
        operations.compact(clone.lake)
        clone.clean_up()
    assert rows(clone.lake) == [1, 2, 3]
    assert {path: parent.lake.storage.read(path) for path in files(parent.lake)} == contents
    assert operations.verify(clone.lake).is_clean
    assert get_only_clone(parent.lake).state == CloneState.ACTIVE


def test_time_travel_before_the_clone_reads_the_parent(parent: Aging, lakes: Lakes) -> None:
    before = parent.lake.snapshot()
    parent.clock.time_ms += 10
    create(parent.lake, "later")
    parent.clock.time_ms += 10
    clone = create_clone(lakes, parent.lake, version=before.version)
    create(with_parent_clock(clone, parent), "own")
    assert clone.snapshot(timestamp=before.created_at_ms).version == before.version
    assert clone.snapshot("parent@2").version == 2
    # Later commits of the parent are not part of the clone's history.
    cloned_at_ms = clone.snapshot(0).created_at_ms
    snapshot = clone.snapshot(timestamp=cloned_at_ms - 1)
    assert not snapshot.has_namespace("later")
    with pytest.raises(VersionNotFoundError):
        clone.snapshot(f"parent@{before.version + 1}")
    with pytest.raises(VersionNotFoundError):
        clone.snapshot(timestamp=1)
    with pytest.raises(ExportNotFoundError):
        parent.lake.snapshot("parent@2")


def test_rollback_to_version_before_the_clone_fails(parent: Aging, lakes: Lakes) -> None:
    lake = parent.lake
    before = lake.latest_version()
    create(lake, "later", "t")
    drop(lake, "n0")
    clone = create_clone(lakes, lake)
    create(with_parent_clock(clone, parent), "own")
    for clone_version, expected in (
        (0, {("added", "later", None), ("added", "later", "t")}),
        (1, {("added", "own", None)}),
    ):
        change = clone.diff(f"parent@{before}", clone_version)
        changes = {(item.kind, item.namespace, item.table) for item in change}
        assert expected <= changes
        assert {result[1] for result in changes if result[0] == "removed"} == {"n0"}
        assert len(changes) == len(lake.diff(before, before + 2)) + clone_version
        reverse_changes = clone.diff(clone_version, f"parent@{before}")
        assert {change.namespace for change in reverse_changes if change.kind == "added"} == {"n0"}
    assert clone.diff(f"parent@{before}", f"parent@{before + 1}") == lake.diff(before, before + 1)
    assert clone.diff(f"parent@{before + 2}", 0) == []
    for target in ({"to": f"parent@{before}"}, {"timestamp": lake.snapshot(before).created_at_ms}):
        with pytest.raises(InvalidInputError):
            operations.plan_rollback(clone, **target)  # type: ignore[arg-type]


def test_clone_cannot_read_a_parent_that_does_not_record_it(parent: Aging, lakes: Lakes) -> None:
    """A lakehouse that claims to be a clone must not read other roots, whose names can be guessed."""
    while lakes.storage("clone").now_ms() <= parent.lake.snapshot(1).created_at_ms:
        time.sleep(0.05)  # some storages have a clock with a resolution of seconds
    clone = create_clone(lakes, parent.lake)
    forged = lakes.memory("forged")
    forged.alter_definition(parent=clone.snapshot().definition.parent)
    copy = copy_lakehouse(clone, lakes.storage("clone-b"))
    for lake in (forged, copy):
        with pytest.raises(LocationNotAllowedError):
            lake.snapshot("parent@1")
        with pytest.raises(LocationNotAllowedError):
            lake.snapshot(timestamp=parent.lake.snapshot(1).created_at_ms)
    allowed = Lakehouse(copy.storage, {"allowed_roots": parent.lake.root})
    assert allowed.snapshot("parent@1").version == 1
    assert rows(copy) == [1, 2, 3]
    operations.drop_clone(parent.lake, get_only_clone(parent.lake).name)
    with pytest.raises(LocationNotAllowedError):
        clone.snapshot("parent@1")


def test_clone_record_gives_no_access_to_another_lakehouse(parent: Aging, lakes: Lakes) -> None:
    """A client with write access to the parent must not cause a drop to delete another lakehouse."""
    other = lakes.memory("other")
    create(other, "precious", "t")
    other_files = files(other)
    create_clone(lakes, parent.lake)
    definition = parent.lake.snapshot().definition
    records = tuple(
        replace(export, target_uri=other.root) if export.clone_id else export for export in definition.exports
    )
    parent.lake.alter_definition(exports=records)
    assert get_only_clone(parent.lake).state == CloneState.MISSING
    plan = operations.plan_drop_clone(parent.lake, get_only_clone(parent.lake).name, delete_files=True)
    assert (plan.files, plan.clone_version) == (0, None)
    plan.execute()
    assert files(other) == other_files


def test_drop_with_files_deletes_all_files_of_the_clone(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake)
    append_rows(clone)
    operations.verify(clone, incremental=True)
    operations.plan_export(clone, "kept").execute()
    clone.storage.create("tables/of-others/file", b"not ours")
    clone.storage.create("readme", b"not ours")
    before = files(parent.lake)
    plan = operations.plan_drop_clone(parent.lake, get_only_clone(parent.lake).name, delete_files=True)
    assert plan.left == 2
    # An interrupted drop recognizes the remaining files of a folder by its owner file.
    (owner,) = [number for number, stage in enumerate(plan.stages) if any("_owner.json" in path for path in stage)]
    assert not [path for stage in plan.stages[owner:] for path in stage if "/data/" in path or "/metadata/" in path]
    report = plan.execute(plan.digest)
    assert (report.files, report.is_complete) == (plan.files, True)
    assert files(clone) == {"tables/of-others/file", "readme"}
    assert operations.list_clones(parent.lake) == []
    assert not [path for path in before - files(parent.lake) if not path.startswith("_ops/export-")]
    assert operations.verify(parent.lake).findings == ()


def test_drop_fails_after_a_commit_in_the_clone(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake)
    plan = operations.plan_drop_clone(parent.lake, get_only_clone(parent.lake).name, delete_files=True)
    append_rows(clone)
    with pytest.raises(PlanChangedError):
        plan.execute(plan.digest)
    with pytest.raises(CommitConflictError):
        plan.execute()
    assert rows(Lakehouse.open(clone.root)) == [1, 1, 2, 2, 3, 3]


def test_missing_clone_is_listed_and_can_be_dropped(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake)
    lakes.drop(clone.root)
    assert get_only_clone(parent.lake).state == CloneState.MISSING
    plan = operations.plan_drop_clone(parent.lake, get_only_clone(parent.lake).name, delete_files=True)
    assert "does not exist" in str(plan)
    plan.execute()
    assert operations.list_clones(parent.lake) == []


def test_drop_deletes_definition_of_clone_without_roots(parent: Aging, lakes: Lakes) -> None:
    """The definition is deleted last, after the latest root: a drop can be interrupted in between."""
    clone = create_clone(lakes, parent.lake)
    other = lakes.memory("other").snapshot()
    definition_path = clone.snapshot().definition_location
    for path in files(clone) - {definition_path}:
        clone.storage.delete(path)
    clone.storage.create(other.definition_location, other.files.storage.read(other.definition_location))
    plan = operations.plan_drop_clone(parent.lake, get_only_clone(parent.lake).name, delete_files=True)
    assert (plan.files, plan.clone_version) == (1, None)
    plan.execute()
    assert files(clone) == {other.definition_location}


def test_overdue_clone_is_kept_until_it_is_dropped(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake, retain_for=DAY_MS)
    append_rows(clone)
    assert get_only_clone(parent.lake).state == CloneState.ACTIVE
    overwrite_rows(parent.lake, "ns.t")
    kept_version = parent.lake.latest_version()
    operations.plan_refresh(parent.lake, get_only_clone(parent.lake).name, ours=["ns.t"]).execute()
    overwrite_rows(parent.lake, "ns.t")
    parent.later()
    assert get_only_clone(parent.lake).state == CloneState.OVERDUE
    plan = operations.plan_expiration(parent.lake, keeping(1))
    name = get_only_clone(parent.lake).name
    assert plan.exports == ()
    assert {verdict.reason for verdict in plan.verdicts if "clone" in verdict.reason} == {
        f"pinned by clone {name!r}",
        f"pinned by clone {f'{name}@{kept_version}'!r}",
    }
    plan.execute()
    parent.clean_up()
    assert get_only_clone(parent.lake).state == CloneState.OVERDUE
    assert rows(clone) == [1, 1, 2, 2, 3, 3]
    assert operations.verify(clone, deep=True).is_clean
    operations.drop_clone(parent.lake, name, delete_files=True)
    assert operations.list_clones(parent.lake) == []


def test_clone_contains_only_selected_namespaces(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake, namespaces=["ns", "n1"])
    assert clone.snapshot().namespaces() == ["n1", "ns"]
    assert rows(clone) == [1, 2, 3]
    append_rows(clone)
    assert operations.verify(clone).is_clean
    with pytest.raises(NamespaceNotFoundError):
        operations.plan_clone(parent.lake, root_of(lakes, "clone-b"), namespaces=["nowhere"])


def test_clone_can_start_at_an_export_or_a_timestamp(parent: Aging, lakes: Lakes) -> None:
    version = parent.lake.latest_version()
    operations.plan_export(parent.lake, "kept", "full").execute()
    create(parent.lake, "later")
    clone = create_clone(lakes, parent.lake, version="kept")
    assert not clone.snapshot().has_namespace("later")
    operations.drop_export(parent.lake, "kept")
    parent.clean_up()
    assert rows(Lakehouse.open(clone.root)) == [1, 2, 3]
    created_at_ms = parent.lake.snapshot(version).created_at_ms
    other_clone = create_clone(lakes, parent.lake, "clone-b", timestamp=created_at_ms)
    assert not other_clone.snapshot().has_namespace("later")
    expire(parent.lake, "2")
    with pytest.raises(VersionExpiredError):
        operations.plan_clone(parent.lake, root_of(lakes, "clone-c"), version=2)


def test_clone_can_be_exported_in_full(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake)
    append_rows(clone)
    operations.plan_export(clone, "kept").execute()
    operations.plan_export(clone, "away", "full", target=root_of(lakes, "clone-b")).execute()
    exported_lake = Lakehouse.open(root_of(lakes, "clone-b"))
    assert exported_lake.snapshot().definition.parent is None
    lakes.drop(clone.root)
    operations.drop_clone(parent.lake, get_only_clone(parent.lake).name)
    assert rows(exported_lake) == [1, 1, 2, 2, 3, 3]


def test_drop_fails_while_another_lakehouse_reads_the_clone(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake)
    operations.plan_export(clone, "more", target=root_of(lakes, "clone-b")).execute()
    with pytest.raises(MaintenanceBlockedError):
        operations.plan_drop_clone(parent.lake, get_only_clone(parent.lake).name)


def test_clone_rejects_invalid_sources_and_targets(parent: Aging, lakes: Lakes) -> None:
    lake = parent.lake
    clone = create_clone(lakes, lake, name="clone-a")
    target = root_of(lakes, "clone-b")
    with pytest.raises(InvalidInputError):
        operations.plan_clone(clone, target)
    with pytest.raises(ExportExistsError):
        operations.plan_clone(lake, target, get_only_clone(lake).name)
    with pytest.raises(LakehouseExistsError):
        operations.plan_clone(lake, clone.root, "again")
    with pytest.raises(InvalidInputError):
        operations.plan_clone(lake, f"{lake.root}below/")
    with pytest.raises(InvalidNameError):
        operations.plan_clone(lake, target, "12")
    with pytest.raises(ExportNotFoundError):
        operations.plan_drop_clone(lake, "nothing")


def test_clone_keeps_lakehouse_created_concurrently_at_its_target(parent: Aging, lakes: Lakes) -> None:
    plan = operations.plan_clone(parent.lake, root_of(lakes), "mine")
    other = Lakehouse.create(root_of(lakes))
    create(other, "theirs")
    with pytest.raises(LakehouseExistsError):
        plan.execute()
    assert other.snapshot().namespaces() == ["theirs"]
    assert get_only_clone(parent.lake).state == CloneState.INCOMPLETE
    operations.drop_clone(parent.lake, "mine", delete_files=True)
    assert Lakehouse.open(root_of(lakes)).snapshot().namespaces() == ["theirs"]


def test_export_operations_reject_clones(parent: Aging, lakes: Lakes) -> None:
    create_clone(lakes, parent.lake)
    name = get_only_clone(parent.lake).name
    for operation in (operations.drop_export, operations.restore_export, operations.verify_export):
        with pytest.raises(InvalidInputError):
            operation(parent.lake, name)
    parent.later()
    assert operations.plan_prune_exports(parent.lake, "*", keeping(1)).is_empty
    assert operations.list_exports(parent.lake) == []
    assert parent.lake.snapshot(name).version == 0
    assert len(operations.list_clones(allowing(parent.lake))) == 1


def test_unreadable_clone_is_listed(parent: Aging, lakes: Lakes) -> None:
    clone = create_clone(lakes, parent.lake)
    path = clone.snapshot().definition_location
    clone.storage.write(path, b"damaged")
    info = get_only_clone(parent.lake)
    assert info.state == CloneState.UNREADABLE
    assert path in (info.reason or "") or "protobuf" in (info.reason or "")


def test_clone_reads_and_writes_no_table_files(parent: Aging, lakes: Lakes) -> None:
    logged_storage = FaultyStorage(parent.lake.storage, [])
    operations.plan_clone(Lakehouse(logged_storage), root_of(lakes)).execute()
    assert logged_storage.log
    assert not [request for request in logged_storage.log if request.path.startswith("tables/")]


def test_lakehouse_with_table_root_cannot_be_cloned(lakes: Lakes, parent: Aging) -> None:
    lake, table_root_uri = parent.lake, root_of(lakes, "clone-b")
    create_clone(lakes, lake)
    empty = Lakehouse.create(root_of(lakes, "clone-c"), table_root=table_root_uri)
    with pytest.raises(InvalidInputError):
        operations.plan_clone(empty, f"{table_root_uri}clone/", name="of-empty")
    with lake.transaction() as txn:
        for namespace in txn.namespaces():
            txn.drop_namespace(namespace, cascade=True)
    lake.alter_definition(table_root=table_root_uri)
    for operation in (operations.compare, operations.plan_promotion, operations.plan_refresh):
        with pytest.raises(InvalidInputError):
            operation(lake, get_only_clone(lake).name)  # type: ignore[operator]
