"""Scan planning: a plan lists the files that the client's own scan would read, in one response or in parts."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.rest.scan_planning import PlanTableScanRequest
from pyiceberg.expressions import And, BooleanExpression, EqualTo, GreaterThan, In, Not, NotIn, Or
from pyiceberg.manifest import ManifestEntry
from pyiceberg.transforms import IdentityTransform

from tests.server.live_server import LiveServer, serving, settings_for
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.reach import entries_within
from trinitylake_ops.server.scans import files, planner
from trinitylake_ops.server.scans import parts as filters
from trinitylake_ops.server.scans import parts as windows
from trinitylake_ops.server.settings import Limits

PLAN = "/v1/main/namespaces/ns/tables/t/plan"
TASKS = "/v1/main/namespaces/ns/tables/t/tasks"
NO_TASK = (404, "NoSuchPlanTaskException")
BAD = (400, "BadRequestException")


def rows(first: int, days: str = "abc") -> pa.Table:
    """Return a row for each day, numbered from ``first``."""
    return pa.table({"id": pa.array(range(first, first + len(days)), pa.int64()), "day": list(days)})


@pytest.fixture
def planning_server(lake: Lakehouse) -> Iterator[LiveServer]:
    """A server that returns at most two files in a response, and a table with three partitions in two manifests."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", rows(0).schema)
    with table.update_spec() as update:
        update.add_field("day", IdentityTransform(), "day")
    table.append(rows(0))
    table.append(rows(10))
    with serving(replace(settings_for(lake), limits=Limits(scan_files=2))) as server:
        yield server


def all_tasks(server: LiveServer, body: dict[str, Any], warehouse: str = "main") -> tuple[list[dict[str, Any]], int]:
    """Return the files of a plan and of all its parts, and the number of responses."""
    plan, fetch = (path.replace("/main/", f"/{warehouse}/") for path in (PLAN, TASKS))
    response = server.request("POST", plan, body).document
    assert response["status"] == "completed"
    assert "plan-id" not in response
    tasks, parts, n_responses = response["file-scan-tasks"], list(response["plan-tasks"]), 1
    while parts:
        response = server.request("POST", fetch, {"plan-task": parts.pop()}).document
        assert len(response["file-scan-tasks"]) <= 2
        tasks, n_responses = tasks + response["file-scan-tasks"], n_responses + 1
        parts += response["plan-tasks"]
    return tasks, n_responses


def paths(tasks: list[dict[str, Any]]) -> list[str]:
    return sorted(task["data-file"]["file-path"] for task in tasks)


def test_plan_returns_files_of_scan(planning_server: LiveServer, lake: Lakehouse) -> None:
    table = catalog_at(lake).load_table("ns.t")
    tasks, n_responses = all_tasks(planning_server, {})
    assert paths(tasks) == sorted(task.file.file_path for task in table.scan().plan_files())
    assert n_responses > 2
    tasks, n_responses = all_tasks(planning_server, {"filter": {"type": "eq", "term": "day", "value": "b"}})
    assert paths(tasks) == sorted(task.file.file_path for task in table.scan("day = 'b'").plan_files())
    assert {tuple(task["data-file"]["partition"]) for task in tasks} == {("b",)}
    assert [task["residual-filter"] for task in tasks] == [True, True]
    narrow = {"type": "gt", "term": "id", "value": 10}
    wide, _ = all_tasks(planning_server, {"filter": narrow, "select": ["id"], "stats-fields": ["id"]})
    bounds = sorted((task["data-file"]["lower-bounds"]["values"], task["data-file"]["value-counts"]) for task in wide)
    assert bounds == [([lowest], {"keys": [1], "values": [1]}) for lowest in (11, 12)]
    assert [task["residual-filter"] for task in wide] == [narrow, narrow]


def test_plan_supports_older_snapshots_and_versions(planning_server: LiveServer, lake: Lakehouse) -> None:
    table = catalog_at(lake).load_table("ns.t")
    first = table.metadata.snapshots[0].snapshot_id
    tasks, _ = all_tasks(planning_server, {"snapshot-id": first, "use-snapshot-schema": True})
    assert paths(tasks) == sorted(task.file.file_path for task in table.scan(snapshot_id=first).plan_files())
    earlier, _ = all_tasks(planning_server, {}, f"v{lake.latest_version() - 1}")
    assert paths(earlier) == paths(tasks)
    catalog_at(lake).create_table("ns.empty", rows(0).schema)
    empty = planning_server.request("POST", PLAN.replace("/t/", "/empty/"), {}).document
    assert empty == {"status": "completed", "plan-tasks": [], "file-scan-tasks": []}


def test_plan_supports_incremental_append_scans(planning_server: LiveServer, lake: Lakehouse) -> None:
    """The plan lists the files added between two snapshots, even if an append merged their manifests."""
    table = catalog_at(lake).load_table("ns.t")
    first, second = (snapshot.snapshot_id for snapshot in table.metadata.snapshots)
    before = {task.file.file_path for task in table.scan(snapshot_id=first).plan_files()}
    tasks, n_responses = all_tasks(planning_server, {"start-snapshot-id": first, "end-snapshot-id": second})
    current_files = {task.file.file_path for task in table.scan().plan_files()}
    assert (set(paths(tasks)), n_responses) == (current_files - before, 3)
    with table.transaction() as transaction:
        transaction.set_properties(
            **{"commit.manifest-merge.enabled": "true", "commit.manifest.min-count-to-merge": "1"}
        )
    table.append(rows(20))
    third = table.metadata.current_snapshot_id
    assert third is not None
    merged, _ = all_tasks(planning_server, {"start-snapshot-id": second, "end-snapshot-id": third})
    assert sorted(task["data-file"]["file-path"] in current_files for task in merged) == [False] * 3
    appended_tasks, _ = all_tasks(planning_server, {"start-snapshot-id": first, "end-snapshot-id": third})
    assert set(paths(appended_tasks)) == set(paths(tasks)) | set(paths(merged))
    empty, _ = all_tasks(planning_server, {"start-snapshot-id": third, "end-snapshot-id": third})
    assert empty == []
    reversed_range = {"start-snapshot-id": third, "end-snapshot-id": first}
    assert planning_server.request("POST", PLAN, reversed_range).error == BAD


def test_pyiceberg_scans_with_server_side_planning(planning_server: LiveServer, lake: Lakehouse) -> None:
    table = planning_server.catalog(**{"scan-planning-mode": "server"}).load_table("ns.t")
    for row_filter in (GreaterThan("id", 10), EqualTo("day", "b"), EqualTo("id", 12)):
        local_scan = catalog_at(lake).load_table("ns.t").scan(row_filter)
        assert table.scan(row_filter).to_arrow().sort_by("id") == local_scan.to_arrow().sort_by("id")
        assert table.scan(row_filter).count() == local_scan.count()


def test_invalid_plan_requests_are_rejected(planning_server: LiveServer) -> None:
    for body in (
        {"filter": {"type": "eq", "term": "none", "value": 1}},
        {"filter": {"type": "eq", "term": "id", "value": "x"}},
        {"filter": {"type": "paint"}},
        {"filter": "id = 1"},
        {"select": ["none"]},
        {"stats-fields": ["none"]},
        {"snapshot-id": 1},
        {"snapshot-id": 1, "start-snapshot-id": 2, "end-snapshot-id": 3},
        {"start-snapshot-id": 1},
        {"start-snapshot-id": 1, "end-snapshot-id": 2},
    ):
        assert planning_server.request("POST", PLAN, body).error == BAD, body
    assert planning_server.request("POST", PLAN.replace("/t/", "/u/"), {}).error == (404, "NoSuchTableException")
    for method in ("GET", "DELETE"):
        assert planning_server.request(method, f"{PLAN}/any").error == (404, "NoSuchPlanIdException")
    long_filter = {"filter": {"type": "in", "term": "id", "values": list(range(20_000))}}
    assert planning_server.request("POST", PLAN, long_filter).error == BAD


@pytest.mark.parametrize("row_filter", [True, {"type": "gt-eq", "term": "id", "value": 105}])
def test_request_decodes_bounded_number_of_entries(
    planning_server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, row_filter: Any
) -> None:
    """Each task decodes only the entries of its part of a manifest, and continues while the filter excludes them."""
    catalog_at(lake).load_table("ns.t").append(rows(100, "abcdefgh"))
    decoded: list[int] = []

    def counting_decode(*args: Any) -> tuple[list[ManifestEntry], int]:
        entries, n_entries = entries_within(*args)
        decoded.append(len(entries))
        return entries, n_entries

    monkeypatch.setattr(windows, "entries_within", counting_decode)
    monkeypatch.setattr(planner, "MAX_ENTRIES", 4)
    tasks, n_responses = all_tasks(planning_server, {"filter": row_filter})
    expected = list(
        catalog_at(lake).load_table("ns.t").scan("true" if row_filter is True else "id >= 105").plan_files()
    )
    assert paths(tasks) == sorted(task.file.file_path for task in expected)
    assert max(decoded) <= 2
    assert sum(decoded) <= 4 * n_responses


def test_modified_plan_task_is_rejected(planning_server: LiveServer, lake: Lakehouse) -> None:
    task = planning_server.request("POST", PLAN, {}).document["plan-tasks"][0]
    content = json.loads(zlib.decompress(base64.urlsafe_b64decode(task + "=" * (-len(task) % 4))))

    def encode_task(changed: Any) -> str:
        return base64.urlsafe_b64encode(zlib.compress(json.dumps(changed).encode())).decode().rstrip("=")

    assert planning_server.request("POST", TASKS, {"plan-task": encode_task(content)}).status == 200
    for index, value in (
        (0, 9),
        (1, "another"),
        (2, 1),
        (2, "x"),
        (3, -1),
        (4, 10**9),
        (4, 50),
        (5, 50),
        (5, 2.5),
        (6, -1),
    ):
        changed = [*content[:index], value, *content[index + 1 :]]
        assert planning_server.request("POST", TASKS, {"plan-task": encode_task(changed)}).error == NO_TASK, (
            index,
            value,
        )
    bomb = base64.urlsafe_b64encode(zlib.compress(b"[" + b" " * 50_000_000)).decode()[:60_000]
    for text in ("", "!", "AAAA", task[:-4], encode_task({}), encode_task([]), "A" * 100_000, bomb):
        assert planning_server.request("POST", TASKS, {"plan-task": text}).error == NO_TASK, text[:40]
    assert planning_server.request("POST", TASKS, {}).error == BAD
    catalog_at(lake).drop_table("ns.t")
    assert planning_server.request("POST", TASKS, {"plan-task": task}).error == (404, "NoSuchTableException")


def test_filter_on_null_partitions_does_not_fail_server(lake: Lakehouse) -> None:
    """The scan compares partition values whatever their type. It may get an error response, but no server failure."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", rows(0).schema)
    with table.update_spec() as update:
        update.add_field("id", IdentityTransform(), "id")
    table.append(pa.table({"id": pa.array([None, 1], pa.int64()), "day": ["a", "b"]}))
    with serving(settings_for(lake)) as server:
        assert len(server.request("POST", PLAN, {}).document["file-scan-tasks"]) == 2
        filter_body = {"filter": {"type": "lt", "term": "id", "value": 5}}
        response = server.request("POST", PLAN, filter_body)
        assert response.status in (200, 406)


def nested_or(n: int) -> dict[str, Any]:
    """Return a nested filter of n comparisons, of which only the last one matches rows."""
    if n == 1:
        return {"type": "eq", "term": "id", "value": 11}
    return {"type": "or", "left": {"type": "eq", "term": "id", "value": -n}, "right": nested_or(n - 1)}


def balanced_or(n: int) -> dict[str, Any]:
    if n == 1:
        return {"type": "eq", "term": "id", "value": 11}
    return {"type": "or", "left": balanced_or(n // 2), "right": balanced_or(n - n // 2)}


@pytest.mark.parametrize(
    "body",
    [
        {"filter": {"type": "in", "term": "id", "values": list(range(filters.MAX_UNITS))}},
        {"filter": {"type": "not-in", "term": "day", "values": ["x"] * filters.MAX_UNITS}},
        {"filter": balanced_or(filters.MAX_UNITS // 20 + 1)},
        {"select": ["id"] * 20_001},
        {"stats-fields": ["id"] * 20_001},
    ],
    ids=["in", "not in", "or", "select", "stats-fields"],
)
def test_too_expensive_plan_is_rejected(
    planning_server: LiveServer, monkeypatch: pytest.MonkeyPatch, body: dict[str, Any]
) -> None:
    parsed: list[Any] = []
    monkeypatch.setattr(PlanTableScanRequest, "model_validate", parsed.append)
    assert planning_server.request("POST", PLAN, body).error == (413, "BadRequestException")
    assert parsed == []


def test_filters_within_bounds_are_planned(lake: Lakehouse) -> None:
    """Clients send long lists of values, or many comparisons of which one is true."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", rows(0).schema)
    for first in (0, 10):
        table.append(rows(first))
    long_filter = {"type": "in", "term": "id", "values": [*range(1_000, 11_000), 11]}
    with serving(settings_for(lake)) as server:
        for content, n_files in ((long_filter, 2), (balanced_or(1_000), 1), (nested_or(60), 1)):
            tasks, _ = all_tasks(server, {"filter": content})
            assert len(tasks) == n_files
            assert [task["residual-filter"]["type"] for task in tasks] == [content["type"]] * n_files


WEAKENED_FILTERS: tuple[tuple[BooleanExpression, int], ...] = (
    (In("id", {*range(11, 1_000)}), 2),
    (And(In("id", {*range(1_000)}), EqualTo("day", "a")), 2),
    (Not(In("id", {*range(1_000)})), 6),
    (Not(Or(NotIn("id", {*range(11, 1_000)}), EqualTo("day", "b"))), 1),
    (In("id", {str(number) for number in range(2, 1_000)}), 4),
    (In("id", {*map(str, range(2, 1_000)), str(2**80)}), 6),
    (In("day", {f"b{number}" for number in range(300)}), 0),
)


def test_too_expensive_filter_is_weakened_and_returned_as_residual(
    planning_server: LiveServer, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan returns all files with matching rows, and the whole filter as the residual."""
    table = catalog_at(lake).load_table("ns.t")
    remote = planning_server.catalog(**{"scan-planning-mode": "server"}).load_table("ns.t")
    for expression, n_files in WEAKENED_FILTERS:
        content = json.loads(PlanTableScanRequest(filter=expression).model_dump_json())["filter"]
        for steps, n_planned in ((5_000, n_files), (0, 6)):
            monkeypatch.setattr(filters, "MAX_STEPS", steps)
            tasks, _ = all_tasks(planning_server, {"filter": content})
            assert len(tasks) == n_planned
            residuals = [PlanTableScanRequest(filter=task["residual-filter"]).filter for task in tasks]
            assert all(residual == expression for residual in residuals)
    for expression, _ in WEAKENED_FILTERS[:1]:
        assert remote.scan(expression).to_arrow().sort_by("id") == table.scan(expression).to_arrow().sort_by("id")
        assert remote.scan(expression).count() == 2


def test_residual_filters_are_bounded(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", rows(0).schema)
    for first in (0, 10):
        table.append(rows(first))
    body = {"filter": {"type": "not-in", "term": "id", "values": list(range(100, 1_000))}}
    with serving(settings_for(lake)) as server:
        response = server.request("POST", PLAN, body)
        monkeypatch.setattr(files, "MAX_PLAN_BYTES", len(response.body))
        assert server.request("POST", PLAN, body).status == 200
        monkeypatch.setattr(files, "MAX_PLAN_BYTES", len(response.body) // 2)
        assert server.request("POST", PLAN, body).error == (413, "BadRequestException")


def test_statistics_of_many_columns_are_split_over_responses(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_STATISTICS", 3)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", rows(0).schema)
    for first in (0, 10, 20):
        table.append(rows(first))
    with serving(settings_for(lake)) as server:
        tasks, n_responses = all_tasks(server, {"stats-fields": ["id", "day"]})
        assert (len(tasks), n_responses) == (3, 4)
        assert all("lower-bounds" in task["data-file"] for task in tasks)
        assert all_tasks(server, {"stats-fields": ["id"]})[1] == 1
