"""Commits that point tables to metadata that was written anew for them: trimming, relocating."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from trinitylake_ops.errors import CommitConflictError, CommitOutcomeUnknownError, TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.transaction import Transaction

logger = logging.getLogger(__name__)


class PlannedTable(Protocol):
    """A table as a plan found it."""

    @property
    def namespace(self) -> str:
        """Its namespace."""

    @property
    def table(self) -> str:
        """Its name there."""

    @property
    def definition_location(self) -> str:
        """The location of its definition."""


T = TypeVar("T", bound=PlannedTable)


@contextmanager
def discarded_on_failure(io: StorageFileIO) -> Iterator[list[str]]:
    """Yield a list for the locations of written files. These are deleted, best effort, when nothing was committed."""
    written: list[str] = []
    try:
        yield written
    except CommitOutcomeUnknownError:
        raise
    except TrinityLakeError:
        # Typed errors say that nothing was committed, so no version names these files.
        discard(io.storage, [location for location in written if not is_uri(location)])
        for uri in filter(is_uri, written):
            try:
                io.delete(uri)
            except TrinityLakeError as error:
                logger.warning("could not delete %s, which no version names: %s", uri, error)
        raise


def check_tables(txn: Transaction, tables: Sequence[PlannedTable], planned: str, remedy: str = "") -> None:
    """Raise CommitConflictError when a table is not as in the plan, which ``planned`` names.

    ``remedy`` ends the message.
    """
    changed = [
        f"{one.namespace}.{one.table}"
        for one in tables
        if txn.base.entry(txn.keys.table_key(one.namespace, one.table)) != one.definition_location
    ]
    if changed:
        raise CommitConflictError(
            f"{len(changed)} tables changed since the {planned} was planned, such as {changed[0]}{remedy}",
            conflicts=tuple(f"table {name}: changed since the plan" for name in changed),
            latest_version=txn.base.version,
        )


def alter_tables(txn: Transaction, storage: Storage, tables: Sequence[T], write: Callable[[T], TableDef]) -> None:
    """Write the metadata of tables in parallel and point to it. Raises the errors of ``write``."""
    definitions = run_parallel(in_one_round_trip(write), tables, storage.concurrency)
    for one, definition in zip(tables, definitions, strict=True):
        txn.alter_table(one.namespace, one.table, definition)
