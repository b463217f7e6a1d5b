"""The flights pipeline and its operations on one lakehouse, with a sample of the data as its source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dagster as dg
import duckdb
from pyiceberg.table import Table

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.jobs import build_jobs
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.demo.assets import INITIAL_JOB, MONTHLY_JOB, NAMESPACES, flights_definitions
from trinitylake_ops.iceberg.catalog import catalog_at

MONTHLY_TABLES = ("weather", "flights", "delay_by_carrier_month", "route_performance", "aircraft_utilisation")


class Pipeline:
    """The definitions on one lakehouse, with the sample as source and one Dagster instance."""

    def __init__(self, lakehouse: TrinityLakeResource, source_folder: Path, instance: dg.DagsterInstance):
        self.lakehouse = lakehouse
        self.source = {"config": {"source_folder": str(source_folder)}}
        self.instance = instance
        self.definitions = dg.Definitions.merge(
            flights_definitions(),
            dg.Definitions(
                jobs=build_jobs(operations="admin"),
                resources={
                    "lakehouse": lakehouse,
                    "lakehouse_io_manager": TrinityLakeIOManager(lakehouse=lakehouse),
                    "spark": SparkResource(),
                },
                executor=dg.in_process_executor,
            ),
        )

    def must_run(self, job: str, month: str | None = None, **config: Any) -> dg.ExecuteInProcessResult:
        result = self.run(job, month, **config)
        failures = [str(event.step_failure_data.error) for event in result.all_events if event.is_step_failure]
        assert result.success, "\n".join(failures)
        return result

    def run(self, job: str, month: str | None = None, **config: Any) -> dg.ExecuteInProcessResult:
        return self.definitions.resolve_job_def(job).execute_in_process(
            instance=self.instance,
            run_config=config,
            partition_key=month,
            raise_on_error=False,
        )

    def initial_load(self) -> dg.ExecuteInProcessResult:
        ops = {f"reference__{name}": self.source for name in ("airlines", "airports", "planes")}
        return self.must_run(INITIAL_JOB, ops=ops)

    def monthly_load(self, month: str, fault: str = "none") -> dg.ExecuteInProcessResult:
        ops = {f"{NAMESPACES[name]}__{name}": self.source for name in MONTHLY_TABLES}
        ops["facts__flights"] = {"config": {**self.source["config"], "fault": fault}}
        return (self.run if fault == "blocked" else self.must_run)(MONTHLY_JOB, month, ops=ops)

    def lake(self) -> Lakehouse:
        return self.lakehouse.open()

    def table(self, name: str, version: int | None = None) -> Table:
        return catalog_at(self.lake(), version).load_table((NAMESPACES[name], name))

    def data_files(self, table: str, version: int | None = None) -> dict[str, int]:
        """Return the row counts of a table's data files by path."""
        tasks = self.table(table, version).scan().plan_files()
        return {task.file.file_path: task.file.record_count for task in tasks}

    def query(self, table: str, sql: str, version: int | None = None) -> list[tuple[Any, ...]]:
        rows = self.table(table, version).scan().to_arrow()
        return duckdb.connect().from_arrow(rows).query("t", sql).fetchall()
