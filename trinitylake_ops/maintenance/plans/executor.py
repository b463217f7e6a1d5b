"""Who carries out the bulk of an operation's requests: threads of this process, or executors elsewhere.

What an operation decides stays with whoever runs it: plans, leases, marks, commits. Its requests to the storage for
each of many files - to read, copy, check or delete it - go through an :class:`Executor`. They are work on batches of
things. The same work runs in both cases, so plans and reports are the same (docs/engines.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage import Storage

A_contra = TypeVar("A_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)
A = TypeVar("A")
T = TypeVar("T")


class Work(Protocol[A_contra, T_co]):
    """What is done for each of many things: a walker, copier, checker, or what lists.

    It pickles, with the storages that it asks, and doing it twice, or late, is as good as once. Its threads are those
    of the storage's ``*_many`` methods. What it raises ends the operation.
    """

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


class Executor(Protocol):
    """Carries out work on many things."""

    @property
    def is_local(self) -> bool:
        """Whether work runs in this process, one batch after the other, on the storages that it was given."""

    def map(self, work: Work[A, T], things: Sequence[A], batch: int) -> Iterator[T]:
        """Yield what becomes of each thing, in order, done in batches of so many or fewer. Raises what work raises."""

    def rounds_at_once(self, storage: Storage) -> int:
        """Return how many requests that delete are sent between two looks at what allows them."""

    def delete(self, storage: Storage, paths: Sequence[str], fence: Fence | None) -> Sent:
        """Delete files; with a fence nothing is sent once it does not hold, and nothing is under way at the end."""


class LocalExecutor:
    """The threads of this process."""

    is_local = True

    def map(self, work: Work[A, T], things: Sequence[A], batch: int) -> Iterator[T]:
        """Yield what becomes of each thing, batch after batch. Raises what work raises."""
        for start in range(0, len(things), batch):
            yield from work(things[start : start + batch])

    def rounds_at_once(self, storage: Storage) -> int:
        """Return the requests that run in parallel."""
        return storage.concurrency

    def delete(self, storage: Storage, paths: Sequence[str], fence: Fence | None) -> Sent:
        """Delete files at once: whoever made the fence has just seen that it holds."""
        del fence
        return Sent(storage.delete_many(paths))


#: What operations use unless they are given another one.
LOCAL = LocalExecutor()
