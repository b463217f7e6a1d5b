"""Table commits through our pyiceberg catalog and through pyiceberg's catalog on SQLite, in turns of one run.

Run from the project's root: ``.venv/bin/python -m benchmarks.catalogs``. It writes ``benchmarks/results/catalogs.md``.
Both catalogs contain the same number of tables and run the same pyiceberg calls. Each is measured twice: with syncs, so
that a crash of the machine loses nothing, and without syncs.
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

Work = Callable[[Table], object]
#: A kind of work, a catalog, the elapsed seconds, and the CPU seconds.
Compared = tuple[str, str, Spread, Spread]


def set_property(loaded: Table) -> object:
    """Commit a property."""
    return loaded.transaction().set_properties(stamp=str(next(_numbers))).commit_transaction()


#: The kinds of work. Each starts with a loaded table.
WORKS: Mapping[str, Work] = {
    "commit a property": set_property,
    "append three rows": lambda loaded: loaded.append(_ROWS),
    "load the table, append three rows": lambda loaded: loaded.catalog.load_table(loaded.name()).append(_ROWS),
}
#: Work that each catalog repeats ``N_IN_A_ROW`` times per turn, so that the processor's caches stay warm.
N_IN_A_ROW = 20
IN_A_ROW: Mapping[str, Work] = {f"commit a property, each of {N_IN_A_ROW} in a row": set_property}
#: The kinds of work on slow storage.
SLOW_WORKS: Mapping[str, Work] = {
    **WORKS,
    "overwrite all rows": lambda loaded: loaded.overwrite(_ROWS),
    "delete a row of each file": lambda loaded: loaded.delete("id = 1"),
    "create a table": lambda loaded: loaded.catalog.create_table(f"ns.new{next(_numbers)}", _SCHEMA),
}


class SyncedFileIO(PyArrowFileIO):
    """pyiceberg's FileIO, except that files are synced when they are closed, as in our local storage."""

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
    """Return the catalog of a lakehouse whose tables are created by one commit."""
    lake = Lakehouse.create(str(folder), {"fsync": "false"})
    with lake.transaction() as txn:
        _fill(catalog_for(txn, lake.storage_options))
    return catalog_at(Lakehouse.open(str(folder), {"fsync": str(synced).lower()}))


def on_sqlite(folder: Path, *, synchronous: str, synced_files: bool) -> Catalog:
    """Return pyiceberg's catalog on SQLite, with tables.

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


def compare(catalogs: Mapping[str, Catalog]) -> Iterator[Compared]:
    """Yield the elapsed and CPU seconds of each kind of work and catalog, measured in turns."""
    for number, (work, call) in enumerate({**WORKS, **IN_A_ROW}.items()):
        n_times = N_IN_A_ROW if work in IN_A_ROW else 1
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
            yield work, name, Spread.of(walls), Spread.of(cpus)


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
    _fill_one(catalog)
    meter = MeteredStorage(SlowStorage(MemoryStorage(root)))
    yield meter, catalog_at(Lakehouse(meter)).load_table("ns.t")
    drop_memory_root(root)


def _fill_one(catalog: Catalog) -> None:
    catalog.create_namespace("ns")
    for _ in range(3):
        catalog.create_table_if_not_exists("ns.t", _SCHEMA).append(_ROWS)


def slow() -> Iterator[tuple[str, RequestCounts, float]]:
    """Yield the requests and seconds of each kind of work with 20 ms per request, without background work."""
    for work, call in SLOW_WORKS.items():
        with slow_table() as (meter, loaded):
            times = []
            for _ in range(N_SLOW_TURNS):
                loaded.refresh().append(_ROWS)
                background.drain()
                with deferred_background_work(), meter.measure() as measured:
                    times.append(seconds(functools.partial(call, loaded)))
            yield work, measured.counts, min(times)


def report(compared: Sequence[Compared], slowed: Sequence[tuple[str, RequestCounts, float]]) -> list[str]:
    """Return the lines of the result."""
    sqlite_catalogs = dict.fromkeys(name for _, name, _, _ in compared if name.startswith("SQLite"))
    rows = [[work, name, *wall.cells(1000), f"{cpu.median * 1000:.2f}"] for work, name, wall, cpu in compared]
    return [
        "# Table commits through the pyiceberg catalog",
        "",
        f"Made by `benchmarks/catalogs.py`: {N_TABLES:,} tables in each catalog, {N_TURNS} turns, local disk. With"
        " fsync, ours syncs every file and its folder. SQLite syncs its database according to `PRAGMA synchronous`."
        ' pyiceberg does not sync files; for "files synced", a FileIO of this program syncs them on close.',
        "",
        *table(["work", "catalog", "ms: median", "mean", "p99", "CPU ms: median"], rows),
        "",
        "Ratios of medians: ours divided by each SQLite catalog.",
        "",
        *table(["work", "catalog", *sqlite_catalogs], _ratios(compared)),
        "",
        f"On a storage with {REQUEST_SECONDS * 1000:.0f} ms per request, without the hint, which is written in the"
        " background. Data files, manifests and the manifest list count as one round trip, which overlaps with the"
        " begin of the commit.",
        "",
        *table(
            ["work", "requests", "round trips", "ms"],
            [[work, counts.total, counts.rounds, f"{1000 * elapsed_s:.0f}"] for work, counts, elapsed_s in slowed],
        ),
    ]


def _ratios(compared: Sequence[Compared]) -> list[list[object]]:
    """Return a row for each kind of work and each of our catalogs, with its ratios to the SQLite catalogs."""
    medians = {(work, name): wall.median for work, name, wall, _ in compared}
    sqlite_catalogs = list(dict.fromkeys(name for _, name, _, _ in compared if name.startswith("SQLite")))
    return [
        [work, name, *(f"{median / medians[work, sqlite_catalog]:.2f}" for sqlite_catalog in sqlite_catalogs)]
        for (work, name), median in medians.items()
        if name not in sqlite_catalogs
    ]


def main() -> None:
    """Measure, print and write the results."""
    slowed = list(slow())
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        compared = list(compare(catalogs_to_compare(Path(folder))))
    write_result("catalogs", report(compared, slowed))


if __name__ == "__main__":
    main()
