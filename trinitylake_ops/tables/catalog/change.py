"""One change of a catalog's target, with failures raised in pyiceberg's terms."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from pyiceberg.exceptions import (
    CommitFailedException,
    CommitStateUnknownException,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops import errors
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import OWNER_NAME, is_table_metadata_path, owner_path
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.tables.catalog.target import CatalogTarget
from trinitylake_ops.tables.files.metadata import write_metadata
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import managed_table_id
from trinitylake_ops.tables.ownership import claim_location, owner_file
from trinitylake_ops.transaction.transaction import Transaction

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableChange:
    """A change in progress: its transaction, and the files, as URIs, that were written for it.

    If the end of the change is its commit, ``added`` holds the files, by path, that the commit itself writes.
    """

    writer: Transaction
    io: StorageFileIO
    is_commit: bool
    written: list[str] = field(default_factory=list)
    added: dict[str, bytes] = field(default_factory=dict)

    def require_namespace(self, namespace: str) -> None:
        """Raise NoSuchNamespaceError when there is none of that name."""
        if not self.writer.has_namespace(namespace):
            raise NoSuchNamespaceError(f"Namespace does not exist: {namespace}")

    def write_metadata(self, table: Table, before: TableMetadata | None = None) -> None:
        """Write a table's metadata file, which no version names yet, now or with the commit.

        Args:
            table: The table with its new metadata.
            before: Its metadata so far.

        Raises:
            MetadataTooLargeError: If a server could not read the new metadata.
            StorageError: If the file cannot be written.
        """
        uri = table.metadata_location
        output = self.io.new_output(uri, self._add if self.is_commit else None)
        if not output.is_added:
            self.written.append(uri)
        write_metadata(table.metadata, output, before)

    def write_new_table(self, table: Table, lakehouse: LakehouseDef) -> None:
        """Write the first metadata file of a table and, in the same round, the owner file of its folder."""

        def claim() -> None:
            path = claim_location(self.io.storage, table.metadata.location, lakehouse)
            if path is not None:
                self.written.append(to_uri(self.io.root, path))

        table_id = managed_table_id(table.metadata.location, self.io.root)
        if self.is_commit and table_id is not None:
            self._add(owner_path(table_id), owner_file(lakehouse))
            self.write_metadata(table)
            return
        requests: list[Callable[[], None]] = [claim, lambda: self.write_metadata(table)]
        run_parallel(in_one_round(lambda request: request()), requests, self.io.storage.concurrency)

    def _add(self, path: str, data: bytes) -> None:
        self.writer.add_file(path, data)
        self.added[path] = data

    def delete_written(self) -> None:
        """Delete these files again, best effort: the change certainly did not take effect."""
        # the owner file is deleted last
        for uri in sorted(self.written, key=lambda uri: uri.endswith(f"/{OWNER_NAME}")):
            try:
                self.io.delete(uri)
            except errors.StorageError as error:
                logger.warning("could not delete %s, which no version names: %s", uri, error)


@contextmanager
def changing(
    target: CatalogTarget, io: StorageFileIO, what: str, files: StorageFileIO | None = None
) -> Iterator[TableChange]:
    """Change a target in one step. ``what`` is the commit's message.

    ``files`` writes the new files of the change, which may be on their way. They stand before anything names them.
    Where the change certainly fails for good, they are deleted, best effort.

    Raises pyiceberg's exceptions for an object that is missing, exists, or lost a race. Other exceptions pass as they
    are.
    """
    change: TableChange | None = None
    try:
        with target.change(what) as writer:
            change = TableChange(writer, io, target.commits_changes)
            yield change
            if files is not None:
                files.settle()
        if files is not None:
            files.close_change()
        for path, data in change.added.items():
            if is_table_metadata_path(path):
                io.keep(path, data)
    except errors.CommitOutcomeUnknownError as error:
        raise CommitStateUnknownException(str(error)) from error
    except (errors.ConflictError, errors.NamespaceNotFoundError, errors.TableNotFoundError) as error:
        if change is not None:
            change.delete_written()
        raise _in_terms_of_pyiceberg(error) from error
    except errors.TrinityLakeError as error:
        if files is not None:
            files.abandon(error)
        raise


def _in_terms_of_pyiceberg(error: errors.TrinityLakeError) -> Exception:
    if isinstance(error, errors.NamespaceNotEmptyError):
        return NamespaceNotEmptyError(str(error))
    if isinstance(error, errors.ObjectExistsError):
        return TableAlreadyExistsError(str(error))
    if isinstance(error, errors.NamespaceNotFoundError):
        return NoSuchNamespaceError(str(error))
    if isinstance(error, errors.TableNotFoundError):
        return NoSuchTableError(str(error))
    return CommitFailedException(str(error))
