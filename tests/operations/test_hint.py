"""Test that each state of the hint is detected and repaired, and that a repair never sets an older version."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import FaultyStorage
from tests.lakes import Lakes, listed, seal
from tests.operations.changes import create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import LakehouseNotFoundError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.operations import HintState
from trinitylake_ops.storage import MemoryStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

WRONG_HINTS = [
    (b"0", HintState.BEHIND, 0),
    (b"1", HintState.BEHIND, 1),
    (b"3", HintState.AHEAD, 3),
    (b"4294967295", HintState.AHEAD, 4294967295),
    (b"4294967296", HintState.GARBAGE, None),
    (b"-1", HintState.GARBAGE, None),
    (b"", HintState.GARBAGE, None),
    (b"two", HintState.GARBAGE, None),
    (b"\xff\x00" * 4_000, HintState.GARBAGE, None),
    (None, HintState.MISSING, None),
]


def lake_with_hint(lake: Lakehouse, hint: bytes | None) -> Lakehouse:
    create(lake, "a")
    create(lake, "b")
    if hint is None:
        lake.storage.delete(HINT_PATH)
    else:
        lake.storage.write(HINT_PATH, hint)
    return lake


@pytest.mark.parametrize(("hint", "state", "hinted"), WRONG_HINTS)
def test_wrong_hints_are_detected_and_repaired(
    lake: Lakehouse, hint: bytes | None, state: HintState, hinted: int | None
) -> None:
    lake_with_hint(lake, hint)
    before = listed(lake.storage)
    inspection = operations.inspect_hint(lake)
    assert (inspection.state, inspection.hinted, inspection.latest, inspection.repaired, inspection.is_right) == (
        state,
        hinted,
        2,
        False,
        False,
    )
    assert listed(lake.storage) == before, "an inspection changes nothing"
    repaired = operations.repair_hint(lake)
    assert (repaired.state, repaired.hinted, repaired.repaired, repaired.is_right) == (state, hinted, True, True)
    assert lake.storage.read(HINT_PATH) == b"2"
    assert operations.inspect_hint(lake).state == HintState.RIGHT


def test_hint_of_a_purged_version_is_distinguished(lake: Lakehouse) -> None:
    lake_with_hint(lake, b"1")
    seal(lake, 1)
    assert operations.inspect_hint(lake).state == HintState.SEALED
    assert lake.latest_version() == 2
    repaired = operations.repair_hint(lake)
    assert (repaired.state, repaired.repaired) == (HintState.SEALED, True)
    assert operations.inspect_hint(lake).state == HintState.RIGHT


@pytest.mark.parametrize("hint", [b"2", b" 2\n", b"002"])
def test_right_hint_is_not_written(lake: Lakehouse, hint: bytes) -> None:
    lake_with_hint(lake, hint)
    report = operations.repair_hint(lake)
    assert (report.state, report.repaired, report.is_right) == (HintState.RIGHT, False, True)
    assert lake.storage.read(HINT_PATH) == hint
    assert set(report.cost.requests) == {"read"}


def test_repair_never_sets_the_hint_behind_a_commit(lake: Lakehouse) -> None:
    class RacingStorage(FaultyStorage):
        has_raced = False

        def write(self, path: str, data: bytes) -> None:
            if not self.has_raced:
                self.has_raced = True
                create(lake, "c")
            super().write(path, data)

    report = operations.repair_hint(Lakehouse(RacingStorage(lake_with_hint(lake, b"0").storage)))
    assert (report.latest, lake.storage.read(HINT_PATH)) == (3, b"3")


def test_commit_during_inspection_is_not_a_stale_hint(lake: Lakehouse) -> None:
    """The other writer commits during several inspections in a row."""
    n_commits = 5

    class RacingStorage(FaultyStorage):
        n_committed = n_reads = 0

        def read(
            self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
        ) -> bytes:
            data = super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
            self.n_reads += path == HINT_PATH
            if (
                path == HINT_PATH and self.n_reads % 2 and self.n_committed < n_commits
            ):  # each inspection reads the hint twice
                self.n_committed += 1
                create(lake, f"c{self.n_committed}")
            return data

    report = operations.inspect_hint(Lakehouse(RacingStorage(lake.storage)))
    assert (report.state, report.latest) == (HintState.RIGHT, n_commits)


def test_stale_hint_is_detected_during_commits(lake: Lakehouse) -> None:
    class RacingStorage(FaultyStorage):
        n_reads = n_inspections = 0

        def read(
            self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
        ) -> bytes:
            data = super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
            self.n_reads += path == HINT_PATH
            if path == HINT_PATH and self.n_reads % 2:
                self.n_inspections += 1
                create(lake, f"c{self.n_inspections}")
                lake.storage.write(HINT_PATH, b"0")
            return data

    storage = RacingStorage(lake_with_hint(lake, b"0").storage)
    report = operations.inspect_hint(Lakehouse(storage))
    assert (report.state, report.hinted, storage.n_inspections) == (HintState.BEHIND, 0, 2)


def test_hint_without_lakehouse_fails() -> None:
    lake = Lakehouse(MemoryStorage("memory://missing-lakehouse/"))
    for operation in (operations.inspect_hint, operations.repair_hint):
        with pytest.raises(LakehouseNotFoundError):
            operation(lake)


def test_hint_report_is_rendered_as_json_and_text(lake: Lakehouse) -> None:
    report = operations.inspect_hint(lake_with_hint(lake, b"7"))
    document = report.to_dict()
    assert document.pop("cost")["requests"] == dict(report.cost.requests)
    assert document == {"state": "ahead", "hinted": 7, "latest": 2, "repaired": False}
    assert "ahead" in str(report)


def test_huge_hint_is_read_partially(lake: Lakehouse) -> None:
    lake.storage.write(HINT_PATH, b"1" * 1_000_000)
    report = operations.inspect_hint(Lakehouse(lake.storage))
    assert report.state == HintState.GARBAGE
    assert report.cost.bytes_read < 100_000


@pytest.mark.local_only("replaces the hint with a symbolic link")
def test_unreadable_hint_is_garbage_and_can_be_repaired(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local()
    create(lake, "n")
    hint = tmp_path / "lake" / HINT_PATH
    hint.unlink()
    hint.symlink_to(hint)  # reads fail for all users
    assert lake.snapshot().namespaces() == ["n"]
    assert operations.inspect_hint(lake).state == "garbage"
    assert operations.repair_hint(lake).repaired
    assert hint.read_text() == "1"
