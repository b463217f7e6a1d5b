"""Measure the latency that the server adds to catalog calls, and the storage requests of its routes.

Run from the project's root: ``.venv/bin/python -m benchmarks.server``. It writes ``benchmarks/results/server.md``. The
server is a separate process with another lakehouse of the same shape. Calls of the catalog and of the server alternate,
so that both run under the same load. Differences are more meaningful than times.

For comparison, a bare route only parses the same body in a thread and responds with the same number of bytes. This is
the lower bound for a server that uses the same libraries.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import uvicorn
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import parquet_files_to_data_files
from pyiceberg.table.update import SetPropertiesUpdate
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from benchmarks.report import Spread, seconds, table, write_result
from tests.processes import fork
from tests.server.live_server import LiveServer, command, serving, settings_for
from tests.server.request_bodies import TABLE, TABLES, commit_of, properties
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.storage import MeteredStorage, RequestCounts, background

N_CALLS, N_BEFORE = 200, 110
N_TABLES = 5_000
BOUND_MS, LIST_BOUND_MS = 2.0, 100.0
FILES = (1, 10)
_LIMIT_SECONDS = 600
SCHEMA = pa.schema([("id", pa.int64()), ("name", pa.string()), ("amount", pa.float64())])
ROWS = pa.table({"id": [1, 2], "name": ["a", "b"], "amount": [0.5, 1.5]}, schema=SCHEMA)


class Client:
    """A persistent connection, as HTTP clients use it."""

    def __init__(self, url: str):
        split = urlsplit(url)
        self._connection = HTTPConnection(split.hostname or "", split.port, timeout=60)

    def request(self, method: str, path: str, body: Mapping[str, object] | None = None) -> bytes:
        """Send a request and return the body of its response. Raise RuntimeError if it fails."""
        self._connection.request(method, path, None if body is None else json.dumps(body).encode())
        response = self._connection.getresponse()
        data = response.read()
        if response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {data[:300]!r}")
        return data


@contextlib.contextmanager
def bare_route(response: bytes) -> Iterator[tuple[int, str]]:
    """Serve a route that parses the body and responds with these bytes. Yield its process id and address."""
    listener = socket.create_server(("127.0.0.1", 0))

    async def respond(request: Request) -> Response:
        await run_in_threadpool(json.loads, await request.body() or b"{}")
        return Response(response, media_type="application/json")

    def serve(_report: Callable[[str], None]) -> None:
        application = Starlette(routes=[Route("/t", respond, methods=["GET", "POST"])])
        uvicorn.Server(uvicorn.Config(application, log_config=None, access_log=False)).run(sockets=[listener])

    child = fork(serve, time_limit_seconds=_LIMIT_SECONDS)
    port = listener.getsockname()[1]
    listener.close()
    try:
        yield child.pid, f"http://127.0.0.1:{port}"
    finally:
        os.kill(child.pid, signal.SIGTERM)
        child.finish()


def make_lake(folder: Path, name: str, n_tables: int) -> Lakehouse:
    """Create a lakehouse with one table that has some history, and many other definitions."""
    lake = Lakehouse.create(str(folder / name), {"fsync": "false"})
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    table_with_history = catalog.create_table("ns.t", SCHEMA)
    for _ in range(20):
        table_with_history.append(ROWS)
    with lake.transaction() as txn:
        txn.create_namespace("many")
        for number in range(n_tables):
            txn.create_table("many", f"table_{number:05}", TableDef(id=str(uuid.uuid4())))
    return lake


def by_turns(calls: Mapping[str, Callable[[], object]], n_calls: int) -> tuple[dict[str, Spread], float]:
    """Measure calls in turns.

    Args:
        calls: The calls by name.
        n_calls: How often to make each call.

    Returns:
        The milliseconds of each call, and the CPU milliseconds of this process for all calls of the first kind.
    """
    durations_ms: dict[str, list[float]] = {name: [] for name in calls}
    first, busy_s = next(iter(calls)), 0.0
    for _ in range(n_calls):
        for name, call in calls.items():
            started_s = time.process_time()
            durations_ms[name].append(1_000 * seconds(call))
            busy_s += time.process_time() - started_s if name == first else 0.0
    return {name: Spread.of(values) for name, values in durations_ms.items()}, 1_000 * busy_s


def busy_ms(pid: int) -> float:
    """Return the CPU milliseconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1_000 / os.sysconf("SC_CLK_TCK")


def measure_latencies(folder: Path, n_calls: int, n_tables: int) -> tuple[list[str], dict[str, float]]:
    """Return the lines of a table of latencies, and the milliseconds that the server adds to each call."""
    bare_lake, served_lake = (make_lake(folder, name, n_tables) for name in ("bare", "served"))
    catalog, numbers = catalog_at(bare_lake), itertools.count()

    def commit() -> None:
        loaded = catalog.load_table("ns.t")
        catalog.commit_table(loaded, (), (SetPropertiesUpdate(updates={"a": str(next(numbers))}),))

    with command(served_lake.root, "--anonymous-writes") as (process, url, _ready):
        assert process.stderr is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()  # an unread log would block the server
        client = Client(url)
        calls: dict[str, tuple[Callable[[], object], Callable[[], bytes], dict[str, object] | None]] = {
            "load a table": (lambda: catalog.load_table("ns.t"), lambda: client.request("GET", TABLE), None),
            "commit a property": (
                commit,
                lambda: client.request("POST", TABLE, commit_of(properties(a=str(next(numbers))))),
                commit_of(properties(a="1000")),
            ),
            f"list {n_tables:,} tables": (
                lambda: catalog.list_tables("many"),
                lambda: client.request("GET", TABLES.replace("/ns/", "/many/")),
                None,
            ),
        }
        rows, added = [], {}
        for name, (bare, served, body) in calls.items():
            response = served()
            for _ in range(N_BEFORE):  # until the metadata log of the table has reached its maximum length
                bare()
                response = served()
            with bare_route(response) as (pid, address):
                route = _call_route(Client(address), body)
                by_turns({"route": route}, N_BEFORE)
                before = [busy_ms(process_id) for process_id in (process.pid, pid)]
                spreads, bare_ms = by_turns({"bare": bare, "served": served, "route": route}, n_calls)
                busy = [
                    bare_ms,
                    *(busy_ms(process_id) - ms for process_id, ms in zip((process.pid, pid), before, strict=True)),
                ]
            added[name] = spreads["served"].median - spreads["bare"].median
            cells = [spreads[kind] for kind in ("bare", "served", "route")]
            rows.append([name, *(f"{spread.median:.2f} / {spread.p99:.2f}" for spread in cells), f"{added[name]:.2f}"])
            rows[-1] += [f"{added[name] - spreads['route'].median:.2f}", *(f"{ms / n_calls:.2f}" for ms in busy)]
    header = (
        "call", "catalog, ms: median / p99", "server", "bare route", "added to the catalog",
        "added to catalog and bare route", "CPU ms: catalog", "server", "bare route",
    )  # fmt: skip
    return table(header, rows), added


def _call_route(client: Client, body: dict[str, object] | None) -> Callable[[], bytes]:
    return lambda: client.request("GET" if body is None else "POST", "/t", body)


def storage_requests(folder: Path) -> list[str]:
    """Return the lines of a table with the storage requests of calls to a warm server."""
    lake = make_lake(folder, "rounds", 10)
    catalog_at(lake).create_table("ns.p", SCHEMA)
    rows = []
    with serving(settings_for(lake)) as server:
        meter = server.application.warehouses.served[0].lake.storage if server.application is not None else None
        if not isinstance(meter, MeteredStorage):
            raise TypeError(type(meter).__name__)
        commits = {"set a property": lambda: (TABLE, commit_of(properties(b="1")))}
        commits |= {f"append {n} data files": lambda n=n: prepare_append(server, n) for n in FILES}
        for _ in range(2):
            before = meter.snapshot()
            server.request("GET", TABLE)
        rows.append(["load a table", *_cells(meter.snapshot() - before)])
        for name, prepare in commits.items():
            path, body = prepare()
            server.request("GET", path)
            before = meter.snapshot()
            response = server.request("POST", path, body)
            if response.status != 200:
                raise RuntimeError(f"{name}: {response.status} {response.body[:300]!r}")
            background.drain()
            rows.append([name, *_cells(meter.snapshot() - before)])
    return table(("call", "round trips", "requests", "by kind"), rows)


def _cells(counts: RequestCounts) -> list[str]:
    kinds = ", ".join(f"{number} {kind}" for kind, number in sorted(counts.requests.items()))
    return [str(counts.rounds), str(counts.total), kinds]


def prepare_append(server: LiveServer, n_files: int) -> tuple[str, dict[str, object]]:
    """Write data files as a client does, and return the path and the body of the commit that appends them."""
    loaded = server.catalog().load_table("ns.p")
    uris = [write_file(loaded.io, ROWS, f"{loaded.location()}/data/{uuid.uuid4()}.parquet") for _ in range(n_files)]
    transaction = loaded.transaction()
    with transaction.update_snapshot().fast_append() as append:
        for data_file in parquet_files_to_data_files(loaded.io, loaded.metadata, iter(uris)):
            append.append_data_file(data_file)
    updates = [json.loads(update.model_dump_json()) for update in transaction._updates]
    requirements = tuple(json.loads(requirement.model_dump_json()) for requirement in transaction._requirements)
    return f"{TABLES}/p", commit_of(*updates, requirements=requirements, name="p")


def write_file(io: FileIO, rows: pa.Table, uri: str) -> str:
    """Write a Parquet file and return its URI."""
    with io.new_output(uri).create(overwrite=False) as stream:
        pq.write_table(rows, stream)
    return uri


def main(n_calls: int = N_CALLS, n_tables: int = N_TABLES) -> None:
    """Measure and write the result, including the exceeded bounds."""
    with tempfile.TemporaryDirectory() as folder:
        latencies, added = measure_latencies(Path(folder), n_calls, n_tables)
        requests_lines = storage_requests(Path(folder))
    bounds_ms = (BOUND_MS, BOUND_MS, LIST_BOUND_MS)
    above = [name for (name, added_ms), bound_ms in zip(added.items(), bounds_ms, strict=True) if added_ms > bound_ms]
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    write_result(
        "server",
        [
            "# Server overhead",
            "",
            f"{n_calls} calls each, alternating with the same call of the catalog, on local disk without fsync. The",
            f"server is another process on the same machine, whose {os.cpu_count()} CPU threads had a load of",
            f"{load:.1f} each, so differences of medians are more meaningful than times.",
            f"Bounds: {BOUND_MS:g} ms added to loading and committing, {LIST_BOUND_MS:g} ms added to the list.",
            "The bare route parses the same body in a thread and responds with the same number of bytes, which is the",
            "lower bound for a server built on these libraries. CPU milliseconds are those per call in the process of",
            "the catalog, of the server, or of the bare route. They depend less on other load.",
            "",
            *latencies,
            "",
            f"Calls above their bound: {', '.join(above) or 'none'}.",
            "",
            "## Storage requests",
            "",
            "The server has cached the metadata of the table. It checks the age of each added file, in parallel as far",
            "as the storage allows, but each check counts as a round trip here. The hint is written in the background.",
            "",
            *requests_lines,
        ],
    )


if __name__ == "__main__":
    main()
