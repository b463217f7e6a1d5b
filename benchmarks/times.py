"""Measure the times of the engine's operations as ratios within one run, and on a storage with 20 ms per request.

Run from the project's root: ``.venv/bin/python -m benchmarks.times``. It writes ``benchmarks/results/times.md`` and
its plots. Operations that are compared with each other run in turns.
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from matplotlib.axes import Axes

from benchmarks.lakes import REQUEST_SECONDS, GeneratedDefinitions, SlowStorage, change_tables, create_loaded_lake, name
from benchmarks.report import Spread, cpu_seconds, plot, seconds, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import new_node_path, new_table_path
from trinitylake_ops.format.keys import KeyCodec
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.storage import LocalStorage, MemoryStorage, Storage, StorageWrapper, drop_memory_root
from trinitylake_ops.tree.bulk import bulk_load, n_filled_keys
from trinitylake_ops.tree.edit import apply_messages
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.shape import walk
from trinitylake_ops.tree.store import NodeStore

N_CHANGED = (100, 10_000, 100_000, 1_000_000)  # numbers of tables among which one is changed
N_SYNCED, N_SYNCED_TURNS = 10_000, 200
ADDED_MS = (0, 1, 5)  # additional milliseconds per wait for the device
N_LISTED = 50_000
N_LOADED = 1_000_000
N_LOADS = 3
N_SETTLING = 1_000  # commits until buffers are full
_SCHEMA = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])


class Recorder(StorageWrapper):
    """Records the files that are read and written."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.read_paths: list[str] = []
        self.written: list[tuple[str, bytes]] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.read_paths.append(path)
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def create(self, path: str, data: bytes) -> None:
        self.written.append((path, data))
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self.written.append((path, data))
        self.inner.write(path, data)


def bare_commit(folder: Path, recorder: Recorder, turn: int) -> float:
    """Perform the minimal work of a commit and return its seconds.

    This reads the files of the commit, encodes its nodes from Python strings with pyarrow, and writes, links and
    unlinks the same number of files.

    Args:
        folder: The root folder of the lakehouse.
        recorder: The recorded reads and writes of the commit.
        turn: A number for the names of new files.
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
    """Create a file as local storage does: atomically, and only if absent."""
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


def commit_times(folder: Path) -> dict[int, tuple[list[float], list[float]]]:
    """Return the seconds of single-table commits on local disk without fsync, and of the bare operations, in turns."""
    lakes = {}
    for n_tables in N_CHANGED:
        storage = GeneratedDefinitions(LocalStorage(f"file://{folder}/{n_tables}/", fsync=False))
        create_loaded_lake(storage, n_tables)
        recorder = Recorder(storage)
        lake = Lakehouse(recorder, cache="private")
        for _ in range(N_SETTLING):
            change_tables(lake, [random.randrange(n_tables)])
        lakes[n_tables] = (lake, recorder)
    times: dict[int, tuple[list[float], list[float]]] = {n_tables: ([], []) for n_tables in lakes}
    for turn in range(400):
        for n_tables, (lake, recorder) in lakes.items():
            recorder.read_paths, recorder.written = [], []
            table = random.randrange(n_tables)
            times[n_tables][0].append(seconds(lambda lake=lake, table=table: change_tables(lake, [table])))  # type: ignore[misc]
            times[n_tables][1].append(bare_commit(folder / str(n_tables), recorder, turn))
    return times


@contextmanager
def slower_device(added_s: float) -> Iterator[None]:
    """Delay each fsync, as with a network-attached device."""
    sync = os.fsync

    def wait(descriptor: int) -> None:
        sync(descriptor)
        if added_s:
            time.sleep(added_s)

    os.fsync = wait
    try:
        yield
    finally:
        os.fsync = sync


def synced_times(folder: Path) -> dict[str, Spread]:
    """Return the seconds of commits with fsync, and of the creation of one synced file, in turns."""
    storage = GeneratedDefinitions(LocalStorage(f"file://{folder}/", fsync=True))
    create_loaded_lake(storage, N_SYNCED)
    lake = Lakehouse(storage, cache="private")
    bare_folder, data = folder / "bare", os.urandom(3_000)
    bare_folder.mkdir()
    times: dict[str, list[float]] = {"a commit": [], "a synced create": []}
    for turn in range(N_SYNCED_TURNS):
        table = random.randrange(N_SYNCED)
        times["a commit"].append(seconds(lambda table=table: change_tables(lake, [table])))  # type: ignore[misc]
        times["a synced create"].append(seconds(lambda turn=turn: create_synced(bare_folder / str(turn), data)))  # type: ignore[misc]
    return {operation: Spread.of(values) for operation, values in times.items()}


def create_synced(target: Path, data: bytes) -> None:
    """Create a file atomically and only if absent, and sync it and its folder."""
    temporary = target.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.link(temporary, target)
    folder = os.open(target.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)
    os.unlink(temporary)


def commit_rows(times: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> list[list[object]]:
    """Return a row for each number of tables. The last cell is relative to the first row."""
    spreads = {n_tables: (Spread.of(engine), Spread.of(bare)) for n_tables, (engine, bare) in times.items()}
    first, _ = next(iter(spreads.values()))
    return [
        [
            f"{n_tables:,}",
            *engine.cells(1000),
            *bare.cells(1000),
            f"{engine.median / bare.median:.2f}",
            f"{engine.median / first.median:.2f}",
        ]
        for n_tables, (engine, bare) in spreads.items()
    ]


def draw_commits(axes: Axes, times: Mapping[int, tuple[Sequence[float], Sequence[float]]]) -> None:
    """Draw the distribution of the times of commits and of the bare operations."""
    for n_tables, both in times.items():
        for values, label, style in zip(both, ("commit", "bare operations"), ("-", ":"), strict=True):
            percent = [100 * number / len(values) for number in range(len(values))]
            axes.plot([1000 * value for value in sorted(values)], percent, style, label=f"{label}, {n_tables:,} tables")
    axes.set_xlim(0, 1000 * 3 * Spread.of(times[N_CHANGED[-1]][0]).median)
    axes.set_xlabel("ms")
    axes.set_title("% of commits that take at most this long")
    axes.legend()


def list_cpu() -> dict[str, Spread]:
    """Return the CPU seconds of a cold list, of decoding the same leaf files to Python strings, and of opening them."""
    storage = GeneratedDefinitions(MemoryStorage("memory://list-cpu/"))
    create_loaded_lake(storage, N_LISTED)
    snapshot = Lakehouse(storage, cache="off").snapshot()
    nodes = list(walk(snapshot.files.nodes, snapshot.root, snapshot.location))
    leaves = [storage.read(node.location) for node in nodes if node.node.is_leaf]
    del nodes, snapshot
    operations: dict[str, Callable[[], object]] = {
        f"list {N_LISTED:,} tables, cold, in memory": lambda: Lakehouse(storage, cache="off").snapshot().tables("ns"),
        "decode the same leaf files with pyarrow into Python strings": lambda: [
            pa.ipc.open_file(leaf).read_all().to_pydict() for leaf in leaves
        ],
        "open the same leaf files with pyarrow": lambda: [pa.ipc.open_file(leaf).read_all() for leaf in leaves],
    }
    times: dict[str, list[float]] = {operation: [] for operation in operations}
    for _ in range(25):
        gc.collect()
        for operation, call in operations.items():
            times[operation].append(cpu_seconds(call))
    drop_memory_root(storage.root)
    return {operation: Spread.of(values) for operation, values in times.items()}


def bulk_load_times(folder: Path) -> tuple[dict[str, Spread], dict[str, float]]:
    """Measure a bulk load of 1,000,000 keys into local files, and writing the same rows with pyarrow.

    Returns:
        The seconds of each operation, and the peak memory of the process in MB before and after the loads.
    """
    definition = LakehouseDef(id="")
    keys = KeyCodec(definition.namespace_name_max_size_bytes, definition.table_name_max_size_bytes)
    limits = TreeLimits.of(definition)
    entries = {
        keys.table_key("ns", name(number)): new_table_path("ns", name(number), definition.file_path_max_size_bytes)
        for number in range(N_LOADED)
    }
    numbers = itertools.count()

    def new_storage() -> Storage:
        return LocalStorage(f"file://{folder}/load-{next(numbers)}/", fsync=False)

    def load() -> None:
        bulk_load(iter(entries.items()), limits, created_at_ms=1, write=new_storage().create_many)

    def load_in_transaction() -> None:
        storage, system = new_storage(), {"created_at_millis": "1"}
        nodes, root = NodeStore(storage), NodeFile(system=system)
        edited = apply_messages(nodes, root, entries, limits, created_at_ms=1, root_system=system)
        storage.create_many(edited.node_files)

    def write_rows(in_hash_folders: bool) -> None:
        target_folder = folder / f"rows-{next(numbers)}"
        target_folder.mkdir()
        remaining = iter(entries.items())
        while rows := list(itertools.islice(remaining, n_filled_keys(limits))):
            data = encoded([key for key, _ in rows], [value for _, value in rows], [None] * len(rows))  # type: ignore[list-item]
            target = target_folder / (new_node_path() if in_hash_folders else f"{next(numbers):08}")
            target.parent.mkdir(parents=True, exist_ok=True)
            create(target, data)

    peaks_mb = {"list of keys": peak_mb()}
    load()
    peaks_mb["bulk load"] = peak_mb()
    operations: dict[str, Callable[[], object]] = {
        "bulk load": load,
        "the same keys as messages of one transaction": load_in_transaction,
        "pyarrow, files in hashed folders like nodes": lambda: write_rows(in_hash_folders=True),
        "pyarrow, files in one folder": lambda: write_rows(in_hash_folders=False),
    }
    times: dict[str, list[float]] = {operation: [] for operation in operations}
    for _ in range(N_LOADS):
        for operation, call in operations.items():
            times[operation].append(seconds(call))
    peaks_mb["transaction of all keys"] = peak_mb()
    return {operation: Spread.of(values) for operation, values in times.items()}, peaks_mb


def peak_mb() -> float:
    """Return the peak memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000


def slow_times() -> dict[tuple[int, str], Spread]:
    """Return the seconds of each operation with 20 ms per request, by number of tables and operation."""
    times = {}
    for n_tables in (100, N_LISTED):
        storage = GeneratedDefinitions(MemoryStorage(f"memory://slow-{n_tables}/"))
        create_loaded_lake(storage, n_tables)
        slow = SlowStorage(storage)
        lake = Lakehouse(slow, cache="private")
        lake.snapshot().tables("ns")
        operations: dict[str, Callable[[], object]] = {
            "look up a table, cold": lambda slow=slow: Lakehouse(slow, cache="off").snapshot().table("ns", name(42)),  # type: ignore[misc]
            "list all tables, cold": lambda slow=slow: Lakehouse(slow, cache="off").snapshot().tables("ns"),  # type: ignore[misc]
            "begin, warm": lambda lake=lake: lake.snapshot().definition,  # type: ignore[misc]
            "begin, change a table and commit": lambda lake=lake, n=n_tables: change_tables(  # type: ignore[misc]
                lake, [random.randrange(n)]
            ),
        }
        for operation, call in operations.items():
            times[n_tables, operation] = Spread.of([seconds(call) for _ in range(30)])
        drop_memory_root(storage.root)
    return times


def draw_slow(axes: Axes, slow: Mapping[tuple[int, str], Spread]) -> None:
    """Draw the medians as bars."""
    operations = list(dict.fromkeys(operation for _, operation in slow))
    for shift, n_tables in enumerate((100, N_LISTED)):
        positions = [number + 0.4 * shift for number in range(len(operations))]
        medians_ms = [1000 * slow[n_tables, operation].median for operation in operations]
        axes.barh(positions, medians_ms, 0.38, label=f"{n_tables:,} tables")
    axes.set_yticks([number + 0.2 for number in range(len(operations))], operations)
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"with {1000 * REQUEST_SECONDS:.0f} ms per request")
    axes.legend()


def main() -> None:
    """Measure, print and write the results."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        commits = commit_times(Path(folder))
        synced = {}
        for added_ms in ADDED_MS:
            with slower_device(added_ms / 1000):
                synced[added_ms] = synced_times(Path(folder) / f"synced-{added_ms}")
        slow = slow_times()
        cpu = list_cpu()
        loads, peaks_mb = bulk_load_times(Path(folder))
    listing = next(iter(cpu.values())).median
    write_result(
        "times",
        [
            "# Times, as ratios",
            "",
            "Generated by `benchmarks/times.py`: default settings, one run, in milliseconds.",
            "",
            "Begin, change one random table and commit; warm, on local disk without fsync. The bare operations read the"
            " same files, encode the same rows with pyarrow from Python strings, and write, link and unlink the same"
            " number of files. Ratios are those of the medians.",
            "",
            *table(
                ["tables", "median", "mean", "p99", "bare: median", "mean", "p99", "ratio", "relative to 100 tables"],
                commit_rows(commits),
            ),
            "",
            plot("commit_times", lambda axes: draw_commits(axes[0], commits)),
            "",
            f"The same among {N_SYNCED:,} tables with fsync, in turns with the creation of one 3 kB file. The file and"
            " its folder are synced. The device of this machine takes a fraction of a millisecond; the other rows add"
            " a delay to each wait for it:",
            "",
            *table(
                ["added ms per wait", "operation", "median", "mean", "p99", "commit takes"],
                (
                    [added_ms, operation, *spread.cells(1000), f"{spreads['a commit'].median / spread.median:.2f} x"]
                    for added_ms, spreads in synced.items()
                    for operation, spread in spreads.items()
                ),
            ),
            "",
            f"On a storage with {1000 * REQUEST_SECONDS:.0f} ms per request:",
            "",
            *table(
                ["operation", "tables", "median", "mean", "p99"],
                (
                    [operation, f"{n_tables:,}", *spread.cells(1000, 1)]
                    for (n_tables, operation), spread in slow.items()
                ),
            ),
            "",
            plot("slow_storage", lambda axes: draw_slow(axes[0], slow)),
            "",
            "CPU time of a list, and of the work that it cannot avoid:",
            "",
            *table(
                ["operation", "median", "mean", "p99", "list takes"],
                (
                    [operation, *spread.cells(1000, 1), f"{listing / spread.median:.2f} x"]
                    for operation, spread in cpu.items()
                ),
            ),
            "",
            "The bound is 3 x the time to decode the files to Python strings, which a list has to return.",
            "",
            f"{N_LOADED:,} keys without definitions, to local files without fsync; {N_LOADS} turns, in seconds:",
            "",
            *table(
                ["operation", "median", "mean", "p99", "bulk load takes"],
                (
                    [operation, *spread.cells(), f"{loads['bulk load'].median / spread.median:.2f} x"]
                    for operation, spread in loads.items()
                ),
            ),
            "",
            "Peak memory of the process, in MB:"
            f" {', '.join(f'{operation}: {memory_mb:,.0f}' for operation, memory_mb in peaks_mb.items())}.",
        ],
    )


if __name__ == "__main__":
    main()
