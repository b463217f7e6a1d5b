"""The Airflow plugin without Airflow: its operations have the same declarations as the Dagster jobs."""

from __future__ import annotations

import json
import logging
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.dagster_plugin.maintenance_jobs import old_lake
from tests.environments import PROJECT
from tests.local_clock import LocalClock
from trinitylake_ops import Lakehouse
from trinitylake_ops.airflow_plugin.settings import LakehouseSettings
from trinitylake_ops.airflow_plugin.snapshots import inspect_table
from trinitylake_ops.airflow_plugin.task_run import OperationFailedError, carry_out
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.declarations.registry import BY_NAME
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg import catalog_at

LOG = logging.getLogger(__name__)
RUN = "maintenance/manual"
ROWS = pa.table({"id": [1]})


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    return old_lake(tmp_path, LocalClock(monkeypatch))


def run_operation(lake: Lakehouse, operation: str, **options: Any) -> dict[str, Any]:
    """Run an operation as a task does, and return the result that Airflow stores."""
    settings = LakehouseSettings.of(lake.root, {"storage_options": {"fsync": "false"}})
    result: dict[str, Any] = json.loads(json.dumps(carry_out(BY_NAME[operation], options, settings, RUN, LOG)))
    return result


def test_operations_match_dagster_jobs() -> None:
    limits = ApplyLimits(max_files=0, max_bytes=0, min_age=timedelta(0))
    assert {job.name for job in build_jobs(operations="all", limits=limits)} == {*BY_NAME}


def test_plan_is_approved_and_applied(lake: Lakehouse) -> None:
    plan = run_operation(lake, "expire")
    assert not plan["is_empty"]
    assert "| version | verdict | why |" in plan["page"]
    assert "data:image" not in plan["page"]
    assert "to apply it, run expire" in plan["summary"] and "to apply it" not in plan["page"]
    with pytest.raises(InvalidInputError, match="approved_by"):
        run_operation(lake, "expire", **plan["configuration"])
    applied = run_operation(lake, "expire", approval={"digest": plan["digest"], "approved_by": "ana"})
    assert applied["versions"] == plan["versions"]
    info = next(iter(lake.history(1)))
    assert (info.operation, info.run_id, info.approved_by) == ("expire", RUN, "ana")
    assert run_operation(lake, "expire")["is_empty"]
    version = lake.latest_version()
    # The response was lost and the task is retried.
    run_operation(lake, "expire", approval={"digest": plan["digest"], "approved_by": "ana"})
    assert lake.latest_version() == version


@pytest.mark.parametrize(
    ("operation", "options", "message"),
    [
        ("export", {}, "name is required"),
        ("export", {"name": None}, "name is required"),
        ("expire", {"approval": {"approved_by": "ana"}}, "digest is required"),
        ("drop_clone", {"name": "x", "approval": {"digest": f"1-{'0' * 64}"}}, "approved_by is required"),
        ("rollback", {}, "to is required"),
        ("rollback", {"to": {"version": 1, "export": "x"}}, "exactly one of"),
        ("purge", {"unattended": True}, "the code sets no limits for runs without approval"),
    ],
)
def test_missing_required_option_is_rejected(
    lake: Lakehouse, operation: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message):
        run_operation(lake, operation, **options)


def test_unattended_run_applies_within_limits(lake: Lakehouse) -> None:
    settings = LakehouseSettings.of(lake.root, {"storage_options": {"fsync": "false"}})
    strict_limits, generous_limits = (
        ApplyLimits(max_files=max_files, max_bytes=10**9, min_age=timedelta(0)) for max_files in (0, 1000)
    )
    with pytest.raises(OperationFailedError, match="nothing was done"):
        carry_out(BY_NAME["expire"], {"unattended": True}, settings, RUN, LOG, strict_limits)
    assert carry_out(BY_NAME["expire"], {"unattended": True}, settings, RUN, LOG, generous_limits)["versions"] == "0-2"
    assert next(iter(lake.history(1))).approved_by == "the limits of schedules"


def test_task_log_contains_report(lake: Lakehouse, caplog: pytest.LogCaptureFixture) -> None:
    """The log contains the metrics, tables as text, and the configuration that applies the plan, as in Dagster."""
    caplog.set_level(logging.INFO, LOG.name)
    plan = run_operation(lake, "expire", max_age=None)  # null is the default
    text = "\n".join(caplog.messages)  # independent of the log format of earlier tests
    lines = text.splitlines()
    assert f"digest: {plan['digest']}" in lines
    assert any(line.split() == ["version", "verdict", "why"] for line in lines)
    (approval,) = (line.partition(": ")[2] for line in lines if line.startswith("configuration: "))
    assert json.loads(approval) == plan["configuration"]
    assert "data:image" not in text


@pytest.mark.parametrize("operation", ["verify", "log", "purge", "orphans", "trim", "compact"])
def test_read_only_operation_returns_json(lake: Lakehouse, operation: str) -> None:
    assert run_operation(lake, operation)["summary"]


def test_damage_fails_task_with_first_finding(lake: Lakehouse) -> None:
    data_file = next(Path(lake.root.removeprefix("file://")).glob("data/**/*.arrow"), None)
    files = [info.path for info in lake.storage.list() if info.path.endswith(".binpb")]
    (data_file or Path(lake.root.removeprefix("file://")) / files[0]).unlink()
    with pytest.raises(OperationFailedError, match="the first:"):
        run_operation(lake, "verify")


@pytest.mark.parametrize(
    ("root", "extra", "message"),
    [
        ("", {}, "the connection's root is not shown"),
        ("s3://key:secret@bucket/lake", {}, "the connection's root is not shown"),
        ("relative/lake", {}, "the connection's root is not shown"),
        ("/lake", {"rooot": "x"}, "extra is invalid at rooot"),
        ("/lake", {"storage_options": {"password": 5}}, "extra is invalid at storage_options.password"),
        ("/lake", {"isolation": "none"}, "extra is invalid at isolation"),
        ("/lake", "{engine: spark, password: secret@}", "extra is not JSON$"),
        ("/lake", '["secret@"]', "extra is not a JSON object"),
        ("/lake", '{"engine": "sparc"}', "extra is invalid at engine"),
    ],
)
def test_invalid_connection_is_rejected_without_its_values(
    root: str, extra: dict[str, Any] | str, message: str
) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        LakehouseSettings.of(root, extra)
    assert "secret@" not in str(caught.value)


def test_connection_secrets_are_collected() -> None:
    options = {"endpoint": "http://127.0.0.1", "secret_access_key": "do-not-show"}
    assert LakehouseSettings.of("s3://bucket/lake", {"storage_options": options}).secrets == ["do-not-show"]


def test_extra_is_parsed() -> None:
    assert LakehouseSettings.of("/lake", '{"engine": "spark"}').engine == "spark"
    assert LakehouseSettings.of("/lake", " ") == LakehouseSettings.of("/lake", None)


def test_inspection_detects_new_versions(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "lake"), {"fsync": "false"})
    initial, missing_table = inspect_table(lake, None), inspect_table(lake, "ns.t")
    assert not missing_table.is_new(None)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    created = inspect_table(lake, "ns.t")
    assert (
        created.is_new(missing_table)
        and created.is_new(inspect_table(lake, "ns.t", 0))
        and created.is_new(inspect_table(lake, "ns.t", -1))
    )
    catalog.create_table("ns.other", ROWS.schema)
    assert inspect_table(lake, None).is_new(initial)
    assert not inspect_table(lake, "ns.t").is_new(created)
    table.append(ROWS)
    assert inspect_table(lake, "ns.t").is_new(created)
    assert inspect_table(lake, "ns.t").is_new(inspect_table(lake, "ns.t", created.version))


def test_documentation_snippets_are_parts_of_example() -> None:
    """The Python snippets of the page are copied from the example DAG."""
    example = (PROJECT / "trinitylake_ops/airflow_plugin/example_dags/example_trinitylake.py").read_text()
    snippets = re.findall(r"```python\n(.*?)```", (PROJECT / "docs/deploy/airflow.md").read_text(), re.DOTALL)
    assert len(snippets) >= 3
    assert [snippet for snippet in snippets if snippet not in example] == []
