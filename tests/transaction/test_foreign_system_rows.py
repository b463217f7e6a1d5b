"""Other programs copy unknown system rows to new versions, where these rows are ignored."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.clock import AgingStorage
from tests.foreign import ForeignLake
from tests.lakes import Lakes, seal, table
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.keys import COMMIT_ID, COMMIT_INFO, decode_commit_info, encode_commit_info
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.storage import Storage
from trinitylake_ops.transaction.publish import CommitResolution
from trinitylake_ops.transaction.saved import version_of
from trinitylake_ops.versions.history import VersionInfo

START_MS = 1_700_000_000_000
MINUTE_MS = 60_000


@pytest.fixture
def clock(lakes: Lakes) -> AgingStorage:
    return AgingStorage(lakes.storage(), START_MS)


@pytest.fixture
def lake(clock: AgingStorage) -> Lakehouse:
    """A lakehouse with five versions. The last four have run ids, and the last three are one minute apart."""
    lake = Lakehouse.create(clock.root, storage=clock)
    with lake.transaction(run_id="ours", message="first") as txn:
        txn.create_namespace("ns")
    for number in range(3):
        clock.time_ms += MINUTE_MS
        with lake.transaction(run_id="ours", message=f"number {number}", properties={"a": "b"}) as txn:
            txn.create_table("ns", f"t{number}", table())
    return lake


def version_info(lake: Lakehouse, version: int) -> VersionInfo:
    return next(info for info in Lakehouse(lake.storage).history() if info.version == version)


def has_no_commit_info(info: VersionInfo) -> bool:
    value = (info.commit_id, info.operation, info.message, info.run_id, info.user, info.members, info.properties)
    return not any(value)


def remove_stamped_versions(storage: Storage, latest: int) -> None:
    """Remove the version from the commit info of all roots, as older releases write it."""
    for version in range(latest + 1):
        path = root_path(version)
        node = decode_node(storage.read(path), path)
        info = {name: value for name, value in decode_commit_info(node.system).items() if name != "version"}
        system = {**node.system, COMMIT_INFO: encode_commit_info(info)}
        storage.write(path, encode_node(replace(node, system=system), 128))


def test_commit_info_contains_stamped_version(lake: Lakehouse) -> None:
    for version in range(5):
        assert decode_commit_info(lake.snapshot(version).root.system)["version"] == version


def test_history_does_not_attribute_foreign_version(lake: Lakehouse) -> None:
    version = ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    assert has_no_commit_info(version_info(lake, version))
    assert version_info(lake, version - 1).run_id == "ours"
    assert COMMIT_ID not in Lakehouse(lake.storage).snapshot().root.system


@pytest.mark.parametrize("target", [1, 3])
def test_rollback_of_another_program_has_no_commit_info(lake: Lakehouse, target: int) -> None:
    version = ForeignLake(lake.storage).rollback(target, keeps_unknown=True)
    assert has_no_commit_info(version_info(lake, version))
    assert version_info(lake, version).rollback_from == version - 1


def test_history_ignores_copied_rollback_row(lake: Lakehouse) -> None:
    foreign = ForeignLake(lake.storage)
    rollback = foreign.rollback(2, keeps_unknown=True)
    version = foreign.commit_table("ns", "foreign", keeps_unknown=True)
    assert version_info(lake, rollback).rollback_from == rollback - 1
    assert version_info(lake, version).rollback_from is None


@pytest.mark.parametrize("keeps_unknown", [False, True])
def test_time_travel_handles_slow_clock(lake: Lakehouse, clock: AgingStorage, keeps_unknown: bool) -> None:
    foreign = ForeignLake(lake.storage, behind_ms=2 * MINUTE_MS + MINUTE_MS // 2)
    foreign.commit_table("ns", "foreign", keeps_unknown=keeps_unknown)
    at_ms = START_MS + MINUTE_MS // 2 + 1
    assert Lakehouse(clock).snapshot(timestamp=at_ms).version == 1


def test_new_version_is_later_than_all_previous_versions(lake: Lakehouse, clock: AgingStorage) -> None:
    newest_ms = lake.snapshot().created_at_ms
    ForeignLake(lake.storage, behind_ms=MINUTE_MS).commit_table("ns", "foreign", keeps_unknown=True)
    clock.time_ms = START_MS
    with Lakehouse(clock).transaction() as txn:
        txn.create_namespace("more")
    assert Lakehouse(clock).snapshot().created_at_ms > newest_ms


def test_resolve_commit_ignores_copied_commit_id(lake: Lakehouse) -> None:
    latest = next(lake.history(1))
    assert latest.commit_id is not None
    version = ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    fresh = Lakehouse(lake.storage)
    assert fresh.resolve_commit(version, latest.commit_id) == CommitResolution.LOST
    assert fresh.resolve_commit(version - 1, latest.commit_id) == CommitResolution.COMMITTED


def test_version_of_returns_version_of_transaction(lake: Lakehouse) -> None:
    (member,) = next(lake.history(1)).members
    latest = lake.latest_version()
    ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    assert version_of(lake.files, member, latest - 1, latest + 1) == latest
    assert version_of(lake.files, member, latest, latest + 1) is None


def test_saved_transaction_resumes_on_version_of_another_program(lake: Lakehouse) -> None:
    version = ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    fresh = Lakehouse(lake.storage)
    txn = fresh.transaction()
    txn.create_namespace("saved")
    with fresh.resume_transaction(txn.save()) as resumed:
        assert resumed.base.version == version
    assert fresh.snapshot().has_namespace("saved")


def test_sealed_root_keeps_stamped_version(lake: Lakehouse) -> None:
    version = ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    with Lakehouse(lake.storage).transaction() as txn:
        txn.create_namespace("more")
    for sealed in (version - 1, version):
        seal(lake, sealed)
    assert version_info(lake, version - 1).commit_id is not None
    assert has_no_commit_info(version_info(lake, version))
    # The commit info is also ignored if another program replaces a sealed root with the root of another version.
    lake.storage.write(root_path(version), lake.storage.read(root_path(version - 1)))
    assert has_no_commit_info(version_info(lake, version))


def test_root_of_export_keeps_system_rows_of_source(lake: Lakehouse) -> None:
    operations.plan_export(lake, "ours").execute()
    ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    fresh = Lakehouse(lake.storage)
    version = fresh.latest_version()
    operations.plan_export(fresh, "theirs").execute()
    ours, theirs = (fresh.snapshot(name) for name in ("ours", "theirs"))
    assert decode_commit_info(ours.root.system)["version"] == ours.version
    assert theirs.version == version
    assert COMMIT_ID not in theirs.root.system


@pytest.mark.parametrize("limit", [None, 2])
def test_commit_info_without_version_is_accepted_once(lake: Lakehouse, limit: int | None) -> None:
    latest = lake.latest_version()
    remove_stamped_versions(lake.storage, latest)
    fresh = Lakehouse(lake.storage)
    assert [info.run_id for info in fresh.history()] == ["ours"] * latest + [None]
    ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
    newest, previous = list(Lakehouse(lake.storage).history(limit))[:2]
    assert has_no_commit_info(newest)
    assert previous.run_id == "ours"


def test_commit_info_of_older_release_is_accepted(lake: Lakehouse) -> None:
    """An older release of this package writes commit info without a version."""
    latest = lake.latest_version()
    path = root_path(latest)
    node = decode_node(lake.storage.read(path), path)
    info = {name: value for name, value in decode_commit_info(node.system).items() if name != "version"}
    system = {**node.system, COMMIT_INFO: encode_commit_info(info)}
    lake.storage.write(path, encode_node(replace(node, system=system), 128))
    assert version_info(lake, latest).run_id == "ours"


@pytest.mark.parametrize("version", ["4", 4.0, True, None, [4], 10**30])
def test_commit_info_with_invalid_version_is_ignored(lake: Lakehouse, version: object) -> None:
    path = root_path(4)
    node = decode_node(lake.storage.read(path), path)
    value = encode_commit_info({**decode_commit_info(node.system), "version": version})
    lake.storage.write(path, encode_node(replace(node, system={**node.system, COMMIT_INFO: value}), 128))
    assert has_no_commit_info(version_info(lake, 4))
