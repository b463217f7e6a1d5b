"""Waiting or expensive requests do not block requests of other clients."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import yaml
from pyiceberg.partitioning import UNPARTITIONED_PARTITION_SPEC, PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import new_table_metadata
from pyiceberg.table.sorting import UNSORTED_SORT_ORDER, SortField, SortOrder
from pyiceberg.table.update import (
    AddPartitionSpecUpdate,
    AddSchemaUpdate,
    AddSortOrderUpdate,
    RemovePropertiesUpdate,
    SetCurrentSchemaUpdate,
    SetDefaultSortOrderUpdate,
    SetDefaultSpecUpdate,
    SetPropertiesUpdate,
    TableUpdate,
)
from pyiceberg.transforms import BucketTransform
from pyiceberg.types import LongType, NestedField

from tests.server.live_server import LiveServer, serving, settings_for
from tests.server.request_bodies import COMMIT, TABLE, TABLES, commit_of, create_body, properties
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TransientError
from trinitylake_ops.iceberg import catalog_at, metadata
from trinitylake_ops.iceberg.updates import adapt_updates
from trinitylake_ops.server import scheduling, tables
from trinitylake_ops.server.responses import RejectedError
from trinitylake_ops.server.settings import Limits
from trinitylake_ops.server.workers import TableQueue, Work, Workers

UNAVAILABLE = (503, "ServiceUnavailableException")
N_WAITING = 150
TIMEOUT_S = 60.0  # sufficient on a busy machine


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def send_request(server: LiveServer, path: str, body: Any, token: str = "") -> socket.socket:
    """Send a request, and return its connection without waiting for the response."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=TIMEOUT_S)
    client.sendall(f"{head}\r\n".encode() + data)
    return client


def status_of(client: socket.socket) -> int:
    with client, client.makefile("rb") as response:
        return int(response.read().split(b" ", 2)[1])


def create_tables(server: LiveServer) -> None:
    assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
    for name in ("t", "u"):
        assert server.request("POST", TABLES, create_body(name)).status == 200


class Gate(threading.Event):
    """An event that running commits wait for. ``n_entered`` counts these commits."""

    n_entered = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Block commits of the table t until this event is set."""
    gate, commit = Gate(), tables.commit_tables

    def commit_after_gate(call: Any, commits: Any) -> Any:
        if any(queued.name[1] == "t" for queued in commits):
            gate.n_entered += 1
            assert gate.wait(TIMEOUT_S)
        return commit(call, commits)

    monkeypatch.setattr(tables, "commit_tables", commit_after_gate)
    yield gate
    gate.set()


def test_queued_commits_occupy_no_thread(lake: Lakehouse, gate: Gate) -> None:
    """One commit is blocked while running and 149 are queued, yet all other requests are served."""
    with serving(settings_for(lake)) as server:
        create_tables(server)
        application = server.application
        assert application is not None
        queue = application.scheduler.queue
        clients = [send_request(server, TABLE, commit_of(properties(a=str(number)))) for number in range(N_WAITING - 1)]
        transaction_body = {"table-changes": [commit_of(properties(b="1")), commit_of(properties(b="1"), name="u")]}
        clients.append(send_request(server, COMMIT, transaction_body))
        wait_until(lambda: len(queue) == N_WAITING)
        assert server.request("GET", TABLE).status == 200
        assert server.request("POST", TABLES, create_body("v")).status == 200
        assert server.request("POST", f"{TABLES}/v", commit_of(properties(a="1"), name="v")).status == 200
        assert server.request("GET", "/readyz").status == 200
        before = lake.latest_version()
        gate.set()
        assert {status_of(client) for client in clients} == {200, 204}
        wait_until(lambda: len(queue) == 0)
        assert lake.latest_version() == before + N_WAITING


def test_disconnected_clients_leave_queue(lake: Lakehouse, gate: Gate) -> None:
    with serving(settings_for(lake)) as server:
        create_tables(server)
        application = server.application
        assert application is not None
        first = send_request(server, TABLE, commit_of(properties(a="first")))
        wait_until(lambda: len(application.scheduler.queue) == 1)
        clients = [send_request(server, TABLE, commit_of(properties(a="lost"))) for _ in range(20)]
        wait_until(lambda: len(application.scheduler.queue) == 21)
        for client in clients:
            client.close()
        wait_until(lambda: len(application.scheduler.queue) == 1)
        wait_until(lambda: application.n_body_bytes == len(json.dumps(commit_of(properties(a="first")))))
        before = lake.latest_version()
        gate.set()
        assert status_of(first) == 200
        wait_until(lambda: len(application.scheduler.queue) == 0)
        assert lake.latest_version() == before + 1


def test_running_commit_completes_without_its_client(lake: Lakehouse, gate: Gate) -> None:
    with serving(settings_for(lake)) as server:
        create_tables(server)
        application = server.application
        assert application is not None
        before = lake.latest_version()
        client = send_request(server, TABLE, commit_of(properties(a="1")))
        wait_until(lambda: gate.n_entered == 1)
        client.close()
        gate.set()
        wait_until(lambda: len(application.scheduler.queue) == 0)
        assert lake.latest_version() == before + 1


def test_commit_queue_is_bounded(lake: Lakehouse, gate: Gate) -> None:
    with serving(settings_for(lake, limits=Limits(threads=2, waiting=3))) as server:
        create_tables(server)
        application = server.application
        assert application is not None
        clients = [send_request(server, TABLE, commit_of(properties(a=str(number)))) for number in range(5)]
        wait_until(lambda: len(application.scheduler.queue) == 5)
        response = server.request("POST", TABLE, commit_of(properties(a="x")))
        assert response.error == UNAVAILABLE
        assert response.headers["retry-after"] == "1"
        assert server.request("GET", TABLE).status == 200
        gate.set()
        assert {status_of(client) for client in clients} == {200}


def test_commit_that_waited_too_long_changes_nothing(lake: Lakehouse, gate: Gate) -> None:
    """A commit that did not start gets 503. The running one gets 504, and the next one waits until it has ended."""
    with serving(settings_for(lake, limits=Limits(seconds=0.5))) as server:
        create_tables(server)
        application = server.application
        assert application is not None
        before = lake.latest_version()
        first = send_request(server, TABLE, commit_of(properties(a="first")))
        wait_until(lambda: gate.n_entered == 1)
        assert server.request("POST", TABLE, commit_of(properties(b="second"))).error == UNAVAILABLE
        assert status_of(first) == 504
        assert len(application.scheduler.queue) == 1
        gate.set()
        wait_until(lambda: len(application.scheduler.queue) == 0)
        assert lake.latest_version() == before + 1


def test_principal_without_write_access_is_not_queued(lake: Lakehouse, gate: Gate, tmp_path: Path) -> None:
    with serving(settings_for(lake, tokens=token_file(tmp_path, writer="write", reader="read"))) as server:
        as_writer = {"Authorization": "Bearer writer"}
        assert server.request("POST", "/v1/main/namespaces", {"namespace": ["ns"]}, as_writer).status == 200
        assert server.request("POST", TABLES, create_body("t"), as_writer).status == 200
        application = server.application
        assert application is not None
        pending_commit = send_request(server, TABLE, commit_of(properties(a="1")), "writer")
        wait_until(lambda: len(application.scheduler.queue) == 1)
        as_reader = {"Authorization": "Bearer reader"}
        body = commit_of(properties(a="2"))
        for path, request_body in ((TABLE, body), (COMMIT, {"table-changes": [body]})):
            assert server.request("POST", path, request_body, as_reader).error == (403, "ForbiddenException")
        gate.set()
        assert status_of(pending_commit) == 200


def token_file(folder: Path, **scopes: str) -> Path:
    """Write a token file in which each token is the name of its principal."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "scope": scope}
        for name, scope in scopes.items()
    ]
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return path


def test_one_principal_cannot_occupy_all_threads_or_body_memory(
    lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = Limits(threads=4, waiting=20, body_bytes=1 << 20, bodies_bytes=2 << 20)
    gate = threading.Event()
    with serving(settings_for(lake, limits=limits, tokens=token_file(tmp_path, one="write", other="write"))) as server:
        application = server.application
        assert application is not None
        server_lake = application.warehouses.served[0].lake
        begin = server_lake.transaction

        def gated(*arguments: Any, **keywords: Any) -> Any:
            if "gated" in keywords["message"]:
                assert gate.wait(TIMEOUT_S)
            return begin(*arguments, **keywords)

        monkeypatch.setattr(server_lake, "transaction", gated)
        path, other = "/v1/main/namespaces", {"Authorization": "Bearer other"}
        clients = [send_request(server, path, {"namespace": [f"gated{number}"]}, "one") for number in range(12)]
        wait_until(lambda: application.scheduler.workers.load(Work.CHANGE) == (3, 9))
        assert server.request("POST", path, {"namespace": ["free"]}, other).status == 200
        response = server.request("POST", path, {"namespace": ["gated"]}, {"Authorization": "Bearer one"})
        assert response.error == UNAVAILABLE
        port = int(server.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=TIMEOUT_S) as slow:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer one\r\nContent-Length: 900000"
            slow.sendall(f"{head}\r\n\r\n".encode() + b" " * 800_000)
            wait_until(lambda: application.n_body_bytes > 800_000)
            large = b" " * 900_000 + b'{"namespace": ["a"]}'
            assert server.request("POST", path, large, {"Authorization": "Bearer one"}).error == UNAVAILABLE
            assert server.request("POST", path, large, other).status == 200
        gate.set()
        assert {status_of(client) for client in clients} == {200}


def test_principals_are_served_fairly() -> None:
    """Although one principal has a long queue, a request of another principal is served next."""

    async def run() -> list[str]:
        workers, order = Workers(Limits(threads=1, waiting=100), is_shared=True), list[str]()
        gate = threading.Event()
        first = workers.submit(Work.READ, "a", gate.wait)
        jobs = [workers.submit(Work.READ, "a", lambda n=number: order.append(f"a{n}")) for number in range(5)]
        jobs += [workers.submit(Work.READ, "b", lambda n=number: order.append(f"b{n}")) for number in range(2)]
        assert workers.cancel(Work.READ, jobs[1])
        assert not workers.cancel(Work.READ, first)
        gate.set()
        await asyncio.gather(*(job.ended for job in jobs if job is not jobs[1]))
        await asyncio.to_thread(workers.close)
        return order

    assert asyncio.run(run()) == ["a0", "b0", "a2", "b1", "a3", "a4"]


def test_principal_gets_at_most_half_of_queue() -> None:
    async def run() -> None:
        workers, gate = Workers(Limits(threads=2, waiting=8), is_shared=True), threading.Event()
        for _ in range(5):
            workers.submit(Work.READ, "a", gate.wait)
        with pytest.raises(RejectedError):
            workers.submit(Work.READ, "a", gate.wait)
        for _ in range(5):
            workers.submit(Work.READ, "b", gate.wait)
        assert workers.saturated(TIMEOUT_S) == [Work.READ]
        with pytest.raises(RejectedError):
            workers.submit(Work.READ, "c", gate.wait)
        gate.set()
        await asyncio.to_thread(workers.close)

    asyncio.run(run())


def test_commits_run_in_order_of_arrival() -> None:
    async def run() -> None:
        queue = TableQueue(10, 3)
        t, u, v = (("", "ns", name) for name in "tuv")
        first = queue.enter("a", [t])
        second = queue.enter("a", [t, u, t])
        third = queue.enter("b", [u])
        fourth = queue.enter("b", [v])
        assert [entry.ready.done() for entry in (first, second, third, fourth)] == [True, False, False, True]
        queue.enter("a", [v])
        with pytest.raises(RejectedError):
            queue.enter("a", [("", "ns", "w")])
        queue.leave(first)
        assert [entry.ready.done() for entry in (second, third)] == [True, False]
        rejected_entry = queue.enter("c", [u])
        queue.leave(rejected_entry)
        queue.leave(second)
        assert third.ready.done()
        for entry in (third, fourth):
            queue.leave(entry)
        assert len(queue) == 1

    asyncio.run(run())


def test_readiness_reports_stalled_threads_until_they_are_free(
    lake: Lakehouse, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings_for(lake, limits=Limits(threads=1))) as server:
        create_tables(server)
        application = server.application
        assert application is not None
        clients = [send_request(server, TABLE, commit_of(properties(a="1")))]
        wait_until(lambda: len(application.scheduler.queue) == 1)
        clients.append(send_request(server, f"{TABLES}/u", commit_of(properties(a="1"), name="u")))
        monkeypatch.setattr(scheduling, "STALLED_SECONDS", 0.0)
        wait_until(lambda: server.request("GET", "/readyz").status == 503)
        assert "saturated-change" in server.request("GET", "/readyz").document["error"]["message"]
        assert server.request("GET", "/healthz").status == 200
        assert server.request("GET", TABLE).status == 200
        gate.set()
        assert {status_of(client) for client in clients} == {200}
        wait_until(lambda: server.request("GET", "/readyz").status == 200)


def test_readiness_reports_unresponsive_storage(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "MAX_PROBE_AGE_S", 0.0)
    monkeypatch.setattr(scheduling, "PROBE_TIMEOUT_S", 0.05)
    with serving(settings_for(lake)) as server:
        application = server.application
        assert application is not None
        server_lake = application.warehouses.served[0].lake
        latest, gate, n_probes = server_lake.latest_version, threading.Event(), 0
        assert server.request("GET", "/readyz").status == 200

        def failing() -> int:
            raise TransientError("no response")

        def hanging() -> int:
            nonlocal n_probes
            n_probes += 1
            assert gate.wait(TIMEOUT_S)
            return latest()

        monkeypatch.setattr(server_lake, "latest_version", failing)
        wait_until(lambda: server.request("GET", "/readyz").status == 503)
        assert "storage-unreachable" in server.request("GET", "/readyz").document["error"]["message"]
        monkeypatch.setattr(server_lake, "latest_version", hanging)
        for _ in range(20):
            assert server.request("GET", "/readyz").error == UNAVAILABLE
        assert n_probes == 1, "a hanging storage must occupy one thread only"
        assert server.request("GET", "/healthz").status == 200
        monkeypatch.setattr(server_lake, "latest_version", latest)
        gate.set()
        wait_until(lambda: server.request("GET", "/readyz").status == 200)


def test_updates_of_a_commit_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparing each update with all previous ones took a minute for 600 schemas. Equal schemas still share an id."""
    n_compared = 0

    def counting_equality(self: Any, other: Any) -> bool:
        nonlocal n_compared
        n_compared += 1
        return self is other

    for kind in (Schema, PartitionSpec, SortOrder, NestedField, PartitionField, SortField):
        monkeypatch.setattr(kind, "__eq__", counting_equality)
    empty = new_table_metadata(schema_of(0), UNPARTITIONED_PARTITION_SPEC, UNSORTED_SORT_ORDER, "file:///t")
    updates: list[TableUpdate] = []
    for number in (*range(1, 300), 1, 299):
        field = {"source_id": 1, "transform": BucketTransform(number)}
        updates += [
            AddSchemaUpdate(schema_=schema_of(number)),
            AddPartitionSpecUpdate(
                spec=PartitionSpec(PartitionField(**field, field_id=1_000, name="p"), spec_id=number)
            ),
            AddSortOrderUpdate(sort_order=SortOrder(SortField(**field), order_id=number)),
        ]
    updates += [SetCurrentSchemaUpdate(schema_id=-1), SetDefaultSpecUpdate(spec_id=-1)]
    adapted_updates = adapt_updates([*updates, SetDefaultSortOrderUpdate(sort_order_id=-1)], empty)
    assert n_compared == 0
    assert [update.schema_.schema_id for update in adapted_updates if isinstance(update, AddSchemaUpdate)] == [
        *range(1, 300)
    ]
    assert [update.spec.spec_id for update in adapted_updates if isinstance(update, AddPartitionSpecUpdate)] == [
        *range(1, 300)
    ]
    assert [update.sort_order.order_id for update in adapted_updates if isinstance(update, AddSortOrderUpdate)] == [
        *range(1, 300)
    ]
    assert [list(update.model_dump().values())[-1] for update in adapted_updates[-3:]] == [299, 299, 299]


def test_properties_of_a_commit_are_copied_once(server: LiveServer) -> None:
    """Copying all properties for each update took a minute for 1,000 updates of a table with 90,000 properties."""
    create_tables(server)
    initial_properties = {f"p{number}": "v" for number in range(500)}
    assert server.request("POST", TABLE, commit_of(properties(**initial_properties))).status == 200
    application = server.application
    assert application is not None
    current = application.warehouses.served[0].catalog.load_table("ns.t").metadata
    updates: list[TableUpdate] = [
        update
        for number in range(500)
        for update in (
            SetPropertiesUpdate(updates={"a": str(number), f"q{number}": "v", "gc.enabled": "true"}),
            RemovePropertiesUpdate(removals=[f"p{number}", f"q{number}", "b", "gc.enabled"]),
        )
    ]
    adapted_updates = adapt_updates([*updates, SetPropertiesUpdate(updates={"p7": "again"})], current)
    assert adapted_updates == [
        SetPropertiesUpdate(updates={"a": "499", "p7": "again"}),
        RemovePropertiesUpdate(removals=[name for name in initial_properties if name != "p7"]),
    ]
    change = commit_of(*(update.model_dump(mode="json") for update in updates[:999]), properties(p7="again"))
    assert server.request("POST", TABLE, change).status == 200
    final_properties = server.request("GET", TABLE).document["metadata"]["properties"]
    assert {name: final_properties.get(name) for name in ("a", "p7", "p8", "p499", "q8", "gc.enabled")} == {
        "a": "499", "p7": "again", "p8": None, "p499": "v", "q8": None, "gc.enabled": "false",
    }  # fmt: skip


def schema_of(number: int) -> Schema:
    return Schema(NestedField(1, "id", LongType(), required=False, doc=str(number)), schema_id=number)


def test_body_with_too_many_objects_is_not_parsed(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of a schema is an object, so a commit of 250 schemas with 200 fields is too expensive."""
    with serving(settings_for(lake)) as server:
        create_tables(server)
        before = lake.latest_version()
        fields = [{"id": number, "name": f"c{number}", "type": "long", "required": False} for number in range(1, 201)]
        update = {"action": "add-schema", "schema": {"type": "struct", "schema-id": 1, "fields": fields}}
        parsed: list[Any] = []
        monkeypatch.setattr(tables.CommitTableRequest, "model_validate", parsed.append)
        for path, body in (
            (TABLE, commit_of(*[update] * 250)),
            (COMMIT, {"table-changes": [commit_of(*[update] * 125, name=name) for name in "tu"]}),
        ):
            assert server.request("POST", path, body).error == (413, "BadRequestException")
        assert parsed == []
        assert lake.latest_version() == before


def test_concurrent_loads_of_large_table_share_parsing(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """The metadata is not cached yet. At most two threads parse it, and the others reuse the result."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", pa.schema([(f"column{number}", pa.int64()) for number in range(1_500)]))
    gate, n_parsed, parse = threading.Event(), 0, metadata.TableMetadataUtil.parse_obj

    def gated(content: dict[str, Any]) -> Any:
        nonlocal n_parsed
        n_parsed += 1
        assert gate.wait(TIMEOUT_S)
        return parse(content)

    monkeypatch.setattr(metadata.TableMetadataUtil, "parse_obj", gated)
    with serving(settings_for(lake)) as server, ThreadPoolExecutor(12) as threads:
        loads = [threads.submit(server.request, "GET", TABLE) for _ in range(12)]
        wait_until(lambda: n_parsed >= 1)
        gate.set()
        assert {load.result().status for load in loads} == {200}
    assert n_parsed <= 2


def test_job_that_raises_stop_iteration_completes() -> None:
    async def run() -> tuple[BaseException | None, str]:
        workers = Workers(Limits(threads=1, waiting=10), is_shared=True)
        try:
            first = workers.submit(Work.READ, "a", lambda: next(iter(())))
            second = workers.submit(Work.READ, "b", lambda: "done")
            result = await asyncio.wait_for(second.ended, TIMEOUT_S)
            return first.ended.exception(), result
        finally:
            workers.close()

    error, result = asyncio.run(run())
    assert isinstance(error, RuntimeError)
    assert result == "done"
