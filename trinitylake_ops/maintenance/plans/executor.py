"""Who carries out the bulk of an operation's requests: threads of this process, or executors elsewhere.

What an operation decides stays with whoever runs it: plans, leases, marks, commits. Its requests to the storage for
each of many files - to read, copy, check or delete it - go through an :class:`Executor`. They are work on batches of
things. The same work runs in both cases, so plans and reports are the same (docs/engines.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from trinitylake_ops.errors import StorageError
from trinitylake_ops.maintenance.plans.budget import LimitedStorage, Spending
from trinitylake_ops.storage import FileInfo, Storage

A_contra = TypeVar("A_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
T = TypeVar("T")


class Weight(Enum):
    """What one thing of work is. By it an executor decides how many things go together, in one batch."""

    ANSWER = auto()  # a small file, or whether one stands
    DEFINITION = auto()  # a definition, and what its table's metadata says
    ROOT = auto()
    NODE = auto()
    TABLE = auto()  # all metadata, lists and manifests of one
    FILE = auto()  # a whole file of any size; the work itself bounds the bytes in flight
    FOLDER = auto()  # the listing of a prefix
    INVENTORY = auto()  # one of the files of an inventory


class Work(Protocol[A_contra, T_co]):
    """What is done for each of many things: a walker, copier, checker, or what lists.

    It pickles, with the storages that it asks, and doing it twice, or late, is as good as once. Its threads are those
    of the storage's ``*_many`` methods. What it raises ends the operation.
    """

    @property
    def weight(self) -> Weight:
        """What each thing is."""

    @property
    def storages(self) -> Sequence[Storage]:
        """The storages that it asks, whose requests are counted."""

    def __call__(self, things: Sequence[A_contra], /) -> Sequence[T_co]:
        """Return what becomes of each thing of a batch, in order."""


@dataclass(frozen=True, slots=True)
class Fence:
    """What makes it safe to send a batch of deletes, as it was seen just before.

    The lease of number ``lease`` is held until ``until_ms`` by the storage's clock. ``next_root`` is the path of the
    version after the marked ones. Where a larger lease stands, the time is over, or that version is there, nothing more
    may be sent.
    """

    lease: int
    until_ms: int
    next_root: str


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of files to delete: failures by path, and those that were ``held_back``, which may still stand."""

    failures: Mapping[str, StorageError]
    held_back: frozenset[str] = field(default_factory=frozenset)


class Listing(Protocol):
    """What is to be listed: in one go, or cut into parts."""

    def whole(self) -> Iterator[FileInfo]:
        """Yield all files in one go, and perhaps others that nobody asked for. Raises StorageError."""

    def parts(self) -> tuple[Work[Any, Sequence[FileInfo]], Sequence[Any]]:
        """Return the work that lists parts, and the parts."""


class Executor(Protocol):
    """Carries out work on many things. Nobody asks one what it is: what differs, it does itself."""

    @property
    def window(self) -> int:
        """How many things are worth gathering before the work that follows on them begins."""

    def map(self, work: Work[A, T], things: Sequence[A]) -> Iterator[T]:
        """Yield what becomes of each thing, in order, done in batches by its weight. Raises what work raises."""

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield what is listed, in no set order. Raises StorageError."""

    def prefetch(self, read: Callable[[], None]) -> None:
        """Read what will be asked for, where that is cheaper here than later; elsewhere nothing is done."""

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return the storage that keeps a run within its budget. Raises InvalidInputError where nobody can."""

    def rounds_at_once(self, storage: Storage) -> int:
        """Return how many requests that delete are sent between two looks at what allows them."""

    def delete(self, storage: Storage, paths: Sequence[str], fence: Fence | None) -> Sent:
        """Delete files; with a fence nothing is sent once it does not hold, and nothing is under way at the end."""


#: How many things go together by weight, for what is held of them at a time; others go all at once.
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

    #: What is gathered is held in this process's memory, and walked at once by the same threads.
    window = _BATCH[Weight.DEFINITION]

    def map(self, work: Work[A, T], things: Sequence[A]) -> Iterator[T]:
        """Yield what becomes of each thing, batch after batch. Raises what work raises."""
        batch = _BATCH.get(work.weight, max(1, len(things)))
        for start in range(0, len(things), batch):
            yield from work(things[start : start + batch])

    def listed(self, listing: Listing) -> Iterator[FileInfo]:
        """Yield what is listed in one go, as it comes. Raises StorageError."""
        return listing.whole()

    def prefetch(self, read: Callable[[], None]) -> None:
        """Do nothing: whoever asks later asks the same storage by the same threads."""

    def limited(self, storage: Storage, spending: Spending) -> Storage:
        """Return a storage that refuses requests beyond the budget."""
        return LimitedStorage(storage, spending)

    def rounds_at_once(self, storage: Storage) -> int:
        """Return the requests that run in parallel."""
        return storage.concurrency

    def delete(self, storage: Storage, paths: Sequence[str], fence: Fence | None) -> Sent:
        """Delete files at once: whoever made the fence has just seen that it holds."""
        del fence
        return Sent(storage.delete_many(paths))


#: What operations use unless they are given another one.
LOCAL = LocalExecutor()
