"""Listing what stands under a root: in one go, or in parts by the first bits of the names that we give.

Every file that an operation may delete has a certain name. It begins with twelve bits of a hash, in three folders, or
with ``_``, or lies under ``tables/``. Whoever lists a part leaves out, or only tells, what the operation named, so that
the rest never comes together in one place.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import ClassVar

from trinitylake_ops.format.file_names import ROOT_PREFIX, TABLES_PREFIX
from trinitylake_ops.maintenance.plans.executor import Executor, Weight
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, Storage
from trinitylake_ops.storage.parallel import run_parallel

_FOLDERS = tuple("".join(bits) + "/" for bits in product("01", repeat=4))
_DIGEST_BYTES = 16
#: So many files of a listing come in one page; a part should have a few pages at most.
_FILES_PER_PART = 2_000


def may_be_ours(path: str) -> bool:
    """Whether a path is one of those that a listing by parts has."""
    return path.startswith((*_FOLDERS, ROOT_PREFIX, TABLES_PREFIX))


@dataclass(frozen=True, slots=True)
class Part:
    """A prefix to list, with the digests of paths under it: of those to leave out, or of the only ones to tell."""

    prefix: str
    digests: bytes
    tells_only_these: bool


@dataclass(frozen=True, slots=True)
class PartsWork:
    """Work: lists parts."""

    weight: ClassVar[Weight] = Weight.FOLDER

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """The one that is listed."""
        return (self.storage,)

    def __call__(self, parts: Sequence[Part]) -> list[list[FileInfo]]:
        """Return the files of each part. Raises StorageError."""
        return run_parallel(self._told, parts, self.storage.concurrency)

    def _told(self, part: Part) -> list[FileInfo]:
        starts = range(0, len(part.digests), _DIGEST_BYTES)
        known = {part.digests[start : start + _DIGEST_BYTES] for start in starts}
        infos = self.storage.list(part.prefix)
        return [info for info in infos if (_digest(info.path) in known) == part.tells_only_these]


@dataclass(frozen=True, slots=True)
class _StandingFiles:
    """A listing of all files but those being written; parts leave out what bears no name that we give.

    Parts leave out nodes and definitions, too, but ``with_catalog``.
    """

    storage: Storage
    with_catalog: bool

    def whole(self) -> Iterator[FileInfo]:
        return self.storage.list()

    def parts(self) -> tuple[PartsWork, list[Part]]:
        prefixes = (*(_FOLDERS if self.with_catalog else ()), ROOT_PREFIX, TABLES_PREFIX)
        return PartsWork(self.storage), [Part(prefix, b"", False) for prefix in prefixes]


@dataclass(frozen=True, slots=True)
class _UnreachedFiles:
    """A listing of all files, those being written too; parts leave out ``reached``, and names that we do not give."""

    storage: Storage
    reached: Sequence[Collection[str]]

    def whole(self) -> Iterator[FileInfo]:
        for prefix in ("", TEMPORARY_PREFIX):  # a listing of all leaves those out
            yield from self.storage.list(prefix)

    def parts(self) -> tuple[PartsWork, list[Part]]:
        expected_files = sum(map(len, self.reached))
        depth = 1 + (expected_files > len(_FOLDERS) * _FILES_PER_PART) + (expected_files > len(_FOLDERS) ** 2 * 1_000)
        digests = {prefix: bytearray() for prefix in map("".join, product(_FOLDERS, repeat=depth))}
        digests |= {prefix: bytearray() for prefix in (ROOT_PREFIX, TABLES_PREFIX, TEMPORARY_PREFIX)}
        size = depth * len(_FOLDERS[0])
        for path in chain.from_iterable(self.reached):
            prefix = path[:size] if path[:size] in digests else path[: len(ROOT_PREFIX)]
            if prefix in digests:
                digests[prefix] += _digest(path)
        return PartsWork(self.storage), [Part(prefix, bytes(known), False) for prefix, known in digests.items()]


@dataclass(frozen=True, slots=True)
class _NamedFiles:
    """A listing of some files, which bear names that we give; whole, it has all others, too."""

    storage: Storage
    paths: Iterable[str]

    def whole(self) -> Iterator[FileInfo]:
        return self.storage.list()

    def parts(self) -> tuple[PartsWork, list[Part]]:
        digests: dict[str, bytearray] = {}
        size = 3 * len(_FOLDERS[0])
        for path in self.paths:
            prefix = path[:size]
            if path.startswith(TABLES_PREFIX):
                prefix = path[: path.find("/", len(TABLES_PREFIX)) + 1]
            elif path.startswith(ROOT_PREFIX):
                prefix = ROOT_PREFIX
            digests.setdefault(prefix, bytearray()).extend(_digest(path))
        return PartsWork(self.storage), [Part(prefix, bytes(known), True) for prefix, known in digests.items()]


def list_standing(storage: Storage, executor: Executor, *, with_catalog: bool) -> Iterator[FileInfo]:
    """Yield all files but those being written, in no set order.

    Who lists by parts leaves out what bears no name that we give, and nodes and definitions but ``with_catalog``.
    """
    return executor.listed(_StandingFiles(storage, with_catalog))


def list_without(storage: Storage, executor: Executor, reached: Sequence[Collection[str]]) -> Iterator[FileInfo]:
    """Yield the files that are not reached, those being written too.

    Who lists in one go tells ``reached`` as well, and what bears no name that we give.
    """
    return executor.listed(_UnreachedFiles(storage, reached))


def list_named(storage: Storage, executor: Executor, paths: Iterable[str]) -> Iterator[FileInfo]:
    """Yield those of some files, which bear names that we give, that stand; who lists in one go tells all files."""
    return executor.listed(_NamedFiles(storage, paths))


def list_folders(storage: Storage, executor: Executor, folders: Sequence[str]) -> Iterator[FileInfo]:
    """Yield the files under prefixes."""
    for infos in executor.map(PartsWork(storage), [Part(folder, b"", False) for folder in folders]):
        yield from infos


def _digest(path: str) -> bytes:
    return hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()
