"""The checks of a lakehouse: each passes on a sound one, fails on real damage, and its mending job mends it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.dagster_plugin.plain import plain
from tests.lakes import table
from tests.local_clock import HOUR_MS, LocalClock
from tests.operations.aging import with_least_requests
from tests.operations.changes import ROWS, alter, append_rows, content, create, make_untidy, small_sizes, truncate
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.checks import CheckLimits, build_checks_job, build_lakehouse_checks
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import Budget
from trinitylake_ops.storage import LocalStorage

ALL = {
    "hint_right", "verify_clean", "retention_kept", "exports_fresh", "clones_in_time", "orphans_bounded",
    "tree_in_shape", "data_files_in_shape",
}  # fmt: skip
ERROR, WARN = dg.AssetCheckSeverity.ERROR, dg.AssetCheckSeverity.WARN


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as made:
        yield made


@dataclass
class Checked:
    """What one check said."""

    passed: bool
    severity: dg.AssetCheckSeverity
    description: str
    metadata: Mapping[str, Any]


class Lake:
    """A local lakehouse with its checks."""

    def __init__(self, folder: Path, clock: LocalClock, instance: dg.DagsterInstance):
        self.clock = clock
        self.instance = instance
        self.lake = Lakehouse.create(
            str(folder / "lake"),
            {"fsync": "false"},
            maximum_version_age_millis=24 * HOUR_MS,
            minimum_versions_to_keep=1,
            txn_ttl_millis=60_000,
            order=4,
            **small_sizes(4),
        )
        create(self.lake, "ns", "t", "u")
        alter(self.lake, "ns", "t")
        operations.plan_export(self.lake, "weekly-1", "full").execute()

    def check(self, limits: CheckLimits | None = None, **options: Any) -> dict[str, Checked]:
        """Run the job of all checks; it must change nothing."""
        before = content(self.lake)
        checks = build_lakehouse_checks(checks="all", limits=limits, **options)
        resource = TrinityLakeResource(root=self.lake.root, storage_options=StorageSettings(fsync="false"))
        definitions = dg.Definitions(
            asset_checks=checks,
            jobs=[build_checks_job(checks)],
            resources={"lakehouse": resource},
            executor=dg.in_process_executor,
        )
        job = definitions.resolve_job_def("check")
        result = job.execute_in_process(instance=self.instance)
        assert content(self.lake) == before
        found = result.get_asset_check_evaluations()
        assert {one.asset_key for one in found} == {ONLY.lakehouse_key}
        return {
            one.check_name: Checked(
                one.passed,
                one.severity,
                one.description or "",
                plain(one.metadata),
            )
            for one in found
        }

    def failed(self, limits: CheckLimits | None = None, **options: Any) -> dict[str, Checked]:
        """Return the checks that failed; all must have run."""
        found = self.check(limits, **options)
        assert set(found) == ALL
        return {name: one for name, one in found.items() if not one.passed}


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance) -> Lake:
    return Lake(tmp_path, LocalClock(monkeypatch), instance)


def test_all_pass_on_a_sound_lakehouse(lake: Lake) -> None:
    found = lake.check()
    assert {name for name, one in found.items() if one.passed} == ALL
    assert all("repaired_by" not in one.metadata for one in found.values())
    assert found["hint_right"].metadata["latest"] == lake.lake.latest_version()
    assert found["verify_clean"].metadata["errors"] == 0
    assert found["exports_fresh"].metadata["verified"] == "weekly-1"
    assert found["tree_in_shape"].metadata["nodes"] == lake.lake.snapshot().tree_shape().nodes


def test_a_wrong_hint(lake: Lake) -> None:
    lake.lake.close()
    lake.lake.storage.write(HINT_PATH, b"1")
    (name, one), *others = lake.failed().items()
    assert (name, others, one.severity) == ("hint_right", [], WARN)
    assert one.description == f"the hint is behind, the latest version is {lake.lake.latest_version()}"
    assert one.metadata["repaired_by"] == "repair_hint"
    linked = lake.failed(location_name="ops")["hint_right"].metadata["repaired_by"]
    assert (linked.job_name, linked.location_name) == ("repair_hint", "ops")
    operations.repair_hint(lake.lake)
    assert lake.failed() == {}


def test_a_damaged_version(lake: Lake) -> None:
    truncate(lake.lake.storage, root_path(1))
    failed = lake.failed()
    one = failed["verify_clean"]
    assert (one.severity, one.metadata["repaired_by"], one.metadata["damaged_versions"]) == (ERROR, "repair", "1")
    assert one.metadata["errors"] == 1
    assert root_path(1) in one.metadata["findings"]
    # What is kept cannot be told while a root cannot be read: that is said, too.
    for name in ("retention_kept", "orphans_bounded"):
        assert (failed[name].severity, failed[name].metadata["error_code"]) == (ERROR, "corrupt-file")
    assert set(failed) == {"verify_clean", "retention_kept", "orphans_bounded"}


def test_a_budget_of_verify_says_what_was_not_looked_at(lake: Lake) -> None:
    found = lake.check(CheckLimits(verify_budget=Budget(max_requests=1)))["verify_clean"]
    assert found.passed
    assert found.description.startswith("not finished because ")
    assert "orphans" in found.metadata["not_looked_at"]


def test_retention_that_nobody_keeps(lake: Lake) -> None:
    lake.clock.forward(24 + 71)
    limits = CheckLimits(export_max_age=None)
    assert lake.failed(limits) == {}
    lake.clock.forward(2)
    one = lake.failed(limits)["retention_kept"]
    latest = lake.lake.latest_version()
    assert (one.severity, one.metadata["repaired_by"]) == (WARN, "expire")
    assert one.description == (f"{latest} versions should have expired more than 3 d ago: 0-{latest - 1}")
    operations.plan_expiration(lake.lake).execute()
    assert lake.failed(limits) == {}
    lake.clock.forward(73)
    one = lake.failed(limits)["retention_kept"]
    assert one.metadata["repaired_by"] == "purge"
    assert f"{latest} versions could have been purged more than 3 d ago: " in one.description
    operations.plan_purge(lake.lake).execute()
    assert lake.failed(limits) == {}


def test_exports_that_are_old_damaged_or_missing(lake: Lake) -> None:
    lake.clock.forward(8 * 24 + 1)
    limits = CheckLimits(overdue=timedelta(days=99))
    (name, one), *others = lake.failed(limits).items()
    assert (name, others, one.severity, one.metadata["repaired_by"]) == ("exports_fresh", [], WARN, "export")
    assert "'weekly-1'" in one.description
    assert "daily-*" in lake.failed(CheckLimits(export_pattern="daily-*"))["exports_fresh"].description
    operations.plan_export(lake.lake, "weekly-2", "full").execute()
    assert lake.failed(limits) == {}
    (info,) = [info for info in operations.list_exports(lake.lake) if info.name == "weekly-2"]
    lake.lake.storage.delete(info.location)
    one = lake.failed(limits)["exports_fresh"]
    assert one.severity == ERROR
    assert one.description.startswith("export 'weekly-2': 1 of ")
    assert info.location in one.description


def test_too_many_orphans(lake: Lake) -> None:
    for _ in range(5):
        lake.lake.stage_definition("ns", "t", table())
    lake.clock.forward(25)
    limits = CheckLimits(export_max_age=None)
    n_orphans = lake.check(limits)["orphans_bounded"].metadata["files"]
    assert n_orphans == 5
    assert lake.failed(limits) == {}
    for beyond in (
        CheckLimits(export_max_age=None, orphan_files=n_orphans - 1),
        CheckLimits(export_max_age=None, orphan_bytes=99),
    ):
        (name, one), *others = lake.failed(beyond).items()
        assert (name, others, one.severity, one.metadata["repaired_by"]) == ("orphans_bounded", [], WARN, "orphans")
        assert one.metadata["files"] == n_orphans
    operations.plan_orphan_removal(lake.lake).execute()
    assert lake.check(beyond)["orphans_bounded"].metadata["files"] == 0


def test_an_unfinished_purge_is_said_where_orphans_cannot_be_told(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        alter(lake.lake, "ns", "t")
    lake.clock.forward(30)
    operations.plan_expiration(lake.lake).execute()
    lake.clock.forward()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete_batch_size", 1)
        opened = Lakehouse.open(lake.lake.root, {"fsync": "false"})
        _, report = with_least_requests(lambda budget: operations.plan_purge(opened).execute(budget=budget))
    assert report.stopped is not None
    one = lake.failed()["orphans_bounded"]
    assert "is unfinished; run purge first" in one.description


def test_a_tree_out_of_shape(lake: Lake) -> None:
    make_untidy(lake.lake)
    shape = lake.lake.snapshot().tree_shape()
    assert shape.messages > 0
    one = lake.failed(CheckLimits(max_buffer_fill=0.0, min_leaf_fill=1.0))["tree_in_shape"]
    assert (one.severity, one.metadata["repaired_by"]) == (WARN, "compact")
    assert f"leaves are {shape.leaf_fill:.0%} full" in one.description
    assert "buffers of a level" in one.description
    assert operations.compact(lake.lake).has_changed
    assert lake.failed(CheckLimits(max_buffer_fill=0.0)) == {}


def test_tables_with_many_small_data_files(lake: Lake) -> None:
    """A table of another format, one without rows and one with few files are none of them."""
    for _ in range(5):
        append_rows(lake.lake, "sales.orders")
    append_rows(lake.lake, "sales.few")
    with catalog_at(lake.lake) as catalog:
        catalog.create_table("sales.empty", ROWS.schema)
    (one,) = lake.failed(CheckLimits(small_files=2, export_max_age=None)).values()
    assert (one.severity, one.metadata["repaired_by"]) == (WARN, "compact_tables")
    assert one.description.startswith("1 tables have many small data files; most in sales.orders: 5 files of ")
    data = [info.size_bytes for info in lake.lake.storage.list("tables/") if info.path.endswith(".parquet")]
    assert len(data) == 6
    figures = ("tables", "tables_with_small_files", "data_files", "bytes", "uncounted_tables", "not_looked_at")
    assert [one.metadata[name] for name in figures] == [3, 1, 6, sum(data), 0, 0]
    assert lake.failed(CheckLimits(small_files=2, small_file_bytes=min(data) - 1)) == {}
    assert lake.failed(CheckLimits(small_files=6)) == {}
    operations.plan_compact_tables(lake.lake).execute()
    assert lake.failed(CheckLimits(small_files=1)) == {}


def test_small_data_files_that_no_compaction_would_merge_are_fine(lake: Lake) -> None:
    for _ in range(2):  # a compaction merges no fewer than five
        append_rows(lake.lake, "sales.orders")
    one = lake.check(CheckLimits(small_files=2))["data_files_in_shape"]
    assert one.passed
    assert (one.metadata["data_files"], one.metadata["tables_with_small_files"]) == (2, 0)


def test_metadata_that_nobody_can_read_is_told_and_the_rest_is_counted(lake: Lake) -> None:
    append_rows(lake.lake, "sales.orders")
    append_rows(lake.lake, "sales.gone")
    location = lake.lake.snapshot().table("sales", "gone").format_properties["metadata_location"]
    lake.lake.storage.delete(location)
    one = lake.failed()["data_files_in_shape"]
    assert one.description == "cannot read the metadata of 1 tables, for example sales.gone"
    assert (one.metadata["tables"], one.metadata["repaired_by"]) == (1, "repair")


def test_data_files_are_counted_within_a_time(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinitylake_ops.operations.gc.tables._BATCH", 1)
    append_rows(lake.lake, "sales.orders")
    one = lake.check(CheckLimits(data_files_seconds=0))["data_files_in_shape"]
    assert one.passed
    assert one.metadata["not_looked_at"] == 2
    assert "2 tables were not checked" in one.description


def test_no_lakehouse(lake: Lake, instance: dg.DagsterInstance) -> None:
    checks = build_lakehouse_checks(checks="all")
    resource = TrinityLakeResource(root="memory://never-made/")
    definitions = dg.Definitions(
        asset_checks=checks, jobs=[build_checks_job(checks)], resources={"lakehouse": resource}
    )
    result = definitions.resolve_job_def("check").execute_in_process(instance=instance)
    found = result.get_asset_check_evaluations()
    assert len(found) == len(ALL)
    assert all("there is no lakehouse" in (one.description or "") and not one.passed for one in found)
