"""What a peer is: an engine that keeps many named objects and commits changes of them."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

BUCKET, ACCESS_KEY_ID, SECRET_ACCESS_KEY, REGION = "tests", "tests-access-key", "tests-secret-key", "us-east-1"


@dataclass(frozen=True)
class Place:
    """Where a peer keeps its data: a folder, or with an endpoint a prefix of a bucket and a folder for the rest."""

    folder: Path
    endpoint: str = ""
    prefix: str = ""

    @property
    def uri(self) -> str:
        """A URI that ends with a slash."""
        return f"s3://{BUCKET}/{self.prefix}/" if self.endpoint else f"{self.folder.as_uri()}/"

    def s3_options(self, **names: str) -> dict[str, str]:
        """Return endpoint and credentials under the names that a library gives them; none for a folder."""
        values = {"endpoint": self.endpoint, "key": ACCESS_KEY_ID, "secret": SECRET_ACCESS_KEY, "region": REGION}
        return {own: values[name] for name, own in names.items()} if self.endpoint else {}


@dataclass(frozen=True)
class About:
    """What a peer says of itself: libraries with their versions, and what is measured."""

    versions: Mapping[str, str]
    object_kind: str
    commit_kind: str
    durability: str
    is_synced: bool
    lacks: Mapping[str, str]
    largest: int | None


@dataclass(frozen=True)
class Timed:
    """When a call began and ended, by the clock that all processes of the machine share, and what it returned."""

    begun_s: float
    ended_s: float
    value: object = None

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.ended_s - self.begun_s


@dataclass(frozen=True)
class Written:
    """What writers did together: commits, and transactions that were refused for a conflict."""

    commits: int
    conflicts: int
    seconds: float


@dataclass
class _Counts:
    commits: int = 0
    conflicts: int = 0
    errors: list[BaseException] = field(default_factory=list)


def object_name(number: int) -> str:
    """Return the name of an object."""
    return f"t{number:09}"


def value(number: int) -> str:
    """Return a value as long as a short definition, other than all before."""
    return f"{number:09}-{time.monotonic_ns():020}-{'x' * 34}"


class Peer(ABC):
    """An engine at a place. Every call but ``commit`` works without what the process holds.

    ``lacks`` tells which operation is not measured, and why: ``load``, ``commit``, ``lookup``, ``list``,
    ``old_version``, ``expire``, ``threads``, ``processes`` or ``s3``.
    """

    packages: ClassVar[tuple[str, ...]]
    object_kind: ClassVar[str]
    commit_kind: ClassVar[str]
    durability: ClassVar[str]
    is_synced: ClassVar[bool] = False
    lacks: ClassVar[Mapping[str, str]] = {}
    #: More objects than these are not loaded.
    largest: ClassVar[int | None] = None
    #: What a commit raises that meets another writer's.
    conflicts: ClassVar[tuple[type[BaseException], ...]] = ()

    def __init__(self, place: Place):
        self.place = place

    @abstractmethod
    def load(self, n_objects: int) -> None:
        """Make so many objects in one commit, and be ready for commits."""

    @abstractmethod
    def attach(self) -> None:
        """Be ready for commits to what another process has loaded."""

    @abstractmethod
    def commit(self, number: int) -> None:
        """Change one object, durable and visible to others when the call returns."""

    @abstractmethod
    def lookup(self, number: int) -> str:
        """Open anew, and return the value of an object."""

    @abstractmethod
    def list(self) -> int:
        """Open anew, and return the number of names, each made a string."""

    def version(self) -> object:
        """Return what names the latest version."""
        raise NotImplementedError

    def old_version(self, version: object, number: int) -> str:
        """Open a version anew, and return the value that an object had in it."""
        raise NotImplementedError

    def expire(self) -> None:
        """Delete all versions but the latest, and their files."""
        raise NotImplementedError

    def writer(self) -> Callable[[int], None]:
        """Return what commits for one of many threads, each beginning with what the others committed."""
        return self.commit

    def write(self, n_writers: int, seconds: float, numbers: Callable[[int], int]) -> Written:
        """Let threads commit for a while; ``numbers`` gives the object of each, which no other changes."""
        counts = [_Counts() for _ in range(n_writers)]
        begun = time.monotonic()

        def work(writer: int) -> None:
            own = counts[writer]
            try:
                commit = self.writer()
                while time.monotonic() < begun + seconds:
                    try:
                        commit(numbers(writer))
                        own.commits += 1
                    except self.conflicts:
                        own.conflicts += 1
            except BaseException as error:  # noqa: BLE001 - raised below
                own.errors.append(error)

        threads = [threading.Thread(target=work, args=(writer,)) for writer in range(n_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in (error for own in counts for error in own.errors):
            raise error
        return Written(
            sum(own.commits for own in counts), sum(own.conflicts for own in counts), time.monotonic() - begun
        )
