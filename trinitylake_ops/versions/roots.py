"""Find the roots of versions, and determine the latest version (protocol.md, F)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError, LakehouseNotFoundError, StorageError
from trinitylake_ops.format.file_names import (
    HINT_PATH,
    MAX_VERSION,
    ROOT_NAMING,
    ROOT_NAMINGS,
    ROOT_PREFIX,
    RootNaming,
    parse_root_path,
    root_naming,
)
from trinitylake_ops.storage import process_clock
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel
from trinitylake_ops.versions.root_files import JustOpened, KnownRoot, ProbedRoots, one_naming, read_hint

#: Prefix of the root names of version 0 in all namings. No other version has this prefix.
_OLDEST_PREFIX = min((naming.path(0).partition(".")[0] for naming in ROOT_NAMINGS), key=len)


class Roots:
    """The roots of one lakehouse: their storage, their naming and the newest known one.

    The naming is resolved once, either when the lakehouse is opened or on first use.

    Args:
        storage: The storage of the lakehouse.
        known_naming: The naming of the roots; None if it is not known yet.
        keeps_newest: Whether to remember the newest known root, from which the latest root can be found in one round
            trip.
    """

    def __init__(self, storage: Storage, known_naming: RootNaming | None = None, *, keeps_newest: bool = True):
        self.storage = storage
        self.known_naming = known_naming
        self.newest: KnownRoot | None = None
        self._just_opened: JustOpened | None = None
        self._keeps_newest = keeps_newest

    @property
    def naming(self) -> RootNaming:
        """How the roots are named. Raises LakehouseNotFoundError, CorruptFileError, StorageError."""
        if self.known_naming is None:
            find_latest(self)
            assert self.known_naming is not None
        return self.known_naming

    def path(self, version: int) -> str:
        """Return the path of a version's root, whether it exists or not.

        Raises VersionNotFoundError for a version that cannot exist, and the errors of ``naming``.
        """
        return self.naming.path(version)

    def known(self, version: int, data: bytes) -> KnownRoot:
        """Return the root of the latest version from its bytes, and remember it. Equal bytes are decoded only once."""
        newest = self.newest
        if newest is not None and newest.version == version and newest.data == data:
            return newest
        root = KnownRoot(version, self.path(version), data)
        self.keep(root)
        return root

    def keep(self, root: KnownRoot) -> None:
        """Remember the root of the latest version, unless another thread has found a later root."""
        if self._keeps_newest and (self.newest is None or root.version >= self.newest.version):
            self.newest = root

    def opened(self, version: int, data: bytes, read_at_ms: int) -> None:
        """Remember the latest version found on opening the lakehouse, for a first read that follows immediately.

        Args:
            version: The version.
            data: The bytes of its root.
            read_at_ms: When it was read, by the storage's clock.
        """
        if self._keeps_newest:
            root = self.known(version, data)
            self._just_opened = JustOpened(root, read_at_ms, process_clock.now_s(), _n_created)

    def take_opened(self) -> JustOpened | None:
        """Return the latest version found on opening the lakehouse, if it is recent. Later calls return None.

        The version is not recent if this process has created a root since then.
        """
        opened, self._just_opened = self._just_opened, None
        if opened is None or opened.n_created != _n_created:
            return None
        return opened if process_clock.now_s() - opened.opened_at_s < _RECENT_OPEN_S else None


def count_created_root() -> None:
    """Record that this process creates a root, so that versions read on opening no longer count as recent."""
    global _n_created  # noqa: PLW0603 - counts the roots that the process creates
    _n_created += 1


_n_created = 0
#: How long the version that was read on opening counts as the latest version. The next statement of a program typically
#: runs within this time, which is so short that the program can hardly have learned of a commit by another process.
_RECENT_OPEN_S = 0.001
#: Number of versions that are read together after two versions that are not the latest.
_N_FOLLOWING = 2


def find_latest(roots: Roots) -> tuple[int, bytes]:
    """Return the latest version and the bytes of its root.

    The hint is only a starting point: a missing, invalid, stale or too high hint costs requests, but never causes a
    failure. With a correct hint this takes two round trips, or one if ``roots`` already knows the latest version. An
    unknown naming that is not the default takes one more round trip. Raises LakehouseNotFoundError, CorruptFileError,
    StorageError.
    """
    roots.take_opened()  # discard it: it is older than the version that is found now
    if roots.newest is not None:
        return confirm_latest(roots, roots.newest, ProbedRoots(roots.storage))
    return find_latest_from(roots, read_hint(roots.storage))


def find_latest_from(roots: Roots, hinted: int | None, probed: ProbedRoots | None = None) -> tuple[int, bytes]:
    """Return the latest version and the bytes of its root, like :func:`find_latest`, for a hint that has been read.

    Args:
        roots: The roots of the lakehouse.
        hinted: The version in the hint; None if there is none.
        probed: Collects the roots that are read. Its wanted versions are read together with the hinted root.

    Raises:
        LakehouseNotFoundError: There is no root.
        CorruptFileError: There are roots of several namings.
        StorageError: A root cannot be read.
    """
    start = hinted or 0
    naming = roots.known_naming or ROOT_NAMING
    probed = probed or ProbedRoots(roots.storage)
    probed.read([*_pair(naming, start), *map(naming.path, probed.wanted)])
    return _latest_from(roots, naming, start, probed)


@dataclass(slots=True)
class RootProbe:
    """The result of reading a version, its successor and possibly the hint in one round trip."""

    #: The probed version.
    version: int
    #: The roots that were read.
    probed: ProbedRoots
    #: The version in the hint; None if there is none or it was not read.
    hinted: int | None
    #: The storage's time before the reads.
    read_at_ms: int

    def latest(self, roots: Roots) -> KnownRoot | None:
        """Return the latest version of the probe, None if the probed version does not exist.

        Follows a hint to a later version. Falls back to the probed versions if the hinted version cannot be read.
        """
        contents = [self.probed.contents.get(path) for path in _pair(roots.naming, self.version)]
        existing = [(self.version + offset, data) for offset, data in enumerate(contents) if data is not None]
        if not existing:
            return None
        if self.hinted is not None and self.hinted > existing[-1][0]:
            with contextlib.suppress(StorageError):
                existing.append(find_latest_after(roots, self))
        return roots.known(*existing[-1])


def probe_successors(roots: Roots, version: int) -> RootProbe:
    """Read the root of a version, its successor and the hint in one round trip.

    Raises StorageError if the root of the version cannot be read. Failures to read the successor are ignored; the
    successor is read again when it is needed.
    """
    roots.take_opened()
    path = roots.path(version)
    probed = ProbedRoots(roots.storage)

    def read(pair_path: str) -> None:
        try:
            probed.read_one(pair_path)
        except StorageError:
            if pair_path == path:
                raise

    read_at_ms = roots.storage.now_ms()
    hinted = _with_hint(roots.storage, read, _pair(roots.naming, version))
    return RootProbe(version, probed, hinted, read_at_ms)


def speculative_probe(roots: Roots, version: int) -> tuple[RootProbe, list[Callable[[], None]]]:
    """Return a probe of a version that may not exist, and the reads that fill it, which the caller must run.

    Failed reads are ignored. On remote storage the hint is also read, because a writer that has fallen behind would
    need several round trips to catch up.

    Args:
        roots: The roots of the lakehouse.
        version: The version to probe.
    """
    probed = ProbedRoots(roots.storage)
    probe = RootProbe(version, probed, None, roots.storage.now_ms())

    def read(path: str) -> None:
        with contextlib.suppress(StorageError):
            probed.read_one(path)

    def take_hint() -> None:
        probe.hinted = read_hint(roots.storage)

    reads: list[Callable[[], None]] = [functools.partial(read, path) for path in _pair(roots.naming, version)]
    return probe, [*reads, take_hint] if roots.storage.is_remote else reads


def find_latest_after(roots: Roots, probe: RootProbe) -> tuple[int, bytes]:
    """Return the latest version and the bytes of its root, starting from a probe of an existing version.

    Makes no further request if the probed version is the latest, otherwise usually takes one more round trip.

    Args:
        roots: The roots of the lakehouse.
        probe: The probe.

    Raises:
        StorageError: A root cannot be read.
    """
    return _latest_after(roots, roots.naming, probe.version, probe.hinted, probe.probed)


def _latest_after(
    roots: Roots, naming: RootNaming, existing: int, hinted: int | None, probed: ProbedRoots
) -> tuple[int, bytes]:
    """Continue from a version that is known to exist. Roots that have already been read are not read again."""
    probed.read(_pair(naming, existing))
    is_latest = existing == MAX_VERSION or probed.contents[naming.path(existing + 1)] is None
    start = max(existing if is_latest else existing + 1, hinted or 0)
    probed.read(_pair(naming, start))  # no root is read twice, unless the hint names a later version
    if probed.contents[naming.path(start)] is None:
        start = existing
    return _latest_from(roots, naming, start, probed)


def confirm_latest(roots: Roots, newest: KnownRoot, probed: ProbedRoots) -> tuple[int, bytes]:
    """Return the latest version and the bytes of its root, in one round trip if ``newest`` is still the latest.

    Reads the hint, the successor of ``newest`` and a few bytes of ``newest`` itself.

    Args:
        roots: The roots of the lakehouse.
        newest: The newest known root.
        probed: Collects the roots that are read. Its wanted versions are read in the same round trip.

    Raises:
        LakehouseNotFoundError: There is no root.
        CorruptFileError: There are roots of several namings.
        StorageError: A root cannot be read.
    """
    naming = roots.naming
    path = naming.path(newest.version)
    still_exists: list[bool] = []

    def read_or_compare(read_path: str) -> None:
        if read_path == path:
            still_exists.append(newest.still_exists(roots.storage))
        else:
            probed.read_one(read_path)

    paths = dict.fromkeys([*_pair(naming, newest.version), *map(naming.path, probed.wanted)])
    hinted = _with_hint(roots.storage, read_or_compare, list(paths))
    if still_exists[0]:
        probed.contents[path] = newest.data
        probed.existing.add(path)
        return _latest_after(roots, naming, newest.version, hinted, probed)
    roots.newest = None
    return find_latest_from(roots, hinted, probed)


def open_roots(roots: Roots) -> tuple[int, bytes, int]:
    """Return the latest version, the bytes of its root and the storage's time, for a lakehouse that is being opened.

    Probes all names that version 0 and the hinted version can have. Raises LakehouseNotFoundError, StorageError, and
    CorruptFileError for roots of several namings.
    """
    probed = ProbedRoots(roots.storage)
    roots.storage.expect_clock()
    start = _probe_oldest(probed) or 0
    read_at_ms = roots.storage.now_ms()
    naming = next((naming for naming in ROOT_NAMINGS if naming.path(0) in probed.existing), ROOT_NAMING)
    probed.read([*_pair(naming, start), *(other.path(start) for other in ROOT_NAMINGS)])
    one_naming(roots.storage.root, probed.existing)
    return *_latest_from(roots, naming, start, probed), read_at_ms


def _probe_oldest(probed: ProbedRoots) -> int | None:
    """Return the hinted version. In the same round trip, determine which names of version 0 exist."""

    def probe(path: str) -> None:
        if path == _OLDEST_PREFIX:
            probed.existing.update(info.path for info in probed.storage.list(path) if root_naming(info.path))
            return
        try:
            probed.storage.read(path, length=1)  # some storages give no reason when they reject a stat
        except FileMissingError:
            return
        probed.existing.add(path)

    names = [_OLDEST_PREFIX] if probed.storage.lists_by_prefix else [naming.path(0) for naming in ROOT_NAMINGS]
    return _with_hint(probed.storage, probe, names)


def _with_hint(storage: Storage, probe: Callable[[str], None], paths: Sequence[str]) -> int | None:
    """Return the hinted version. In the same round trip, probe paths."""
    hinted: list[int | None] = []

    def read_or_probe(path: str) -> None:
        if path == HINT_PATH:
            hinted.append(read_hint(storage))
        else:
            probe(path)

    run_parallel(in_one_round_trip(read_or_probe), [HINT_PATH, *paths], storage.concurrency, storage.serial_read_limit)
    return hinted[0]


def _pair(naming: RootNaming, version: int) -> list[str]:
    return [naming.path(version)] if version == MAX_VERSION else [naming.path(version), naming.path(version + 1)]


def _latest_from(roots: Roots, naming: RootNaming, start: int, probed: ProbedRoots) -> tuple[int, bytes]:
    """Continue from ``start`` and its successor, which were read in the most likely naming."""
    if probed.contents[naming.path(start)] is None:
        candidates = ROOT_NAMINGS if roots.known_naming is None else (naming,)
        probed.read(path for named in candidates for version in (0, start) for path in _pair(named, version))
        naming = one_naming(probed.storage.root, probed.existing) or naming
        start = 0 if probed.contents[naming.path(start)] is None else start
    root = probed.contents[naming.path(start)]
    if root is None:
        return _latest_listed(roots)
    roots.known_naming = naming
    if start == MAX_VERSION or probed.contents[naming.path(start + 1)] is None:
        return start, root
    is_near = start > 0  # without a hint, the latest version may be far away
    near = [version for version in range(start + 2, start + 2 + _N_FOLLOWING) if version <= MAX_VERSION and is_near]
    probed.read(map(naming.path, near))
    for version in near:
        root = probed.contents[naming.path(version)]
        if root is None:
            before = probed.contents[naming.path(version - 1)]
            assert before is not None
            return version - 1, before
    latest = find_later(roots, near[-1] if near else start + 1)
    return latest, roots.storage.read(roots.path(latest))


def read_roots(roots: Roots, versions: Sequence[int], batch: int) -> Iterator[tuple[int, bytes | None]]:
    """Yield versions in the given order with the bytes of their roots, None for a deleted root.

    Args:
        roots: The roots of the lakehouse.
        versions: The versions.
        batch: Number of roots that are read at a time.

    Raises:
        StorageError: A root cannot be read.
    """
    for first in range(0, len(versions), batch):
        paths = [roots.path(version) for version in versions[first : first + batch]]
        contents = roots.storage.read_available(paths)
        for version, data in zip(versions[first : first + batch], contents, strict=True):
            if isinstance(data, bytes):
                yield version, data
            elif isinstance(data, FileMissingError):
                yield version, None
            else:
                raise data


def find_later(roots: Roots, existing: int) -> int:
    """Return the latest version, searching from an existing version. Takes one request if that version is the latest.

    Version numbers have no gaps, because a root is never removed without a replacement. Raises StorageError.
    """
    step = 1
    while existing + step <= MAX_VERSION and _exists(roots, existing + step):
        existing += step
        step *= 2
    absent = min(existing + step, MAX_VERSION + 1)
    while absent - existing > 1:
        middle = (existing + absent) // 2
        if _exists(roots, middle):
            existing = middle
        else:
            absent = middle
    return existing


def _exists(roots: Roots, version: int) -> bool:
    return roots.storage.exists(roots.path(version))


def _latest_listed(roots: Roots) -> tuple[int, bytes]:
    """Return the highest listed version and the bytes of its root. Used if another program deleted version 0."""
    paths = _listed_roots(roots.storage)
    naming = one_naming(roots.storage.root, paths)
    if naming is None:
        raise LakehouseNotFoundError(f"there is no lakehouse at {roots.storage.root}; create one with init")
    roots.known_naming = naming
    latest = max(_versions(paths))
    return latest, roots.storage.read(naming.path(latest))


def listed_versions(storage: Storage) -> set[int]:
    """Return the versions of all listed root files.

    Raises CorruptFileError for several namings, VersionNotFoundError for a number beyond the maximum version.
    """
    paths = _listed_roots(storage)
    one_naming(storage.root, paths)
    return _versions(paths)


def _listed_roots(storage: Storage) -> list[str]:
    return [info.path for info in storage.list(ROOT_PREFIX) if root_naming(info.path) is not None]


def _versions(paths: Iterable[str]) -> set[int]:
    return {version for path in paths if (version := parse_root_path(path)) is not None}


def versions_beyond_gap(roots: Roots, latest: int, listed: Iterable[int]) -> list[int]:
    """Return the listed versions above the latest in ascending order, or none if the next one has been committed."""
    beyond = sorted(version for version in listed if version > latest)
    return beyond if beyond and not _exists(roots, latest + 1) else []


def check_no_gap(roots: Roots, latest: int) -> None:
    """Raise CorruptFileError if there is a root beyond the latest version, because a root between them was deleted.

    A new commit would fill the gap and be hidden by the versions after it. Also raises CorruptFileError for roots of
    several namings.
    """
    if beyond := versions_beyond_gap(roots, latest, listed_versions(roots.storage)):
        raise CorruptFileError(
            f"the root of version {latest + 1} is missing, though version {max(beyond)} exists; restore it first",
            path=roots.path(latest + 1),
            version=latest + 1,
        )
