"""Requests for tables with unsupported metadata get an error response."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest

from tests.iceberg.hostile import change_metadata
from tests.server.live_server import serving, settings_for
from tests.server.request_bodies import TABLE
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


@pytest.fixture
def table_lake(lake: Lakehouse) -> Lakehouse:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema).append(ROWS)
    return lake


def test_table_of_format_version_3_is_rejected(table_lake: Lakehouse) -> None:
    def change(content: dict[str, Any]) -> None:
        content["format-version"] = 3
        content["next-row-id"] = 0

    change_metadata(table_lake, change)
    with serving(settings_for(table_lake)) as server:
        assert server.request("GET", TABLE).error == (406, "UnsupportedOperationException")


def test_plan_with_unknown_schema_is_rejected(table_lake: Lakehouse) -> None:
    def change(content: dict[str, Any]) -> None:
        content["snapshots"][0]["schema-id"] = 9

    change_metadata(table_lake, change)
    with serving(settings_for(table_lake)) as server:
        snapshot_id = json.loads(server.request("GET", TABLE).body)["metadata"]["current-snapshot-id"]
        body = {"snapshot-id": snapshot_id, "use-snapshot-schema": True}
        assert server.request("POST", f"{TABLE}/plan", body).error == (500, "InternalServerError")
        assert server.request("POST", f"{TABLE}/plan", {"snapshot-id": snapshot_id}).status == 200
