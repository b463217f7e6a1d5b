"""An Iceberg table in a simulated world: its writer, and the rows that each version must contain."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator

import pyarrow as pa
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.types import LongType, NestedField

from tests.simulator.world import World
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    FileMissingError,
    InvalidInputError,
    NamespaceNotFoundError,
    TableHasAnotherNameError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.file_names import TABLES_PREFIX, owner_path
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.metadata import read_table_metadata
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.versions.snapshot import Snapshot

NAMESPACE, TABLE = "ice", "rows"
_SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


class TableWriter:
    """Writes a table, which is registered under several names in turn, and records the acknowledged rows."""

    def __init__(self, world: World, events: Counter[str], record_error: Callable[..., None]):
        self._world = world
        self._events = events
        self._record_error = record_error
        self._next_row = 0
        self._n_names = 0
        self._acknowledged: list[int] = []
        self._failed: list[int] = []
        self._rows: dict[str, list[int]] = {}  # by definition location
        self._needed: dict[str, set[str]] = {}

    def create(self, lake: Lakehouse) -> None:
        """Create the table in an existing namespace."""
        catalog_at(lake).create_table(f"{NAMESPACE}.{TABLE}", _SCHEMA, properties={"commit.retry.num-retries": "0"})

    def append(self, lake: Lakehouse, rng: random.Random) -> None:
        """Append a row and record the outcome."""
        for _ in range(rng.randrange(60)):
            self._world.hand_over()
        row, self._next_row = self._next_row, self._next_row + 1
        try:
            table = catalog_at(lake).load_table(f"{NAMESPACE}.{_live_name(lake)}")
            table.append(pa.table({"id": pa.array([row], pa.int64())}))
        except (CommitStateUnknownException, NoSuchTableError):
            self._events["append: unknown, or no table"] += 1
        except CommitFailedException:
            self._failed.append(row)
            self._events["append: conflict"] += 1
        except TrinityLakeError as error:
            self._record_error(error, "append", VersionExpiredError)
            self._events[f"append: {type(error).__name__}"] += 1
        else:
            self._acknowledged.append(row)
            self._events["append"] += 1

    def register(self, lake: Lakehouse, rng: random.Random) -> bool:
        """Drop the table and register one of its metadata files. Without the drop, which is rare, this is rejected."""
        name = _live_name(lake)
        if rng.random() < 0.9:
            with lake.transaction() as txn:
                if txn.has_namespace(NAMESPACE) and txn.has_table(NAMESPACE, name):
                    txn.drop_table(NAMESPACE, name)
        paths = [info.path for info in lake.storage.list(TABLES_PREFIX) if info.path.endswith(".metadata.json")]
        if not paths:
            return False
        self._n_names += 1
        try:
            operations.register_table(lake, NAMESPACE, f"r{self._n_names}", rng.choice(sorted(paths)))
        except NamespaceNotFoundError:  # a restored version may lack the namespace
            return False
        except TableHasAnotherNameError:
            self._events["register: the table is live"] += 1
            return False
        except (FileMissingError, InvalidInputError) as error:
            # The file belongs to a purged version, or its commit failed.
            if isinstance(error, InvalidInputError) and "no kept version refers to it" not in error.message:
                raise
            self._events["register: not committed, or purged"] += 1
            return False
        return True

    def violations(self, archive_lake: Lakehouse, live: set[int]) -> list[str]:
        """Return violations: files of live versions must be unchanged, and acknowledged rows must exist."""
        violations: list[str] = []
        stored_rows: set[int] = set()
        for version, table, location in definitions(archive_lake):
            if location not in self._rows:
                self._rows[location], self._needed[location] = (
                    rows_at(archive_lake, location),
                    needed_files(archive_lake, location),
                )
            stored_rows.update(self._rows[location])
            if version in live:
                violations += [
                    f"table {table} at version {version}: {path} is missing or was changed"
                    for path in sorted(self._needed[location])
                    if path not in self._world.files or self._world.files[path][0] != self._world.created[path][0]
                ]
        violations += [
            f"row {row} was acknowledged, but is missing" for row in self._acknowledged if row not in stored_rows
        ]
        violations += [f"row {row} was not appended, but exists" for row in self._failed if row in stored_rows]
        return violations


def _live_name(lake: Lakehouse) -> str:
    """Return the table's name at the latest version, or its first name if it was dropped."""
    snapshot = lake.snapshot()
    names = snapshot.tables(NAMESPACE) if snapshot.has_namespace(NAMESPACE) else []
    return next(iter(names), TABLE)


def definitions(lake: Lakehouse) -> Iterator[tuple[int, str, str]]:
    """Yield version, table name and definition location of each table at each version."""
    for version in range(lake.latest_version() + 1):
        snapshot = Snapshot.of(lake.files, version)
        for table in snapshot.tables(NAMESPACE) if snapshot.has_namespace(NAMESPACE) else ():
            location = snapshot.entry(snapshot.keys.table_key(NAMESPACE, table))
            assert location is not None
            yield version, table, location


def rows_at(lake: Lakehouse, definition: str) -> list[int]:
    """Return the rows of the table for a location of its definition."""
    location = lake.files.definitions.table(definition).format_properties[METADATA_LOCATION]
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    metadata = read_table_metadata(io, to_uri(lake.root, location))
    table = StaticTable((NAMESPACE, TABLE), metadata, location, io, NoopCatalog("simulated"))
    return sorted(table.scan().to_arrow()["id"].to_pylist())


def needed_files(lake: Lakehouse, location: str) -> set[str]:
    """Return the files that a table needs, or none if the location is not of a table definition."""
    if "-table-" not in location or f"-{NAMESPACE}-" not in location:
        return set()
    definition = lake.files.definitions.table(location)
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    owners = {owner_path(definition.id)} if definition.is_managed else set()
    return owners | {file.location for file in files_of(definition, io) if file.live}
