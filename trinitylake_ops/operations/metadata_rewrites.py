"""Commits that point tables to rewritten metadata, used by trim and relocate."""

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
    """A table in a plan."""

    @property
    def namespace(self) -> str:
        """The namespace of the table."""

    @property
    def table(self) -> str:
        """The name of the table in its namespace."""

    @property
    def definition_location(self) -> str:
        """The location of the definition that the plan was made from."""


T = TypeVar("T", bound=PlannedTable)


@contextmanager
def discarded_on_failure(io: StorageFileIO) -> Iterator[list[str]]:
    """Yield a list for the locations of written files, and try to delete these files if nothing was committed."""
    written: list[str] = []
    try:
        yield written
    except CommitOutcomeUnknownError:
        raise
    except TrinityLakeError:
        # A typed error means that nothing was committed, so no version refers to these files.
        discard(io.storage, [location for location in written if not is_uri(location)])
        for uri in filter(is_uri, written):
            try:
                io.delete(uri)
            except TrinityLakeError as error:
                logger.warning("could not delete %s, which no version names: %s", uri, error)
        raise


def check_tables(txn: Transaction, tables: Sequence[PlannedTable], planned: str, remedy: str = "") -> None:
    """Check that tables have not changed since the plan.

    Args:
        txn: The transaction.
        tables: The tables of the plan.
        planned: The name of the operation, for the message.
        remedy: What the user can do, for the end of the message.

    Raises:
        CommitConflictError: A table has changed.
    """
    changed = [
        f"{table.namespace}.{table.table}"
        for table in tables
        if txn.base.entry(txn.keys.table_key(table.namespace, table.table)) != table.definition_location
    ]
    if changed:
        raise CommitConflictError(
            f"{len(changed)} tables changed since the {planned} was planned, such as {changed[0]}{remedy}",
            conflicts=tuple(f"table {name}: changed since the plan" for name in changed),
            latest_version=txn.base.version,
        )


def alter_tables(txn: Transaction, storage: Storage, tables: Sequence[T], write: Callable[[T], TableDef]) -> None:
    """Write new metadata for tables in parallel, and point the tables to it.

    Args:
        txn: The transaction.
        storage: The storage of the lakehouse.
        tables: The tables.
        write: Writes the metadata of a table, and returns its new definition. Its errors are raised.
    """
    definitions = run_parallel(in_one_round_trip(write), tables, storage.concurrency)
    for table, definition in zip(tables, definitions, strict=True):
        txn.alter_table(table.namespace, table.table, definition)
