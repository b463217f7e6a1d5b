"""Requests that wait, or need much work, keep no thread from the requests of other clients."""

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

from tests.server.requests import COMMIT, TABLE, TABLES, commit_of, created, properties
from tests.server.served import Served, serving, settings_for
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
PATIENCE_S = 60.0  # on however busy a machine


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def sent(served: Served, path: str, body: Any, token: str = "") -> socket.socket:
    """Send a request, and return its connection without waiting for the response."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    head += f"Authorization: Bearer {token}\r\n" if token else ""
    client = socket.create_connection(("127.0.0.1", int(served.url.rpartition(":")[2])), timeout=PATIENCE_S)
    client.sendall(f"{head}\r\n".encode() + data)
    return client


def status_of(client: socket.socket) -> int:
    with client, client.makefile("rb") as response:
        return int(response.read().split(b" ", 2)[1])


def make_tables(served: Served) -> None:
    assert served.ask("POST", "/v1/main/namespaces", {"namespace": ["ns"]}).status == 200
    for name in ("t", "u"):
        assert served.ask("POST", TABLES, created(name)).status == 200


class Gate(threading.Event):
    """Where commits wait that have their turn and their thread. ``n_entered`` counts them."""

    n_entered = 0


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    """Block commits of the table t until this event."""
    gate, commit = Gate(), tables.commit_tables

    def gated(call: Any, commits: Any) -> Any:
        if any(one.name[1] == "t" for one in commits):
            gate.n_entered += 1
            assert gate.wait(PATIENCE_S)
        return commit(call, commits)

    monkeypatch.setattr(tables, "commit_tables", gated)
    yield gate
    gate.set()


def test_commits_that_wait_for_their_table_hold_no_thread(lake: Lakehouse, gate: Gate) -> None:
    """The commit that runs is blocked, 149 wait for it, and everything else is served."""
    with serving(settings_for(lake)) as served:
        make_tables(served)
        application = served.application
        assert application is not None
        queue = application.scheduler.queue
        clients = [sent(served, TABLE, commit_of(properties(a=str(number)))) for number in range(N_WAITING - 1)]
        both = {"table-changes": [commit_of(properties(b="1")), commit_of(properties(b="1"), name="u")]}
        clients.append(sent(served, COMMIT, both))
        until(lambda: len(queue) == N_WAITING)
        assert served.ask("GET", TABLE).status == 200
        assert served.ask("POST", TABLES, created("v")).status == 200
        assert served.ask("POST", f"{TABLES}/v", commit_of(properties(a="1"), name="v")).status == 200
        assert served.ask("GET", "/readyz").status == 200
        before = lake.latest_version()
        gate.set()
        assert {status_of(client) for client in clients} == {200, 204}
        until(lambda: len(queue) == 0)
        assert lake.latest_version() == before + N_WAITING


def test_clients_that_disconnect_leave_the_queue(lake: Lakehouse, gate: Gate) -> None:
    with serving(settings_for(lake)) as served:
        make_tables(served)
        application = served.application
        assert application is not None
        first = sent(served, TABLE, commit_of(properties(a="first")))
        until(lambda: len(application.scheduler.queue) == 1)
        clients = [sent(served, TABLE, commit_of(properties(a="lost"))) for _ in range(20)]
        until(lambda: len(application.scheduler.queue) == 21)
        for client in clients:
            client.close()
        until(lambda: len(application.scheduler.queue) == 1)
        until(lambda: application._n_body_bytes == len(json.dumps(commit_of(properties(a="first")))))
        before = lake.latest_version()
        gate.set()
        assert status_of(first) == 200
        until(lambda: len(application.scheduler.queue) == 0)
        assert lake.latest_version() == before + 1


def test_a_commit_that_began_ends_without_its_client(lake: Lakehouse, gate: Gate) -> None:
    with serving(settings_for(lake)) as served:
        make_tables(served)
        application = served.application
        assert application is not None
        before = lake.latest_version()
        client = sent(served, TABLE, commit_of(properties(a="1")))
        until(lambda: gate.n_entered == 1)
        client.close()
        gate.set()
        until(lambda: len(application.scheduler.queue) == 0)
        assert lake.latest_version() == before + 1


def test_the_queue_of_commits_is_bounded(lake: Lakehouse, gate: Gate) -> None:
    with serving(settings_for(lake, limits=Limits(threads=2, waiting=3))) as served:
        make_tables(served)
        application = served.application
        assert application is not None
        clients = [sent(served, TABLE, commit_of(properties(a=str(number)))) for number in range(5)]
        until(lambda: len(application.scheduler.queue) == 5)
        refused = served.ask("POST", TABLE, commit_of(properties(a="x")))
        assert refused.error == UNAVAILABLE
        assert refused.headers["retry-after"] == "1"
        assert served.ask("GET", TABLE).status == 200
        gate.set()
        assert {status_of(client) for client in clients} == {200}


def test_a_commit_that_waited_too_long_did_nothing(lake: Lakehouse, gate: Gate) -> None:
    """Its turn did not come: 503. The one that runs is unknown: 504, and the next one waits until it has ended."""
    with serving(settings_for(lake, limits=Limits(seconds=0.5))) as served:
        make_tables(served)
        application = served.application
        assert application is not None
        before = lake.latest_version()
        first = sent(served, TABLE, commit_of(properties(a="first")))
        until(lambda: gate.n_entered == 1)
        assert served.ask("POST", TABLE, commit_of(properties(b="second"))).error == UNAVAILABLE
        assert status_of(first) == 504
        assert len(application.scheduler.queue) == 1
        gate.set()
        until(lambda: len(application.scheduler.queue) == 0)
        assert lake.latest_version() == before + 1


def test_a_principal_without_write_access_enters_no_queue(lake: Lakehouse, gate: Gate, tmp_path: Path) -> None:
    with serving(settings_for(lake, tokens=tokens(tmp_path, writer="write", reader="read"))) as served:
        as_writer = {"Authorization": "Bearer writer"}
        assert served.ask("POST", "/v1/main/namespaces", {"namespace": ["ns"]}, as_writer).status == 200
        assert served.ask("POST", TABLES, created("t"), as_writer).status == 200
        application = served.application
        assert application is not None
        writing = sent(served, TABLE, commit_of(properties(a="1")), "writer")
        until(lambda: len(application.scheduler.queue) == 1)
        as_reader = {"Authorization": "Bearer reader"}
        body = commit_of(properties(a="2"))
        for path, asked in ((TABLE, body), (COMMIT, {"table-changes": [body]})):
            assert served.ask("POST", path, asked, as_reader).error == (403, "ForbiddenException")
        gate.set()
        assert status_of(writing) == 200


def tokens(folder: Path, **scopes: str) -> Path:
    """Write a file of tokens: each is the name of its principal."""
    entries = [
        {"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest(), "scope": scope}
        for name, scope in scopes.items()
    ]
    path = folder / "tokens.yaml"
    path.write_text(yaml.safe_dump({"tokens": entries}))
    return path


def test_one_principal_does_not_occupy_all_threads_nor_all_memory_of_bodies(
    lake: Lakehouse, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = Limits(threads=4, waiting=20, body_bytes=1 << 20, bodies_bytes=2 << 20)
    gate = threading.Event()
    with serving(settings_for(lake, limits=limits, tokens=tokens(tmp_path, one="write", other="write"))) as served:
        application = served.application
        assert application is not None
        own = application.warehouses.served[0].lake
        begin = own.transaction

        def gated(*arguments: Any, **named: Any) -> Any:
            if "gated" in named["message"]:
                assert gate.wait(PATIENCE_S)
            return begin(*arguments, **named)

        monkeypatch.setattr(own, "transaction", gated)
        path, other = "/v1/main/namespaces", {"Authorization": "Bearer other"}
        clients = [sent(served, path, {"namespace": [f"gated{number}"]}, "one") for number in range(12)]
        pool = application.scheduler.workers._pools[Work.CHANGE]
        until(lambda: (pool.n_running, pool.n_waiting) == (3, 9))
        assert served.ask("POST", path, {"namespace": ["free"]}, other).status == 200
        refused = served.ask("POST", path, {"namespace": ["gated"]}, {"Authorization": "Bearer one"})
        assert refused.error == UNAVAILABLE
        port = int(served.url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as slow:
            head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer one\r\nContent-Length: 900000"
            slow.sendall(f"{head}\r\n\r\n".encode() + b" " * 800_000)
            until(lambda: application._n_body_bytes > 800_000)
            large = b" " * 900_000 + b'{"namespace": ["a"]}'
            assert served.ask("POST", path, large, {"Authorization": "Bearer one"}).error == UNAVAILABLE
            assert served.ask("POST", path, large, other).status == 200
        gate.set()
        assert {status_of(client) for client in clients} == {200}


def test_principals_take_turns() -> None:
    """The queue of one is long, and the request of another one comes next."""

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


def test_a_principal_has_half_of_the_places() -> None:
    async def run() -> None:
        workers, gate = Workers(Limits(threads=2, waiting=8), is_shared=True), threading.Event()
        for _ in range(5):
            workers.submit(Work.READ, "a", gate.wait)
        with pytest.raises(RejectedError):
            workers.submit(Work.READ, "a", gate.wait)
        for _ in range(5):
            workers.submit(Work.READ, "b", gate.wait)
        assert workers.saturated(PATIENCE_S) == [Work.READ]
        with pytest.raises(RejectedError):
            workers.submit(Work.READ, "c", gate.wait)
        gate.set()
        await asyncio.to_thread(workers.close)

    asyncio.run(run())


def test_commits_come_in_the_order_in_which_they_entered() -> None:
    async def run() -> None:
        queue = TableQueue(10, 3)
        t, u, v = (("", "ns", name) for name in "tuv")
        first = queue.enter("a", [t])
        both = queue.enter("a", [t, u, t])
        after = queue.enter("b", [u])
        other = queue.enter("b", [v])
        assert [place.ready.done() for place in (first, both, after, other)] == [True, False, False, True]
        queue.enter("a", [v])
        with pytest.raises(RejectedError):
            queue.enter("a", [("", "ns", "w")])
        queue.leave(first)
        assert [place.ready.done() for place in (both, after)] == [True, False]
        left = queue.enter("c", [u])
        queue.leave(left)
        queue.leave(both)
        assert after.ready.done()
        for place in (after, other):
            queue.leave(place)
        assert len(queue) == 1

    asyncio.run(run())


def test_readiness_reports_stalled_threads_until_they_are_free(
    lake: Lakehouse, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(settings_for(lake, limits=Limits(threads=1))) as served:
        make_tables(served)
        application = served.application
        assert application is not None
        clients = [sent(served, TABLE, commit_of(properties(a="1")))]
        until(lambda: len(application.scheduler.queue) == 1)
        clients.append(sent(served, f"{TABLES}/u", commit_of(properties(a="1"), name="u")))
        monkeypatch.setattr(scheduling, "STALLED_SECONDS", 0.0)
        until(lambda: served.ask("GET", "/readyz").status == 503)
        assert "saturated-change" in served.ask("GET", "/readyz").document["error"]["message"]
        assert served.ask("GET", "/healthz").status == 200
        assert served.ask("GET", TABLE).status == 200
        gate.set()
        assert {status_of(client) for client in clients} == {200}
        until(lambda: served.ask("GET", "/readyz").status == 200)


def test_readiness_reports_a_storage_that_does_not_respond(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduling, "_PROBE_AGE_SECONDS", 0.0)
    monkeypatch.setattr(scheduling, "_PROBE_SECONDS", 0.05)
    with serving(settings_for(lake)) as served:
        application = served.application
        assert application is not None
        own = application.warehouses.served[0].lake
        latest, gate, n_probes = own.latest_version, threading.Event(), 0
        assert served.ask("GET", "/readyz").status == 200

        def broken() -> int:
            raise TransientError("no response")

        def hanging() -> int:
            nonlocal n_probes
            n_probes += 1
            assert gate.wait(PATIENCE_S)
            return latest()

        monkeypatch.setattr(own, "latest_version", broken)
        until(lambda: served.ask("GET", "/readyz").status == 503)
        assert "storage-unreachable" in served.ask("GET", "/readyz").document["error"]["message"]
        monkeypatch.setattr(own, "latest_version", hanging)
        for _ in range(20):
            assert served.ask("GET", "/readyz").error == UNAVAILABLE
        assert n_probes == 1, "a storage that hangs holds one thread"
        assert served.ask("GET", "/healthz").status == 200
        monkeypatch.setattr(own, "latest_version", latest)
        gate.set()
        until(lambda: served.ask("GET", "/readyz").status == 200)


def test_updates_of_a_commit_are_not_compared_with_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each would be compared with all before it: 600 schemas took a minute. Equal ones still share an id."""
    n_compared = 0

    def counted(self: Any, other: Any) -> bool:
        nonlocal n_compared
        n_compared += 1
        return self is other

    for kind in (Schema, PartitionSpec, SortOrder, NestedField, PartitionField, SortField):
        monkeypatch.setattr(kind, "__eq__", counted)
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
    made = adapt_updates([*updates, SetDefaultSortOrderUpdate(sort_order_id=-1)], empty)
    assert n_compared == 0
    assert [one.schema_.schema_id for one in made if isinstance(one, AddSchemaUpdate)] == [*range(1, 300)]
    assert [one.spec.spec_id for one in made if isinstance(one, AddPartitionSpecUpdate)] == [*range(1, 300)]
    assert [one.sort_order.order_id for one in made if isinstance(one, AddSortOrderUpdate)] == [*range(1, 300)]
    assert [list(one.model_dump().values())[-1] for one in made[-3:]] == [299, 299, 299]


def test_properties_of_a_commit_are_copied_once(served: Served) -> None:
    """A copy of all properties for each update took a minute for 1,000 updates of a table with 90,000 properties."""
    make_tables(served)
    many = {f"p{number}": "v" for number in range(500)}
    assert served.ask("POST", TABLE, commit_of(properties(**many))).status == 200
    application = served.application
    assert application is not None
    present = application.warehouses.served[0].catalog.load_table("ns.t").metadata
    updates: list[TableUpdate] = [
        update
        for number in range(500)
        for update in (
            SetPropertiesUpdate(updates={"a": str(number), f"q{number}": "v", "gc.enabled": "true"}),
            RemovePropertiesUpdate(removals=[f"p{number}", f"q{number}", "b", "gc.enabled"]),
        )
    ]
    made = adapt_updates([*updates, SetPropertiesUpdate(updates={"p7": "again"})], present)
    assert made == [
        SetPropertiesUpdate(updates={"a": "499", "p7": "again"}),
        RemovePropertiesUpdate(removals=[name for name in many if name != "p7"]),
    ]
    change = commit_of(*(update.model_dump(mode="json") for update in updates[:999]), properties(p7="again"))
    assert served.ask("POST", TABLE, change).status == 200
    kept = served.ask("GET", TABLE).document["metadata"]["properties"]
    assert {name: kept.get(name) for name in ("a", "p7", "p8", "p499", "q8", "gc.enabled")} == {
        "a": "499", "p7": "again", "p8": None, "p499": "v", "q8": None, "gc.enabled": "false",
    }  # fmt: skip


def schema_of(number: int) -> Schema:
    return Schema(NestedField(1, "id", LongType(), required=False, doc=str(number)), schema_id=number)


def test_a_body_of_too_many_objects_is_not_parsed(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each field of a schema is one, so a commit of 250 schemas with 200 fields is too much work."""
    with serving(settings_for(lake)) as served:
        make_tables(served)
        before = lake.latest_version()
        fields = [{"id": number, "name": f"c{number}", "type": "long", "required": False} for number in range(1, 201)]
        update = {"action": "add-schema", "schema": {"type": "struct", "schema-id": 1, "fields": fields}}
        parsed: list[Any] = []
        monkeypatch.setattr(tables.CommitTableRequest, "model_validate", parsed.append)
        for path, body in (
            (TABLE, commit_of(*[update] * 250)),
            (COMMIT, {"table-changes": [commit_of(*[update] * 125, name=name) for name in "tu"]}),
        ):
            assert served.ask("POST", path, body).error == (413, "BadRequestException")
        assert parsed == []
        assert lake.latest_version() == before


def test_clients_that_load_one_large_table_do_not_all_parse_it(
    lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its metadata is in no cache yet. At most two threads parse it, and the others take what these have parsed."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", pa.schema([(f"column{number}", pa.int64()) for number in range(1_500)]))
    gate, n_parsed, parse = threading.Event(), 0, metadata._parse

    def gated(text: bytes, uri: str) -> Any:
        nonlocal n_parsed
        n_parsed += 1
        assert gate.wait(PATIENCE_S)
        return parse(text, uri)

    monkeypatch.setattr(metadata, "_parse", gated)
    with serving(settings_for(lake)) as served, ThreadPoolExecutor(12) as threads:
        loads = [threads.submit(served.ask, "GET", TABLE) for _ in range(12)]
        until(lambda: n_parsed >= 1)
        gate.set()
        assert {load.result().status for load in loads} == {200}
    assert n_parsed <= 2


def test_a_job_that_raises_stop_iteration_ends() -> None:
    async def run() -> tuple[BaseException | None, str]:
        workers = Workers(Limits(threads=1, waiting=10), is_shared=True)
        try:
            first = workers.submit(Work.READ, "a", lambda: next(iter(())))
            second = workers.submit(Work.READ, "b", lambda: "done")
            done = await asyncio.wait_for(second.ended, PATIENCE_S)
            return first.ended.exception(), done
        finally:
            workers.close()

    error, done = asyncio.run(run())
    assert isinstance(error, RuntimeError)
    assert done == "done"
