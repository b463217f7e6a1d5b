"""The engine on S3: requests and rounds, times beside local disk, and its overhead over the bare client.

Run from the project's root: ``.venv/bin/python -m benchmarks.s3``; it starts a radosgw of its own (the packages of
``deploy/debian-packages.txt``) and writes ``benchmarks/results/s3.md``. Requests and rounds depend on no machine;
times are only worth as ratios within the run. For the overhead every piece of work runs once in the engine and once
as the same requests, with the same bytes and in the same rounds, sent through the same client library alone; the two
take turns. A third turn sends these requests and then opens and decodes with pyarrow alone the node files that were
read, as any reader has to.
"""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import fsspec.asyn
import obstore
import pyarrow as pa
import s3fs
from obstore.store import S3Store

from benchmarks.lakes import filled, name
from benchmarks.report import Spread, seconds, table, write_result
from tests.servers.keeper import ENDPOINT, start
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.storage import FileInfo, MeteredStorage, RequestCounts, Storage, StorageWrapper, open_storage
from trinitylake_ops.storage.parallel import Round, current_round

N_TABLES = 10_000
N_TURNS = 60

Work = Callable[[Lakehouse], object]


@dataclass(frozen=True)
class Request:
    """One request of the engine, as it is replayed."""

    kind: str
    path: str
    data: bytes = b""
    offset: int = 0
    length: int | None = None


class Recorder(StorageWrapper):
    """Notes every request and which ones were in flight together."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.requests: list[tuple[Round | None, Request]] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.requests.append((current_round(), Request("read", path, b"", offset, length)))
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self.requests.append((current_round(), Request("stat", path)))
        return self.inner.stat(path)

    def create(self, path: str, data: bytes) -> None:
        self.requests.append((current_round(), Request("create", path, data)))
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self.requests.append((current_round(), Request("write", path, data)))
        self.inner.write(path, data)

    def rounds(self) -> list[list[Request]]:
        """Return the requests so far by round, in order, and forget them."""
        found: list[list[Request]] = []
        for _, group in itertools.groupby(self.requests, key=lambda entry: entry[0] or object()):
            found.append([request for _, request in group])
        self.requests = []
        return found


class BareClient(Protocol):
    """A client library alone: no typed errors, no retries, no interface."""

    def send(self, request: Request) -> bytes | None:
        """Send a request; returns what it read."""


class BareS3fs:
    """s3fs by its own calls."""

    def __init__(self, server: S3Server, prefix: str):
        self._bucket, self._prefix = server.bucket, prefix
        self._file_system = s3fs.S3FileSystem(
            key=server.access_key_id,
            secret=server.secret_access_key,
            endpoint_url=server.endpoint,
            client_kwargs={"region_name": server.region},
            config_kwargs={
                "retries": {"total_max_attempts": 1},
                "max_pool_connections": 64,
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
            },
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self._file_system.retries = 1
        self._file_system.connect()

    def send(self, request: Request) -> bytes | None:
        found: bytes | None = fsspec.asyn.sync(self._file_system.loop, self._send, request)
        return found

    async def _send(self, request: Request) -> bytes | None:
        call: Callable[..., Any] = self._file_system._call_s3
        where = {"Bucket": self._bucket, "Key": self._prefix + request.path}
        try:
            if request.kind == "read":
                answer = await call("get_object", **where, **_byte_range(request))
                async with answer["Body"] as body:
                    return bytes(await body.read())
            elif request.kind == "stat":
                await call("head_object", **where)
            elif request.kind == "create":
                await call("put_object", **where, Body=request.data, IfNoneMatch="*")
            else:
                await call("put_object", **where, Body=request.data)
        except FileNotFoundError:
            pass  # as for the engine: the next version is not there yet
        return None


class BareObstore:
    """obstore by its own calls."""

    def __init__(self, server: S3Server, prefix: str):
        self._prefix = prefix
        self._store = S3Store(
            server.bucket,
            endpoint=server.endpoint,
            access_key_id=server.access_key_id,
            secret_access_key=server.secret_access_key,
            region=server.region,
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def send(self, request: Request) -> bytes | None:
        key = self._prefix + request.path
        try:
            if request.kind == "read" and request.length is None:
                return bytes(obstore.get(self._store, key).bytes())
            if request.kind == "read":
                return bytes(obstore.get_range(self._store, key, start=request.offset, length=request.length))
            if request.kind == "stat":
                obstore.head(self._store, key)
            else:
                mode = "create" if request.kind == "create" else "overwrite"
                obstore.put(self._store, key, request.data, mode=mode, use_multipart=False)
        except FileNotFoundError:
            pass
        return None


def _byte_range(request: Request) -> dict[str, str]:
    if request.length is None:
        return {}
    return {"Range": f"bytes={request.offset}-{request.offset + request.length - 1}"}


def replay(
    client: BareClient, rounds: Sequence[Sequence[Request]], pool: ThreadPoolExecutor, turn: str, *, decodes: bool
) -> None:
    """Send recorded requests; what was created gets a name of its own."""
    for together in rounds:
        own = [_renamed(request, turn) for request in together]
        answers = [client.send(own[0])] if len(own) == 1 else list(pool.map(client.send, own))
        for request, answer in zip(own, answers, strict=True):
            if decodes and answer is not None and request.path.endswith(".arrow"):
                pa.ipc.open_file(answer).read_all().to_pydict()


def _renamed(request: Request, turn: str) -> Request:
    if request.kind in ("create", "write"):
        return Request(request.kind, f"{request.path}-replayed-{turn}", request.data)
    return request


@contextmanager
def radosgw() -> Iterator[S3Server]:
    """Start a server and stop it."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        daemons = start("radosgw", Path(folder))
        try:
            endpoint, data = (Path(folder) / ENDPOINT).read_text().split("\n")
            yield S3Server("radosgw", endpoint, Path(data))
        finally:
            daemons.stop()


def change_one(lake: Lakehouse) -> None:
    """Commit a change of one random table."""
    with lake.transaction() as txn:
        table = name(random.randrange(N_TABLES))
        txn.alter_table("ns", table, TableDef(properties={"stamp": str(random.random())}))


#: What is measured: the work, and whether it begins with empty caches each time.
WORKS: Mapping[str, tuple[Work, bool]] = {
    "begin, warm": (lambda lake: lake.snapshot().definition, False),
    "begin, change a table and commit, warm": (change_one, False),
    "look up a table, cold": (lambda lake: lake.snapshot().table("ns", name(42)), True),
    "list 10,000 tables, cold": (lambda lake: lake.snapshot().tables("ns"), True),
}


@dataclass(frozen=True)
class Figures:
    """Of one piece of work on one storage: what it asks, and seconds; without a bare client only the engine's."""

    counts: RequestCounts
    engine: Spread
    bare: Spread | None = None
    decoding: Spread | None = None


def measure(storage: Storage, work: Work, *, is_cold: bool, bare: BareClient | None) -> Figures:
    """Run a piece of work by turns in the engine and through the bare client."""
    meter = MeteredStorage(storage)
    counted = Lakehouse(meter)
    if not is_cold:
        work(counted)
    with meter.measure() as measurement:
        work(counted)
    recorder = Recorder(storage)
    warm = Lakehouse(recorder)
    warm.snapshot().tables("ns")
    engine, replayed, decoding = [], [], []
    with ThreadPoolExecutor(storage.concurrency) as pool:
        for turn in range(N_TURNS):
            recorder.requests = []
            lake = Lakehouse(recorder) if is_cold else warm
            engine.append(seconds(lambda lake=lake: work(lake)))  # type: ignore[misc]
            if bare is not None:
                rounds = recorder.rounds()
                for times, decodes in ((replayed, False), (decoding, True)):
                    name = f"{turn}-{decodes}"
                    work_again = functools.partial(replay, bare, rounds, pool, name, decodes=decodes)
                    times.append(seconds(work_again))
    return Figures(measurement.counts, *(Spread.of(times) for times in (engine, replayed, decoding) if times))


def main() -> None:
    """Measure, print and write the results."""
    results: dict[str, dict[str, Figures]] = {}
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder, radosgw() as server:
        for name, options in (
            ("local", {}),
            ("s3fs", server.storage_options),
            ("obstore", {**server.storage_options, "client": "obstore"}),
        ):
            prefix = f"{uuid.uuid4().hex}/"
            root = f"file://{folder}/lake/" if name == "local" else f"s3://{server.bucket}/{prefix}"
            storage = open_storage(root, options)
            filled(storage, N_TABLES)
            bare: BareClient | None = None
            if name != "local":
                bare = BareS3fs(server, prefix) if name == "s3fs" else BareObstore(server, prefix)
            results[name] = {
                work: measure(storage, call, is_cold=is_cold, bare=bare) for work, (call, is_cold) in WORKS.items()
            }
            print(name, "done", flush=True)
    write_result("s3", report(results))


def report(results: Mapping[str, Mapping[str, Figures]]) -> list[str]:
    """Return both tables as lines of Markdown."""
    names = list(results)
    asked, overhead = [], []
    for work in WORKS:
        counts = [figures[work].counts for figures in results.values()]
        medians = [f"{1000 * figures[work].engine.median:.1f}" for figures in results.values()]
        asked.append([work, *(f"{count.total} ({count.rounds})" for count in counts), *medians])
        for storage, figures in results.items():
            found = figures[work]
            if found.bare is not None and found.decoding is not None:
                spreads = (found.engine, found.bare, found.decoding)
                cells = [cell for spread in spreads for cell in spread.cells(1000, 1)]
                ratios = (spread.median / found.bare.median for spread in (found.engine, found.decoding))
                overhead.append([work, storage, *cells, *(f"{ratio:.2f}" for ratio in ratios)])
    return [
        "# The engine on S3",
        "",
        f"Made by `benchmarks/s3.py`: {N_TABLES:,} tables, default settings, {N_TURNS} turns; S3 is a radosgw on"
        " loopback, which shares the processors with its client; local disk syncs.",
        "",
        *table(["work", *(f"{name}: requests (rounds)" for name in names), *(f"{name}: ms" for name in names)], asked),
        "",
        "The engine beside the same requests sent through the client library alone, in one run, by turns, in"
        " milliseconds; and beside these requests with node files decoded by pyarrow alone. Ratios are of medians.",
        "",
        *table(
            [
                "work",
                "client",
                *("engine: median", "mean", "p99"),
                *("bare client: median", "mean", "p99"),
                *("and pyarrow: median", "mean", "p99"),
                "engine / bare",
                "and pyarrow / bare",
            ],
            overhead,
        ),
    ]


if __name__ == "__main__":
    main()
