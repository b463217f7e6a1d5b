"""The target of a catalog, one change of it, and tables that it registers.

* LatestTarget: every change is a lakehouse commit of its own.
* TransactionTarget: changes join an open transaction, which its owner commits.
* SnapshotTarget: one version, read-only.
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


_LONGEST_MESSAGE_CHARS = 500  # characters of a commit's message; names may be far longer


class CatalogTarget(Protocol):
    """Where a catalog reads and writes."""

    @property
    def storage(self) -> Storage:
        """The lakehouse's storage; table files pass it too."""

    @property
    def storage_options(self) -> StorageOptions:
        """Options for the storages of files beyond the lakehouse's root."""

    @property
    def names(self) -> NamedRoots:
        """The roots that the lakehouse's definitions name."""

    @property
    def read_only(self) -> bool:
        """Whether ``change`` is refused."""

    @property
    def commits_changes(self) -> bool:
        """Whether the end of each ``change`` is its commit, and nothing reads its files before."""

    def reader(self) -> CatalogReader:
        """Return the current state."""

    def change(self, message: str) -> AbstractContextManager[Transaction]:
        """Return a block whose changes take effect together at its end. Raises what a commit raises."""


class LatestTarget:
    """The latest version of a lakehouse; each change is one commit."""

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
        return self._lake.transaction(message=message[:_LONGEST_MESSAGE_CHARS])


class TransactionTarget:
    """An open transaction, which sees its own changes and commits them all as one version."""

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
    """One version of a lakehouse; changes raise InvalidInputError."""

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
            f"cannot {message}: this catalog reads version {self._snapshot.version} only;"
            " open it without 'version' and 'timestamp' to write"
        )


def target_of(properties: Mapping[str, str]) -> CatalogTarget:
    """Return the target that a catalog's properties name: ``root``, ``storage.*``, and ``version`` or ``timestamp``.

    Raises InvalidInputError, and what ``Lakehouse.open`` and ``Lakehouse.snapshot`` raise.
    """
    root = properties.get(ROOT)
    if not root:
        raise InvalidInputError(f"the catalog needs the property {ROOT!r}: the lakehouse's root URI")
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
            f"timestamp {text!r} is neither milliseconds nor ISO 8601, such as 2030-01-31T12:00:00+00:00"
        ) from None


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
        run_parallel(in_one_round_trip(lambda request: request()), requests, self.io.storage.concurrency)

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


FEDERATED = "FEDERATED"


def registered_uri(root: str, metadata_location: str) -> str:
    """Return the URI of a metadata file given as a URI, an absolute path or a path under the root.

    Raises InvalidLocationError.
    """
    return to_uri(root, as_uri(metadata_location))


def registering_io(io: StorageFileIO, uris: Iterable[str]) -> StorageFileIO:
    """Return a FileIO for metadata files that a caller named by URIs, wherever they are.

    Those under no root that is known are read by their folder. Where a storage does not show them there, the root is
    that of the lakehouse, which the file's path tells. Raises InvalidLocationError, LocationNotAllowedError where it
    does not.
    """
    roots = {_root_of(uri, io.allowed_roots) for uri in uris if io.allowed_roots.known(uri) is None}
    opened = [open_storage(root, io.storage_options.beyond(io.root, root)) for root in sorted(roots)]
    names = io.allowed_roots.names
    opening = StorageFileIO.on(io.storage, io.storage_options, read_only=True, others=opened, names=names)
    opening.metadata_limit_bytes = io.metadata_limit_bytes
    return opening.strict()


def root_to_allow(definition: TableDef, io: StorageFileIO) -> str | None:
    """Return the root that must be allowed so that a registered table can be read later. None if it can be read now.

    ``io`` may read its metadata file. Raises CorruptFileError, StorageError.
    """
    uri = metadata_uri(definition, io.root)
    location = f"{as_uri(read_table_metadata(io, uri).location).rstrip('/')}/"
    needed = [location, *([] if uri.startswith(location) else [_folder_of(uri)])]
    plain = AllowedRoots(io.root, io.allowed_roots.names, io.allowed_roots.allowed)
    far = [root for root in needed if plain.known(f"{root}metadata/file") is None]
    whole = [root if roots_nest(root) else root_of_table_file(f"{root}metadata/file") or root for root in far]
    return " ".join(dict.fromkeys(whole)) or None


def _root_of(uri: str, places: AllowedRoots) -> str:
    """Return the root through which a metadata file under no known root is read."""
    if roots_nest(uri):
        return normalize_root_uri(_folder_of(uri))
    return root_of_table_file(uri) or places.strict().find(uri).root  # which says what to allow


def _folder_of(uri: str) -> str:
    return uri[: uri.rindex("/") + 1]


def registered_table(
    io: StorageFileIO, uri: str, lakehouse: LakehouseDef, table_type: str = EXTERNAL
) -> tuple[TableMetadata, TableDef]:
    """Read a table's metadata file, a URI, and return it with the definition that it is registered by.

    The definition is of ``table_type``, EXTERNAL or FEDERATED, so no file of the table is ever deleted. Its id is
    empty. A managed table of this lakehouse, for example a dropped one, is MANAGED again, under the id in its location.
    Raises InvalidInputError for another type, CorruptFileError for a file that is no Iceberg metadata, FileMissingError
    and other StorageErrors, UnsupportedTypeError, InvalidDefinitionError for columns that differ by case only.
    """
    if table_type not in (EXTERNAL, FEDERATED):
        raise InvalidInputError(f"a table is registered as {EXTERNAL} or {FEDERATED}, not as {table_type!r}")
    metadata = read_table_metadata(io, uri)
    table_id = managed_table_id(metadata.location, io.root)
    is_in_place = table_id is not None and uri.startswith(f"{metadata.location}/")
    if table_id is not None and is_in_place and is_owner(io.storage, table_id, lakehouse):
        return metadata, table_definition(metadata, uri, io.root, table_id=table_id, table_type=MANAGED)
    check_case([metadata.schema()], metadata.properties)
    return metadata, table_definition(metadata, uri, io.root, table_type=table_type)
