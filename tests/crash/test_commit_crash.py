"""Commits killed at every request, before and after its effect.

After each kill the lakehouse can be opened, and all versions are intact. They contain exactly the acknowledged commits
and possibly the complete commit in flight. The next commit succeeds.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import pytest

from tests.faults import Fault, FaultyStorage, Request, kill
from tests.lakes import check_lake, local_storage, objects, table
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.limits import smallest_node_file_limit_bytes
from trinitylake_ops.storage import TEMPORARY_PREFIX, Storage
from trinitylake_ops.storage.local import storage as local_module

pytestmark = pytest.mark.usefixtures("fixed_requests")

SIZES = {"order": 3, "namespace_name_max_size_bytes": 8, "table_name_max_size_bytes": 8}
LONG_MESSAGE = "m" * 3_400  # leaves little space in the root, so that the commits also write nodes
BASE_VERSION = 1
Moment = Literal["before", "after"]
State = tuple[set[tuple[str, ...]], dict[str, str]]


def change_tables(lake: Lakehouse) -> int:
    """Commit many changes and return the acknowledged version."""
    with lake.transaction(message=LONG_MESSAGE) as txn:
        txn.create_namespace("new")
        for number in range(8):
            txn.create_table("new", f"t{number}", table())
            txn.drop_table("ns", f"t{number}")
    assert txn.committed_version is not None
    return txn.committed_version


def change_settings(lake: Lakehouse) -> int:
    return lake.alter_definition(properties={"changed": "yes"})


COMMITS: list[Callable[[Lakehouse], int]] = [change_tables, change_settings]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a lakehouse whose tree has several levels. Each run changes a copy of it."""
    folder = tmp_path_factory.mktemp("base") / "lake"
    limit_bytes = smallest_node_file_limit_bytes(LakehouseDef(id="", **SIZES))
    lake = Lakehouse.create(str(folder), {"fsync": "false"}, node_file_max_size_bytes=limit_bytes, **SIZES)
    with lake.transaction(message=LONG_MESSAGE) as txn:
        txn.create_namespace("ns")
        for number in range(12):
            txn.create_table("ns", f"t{number}", table())
    return folder


def run_commits(storage: Storage, report: Callable[[str], None]) -> None:
    lake = Lakehouse(storage)
    for commit in COMMITS:
        report(str(commit(lake)))


def run_and_kill(base: Path, folder: Path, fault: Fault) -> tuple[int, list[str]]:
    shutil.copytree(base, folder)
    storage = FaultyStorage(local_storage(folder), [fault], concurrency=1)
    return fork(lambda report: run_commits(storage, report)).finish()


@pytest.fixture(scope="module")
def states(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[State]:
    """The object names and lakehouse properties at each version of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("states") / "lake"
    shutil.copytree(base, folder)
    lake = Lakehouse(local_storage(folder))
    run_commits(lake.storage, lambda _: None)
    return [_state(lake, version) for version in range(lake.latest_version() + 1)]


def _state(lake: Lakehouse, version: int) -> State:
    snapshot = lake.snapshot(version)
    return set(objects(snapshot)), dict(snapshot.definition.properties)


@pytest.fixture(scope="module")
def requests(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Sequence[Request]:
    """The requests of an uninterrupted run, in order."""
    folder = tmp_path_factory.mktemp("count") / "lake"
    shutil.copytree(base, folder)
    storage = FaultyStorage(local_storage(folder), concurrency=1)
    run_commits(storage, lambda _: None)
    kinds = [(request.kind, "-node-" in request.path) for request in storage.log]
    assert {kind for kind, _ in kinds} == {"read", "create", "write"}
    assert kinds.count(("create", True)) > 3, "several nodes are written"
    assert sum(request.kind == "create" and request.path.startswith("_0") for request in storage.log) >= 1
    return storage.log


def assert_invariants(folder: Path, acknowledged: list[str], states: list[State]) -> int:
    """Assert the invariants after a kill and return the latest version."""
    lake = Lakehouse.open(str(folder), {"fsync": "false"})
    versions = [int(line) for line in acknowledged]
    assert versions == list(range(BASE_VERSION + 1, BASE_VERSION + 1 + len(versions)))
    latest = lake.latest_version()
    assert latest - (BASE_VERSION + len(versions)) in (0, 1), (
        "exactly the acknowledged commits, and possibly the commit in flight"
    )
    check_lake(lake)
    assert operations.verify(lake).is_clean
    for version in range(latest + 1):
        assert _state(lake, version) == states[version], "each version is complete"
    with lake.transaction() as txn:
        txn.create_namespace("after")
    assert txn.committed_version == latest + 1
    check_lake(lake)
    assert lake.storage.read("_latest_hint.txt") == str(latest + 1).encode()
    return latest


@pytest.mark.parametrize("moment", [pytest.param("before", marks=pytest.mark.soak), "after"])
def test_commit_killed_at_every_request(
    base: Path,
    tmp_path: Path,
    states: list[State],
    requests: Sequence[Request],
    moment: Moment,
) -> None:
    outcomes = set()
    for request in requests:
        number = request.number
        folder = tmp_path / f"{moment}-{number}"
        exit_code, acknowledged = run_and_kill(base, folder, kill(number, moment))
        if (moment, request.kind, exit_code) == ("after", "read", 0):
            continue  # the request failed because the file is missing; the next kill covers this case
        assert exit_code == -signal.SIGKILL, f"{request} was not reached"
        outcomes.add((len(acknowledged), assert_invariants(folder, acknowledged, states)))
        shutil.rmtree(folder)
    in_flight_done = {(n, BASE_VERSION + n + 1) for n in range(len(COMMITS))}
    in_flight_lost = {(n, BASE_VERSION + n) for n in range(len(COMMITS))}
    assert outcomes == in_flight_done | in_flight_lost, "both outcomes of each commit occur"


def test_uninterrupted_commits_are_acknowledged(
    base: Path, tmp_path: Path, states: list[State], requests: Sequence[Request]
) -> None:
    exit_code, acknowledged = run_and_kill(base, tmp_path / "lake", kill(len(requests) + 1, "before"))
    assert (exit_code, acknowledged) == (0, ["2", "3"])
    assert assert_invariants(tmp_path / "lake", acknowledged, states) == 3


def test_commit_killed_before_renaming_a_temporary_file(base: Path, tmp_path: Path, states: list[State]) -> None:
    """Kill the process between the two steps of each create on a local disk."""
    number, exit_code = 0, -signal.SIGKILL
    while exit_code == -signal.SIGKILL:
        number += 1
        folder = tmp_path / f"link-{number}"
        shutil.copytree(base, folder)
        exit_code, acknowledged = fork(_killed_at_link(folder, number)).finish()
        if exit_code == -signal.SIGKILL:
            assert list((folder / TEMPORARY_PREFIX).iterdir()), "the file was written but not renamed"
        assert_invariants(folder, acknowledged, states)
        shutil.rmtree(folder)
    assert exit_code == 0
    assert acknowledged == ["2", "3"]
    assert number > 15, "every create of both commits was interrupted"


def _killed_at_link(folder: Path, number: int) -> Callable[[Callable[[str], None]], None]:
    def run(report: Callable[[str], None]) -> None:
        link, calls = local_module.link_to_free_name, []

        def link_or_die(temporary: bytes, target: bytes) -> None:
            calls.append(target)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            link(temporary, target)

        local_module.link_to_free_name = link_or_die  # only in this forked child
        storage = local_storage(folder)
        storage.concurrency = 1
        run_commits(storage, report)

    return run


def test_creation_killed_at_every_request(tmp_path: Path) -> None:
    recorder = FaultyStorage(local_storage(tmp_path / "count"), concurrency=1)
    Lakehouse.create(recorder.root, storage=recorder)
    for number in range(1, len(recorder.log) + 1):
        for moment in ("before", "after"):
            folder = tmp_path / f"{moment}-{number}"
            storage = FaultyStorage(local_storage(folder), [kill(number, moment)], concurrency=1)  # type: ignore[arg-type]
            exit_code, _ = fork(lambda _, storage=storage: Lakehouse.create(storage.root, storage=storage)).finish()  # type: ignore[misc]
            assert exit_code == -signal.SIGKILL
            was_created = (folder / root_path(0)).exists()
            lake = Lakehouse.open(str(folder)) if was_created else Lakehouse.create(str(folder))
            with lake.transaction() as txn:
                txn.create_namespace("ns")
            check_lake(lake)
