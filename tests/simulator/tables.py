"""An Iceberg table in a simulated world: who appends to it, and what each version must show of it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pyarrow as pa
from pyiceberg.catalog.noop import NoopCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, NoSuchTableError
from pyiceberg.schema import Schema
from pyiceberg.table import StaticTable
from pyiceberg.types import LongType, NestedField

from tests.simulator.world import World
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TrinityLakeError, VersionExpiredError
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.file_io import StorageFileIO
from trinitylake_ops.tables.managed import METADATA_LOCATION, read_metadata
from trinitylake_ops.tables.ownership import owner_path
from trinitylake_ops.tables.reach import files_of
from trinitylake_ops.transaction.snapshot import Snapshot

NAMESPACE, TABLE = "ice", "rows"
_SCHEMA = Schema(NestedField(1, "id", LongType(), required=False))


class Tables:
    """One table, and the rows that were acknowledged."""

    def __init__(self, world: World, happened: Counter[str], note: Callable[..., None]):
        self._world = world
        self._happened = happened
        self._note = note
        self._next_row = 0
        self._acknowledged: list[int] = []
        self._failed: list[int] = []

    def create(self, lake: Lakehouse) -> None:
        """Create the table, in a namespace that is there."""
        catalog_at(lake).create_table(f"{NAMESPACE}.{TABLE}", _SCHEMA, properties={"commit.retry.num-retries": "0"})

    def append(self, lake: Lakehouse, chance: random.Random) -> None:
        """Append a row, or see what the table holds."""
        for _ in range(chance.randrange(60)):
            self._world.hand_over()
        row, self._next_row = self._next_row, self._next_row + 1
        try:
            table = catalog_at(lake).load_table(f"{NAMESPACE}.{TABLE}")
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

    def wrong(self, lake: Lakehouse, past: Lakehouse, live: set[int]) -> list[str]:
        """Return what does not hold: a live version shows the rows it had at first, acknowledged ones are there."""
        first = {version: rows_at(past, version) for version in range(past.latest_version() + 1)}
        now = {version: rows_at(lake, version) for version in live & first.keys()}
        wrong = [
            f"the table at version {version} shows {now[version]}, at first it showed {first[version]}"
            for version in sorted(now)
            if now[version] != first[version]
        ]
        seen = {row for rows in first.values() for row in rows or ()}
        wrong += [f"row {row} was acknowledged and is nowhere" for row in self._acknowledged if row not in seen]
        return wrong + [f"row {row} failed and is there" for row in self._failed if row in seen]


def rows_at(lake: Lakehouse, version: int) -> list[int] | None:
    """Return the rows of the table at a version, None where there is none."""
    snapshot = Snapshot.of(lake.files, version)
    if not snapshot.has_namespace(NAMESPACE) or not snapshot.has_table(NAMESPACE, TABLE):
        return None
    location = snapshot.table(NAMESPACE, TABLE).format_properties[METADATA_LOCATION]
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    metadata = read_metadata(io, to_uri(lake.root, location))
    table = StaticTable((NAMESPACE, TABLE), metadata, location, io, NoopCatalog("simulated"))
    return sorted(table.scan().to_arrow()["id"].to_pylist())


def needed_files(lake: Lakehouse, location: str) -> set[str]:
    """Return the files that the table needs, if this is the location of one of its definitions."""
    if f"table-{TABLE}-{NAMESPACE}-" not in location:
        return set()
    definition = lake.files.definitions.table(location)
    io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
    return {owner_path(definition.id), *(file.location for file in files_of(definition, io) if file.live)}
