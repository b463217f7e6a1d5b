"""Executors send the per-file requests of an operation, from threads of this process or from Spark tasks.

Decisions stay in the process of the operation: plans, leases, marks and commits. Requests that read, copy, check or
delete many files go through an :class:`Executor`, as :class:`Work` on batches of items. All executors run the same
work, so plans and reports do not depend on the executor (docs/spark/cluster.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from trinitylake_ops.errors import StorageError
from trinitylake_ops.operations.budget import LimitedStorage, Spending
from trinitylake_ops.storage import FileInfo, Storage

A_contra = TypeVar("A_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
T = TypeVar("T")


class Weight(Enum):
    """The kind of a work item, which determines how many items form a batch."""

    ANSWER = auto()  # a read of a small file, or an existence check
    DEFINITION = auto()  # a definition, and the metadata of its table
    ROOT = auto()
    NODE = auto()
    TABLE = auto()  # all metadata files, manifest lists and manifests of a table
    FILE = auto()  # a whole file of any size; the work itself bounds the bytes in flight
    FOLDER = auto()  # the listing of a prefix
    INVENTORY = auto()  # one file of an inventory


class Work(Protocol[A_contra, T_co]):
    """Work on many items, for example to read, copy, check or list files.

    Work must be picklable together with its storages, and must be safe to run twice or late. It uses the threads of the
    storage's ``*_many`` methods. An exception ends the operation.
    """

    @property
    def weight(self) -> Weight:
        """The kind of each item."""

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that the work uses, whose requests are counted."""

    def __call__(self, items: Sequence[A_contra], /) -> Sequence[T_co]:
        """Return the result of each item of a batch, in order."""


class Guard(Protocol):
    """An additional, picklable condition for deletions: whether files at a location may be deleted at all."""

    @property
    def storage(self) -> Storage:
        """The storage that the check uses."""

    def check(self) -> None:
        """Raise MaintenanceBlockedError if nothing may be deleted any more. Raises StorageError."""


@dataclass(frozen=True, slots=True)
class DeletionFence:
    """Conditions that were satisfied just before a batch of deletions, and must stay satisfied while it is sent.

    No request may be sent once a newer lease or the version at ``next_root`` exists, the lease has expired, or the
    guard raises an error.
    """

    #: The storage of the lakehouse. The files to delete may be on another storage.
    storage: Storage
    #: The number of the lease that the operation holds.
    lease: int
    #: When the lease expires, by the clock of ``storage``, in milliseconds since the epoch.
    until_ms: int
    #: The path of the root of the version that follows the marked versions.
    next_root: str
    guard: Guard | None = None


@dataclass(frozen=True, slots=True)
class DeleteOutcome:
    """The outcome of a deletion: failures by path, and ``held_back`` files, which may still exist."""

    failures: Mapping[str, StorageError]
    held_back: frozenset[str] = field(default_factory=frozenset)


class Listing(Protocol):
    """Files to list, all at once or in parts."""

    def whole(self) -> Iterator[FileInfo]:
        """Yield all files, possibly with additional files. Raises StorageError."""

    def parts(self) -> tuple[Work[Any, Sequence[FileInfo]], Sequence[Any]]:
        """Return the work that lists one part, and the parts to list."""


class Executor(Protocol):
    """Runs work on many items. Callers do not depend on the kind of executor."""

    @property
    def window(self) -> int:
        """The number of items to collect before work on them starts."""

    def map(self, work: Work[A, T], items: Sequence[A]) -> Iterator[T]:
        """Run work on items, in batches by weight.

        Args:
            work: The work. Its exceptions are raised.
            items: The items.

        Yields:
            The result of each item, in order.
        """

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield the listed files in any order. Raises StorageError."""

    def prefetch(self, read: Callable[[], None]) -> None:
        """Read files ahead if this is cheaper than reading them later; otherwise do nothing."""

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return a storage that enforces the budget of a run.

        Args:
            storage: The storage.
            spending: The budget and its usage.

        Raises:
            InvalidInputError: The executor cannot enforce a budget.
        """

    def batches_between_checks(self, storage: Storage) -> int:
        """Return how many delete requests are sent between two checks of the fence."""

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        """Delete files while the fence allows it, and wait for all requests.

        Args:
            storage: The storage of the files.
            paths: The files to delete.
            fence: The conditions of the deletion; None if there are none.

        Returns:
            The failures, and the files for which no request was sent.
        """


#: The maximum batch sizes by weight, which bound memory. Items of other weights form one batch.
_BATCH = MappingProxyType(
    {
        Weight.DEFINITION: 256,
        Weight.ROOT: 64,
        Weight.NODE: 256,
        Weight.TABLE: 1,
        Weight.FOLDER: 16,
        Weight.INVENTORY: 1,
    }
)


class LocalExecutor:
    """Runs work in threads of this process."""

    #: Collected items are held in memory.
    window = _BATCH[Weight.DEFINITION]

    def map(self, work: Work[A, T], items: Sequence[A]) -> Iterator[T]:
        """Yield the result of each item, batch by batch. Raises the errors of the work.

        Args:
            work: The work.
            items: The items.
        """
        batch = _BATCH.get(work.weight, max(1, len(items)))
        for start in range(0, len(items), batch):
            yield from work(items[start : start + batch])

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield the files of the whole listing. Raises StorageError."""
        return listing.whole()

    def prefetch(self, read: Callable[[], None]) -> None:
        """Do nothing, because later reads use the same threads."""

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return a storage that rejects requests beyond the budget.

        Args:
            storage: The storage.
            spending: The budget and its usage.
        """
        return LimitedStorage(storage, spending)

    def batches_between_checks(self, storage: Storage) -> int:
        """Return the number of parallel requests."""
        return storage.concurrency

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        """Delete files at once, because the caller has just checked the fence.

        Args:
            storage: The storage of the files.
            paths: The files to delete.
            fence: Not used.

        Returns:
            The failures.
        """
        del fence
        return DeleteOutcome(storage.delete_many(paths))


#: The default executor.
LOCAL = LocalExecutor()
