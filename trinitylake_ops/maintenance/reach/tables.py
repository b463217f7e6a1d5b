"""The tables of a version with their definitions, read many at once: for all that looks through tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.nodes.keys import ObjectName
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.files.reach import files_of
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.names import resolve_table
from trinitylake_ops.versions.snapshot import Snapshot

_BATCH = 256
T = TypeVar("T")


def tables_of(base: Snapshot, only: Sequence[str] | None = None) -> list[tuple[ObjectName, str]]:
    """Return all tables of a version, or those that are named, with the locations of their definitions.

    ``only`` names tables as ``namespace.table``. Raises TableNotFoundError, StorageError.
    """
    if only is None:
        named = ((base.keys.decode(key), location) for key, location in scan(base.files.nodes, base.root))
        return [(name, location) for name, location in named if name is not None and name.table is not None]
    chosen = dict.fromkeys(ObjectName(*resolve_table(text, base)) for text in only)
    return [(name, base.entry(base.keys.table_key(name.namespace, name.table or "")) or "") for name in chosen]


def defined(
    base: Snapshot, tables: Sequence[tuple[ObjectName, str]]
) -> Iterator[list[tuple[ObjectName, str, TableDef]]]:
    """Yield tables in order with their definitions, as many at a time as are read together. Raises StorageError."""
    for batch in in_batches(tables):
        definitions = base.files.definitions.tables([location for _, location in batch])
        yield [(name, location, found) for (name, location), found in zip(batch, definitions, strict=True)]


def in_batches(items: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield items in order, as many at a time as are read together."""
    for start in range(0, len(items), _BATCH):
        yield items[start : start + _BATCH]


def check_table_files(version: int, io: StorageFileIO, definition: TableDef) -> None:
    """Raise FileMissingError when a file that a managed Iceberg table needs is gone.

    One listing tells; only files beyond the lakehouse's root, under another ``table_root``, take a request each.
    """
    is_ours = definition.is_managed and definition.is_iceberg
    if not is_ours or METADATA_LOCATION not in definition.format_properties:
        return
    storage = io.storage
    there = {info.path for info in storage.list(table_prefix(definition.id))}
    try:
        live = [file for file in files_of(definition, io) if file.live]
    except FileMissingError as error:
        path = (error.path or "").removeprefix(storage.root)
        raise cannot_go_back(version, "a file of a table", path) from error
    unlisted = [file for file in live if file.location not in there]
    sizes_bytes = run_parallel(io.size_bytes, [file.location for file in unlisted], storage.concurrency)
    for file, size_bytes in zip(unlisted, sizes_bytes, strict=True):
        if size_bytes is None:
            raise cannot_go_back(version, f"a {file.kind} file of a table", file.location)


def cannot_go_back(version: int, what: str, path: str | None) -> FileMissingError:
    """Return the error that something which a version needs is missing."""
    return FileMissingError(
        f"cannot go back to version {version}: {what} it needs is missing; nothing was changed", path=path
    )
