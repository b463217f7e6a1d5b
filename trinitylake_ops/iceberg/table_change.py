"""The target of a catalog, single changes to the target, and the registration of tables.

* LatestTarget: the latest version; each change is a separate commit. * TransactionTarget: an open transaction, which
changes join and its owner commits. * SnapshotTarget: one version, read-only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

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
from trinitylake_ops.access.allowed_roots import AllowedRoots, NamedRoots, root_of_table_file
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.file_names import OWNER_NAME, is_table_metadata_path, owner_path
from trinitylake_ops.format.locations import as_uri, normalize_root_uri, to_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.io.folder_owners import ROOT, storage_options_of
from trinitylake_ops.iceberg.managed import (
    EXTERNAL,
    MANAGED,
    claim_location,
    is_owner,
    managed_table_id,
    metadata_uri,
    owner_file,
    table_definition,
)
from trinitylake_ops.iceberg.metadata import read_table_metadata, write_metadata
from trinitylake_ops.iceberg.metadata_rules import check_case
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.storage.registry import roots_nest
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.versions.snapshot import CatalogReader, Snapshot

VERSION = "version"
TIMESTAMP = "timestamp"


_MAX_MESSAGE_CHARS = 500  # maximum length of a commit message; names may be much longer


class CatalogTarget(Protocol):
    """The version or transaction that a catalog reads and writes."""

    @property
    def storage(self) -> Storage:
        """The lakehouse's storage, which is also used for table files."""

    @property
    def storage_options(self) -> StorageOptions:
        """Options for storage outside the lakehouse's root."""

    @property
    def names(self) -> NamedRoots:
        """The roots in the lakehouse's definitions."""

    @property
    def read_only(self) -> bool:
        """Whether ``change`` raises."""

    @property
    def commits_changes(self) -> bool:
        """Whether each ``change`` ends with its commit, so that no file of the change is read before the commit."""

    def reader(self) -> CatalogReader:
        """Return the current state."""

    def change(self, message: str) -> AbstractContextManager[Transaction]:
        """Return a context manager whose changes take effect together at its end. It raises the errors of a commit."""


class LatestTarget:
    """The latest version of a lakehouse. Each change is one commit."""

    read_only = False
    commits_changes = True

    def __init__(self, lake: Lakehouse):
        self._lake = lake
        self.storage = lake.storage
        self.storage_options = lake.storage_options
        self.names = lake.external_storages.names

    def reader(self) -> CatalogReader:
        return self._lake.snapshot()

    def change(self, message: str) -> AbstractContextManager[Transaction]:
        return self._lake.transaction(message=message[:_MAX_MESSAGE_CHARS])


class TransactionTarget:
    """An open transaction, which sees its own changes and commits all of them as one version."""

    read_only = False
    commits_changes = False

    def __init__(self, transaction: Transaction, storage_options: Mapping[str, str] | None = None):
        self._transaction = transaction
        self.storage = transaction.base.files.storage
        self.names = transaction.base.files.nodes.external_storages.names
        self.storage_options = StorageOptions(storage_options)

    def reader(self) -> CatalogReader:
        return self._transaction

    def change(self, message: str) -> AbstractContextManager[Transaction]:
        return nullcontext(self._transaction)


class SnapshotTarget:
    """One version of a lakehouse. Changes raise InvalidInputError."""

    read_only = True
    commits_changes = False

    def __init__(self, snapshot: Snapshot, storage_options: Mapping[str, str] | None = None):
        self._snapshot = snapshot
        self.storage = snapshot.files.storage
        self.names = snapshot.files.nodes.external_storages.names
        self.storage_options = StorageOptions(storage_options)

    def reader(self) -> CatalogReader:
        return self._snapshot

    def change(self, message: str) -> AbstractContextManager[Transaction]:
        raise InvalidInputError(
            f"cannot {message}: this catalog is read-only at version {self._snapshot.version};"
            " open it without 'version' and 'timestamp' to write"
        )


def target_of(properties: Mapping[str, str]) -> CatalogTarget:
    """Return the target that a catalog's properties select: ``root``, ``storage.*``, and ``version`` or ``timestamp``.

    Raises InvalidInputError, and the errors of ``Lakehouse.open`` and ``Lakehouse.snapshot``.
    """
    root = properties.get(ROOT)
    if not root:
        raise InvalidInputError(f"catalog property {ROOT!r} is missing: set it to the lakehouse's root URI")
    lake = Lakehouse.open(root, storage_options_of(properties))
    version, timestamp = properties.get(VERSION), properties.get(TIMESTAMP)
    if version is None and timestamp is None:
        return LatestTarget(lake)
    snapshot = lake.snapshot(version, None if timestamp is None else _version_or_time(timestamp))
    return SnapshotTarget(snapshot, lake.storage_options)


def _version_or_time(text: str) -> datetime | int:
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"timestamp {text!r} is not valid; use milliseconds since the epoch or ISO 8601, such as"
            " 2030-01-31T12:00:00+00:00"
        ) from None


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TableChange:
    """A change in progress: its transaction and the files that were written for it."""

    writer: Transaction
    io: StorageFileIO
    #: Whether the change is committed when it ends.
    is_commit: bool
    #: URIs of the files that were written.
    written: list[str] = field(default_factory=list)
    #: Contents, by path, of the files that the commit will write if ``is_commit`` is set.
    added: dict[str, bytes] = field(default_factory=dict)

    def require_namespace(self, namespace: str) -> None:
        """Raise NoSuchNamespaceError if the namespace does not exist."""
        if not self.writer.has_namespace(namespace):
            raise NoSuchNamespaceError(f"Namespace does not exist: {namespace}")

    def write_metadata(self, table: Table, before: TableMetadata | None = None) -> None:
        """Write a table's new metadata file, immediately or as part of the commit.

        Args:
            table: The table with its new metadata.
            before: The previous metadata.

        Raises:
            MetadataTooLargeError: A server could not read the new metadata.
            StorageError: The file cannot be written.
        """
        uri = table.metadata_location
        output = self.io.new_output(uri, self._add if self.is_commit else None)
        if not output.is_added:
            self.written.append(uri)
        write_metadata(table.metadata, output, before)

    def write_new_table(self, table: Table, lakehouse: LakehouseDef) -> None:
        """Write the first metadata file of a table and, in the same round trip, the owner file of its folder.

        Args:
            table: The new table.
            lakehouse: Definition of the lakehouse.

        Raises:
            StorageError: A file cannot be written.
        """

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
        run_parallel(in_one_round_trip(lambda request: request()), requests, self.io.storage.concurrency)

    def _add(self, path: str, data: bytes) -> None:
        self.writer.add_file(path, data)
        self.added[path] = data

    def delete_written(self) -> None:
        """Delete the written files, best-effort. Call this only if the change certainly did not take effect."""
        # Delete the owner file last.
        for uri in sorted(self.written, key=lambda uri: uri.endswith(f"/{OWNER_NAME}")):
            try:
                self.io.delete(uri)
            except errors.StorageError as error:
                logger.warning("could not delete unreferenced file %s: %s", uri, error)


@contextmanager
def changing(
    target: CatalogTarget, io: StorageFileIO, message: str, files: StorageFileIO | None = None
) -> Iterator[TableChange]:
    """Apply one change to a target. If the change certainly failed, its written files are deleted, best-effort.

    Args:
        target: The target.
        io: Writes metadata files.
        message: Message of the commit.
        files: Writes the new data files of the change in the background. All writes end before the commit.

    Raises:
        CommitStateUnknownException: Whether the commit succeeded is not known.
        CommitFailedException: The change conflicted with another commit.
        NoSuchNamespaceError, NoSuchTableError: An object does not exist.
        TableAlreadyExistsError, NamespaceNotEmptyError: An object exists.
        TrinityLakeError: The change failed for another reason.
    """
    change: TableChange | None = None
    try:
        with target.change(message) as writer:
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
        raise _to_pyiceberg_error(error) from error
    except errors.TrinityLakeError as error:
        if files is not None:
            files.abandon(error)
        raise


def _to_pyiceberg_error(error: errors.TrinityLakeError) -> Exception:
    if isinstance(error, errors.NamespaceNotEmptyError):
        return NamespaceNotEmptyError(str(error))
    if isinstance(error, errors.ObjectExistsError):
        return TableAlreadyExistsError(str(error))
    if isinstance(error, errors.NamespaceNotFoundError):
        return NoSuchNamespaceError(str(error))
    if isinstance(error, errors.TableNotFoundError):
        return NoSuchTableError(str(error))
    return CommitFailedException(str(error))


FEDERATED = "FEDERATED"


def registered_uri(root: str, metadata_location: str) -> str:
    """Return the URI of a metadata file.

    Args:
        root: Root of the lakehouse.
        metadata_location: A URI, an absolute path or a path under the root.

    Raises:
        InvalidLocationError: The location is not valid.
    """
    return to_uri(root, as_uri(metadata_location))


def registering_io(io: StorageFileIO, uris: Iterable[str]) -> StorageFileIO:
    """Return a read-only FileIO for metadata files at URIs that a caller passed, at any location.

    Files outside all known roots are read through their folder as root. If the storage cannot open that folder as a
    root, the root of their lakehouse is derived from the path.

    Args:
        io: File IO of the lakehouse.
        uris: URIs of the metadata files.

    Raises:
        InvalidLocationError: A URI is not valid.
        LocationNotAllowedError: No root can be derived for a file.
    """
    roots = {_root_of(uri, io.allowed_roots) for uri in uris if io.allowed_roots.known(uri) is None}
    opened_storages = [open_storage(root, io.storage_options.beyond(io.root, root)) for root in sorted(roots)]
    names = io.allowed_roots.names
    registration_io = StorageFileIO.on(
        io.storage, io.storage_options, read_only=True, others=opened_storages, names=names
    )
    registration_io.metadata_limit_bytes = io.metadata_limit_bytes
    return registration_io.strict()


def root_to_allow(definition: TableDef, io: StorageFileIO) -> str | None:
    """Return the root that must be allowed so that a registered table can be read later, or None if no root is needed.

    Args:
        definition: Definition of the registered table.
        io: A FileIO that may read its metadata file.

    Raises:
        CorruptFileError: The metadata file is corrupt.
        StorageError: The metadata file cannot be read.
    """
    uri = metadata_uri(definition, io.root)
    location = f"{as_uri(read_table_metadata(io, uri).location).rstrip('/')}/"
    needed = [location, *([] if uri.startswith(location) else [_folder_of(uri)])]
    allowed_roots = AllowedRoots(io.root, io.allowed_roots.names, io.allowed_roots.allowed)
    unknown_roots = [root for root in needed if allowed_roots.known(f"{root}metadata/file") is None]
    roots = [root if roots_nest(root) else root_of_table_file(f"{root}metadata/file") or root for root in unknown_roots]
    return " ".join(dict.fromkeys(roots)) or None


def _root_of(uri: str, allowed_roots: AllowedRoots) -> str:
    """Return the root through which a metadata file outside all known roots is read."""
    if roots_nest(uri):
        return normalize_root_uri(_folder_of(uri))
    return root_of_table_file(uri) or allowed_roots.strict().find(uri).root  # the error names the root to allow


def _folder_of(uri: str) -> str:
    return uri[: uri.rindex("/") + 1]


def registered_table(
    io: StorageFileIO, uri: str, lakehouse: LakehouseDef, table_type: str = EXTERNAL
) -> tuple[TableMetadata, TableDef]:
    """Read a table's metadata file and build the definition with which the table is registered.

    The definition has an empty id and the type EXTERNAL or FEDERATED, so no file of the table is ever deleted. A
    managed table of this lakehouse, for example a dropped one, becomes MANAGED again, with the id in its location.

    Args:
        io: Reads the metadata file.
        uri: URI of the metadata file.
        lakehouse: Definition of the lakehouse.
        table_type: EXTERNAL or FEDERATED.

    Raises:
        InvalidInputError: The table type is neither EXTERNAL nor FEDERATED.
        CorruptFileError: The file is not Iceberg metadata.
        FileMissingError: The file does not exist.
        StorageError: The file cannot be read.
        UnsupportedTypeError: A definition cannot store the schema.
        InvalidDefinitionError: The names of two columns differ only by case.
    """
    if table_type not in (EXTERNAL, FEDERATED):
        raise InvalidInputError(f"table type {table_type!r} cannot be registered; use {EXTERNAL} or {FEDERATED}")
    metadata = read_table_metadata(io, uri)
    table_id = managed_table_id(metadata.location, io.root)
    is_in_place = table_id is not None and uri.startswith(f"{metadata.location}/")
    if table_id is not None and is_in_place and is_owner(io.storage, table_id, lakehouse):
        return metadata, table_definition(metadata, uri, io.root, table_id=table_id, table_type=MANAGED)
    check_case([metadata.schema()], metadata.properties)
    return metadata, table_definition(metadata, uri, io.root, table_type=table_type)
