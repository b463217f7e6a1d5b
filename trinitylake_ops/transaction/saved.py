"""Transactions between processes: saved transactions, and definitions that other processes stage for them.

The file of a saved transaction belongs to no tree. It is deleted when the transaction is committed. Where that fails,
or no process resumes it, a removal of orphans deletes it.
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

_BATCH = 64


@dataclass(frozen=True, slots=True)
class StagedDefinition:
    """A table's definition that is written, but that no version holds. It travels between processes."""

    namespace: str
    table: str
    location: str


def stage_definition(snapshot: Snapshot, namespace: str, table: str, definition: TableDef) -> StagedDefinition:
    """Write a table's definition for a transaction of another process.

    Raises InvalidNameError, InvalidDefinitionError, StorageError.
    """
    snapshot.keys.table_key(namespace, table)
    if not definition.id:
        definition = replace(definition, id=str(uuid.uuid4()))
    path = new_table_path(namespace, table, snapshot.definition.file_path_max_size_bytes)
    table_prefix(definition.id)
    create_fresh(snapshot.files.storage, {path: validate_table_def(definition).to_bytes(path)})
    return StagedDefinition(namespace, table, path)


def check_staged(staged: Sequence[object], limit_bytes: int) -> None:
    """Raise InvalidInputError for an object not from ``stage_definition``, and for two of one table or file."""
    found = [one for one in staged if isinstance(one, StagedDefinition) and type(one.location) is str]
    if len(found) < len(staged):
        raise InvalidInputError("put_staged takes what stage_definition returned")
    for named in ({(one.namespace, one.table) for one in found}, {one.location for one in found}):
        if len(named) < len(found):
            raise InvalidInputError("two of the staged definitions are of one table, or one file; take one of them")
    for one in found:
        if not is_table_definition_path(one.location, one.namespace, one.table, limit_bytes):
            raise InvalidInputError(f"{one.location!r} was not staged for table {one.namespace}.{one.table}")


def read_staged(snapshot: Snapshot, staged: Sequence[StagedDefinition]) -> list[TableDef]:
    """Return the content of the files of staged definitions, for a transaction that began on ``snapshot``.

    The files are read in parallel. Raises InvalidInputError for a definition staged before that version was read.
    Raises InvalidDefinitionError, FileMissingError, CorruptFileError, StorageError.
    """
    storage, oldest_ms = snapshot.files.storage, snapshot.read_at_ms - CLOCK_MARGIN_MS

    def load(one: StagedDefinition) -> TableDef:
        if storage.stat(one.location).last_modified_ms < oldest_ms:
            raise InvalidInputError(
                f"table {one.namespace}.{one.table} was staged before this transaction began; its file may be"
                " removed as an orphan, stage it again"
            )
        storage.drop_cached(one.location)  # only the file's content counts
        definition = validate_table_def(TableDef.from_bytes(storage.read(one.location), one.location))
        table_prefix(definition.id)
        return definition

    return run_parallel(in_one_round_trip(load), staged, storage.concurrency)


def write_saved(storage: Storage, saved: SavedTransaction) -> None:
    """Save a transaction, in place of its former file. Raises StorageError."""
    path = saved_transaction_path(saved.id)
    storage.write(path, saved.to_bytes(path))


def read_saved(storage: Storage, transaction_id: str) -> SavedTransaction:
    """Return a saved transaction.

    Raises InvalidInputError, TransactionNotFoundError, CorruptFileError, StorageError.
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
        raise CorruptFileError(f"the file of transaction {known_id} holds another one", path=path)
    return saved


def checked_id(transaction_id: str) -> str:
    """Return the id of a transaction in its written form. Raises InvalidInputError for a text that is no id."""
    try:
        return str(uuid.UUID(transaction_id))
    except (ValueError, AttributeError, TypeError):
        raise InvalidInputError(
            f"{str(transaction_id)[:64]!r} is no id of a transaction: give the one that save() returned"
        ) from None


def delete_saved_transaction(storage: Storage, transaction_id: str) -> None:
    """Delete the file of a transaction that has ended, best effort."""
    path = saved_transaction_path(transaction_id)
    try:
        storage.delete(path)
    except StorageError as error:
        logger.warning("transaction %s has ended, but its file could not be deleted: %s", transaction_id, error)


class CommittedByOtherError(TrinityLakeError):
    """Another process resumed the same transaction and committed it, as ``committed_version``."""

    def __init__(self, message: str, *, committed_version: int):
        super().__init__(message, version=committed_version)
        self.committed_version = committed_version


def pinned_version(latest: Snapshot, pin_id: str) -> int:
    """Return the version that is pinned under an id, the same for all callers.

    The first caller pins the latest version. The pin is a saved transaction without changes. It keeps no version from
    expiring, and a removal of orphans deletes it. Raises InvalidInputError, CorruptFileError, AmbiguousWriteError,
    StorageError.
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
    create_settled(files.storage, saved_transaction_path(known_id), pin, is_ours=lambda found: found == pin)
    return read_saved(files.storage, known_id).base_version


def version_of(files: LakehouseFiles, transaction_id: str, after: int, latest: int) -> int | None:
    """Return the version above ``after``, up to ``latest``, that holds a transaction, None where none does.

    Raises VersionNotFoundError where a root that would tell is gone, StorageError.
    """
    return versions_of(files, (transaction_id,), after, latest).get(transaction_id)


def versions_of(files: LakehouseFiles, transaction_ids: Collection[str], after: int, latest: int) -> dict[str, int]:
    """Return the versions that hold transactions, by the ids of those that were committed.

    Args:
        files: The files of the lakehouse.
        transaction_ids: The ids of the transactions.
        after: The version above which the search begins.
        latest: The version with which it ends.

    Raises:
        VersionNotFoundError: A root is missing, so it is unknown whether a transaction was committed.
        StorageError: A root cannot be read.
    """
    wanted, versions = set(transaction_ids), dict[str, int]()
    for version, data in read_roots(files.roots, range(after + 1, latest + 1), _BATCH):
        path = files.roots.path(version)
        if data is None:
            raise VersionNotFoundError(
                f"the outcome of transaction {min(wanted)} is unknown: the root of version {version} was deleted;"
                " inspect the latest version and begin a new transaction",
                path=path,
                version=version,
            )
        members = decode_commit_info(decode_system_rows(data, path)).get("members")
        for transaction_id in wanted & {*map(str, members if isinstance(members, list) else ())}:
            versions[transaction_id] = version
            wanted.remove(transaction_id)
        if not wanted:
            break
    return versions
