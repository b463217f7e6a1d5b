"""Commits of many clients by servers of a lakehouse, and by pyiceberg's catalog on PostgreSQL, on one bucket.

Run from the project's root: ``.venv/bin/python -m benchmarks.replicas``; it writes ``benchmarks/results/replicas.md``.
Each request to the bucket takes 20 ms more, by a proxy. Each client is a process with a table of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog

from benchmarks.lakes import REQUEST_SECONDS
from benchmarks.report import table, write_result
from benchmarks.servers import running
from tests.processes import Child, fork
from tests.server.served import command
from tests.servers.daemons import free_port
from tests.servers.postgres import Postgres, postgres
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

N_CLIENTS, N_EACH, N_REPLICAS = 16, 8, 3
SCHEMA = pa.schema([("id", pa.int64())])
_LIMIT_SECONDS = 900


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int) -> None:
    """Pass one connection on. Each request, but not each of its pieces, waits before it goes on."""
    from_server, to_server = await asyncio.open_connection("127.0.0.1", target)
    is_new = True

    async def answers() -> None:
        nonlocal is_new
        while data := await from_server.read(1 << 16):
            is_new = True
            writer.write(data)
            await writer.drain()
        writer.close()

    answering = asyncio.create_task(answers())
    try:
        while data := await reader.read(1 << 16):
            if is_new:
                is_new = False
                await asyncio.sleep(REQUEST_SECONDS)
            to_server.write(data)
            await to_server.drain()
    except ConnectionError:
        pass  # a client may end in mid-connection
    finally:
        to_server.close()
        answering.cancel()


@contextlib.contextmanager
def delayed(port: int) -> Iterator[int]:
    """Serve a port of this machine at another one, each request of which waits; yields that."""
    own = free_port()

    def serve(report: Callable[[str], None]) -> None:
        async def run() -> None:
            server = await asyncio.start_server(lambda r, w: _pass_on(r, w, port), "127.0.0.1", own, backlog=1_000)
            report("ready")
            await server.serve_forever()

        asyncio.run(run())

    child = fork(serve, time_limit_seconds=_LIMIT_SECONDS)
    child.next_report()
    try:
        yield own
    finally:
        os.kill(child.pid, 15)
        child.finish()


def client(opened: Callable[[], Catalog], number: int, *, appends: bool) -> Child:
    """Fork a client with a table of its own. It waits for a line, commits, and reports how long that took."""

    def work(report: Callable[[str], None]) -> None:
        catalog = opened()
        name = f"ns.{'a' if appends else 'p'}{number}"
        own = catalog.create_table(name, SCHEMA)
        rows = pa.table({"id": pa.array([number], pa.int64())}, schema=SCHEMA)
        own.append(rows)
        report("ready")
        while not begin.exists():
            time.sleep(0.005)
        for mark in range(N_EACH):
            if appends:
                own.append(rows)
            else:
                with own.transaction() as change:
                    change.set_properties(mark=str(mark))
        report("done")

    begin = _begin
    return fork(work, time_limit_seconds=_LIMIT_SECONDS)


_begin = Path(tempfile.mkdtemp()) / "begin"


def commits_per_second(openers: Sequence[Callable[[], Catalog]], *, appends: bool) -> float:
    """Return how many commits all clients made each second, from their common beginning to the end of the last."""
    _begin.unlink(missing_ok=True)
    children = [client(openers[number % len(openers)], number, appends=appends) for number in range(N_CLIENTS)]
    for child in children:
        if child.next_report() != "ready":
            raise RuntimeError("a client ended early")
    begun_s = time.perf_counter()
    _begin.touch()
    for child in children:
        if child.next_report() != "done":
            raise RuntimeError("a client failed")
    seconds = time.perf_counter() - begun_s
    for child in children:
        child.finish()
    return N_CLIENTS * N_EACH / seconds


@contextlib.contextmanager
def servers(root: str, number: int) -> Iterator[list[str]]:
    """Run servers of a lakehouse; yields their addresses."""
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(number):
            process, url, _begun = stack.enter_context(command(root, "--anonymous-writes"))
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            urls.append(url)
        yield urls


def by_postgres(slow: S3Server, files: dict[str, str]) -> list[float]:
    """Return commits a second by pyiceberg's own catalog: of properties, and of appends."""
    database = Postgres(free_port(), "iceberg", "iceberg", "iceberg")
    uri = f"postgresql+psycopg2://iceberg:iceberg@127.0.0.1:{database.port}/iceberg"

    def sql() -> Catalog:
        return SqlCatalog("sql", uri=uri, warehouse=f"s3://{slow.bucket}/sql", **files)

    with (
        tempfile.TemporaryDirectory() as folder,
        postgres(database, ["postgres", "-p", str(database.port)], Path(folder) / "log"),
    ):
        fork(lambda _: sql().create_namespace("ns")).finish()
        return [commits_per_second([sql], appends=one) for one in (False, True)]


def by_servers(slow: S3Server, files: dict[str, str], number: int, client_name: str) -> list[float]:
    """Return commits a second by so many servers, whose storage has the client named: properties, and appends."""
    os.environ[OPTIONS_VARIABLE] = f"addressing_style=path,client={client_name}"
    root = slow.fresh_root()
    fork(lambda _: _with_namespace(root)).finish()
    with servers(root, number) as urls:
        openers = [
            lambda url=url: RestCatalog("rest", uri=url, warehouse="main", **files)  # type: ignore[misc]
            for url in urls
        ]
        return [commits_per_second(openers, appends=one) for one in (False, True)]


def main() -> None:
    """Measure, and write the result, whatever the ratio is."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    found: dict[str, list[float]] = {}
    with running("radosgw") as server, delayed(int(server.endpoint.rpartition(":")[2])) as port:
        slow = S3Server(server.kind, f"http://127.0.0.1:{port}", server.folder)
        os.environ.update(slow.environment)
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        files = {
            "s3.endpoint": slow.endpoint,
            "s3.access-key-id": slow.access_key_id,
            "s3.secret-access-key": slow.secret_access_key,
            "s3.region": slow.region,
        }
        found["pyiceberg, PostgreSQL"] = by_postgres(slow, files)
        for client_name in ("s3fs", "obstore"):
            for number in (1, N_REPLICAS):
                name = "one server" if number == 1 else f"{number} replicas"
                found[f"{name}, {client_name}"] = by_servers(slow, files, number, client_name)
    (base, *_) = found.values()
    rows = []
    for name, values in found.items():
        ratios = [value / of for value, of in zip(values, base, strict=True)]
        rows.append([name, *(f"{value:.1f}" for value in values), *(f"{ratio:.2f}" for ratio in ratios)])
    write_result(
        "replicas",
        [
            "# Commits of many clients",
            "",
            f"{N_CLIENTS} clients of pyiceberg, each a process with a table of its own, make {N_EACH} commits each,",
            f"on one radosgw. Each request to it takes {1_000 * REQUEST_SECONDS:.0f} ms more. The servers' storage has",
            f"the client named. All share {os.cpu_count()} processor threads, whose load was {load:.1f} at first.",
            "",
            *table(("catalog", "properties / s", "appends / s", "ratio, properties", "ratio, appends"), rows),
        ],
    )


def _with_namespace(root: str) -> None:
    with Lakehouse.create(root).transaction() as change:
        change.create_namespace("ns")


if __name__ == "__main__":
    main()
