"""An Iceberg table in a simulated world: who appends to it, and what each version must show of it."""

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


class Tables:
    """One table, under one name after another, and the rows that were acknowledged."""

    def __init__(self, world: World, happened: Counter[str], note: Callable[..., None]):
        self._world = world
        self._happened = happened
        self._note = note
        self._next_row = 0
        self._names = 0
        self._acknowledged: list[int] = []
        self._failed: list[int] = []
        self._rows: dict[str, list[int]] = {}  # by the location of a definition
        self._needed: dict[str, set[str]] = {}

    def create(self, lake: Lakehouse) -> None:
        """Create the table, in a namespace that is there."""
        catalog_at(lake).create_table(f"{NAMESPACE}.{TABLE}", _SCHEMA, properties={"commit.retry.num-retries": "0"})

    def append(self, lake: Lakehouse, chance: random.Random) -> None:
        """Append a row, or see what the table holds."""
        for _ in range(chance.randrange(60)):
            self._world.hand_over()
        row, self._next_row = self._next_row, self._next_row + 1
        try:
            table = catalog_at(lake).load_table(f"{NAMESPACE}.{_live_name(lake)}")
            table.append(pa.table({"id": pa.array([row], pa.int64())}))
        except (CommitStateUnknownException, NoSuchTableError):
            self._happened["append: unknown, or no table"] += 1
        except CommitFailedException:
            self._failed.append(row)
            self._happened["append: conflict"] += 1
        except TrinityLakeError as error:
            self._note(error, "append", VersionExpiredError)
            self._happened[f"append: {type(error).__name__}"] += 1
        else:
            self._acknowledged.append(row)
            self._happened["append"] += 1

    def register(self, lake: Lakehouse, chance: random.Random) -> bool:
        """Drop the table and register one of its metadata files; at times without the drop, which is refused."""
        name = _live_name(lake)
        if chance.random() < 0.9:
            with lake.transaction() as txn:
                if txn.has_namespace(NAMESPACE) and txn.has_table(NAMESPACE, name):
                    txn.drop_table(NAMESPACE, name)
        paths = [info.path for info in lake.storage.list(TABLES_PREFIX) if info.path.endswith(".metadata.json")]
        if not paths:
            return False
        self._names += 1
        try:
            operations.register_table(lake, NAMESPACE, f"r{self._names}", chance.choice(sorted(paths)))
        except NamespaceNotFoundError:  # a restored version does not have it
            return False
        except TableHasAnotherNameError:
            self._happened["register: the table is live"] += 1
            return False
        except (FileMissingError, InvalidInputError) as error:
            # The file is of a version that was purged, or its commit failed.
            if isinstance(error, InvalidInputError) and "no kept version refers to it" not in error.message:
                raise
            self._happened["register: not committed, or purged"] += 1
            return False
        return True

    def wrong(self, past: Lakehouse, live: set[int]) -> list[str]:
        """Return what does not hold: all that live versions need stands as it was made, acknowledged rows are there."""
        wrong: list[str] = []
        seen: set[int] = set()
        for version, table, location in definitions(past):
            if location not in self._rows:
                self._rows[location], self._needed[location] = rows_at(past, location), needed_files(past, location)
            seen.update(self._rows[location])
            if version in live:
                wrong += [
                    f"table {table} at version {version} lacks {path}, or finds it changed"
                    for path in sorted(self._needed[location])
                    if path not in self._world.files or self._world.files[path][0] != self._world.created[path][0]
                ]
        wrong += [f"row {row} was acknowledged and is nowhere" for row in self._acknowledged if row not in seen]
        return wrong + [f"row {row} failed and is there" for row in self._failed if row in seen]


def _live_name(lake: Lakehouse) -> str:
    """Return the name of the table at the latest version; its first name where it is dropped."""
    snapshot = lake.snapshot()
    names = snapshot.tables(NAMESPACE) if snapshot.has_namespace(NAMESPACE) else []
    return next(iter(names), TABLE)


def definitions(lake: Lakehouse) -> Iterator[tuple[int, str, str]]:
    """Yield each version, the names of tables there, and where the definition of each stands."""
    for version in range(lake.latest_version() + 1):
        snapshot = Snapshot.of(lake.files, version)
        for table in snapshot.tables(NAMESPACE) if snapshot.has_namespace(NAMESPACE) else ():
            location = snapshot.entry(snapshot.keys.table_key(NAMESPACE, table))
            assert location is not None
            yield version, table, location


def rows_at(lake: Lakehouse, definition: str) -> list[int]:
    """Return the rows of the table by one of its definitions."""
    location = lake.files.definitions.table(definition).format_properties[METADATA_LOCATION]
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    metadata = read_table_metadata(io, to_uri(lake.root, location))
    table = StaticTable((NAMESPACE, TABLE), metadata, location, io, NoopCatalog("simulated"))
    return sorted(table.scan().to_arrow()["id"].to_pylist())


def needed_files(lake: Lakehouse, location: str) -> set[str]:
    """Return the files that a table needs, if this is the location of a definition of one."""
    if "-table-" not in location or f"-{NAMESPACE}-" not in location:
        return set()
    definition = lake.files.definitions.table(location)
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    owners = {owner_path(definition.id)} if definition.is_managed else set()
    return owners | {file.location for file in files_of(definition, io) if file.live}
