"""Compare table commits through our PyIceberg catalog with commits through PyIceberg's catalog on SQLite.

Run from the project's root: ``.venv/bin/python -m benchmarks.catalogs``. It writes ``benchmarks/results/catalogs.md``.
Both catalogs contain the same number of tables and run the same PyIceberg calls in turns. Each is measured twice: with
syncs, so that a crash of the machine loses nothing, and without syncs.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import Catalog
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io import OutputFile, OutputStream
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from pyiceberg.table import Table
from sqlalchemy import event

from benchmarks.lakes import REQUEST_SECONDS, SlowStorage, deferred_background_work
from benchmarks.report import Spread, cpu_seconds, seconds, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import catalog_at, catalog_for
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, background, drop_memory_root
from trinitylake_ops.storage.meter import RequestCounts

N_TABLES = 1_000
N_TURNS = 200
N_SLOW_TURNS = 5
_SCHEMA = pa.schema([("id", pa.int64())])
_ROWS = pa.table({"id": [1, 2, 3]})
_numbers = itertools.count()

Operation = Callable[[Table], object]
#: The operation, the catalog, the elapsed seconds, and the CPU seconds.
Measurement = tuple[str, str, Spread, Spread]


def set_property(loaded: Table) -> object:
    """Commit a property."""
    return loaded.transaction().set_properties(stamp=str(next(_numbers))).commit_transaction()


#: The operations. Each starts with a loaded table.
OPERATIONS: Mapping[str, Operation] = {
    "commit a property": set_property,
    "append three rows": lambda loaded: loaded.append(_ROWS),
    "load the table, append three rows": lambda loaded: loaded.catalog.load_table(loaded.name()).append(_ROWS),
}
#: Operations that each catalog repeats ``N_IN_A_ROW`` times per turn, so that the caches of the processor stay warm.
N_IN_A_ROW = 20
OPERATIONS_IN_A_ROW: Mapping[str, Operation] = {f"commit a property, each of {N_IN_A_ROW} in a row": set_property}
#: The operations on slow storage.
SLOW_OPERATIONS: Mapping[str, Operation] = {
    **OPERATIONS,
    "overwrite all rows": lambda loaded: loaded.overwrite(_ROWS),
    "delete a row of each file": lambda loaded: loaded.delete("id = 1"),
    "create a table": lambda loaded: loaded.catalog.create_table(f"ns.new{next(_numbers)}", _SCHEMA),
}


class SyncedFileIO(PyArrowFileIO):
    """PyIceberg's FileIO, except that it syncs files when they are closed, as our local storage does."""

    def new_output(self, location: str) -> OutputFile:
        """Return a file to write that is synced on close."""
        output_file = super().new_output(location)
        output_file.__class__ = _SyncedFile
        return output_file


class _SyncedFile(PyArrowFile):
    def create(self, overwrite: bool = False) -> OutputStream:
        return _SyncedStream(super().create(overwrite), self._path)  # type: ignore[return-value]


class _SyncedStream:
    """An Arrow stream that is synced on close."""

    def __init__(self, inner: Any, path: str):
        self._inner = inner
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __enter__(self) -> _SyncedStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file, and sync it and its folder."""
        if self._inner.closed:
            return
        self._inner.close()
        for path in (self._path, os.path.dirname(self._path)):
            number = os.open(path, os.O_RDONLY)
            os.fsync(number)
            os.close(number)


def ours(folder: Path, *, synced: bool) -> Catalog:
    """Return the catalog of a lakehouse whose tables were created by one commit."""
    lake = Lakehouse.create(str(folder), {"fsync": "false"})
    with lake.transaction() as txn:
        _fill(catalog_for(txn, lake.storage_options))
    return catalog_at(Lakehouse.open(str(folder), {"fsync": str(synced).lower()}))


def on_sqlite(folder: Path, *, synchronous: str, synced_files: bool) -> Catalog:
    """Return PyIceberg's catalog on SQLite, with tables.

    Args:
        folder: The folder of the database and the warehouse.
        synchronous: SQLite's ``PRAGMA synchronous``.
        synced_files: Whether the files of tables are synced.
    """
    folder.mkdir()
    io = {"py-io-impl": "benchmarks.catalogs.SyncedFileIO"} if synced_files else {}
    catalog = SqlCatalog("sqlite", uri=f"sqlite:///{folder}/catalog.db", warehouse=f"file://{folder}/warehouse", **io)

    @event.listens_for(catalog.engine, "connect")
    def set_synchronous(connection: Any, _: object) -> None:
        connection.execute(f"PRAGMA synchronous = {synchronous}")

    catalog.engine.dispose()
    _fill(catalog)
    return catalog


def _fill(catalog: Catalog) -> None:
    catalog.create_namespace("ns")
    for number in range(N_TABLES):
        catalog.create_table(f"ns.t{number}", _SCHEMA)


def catalogs_to_compare(folder: Path) -> dict[str, Catalog]:
    """Return the catalogs to compare, by name."""
    return {
        "ours, fsync": ours(folder / "synced", synced=True),
        "SQLite, synchronous=FULL, files synced": on_sqlite(
            folder / "sqlite-synced", synchronous="FULL", synced_files=True
        ),
        "SQLite, synchronous=FULL, files not synced": on_sqlite(
            folder / "sqlite", synchronous="FULL", synced_files=False
        ),
        "ours, no fsync": ours(folder / "unsynced", synced=False),
        "SQLite, synchronous=OFF, files not synced": on_sqlite(
            folder / "sqlite-off", synchronous="OFF", synced_files=False
        ),
    }


def compare(catalogs: Mapping[str, Catalog]) -> Iterator[Measurement]:
    """Yield the elapsed and CPU seconds of each operation and catalog, measured in turns."""
    for number, (operation, call) in enumerate({**OPERATIONS, **OPERATIONS_IN_A_ROW}.items()):
        n_times = N_IN_A_ROW if operation in OPERATIONS_IN_A_ROW else 1
        tables = {name: catalog.load_table(f"ns.t{number}") for name, catalog in catalogs.items()}
        times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in catalogs}
        for turn in range(-3, N_TURNS):
            for name, loaded in tables.items():
                for _ in range(n_times):
                    wall, cpu = _times(functools.partial(call, loaded))
                    if turn >= 0:
                        times[name][0].append(wall)
                        times[name][1].append(cpu)
        for name, (walls, cpus) in times.items():
            yield operation, name, Spread.of(walls), Spread.of(cpus)


def _times(call: Callable[[], object]) -> tuple[float, float]:
    """Return the elapsed seconds of a call, and its CPU seconds in all threads."""
    walls: list[float] = []
    cpu = cpu_seconds(lambda: walls.append(seconds(call)))
    return walls[0], cpu


@contextmanager
def slow_table() -> Iterator[tuple[MeteredStorage, Table]]:
    """Yield the meter of a storage with slow requests, and a table on it."""
    root = "memory://catalogs/"
    drop_memory_root(root)
    catalog = catalog_at(Lakehouse.create(root, storage=MemoryStorage(root)))
    _append_rows(catalog)
    meter = MeteredStorage(SlowStorage(MemoryStorage(root)))
    yield meter, catalog_at(Lakehouse(meter)).load_table("ns.t")
    drop_memory_root(root)


def _append_rows(catalog: Catalog) -> None:
    catalog.create_namespace("ns")
    for _ in range(3):
        catalog.create_table_if_not_exists("ns.t", _SCHEMA).append(_ROWS)


def measure_slow() -> Iterator[tuple[str, RequestCounts, float]]:
    """Yield the requests and seconds of each operation with 20 ms per request, without background work."""
    for operation, call in SLOW_OPERATIONS.items():
        with slow_table() as (meter, loaded):
            times = []
            for _ in range(N_SLOW_TURNS):
                loaded.refresh().append(_ROWS)
                background.drain()
                with deferred_background_work(), meter.measure() as measurement:
                    times.append(seconds(functools.partial(call, loaded)))
            yield operation, measurement.counts, min(times)


def report(
    measurements: Sequence[Measurement], slow_measurements: Sequence[tuple[str, RequestCounts, float]]
) -> list[str]:
    """Return the lines of the result."""
    sqlite_catalogs = dict.fromkeys(name for _, name, _, _ in measurements if name.startswith("SQLite"))
    rows = [
        [operation, name, *wall.cells(1000), f"{cpu.median * 1000:.2f}"] for operation, name, wall, cpu in measurements
    ]
    return [
        "# Table commits through the pyiceberg catalog",
        "",
        f"Generated by `benchmarks/catalogs.py`: {N_TABLES:,} tables in each catalog, {N_TURNS} turns, local disk. With"
        " fsync, ours syncs every file and its folder. SQLite syncs its database according to `PRAGMA synchronous`."
        ' pyiceberg does not sync files; for "files synced", a FileIO of this program syncs them on close.',
        "",
        *table(["operation", "catalog", "ms: median", "mean", "p99", "CPU ms: median"], rows),
        "",
        "Ratios of medians: ours divided by each SQLite catalog.",
        "",
        *table(["operation", "catalog", *sqlite_catalogs], _ratios(measurements)),
        "",
        f"On a storage with {REQUEST_SECONDS * 1000:.0f} ms per request, without the hint, which is written in the"
        " background. Data files, manifests and the manifest list count as one round trip, which overlaps with the"
        " begin of the commit.",
        "",
        *table(
            ["operation", "requests", "round trips", "ms"],
            [
                [operation, counts.total, counts.rounds, f"{1000 * elapsed_s:.0f}"]
                for operation, counts, elapsed_s in slow_measurements
            ],
        ),
    ]


def _ratios(measurements: Sequence[Measurement]) -> list[list[object]]:
    """Return a row for each operation and each of our catalogs, with its ratios to the SQLite catalogs."""
    medians = {(operation, name): wall.median for operation, name, wall, _ in measurements}
    sqlite_catalogs = list(dict.fromkeys(name for _, name, _, _ in measurements if name.startswith("SQLite")))
    return [
        [operation, name, *(f"{median / medians[operation, sqlite_catalog]:.2f}" for sqlite_catalog in sqlite_catalogs)]
        for (operation, name), median in medians.items()
        if name not in sqlite_catalogs
    ]


def main() -> None:
    """Measure, print and write the results."""
    slow_measurements = list(measure_slow())
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        measurements = list(compare(catalogs_to_compare(Path(folder))))
    write_result("catalogs", report(measurements, slow_measurements))


if __name__ == "__main__":
    main()
