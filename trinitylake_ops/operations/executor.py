"""Executors carry out the bulk of an operation's requests, by threads of this process or elsewhere.

The decisions of an operation stay in its own process: plans, leases, marks, commits. Its requests to the storage for
each of many files - to read, copy, check or delete it - go through an :class:`Executor`. They are work on batches of
things. Every executor runs the same work, so plans and reports are the same (docs/spark/cluster.md).
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
    """The kind of one thing of work. An executor decides by it how many things go into one batch."""

    ANSWER = auto()  # a small file, or whether one stands
    DEFINITION = auto()  # a definition, and what its table's metadata says
    ROOT = auto()
    NODE = auto()
    TABLE = auto()  # all metadata, lists and manifests of one
    FILE = auto()  # a whole file of any size; the work itself bounds the bytes in flight
    FOLDER = auto()  # the listing of a prefix
    INVENTORY = auto()  # one of the files of an inventory


class Work(Protocol[A_contra, T_co]):
    """Work on many things: a walker, a copier, a checker or a lister.

    It pickles, with the storages that it asks. To do it twice, or late, is as good as to do it once. Its threads are
    those of the storage's ``*_many`` methods. An error that it raises ends the operation.
    """

    @property
    def weight(self) -> Weight:
        """The kind of each thing."""

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that it asks, whose requests are counted."""

    def __call__(self, things: Sequence[A_contra], /) -> Sequence[T_co]:
        """Return the result of each thing of a batch, in order."""


class Guard(Protocol):
    """A further condition of deletes, which pickles: whether files may be deleted at a place at all."""

    @property
    def storage(self) -> Storage:
        """The storage that it asks."""

    def check(self) -> None:
        """Raise MaintenanceBlockedError where nothing may be deleted any more. Raises StorageError."""


@dataclass(frozen=True, slots=True)
class DeletionFence:
    """The conditions under which a batch of deletes is safe, as they were seen just before.

    The lease of number ``lease`` is held until ``until_ms`` by the clock of ``storage``, that of the lakehouse.
    ``next_root`` is the path of the version after the marked ones. Nothing more may be sent if there is a larger lease
    or that version, if the time is over, or if a ``guard`` forbids it. What is deleted may stand on another storage.
    """

    storage: Storage
    lease: int
    until_ms: int
    next_root: str
    guard: Guard | None = None


@dataclass(frozen=True, slots=True)
class DeleteOutcome:
    """The outcome of a delete: failures by path, and ``held_back`` files, which may still be there."""

    failures: Mapping[str, StorageError]
    held_back: frozenset[str] = field(default_factory=frozenset)


class Listing(Protocol):
    """Files to list: in one go, or cut into parts."""

    def whole(self) -> Iterator[FileInfo]:
        """Yield all files in one go, and perhaps others beside them. Raises StorageError."""

    def parts(self) -> tuple[Work[Any, Sequence[FileInfo]], Sequence[Any]]:
        """Return the work that lists parts, and the parts."""


class Executor(Protocol):
    """Carries out work on many things. Callers never ask for its kind: it handles all differences itself."""

    @property
    def window(self) -> int:
        """The number of things to gather before the next work on them begins."""

    def map(self, work: Work[A, T], things: Sequence[A]) -> Iterator[T]:
        """Yield the result of each thing, in order, done in batches by its weight. Raises the errors of the work."""

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield the listed files, in no set order. Raises StorageError."""

    def prefetch(self, read: Callable[[], None]) -> None:
        """Read files ahead if that is cheaper here than later; else do nothing."""

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return a storage that keeps a run within its budget. Raises InvalidInputError if that is impossible."""

    def batches_between_checks(self, storage: Storage) -> int:
        """Return how many deletes are sent between two looks at the fence."""

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        """Delete files. Nothing is sent once the fence does not hold, and nothing is under way at the end."""


#: The largest batches by weight, which bound the memory that they take. Other things go all at once.
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
    """The threads of this process."""

    #: Gathered things are held in this process's memory, and the same threads walk them at once.
    window = _BATCH[Weight.DEFINITION]

    def map(self, work: Work[A, T], things: Sequence[A]) -> Iterator[T]:
        """Yield the result of each thing, batch after batch. Raises the errors of the work."""
        batch = _BATCH.get(work.weight, max(1, len(things)))
        for start in range(0, len(things), batch):
            yield from work(things[start : start + batch])

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield the files of a whole listing as they come. Raises StorageError."""
        return listing.whole()

    def prefetch(self, read: Callable[[], None]) -> None:
        """Do nothing: later reads ask the same storage by the same threads."""

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return a storage that refuses requests beyond the budget."""
        return LimitedStorage(storage, spending)

    def batches_between_checks(self, storage: Storage) -> int:
        """Return the requests that run in parallel."""
        return storage.concurrency

    def delete(self, storage: Storage, paths: Sequence[str], fence: DeletionFence | None) -> DeleteOutcome:
        """Delete files at once: the caller has just seen that the fence holds."""
        del fence
        return DeleteOutcome(storage.delete_many(paths))


#: The executor of operations that are given no other.
LOCAL = LocalExecutor()
