"""Test exports within a lakehouse."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from tests.clock import ClockStorage
from tests.faults import FaultyStorage, fail, lose_response
from tests.lakes import entries, listed, objects, seal
from tests.operations.changes import alter, content, create, drop, expire
from tests.operations.test_rollback import assert_rejected
from trinitylake_ops import Lakehouse
from trinitylake_ops import operations as maintenance
from trinitylake_ops.errors import (
    CorruptFileError,
    ExportExistsError,
    ExportNotFoundError,
    InvalidInputError,
    InvalidNameError,
    PlanChangedError,
    StoragePermissionError,
    TrinityLakeError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.checksums import SEAL_KEYS
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.operations import ExportReport

pytestmark = pytest.mark.usefixtures("fixed_requests")


def export(lake: Lakehouse, name: str, **arguments: Any) -> ExportReport:
    return maintenance.plan_export(lake, name, **arguments).execute()


def interrupt_export(lake: Lakehouse, name: str, **arguments: Any) -> None:
    """Start an export that fails before it copies the root."""
    faulty_lake = Lakehouse(FaultyStorage(lake.storage, [fail(1, StoragePermissionError, path_part="_export_")]))
    with pytest.raises(StoragePermissionError):
        export(faulty_lake, name, **arguments)


def export_files(lake: Lakehouse) -> set[str]:
    return {path for path in listed(lake.storage) if path.startswith(("_export_", "_ops/"))}


def test_export_is_readable_by_name_after_later_commits(lake: Lakehouse) -> None:
    version = create(lake, "a", "t")
    report = export(lake, "first")
    expected = entries(lake, version)
    assert (report.version, report.committed_version, report.level) == (version, version + 2, "minimal")
    assert report.copied_bytes == lake.storage.stat(report.location).size_bytes
    assert export_files(lake) == {report.location, report.manifest_path}
    for number in range(3):
        create(lake, f"n{number}")
        drop(lake, "a", "t") if number == 0 else None
        snapshot = lake.snapshot("first")
        assert (snapshot.version, snapshot.location, entries(lake, "first")) == (version, report.location, expected)
    copied_root = decode_node(lake.storage.read(report.location), report.location)
    assert copied_root == decode_node(lake.storage.read(root_path(version)), root_path(version))
    logged = [(info.operation, info.message) for info in lake.history(limit=6)][4:]
    assert logged == [("export", "first: complete"), ("export", f"first: keep version {version}")]
    assert maintenance.verify(lake).findings == ()


def test_manifest_lists_copies_with_size_and_checksum(lake: Lakehouse) -> None:
    report = export(lake, "first")
    manifest = json.loads(lake.storage.read(report.manifest_path))
    (file,) = manifest.pop("files")
    assert all(report.manifest_path.endswith(manifest.pop(key).partition(" ")[2]) for key in SEAL_KEYS)
    assert manifest == {"name": "first", "version": 0, "level": "minimal"}
    assert (file["source"], file["target"]) == (root_path(0), report.location)
    assert file["size_bytes"] == report.copied_bytes
    assert len(file["sha256"]) == 64


def test_older_version_and_another_export_can_be_exported(lake: Lakehouse) -> None:
    version = create(lake, "a", "t")
    drop(lake, "a")
    expected = entries(lake, version)
    for name, source in (("old", version), ("again", "old"), ("third", "again"), ("digits", str(version))):
        plan = maintenance.plan_export(lake, name, version=source)
        assert (plan.version, plan.files, plan.resumes) == (version, 1, False)
        copied_bytes = plan.execute().copied_bytes
        assert plan.bytes - 50 < copied_bytes < plan.bytes + 50, "the checksum of the copy depends on its path"
        assert entries(lake, name) == expected
    assert len({info.location for info in maintenance.list_exports(lake)}) == 4, "each export has a separate copy"
    seal(lake, version)
    assert entries(lake, "third") == expected


def test_export_of_another_program_is_listed_exported_and_dropped(lake: Lakehouse) -> None:
    version = create(lake, "a", "t")
    lake.alter_definition(exported_snapshots={"foreign": root_path(version)})
    (info,) = maintenance.list_exports(lake)
    assert (info.name, info.state, info.location) == ("foreign", "complete", root_path(version))
    assert (info.version, info.level, info.created_at, info.manifest_path) == (None, None, None, None)
    drop(lake, "a")
    export(lake, "copy", version="foreign")
    assert objects(lake.snapshot("copy")) == objects(lake.snapshot(version))
    assert_rejected(lake, ExportExistsError, lambda: maintenance.plan_export(lake, "foreign"))
    before = listed(lake.storage)
    maintenance.drop_export(lake, "foreign")
    assert before < listed(lake.storage), "the root of a version is not deleted"
    assert [info.name for info in maintenance.list_exports(lake)] == ["copy"]


@pytest.mark.parametrize(
    "name",
    ["", "17", "007", "１２", "with space", "tab\tbed", "new\nline", "bell\x07", "del\x7f", "x" * 201, "\ud800"],
)
def test_invalid_names_are_rejected(lake: Lakehouse, name: str) -> None:
    assert_rejected(lake, InvalidNameError, lambda: maintenance.plan_export(lake, name))


@pytest.mark.parametrize("name", ["x" * 200, "with.dots", "[red]markup[/]", "7a", "ünïcödé", "-dash"])
def test_valid_names_are_accepted(lake: Lakehouse, name: str) -> None:
    export(lake, name)
    assert entries(lake, name) == entries(lake)
    assert maintenance.drop_export(lake, name) == 3


def test_used_name_is_rejected(lake: Lakehouse) -> None:
    create(lake, "a")
    plan = maintenance.plan_export(lake, "taken")
    export(lake, "taken", version=0)
    assert_rejected(lake, ExportExistsError, lambda: maintenance.plan_export(lake, "taken"))
    assert_rejected(lake, ExportExistsError, lambda: maintenance.plan_export(lake, "taken", version=0))
    assert_rejected(lake, ExportExistsError, plan.execute)


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (InvalidInputError, {"level": "whole"}),
        (InvalidInputError, {"level": "MINIMAL"}),
        (InvalidInputError, {"target": "other"}),
        (InvalidInputError, {"namespaces": ["a"]}),
        (InvalidInputError, {"definitions": True}),
        (InvalidInputError, {"retain_for": 0}),
        (InvalidInputError, {"retain_for": timedelta(days=-1)}),
        (InvalidInputError, {"retain_for": timedelta(days=10_000_000)}),
        (VersionNotFoundError, {"version": 9}),
        (ExportNotFoundError, {"version": "missing"}),
    ],
)
def test_invalid_arguments_are_rejected(
    lake: Lakehouse, error: type[TrinityLakeError], arguments: dict[str, Any]
) -> None:
    assert_rejected(lake, error, lambda: maintenance.plan_export(lake, "name", **arguments))


def test_export_of_expired_version_fails(lake: Lakehouse) -> None:
    create(lake, "a")
    create(lake, "b")
    plan = maintenance.plan_export(lake, "late", version=1)
    expire(lake, "1")
    assert_rejected(lake, VersionExpiredError, lambda: maintenance.plan_export(lake, "name", version=1))
    assert_rejected(lake, VersionExpiredError, plan.execute)


def test_export_retention_is_listed(lake: Lakehouse) -> None:
    clock = ClockStorage(lake.storage, lake.storage.now_ms() + 10_000)
    lake = Lakehouse(clock)
    export(lake, "long", retain_for=timedelta(days=30))
    export(lake, "short", retain_for=5)
    export(lake, "unlimited")
    now = datetime.fromtimestamp(clock.time_ms / 1000, tz=UTC)
    long, short, unlimited = maintenance.list_exports(lake)
    assert (unlimited.retain_until, short.retain_until, long.retain_until) == (
        None,
        now + timedelta(milliseconds=5),
        now + timedelta(days=30),
    )
    assert long.created_at == now


def test_times_after_the_year_9999_are_listed(lake: Lakehouse) -> None:
    record = ExportRecord(
        name="odd",
        version=0,
        level=ExportLevel.FULL,
        root_location=root_path(0),
        state=ExportState.COMPLETE,
        created_at_millis=0,
        retain_until_millis=2**62,
    )
    lake.alter_definition(exports=(record,), exported_snapshots={"odd": root_path(0)})
    (info,) = maintenance.list_exports(lake)
    assert info.retain_until is not None
    assert info.retain_until.year == 9999
    assert (info.level, info.manifest_path) == ("full", None)
    assert maintenance.verify(lake).findings == ()


def test_interrupted_export_is_resumed(lake: Lakehouse) -> None:
    version = create(lake, "a", "t")
    interrupt_export(lake, "name", retain_for=timedelta(days=1))
    (info,) = maintenance.list_exports(lake)
    assert (info.state, info.version) == ("copying", version)
    with pytest.raises(ExportNotFoundError):
        lake.snapshot("name")
    assert_rejected(lake, ExportExistsError, lambda: maintenance.plan_export(lake, "name", version=0))
    create(lake, "b")
    plan = maintenance.plan_export(lake, "name")
    assert (plan.version, plan.resumes) == (version, True), (
        "the version of the interrupted export, not the latest version"
    )
    report = plan.execute()
    assert (report.resumed, report.version, report.location) == (True, version, info.location)
    (completed_info,) = maintenance.list_exports(lake)
    assert completed_info == replace(info, state="complete", retain_until=None), "the last run determines the retention"
    assert export_files(lake) == {report.location, report.manifest_path}
    assert maintenance.verify(lake).findings == ()


def test_copy_that_differs_from_source_fails(lake: Lakehouse) -> None:
    interrupt_export(lake, "name")
    (info,) = maintenance.list_exports(lake)
    lake.storage.create(info.location, b"another")
    error = assert_rejected(lake, CorruptFileError, lambda: export(lake, "name"))
    assert error.path == info.location
    maintenance.drop_export(lake, "name")
    assert not export(lake, "name").resumed


class ActionStorage(FaultyStorage):
    """A storage that runs an action just after the copied root was read back."""

    action: Callable[[], Any] | None = None

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        data = super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        if self.action is not None and path.startswith("_export_"):
            action, self.action = self.action, None
            action()
        return data


def test_two_runs_can_resume_the_same_export(lake: Lakehouse) -> None:
    interrupt_export(lake, "name")
    storage = ActionStorage(lake.storage)
    faster_reports: list[ExportReport] = []
    storage.action = lambda: faster_reports.append(export(lake, "name"))
    slower_report = export(Lakehouse(storage), "name")
    assert [report.location for report in faster_reports] == [slower_report.location]
    assert lake.latest_version() == 2


def test_export_dropped_during_copy_fails(lake: Lakehouse) -> None:
    storage = ActionStorage(lake.storage)
    storage.action = lambda: maintenance.drop_export(lake, "name")
    with pytest.raises(ExportNotFoundError):
        export(Lakehouse(storage), "name")
    assert maintenance.list_exports(lake) == []
    assert maintenance.verify(lake).findings == ()


def test_lost_responses_do_not_fail_export(lake: Lakehouse) -> None:
    for path_part in ("_ops/", "_export_"):
        faulty_lake = Lakehouse(FaultyStorage(lake.storage, [lose_response(1, kind="create", path_part=path_part)]))
        export(faulty_lake, f"lost-{path_part.strip('_/')}")
    assert [info.state for info in maintenance.list_exports(lake)] == ["complete", "complete"]


def test_only_approved_plan_is_executed(lake: Lakehouse) -> None:
    plan = maintenance.plan_export(lake, "name")
    assert plan.digest == maintenance.plan_export(lake, "name").digest
    digests = {maintenance.plan_export(lake, "name", retain_for=days).digest for days in (None, 1, 2)}
    assert len(digests) == 3
    assert_rejected(lake, PlanChangedError, lambda: plan.execute("nonsense"))
    create(lake, "a")
    assert_rejected(lake, PlanChangedError, lambda: plan.execute(plan.digest))
    repeated = maintenance.plan_export(lake, "name", version=0)
    assert repeated.execute(repeated.digest).version == 0


def test_concurrent_exports_do_not_conflict(lake: Lakehouse) -> None:
    class RacingStorage(FaultyStorage):
        has_raced = False

        def create(self, path: str, data: bytes) -> None:
            if path == root_path(1) and not self.has_raced:
                self.has_raced = True
                export(lake, "theirs")
            super().create(path, data)

    export(Lakehouse(RacingStorage(lake.storage)), "ours")
    assert [info.name for info in maintenance.list_exports(lake)] == ["ours", "theirs"]


def test_drop_deletes_only_its_own_files(lake: Lakehouse) -> None:
    create(lake, "a", "t")
    kept = export(lake, "kept")
    dropped = export(lake, "gone")
    before = content(lake)
    version = maintenance.drop_export(lake, "gone")
    assert version == lake.latest_version()
    after = content(lake)
    assert before.keys() - after.keys() == {dropped.location, dropped.manifest_path}
    assert export_files(lake) == {kept.location, kept.manifest_path}
    assert next(iter(lake.history())).operation == "drop-export"
    assert_rejected(lake, ExportNotFoundError, lambda: maintenance.drop_export(lake, "gone"))
    with pytest.raises(ExportNotFoundError):
        lake.snapshot("gone")
    maintenance.rollback(lake, version - 1)
    assert [info.name for info in maintenance.list_exports(lake)] == ["kept"]


@pytest.mark.parametrize(
    "paths",
    [
        (root_path(1), "_latest_hint.txt"),
        ("_lakehouse_def_x.binpb", "_ops/lease-1.json"),
        ("_export_x/../_latest_hint.txt", "_ops/export-x/../../_latest_hint.txt"),
        ("file:///etc/passwd", "_ops/export-/deeper.json"),
        ("", ""),
    ],
)
def test_drop_keeps_files_with_unknown_names(lake: Lakehouse, paths: tuple[str, str]) -> None:
    create(lake, "a")
    lake.storage.create("_ops/lease-1.json", b"{}")
    lake.storage.create("_ops/export-/deeper.json", b"{}")
    record = ExportRecord(
        name="odd", version=1, level=ExportLevel.MINIMAL, root_location=paths[0], manifest_path=paths[1]
    )
    lake.alter_definition(exports=(record,))
    before = listed(lake.storage)
    maintenance.drop_export(lake, "odd")
    assert before < listed(lake.storage)


def test_drop_keeps_files_of_other_exports(lake: Lakehouse) -> None:
    report = export(lake, "first")
    definition = lake.snapshot().definition
    duplicate_record = replace(definition.exports[0], name="twin")
    lake.alter_definition(
        exports=(*definition.exports, duplicate_record),
        exported_snapshots={**definition.exported_snapshots, "twin": report.location},
    )
    maintenance.drop_export(lake, "first")
    assert export_files(lake) == {report.location, report.manifest_path}
    maintenance.drop_export(lake, "twin")
    assert export_files(lake) == set()


def test_drop_succeeds_when_files_cannot_be_deleted(lake: Lakehouse) -> None:
    export(lake, "name")
    lake_without_deletes = Lakehouse(
        FaultyStorage(lake.storage, [fail(1, StoragePermissionError, kind="delete", times=9)])
    )
    maintenance.drop_export(lake_without_deletes, "name")
    assert maintenance.list_exports(lake) == []
    assert len(export_files(lake)) == 2
    assert maintenance.verify(lake).findings == ()


@pytest.mark.parametrize("change", [lambda lake: alter(lake, "a", "t"), lambda lake: drop(lake, "a")])
def test_plans_and_reports_are_rendered_as_json_and_text(lake: Lakehouse, change: Callable[[Lakehouse], Any]) -> None:
    create(lake, "a", "t")
    change(lake)
    plan = maintenance.plan_export(lake, "[red]name[/]")
    assert json.loads(plan.to_json()) == plan.to_dict()
    report = plan.execute(plan.digest)
    assert json.loads(report.to_json()) == report.to_dict()
    assert report.cost.total_requests == sum(report.cost.requests.values()) > 0
    for text in (str(plan), str(report)):
        assert "[red]name[/]" in text
