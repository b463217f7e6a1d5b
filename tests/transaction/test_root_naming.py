"""Lakehouses with other root namings: they are detected, read and changed, and namings are never mixed."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, listed, objects, table
from tests.older_lakehouses import copy_in_older_form
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    LakehouseExistsError,
    LakehouseNotFoundError,
    StoragePermissionError,
    VersionNotFoundError,
)
from trinitylake_ops.format.file_names import HINT_PATH, MAX_VERSION, ROOT_NAMING, ROOT_NAMINGS, RootNaming, root_naming
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, drop_memory_root
from trinitylake_ops.transaction.publish import CommitResolution
from trinitylake_ops.versions.root_files import ProbedRoots
from trinitylake_ops.versions.roots import Roots, find_latest
from trinitylake_ops.versions.time_travel import find_version_at

pytestmark = pytest.mark.usefixtures("fixed_requests")

LATEST = 9
OTHERS = [naming for naming in ROOT_NAMINGS if naming != ROOT_NAMING]


@pytest.fixture(scope="module")
def original() -> Iterator[Lakehouse]:
    """A lakehouse with versions 0 to 9."""
    lake = Lakehouse.create("memory://naming-original/")
    for number in range(LATEST - 3):
        lake.alter_definition(properties={"n": str(number)})
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    with lake.transaction() as txn:
        txn.create_table("ns", "t", table(a="1"))
    operations.rollback(lake, LATEST - 2)
    assert lake.latest_version() == LATEST
    yield lake
    drop_memory_root(lake.root)


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    storage = MemoryStorage("memory://naming/")
    yield storage
    drop_memory_root(storage.root)


@pytest.fixture(params=ROOT_NAMINGS, ids=str)
def naming(request: pytest.FixtureRequest) -> RootNaming:
    naming: RootNaming = request.param
    return naming


@pytest.fixture
def other(original: Lakehouse, storage: MemoryStorage, naming: RootNaming, lakes: Lakes) -> MemoryStorage:
    """The storage of a copy of ``original`` in each naming. Its invariants are checked after the test."""
    copy_in_older_form(original, storage, naming)
    lakes.watch(Lakehouse(storage))
    return storage


def test_each_naming_is_detected_on_open_and_on_first_use(other: MemoryStorage, naming: RootNaming) -> None:
    assert Lakehouse.open(other.root).files.roots.known_naming == naming
    lake = Lakehouse(other)
    assert lake.files.roots.known_naming is None
    assert lake.files.roots.naming == naming
    assert Lakehouse(other).latest_version() == LATEST
    assert Lakehouse(other).snapshot().location == naming.path(LATEST)


@pytest.mark.parametrize(
    "hint", [b"9", b" 9\r\n", b"8", b"4", b"0", b"10", b"99999", str(MAX_VERSION).encode(), b"garbage", b"", None]
)
def test_invalid_hint_never_fails_a_read(other: MemoryStorage, naming: RootNaming, hint: bytes | None) -> None:
    other.delete(HINT_PATH) if hint is None else other.write(HINT_PATH, hint)
    meter = MeteredStorage(other)
    roots = Roots(meter)
    with meter.measure() as first:
        assert find_latest(roots) == (LATEST, other.read(naming.path(LATEST)))
    assert roots.known_naming == naming
    with meter.measure() as opening:
        lake = Lakehouse.open(other.root, storage=meter)
    assert lake.latest_version() == LATEST
    assert "list" not in first.counts.requests
    assert opening.counts.requests["list"] == 1, "only the names of version 0 are listed"
    assert first.counts.rounds <= 12
    assert opening.counts.rounds <= first.counts.rounds
    with Lakehouse(other).transaction() as txn:
        txn.create_namespace("ns2")
    assert other.read(HINT_PATH) == b"10", "the next commit repairs the hint"


def test_correct_hint_takes_two_round_trips_with_known_naming(other: MemoryStorage, naming: RootNaming) -> None:
    meter = MeteredStorage(other)
    with meter.measure() as opening:
        lake = Lakehouse.open(other.root, storage=meter)
    assert budget("open").with_counts(opening.counts) == budget("open")
    with meter.measure() as begin:
        assert lake.snapshot().definition.properties
    settings = 1  # read in a separate round trip
    assert begin.counts.requests == {"read": budget("begin, warm").requests["read"] + settings}
    assert begin.counts.rounds == budget("begin, warm").rounds + settings
    fresh = Lakehouse(meter)
    with meter.measure() as first:
        assert fresh.snapshot().definition.properties
    if naming == ROOT_NAMING:
        assert budget("begin, cold").with_counts(first.counts) == budget("begin, cold")
    else:
        assert first.counts.rounds == budget("begin, cold").rounds + 1, "the naming is detected"
    with meter.measure() as warm:
        assert fresh.latest_version() == LATEST
    assert budget("begin, warm").with_counts(warm.counts) == budget("begin, warm")


@pytest.mark.parametrize("hint", [None, b"0", b"2", b"6", b"9", b"77"])
def test_naming_is_detected_after_oldest_roots_were_deleted(
    original: Lakehouse, storage: MemoryStorage, naming: RootNaming, hint: bytes | None
) -> None:
    copy_in_older_form(original, storage, naming)
    times_ms = [original.snapshot(version).created_at_ms for version in range(LATEST + 1)]
    for version in range(4):
        storage.delete(naming.path(version))
    storage.delete(HINT_PATH) if hint is None else storage.write(HINT_PATH, hint)
    for lake in (Lakehouse.open(storage.root), Lakehouse(storage)):
        assert [info.version for info in lake.history()] == [9, 8, 7, 6, 5, 4]
        assert lake.snapshot(timestamp=times_ms[5]).location == naming.path(5)
        with pytest.raises(VersionNotFoundError):
            lake.snapshot(timestamp=times_ms[4] - 1)
    assert find_version_at(Roots(storage), times_ms[7], LATEST, ProbedRoots(storage)) == 7
    with Lakehouse(storage).transaction() as txn:
        txn.create_namespace("after")
    assert storage.exists(naming.path(LATEST + 1))


def test_all_operations_keep_naming(other: MemoryStorage, naming: RootNaming, original: Lakehouse) -> None:
    lake = Lakehouse.open(other.root)
    assert [objects(lake.snapshot(v)) for v in range(LATEST + 1)] == [
        objects(original.snapshot(v)) for v in range(LATEST + 1)
    ]
    assert list(lake.history()) == list(original.history()), "names of previous roots are parsed in any naming"
    assert lake.diff(LATEST - 1, LATEST) == original.diff(LATEST - 1, LATEST)
    for version in range(LATEST + 1):
        assert lake.snapshot(timestamp=original.snapshot(version).created_at).version == version

    with lake.transaction() as txn:
        txn.create_namespace("new")
        txn.create_table("new", "t", table())
    assert operations.rollback(lake, LATEST) == LATEST + 2
    report = operations.plan_export(lake, "kept", version=LATEST + 1).execute()
    assert lake.snapshot("kept").version == LATEST + 1
    assert operations.rollback(lake, "kept") == report.committed_version + 1
    assert operations.drop_export(lake, "kept") == lake.latest_version()
    latest = lake.latest_version()
    other.write(HINT_PATH, b"3")
    assert operations.repair_hint(lake).repaired
    assert other.read(HINT_PATH) == str(latest).encode()
    assert operations.verify(lake).findings == ()
    assert operations.verify(Lakehouse(other)).findings == ()

    committed = [info for info in lake.history() if info.version > LATEST]
    for info in committed:
        assert info.commit_id is not None
        assert Lakehouse(other).resolve_commit(info.version, info.commit_id) == CommitResolution.COMMITTED
        assert lake.resolve_commit(info.version, str(uuid.uuid4())) == CommitResolution.LOST
        root = decode_node(other.read(naming.path(info.version)), naming.path(info.version))
        assert root.system["previous_root"] == naming.path(info.version - 1)
        expected = naming.path(info.version - 1) if info.operation == "rollback" else None
        assert root.system.get("rollback_from_root") == expected
    assert lake.resolve_commit(latest + 1, str(uuid.uuid4())) == CommitResolution.UNDECIDED
    assert lake.resolve_commit(latest + 1, str(uuid.uuid4()), fence=True) == CommitResolution.LOST
    names = {path for path in listed(other) if root_naming(path) is not None}
    assert names == {naming.path(version) for version in range(latest + 2)}


def test_lost_response_is_resolved_in_naming_of_root(other: MemoryStorage, naming: RootNaming) -> None:
    path = naming.path(LATEST + 1)
    lake = Lakehouse(FaultyStorage(other, [fail(1, StoragePermissionError, "after", kind="create", path_part=path)]))
    with lake.transaction() as txn:
        txn.create_namespace("once")
    assert (txn.committed_version, Lakehouse(other).latest_version()) == (LATEST + 1, LATEST + 1)


@pytest.mark.parametrize("naming", OTHERS, ids=str, indirect=True)
def test_create_rejects_any_existing_root_file(storage: MemoryStorage, naming: RootNaming) -> None:
    for version in (0, 5, MAX_VERSION):
        storage.write(naming.path(version), b"anything")
        with pytest.raises(LakehouseExistsError):
            Lakehouse.create(storage.root)
        storage.delete(naming.path(version))
    Lakehouse.create(storage.root)


# Mixed namings


def assert_rejected(storage: MemoryStorage, naming: RootNaming, other_path: str) -> None:
    with pytest.raises(CorruptFileError) as caught:
        Lakehouse.open(storage.root)
    named_paths = re.findall(r"'(_[^']*)'", caught.value.message)
    assert other_path in named_paths
    assert {root_naming(path) for path in named_paths} == {naming, root_naming(other_path)}
    assert all(storage.exists(path) for path in named_paths)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(("naming", "other_naming"), list(permutations(ROOT_NAMINGS, 2)), ids=str)
def test_open_rejects_mixed_namings_at_version_0_or_hint(
    original: Lakehouse, storage: MemoryStorage, naming: RootNaming, other_naming: RootNaming
) -> None:
    copy_in_older_form(original, storage, naming)
    Lakehouse.open(storage.root)
    for version in (0, LATEST):
        storage.write(other_naming.path(version), storage.read(naming.path(version)))
        assert_rejected(storage, naming, other_naming.path(version))
        storage.delete(other_naming.path(version))
    # A hint to a missing or invalid version does not hide mixed namings of the oldest versions.
    storage.write(other_naming.path(0), storage.read(naming.path(0)))
    for hint in (b"77", b"garbage"):
        storage.write(HINT_PATH, hint)
        assert_rejected(storage, naming, other_naming.path(0))
    # If version 0 was purged, the roots are listed.
    storage.delete(naming.path(0))
    storage.delete(other_naming.path(0))
    storage.write(other_naming.path(1), storage.read(naming.path(1)))
    assert_rejected(storage, naming, other_naming.path(1))


@pytest.mark.parametrize(("naming", "other_naming"), list(permutations(ROOT_NAMINGS, 2)), ids=str)
def test_mixed_namings_at_other_versions_fail_listing_and_verify(
    original: Lakehouse, storage: MemoryStorage, naming: RootNaming, other_naming: RootNaming
) -> None:
    copy_in_older_form(original, storage, naming)
    storage.write(other_naming.path(4), storage.read(naming.path(4)))
    lake = Lakehouse.open(storage.root)
    report = operations.verify(lake)
    (finding,) = report.findings
    assert (finding.severity, finding.code, finding.path) == ("error", "root-naming-mixed", other_naming.path(4))
    assert naming.path(LATEST) in finding.message
    with pytest.raises(CorruptFileError):
        operations.plan_rollback(lake, 1)
    with pytest.raises(CorruptFileError):
        operations.plan_drop_namespace(lake, "ns")


def test_versions_beyond_maximum_are_rejected(original: Lakehouse, storage: MemoryStorage) -> None:
    naming = RootNaming(64, ".ipc")
    invalid_path = "_" + f"{MAX_VERSION + 1:064b}"[::-1] + ".ipc"
    storage.write(invalid_path, b"root")
    for hint in (str(MAX_VERSION + 1).encode(), b"0"):
        storage.write(HINT_PATH, hint)
        with pytest.raises(VersionNotFoundError, match=f"version {MAX_VERSION + 1}; versions beyond {MAX_VERSION}"):
            Lakehouse.open(storage.root)
    storage.delete(HINT_PATH)
    storage.delete(invalid_path)
    copy_in_older_form(original, storage, naming)
    storage.write(invalid_path, storage.read(naming.path(3)))
    lake = Lakehouse.open(storage.root)
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.path, finding.version) == ("root-beyond-gap", invalid_path, MAX_VERSION + 1)
    with pytest.raises(VersionNotFoundError):
        operations.plan_rollback(lake, 1)


def test_gap_is_detected_in_every_naming(other: MemoryStorage, naming: RootNaming, lakes: Lakes) -> None:
    other.write(naming.path(LATEST + 5), other.read(naming.path(LATEST)))
    lake = Lakehouse.open(other.root)
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.path, finding.version) == ("root-beyond-gap", naming.path(LATEST + 5), LATEST + 5)
    with pytest.raises(CorruptFileError) as caught:
        operations.plan_rollback(lake, 1)
    assert caught.value.path == naming.path(LATEST + 1)


def test_replaced_lakehouse_with_another_naming_is_detected(original: Lakehouse, storage: MemoryStorage) -> None:
    """An open lakehouse continues to work, for example after a restore from a copy."""
    copy_in_older_form(original, storage, OTHERS[0])
    lake = Lakehouse.open(storage.root)
    for path in listed(storage):
        storage.delete(path)
    with pytest.raises(LakehouseNotFoundError):
        lake.latest_version()
    copy_in_older_form(original, storage, OTHERS[2])
    assert lake.latest_version() == LATEST
    assert lake.files.roots.naming == OTHERS[2]


def test_roots_with_long_names_never_exceed_size_limit(storage: MemoryStorage, lakes: Lakes) -> None:
    """With 64-digit root names, system rows take more space, so messages are flushed earlier."""
    sizes: dict[str, Any] = {"order": 4, "namespace_name_max_size_bytes": 8, "table_name_max_size_bytes": 8}
    naming = RootNaming(64, ".arrow")
    extra_bytes = 2 * (len(naming.path(0)) - len(ROOT_NAMING.path(0)))
    smallest_limit_bytes = smallest_node_file_limit_bytes(lakes.memory(**sizes).snapshot().definition)
    limit_bytes = smallest_limit_bytes + extra_bytes
    copy_in_older_form(lakes.memory("small", node_file_max_size_bytes=limit_bytes, **sizes), storage, naming)
    lake = lakes.watch(Lakehouse.open(storage.root))
    with lake.transaction() as txn:
        txn.create_namespace("n" * 8)
    largest_bytes = 0
    for number in range(60):
        with lake.transaction(message="m" * 3500) as txn:
            txn.create_table("n" * 8, f"table{number:03}", table())
        version = lake.latest_version()
        if number % 10 == 9:
            version = operations.rollback(lake, version - 1)
        largest_bytes = max(largest_bytes, storage.stat(naming.path(version)).size_bytes)
    assert limit_bytes - 300 < largest_bytes <= limit_bytes, "the largest root is close to the limit"
