"""Transactions across processes: saved transactions, and definitions that other processes stage for a transaction.

The file of a saved transaction belongs to no tree. It is deleted when the transaction is committed. If that fails, or
if no process resumes the transaction, orphan removal deletes it.
"""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidInputError,
    StorageError,
    TransactionNotFoundError,
    TrinityLakeError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import IsolationLevel, SavedTransaction, TableDef
from trinitylake_ops.format.file_names import (
    is_table_definition_path,
    new_table_path,
    saved_transaction_path,
    table_prefix,
)
from trinitylake_ops.format.keys import COMMIT_ID, decode_commit_info
from trinitylake_ops.format.limits import validate_table_def
from trinitylake_ops.format.node_file import decode_system_rows
from trinitylake_ops.storage.conditional_create import create_fresh, create_settled
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS, Storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.versions.roots import read_roots
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

logger = logging.getLogger(__name__)

_BATCH = 64  # number of roots that are read in parallel


@dataclass(frozen=True, slots=True)
class StagedDefinition:
    """A table definition that was written but does not belong to a version yet. It can be sent to other processes."""

    #: The namespace of the table.
    namespace: str
    #: The name of the table.
    table: str
    #: The path of the definition file.
    location: str


def stage_definition(snapshot: Snapshot, namespace: str, table: str, definition: TableDef) -> StagedDefinition:
    """Write a table definition for a transaction of another process.

    Args:
        snapshot: The latest version.
        namespace: The namespace of the table.
        table: The name of the table.
        definition: The definition. An empty id is filled in.

    Raises:
        InvalidNameError: A name cannot be stored.
        InvalidDefinitionError: The definition cannot be stored.
        StorageError: The file cannot be written.
    """
    snapshot.keys.table_key(namespace, table)
    if not definition.id:
        definition = replace(definition, id=str(uuid.uuid4()))
    path = new_table_path(namespace, table, snapshot.definition.file_path_max_size_bytes)
    table_prefix(definition.id)
    create_fresh(snapshot.files.storage, {path: validate_table_def(definition).to_bytes(path)})
    return StagedDefinition(namespace, table, path)


def check_staged(staged: Sequence[object], limit_bytes: int) -> None:
    """Check staged definitions that another process sent.

    Args:
        staged: The definitions.
        limit_bytes: The maximum length of a path.

    Raises:
        InvalidInputError: An object was not returned by ``stage_definition``, or two definitions have the same table or
            file.
    """
    definitions = [item for item in staged if isinstance(item, StagedDefinition) and type(item.location) is str]
    if len(definitions) < len(staged):
        raise InvalidInputError("put_staged only accepts the return values of stage_definition")
    for unique in ({(item.namespace, item.table) for item in definitions}, {item.location for item in definitions}):
        if len(unique) < len(definitions):
            raise InvalidInputError("two staged definitions have the same table or file; pass only one of them")
    for item in definitions:
        if not is_table_definition_path(item.location, item.namespace, item.table, limit_bytes):
            raise InvalidInputError(f"{item.location!r} was not staged for table {item.namespace}.{item.table}")


def read_staged(snapshot: Snapshot, staged: Sequence[StagedDefinition]) -> list[TableDef]:
    """Read the files of staged definitions in parallel, for a transaction that began on ``snapshot``.

    Args:
        snapshot: The base of the transaction.
        staged: The definitions.

    Raises:
        InvalidInputError: A definition was staged before the base was read.
        InvalidDefinitionError: A definition cannot be stored.
        CorruptFileError: A file cannot be decoded.
        StorageError: A file is missing or cannot be read.
    """
    storage, oldest_ms = snapshot.files.storage, snapshot.read_at_ms - CLOCK_MARGIN_MS

    def load(item: StagedDefinition) -> TableDef:
        if storage.stat(item.location).last_modified_ms < oldest_ms:
            raise InvalidInputError(
                f"table {item.namespace}.{item.table} was staged before this transaction began, and its file may be"
                " removed as an orphan; stage it again"
            )
        storage.drop_cached(item.location)  # the file itself must be readable
        definition = validate_table_def(TableDef.from_bytes(storage.read(item.location), item.location))
        table_prefix(definition.id)
        return definition

    return run_parallel(in_one_round_trip(load), staged, storage.concurrency)


def write_saved(storage: Storage, saved: SavedTransaction) -> None:
    """Write the file of a saved transaction, replacing an earlier file. Raises StorageError."""
    path = saved_transaction_path(saved.id)
    storage.write(path, saved.to_bytes(path))


def read_saved(storage: Storage, transaction_id: str) -> SavedTransaction:
    """Read a saved transaction.

    Args:
        storage: The storage of the lakehouse.
        transaction_id: The id of the transaction.

    Raises:
        InvalidInputError: The id is not a UUID. TransactionNotFoundError: There is no such transaction.
        CorruptFileError: Its file cannot be decoded.
        StorageError: Its file cannot be read.
    """
    known_id = checked_id(transaction_id)
    path = saved_transaction_path(known_id)
    try:
        saved = SavedTransaction.from_bytes(storage.read(path), path)
    except FileMissingError:
        raise TransactionNotFoundError(
            f"there is no saved transaction {known_id}: it was committed, dropped, or never saved", path=path
        ) from None
    if saved.id != known_id:
        raise CorruptFileError(f"the file of transaction {known_id} contains transaction {saved.id}", path=path)
    return saved


def checked_id(transaction_id: str) -> str:
    """Return the id of a transaction in canonical form. Raises InvalidInputError if it is not a UUID."""
    try:
        return str(uuid.UUID(transaction_id))
    except (ValueError, AttributeError, TypeError):
        raise InvalidInputError(
            f"invalid transaction id {str(transaction_id)[:64]!r}; pass the id that save() returned"
        ) from None


def delete_saved_transaction(storage: Storage, transaction_id: str) -> None:
    """Delete the file of a transaction that has ended, best effort."""
    path = saved_transaction_path(transaction_id)
    try:
        storage.delete(path)
    except StorageError as error:
        logger.warning("transaction %s has ended, but its file could not be deleted: %s", transaction_id, error)


class CommittedByOtherError(TrinityLakeError):
    """Another process has resumed the same transaction and committed it as ``committed_version``."""

    def __init__(self, message: str, *, committed_version: int):
        super().__init__(message, version=committed_version)
        self.committed_version = committed_version


def pinned_version(latest: Snapshot, pin_id: str) -> int:
    """Return the version that is pinned under an id, which is the same for all callers.

    The first caller pins the latest version. The pin is a saved transaction without changes. It does not protect the
    version from expiration, and orphan removal deletes it.

    Args:
        latest: The latest version.
        pin_id: A UUID.

    Raises:
        InvalidInputError: The id is not a UUID. CorruptFileError: The pin cannot be decoded.
        StorageError: The pin cannot be read or written.
    """
    files, known_id = latest.files, checked_id(pin_id)
    with contextlib.suppress(TransactionNotFoundError):
        return read_saved(files.storage, known_id).base_version
    pin = SavedTransaction(
        id=known_id,
        base_version=latest.version,
        base_commit_id=latest.root.system.get(COMMIT_ID, ""),
        begun_at_millis=latest.read_at_ms,
        isolation_level=IsolationLevel.SNAPSHOT,
        operation="pin",
    ).to_bytes()
    create_settled(files.storage, saved_transaction_path(known_id), pin, is_ours=lambda data: data == pin)
    return read_saved(files.storage, known_id).base_version


def version_of(files: LakehouseFiles, transaction_id: str, after: int, latest: int) -> int | None:
    """Return the version that contains a transaction, or None if no version does.

    Args:
        files: The files of the lakehouse.
        transaction_id: The id of the transaction.
        after: The version after which the search starts.
        latest: The last version to search.

    Raises:
        VersionNotFoundError: A root was deleted, so it is unknown whether the transaction was committed.
        StorageError: A root cannot be read.
    """
    return versions_of(files, (transaction_id,), after, latest).get(transaction_id)


def versions_of(files: LakehouseFiles, transaction_ids: Collection[str], after: int, latest: int) -> dict[str, int]:
    """Return the versions that contain transactions, by transaction id. Transactions without a version are left out.

    Args:
        files: The files of the lakehouse.
        transaction_ids: The ids of the transactions.
        after: The version after which the search starts.
        latest: The last version to search.

    Raises:
        VersionNotFoundError: A root was deleted, so it is unknown whether a transaction was committed.
        StorageError: A root cannot be read.
    """
    remaining, versions = set(transaction_ids), dict[str, int]()
    for version, data in read_roots(files.roots, range(after + 1, latest + 1), _BATCH):
        path = files.roots.path(version)
        if data is None:
            raise VersionNotFoundError(
                f"the outcome of transaction {min(remaining)} is unknown: the root of version {version} was deleted;"
                " inspect the latest version and begin a new transaction",
                path=path,
                version=version,
            )
        members = decode_commit_info(decode_system_rows(data, path)).get("members")
        for transaction_id in remaining & {*map(str, members if isinstance(members, list) else ())}:
            versions[transaction_id] = version
            remaining.remove(transaction_id)
        if not remaining:
            break
    return versions
