"""The run: all measurements, in turns of the worker processes."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.peers.peer import Location, PeerInfo, TimedCall, WriteTotals
from benchmarks.peers.wire import WireCall, slow, wire_call
from benchmarks.peers.workers import AbsentPeerError, Worker, WorkerError
from tests.proxy import FaultyProxy
from tests.servers.s3_server import S3Server

OURS, OURS_SYNCED = "ours", "ours, synced"
BY_CATALOG, BY_CATALOG_SYNCED = "our pyiceberg catalog", "our pyiceberg catalog, synced"
SQLITE, SQLITE_SYNCED = "pyiceberg + SQLite", "pyiceberg + SQLite, synced"
OURS_S3FS, OURS_OBSTORE = "ours, s3fs", "ours, obstore"
_ENGINES = "benchmarks.peers.engines."
PEERS: Mapping[str, str] = {
    OURS: f"{_ENGINES}ours:Ours",
    OURS_SYNCED: f"{_ENGINES}ours:OursSynced",
    "icechunk": f"{_ENGINES}icechunk:Icechunk",
    "delta": f"{_ENGINES}delta:Delta",
    "Lance, update": f"{_ENGINES}lance:LanceUpdate",
    "Lance, append": f"{_ENGINES}lance:LanceAppend",
    "slatedb": f"{_ENGINES}slatedb:Slatedb",
    SQLITE: f"{_ENGINES}iceberg:SqlCatalogUnsynced",
    SQLITE_SYNCED: f"{_ENGINES}iceberg:SqlCatalogSynced",
    "DuckLake, rows": f"{_ENGINES}ducklake:DuckLakeRows",
    "DuckLake, tables": f"{_ENGINES}ducklake:DuckLakeTables",
    BY_CATALOG: f"{_ENGINES}ours:OursByCatalog",
    BY_CATALOG_SYNCED: f"{_ENGINES}ours:OursByCatalogSynced",
}
#: On S3, syncs do not apply, so these represent both variants.
ON_S3: Mapping[str, str] = {
    OURS_S3FS: PEERS[OURS],
    OURS_OBSTORE: f"{_ENGINES}ours:OursByObstore",
    **{name: PEERS[name] for name in ("icechunk", "delta", "Lance, update", "Lance, append", "slatedb", SQLITE)},
}
#: The metrics on S3.
S3_METRICS: Mapping[str, str] = {"commit": "a commit", "lookup": "a cold lookup", "list": "a cold list"}
#: On S3, a writer changes one of this many objects, all of which it has changed before.
_N_CHANGED_ON_S3 = 4


@dataclass(frozen=True)
class Options:
    """Extent of a run. Peers that exceed ``metric_seconds`` take fewer turns, but at least three."""

    sizes: Sequence[int] = (10_000, 100_000)
    versions: int = 1_000
    turns: int = 40
    list_turns: int = 7
    s3_turns: int = 20
    metric_seconds: float = 8.0
    versions_seconds: float = 60.0
    writing_seconds: float = 4.0
    threads: int = 16
    processes: int = 4
    s3_objects: int = 1_000


QUICK = Options((60, 120), 8, 3, 3, 3, 2.0, 5.0, 0.2, 3, 2, 60)


@dataclass
class Measured:
    """Measurements of a run by metric, number of objects and peer, and the reasons why others are missing."""

    options: Options
    load_average: float = field(default_factory=lambda: os.getloadavg()[0])
    peer_infos: dict[str, PeerInfo] = field(default_factory=dict)
    seconds: dict[tuple[str, int, str], list[float]] = field(default_factory=dict)
    skip_reasons: dict[tuple[str, int, str], str] = field(default_factory=dict)
    versions: dict[str, int] = field(default_factory=dict)
    files: dict[str, int] = field(default_factory=dict)
    written: dict[tuple[str, str], WriteTotals] = field(default_factory=dict)
    #: The S3 calls by metric and peer.
    s3_calls: dict[tuple[str, str], list[WireCall]] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The size at which metrics that do not depend on it are measured."""
        return self.options.sizes[0]


class Run:
    """A run in a folder, with its workers."""

    def __init__(self, folder: Path, options: Options, only: Collection[str] = ()):
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._options = folder, options
        self._local, self._on_s3 = (
            {peer: peer_class for peer, peer_class in peers.items() if not only or peer in only}
            for peers in (PEERS, ON_S3)
        )
        self.measured = Measured(options)
        self._started_s = time.monotonic()

    def local(self) -> None:
        """Measure everything on local disk."""
        for n_objects in self._options.sizes:
            with ExitStack() as stack:
                workers = dict(self._start_workers(self._local, n_objects, stack))
                self._metrics(workers, n_objects)
                if n_objects == self.measured.first:
                    self._versions(workers)
                    self._writers(workers)

    def _print_progress(self, message: str) -> None:
        print(f"{time.monotonic() - self._started_s:6.0f} s  {message}", flush=True)

    def _location(self, peer: str, n_objects: int) -> Location:
        return Location(self._folder / f"{'-'.join(peer.replace(',', '').split())}-{n_objects}")

    def _log(self, peer: str) -> Path:
        return self._folder / f"{peer}.log"

    def _start_workers(
        self,
        peers: Mapping[str, str],
        n_objects: int,
        stack: ExitStack,
        location_of: Callable[[str, int], Location] | None = None,
    ) -> Iterator[tuple[str, Worker]]:
        """Start a worker for each peer and load its objects."""
        metric = "s3" if location_of else "load"
        for peer, peer_class in peers.items():
            try:
                worker = stack.enter_context(Worker(peer_class, self._log(peer)))
            except AbsentPeerError as error:
                self.measured.skip_reasons[metric, n_objects, peer] = str(error)
                continue
            info = self.measured.peer_infos[peer] = worker.info
            if info.max_objects is not None and n_objects > max(info.max_objects, self.measured.first):
                self.measured.skip_reasons[metric, n_objects, peer] = (
                    f"measured with {self.measured.first:,} objects only"
                )
                continue
            location = (location_of or self._location)(peer, n_objects)
            load = functools.partial(self._load, worker, peer, location, n_objects)
            if not self._try(metric, n_objects, peer, load):
                continue
            yield peer, worker

    def _load(self, worker: Worker, peer: str, location: Location, n_objects: int) -> None:
        if not location.endpoint:
            worker.call("warm_up", Location(location.folder / "warm-up"))
        timed = worker.call("load", location, n_objects)
        if not location.endpoint and "load" not in worker.info.unsupported:
            self.measured.seconds["load", n_objects, peer] = [timed.seconds]
        self._print_progress(
            f"{peer}: {n_objects:,} objects {'on S3 ' if location.endpoint else ''}in {timed.seconds:.1f} s"
        )

    def _try(self, metric: str, n_objects: int, peer: str, work: Callable[[], None]) -> bool:
        """Run work and record a failure in the results. Raises WorkerError if our own engine fails."""
        try:
            work()
        except WorkerError as error:
            if peer.startswith("ours"):
                raise
            self.measured.skip_reasons[metric, n_objects, peer] = f"failed: {error}"
            self._print_progress(f"{peer}: {metric} failed, see {self._log(peer)}: {error}")
            return False
        return True

    def _supporting(self, workers: Mapping[str, Worker], metric: str, n_objects: int) -> dict[str, Worker]:
        for peer, worker in workers.items():
            if metric in worker.info.unsupported:
                self.measured.skip_reasons[metric, n_objects, peer] = worker.info.unsupported[metric]
        return {peer: worker for peer, worker in workers.items() if metric not in worker.info.unsupported}

    def _metrics(self, workers: Mapping[str, Worker], n_objects: int) -> None:
        options = self._options
        for metric, n_turns in (("commit", options.turns), ("lookup", options.turns), ("list", options.list_turns)):
            self._by_turns(self._supporting(workers, metric, n_objects), metric, n_objects, n_turns)
            self._print_progress(f"{metric} among {n_objects:,} objects")

    def _by_turns(self, workers: Mapping[str, Worker], metric: str, n_objects: int, n_turns: int) -> None:
        """Call each worker in turns, in alternating order. The first turn is a warm-up."""
        remaining = dict(workers)
        for turn in range(n_turns + 1):
            for peer in list(remaining) if turn % 2 else list(remaining)[::-1]:
                times = self.measured.seconds.setdefault((metric, n_objects, peer), [])
                if len(times) >= 3 and sum(times) > self._options.metric_seconds:
                    continue

                def work(peer: str = peer, times: list[float] = times, turn: int = turn) -> None:
                    timed: TimedCall = remaining[peer].call(metric)
                    if turn:
                        times.append(timed.seconds)

                if not self._try(metric, n_objects, peer, work):
                    del remaining[peer], self.measured.seconds[metric, n_objects, peer]

    def _versions(self, workers: Mapping[str, Worker]) -> None:
        """Create versions, open one in the middle in turns, and reclaim all except the latest."""
        n_objects, options = self.measured.first, self._options
        supporting = self._supporting(workers, "old_version", n_objects)
        self._supporting(workers, "expire", n_objects)
        for peer, worker in supporting.items():
            self.measured.versions[peer] = worker.call("commits", options.versions, options.versions_seconds)
            self._print_progress(f"{peer}: {self.measured.versions[peer]:,} versions")
        self._by_turns(supporting, "old_version", n_objects, options.turns)

        def expire(peer: str) -> None:
            timed = supporting[peer].call("expire")
            self.measured.seconds["expire", n_objects, peer] = [timed.seconds]
            self.measured.files[peer] = timed.value
            self._print_progress(f"{peer}: {timed.value:,} files reclaimed in {timed.seconds:.2f} s")

        for peer in supporting:
            self._try("expire", n_objects, peer, functools.partial(expire, peer))

    def _writers(self, workers: Mapping[str, Worker]) -> None:
        n_objects, options = self.measured.first, self._options
        for peer, worker in self._supporting(workers, "threads", n_objects).items():

            def threads(peer: str = peer, worker: Worker = worker) -> None:
                written = worker.call("write", options.threads, options.writing_seconds, 0, options.threads)
                self.measured.written["threads", peer] = written

            self._try("threads", n_objects, peer, threads)
        for peer in self._supporting(workers, "processes", n_objects):

            def processes(peer: str = peer) -> None:
                self.measured.written["processes", peer] = self._processes(peer)

            self._try("processes", n_objects, peer, processes)
        self._print_progress("many writers")

    def _processes(self, peer: str) -> WriteTotals:
        n_objects, n_processes = self.measured.first, self._options.processes
        with ExitStack() as stack:
            workers = [stack.enter_context(Worker(PEERS[peer], self._log(peer))) for _ in range(n_processes)]
            for worker in workers:
                worker.call("attach", self._location(peer, n_objects), n_objects)
            for number, worker in enumerate(workers):
                worker.begin("write", 1, self._options.writing_seconds, number, n_processes)
            return combined([worker.result() for worker in workers])

    def on_s3(self, server: S3Server) -> None:
        """Measure on S3: load directly, then measure through a proxy that delays each request by 20 ms and logs it."""
        n_objects = self._options.s3_objects
        with FaultyProxy(server.endpoint) as proxy, ExitStack() as stack:

            def location_of(peer: str, _: int, endpoint: str = server.endpoint) -> Location:
                return Location(self._folder / _mark(peer), endpoint, _mark(peer))

            with ExitStack() as loading:
                loaded = [peer for peer, _ in self._start_workers(self._on_s3, n_objects, loading, location_of)]
            workers = {}
            for peer in loaded:
                workers[peer] = stack.enter_context(Worker(ON_S3[peer], self._log(peer)))
                location = location_of(peer, n_objects, proxy.url)
                workers[peer].call("attach", location, min(_N_CHANGED_ON_S3, n_objects))
                workers[peer].call("commits", 4 * _N_CHANGED_ON_S3, 60)
            for metric in S3_METRICS:
                self._measure_s3(proxy, metric, self._supporting(workers, metric, n_objects))
            for peer, reason in ((peer, info.unsupported.get("s3")) for peer, info in self.measured.peer_infos.items()):
                if reason:
                    self.measured.skip_reasons["s3", n_objects, peer] = reason

    def _measure_s3(self, proxy: FaultyProxy, metric: str, workers: Mapping[str, Worker]) -> None:
        """Call each worker in turns. The first turn, which loads code, is not counted."""
        for turn in range(self._options.s3_turns + 1):
            for peer in list(workers) if turn % 2 else list(workers)[::-1]:
                proxy.begin(slow())
                timed = workers[peer].call(metric)
                time.sleep(0.1)  # for background requests of a commit
                if turn:
                    self.measured.s3_calls.setdefault((metric, peer), []).append(wire_call(proxy, timed, _mark(peer)))
        self._print_progress(f"{metric} on S3")


def _mark(peer: str) -> str:
    """Return a text that is only in the targets of the requests of this peer."""
    return f"on-s3-{list(ON_S3).index(peer)}-end"


def combined(totals: Sequence[WriteTotals]) -> WriteTotals:
    """Return the totals of the writers of several processes."""
    return WriteTotals(
        sum(process_totals.commits for process_totals in totals),
        sum(process_totals.conflicts for process_totals in totals),
        max(process_totals.seconds for process_totals in totals),
    )
