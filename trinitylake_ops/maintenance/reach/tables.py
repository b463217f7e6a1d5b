"""The tables of a version with their definitions, read many at once: for all that looks through tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.nodes.keys import ObjectName
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
