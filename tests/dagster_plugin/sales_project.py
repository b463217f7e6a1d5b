"""A Dagster project of five tables, which tests also run in other processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import dagster as dg
import pandas as pd
import pyarrow as pa

from tests.faults import Fault, FaultyStorage, fail, kill, lose_response
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import StorageSettings, TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_settings import stored_as
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import root_path

#: Environment variable that makes the orders invalid.
BAD_ORDERS = "SALES_BAD_ORDERS"
NAMES = ("customers", "items", "orders", "regions", "days")
TABLES = {name: dg.AssetKey(["sales", name]) for name in NAMES}
PUBLISHED = dg.AssetKey(["publish", "sales"])


class FaultyLakehouse(TrinityLakeResource):
    """A lakehouse that injects the fault named in a file into its next commit. The first open deletes the file."""

    fault_file: str

    def open(self) -> Lakehouse:
        lake = super().open()
        return Lakehouse(FaultyStorage(lake.storage, _faults(lake, Path(self.fault_file))), lake.storage_options)


def _faults(lake: Lakehouse, fault_file: Path) -> Sequence[Fault]:
    if not fault_file.exists():
        return []
    fault_kind, root = fault_file.read_text(), root_path(lake.latest_version() + 1)
    fault_file.unlink()
    if fault_kind == "unknown":
        unreadable = fail(2, StorageError, kind="read", path_part=root, times=1000)
        return [lose_response(1, kind="create", path_part=root), unreadable]
    assert fault_kind in ("before", "after")
    return [kill(1, fault_kind, kind="create", path_part=root)]  # type: ignore[arg-type]


@dg.asset(key=TABLES["customers"], metadata=stored_as(), code_version="7")
def customers() -> pa.Table:
    return pa.table({"id": [1, 2], "name": ["Ann", "Bob"]})


@dg.asset(key=TABLES["items"], metadata=stored_as())
def items() -> pd.DataFrame:
    return pd.DataFrame({"sku": ["a", "b", "c"], "price": [1.0, 2.5, None]})


@dg.asset(key=TABLES["orders"], metadata=stored_as(mode="append"))
def orders(customers: pd.DataFrame, items: pa.RecordBatchReader) -> pa.RecordBatchReader:
    n_items = sum(batch.num_rows for batch in items)
    sign = -1 if os.environ.get(BAD_ORDERS) else 1
    rows = pa.table({"customer": list(customers["id"]), "items": [sign * n_items] * len(customers)})
    return pa.RecordBatchReader.from_batches(rows.schema, rows.to_batches())


@dg.asset(key=TABLES["regions"], metadata=stored_as(mode="overwrite_partition", partition_by=["country"]))
def regions() -> pa.Table:
    return pa.table({"country": ["NZ", "AU"], "region": ["Otago", "NSW"]})


@dg.asset(key=TABLES["days"], metadata=stored_as())
def days(orders: pa.Table) -> pa.Table:
    return pa.table({"orders": [orders.num_rows], "items": [sum(orders["items"].to_pylist())]})


@dg.asset_check(asset=TABLES["orders"], blocking=True)
def positive_items(orders: pa.Table) -> dg.AssetCheckResult:
    return dg.AssetCheckResult(passed=min(orders["items"].to_pylist()) > 0)


def definitions(folder: str, executor: dg.ExecutorDefinition = dg.in_process_executor) -> dg.Definitions:
    settings = {"root": f"{folder}/lake", "storage_options": StorageSettings(fsync="false")}
    publish = build_publish_asset(
        key=PUBLISHED.path, tables=TABLES, description="Sales.", retry_policy=dg.RetryPolicy(max_retries=1)
    )
    return dg.Definitions(
        assets=[customers, items, orders, regions, days, publish],
        asset_checks=[positive_items],
        jobs=[dg.define_asset_job("sales")],
        resources={
            "lakehouse": FaultyLakehouse(**settings, fault_file=f"{folder}/fault"),  # for the publish asset
            "io_manager": TrinityLakeIOManager(lakehouse=TrinityLakeResource(**settings)),
        },
        executor=executor,
    )


def sales_job(folder: str) -> dg.JobDefinition:
    """Return the job for a run worker that starts a process for each step."""
    preloaded = {"forkserver": {"preload_modules": ["tests.dagster_plugin.sales_project"]}}
    executor = dg.multiprocess_executor.configured({"max_concurrent": 2, "start_method": preloaded})
    return definitions(folder, executor).resolve_job_def("sales")


def sales_job_in_process(folder: str) -> dg.JobDefinition:
    """Return the job for a run worker that runs all steps in one process."""
    return definitions(folder).resolve_job_def("sales")
