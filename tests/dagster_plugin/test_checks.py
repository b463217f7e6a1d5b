"""Test that each check passes on a healthy lakehouse, fails on real damage, and passes again after its repair job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.dagster_plugin.metadata_values import plain
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
    with dg.instance_for_test() as instance:
        yield instance


@dataclass
class CheckOutcome:
    """The result of one check."""

    passed: bool
    severity: dg.AssetCheckSeverity
    description: str
    metadata: Mapping[str, Any]


class Lake:
    """A local lakehouse and its checks."""

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

    def check(self, limits: CheckLimits | None = None, **options: Any) -> dict[str, CheckOutcome]:
        """Run the job of all checks, and assert that it changes nothing."""
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
        evaluations = result.get_asset_check_evaluations()
        assert {evaluation.asset_key for evaluation in evaluations} == {ONLY.lakehouse_key}
        return {
            evaluation.check_name: CheckOutcome(
                evaluation.passed,
                evaluation.severity,
                evaluation.description or "",
                plain(evaluation.metadata),
            )
            for evaluation in evaluations
        }

    def failed_checks(self, limits: CheckLimits | None = None, **options: Any) -> dict[str, CheckOutcome]:
        """Return the failed checks, and assert that all checks ran."""
        evaluations = self.check(limits, **options)
        assert set(evaluations) == ALL
        return {name: evaluation for name, evaluation in evaluations.items() if not evaluation.passed}


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance) -> Lake:
    return Lake(tmp_path, LocalClock(monkeypatch), instance)


def test_checks_pass_on_healthy_lakehouse(lake: Lake) -> None:
    evaluations = lake.check()
    assert {name for name, evaluation in evaluations.items() if evaluation.passed} == ALL
    assert all("repaired_by" not in evaluation.metadata for evaluation in evaluations.values())
    assert evaluations["hint_right"].metadata["latest"] == lake.lake.latest_version()
    assert evaluations["verify_clean"].metadata["errors"] == 0
    assert evaluations["exports_fresh"].metadata["verified"] == "weekly-1"
    assert evaluations["tree_in_shape"].metadata["nodes"] == lake.lake.snapshot().tree_shape().nodes


def test_hint_check_fails_when_hint_is_behind(lake: Lake) -> None:
    lake.lake.close()
    lake.lake.storage.write(HINT_PATH, b"1")
    (name, evaluation), *other_failures = lake.failed_checks().items()
    assert (name, other_failures, evaluation.severity) == ("hint_right", [], WARN)
    assert evaluation.description == f"the hint is behind, the latest version is {lake.lake.latest_version()}"
    assert evaluation.metadata["repaired_by"] == "repair_hint"
    repair_link = lake.failed_checks(location_name="ops")["hint_right"].metadata["repaired_by"]
    assert (repair_link.job_name, repair_link.location_name) == ("repair_hint", "ops")
    operations.repair_hint(lake.lake)
    assert lake.failed_checks() == {}


def test_verify_check_fails_on_damaged_version(lake: Lake) -> None:
    truncate(lake.lake.storage, root_path(1))
    failed = lake.failed_checks()
    evaluation = failed["verify_clean"]
    assert (evaluation.severity, evaluation.metadata["repaired_by"], evaluation.metadata["damaged_versions"]) == (
        ERROR,
        "repair",
        "1",
    )
    assert evaluation.metadata["errors"] == 1
    assert root_path(1) in evaluation.metadata["findings"]
    # Which files are live cannot be determined while a root is unreadable, and other checks report that as well.
    for name in ("retention_kept", "orphans_bounded"):
        assert (failed[name].severity, failed[name].metadata["error_code"]) == (ERROR, "corrupt-file")
    assert set(failed) == {"verify_clean", "retention_kept", "orphans_bounded"}


def test_verify_check_lists_parts_that_exceed_budget(lake: Lake) -> None:
    evaluations = lake.check(CheckLimits(verify_budget=Budget(max_requests=1)))["verify_clean"]
    assert evaluations.passed
    assert evaluations.description.startswith("not finished because ")
    assert "orphans" in evaluations.metadata["not_checked"]


def test_retention_check_fails_when_expiry_and_purge_are_overdue(lake: Lake) -> None:
    lake.clock.forward(24 + 71)
    limits = CheckLimits(export_max_age=None)
    assert lake.failed_checks(limits) == {}
    lake.clock.forward(2)
    evaluation = lake.failed_checks(limits)["retention_kept"]
    latest = lake.lake.latest_version()
    assert (evaluation.severity, evaluation.metadata["repaired_by"]) == (WARN, "expire")
    assert evaluation.description == (f"{latest} versions should have expired more than 3 d ago: 0-{latest - 1}")
    operations.plan_expiration(lake.lake).execute()
    assert lake.failed_checks(limits) == {}
    lake.clock.forward(73)
    evaluation = lake.failed_checks(limits)["retention_kept"]
    assert evaluation.metadata["repaired_by"] == "purge"
    assert f"{latest} versions could have been purged more than 3 d ago: " in evaluation.description
    operations.plan_purge(lake.lake).execute()
    assert lake.failed_checks(limits) == {}


def test_exports_check_fails_on_old_damaged_or_missing_exports(lake: Lake) -> None:
    lake.clock.forward(8 * 24 + 1)
    limits = CheckLimits(overdue=timedelta(days=99))
    (name, evaluation), *other_failures = lake.failed_checks(limits).items()
    assert (name, other_failures, evaluation.severity, evaluation.metadata["repaired_by"]) == (
        "exports_fresh",
        [],
        WARN,
        "export",
    )
    assert "'weekly-1'" in evaluation.description
    assert "daily-*" in lake.failed_checks(CheckLimits(export_pattern="daily-*"))["exports_fresh"].description
    operations.plan_export(lake.lake, "weekly-2", "full").execute()
    assert lake.failed_checks(limits) == {}
    (info,) = [info for info in operations.list_exports(lake.lake) if info.name == "weekly-2"]
    lake.lake.storage.delete(info.location)
    evaluation = lake.failed_checks(limits)["exports_fresh"]
    assert evaluation.severity == ERROR
    assert evaluation.description.startswith("export 'weekly-2': 1 of ")
    assert info.location in evaluation.description


def test_orphans_check_fails_above_limit(lake: Lake) -> None:
    for _ in range(5):
        lake.lake.stage_definition("ns", "t", table())
    lake.clock.forward(25)
    limits = CheckLimits(export_max_age=None)
    n_orphans = lake.check(limits)["orphans_bounded"].metadata["files"]
    assert n_orphans == 5
    assert lake.failed_checks(limits) == {}
    for exceeded_limits in (
        CheckLimits(export_max_age=None, orphan_files=n_orphans - 1),
        CheckLimits(export_max_age=None, orphan_bytes=99),
    ):
        (name, evaluation), *other_failures = lake.failed_checks(exceeded_limits).items()
        assert (name, other_failures, evaluation.severity, evaluation.metadata["repaired_by"]) == (
            "orphans_bounded",
            [],
            WARN,
            "orphans",
        )
        assert evaluation.metadata["files"] == n_orphans
    operations.plan_orphan_removal(lake.lake).execute()
    assert lake.check(exceeded_limits)["orphans_bounded"].metadata["files"] == 0


def test_orphans_check_reports_unfinished_purge(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(3):
        alter(lake.lake, "ns", "t")
    lake.clock.forward(30)
    operations.plan_expiration(lake.lake).execute()
    lake.clock.forward()
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "delete_batch_size", 1)
        reopened = Lakehouse.open(lake.lake.root, {"fsync": "false"})
        _, report = with_least_requests(lambda budget: operations.plan_purge(reopened).execute(budget=budget))
    assert report.stopped is not None
    evaluation = lake.failed_checks()["orphans_bounded"]
    assert "is unfinished; run purge first" in evaluation.description


def test_tree_check_fails_on_full_buffers_and_underfull_leaves(lake: Lake) -> None:
    make_untidy(lake.lake)
    shape = lake.lake.snapshot().tree_shape()
    assert shape.messages > 0
    evaluation = lake.failed_checks(CheckLimits(max_buffer_fill=0.0, min_leaf_fill=1.0))["tree_in_shape"]
    assert (evaluation.severity, evaluation.metadata["repaired_by"]) == (WARN, "compact")
    assert f"leaves are {shape.leaf_fill:.0%} full" in evaluation.description
    assert "buffers of a level" in evaluation.description
    assert operations.compact(lake.lake).has_changed
    assert lake.failed_checks(CheckLimits(max_buffer_fill=0.0)) == {}


def test_data_files_check_fails_on_many_small_files(lake: Lake) -> None:
    """The check ignores a table of another format, an empty table and a table with few files."""
    for _ in range(5):
        append_rows(lake.lake, "sales.orders")
    append_rows(lake.lake, "sales.few")
    with catalog_at(lake.lake) as catalog:
        catalog.create_table("sales.empty", ROWS.schema)
    (evaluation,) = lake.failed_checks(CheckLimits(small_files=2, export_max_age=None)).values()
    assert (evaluation.severity, evaluation.metadata["repaired_by"]) == (WARN, "compact_tables")
    assert evaluation.description.startswith("1 tables have many small data files; most in sales.orders: 5 files of ")
    file_sizes = [info.size_bytes for info in lake.lake.storage.list("tables/") if info.path.endswith(".parquet")]
    assert len(file_sizes) == 6
    metric_names = ("tables", "tables_with_small_files", "data_files", "bytes", "uncounted_tables", "not_checked")
    assert [evaluation.metadata[name] for name in metric_names] == [3, 1, 6, sum(file_sizes), 0, 0]
    assert lake.failed_checks(CheckLimits(small_files=2, small_file_bytes=min(file_sizes) - 1)) == {}
    assert lake.failed_checks(CheckLimits(small_files=6)) == {}
    operations.plan_compact_tables(lake.lake).execute()
    assert lake.failed_checks(CheckLimits(small_files=1)) == {}


def test_data_files_check_ignores_files_that_compaction_would_not_merge(lake: Lake) -> None:
    for _ in range(2):  # compaction requires at least five files
        append_rows(lake.lake, "sales.orders")
    evaluation = lake.check(CheckLimits(small_files=2))["data_files_in_shape"]
    assert evaluation.passed
    assert (evaluation.metadata["data_files"], evaluation.metadata["tables_with_small_files"]) == (2, 0)


def test_data_files_check_reports_unreadable_metadata_and_counts_other_tables(lake: Lake) -> None:
    append_rows(lake.lake, "sales.orders")
    append_rows(lake.lake, "sales.damaged")
    location = lake.lake.snapshot().table("sales", "damaged").format_properties["metadata_location"]
    lake.lake.storage.delete(location)
    evaluation = lake.failed_checks()["data_files_in_shape"]
    assert evaluation.description == "cannot read the metadata of 1 tables, for example sales.damaged"
    assert (evaluation.metadata["tables"], evaluation.metadata["repaired_by"]) == (1, "repair")


def test_data_files_check_respects_time_limit(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinitylake_ops.operations.gc.tables.BATCH_SIZE", 1)
    append_rows(lake.lake, "sales.orders")
    evaluation = lake.check(CheckLimits(data_files_seconds=0))["data_files_in_shape"]
    assert evaluation.passed
    assert evaluation.metadata["not_checked"] == 2
    assert "2 tables were not checked" in evaluation.description


def test_checks_fail_without_lakehouse(lake: Lake, instance: dg.DagsterInstance) -> None:
    checks = build_lakehouse_checks(checks="all")
    resource = TrinityLakeResource(root="memory://missing/")
    definitions = dg.Definitions(
        asset_checks=checks, jobs=[build_checks_job(checks)], resources={"lakehouse": resource}
    )
    result = definitions.resolve_job_def("check").execute_in_process(instance=instance)
    evaluations = result.get_asset_check_evaluations()
    assert len(evaluations) == len(ALL)
    assert all(
        "there is no lakehouse" in (evaluation.description or "") and not evaluation.passed
        for evaluation in evaluations
    )
