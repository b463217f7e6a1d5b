"""Lakehouses: creating, opening, time travel, history, diff and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from tests.clock import ClockStorage
from tests.lakes import Lakes, listed, seal, table, unreferenced_paths
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import (
    CommitConflictError,
    CorruptFileError,
    ExportNotFoundError,
    FileMissingError,
    InvalidDefinitionError,
    InvalidInputError,
    InvalidLocationError,
    LakehouseExistsError,
    LakehouseNotFoundError,
    TransactionExpiredError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import (
    ExpirationBatch,
    ExpirationState,
    ExportLevel,
    ExportRecord,
    IsolationLevel,
    LakehouseDef,
)
from trinitylake_ops.format.file_names import HINT_PATH, new_export_root_path, root_path
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.versions.commit_info import MAX_USER_CHARS, acting_for_run
from trinitylake_ops.versions.history import Change, diff_snapshots

pytestmark = pytest.mark.usefixtures("fixed_requests")


def add_root(lake: Lakehouse, version: int, **system: str | None) -> None:
    """Write a root as another program would, with system rows of the previous root and additional ones."""
    previous = decode_node(lake.storage.read(root_path(version - 1)), root_path(version - 1))
    copied = {name: previous.system[name] for name in ("lakehouse_def", "created_at_millis")}
    rows = {**copied, "previous_root": root_path(version - 1), **system}
    node = replace(previous, system={name: value for name, value in rows.items() if value is not None})
    first = decode_node(lake.storage.read(root_path(0)), root_path(0)).system["lakehouse_def"]
    definition = LakehouseDef.from_bytes(lake.storage.read(first), first)
    lake.storage.create(root_path(version), encode_node(node, definition.order))


# Creating and opening


def test_create_writes_version_zero_definition_and_hint(lakes: Lakes) -> None:
    lake = lakes.memory(order=5, properties={"owner": "me"}, isolation_level=IsolationLevel.SERIALIZABLE)
    snapshot = lake.snapshot()
    assert (snapshot.version, snapshot.namespaces(), snapshot.definition.order) == (0, [], 5)
    assert snapshot.definition.properties == {"owner": "me"}
    assert snapshot.definition.isolation_level is IsolationLevel.SERIALIZABLE
    assert listed(lake.storage) == {root_path(0), HINT_PATH, snapshot.definition_location}
    assert set(snapshot.root.system) == {"lakehouse_def", "created_at_millis", "commit_id", "commit_info"}
    assert [info.operation for info in lake.history()] == ["init"]


def test_create_rejects_existing_lakehouse(lakes: Lakes) -> None:
    lake = lakes.memory()
    lake.storage.delete(HINT_PATH)
    before = listed(lake.storage)
    with pytest.raises(LakehouseExistsError):
        Lakehouse.create(lake.root, lake.storage_options)
    assert listed(lake.storage) == before


@pytest.mark.parametrize("name", ["_" + "0" * 64 + ".ipc", "_" + "0" * 32 + ".ipc", "_" + "01" * 32 + ".arrow"])
def test_create_rejects_roots_in_another_naming(name: str) -> None:
    storage = MemoryStorage("memory://foreign-naming/")
    storage.write(name, b"root of another program")
    try:
        with pytest.raises(LakehouseExistsError):
            Lakehouse.create(storage.root, storage=storage)
        assert listed(storage) == {name}
    finally:
        drop_memory_root(storage.root)


@pytest.mark.parametrize(
    "fields",
    [
        {"order": 2},
        {"order": "four"},
        {"order": -1},
        {"order": 2**40},
        {"no_such_setting": 1},
        {"major_version": 1},
        {"node_file_max_size_bytes": 10_000},
        {"properties": {"a": 1}},
        {"properties": "text"},
        {"isolation_level": "nonsense"},
        {"isolation_level": None, "order": 1},
        {"txn_ttl_millis": 0},
        {"exports": ("x",)},
    ],
)
def test_invalid_settings_are_rejected_before_any_write(fields: dict[str, Any]) -> None:
    storage = MemoryStorage("memory://bad-settings/")
    with pytest.raises(InvalidDefinitionError):
        Lakehouse.create(storage.root, storage=storage, **fields)
    assert listed(storage) == set()


def test_settings_are_normalized(lakes: Lakes) -> None:
    lake = lakes.memory(order=None, isolation_level=1)
    definition = lake.snapshot().definition
    assert (definition.order, definition.isolation_level) == (128, IsolationLevel.SERIALIZABLE)
    with pytest.raises(InvalidDefinitionError):
        lake.alter_definition(order=64)
    assert lake.alter_definition(order=None) == 0, "no change, no commit"


@pytest.mark.parametrize("root", ["", "relative", "s3:///x", "/a/../b", "ftp://host/lake", "file://host/lake"])
def test_invalid_roots_are_rejected(root: str) -> None:
    for call in (Lakehouse.create, Lakehouse.open):
        with pytest.raises(InvalidLocationError):
            call(root)


def test_open_fails_for_folder_without_lakehouse(lakes: Lakes) -> None:
    with pytest.raises(LakehouseNotFoundError):
        Lakehouse.open(str(lakes.folder / "missing"))
    assert not (lakes.folder / "missing").exists(), "open does not create the folder"


@pytest.mark.parametrize("size_bytes", [0, 10, 500, -1])
def test_truncated_root_is_reported_as_corrupt(lakes: Lakes, size_bytes: int) -> None:
    lake = lakes.memory("broken")
    data = lake.storage.read(root_path(0))
    lake.storage.write(root_path(0), data[:size_bytes])
    with pytest.raises(CorruptFileError, match=root_path(0)):
        lake.snapshot()
    lake.storage.write(root_path(0), data)


def test_pointer_to_invalid_location_is_corrupt(lakes: Lakes) -> None:
    lake = lakes.memory("broken")
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    copy = Lakehouse(MemoryStorage("memory://corrupt-pointers/"))
    for info in lake.storage.list():
        copy.storage.write(info.path, lake.storage.read(info.path))
    try:
        add_root(copy, 2, lakehouse_def="a/../b", created_at_millis="9999999999999")
        with pytest.raises(CorruptFileError, match=r"a/\.\./b"):
            _ = copy.snapshot().definition
        add_root(copy, 3, lakehouse_def=None, created_at_millis="9999999999999")
        with pytest.raises(CorruptFileError):
            _ = copy.snapshot().definition
    finally:
        drop_memory_root(copy.root)


# Time travel


@pytest.fixture
def timed_lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse with versions 0 to 5, one per second from 1,000,000 ms. Version v has v namespaces."""
    storage = ClockStorage(lakes.storage("timed"), 1_000_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage, order=4))
    for number in range(5):
        storage.time_ms += 1_000
        with lake.transaction() as txn:
            txn.create_namespace(f"ns{number}")
    return lake


@pytest.mark.parametrize("version", range(6))
def test_snapshot_by_number_text_and_time(timed_lake: Lakehouse, version: int) -> None:
    created_ms = 1_000_000 + 1_000 * version
    namespaces = [f"ns{number}" for number in range(version)]
    for snapshot in (
        timed_lake.snapshot(version),
        timed_lake.snapshot(str(version)),
        timed_lake.snapshot(f"00{version}"),
        timed_lake.snapshot(timestamp=created_ms),
        timed_lake.snapshot(timestamp=created_ms + 999),
        timed_lake.snapshot(timestamp=datetime.fromtimestamp(created_ms / 1000, tz=timezone(timedelta(hours=5)))),
    ):
        assert (snapshot.version, snapshot.namespaces()) == (version, namespaces)
        assert snapshot.created_at_ms == created_ms
        assert snapshot.created_at == datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=created_ms)
        assert timed_lake.snapshot(timestamp=snapshot.created_at).version == version


def test_leading_zeros_of_version_are_ignored(timed_lake: Lakehouse) -> None:
    assert timed_lake.snapshot("0" * 5_000).version == 0
    assert timed_lake.snapshot("0" * 5_000 + "3").version == 3


@pytest.mark.parametrize("version", [6, 7, -1, 2**32, 2**70, "6", "9" * 5000, 10**200])
def test_versions_that_were_never_committed_are_not_found(timed_lake: Lakehouse, version: int | str) -> None:
    with pytest.raises(VersionNotFoundError) as caught:
        timed_lake.snapshot(version)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("millis", [1_700_000_060_015, 1_700_000_060_001, 1_732_000_123_457, 253_402_300_799_999])
def test_version_times_are_exact_to_the_millisecond(lakes: Lakes, millis: int) -> None:
    storage = ClockStorage(lakes.storage("exact"), millis - 1)
    lake = Lakehouse.create(storage.root, storage=storage)
    storage.time_ms = millis
    lake.alter_definition(properties={"a": "b"})
    for info, version in zip(lake.history(), (1, 0), strict=True):
        snapshot = lake.snapshot(version)
        assert info.created_at == snapshot.created_at
        assert lake.snapshot(timestamp=snapshot.created_at).version == version


def test_time_before_oldest_version_is_an_error(timed_lake: Lakehouse) -> None:
    with pytest.raises(VersionNotFoundError, match="1000000"):
        timed_lake.snapshot(timestamp=999_999)
    with pytest.raises(VersionNotFoundError):
        timed_lake.snapshot(timestamp=datetime(1960, 1, 1, tzinfo=UTC))


def test_ambiguous_timestamps_are_rejected(timed_lake: Lakehouse) -> None:
    with pytest.raises(InvalidInputError):
        timed_lake.snapshot(timestamp=datetime(2024, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidInputError):
        timed_lake.snapshot(version=1, timestamp=1)
    with pytest.raises(ExportNotFoundError, match="'nightly'"):
        timed_lake.snapshot("nightly")
    with pytest.raises(ExportNotFoundError):
        timed_lake.snapshot("")


def test_time_travel_handles_decreasing_times_of_other_programs(lakes: Lakes) -> None:
    lake = Lakehouse.create("memory://foreign-times/")
    try:
        start_ms = lake.snapshot(0).created_at_ms
        for version, offset_ms in enumerate([10, 50, 20, 100, 60, 40, 70], start=1):
            add_root(lake, version, created_at_millis=str(start_ms + offset_ms))
        expected = {0: 0, 9: 0, 10: 1, 20: 1, 49: 1, 50: 3, 60: 3, 99: 3, 100: 7, 500: 7}
        assert {offset_ms: lake.snapshot(timestamp=start_ms + offset_ms).version for offset_ms in expected} == expected
    finally:
        drop_memory_root(lake.root)


def test_version_times_increase_when_clock_does_not(lakes: Lakes) -> None:
    storage = ClockStorage(lakes.storage("stopped"), 5_000)
    lake = lakes.watch(Lakehouse.create(storage.root, storage=storage))
    for number, time_ms in enumerate([5_000, 5_000, 10, 9_000]):
        storage.time_ms = time_ms
        lake.alter_definition(properties={"n": str(number)})
    assert [lake.snapshot(version).created_at_ms for version in range(5)] == [5_000, 5_001, 5_002, 5_003, 9_000]


def test_export_is_read_by_name(timed_lake: Lakehouse) -> None:
    path = new_export_root_path()
    timed_lake.storage.create(path, timed_lake.storage.read(root_path(2)))
    timed_lake.alter_definition(
        exported_snapshots={"nightly": path, "named-root": root_path(1)},
        exports=(ExportRecord(name="nightly", version=2, level=ExportLevel.MINIMAL, root_location=path),),
    )
    nightly = timed_lake.snapshot("nightly")
    assert (nightly.version, nightly.location, nightly.namespaces()) == (2, path, ["ns0", "ns1"])
    assert timed_lake.snapshot("named-root").version == 1
    timed_lake.alter_definition(exports=())
    assert timed_lake.snapshot("nightly").version == 2, "without a record, the previous root determines the version"


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (ExpirationState.EXPIRED, "run undelete"),
        (ExpirationState.PURGING, "cannot"),
        (ExpirationState.PURGED, "cannot"),
    ],
)
def test_expired_versions_cannot_be_opened(timed_lake: Lakehouse, state: ExpirationState, message: str) -> None:
    batch = ExpirationBatch(id="b", versions="1-2,4", state=state)
    timed_lake.alter_definition(expirations=(batch,))
    for version in (1, 2, 4, "4"):
        with pytest.raises(VersionExpiredError, match=message):
            timed_lake.snapshot(version)
    assert [timed_lake.snapshot(version).version for version in (0, 3, 5, 6)] == [0, 3, 5, 6]
    states = {info.version: info.state for info in timed_lake.history()}
    assert [version for version, state in states.items() if state == "expired"] == [4, 2, 1]


def test_sealed_version_raises_version_expired(timed_lake: Lakehouse) -> None:
    seal(timed_lake, 2)
    with pytest.raises(VersionExpiredError):
        timed_lake.snapshot(2)
    assert {info.version: info.state for info in timed_lake.history()}[2] == "sealed"
    assert timed_lake.snapshot(timestamp=1_003_500).version == 3, "sealed versions still count in time travel"


def test_version_purged_during_read_raises_version_expired(lake: Lakehouse) -> None:
    """A purge deletes the nodes and definitions of a version one by one after it has sealed the root."""
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(40):
            txn.create_table("ns", f"t{number:02}", table())
    readers = [Lakehouse(lake.storage).snapshot(1) for _ in range(4)]  # each has its own cache
    transactions = [Lakehouse(lake.storage, cache="off").transaction() for _ in range(4)]
    with lake.transaction() as txn:
        txn.drop_namespace("ns", cascade=True)
    location = readers[0].entry(readers[0].keys.table_key("ns", "t07"))
    assert location is not None
    seal(lake, 1)
    purged_files = {path: lake.storage.read(path) for path in (location, *readers[1].root.children)}
    lake.storage.delete_many(list(purged_files))
    reads: list[Callable[[], object]] = [
        lambda: readers[1].tables("ns"),
        lambda: readers[2].has_table("ns", "t07"),
        lambda: diff_snapshots(readers[3], lake.snapshot(2)),
        lambda: readers[0].table_at(location),
    ]
    for read in reads:
        with pytest.raises(VersionExpiredError) as caught:
            read()
        assert caught.value.version == 1
    transaction_reads: list[Callable[[], object]] = [
        lambda: transactions[0].tables("ns"),
        lambda: transactions[1].has_table("ns", "t07"),
        lambda: transactions[2].table_at(location),
        lambda: transactions[3].alter_table("ns", "t07", table()),
    ]
    for read in transaction_reads:
        with pytest.raises(TransactionExpiredError):
            read()
    lake.storage.create_many(purged_files)  # version 2 shares some of these files, which a purge would keep


def test_missing_file_of_live_version_raises_file_missing(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    location = lake.snapshot().entry(lake.snapshot().keys.namespace_key("ns"))
    assert location is not None
    data = lake.storage.read(location)
    lake.storage.delete(location)
    with pytest.raises(FileMissingError):
        Lakehouse(lake.storage).snapshot().namespace("ns")
    lake.storage.create(location, data)


# History and diff


def test_history_lists_authors_and_operations_newest_first(lake: Lakehouse) -> None:
    with lake.transaction(message="first", run_id="run-1", properties={"month": "2013-01"}) as txn:
        txn.create_namespace("ns")
    with lake.transaction() as second:
        second.create_table("ns", "a", table())
    with lake.transaction() as third:
        third.alter_table("ns", "a", table(x="y"))
        third.create_table("ns", "b", table())
    with lake.transaction(operation="publish") as fourth:
        fourth.drop_table("ns", "a")
    lake.alter_definition(properties={"a": "b"}, message="settings")
    infos = list(lake.history())
    assert [info.version for info in infos] == [5, 4, 3, 2, 1, 0]
    assert [info.operation for info in infos] == [
        "alter-definition", "publish", "transaction", "create-table", "create-namespace", "init",
    ]  # fmt: skip
    first = infos[-2]
    assert (first.message, first.run_id, first.properties) == ("first", "run-1", {"month": "2013-01"})
    assert first.members == (txn.id,)
    assert first.counts == {"set": 1, "deleted": 0}
    assert infos[2].counts == {"set": 2, "deleted": 0}
    assert infos[1].counts == {"set": 0, "deleted": 1}
    assert len({info.commit_id for info in infos}) == 6
    assert {info.state for info in infos} == {"live"}
    assert all(info.engine and info.user and info.host for info in infos)
    assert [info.version for info in lake.history(2)] == [5, 4]
    assert [info.version for info in lake.history(0)] == []
    assert len(list(lake.history(99))) == 6


def test_history_contains_run_and_approver(lake: Lakehouse) -> None:
    with acting_for_run("run-1", "Ada"):
        lake.alter_definition(properties={"a": "b"})
        with acting_for_run("run-2"), lake.transaction() as txn:
            txn.create_namespace("ns")
        lake.alter_definition(properties={"a": "c"})
    lake.alter_definition(properties={"a": "d"})
    runs = [(info.run_id, info.approved_by) for info in lake.history(4)]
    assert runs == [(None, None), ("run-1", "Ada"), ("run-2", None), ("run-1", "Ada")]
    with acting_for_run("run-3", "ü" * 5000):
        lake.alter_definition(properties={"a": "e"})
    assert next(iter(lake.history(1))).approved_by == "ü" * MAX_USER_CHARS


def test_operation_is_named_after_single_change(lake: Lakehouse) -> None:
    def operation(change: str, *arguments: Any) -> str | None:
        with lake.transaction() as txn:
            getattr(txn, change)(*arguments)
        return next(lake.history(1)).operation

    assert operation("create_namespace", "ns") == "create-namespace"
    assert operation("alter_namespace", "ns", {"a": "b"}) == "alter-namespace"
    assert operation("create_table", "ns", "t", table()) == "create-table"
    assert operation("alter_table", "ns", "t", table(a="b")) == "alter-table"
    assert operation("drop_table", "ns", "t") == "drop-table"
    assert operation("drop_namespace", "ns") == "drop-namespace"


def test_history_reads_roots_in_batches(lake: Lakehouse) -> None:
    for number in range(70):
        lake.alter_definition(properties={"n": str(number)})
    assert [info.version for info in lake.history()] == list(range(70, -1, -1))
    assert [info.version for info in lake.history(33)] == list(range(70, 37, -1))


@pytest.mark.parametrize("info", [None, "no json", "[]", '{"members":5,"counts":"x","properties":7,"operation":null}'])
def test_history_accepts_commit_info_of_other_programs(lakes: Lakes, info: str | None) -> None:
    lake = Lakehouse.create("memory://foreign-info/")
    try:
        add_root(lake, 1, commit_info=info, rollback_from_root=root_path(0), created_at_millis="9999999999999")
        newest = next(lake.history())
        assert (newest.version, newest.operation, newest.members, newest.counts) == (1, None, (), {})
        assert (newest.rollback_from, newest.commit_id) == (0, None)
    finally:
        drop_memory_root(lake.root)


def test_diff_lists_added_changed_and_removed_objects(lake: Lakehouse) -> None:
    with lake.transaction() as txn:
        txn.create_namespace("a")
        txn.create_namespace("b")
        for number in range(20):
            txn.create_table("a", f"t{number}", table())
    with lake.transaction() as txn:
        txn.alter_namespace("b", {"x": "y"})
        txn.create_namespace("c")
        txn.drop_table("a", "t3")
        txn.alter_table("a", "t4", table(x="y"))
        txn.create_table("b", "new", table())
    forward = [
        Change("changed", "b"), Change("added", "c"), Change("removed", "a", "t3"),
        Change("changed", "a", "t4"), Change("added", "b", "new"),
    ]  # fmt: skip
    opposite = {"added": "removed", "removed": "added", "changed": "changed"}
    assert lake.diff(1, 2) == forward
    assert lake.diff("2", "1") == [replace(change, kind=opposite[change.kind]) for change in forward]
    assert lake.diff(2, 2) == []
    assert len(lake.diff(0, 2)) == 3 + 20
    with pytest.raises(VersionNotFoundError):
        lake.diff(0, 9)


# Settings


def test_settings_change_in_separate_commits(lake: Lakehouse) -> None:
    assert lake.alter_definition(txn_ttl_millis=1_000, properties={"a": "b"}) == 1
    assert lake.alter_definition(txn_ttl_millis=1_000) == 1, "no change, no commit"
    assert lake.snapshot().definition.txn_ttl_millis == 1_000
    assert lake.snapshot(0).definition.txn_ttl_millis == 86_400_000
    for fields in ({"order": 5}, {"id": "x"}, {"nonsense": 1}, {"txn_ttl_millis": 0}, {"properties": {1: 2}}):
        with pytest.raises(InvalidDefinitionError):
            lake.alter_definition(**fields)
    assert lake.latest_version() == 1
    assert unreferenced_paths(lake) == set()


def test_concurrent_settings_merge_by_field_and_map_key(lake: Lakehouse) -> None:
    def change(txn: Any, **fields: Any) -> None:
        txn.alter_definition(replace(txn.definition, **fields))

    lake.alter_definition(properties={"keep": "1", "drop": "1", "same": "1"})
    ours, theirs = lake.transaction(), lake.transaction()
    change(ours, properties={"keep": "1", "same": "2", "ours": "1"}, txn_ttl_millis=5)
    change(
        theirs,
        properties={"keep": "1", "drop": "1", "same": "2", "theirs": "1"},
        minimum_versions_to_keep=9,
        exports=(ExportRecord(name="e", version=1, level=ExportLevel.FULL),),
        unknown_fields=b"\xc0\xb8\x02\x07",
    )
    theirs.commit()
    ours.commit()
    merged = lake.snapshot().definition
    assert merged.properties == {"keep": "1", "same": "2", "ours": "1", "theirs": "1"}
    assert (merged.txn_ttl_millis, merged.minimum_versions_to_keep, len(merged.exports)) == (5, 9, 1)
    assert merged.unknown_fields == b"\xc0\xb8\x02\x07"
    assert unreferenced_paths(lake) == set(), "the definition written before the merge was deleted"


def test_equal_concurrent_setting_needs_no_commit(lake: Lakehouse) -> None:
    ours, theirs = lake.transaction(), lake.transaction()
    for txn in (ours, theirs):
        txn.alter_definition(replace(txn.definition, txn_ttl_millis=50_000))
    assert theirs.commit() == 1
    assert ours.commit() == 1
    assert unreferenced_paths(lake) == set()


@pytest.mark.parametrize(
    ("ours", "theirs", "message"),
    [
        (
            {"txn_ttl_millis": 50_000},
            {"txn_ttl_millis": 60_000},
            "txn_ttl_millis of the lakehouse: we set 50000, .* 60000",
        ),
        ({"properties": {"a": "1"}}, {"properties": {"a": "2"}}, r"properties\['a'\]"),
        ({"properties": {}}, {"properties": {"base": "2"}}, r"properties\['base'\]"),
        (
            {"maximum_version_age_millis_overrides": {1: 1}},
            {"maximum_version_age_millis_overrides": {1: 2}},
            "overrides",
        ),
        ({"exported_snapshots": {"a": "x"}}, {"exported_snapshots": {"b": "x"}}, "exports, pins and expirations"),
        (
            {"exported_snapshots": {"a": "x"}},
            {"expirations": (ExpirationBatch(id="b", versions="77"),)},
            "exports, pins and expirations",
        ),
    ],
)
def test_conflicting_settings_are_rejected(lake: Lakehouse, ours: Any, theirs: Any, message: str) -> None:
    lake.alter_definition(properties={"base": "1"})
    our_txn, their_txn = lake.transaction(), lake.transaction()
    our_txn.alter_definition(replace(our_txn.definition, **ours))
    their_txn.alter_definition(replace(their_txn.definition, **theirs))
    their_txn.commit()
    with pytest.raises(CommitConflictError, match=message):
        our_txn.commit()
    assert unreferenced_paths(lake) == set()


def test_unknown_system_rows_are_kept() -> None:
    lake = Lakehouse.create("memory://unknown-rows/")
    try:
        add_root(lake, 1, created_at_millis="1", future_setting="x", commit_id="theirs")
        with lake.transaction() as txn:
            txn.create_namespace("ns")
        system = lake.snapshot().root.system
        assert system["future_setting"] == "x"
        assert system["commit_id"] != "theirs"
        assert "rollback_from_root" not in system
    finally:
        drop_memory_root(lake.root)
