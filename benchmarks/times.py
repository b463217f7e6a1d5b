"""Times of the engine's work as ratios within one run, and with a storage that takes 20 ms a request.

Run from the project's root: ``.venv/bin/python -m benchmarks.times``; it writes ``benchmarks/results/times.md``. Every
figure is a median of turns, taken in alternation with what it is compared with.
"""

from __future__ import annotations

import gc
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa

from benchmarks.lakes import MadeUpDefinitions, loaded, name
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.format.keys import KeyCodec
from trinitylake_ops.storage import LocalStorage, MemoryStorage, Storage, StorageWrapper, drop_memory_root
from trinitylake_ops.tree.bulk_load import bulk_load, n_filled_keys
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.walk import walk

RESULTS = Path(__file__).parent / "results" / "times.md"
N_LISTED = 50_000
N_LOADED = 1_000_000
REQUEST_SECONDS = 0.020
_SCHEMA = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])


class SlowStorage(StorageWrapper):
    """Every request takes 20 ms more; 32 are sent at once, as to a server."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.concurrency = 32

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        time.sleep(REQUEST_SECONDS)
        return self.inner.read(path, offset=offset, length=length)

    def create(self, path: str, data: bytes) -> None:
        time.sleep(REQUEST_SECONDS)
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        time.sleep(REQUEST_SECONDS)
        self.inner.write(path, data)


class Recorder(StorageWrapper):
    """Notes the files that are read and written."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.read_paths: list[str] = []
        self.written: list[tuple[str, bytes]] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None) -> bytes:
        self.read_paths.append(path)
        return self.inner.read(path, offset=offset, length=length)

    def create(self, path: str, data: bytes) -> None:
        self.written.append((path, data))
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self.written.append((path, data))
        self.inner.write(path, data)


def change_one(lake: Lakehouse, n_tables: int) -> None:
    """Change a random table and commit."""
    with lake.transaction() as txn:
        txn.alter_table("ns", name(random.randrange(n_tables)), TableDef(properties={"stamp": str(random.random())}))


def bare_commit(folder: Path, recorder: Recorder, turn: int) -> float:
    """Do what a commit needs at least; returns the seconds of it.

    Reads its files, encodes the nodes it writes from Python strings with pyarrow, and writes, links and unlinks.
    """
    paths = [folder / path for path in recorder.read_paths if os.path.exists(folder / path)]
    bodies: list[bytes | list[list[str]]] = []
    for path, data in recorder.written:
        is_node = path.endswith(".arrow")
        bodies.append(list(pa.ipc.open_file(data).read_all().to_pydict().values()) if is_node else data)

    def work() -> None:
        for path in paths:
            path.read_bytes()
        for number, body in enumerate(bodies):
            target = folder / f"bare-{turn}-{number}"
            create(target, body if isinstance(body, bytes) else encoded(*body))

    return seconds(work)


def create(target: Path, data: bytes) -> None:
    """Create a file as local storage does: whole, and only if absent."""
    temporary = target.with_suffix(".tmp")
    temporary.write_bytes(data)
    os.link(temporary, target)
    os.unlink(temporary)


def encoded(key: list[str], pvalue: list[str], pnode: list[str]) -> bytes:
    """Encode rows as an Arrow file."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_batch(pa.record_batch([pa.array(column, pa.utf8()) for column in (key, pvalue, pnode)], _SCHEMA))
    return bytes(sink.getvalue())


def commit_times(folder: Path) -> list[str]:
    """Compare single-table commits at 100 and 50,000 tables on local disk without fsync, and the bare operations."""
    lakes = {}
    for n_tables in (100, N_LISTED):
        storage = MadeUpDefinitions(LocalStorage(f"file://{folder}/{n_tables}/", fsync=False))
        loaded(storage, n_tables)
        recorder = Recorder(storage)
        lakes[n_tables] = (Lakehouse(recorder, cache="private"), recorder)
    times: dict[str, list[float]] = {}
    for turn in range(400):
        for n_tables, (lake, recorder) in lakes.items():
            recorder.read_paths, recorder.written = [], []
            spent = seconds(lambda lake=lake, n_tables=n_tables: change_one(lake, n_tables))  # type: ignore[misc]
            times.setdefault(f"commit at {n_tables:,} tables", []).append(spent)
            bare = bare_commit(folder / str(n_tables), recorder, turn)
            times.setdefault(f"bare operations at {n_tables:,} tables", []).append(bare)
    rows = []
    for n_tables in lakes:
        engine, bare_times = times[f"commit at {n_tables:,} tables"], times[f"bare operations at {n_tables:,} tables"]
        small = times["commit at 100 tables"]
        cells = (
            *figures(engine),
            f"{1000 * statistics.median(bare_times):.2f}",
            f"{statistics.median(engine) / statistics.median(bare_times):.2f}",
            f"{statistics.median(engine) / statistics.median(small):.2f}",
        )
        rows.append(f"| {n_tables:,} | {' | '.join(cells)} |")
    return rows


def figures(values: list[float]) -> tuple[str, str, str]:
    """Return median, mean and p99 in milliseconds."""
    found = (statistics.median(values), statistics.mean(values), statistics.quantiles(values, n=100)[98])
    return (f"{1000 * found[0]:.2f}", f"{1000 * found[1]:.2f}", f"{1000 * found[2]:.2f}")


def list_cpu() -> tuple[float, float, float]:
    """Return CPU seconds of listing cold, of opening the same leaf files with pyarrow, and of making their strings."""
    storage = MadeUpDefinitions(MemoryStorage("memory://list-cpu/"))
    loaded(storage, N_LISTED)
    snapshot = Lakehouse(storage, cache="off").snapshot()
    nodes = list(walk(snapshot.files.nodes, snapshot.root, snapshot.location))
    leaves = [storage.read(node.location) for node in nodes if node.node.is_leaf]
    del nodes, snapshot
    listing, opening, strings = [], [], []
    for _ in range(15):
        gc.collect()
        listing.append(cpu_seconds(lambda: Lakehouse(storage, cache="off").snapshot().tables("ns")))
        opening.append(cpu_seconds(lambda: [pa.ipc.open_file(leaf).read_all() for leaf in leaves]))
        strings.append(cpu_seconds(lambda: [pa.ipc.open_file(leaf).read_all().to_pydict() for leaf in leaves]))
    drop_memory_root(storage.root)
    return statistics.median(listing), statistics.median(opening), statistics.median(strings)


def bulk_load_seconds(folder: Path) -> tuple[float, float, float]:
    """Return the seconds of a bulk load of 1,000,000 keys to local files, and of writing the same rows with pyarrow.

    The latter to files in folders of the same hashes as the nodes', and to one flat folder.
    """
    keys = KeyCodec(100, 100)
    limits = TreeLimits(LakehouseDef(id="").order, LakehouseDef(id="").node_file_max_size_bytes)
    entries = [
        (keys.table_key("ns", name(number)), f"0101/1100/0011/01010101-table-{name(number)}-ns-{number:032x}.binpb")
        for number in range(N_LOADED)
    ]
    storage = LocalStorage(f"file://{folder}/bulk/", fsync=False)
    loading = seconds(lambda: bulk_load(iter(entries), limits, created_at_ms=1, write=storage.create_many))

    def write_rows(folder: Path, in_hash_folders: bool) -> None:
        folder.mkdir()
        size = n_filled_keys(limits)
        for number in range(0, N_LOADED, size):
            rows = entries[number : number + size]
            data = encoded([key for key, _ in rows], [value for _, value in rows], [None] * len(rows))  # type: ignore[list-item]
            target = folder / (new_node_path() if in_hash_folders else f"{number:08}")
            target.parent.mkdir(parents=True, exist_ok=True)
            create(target, data)

    hashed = seconds(lambda: write_rows(folder / "hashed", in_hash_folders=True))
    return loading, hashed, seconds(lambda: write_rows(folder / "flat", in_hash_folders=False))


def slow_times() -> list[str]:
    """Return rows of times with 20 ms a request, and the rounds that they amount to."""
    rows = []
    for n_tables in (100, N_LISTED):
        storage = MadeUpDefinitions(MemoryStorage(f"memory://slow-{n_tables}/"))
        loaded(storage, n_tables)
        slow = SlowStorage(storage)
        works: dict[str, Callable[[], object]] = {
            "look a table up, cold": lambda slow=slow: Lakehouse(slow, cache="off").snapshot().table("ns", name(42)),  # type: ignore[misc]
            "list all tables, cold": lambda slow=slow: Lakehouse(slow, cache="off").snapshot().tables("ns"),  # type: ignore[misc]
        }
        lake = Lakehouse(slow, cache="private")
        lake.snapshot().tables("ns")
        works["begin, warm"] = lambda lake=lake: lake.snapshot().definition  # type: ignore[misc]
        works["begin, change a table and commit"] = lambda lake=lake, n=n_tables: change_one(lake, n)  # type: ignore[misc]
        for work, call in works.items():
            spent = [seconds(call) for _ in range(20)]
            rows.append(f"| {n_tables:,} | {work} | {' | '.join(figures(spent))} |")
        drop_memory_root(storage.root)
    return rows


def seconds(work: Callable[[], object]) -> float:
    """Return how long a call takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time a call takes in all threads."""
    begun = time.process_time()
    work()
    return time.process_time() - begun


def main() -> None:
    """Measure, print and write the results."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        commits = commit_times(Path(folder))
        slow = slow_times()
        listing, opening, strings = list_cpu()
        before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        loading, hashed, flat = bulk_load_seconds(Path(folder))
        peak_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    text = "\n".join(
        [
            "# Times, as ratios",
            "",
            "Made by `benchmarks/times.py`: default settings, one run, medians.",
            "",
            "Begin, change one random table and commit; warm, on local disk without fsync. The bare operations read the"
            " same files, encode the same rows with pyarrow from Python strings, and write, link and unlink as many"
            " files.",
            "",
            "| tables | median ms | mean | p99 | bare operations, ms | ratio | beside 100 tables |",
            "|---:|---:|---:|---:|---:|---:|---:|",
            *commits,
            "",
            f"With a storage that takes {1000 * REQUEST_SECONDS:.0f} ms for each request:",
            "",
            "| tables | work | median ms | mean | p99 |",
            "|---:|---|---:|---:|---:|",
            *slow,
            "",
            f"CPU of listing {N_LISTED:,} tables of a namespace, cold, in memory: {1000 * listing:.0f} ms;"
            f" {listing / strings:.2f} x that of decoding the same leaf files with pyarrow into Python strings"
            f" ({1000 * strings:.0f} ms), {listing / opening:.1f} x that of opening them alone"
            f" ({1000 * opening:.0f} ms).",
            "",
            f"Bulk load of {N_LOADED:,} keys to local files: {loading:.1f} s, {loading / hashed:.2f} x the time of"
            f" writing the same rows as Arrow files with pyarrow to folders of the same hashes ({hashed:.1f} s),"
            f" {loading / flat:.2f} x that of writing them to a flat folder ({flat:.1f} s); memory of the process grew"
            f" from {before_kb / 1000:,.0f} to {peak_kb / 1000:,.0f} MB, the list of the keys included.",
            "",
        ]
    )
    RESULTS.write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
