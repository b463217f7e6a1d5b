"""Write, audit and publish orders once a day, react to commits, and approve plans.

Requires a connection ``trinitylake_default`` to a lakehouse.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
from airflow.sdk import DAG, Asset, AssetWatcher, Param, get_current_context, task

from trinitylake_ops.airflow_plugin import (
    ApplyLimits,
    CommitTrigger,
    PublishOperator,
    TrinityLakeHook,
    TrinityLakeOperator,
    build_approval,
    stage,
)
from trinitylake_ops.iceberg import StagedTable, load_staged

ORDERS = "sales.orders"
TAGS = ["example", "trinitylake"]
BEGIN = datetime(2026, 1, 1, tzinfo=UTC)
watched = Asset(
    "trinitylake_orders",
    watchers=[AssetWatcher(name="new_orders", trigger=CommitTrigger(table=ORDERS, poll_seconds=5))],
)

# [START publish]
with DAG("trinitylake_publish", schedule="@daily", start_date=BEGIN, catchup=False, tags=TAGS):

    @task
    def write() -> str:
        """Write the orders of a day, which replace earlier ones of the same day. Readers do not see them yet."""
        day = get_current_context()["dag_run"].run_after.date().isoformat()
        rows = pa.table({"day": [day, day], "amount": [9.5, 20.0]})
        return stage(rows, ORDERS, mode="replace_partitions", partition_by=["day"])

    @task
    def audit(staged: str) -> None:
        """Read the table as it will be published, and fail if it contains invalid orders."""
        table = load_staged(TrinityLakeHook().get_conn(), StagedTable.from_json(staged))
        assert table.scan(row_filter="amount < 0").to_arrow().num_rows == 0, "there are orders with a negative amount"

    written = write()
    publish = PublishOperator(task_id="publish", tables=[written], message="orders of a day")
    audit(written) >> publish
# [END publish]

# [START watch]
with DAG("trinitylake_follow", schedule=[watched], catchup=False, tags=TAGS):

    @task
    def count() -> int:
        """Count the orders after each version that changed them, from any writer."""
        from trinitylake_ops.iceberg import catalog_at

        return len(catalog_at(TrinityLakeHook().get_conn()).load_table(ORDERS).scan().to_arrow())

    count()
# [END watch]

# [START rollback]
with DAG("trinitylake_rollback", schedule=None, catchup=False, tags=TAGS, params={"version": Param(0, type="integer")}):
    build_approval("rollback", options={"to": {"version": "{{ params.version }}"}})
# [END rollback]

# [START maintenance]
with DAG("trinitylake_maintenance", schedule=None, catchup=False, tags=TAGS):
    verify = TrinityLakeOperator(task_id="verify", operation="verify", options={"deep": True})
    expire = build_approval("expire", options={"max_age": "0d", "min_versions": 1})
    trim = TrinityLakeOperator(
        task_id="trim",
        operation="trim",
        options={"unattended": True},
        limits=ApplyLimits(max_files=100, max_bytes=1_000_000, min_age=timedelta(days=7)),
        trigger_rule="none_failed",  # an expiry with nothing to approve is skipped
    )
    verify >> expire >> trim
# [END maintenance]
