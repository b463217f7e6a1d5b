"""Test the rollback, export, restore and repair jobs, for one and for several lakehouses in a code location."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import dagster as dg
import pytest

from tests.dagster_plugin.maintenance_jobs import JobOutcome, Jobs, approved
from tests.lakes import check_lake
from tests.local_clock import LocalClock
from tests.operations.changes import alter, append_rows, content, create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.schedules import build_maintenance_schedules
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.file_names import HINT_PATH


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, instance: dg.DagsterInstance) -> Jobs:
    return Jobs(tmp_path, LocalClock(monkeypatch), instance)


def partitions(instance: dg.DagsterInstance) -> list[str]:
    return sorted(instance.get_dynamic_partitions(ONLY.exports_partitions))


def test_export_job_adds_partition_for_each_level(jobs: Jobs, instance: dg.DagsterInstance, tmp_path: Path) -> None:
    minimal = jobs.must_run("export", name="root", level="minimal", version=1, retain_for="1d")
    partial = jobs.must_run("export", name="tree", level="partial", namespaces=["ns"], definitions=True)
    external = jobs.must_run("export", name="all", target=str(tmp_path / "backup"))
    exports = {info.name: info for info in operations.list_exports(jobs.lake)}
    assert [(name, exports[name].level, exports[name].version) for name in ("root", "tree", "all")] == [
        ("root", "minimal", 1),
        ("tree", "partial", 5),  # the first export committed two versions
        ("all", "full", 7),
    ]
    assert exports["root"].retain_until is not None
    assert exports["tree"].namespaces == ("ns",)
    for outcome in (minimal, partial, external):
        assert all(
            type(outcome.metadata[name]) is int for name in ("files", "copied_files", "copied_bytes", "requests")
        )
        assert outcome.metadata["duration_ms"] >= 0
        assert outcome.materializations[0]["operation"] == "export"
    assert partitions(instance) == ["all", "root", "tree"]

    dropped = jobs.must_apply("drop_export", name="root")
    assert dropped.materializations[0]["operation"] == "drop-export"
    assert partitions(instance) == ["all", "tree"]
    check_lake(jobs.lake)


def test_restore_job_restores_internal_and_external_exports(jobs: Jobs, tmp_path: Path) -> None:
    jobs.must_run("export", name="internal", level="minimal", version=1)
    jobs.must_run("export", name="external", target=str(tmp_path / "backup"))
    outcome = jobs.must_apply("restore", name="internal", tables=["ns.t"])
    assert (outcome.metadata["objects"], outcome.metadata["restored_from"]) == (1, "internal")
    assert jobs.lake.snapshot().table("ns", "t").properties == jobs.lake.snapshot(1).table("ns", "t").properties
    outcome = jobs.must_apply("restore", name="external")
    assert outcome.metadata["files"] >= 1
    assert jobs.lake.snapshot().table("ns", "t").properties == jobs.lake.snapshot(3).table("ns", "t").properties
    check_lake(jobs.lake)


def test_partial_export_and_restore_fail_run_with_events(
    jobs: Jobs, instance: dg.DagsterInstance, tmp_path: Path
) -> None:
    append_rows(jobs.lake, "ns.rows")
    jobs.must_run("export", name="external", target=str(tmp_path / "backup"))
    for lake in (jobs.lake, Lakehouse.open(str(tmp_path / "backup"), {"fsync": "false"})):
        location = lake.snapshot().table("ns", "rows").format_properties[METADATA_LOCATION]
        lake.storage.write(location, b"garbage")
    outcome = jobs.run("export", name="partial", level="full")
    assert not outcome.success
    assert "without damaged tables: ns.rows" in outcome.error
    assert [event["operation"] for event in outcome.materializations] == ["export"]
    assert partitions(instance) == ["external", "partial"]
    with jobs.lake.transaction() as txn:
        txn.create_namespace("new")
    outcome = jobs.apply(jobs.plan("restore", name="external"), "restore")
    assert not outcome.success
    assert "without damaged tables: ns.rows" in outcome.error
    assert [event["operation"] for event in outcome.materializations] == ["restore"]


def test_expire_job_deletes_partitions_of_expired_exports(jobs: Jobs, instance: dg.DagsterInstance) -> None:
    jobs.must_run("export", name="short", level="minimal", version=1, retain_for="30m")
    assert partitions(instance) == ["short"]
    jobs.clock.forward()
    assert jobs.must_apply("expire").metadata["approved_by"]
    assert partitions(instance) == []


def test_unattended_repair_never_rolls_back(jobs: Jobs) -> None:
    create(jobs.lake, "more", "t")
    alter(jobs.lake, "more", "t")
    damaged_path = jobs.lake.snapshot().entry(jobs.lake.snapshot().keys.table_key("more", "t"))
    assert damaged_path is not None
    jobs.lake.storage.delete(damaged_path)
    jobs.lake.close()
    jobs.lake.storage.write(HINT_PATH, b"0")
    latest = jobs.lake.latest_version()
    outcome = jobs.must_run("repair", unattended=True)
    assert (outcome.metadata["n_steps"], outcome.metadata["version"], outcome.materializations) == (1, latest, [])
    assert f"| definition-unreadable | {damaged_path} |" in outcome.metadata["left"]
    assert jobs.lake.storage.read(HINT_PATH) == str(latest).encode()
    assert jobs.must_run("repair", unattended=True).metadata["n_steps"] == 0


EU, US = LakehouseNames("eu"), LakehouseNames("us")


def test_jobs_of_several_lakehouses_in_one_code_location(tmp_path: Path, instance: dg.DagsterInstance) -> None:
    lakes = {names: Lakehouse.create(str(tmp_path / names.name), {"fsync": "false"}) for names in (EU, US)}
    limits = ApplyLimits(max_files=1, max_bytes=1, min_age=timedelta(0))
    settings = StorageSettings(fsync="false")
    definitions = dg.Definitions(
        jobs=[job for names in lakes for job in build_jobs(names, operations="all", limits=limits)],
        schedules=[
            schedule
            for names in lakes
            for schedule in build_maintenance_schedules(names, crons={"repair_hint": "7 * * * *"})
        ],
        resources={
            names.resource_key: TrinityLakeResource(root=lake.root, storage_options=settings)
            for names, lake in lakes.items()
        },
        executor=dg.in_process_executor,
    )
    dg.Definitions.validate_loadable(definitions)
    for lake in lakes.values():
        create(lake, "ns", "t")
        alter(lake, "ns", "t")
    us_content = content(lakes[US])

    def run(job: str, **config: Any) -> JobOutcome:
        result = definitions.resolve_job_def(job).execute_in_process(run_config=config, instance=instance)
        return JobOutcome(result, EU)

    plan = run("eu_rollback", to={"version": 1}).metadata
    assert run("eu_rollback", **approved(plan)).materializations[0]["lakehouse_version"] == 3
    assert run("eu_expire", min_versions=1, max_age="0d").metadata["is_empty"]
    schedule = definitions.resolve_schedule_def("eu_repair_hint_schedule")
    assert run(schedule.job_name).metadata["state"] == "right"
    assert content(lakes[US]) == us_content
    purges = [definitions.resolve_job_def(names.of("purge")).nodes[0].definition for names in lakes]
    assert [op.pool for op in purges if isinstance(op, dg.OpDefinition)] == [EU.pool, US.pool]


def test_space_job_reports_figures_and_treemap(jobs: Jobs) -> None:
    append_rows(jobs.lake, "ice.t")
    first = jobs.must_run("space", top=1)
    report = operations.measure_space(jobs.lake)
    assert first.metadata["current_bytes"] == report.use.current.bytes
    assert first.metadata["treemap"].startswith("![The space of the lakehouse by table](data:image/svg+xml;base64,")
    assert len(first.metadata["details"]["tables"]) == 1
    assert not first.materializations
    append_rows(jobs.lake, "ice.t")
    assert jobs.must_run("space").metadata["details"]["tables_read"] == 1
