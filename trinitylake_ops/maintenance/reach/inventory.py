"""What stands under a root by an inventory: a list of all files that a storage writes by itself, every day or week.

An inventory spares the listing of millions of files (docs/engines.md, "Inventories"), and nothing in it is believed.
Each file in it that nothing reaches is asked for, and counts as the storage shows it now. It lacks later files.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import ClassVar, NamedTuple

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, InvalidLocationError
from trinitylake_ops.format.file_names import ROOT_PREFIX, TABLES_PREFIX, owner_path
from trinitylake_ops.format.locations import as_uri, is_uri, normalize_root_uri
from trinitylake_ops.format.places import cut
from trinitylake_ops.maintenance.plans.budget import counted_with
from trinitylake_ops.maintenance.plans.executor import Executor, Weight
from trinitylake_ops.maintenance.reach.inventory_search import (
    FORMATS,
    KEY_COLUMN,
    Inventory,
    InventoryMatches,
    InventorySearch,
    Sought,
)
from trinitylake_ops.maintenance.reach.listing import list_folders
from trinitylake_ops.maintenance.reach.mark import Mark
from trinitylake_ops.maintenance.reach.survey import Progress, no_progress
from trinitylake_ops.maintenance.reach.table_files import table_id_in
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, Storage, open_storage
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.tables.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for


def read_inventory(lake: Lakehouse, location: str, table_root: str = "") -> Inventory:
    """Read the manifest of an inventory, ``manifest.json``, by its URI or absolute path.

    Its files are found in the bucket of the manifest, or in its folder where it is a local file. Raises
    FileMissingError, CorruptFileError for what is no such manifest, StorageError. Raises InvalidInputError for that of
    another bucket than those of the lakehouse and of ``table_root``, if there is one.
    """
    uri = as_uri(location)
    if not is_uri(uri) or uri.endswith("/"):
        raise InvalidLocationError(
            f"inventory {location!r} is neither a URI nor an absolute path of its manifest.json", path=location
        )
    try:
        data = _inventory_io(lake, uri).read_whole(uri)
    except FileMissingError as error:
        raise FileMissingError(f"there is no inventory {uri!r}: give the URI of its manifest.json", path=uri) from error
    try:
        content = json.loads(data)
        source, file_format = str(content["sourceBucket"]), str(content["fileFormat"])
        created_at_ms, keys = int(content["creationTimestamp"]), [str(file["key"]) for file in content["files"]]
        columns = tuple(name.strip().lower() for name in str(content["fileSchema"]).split(","))
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise CorruptFileError(f"{uri!r} is no manifest of an inventory", path=uri) from error
    if file_format not in FORMATS or (file_format == "CSV" and KEY_COLUMN not in columns):
        raise CorruptFileError(
            f"the files of inventory {uri!r} are of format {file_format!r} with columns {', '.join(columns)}; known are"
            f" {', '.join(FORMATS)}, with a column 'Key'",
            path=uri,
        )
    try:
        source_uri = normalize_root_uri(source if is_uri(source) else f"s3://{source}/")
    except InvalidLocationError as error:
        raise CorruptFileError(f"{uri!r} is no manifest of an inventory: {error.message}", path=uri) from error
    inventory = Inventory(
        uri, created_at_ms, file_format, columns, source_uri, tuple(_folder_of(uri) + k for k in keys)
    )
    roots = [lake.root, *([normalize_root_uri(table_root)] if table_root else [])]
    if all(inventory.key_prefix(root) is None for root in roots):
        where = " and ".join(map(cut, roots))
        raise InvalidInputError(f"inventory {uri!r} is one of {source_uri!r}, where {where} is not", path=uri)
    return inventory


def _folder_of(uri: str) -> str:
    """Return the root of an inventory's files: the bucket of its manifest, or its folder where it is a local file."""
    scheme, _, rest = uri.partition("://")
    return f"{uri.rpartition('/')[0]}/" if scheme == "file" else f"{scheme}://{rest.partition('/')[0]}/"


def _inventory_io(lake: Lakehouse, uri: str) -> StorageFileIO:
    """Return what reads an inventory that the caller named by the URI of its manifest. Raises InvalidLocationError."""
    root = normalize_root_uri(_folder_of(uri))
    return reading_io(lake, [counted_with(lake.storage, open_storage(root, options_for(lake, root)))])


class ListedByInventory(NamedTuple):
    """The files that an inventory leads to, under the root and under the table root.

    None for a root of which it has no file that is reached: it is of something else there, or there is no such root.
    """

    own: Iterator[FileInfo] | None
    there: Iterator[FileInfo] | None


def list_by_inventory(
    lake: Lakehouse, executor: Executor, inventory: Inventory, mark: Mark, progress: Progress = no_progress
) -> ListedByInventory:
    """Return the files in an inventory that a mark does not reach and that stand, and all with names of operations.

    Of a table that may go altogether all files are told, also those that came since the inventory. Extends the
    mark to the files of tables. Raises what marking raises, InvalidInputError for an inventory that has no file of
    the lakehouse, CorruptFileError, StorageError.
    """
    mark.add_tables()
    own, there = _searched(lake, inventory, mark)
    roots = [root for root in (own, there) if root is not None]
    search = InventorySearch(_inventory_io(lake, inventory.location), inventory, tuple(root.sought for root in roots))
    for done, found in enumerate(executor.map(search, inventory.files), 1):
        for root, matches in zip(roots, found, strict=True):
            root.take(matches)
        progress("files of the inventory", done, len(inventory.files))
    if not any(root.n_reached for root in roots):
        raise InvalidInputError(
            f"inventory {inventory.location!r} has none of the files that {lake.root} reaches: it is of another prefix,"
            " or older than the lakehouse",
            path=inventory.location,
        )
    return ListedByInventory(
        own.standing(executor, (ROOT_PREFIX, TEMPORARY_PREFIX)) if own is not None and own.n_reached else None,
        there.standing(executor) if there is not None and there.n_reached else None,
    )


def _searched(lake: Lakehouse, inventory: Inventory, mark: Mark) -> tuple[_Searched | None, _Searched | None]:
    """Return the search under the root and that under the table root, None for what the inventory does not list."""
    own = there = None
    if (prefix := inventory.key_prefix(lake.root)) is not None:
        reached = chain(*mark.catalog.paths, mark.tables.files)
        own = _Searched(lake.storage, mark, Sought.beyond(prefix, reached))
    if mark.table_root is not None and (prefix := inventory.key_prefix(mark.table_root.root)) is not None:
        files = mark.tables.there
        sought = Sought.beyond(prefix, files.paths, only_tables=True)
        there = _Searched(mark.table_root.storage, files, sought)
    return own, there


@dataclass(slots=True)
class _Searched:
    """The search under one root: what a mark reaches there, and what was found so far."""

    storage: Storage
    reached: Container[str]
    sought: Sought
    n_reached: int = 0
    unreached: dict[str, None] = field(default_factory=dict)

    def take(self, matches: InventoryMatches) -> None:
        """Add what is in a file. Digests tell most of what is reached, the mark also other names of files."""
        left = [path for path in matches.unreached if path not in self.reached]
        self.n_reached += matches.n_reached + len(matches.unreached) - len(left)
        self.unreached |= dict.fromkeys(left)

    def standing(self, executor: Executor, prefixes: Sequence[str] = ()) -> Iterator[FileInfo]:
        """Yield what stands of what was found, all files of tables whose owner file may go, and those of prefixes."""
        for prefix in prefixes:
            yield from self.storage.list(prefix)
        ids = ((path, table_id) for path in self.unreached if (table_id := table_id_in(path)) is not None)
        going = sorted({table_id for path, table_id in ids if path == owner_path(table_id)})
        yield from list_folders(self.storage, executor, [f"{TABLES_PREFIX}{table_id}/" for table_id in going])
        known = frozenset(going)
        asked = [path for path in self.unreached if table_id_in(path) not in known]
        for info in executor.map(Standing(self.storage), asked):
            if info is not None:
                yield info


@dataclass(frozen=True, slots=True)
class Standing:
    """Work: asks whether files stand, by their paths."""

    weight: ClassVar[Weight] = Weight.ANSWER

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """The one that is asked."""
        return (self.storage,)

    def __call__(self, paths: Sequence[str]) -> list[FileInfo | None]:
        """Return size and time of each file, None where a listing would tell none. Raises StorageError."""
        return run_parallel(in_one_round(self._seen), paths, self.storage.concurrency)

    def _seen(self, path: str) -> FileInfo | None:
        try:
            found = self.storage.stat(path)
        except (FileMissingError, InvalidLocationError):  # the latter of names that are too long for a file
            return None
        # A link would give another name to a file that is needed.
        return None if self.storage.is_linked(path) else found
