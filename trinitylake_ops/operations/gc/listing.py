"""List the files under a root, and check the chain of roots.

The names of all files that an operation may delete begin with twelve bits of a hash in three folder levels, with ``_``,
or with ``tables/``. A listing can therefore be split into parts. Each part filters its files by digests of known paths,
so that the whole listing is never collected in one place.

A root that another program wrote out of order can never be corrected. After an operator has acknowledged it once,
verify reports it as known.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import ClassVar

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, InvalidLocationError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import ROOT_PREFIX, TABLES_PREFIX
from trinitylake_ops.format.keys import PREVIOUS_ROOT, is_clock_reset
from trinitylake_ops.format.locations import to_location
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.executor import Executor, Weight
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.versions.roots import Roots
from trinitylake_ops.versions.snapshot import Snapshot

_FOLDERS = tuple("".join(bits) + "/" for bits in product("01", repeat=4))
_DIGEST_BYTES = 16
#: The expected number of files per part of a listing, which corresponds to a few pages.
_FILES_PER_PART = 2_000


def may_be_lakehouse_file(path: str) -> bool:
    """Whether a listing in parts covers a path."""
    return path.startswith((*_FOLDERS, ROOT_PREFIX, TABLES_PREFIX))


@dataclass(frozen=True, slots=True)
class Part:
    """A prefix to list, and digests of paths under it. Either these paths are left out, or only these are returned."""

    prefix: str
    digests: bytes
    returns_listed: bool


@dataclass(frozen=True, slots=True)
class PartsWork:
    """Work that lists parts."""

    weight: ClassVar[Weight] = Weight.FOLDER

    storage: Storage

    @property
    def storages(self) -> Sequence[Storage]:
        """The storage to list."""
        return (self.storage,)

    def __call__(self, parts: Sequence[Part]) -> list[list[FileInfo]]:
        """Return the files of each part. Raises StorageError."""
        return run_parallel(self._list_part, parts, self.storage.concurrency)

    def _list_part(self, part: Part) -> list[FileInfo]:
        starts = range(0, len(part.digests), _DIGEST_BYTES)
        named_digests = {part.digests[start : start + _DIGEST_BYTES] for start in starts}
        infos = self.storage.list(part.prefix)
        return [info for info in infos if (_digest(info.path) in named_digests) == part.returns_listed]


@dataclass(frozen=True, slots=True)
class _ExistingFiles:
    """A listing of all finished files. When listed in parts, files with unknown names are left out.

    Without ``with_catalog``, a listing in parts also leaves out nodes and definitions.
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
    """A listing of all files, including temporary files. In parts, reached files and unknown names are left out."""

    storage: Storage
    reached: Sequence[Collection[str]]

    def whole(self) -> Iterator[FileInfo]:
        for prefix in ("", TEMPORARY_PREFIX):  # a listing of all files does not include temporary files
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
        return PartsWork(self.storage), [Part(prefix, bytes(reached), False) for prefix, reached in digests.items()]


@dataclass(frozen=True, slots=True)
class _NamedFiles:
    """A listing of specific files. When listed all at once, all other files are included."""

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
        return PartsWork(self.storage), [Part(prefix, bytes(names), True) for prefix, names in digests.items()]


def list_existing(storage: Storage, executor: Executor, *, with_catalog: bool) -> Iterator[FileInfo]:
    """Yield all finished files in any order.

    Args:
        storage: The storage.
        executor: Lists the files. If the executor lists in parts, files with unknown names are left out.
        with_catalog: Whether a listing in parts includes nodes and definitions.
    """
    return executor.listed(_ExistingFiles(storage, with_catalog))


def list_without(storage: Storage, executor: Executor, reached: Sequence[Collection[str]]) -> Iterator[FileInfo]:
    """Yield the files that are not reached, including temporary files.

    Args:
        storage: The storage.
        executor: Lists the files. If the executor lists all files at once, reached files and unknown names are
            included.
        reached: The reached paths.
    """
    return executor.listed(_UnreachedFiles(storage, reached))


def list_named(storage: Storage, executor: Executor, paths: Iterable[str]) -> Iterator[FileInfo]:
    """Yield the files that exist among the given paths.

    Args:
        storage: The storage.
        executor: Lists the files. If the executor lists all files at once, all other files are included.
        paths: The paths of files with names that this package generates.
    """
    return executor.listed(_NamedFiles(storage, paths))


def list_folders(storage: Storage, executor: Executor, folders: Sequence[str]) -> Iterator[FileInfo]:
    """Yield the files under prefixes.

    Args:
        storage: The storage.
        executor: Lists the files.
        folders: The prefixes.
    """
    for infos in executor.map(PartsWork(storage), [Part(folder, b"", False) for folder in folders]):
        yield from infos


def _digest(path: str) -> bytes:
    return hashlib.blake2b(path.encode(errors="surrogatepass"), digest_size=_DIGEST_BYTES).digest()


#: The property of the lakehouse definition that contains acknowledged versions, as ranges.
ACKNOWLEDGED = "trinitylake.acknowledged-versions"
_MAX_AT_ONCE = 1000


def chain_faults(roots: Roots, version: int, root: NodeFile, before_ms: int) -> Iterator[tuple[str, str]]:
    """Yield the code and the message of each fault between a root and its predecessor.

    Args:
        roots: The roots of the lakehouse.
        version: The number of the version.
        root: The root of the version.
        before_ms: When the predecessor was created, in milliseconds since the epoch.
    """
    expected = roots.path(version - 1) if version > 0 else None
    named = root.system.get(PREVIOUS_ROOT)
    if _path_of(roots, named) != expected:
        yield "chain-broken", f"previous_root is {named!r}, not {expected!r}"
    if root.created_at_ms <= before_ms and not is_clock_reset(root.system, version):
        yield "time-not-rising", f"created at {root.created_at_ms} ms, not after its predecessor at {before_ms} ms"


def _path_of(roots: Roots, location: str | None) -> str | None:
    """Return the path of a root, which other programs may have named by its URI."""
    try:
        return None if location is None else to_location(roots.storage.root, location)
    except InvalidLocationError:
        return location


def acknowledged_versions(definition: LakehouseDef) -> VersionRanges:
    """Return the acknowledged versions, or no versions if the property cannot be parsed."""
    try:
        return VersionRanges.parse(definition.properties.get(ACKNOWLEDGED, ""))
    except InvalidInputError:
        return VersionRanges()


def with_acknowledged(definition: LakehouseDef, more: Iterable[VersionRanges]) -> LakehouseDef:
    """Return a definition with additional acknowledged versions.

    Args:
        definition: The lakehouse definition.
        more: The additional versions.
    """
    acknowledged = acknowledged_versions(definition)
    for versions in more:
        acknowledged |= versions
    if acknowledged == acknowledged_versions(definition):
        return definition
    return replace(definition, properties={**definition.properties, ACKNOWLEDGED: str(acknowledged)})


def without_acknowledged(definition: LakehouseDef) -> LakehouseDef:
    """Return a definition without acknowledged versions, for use in a lakehouse with a different history."""
    properties = {name: value for name, value in definition.properties.items() if name != ACKNOWLEDGED}
    return replace(definition, properties=properties)


def parse_acknowledged(text: str) -> VersionRanges:
    """Parse versions such as ``7`` or ``7,9-12``. Raises InvalidInputError."""
    versions = VersionRanges.parse(text)
    if not versions or len(versions) > _MAX_AT_ONCE:
        raise InvalidInputError(
            f"{text!r} cannot be acknowledged; pass 1 to {_MAX_AT_ONCE} versions, such as 7 or 7,9-12"
        )
    return versions


def check_faulty(latest: Snapshot, versions: VersionRanges) -> None:
    """Check that all versions have a fault to acknowledge.

    Args:
        latest: The latest version.
        versions: The versions to acknowledge.

    Raises:
        InvalidInputError: The root of a version has no fault, or cannot be read.
    """
    for version in versions:
        faults: list[tuple[str, str]] = []
        if 0 <= version <= latest.version:
            root = _read(latest, version)
            before = _read(latest, version - 1) if version > 0 else None
            roots = latest.files.roots
            faults = (
                [] if root is None else [*chain_faults(roots, version, root, before.created_at_ms if before else -1)]
            )
        if not faults:
            raise InvalidInputError(
                f"version {version} has nothing to acknowledge; only versions that verify reports as chain-broken or"
                " time-not-rising can be acknowledged"
            )


def _read(latest: Snapshot, version: int) -> NodeFile | None:
    path = latest.files.roots.path(version)
    try:
        return decode_node(latest.files.storage.read(path), path)
    except (FileMissingError, CorruptFileError):
        return None
