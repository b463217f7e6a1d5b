"""The interface of a peer: an engine that stores many named objects and commits changes to them."""

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
class Location:
    """Where a peer stores its data: a folder, or with an endpoint, a prefix of a bucket and a folder."""

    folder: Path
    endpoint: str = ""
    prefix: str = ""

    @property
    def uri(self) -> str:
        """The URI, with a trailing slash."""
        return f"s3://{BUCKET}/{self.prefix}/" if self.endpoint else f"{self.folder.as_uri()}/"

    def s3_options(self, **names: str) -> dict[str, str]:
        """Return the endpoint and credentials by a library's names for them, or an empty mapping for a folder."""
        values = {"endpoint": self.endpoint, "key": ACCESS_KEY_ID, "secret": SECRET_ACCESS_KEY, "region": REGION}
        return {library_name: values[name] for name, library_name in names.items()} if self.endpoint else {}


@dataclass(frozen=True)
class PeerInfo:
    """Description of a peer: versions of its libraries, and what is measured."""

    versions: Mapping[str, str]
    object_kind: str
    commit_kind: str
    durability: str
    is_synced: bool
    unsupported: Mapping[str, str]
    max_objects: int | None


@dataclass(frozen=True)
class TimedCall:
    """Start and end of a call, by the monotonic clock that all processes share, and its result."""

    started_s: float
    ended_s: float
    value: object = None

    @property
    def seconds(self) -> float:
        """The duration."""
        return self.ended_s - self.started_s


@dataclass(frozen=True)
class WriteTotals:
    """Totals of all writers: commits, and transactions that were rejected because of a conflict."""

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
    """Return a unique value of the length of a short definition."""
    return f"{number:09}-{time.monotonic_ns():020}-{'x' * 34}"


class Peer(ABC):
    """An engine at one location. All calls except ``commit`` ignore cached state of the process."""

    packages: ClassVar[tuple[str, ...]]
    object_kind: ClassVar[str]
    commit_kind: ClassVar[str]
    durability: ClassVar[str]
    is_synced: ClassVar[bool] = False
    #: Operations that are not measured, with the reason: ``load``, ``commit``, ``lookup``, ``list``, ``old_version``,
    #: ``expire``, ``threads``, ``processes`` or ``s3``.
    unsupported: ClassVar[Mapping[str, str]] = {}
    #: The largest number of objects that is measured.
    max_objects: ClassVar[int | None] = None
    #: Errors of a commit that conflicts with another writer.
    conflicts: ClassVar[tuple[type[BaseException], ...]] = ()

    def __init__(self, location: Location):
        self.location = location

    @abstractmethod
    def load(self, n_objects: int) -> None:
        """Create objects in one commit, and prepare for commits."""

    @abstractmethod
    def attach(self) -> None:
        """Prepare for commits to objects that another process has loaded."""

    @abstractmethod
    def commit(self, number: int) -> None:
        """Change one object. The change is durable and visible to others when the call returns."""

    @abstractmethod
    def lookup(self, number: int) -> str:
        """Open from scratch, and return the value of an object."""

    @abstractmethod
    def list(self) -> int:
        """Open from scratch, list all names as strings, and return their number."""

    def version(self) -> object:
        """Return the identifier of the latest version."""
        raise NotImplementedError

    def old_version(self, version: object, number: int) -> str:
        """Open a version from scratch, and return the value of an object in it."""
        raise NotImplementedError

    def expire(self) -> None:
        """Delete all versions except the latest, and their files."""
        raise NotImplementedError

    def writer(self) -> Callable[[int], None]:
        """Return a commit function for one of many threads. Each commit starts from the latest version."""
        return self.commit

    def write(self, n_writers: int, seconds: float, numbers: Callable[[int], int]) -> WriteTotals:
        """Commit in several threads for some seconds.

        Args:
            n_writers: The number of threads.
            seconds: The duration.
            numbers: Returns the number of the next object of a writer, which no other writer changes.
        """
        counts = [_Counts() for _ in range(n_writers)]
        started = time.monotonic()

        def work(writer: int) -> None:
            writer_counts = counts[writer]
            try:
                commit = self.writer()
                while time.monotonic() < started + seconds:
                    try:
                        commit(numbers(writer))
                        writer_counts.commits += 1
                    except self.conflicts:
                        writer_counts.conflicts += 1
            except BaseException as error:  # noqa: BLE001 - raised below
                writer_counts.errors.append(error)

        threads = [threading.Thread(target=work, args=(writer,)) for writer in range(n_writers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in (error for writer_counts in counts for error in writer_counts.errors):
            raise error
        return WriteTotals(
            sum(writer_counts.commits for writer_counts in counts),
            sum(writer_counts.conflicts for writer_counts in counts),
            time.monotonic() - started,
        )
