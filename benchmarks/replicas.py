"""Commits of many clients by servers of a lakehouse, and by pyiceberg's catalog on PostgreSQL, on one bucket.

Run from the project's root: ``.venv/bin/python -m benchmarks.replicas``; it writes ``benchmarks/results/replicas.md``.
Each request to the bucket takes 20 ms more, by a proxy, and then 100 ms. Each client is a process with a table of its
own.

Where all processes share few processor threads, the time of a processor that each of them takes decides. So it is
told, by who took it. It differs less from run to run than commits a second do.
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
from benchmarks.servers import running
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
_OF_CLIENTS = b"aws-sdk-cpp"
_TICK_MS = 1_000 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Found:
    """What commits took. ``busy_ms`` is time of a processor for each commit, by who took it."""

    per_second: float
    busy_ms: Mapping[str, float]
    n_requests: Mapping[str, float]

    @property
    def all_busy_ms(self) -> float:
        """What a commit takes of processors without the storage, which is the same for all catalogs."""
        return sum(self.busy_ms.values()) - self.busy_ms["storage"] - self.busy_ms["delay"]


class Requests:
    """How many requests a process that delays them has passed on so far, by who sent them."""

    roles = ("clients", "servers")

    def __init__(self) -> None:
        self._counted = mmap.mmap(-1, 16)

    def add(self, data: bytes) -> None:
        """Count a request by its first bytes. The clients' library names itself, that of a server has another name."""
        numbers = list(self.numbers)
        numbers[0 if _OF_CLIENTS in data else 1] += 1
        self._counted[:] = struct.pack("<2q", *numbers)

    @property
    def numbers(self) -> tuple[int, int]:
        """The numbers of requests of clients, and of servers."""
        of_clients, of_servers = struct.unpack("<2q", self._counted[:])
        return of_clients, of_servers


@dataclass(frozen=True)
class Slow:
    """The delayed bucket, by how much, the process that delays, and what that counts."""

    server: S3Server
    seconds: float
    pid: int
    requests: Requests

    def n_each(self, *, appends: bool) -> int:
        """How many commits each client makes: some seconds of them."""
        return (12 if appends else 40) if self.seconds < SLOW_SECONDS else (4 if appends else 12)


def busy_ticks(clients: frozenset[int], delay: int) -> Counter[str]:
    """Return how long the processes that this one has started were on a processor, by what they are."""
    parents, found = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            fields = rest.split()
            parents[int(folder.name)] = int(fields[1])
            found[int(folder.name)] = (name, int(fields[11]) + int(fields[12]))
    busy: Counter[str] = Counter({"clients": 0, "servers": 0, "database": 0, "storage": 0, "delay": 0})
    for pid, (name, ticks) in found.items():
        above = pid
        while above not in (0, 1, os.getpid()):
            above = parents.get(above, 0)
        if above != os.getpid() or pid == above:
            continue
        role = "clients" if pid in clients else "delay" if pid == delay else "servers"
        busy["storage" if name in _STORAGE else "database" if name == _DATABASE else role] += ticks
    return busy


async def _pass_on(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, target: int, seconds: float, requests: Requests
) -> None:
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
                requests.add(data)
                await asyncio.sleep(seconds)
            to_server.write(data)
            await to_server.drain()
    except ConnectionError:
        pass  # a client may end in mid-connection
    finally:
        to_server.close()
        answering.cancel()


@contextlib.contextmanager
def delayed(server: S3Server, seconds: float) -> Iterator[Slow]:
    """Serve a bucket at another port, each request of which waits; yields that."""
    own, port, requests = free_port(), int(server.endpoint.rpartition(":")[2]), Requests()

    def serve(report: Callable[[str], None]) -> None:
        async def run() -> None:
            passing = await asyncio.start_server(
                lambda r, w: _pass_on(r, w, port, seconds, requests), "127.0.0.1", own, backlog=1_000
            )
            report("ready")
            await passing.serve_forever()

        asyncio.run(run())

    child = fork(serve, time_limit_seconds=_LIMIT_SECONDS)
    child.next_report()
    try:
        yield Slow(S3Server(server.kind, f"http://127.0.0.1:{own}", server.folder), seconds, child.pid, requests)
    finally:
        os.kill(child.pid, 15)
        child.finish()


def client(opened: Callable[[], Catalog], number: int, n_each: int, *, appends: bool) -> Child:
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
        for mark in range(n_each):
            if appends:
                own.append(rows)
            else:
                with own.transaction() as change:
                    change.set_properties(mark=str(mark))
        report("done")

    begin = _begin
    return fork(work, time_limit_seconds=_LIMIT_SECONDS)


_begin = Path(tempfile.mkdtemp()) / "begin"


def commits(openers: Sequence[Callable[[], Catalog]], slow: Slow, *, appends: bool) -> Found:
    """Return what commits of all clients took, from their common beginning to the end of the last."""
    _begin.unlink(missing_ok=True)
    n_each = slow.n_each(appends=appends)
    children = [client(openers[number % len(openers)], number, n_each, appends=appends) for number in range(N_CLIENTS)]
    pids = frozenset(child.pid for child in children)
    for child in children:
        if child.next_report() != "ready":
            raise RuntimeError("a client ended early")
    busy, asked, begun_s = busy_ticks(pids, slow.pid), slow.requests.numbers, time.perf_counter()
    _begin.touch()
    for child in children:
        if child.next_report() != "done":
            raise RuntimeError("a client failed")
    seconds, n_commits = time.perf_counter() - begun_s, N_CLIENTS * n_each
    ticks, n_asked = busy_ticks(pids, slow.pid), slow.requests.numbers
    ticks.subtract(busy)
    for child in children:
        child.finish()
    return Found(
        n_commits / seconds,
        {role: number * _TICK_MS / n_commits for role, number in ticks.items()},
        {role: (now - before) / n_commits for role, now, before in zip(Requests.roles, n_asked, asked, strict=True)},
    )


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


def by_postgres(slow: Slow, files: dict[str, str]) -> list[Found]:
    """Return what commits by pyiceberg's own catalog took: of properties, and of appends."""
    database = Postgres(free_port(), "iceberg", "iceberg", "iceberg")
    uri = f"postgresql+psycopg2://iceberg:iceberg@127.0.0.1:{database.port}/iceberg"

    def sql() -> Catalog:
        return SqlCatalog("sql", uri=uri, warehouse=f"s3://{slow.server.bucket}/sql", **files)

    with (
        tempfile.TemporaryDirectory() as folder,
        postgres(database, ["postgres", "-p", str(database.port)], Path(folder) / "log"),
    ):
        fork(lambda _: sql().create_namespace("ns")).finish()
        return [commits([sql], slow, appends=one) for one in (False, True)]


def by_servers(slow: Slow, files: dict[str, str], number: int, client_name: str) -> list[Found]:
    """Return what commits by so many servers took, whose storage has the client named: properties, and appends."""
    os.environ[OPTIONS_VARIABLE] = f"addressing_style=path,client={client_name}"
    root = slow.server.fresh_root()
    fork(lambda _: _with_namespace(root)).finish()
    with servers(root, number) as urls:
        openers = [
            lambda url=url: RestCatalog("rest", uri=url, warehouse="main", **files)  # type: ignore[misc]
            for url in urls
        ]
        return [commits(openers, slow, appends=one) for one in (False, True)]


def measured(server: S3Server, seconds: float, client_names: Sequence[str]) -> dict[str, list[Found]]:
    """Return what commits took by each catalog: of properties, and of appends. Each request takes so much longer."""
    with delayed(server, seconds) as slow:
        os.environ.update(slow.server.environment)
        os.environ["AWS_REQUEST_CHECKSUM_CALCULATION"] = "when_required"
        files = {
            "s3.endpoint": slow.server.endpoint,
            "s3.access-key-id": slow.server.access_key_id,
            "s3.secret-access-key": slow.server.secret_access_key,
            "s3.region": slow.server.region,
        }
        found = {PEER: by_postgres(slow, files)}
        for client_name, number in itertools.product(client_names, (1, N_REPLICAS)):
            name = "one server" if number == 1 else f"{number} replicas"
            found[f"{name}, {client_name}"] = by_servers(slow, files, number, client_name)
        return found


def shown(found: Mapping[str, list[Found]], at: int) -> list[str]:
    """Return the lines of a table: of commits of properties, or of appends."""
    base = found[PEER][at]
    rows = []
    for name, values in found.items():
        one = values[at]
        cells = [f"{one.per_second:.1f}", f"{one.per_second / base.per_second:.2f}"]
        cells += [f"{one.busy_ms[role]:.0f}" for role in ("clients", "servers", "database", "storage", "delay")]
        cells += [f"{base.all_busy_ms / one.all_busy_ms:.2f}", f"{base.all_busy_ms / one.busy_ms['clients']:.2f}"]
        rows.append([name, *cells, *(f"{one.n_requests[role]:.1f}" for role in ("clients", "servers"))])
    header = (
        "catalog", "commits / s", "ratio", "clients, ms", "servers", "database", "storage", "delay", "ratio of ms",
        "if the server took none", "requests of clients", "of servers",
    )  # fmt: skip
    return table(header, rows)


def main() -> None:
    """Measure, and write the result, whatever the ratio is."""
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    with running("radosgw") as server:
        found = measured(server, REQUEST_SECONDS, ("s3fs", "obstore"))
        far = measured(server, SLOW_SECONDS, ("obstore",))
    write_result(
        "replicas",
        [
            "# Commits of many clients",
            "",
            f"{N_CLIENTS} clients of pyiceberg, each a process with a table of its own, commit for some seconds on one",
            "radosgw. The servers' storage has the client named. All of them, the storage too, share",
            f"{os.cpu_count()} processor threads, whose load was {load:.1f} at first.",
            "",
            "Milliseconds are time of a processor for each commit, by who took it. Their ratio leaves the storage and",
            "what delays it out. The next column says what it would be by a server that takes no time at all.",
            *_section(found, REQUEST_SECONDS),
            *_section(far, SLOW_SECONDS),
            "",
            "Where a request takes so long, processors rest most of the time. So rounds decide there, as they do on a",
            "machine with more of them.",
        ],
    )


def _section(found: Mapping[str, list[Found]], seconds: float) -> list[str]:
    delay = f"with {1_000 * seconds:.0f} ms more a request"
    return [
        "",
        f"## Properties, {delay}",
        "",
        *shown(found, 0),
        "",
        f"## Appends, {delay}",
        "",
        *shown(found, 1),
    ]


def _with_namespace(root: str) -> None:
    with Lakehouse.create(root).transaction() as change:
        change.create_namespace("ns")


if __name__ == "__main__":
    main()
