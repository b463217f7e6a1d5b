"""Versions with an inconsistent time or predecessor can be acknowledged; ``verify`` then reports them as "past"."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.foreign import ForeignLake
from tests.lakes import seal
from tests.operations.changes import create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, InvalidInputError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.keys import COMMIT_ID, CREATED_AT_MILLIS
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.operations.gc.listing import ACKNOWLEDGED
from trinitylake_ops.reports import verification_page


def commit_with_old_time(lake: Lakehouse, to: int) -> int:
    """Commit the content of an old version with its time and predecessor, as a faulty program may do."""
    latest, target = lake.snapshot(), lake.snapshot(to)
    system = {**target.root.system, "rollback_from_root": latest.location}
    system.pop(COMMIT_ID, None)
    root = replace(target.root, system=system)
    lake.storage.create(root_path(latest.version + 1), encode_node(root, latest.definition.order))
    return latest.version + 1


def findings_of(lake: Lakehouse) -> set[tuple[str, str, int | None]]:
    report = operations.verify(Lakehouse(lake.storage))
    assert verification_page(report, 0)
    codes = {"chain-broken", "time-not-rising"}
    return {(finding.severity, finding.code, finding.version) for finding in report.findings if finding.code in codes}


def commit_copied_root(lake: Lakehouse, to: int) -> int:
    """Commit a copy of an old root file, including its checksums."""
    return ForeignLake(lake.storage).rollback_by_copy(to)


@pytest.fixture(params=[commit_with_old_time, commit_copied_root])
def lake_with_faulty_version(tmp_path: Path, request: pytest.FixtureRequest) -> tuple[Lakehouse, int]:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})  # the fixture would check that times increase
    create(lake, "a")
    create(lake, "b")
    version = request.param(lake, 1)
    create(lake, "c")
    return lake, version


def test_acknowledged_version_is_reported_as_past(lake_with_faulty_version: tuple[Lakehouse, int]) -> None:
    lake, version = lake_with_faulty_version
    assert findings_of(lake) == {("error", "chain-broken", version), ("error", "time-not-rising", version)}
    assert not operations.verify(lake).is_clean
    report = operations.reconcile(lake, acknowledge=str(version))
    assert (report.acknowledged, report.version) == (str(version), version + 2)
    assert findings_of(lake) == {("past", "chain-broken", version), ("past", "time-not-rising", version)}
    verified = operations.verify(lake)
    assert verified.is_clean
    assert operations.plan_repair(lake, verified).remaining == ()
    assert operations.reconcile(lake, acknowledge=str(version)).version is None, "already acknowledged"
    second_version = commit_with_old_time(lake, 1)
    operations.reconcile(lake, acknowledge=str(second_version))
    assert lake.snapshot().definition.properties[ACKNOWLEDGED] == f"{version},{second_version}"


def test_sealed_version_is_reported_as_past(lake_with_faulty_version: tuple[Lakehouse, int]) -> None:
    lake, version = lake_with_faulty_version
    seal(lake, version)
    assert {severity for severity, _, _ in findings_of(lake)} == {"past"}


@pytest.mark.parametrize("versions", ["0", "1-2", "999", "x", "-1", "0-4294967295", ","])
def test_only_faulty_versions_can_be_acknowledged(
    lake_with_faulty_version: tuple[Lakehouse, int], versions: str
) -> None:
    lake, _ = lake_with_faulty_version
    latest = lake.latest_version()
    with pytest.raises(InvalidInputError):
        operations.reconcile(lake, acknowledge=versions)
    assert lake.latest_version() == latest


def test_external_export_does_not_copy_acknowledgements(lake_with_faulty_version: tuple[Lakehouse, int]) -> None:
    lake, version = lake_with_faulty_version
    operations.reconcile(lake, acknowledge=str(version))
    target = f"{lake.root.rstrip('/')}-target/"
    operations.plan_export(lake, "copy", target=target, level="full").execute()
    assert ACKNOWLEDGED not in Lakehouse.open(target).snapshot().definition.properties


def test_sealed_version_with_any_time_is_reported_as_past(lake_with_faulty_version: tuple[Lakehouse, int]) -> None:
    """A time in the future is a warning while the version is live."""
    lake, version = lake_with_faulty_version
    ahead_ms = lake.storage.now_ms() + 10**9
    for number in (version, version + 1):
        path = root_path(number)
        node = decode_node(lake.storage.read(path), path)
        node.system = {**node.system, CREATED_AT_MILLIS: str(ahead_ms + number)}
        lake.storage.write(path, encode_node(node, order=128))

    def findings_about_future_times() -> list[tuple[str, int | None]]:
        report = operations.verify(Lakehouse(lake.storage))
        return [(finding.severity, finding.version) for finding in report.findings if finding.code == "time-in-future"]

    assert findings_about_future_times() == [("warning", version)]
    seal(lake, version)
    assert findings_about_future_times() == [("past", version), ("warning", version + 1)]


def test_current_faults_are_not_reported_as_past(lake_with_faulty_version: tuple[Lakehouse, int]) -> None:
    """An unreadable root of a purged version is reported, because readers need all roots to find the latest version."""
    lake, version = lake_with_faulty_version
    seal(lake, version)
    lake.storage.write(root_path(version), b"flipped")
    report = operations.verify(Lakehouse(lake.storage))
    assert ("error", "root-corrupt", version) in {
        (finding.severity, finding.code, finding.version) for finding in report.findings
    }
    with pytest.raises(CorruptFileError):
        operations.reconcile(lake, acknowledge=str(version))
