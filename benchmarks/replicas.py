"""Compare commits of many clients through servers of a lakehouse and through PyIceberg's catalog on PostgreSQL.

Run from the project's root: ``.venv/bin/python -m benchmarks.replicas``. It writes ``benchmarks/results/replicas.md``.
All tables are in one bucket. A proxy delays each request to the bucket by 20 ms, and in a second run by 100 ms. Each
client is a process that changes a separate table.

If all processes share few CPU threads, throughput depends on the CPU time of each process. The result therefore
reports CPU time by role, which varies less between runs than commits per second.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import struct
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.catalog.sql import SqlCatalog

from benchmarks.lakes import REQUEST_SECONDS
from benchmarks.report import table, write_result
from benchmarks.servers import running_server
from tests.processes import Child, fork
from tests.server.live_server import command
from tests.servers.daemons import free_port
from tests.servers.postgres import Postgres, postgres
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage.options import OPTIONS_VARIABLE

N_CLIENTS, N_REPLICAS = 16, 3
SLOW_SECONDS = 0.1
PEER = "pyiceberg, PostgreSQL"
SCHEMA = pa.schema([("id", pa.int64())])
_LIMIT_SECONDS = 900
_STORAGE, _DATABASE = ("radosgw", "ceph-mon", "ceph-osd"), "postgres"
_CLIENT_USER_AGENT = b"aws-sdk-cpp"
_TICK_MS = 1_000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class CommitCosts:
    """Commits per second, and CPU milliseconds and requests per commit by role."""

    per_second: float
    busy_ms: Mapping[str, float]
    n_requests: Mapping[str, float]

    @property
    def all_busy_ms(self) -> float:
        """CPU milliseconds per commit without the storage and the proxy, which are the same for all catalogs."""
        return sum(self.busy_ms.values()) - self.busy_ms["storage"] - self.busy_ms["delay"]


class Requests:
    """The number of requests that the delaying proxy has forwarded so far, by the role of the sender."""

    roles = ("clients", "servers")

    def __init__(self) -> None:
        self._counted = mmap.mmap(-1, 16)

    def add(self, data: bytes) -> None:
        """Count a request by its first bytes, which contain the user agent of a client or of a server."""
        numbers = list(self.numbers)
        numbers[0 if _CLIENT_USER_AGENT in data else 1] += 1
        self._counted[:] = struct.pack("<2q", *numbers)

    @property
    def numbers(self) -> tuple[int, int]:
        """The number of requests of clients and of servers."""
        n_clients, n_servers = struct.unpack("<2q", self._counted[:])
        return n_clients, n_servers


@dataclass(frozen=True)
class DelayedServer:
    """A storage server behind a delaying proxy, with the delay, the process id and the counters of the proxy."""

    server: S3Server
    seconds: float
    pid: int
    requests: Requests

    def n_commits_per_client(self, *, appends: bool) -> int:
        """Return a number of commits per client that takes some seconds."""
        return (12 if appends else 40) if self.seconds < SLOW_SECONDS else (4 if appends else 12)


def busy_ticks(clients: frozenset[int], delay: int) -> Counter[str]:
    """Return the CPU ticks of all descendants of this process, by role.

    Args:
        clients: The process ids of the clients.
        delay: The process id of the proxy.
    """
    parents, stats = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            parents[int(folder.name)] = int(fields[1])
            stats[int(folder.name)] = (name, int(fields[11]) + int(fields[12]))
    busy: Counter[str] = Counter({"clients": 0, "servers": 0, "database": 0, "storage": 0, "delay": 0})
    for pid, (name, ticks) in stats.items():
        ancestor = pid
        while ancestor not in (0, 1, os.getpid()):
            ancestor = parents.get(ancestor, 0)
        if ancestor != os.getpid() or pid == ancestor:
            continue
        role = "clients" if pid in clients else "delay" if pid == delay else "servers"
        busy["storage" if name in _STORAGE else "database" if name == _DATABASE else role] += ticks
    return busy


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int, seconds: float, requests: Requests
) -> None:
    """Forward one connection. Only the first chunk of each request is delayed."""
    from_server, to_server = await asyncio.open_connection("127.0.0.1", target)
    is_new = True

    async def forward_responses() -> None:
        nonlocal is_new
        while data := await from_server.read(1 << 16):
            is_new = True
            writer.write(data)
            await writer.drain()
        writer.close()

    forwarding = asyncio.create_task(forward_responses())
    try:
        while data := await reader.read(1 << 16):
            if is_new:
                is_new = False
                requests.add(data)
                await asyncio.sleep(seconds)
            to_server.write(data)
            await to_server.drain()
    except ConnectionError:
        pass  # a client may disconnect at any time
    finally:
        to_server.close()
        forwarding.cancel()


@contextlib.contextmanager
def delayed(server: S3Server, seconds: float) -> Iterator[DelayedServer]:
    """Start a proxy that delays each request to a storage server, and yield the delayed server."""
    proxy_port, server_port, requests = free_port(), int(server.endpoint.rpartition(":")[2]), Requests()

    def serve(report: Callable[[str], None]) -> None:
        async def run() -> None:
            proxy = await asyncio.start_server(
                lambda r, w: _forward(r, w, server_port, seconds, requests), "127.0.0.1", proxy_port, backlog=1_000
            )
            report("ready")
            await proxy.serve_forever()

        asyncio.run(run())

    child = fork(serve, time_limit_seconds=_LIMIT_SECONDS)
    child.next_report()
    try:
        endpoint = f"http://127.0.0.1:{proxy_port}"
        yield DelayedServer(S3Server(server.kind, endpoint, server.folder), seconds, child.pid, requests)
    finally:
        os.kill(child.pid, 15)
        child.finish()


def client(open_catalog: Callable[[], Catalog], number: int, n_per_client: int, *, appends: bool) -> Child:
    """Fork a client that creates a table, waits for the common start, commits, and reports the end.

    Args:
        open_catalog: Opens the catalog.
        number: The number of the client.
        n_per_client: The number of commits.
        appends: Whether the commits are appends; otherwise they set a property.
    """

    def work(report: Callable[[str], None]) -> None:
        catalog = open_catalog()
        name = f"ns.{'a' if appends else 'p'}{number}"
        table = catalog.create_table(name, SCHEMA)
        rows = pa.table({"id": pa.array([number], pa.int64())}, schema=SCHEMA)
        table.append(rows)
        report("ready")
        while not _start_file.exists():
            time.sleep(0.005)
        for mark in range(n_per_client):
            if appends:
                table.append(rows)
            else:
                with table.transaction() as change:
                    change.set_properties(mark=str(mark))
        report("done")

    return fork(work, time_limit_seconds=_LIMIT_SECONDS)


#: Clients start to commit when this file exists.
_start_file = Path(tempfile.mkdtemp()) / "begin"


def commits(openers: Sequence[Callable[[], Catalog]], slow: DelayedServer, *, appends: bool) -> CommitCosts:
    """Return the cost of the commits of all clients, from the common start to the end of the last client."""
    _start_file.unlink(missing_ok=True)
    n_per_client = slow.n_commits_per_client(appends=appends)
    children = [
        client(openers[number % len(openers)], number, n_per_client, appends=appends) for number in range(N_CLIENTS)
    ]
    pids = frozenset(child.pid for child in children)
    for child in children:
        if child.next_report() != "ready":
            raise RuntimeError("a client ended early")
    busy, n_requests_before, started_s = busy_ticks(pids, slow.pid), slow.requests.numbers, time.perf_counter()
    _start_file.touch()
    for child in children:
        if child.next_report() != "done":
            raise RuntimeError("a client failed")
    seconds, n_commits = time.perf_counter() - started_s, N_CLIENTS * n_per_client
    ticks, n_requests_after = busy_ticks(pids, slow.pid), slow.requests.numbers
    ticks.subtract(busy)
    for child in children:
        child.finish()
    return CommitCosts(
        n_commits / seconds,
        {role: number * _TICK_MS / n_commits for role, number in ticks.items()},
        {
            role: (now - before) / n_commits
            for role, now, before in zip(Requests.roles, n_requests_after, n_requests_before, strict=True)
        },
    )


@contextlib.contextmanager
def servers(root: str, number: int) -> Iterator[list[str]]:
    """Run servers of a lakehouse and yield their addresses."""
    with contextlib.ExitStack() as stack:
        urls = []
        for _ in range(number):
            process, url, _ready = stack.enter_context(command(root, "--anonymous-writes"))
            assert process.stderr is not None
            threading.Thread(target=process.stderr.read, daemon=True).start()
            urls.append(url)
        yield urls


def by_postgres(slow: DelayedServer, files: dict[str, str]) -> list[CommitCosts]:
    """Return the costs of setting properties and of appends through PyIceberg's SQL catalog."""
    database = Postgres(free_port(), "iceberg", "iceberg", "iceberg")
    uri = f"postgresql+psycopg2://iceberg:iceberg@127.0.0.1:{database.port}/iceberg"

    def sql() -> Catalog:
        return SqlCatalog("sql", uri=uri, warehouse=f"s3://{slow.server.bucket}/sql", **files)

    with (
        tempfile.TemporaryDirectory() as folder,
        postgres(database, ["postgres", "-p", str(database.port)], Path(folder) / "log"),
    ):
        fork(lambda _: sql().create_namespace("ns")).finish()
        return [commits([sql], slow, appends=appends) for appends in (False, True)]


def by_servers(slow: DelayedServer, files: dict[str, str], number: int, client_name: str) -> list[CommitCosts]:
    """Return the costs of setting properties and of appends through servers with a storage client."""
    os.environ[OPTIONS_VARIABLE] = f"addressing_style=path,client={client_name}"
    root = slow.server.fresh_root()
    fork(lambda _: _with_namespace(root)).finish()
    with servers(root, number) as urls:
        openers = [
            lambda url=url: RestCatalog("rest", uri=url, warehouse="main", **files)  # type: ignore[misc]
            for url in urls
        ]
        return [commits(openers, slow, appends=appends) for appends in (False, True)]


def measure(server: S3Server, seconds: float, client_names: Sequence[str]) -> dict[str, list[CommitCosts]]:
    """Return the costs of setting properties and of appends through each catalog, with a delay for each request."""
    with delayed(server, seconds) as slow:
        os.environ.update(slow.server.environment)
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        files = {
            "s3.endpoint": slow.server.endpoint,
            "s3.access-key-id": slow.server.access_key_id,
            "s3.secret-access-key": slow.server.secret_access_key,
            "s3.region": slow.server.region,
        }
        costs = {PEER: by_postgres(slow, files)}
        for client_name, number in itertools.product(client_names, (1, N_REPLICAS)):
            name = "one server" if number == 1 else f"{number} replicas"
            costs[f"{name}, {client_name}"] = by_servers(slow, files, number, client_name)
        return costs


def costs_table(costs: Mapping[str, list[CommitCosts]], index: int) -> list[str]:
    """Return the lines of a table.

    Args:
        costs: The cost of commits by catalog.
        index: 0 for commits of properties, 1 for appends.
    """
    base = costs[PEER][index]
    rows = []
    for name, values in costs.items():
        cost = values[index]
        cells = [f"{cost.per_second:.1f}", f"{cost.per_second / base.per_second:.2f}"]
        cells += [f"{cost.busy_ms[role]:.0f}" for role in ("clients", "servers", "database", "storage", "delay")]
        cells += [f"{base.all_busy_ms / cost.all_busy_ms:.2f}", f"{base.all_busy_ms / cost.busy_ms['clients']:.2f}"]
        rows.append([name, *cells, *(f"{cost.n_requests[role]:.1f}" for role in ("clients", "servers"))])
    header = (
        "catalog", "commits / s", "ratio", "CPU ms: clients", "servers", "database", "storage", "proxy", "CPU ratio",
        "CPU ratio without servers", "requests: clients", "servers",
    )  # fmt: skip
    return table(header, rows)


def main() -> None:
    """Measure and write the result."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    with running_server("radosgw") as server:
        costs = measure(server, REQUEST_SECONDS, ("s3fs", "obstore"))
        slow_costs = measure(server, SLOW_SECONDS, ("obstore",))
    write_result(
        "replicas",
        [
            "# Commits of many clients",
            "",
            f"{N_CLIENTS} pyiceberg clients, each a process that changes a separate table, commit for some seconds to",
            "one radosgw. Rows name the storage client of the servers. All processes, including the storage, share",
            f"{os.cpu_count()} CPU threads, whose load was {load:.1f} at the start.",
            "",
            "Milliseconds are CPU time per commit, by role. Their ratio excludes the storage and the proxy. The next",
            "column is the ratio of a hypothetical server that needs no CPU time.",
            *_section(costs, REQUEST_SECONDS),
            *_section(slow_costs, SLOW_SECONDS),
            "",
            "With a delay of 100 ms, CPUs are idle most of the time, so the number of round trips decides, as on a",
            "machine with more CPUs.",
        ],
    )


def _section(costs: Mapping[str, list[CommitCosts]], seconds: float) -> list[str]:
    delay = f"with {1_000 * seconds:.0f} ms added per request"
    return [
        "",
        f"## Properties, {delay}",
        "",
        *costs_table(costs, 0),
        "",
        f"## Appends, {delay}",
        "",
        *costs_table(costs, 1),
    ]


def _with_namespace(root: str) -> None:
    with Lakehouse.create(root).transaction() as change:
        change.create_namespace("ns")


if __name__ == "__main__":
    main()
