"""The target of a catalog: what it reads, and where its changes go.

* LatestTarget: every change is a lakehouse commit of its own.
* TransactionTarget: changes join an open transaction, which its owner commits.
* SnapshotTarget: one version, read-only.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Protocol

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.places import NamedRoots
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.tables.io.io_properties import ROOT, storage_options_of
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
        self.names = lake.elsewhere.names

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
        self.names = transaction.base.files.nodes.elsewhere.names
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
        self.names = snapshot.files.nodes.elsewhere.names
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
    snapshot = lake.snapshot(version, None if timestamp is None else _moment(timestamp))
    return SnapshotTarget(snapshot, lake.storage_options)


def _moment(text: str) -> datetime | int:
    if text.isascii() and text.isdigit():
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"timestamp {text!r} is neither milliseconds nor ISO 8601, such as 2030-01-31T12:00:00+00:00"
        ) from None
