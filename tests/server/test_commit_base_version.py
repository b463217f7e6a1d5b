"""Commits on top of the version that the server just committed skip the query for the latest version safely."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pyarrow as pa
import pytest

from tests.clock import TickingClock
from tests.server.live_server import LiveServer
from tests.server.request_bodies import COMMIT, TABLE, TABLES, commit_of, create_body, new_key, properties
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage import process_clock
from trinitylake_ops.transaction import lakehouse as lakehouse_module

ROWS = pa.table({"id": pa.array([1, 2], pa.int64())})


@pytest.fixture(autouse=True)
def clock() -> Iterator[TickingClock]:
    """Make a commit take some milliseconds, so that the next few requests assume that its version is the latest."""
    clock = TickingClock(0.001)
    with process_clock.using(clock):
        yield clock


@pytest.fixture
def server_lake(server: LiveServer) -> Lakehouse:
    """The lakehouse as opened by the server, with a table that the server has changed."""
    assert server.application is not None
    server_lake = server.application.warehouses.served[0].lake
    assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
    for name in ("t", "u"):
        assert server.request("POST", TABLES, create_body(name)).status == 200
    assert server.request("POST", TABLE, commit_of(properties(a="0"))).status == 200
    return server_lake


@pytest.fixture
def external_lake(server_lake: Lakehouse) -> Lakehouse:
    """The same lakehouse, as opened by another process."""
    return Lakehouse(server_lake.storage)


def count_queries(server_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each query for the latest version at the start of a transaction."""
    queries: list[int] = []
    latest_snapshot = lakehouse_module.latest_snapshot

    def counting_snapshot(*arguments: Any) -> Any:
        queries.append(1)
        return latest_snapshot(*arguments)

    monkeypatch.setattr(lakehouse_module, "latest_snapshot", counting_snapshot)
    return queries


def test_commit_on_own_latest_version_skips_query(
    server: LiveServer, server_lake: Lakehouse, clock: TickingClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries, before = count_queries(server_lake, monkeypatch), server_lake.latest_version()
    for value in "12":
        assert server.request("POST", TABLE, commit_of(properties(a=value))).status == 200
    changes = [commit_of(properties(b="1")), commit_of(properties(b="1"), name="u")]
    assert server.request("POST", COMMIT, {"table-changes": changes}).status == 204
    assert queries == []
    assert server_lake.latest_version() == before + 3
    clock.advance(1)
    assert server.request("POST", TABLE, commit_of(properties(a="3"))).status == 200
    assert queries == [1], "the time window has ended"


def test_other_requests_query_latest_version(
    server: LiveServer, server_lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    queries = count_queries(server_lake, monkeypatch)
    assert server.request("POST", TABLE, commit_of(properties(a="1")), {"Idempotency-Key": new_key()}).status == 200
    assert len(queries) > 0, "an idempotency key is searched in all versions up to the latest"


def _alter_table(external_lake: Lakehouse) -> None:
    with catalog_at(external_lake).load_table("ns.t").transaction() as change:
        change.set_properties(a="1", other="1")


def _append_rows(external_lake: Lakehouse) -> None:
    catalog_at(external_lake).load_table("ns.t").append(ROWS)


def _append_to_other_table(external_lake: Lakehouse) -> None:
    catalog_at(external_lake).load_table("ns.u").append(ROWS)


@pytest.mark.parametrize("change", [_alter_table, _append_rows, _append_to_other_table])
def test_external_commit_is_detected(
    server: LiveServer, server_lake: Lakehouse, external_lake: Lakehouse, change: Callable[[Lakehouse], None]
) -> None:
    change(external_lake)
    before = external_lake.latest_version()
    assert server.request("POST", TABLE, commit_of(properties(a="0", b="2"))).status == 200
    assert external_lake.latest_version() == before + 1
    table = catalog_at(Lakehouse(server_lake.storage)).load_table("ns.t")
    expected = {"a": "0", "b": "2", **({"other": "1"} if change is _alter_table else {})}
    assert table.properties.items() >= expected.items()
    assert table.scan().to_arrow().num_rows == (2 if change is _append_rows else 0)
    just_committed = server_lake.just_committed()
    assert just_committed is not None
    assert just_committed.version == before + 1


def test_requirements_are_checked_on_latest_version(
    server: LiveServer, server_lake: Lakehouse, external_lake: Lakehouse
) -> None:
    catalog_at(external_lake).load_table("ns.t").append(ROWS)
    snapshot = catalog_at(external_lake).load_table("ns.t").metadata.current_snapshot_id
    requirement = {"type": "assert-ref-snapshot-id", "ref": "main", "snapshot-id": snapshot}
    assert server.request("POST", TABLE, commit_of(properties(a="1"), requirements=(requirement,))).status == 200
    outdated_requirement = {**requirement, "snapshot-id": None}
    response = server.request("POST", TABLE, commit_of(properties(a="2"), requirements=(outdated_requirement,)))
    assert response.error == (409, "CommitFailedException")


def test_table_created_or_dropped_by_another_process_is_detected(
    server: LiveServer, server_lake: Lakehouse, external_lake: Lakehouse
) -> None:
    catalog_at(external_lake).create_table("ns.new", ROWS.schema)
    assert server.request("POST", f"{TABLES}/new", commit_of(properties(a="1"), name="new")).status == 200
    catalog_at(external_lake).drop_table("ns.t")
    assert server.request("POST", TABLE, commit_of(properties(a="1"))).error == (404, "NoSuchTableException")


def test_change_is_compared_with_latest_version(
    server: LiveServer, server_lake: Lakehouse, external_lake: Lakehouse
) -> None:
    _alter_table(external_lake)
    response = server.request("POST", TABLE, commit_of(properties(a="0")))
    assert response.document["metadata"]["properties"].items() >= {"a": "0", "other": "1"}.items()
    assert catalog_at(Lakehouse(server_lake.storage)).load_table("ns.t").properties["a"] == "0"


def test_own_version_is_not_assumed_latest_after_later_version_was_read(
    server: LiveServer, server_lake: Lakehouse, external_lake: Lakehouse
) -> None:
    assert server_lake.just_committed() is not None
    _append_to_other_table(external_lake)
    assert server.request("GET", TABLE).status == 200
    assert server_lake.just_committed() is None


def test_concurrent_changes_of_one_table_are_queued(server: LiveServer, server_lake: Lakehouse) -> None:
    """Without the table's queue, all but one would conflict in each round, and some would run out of attempts."""
    before = server_lake.latest_version()

    def change(number: int) -> int:
        return server.request("POST", TABLE, commit_of(properties(**{f"k{number}": "1"}))).status

    with ThreadPoolExecutor(12) as threads:
        assert set(threads.map(change, range(36))) == {200}
    assert server_lake.latest_version() == before + 36
    metrics = server.request("GET", "/metrics").body.decode()
    conflicts = [line for line in metrics.splitlines() if line.startswith("trinitylake_lost_attempts_total")]
    assert [line.rpartition(" ")[2] for line in conflicts] in ([], ["0.0"])
