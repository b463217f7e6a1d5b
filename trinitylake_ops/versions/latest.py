"""Find and read the latest version (protocol.md, F)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trinitylake_ops.errors import CorruptFileError, FileMissingError, TransactionExpiredError, VersionExpiredError
from trinitylake_ops.versions.root_files import ProbedRoots, read_hint
from trinitylake_ops.versions.roots import RootProbe, confirm_latest, find_latest_after, find_latest_from, open_roots
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

_MAX_PROBES = 5


def latest_snapshot(files: LakehouseFiles, probed: ProbedRoots | None = None) -> Snapshot:
    """Return the latest version.

    Args:
        files: The files of the lakehouse.
        probed: Collects the roots that are read, including those of its wanted versions.

    Raises:
        LakehouseNotFoundError: There is no root.
        CorruptFileError: The latest root is sealed, or there are roots of several namings.
        StorageError: A root cannot be read.
    """
    snapshot = _resolve_latest(files, probed)
    for _ in range(_MAX_PROBES):
        if not snapshot.root.is_sealed:
            return snapshot
        # If a reader is suspended between finding and reading a version, the version may have been purged.
        snapshot = _resolve_latest(files)
    raise CorruptFileError(
        f"the root of the latest version, {snapshot.version}, is sealed: another program copied the root of a purged"
        " version; move sealed roots away, from the latest version down to the first that is not sealed",
        path=snapshot.location,
        version=snapshot.version,
    )


def _resolve_latest(files: LakehouseFiles, probed: ProbedRoots | None = None) -> Snapshot:
    opened = files.roots.take_opened()
    if opened is not None and not (probed and probed.wanted):
        return Snapshot(files, opened.root.version, opened.root.path, opened.root.node, opened.read_at_ms)
    newest = files.roots.newest
    if newest is not None:
        read_at_ms = files.storage.now_ms()
        version, data = confirm_latest(files.roots, newest, probed or ProbedRoots(files.roots.storage))
        return _snapshot(files, version, data, read_at_ms)
    files.storage.expect_clock()
    hinted = read_hint(files.storage)
    read_at_ms = files.storage.now_ms()  # before any root is read; the hint's response may have set the clock
    return _snapshot(files, *find_latest_from(files.roots, hinted, probed), read_at_ms)


def open_latest(files: LakehouseFiles) -> None:
    """Find the latest version of a lakehouse that is being opened, so that the next read need not look it up again.

    Raises LakehouseNotFoundError, StorageError, and CorruptFileError for roots of several namings.
    """
    files.roots.opened(*open_roots(files.roots))


def latest_after(files: LakehouseFiles, probe: RootProbe) -> Snapshot:
    """Return the latest version, starting from a probe of an existing version, usually without another request."""
    snapshot = _snapshot(files, *find_latest_after(files.roots, probe), probe.read_at_ms)
    return latest_snapshot(files) if snapshot.root.is_sealed else snapshot


def _snapshot(files: LakehouseFiles, version: int, root_file: bytes, read_at_ms: int) -> Snapshot:
    root = files.roots.known(version, root_file)
    return Snapshot(files, version, root.path, root.node, read_at_ms)


@contextlib.contextmanager
def reading_bases(*bases: Snapshot) -> Iterator[None]:
    """Read files of versions in the block, and report a file that is missing because its version was purged.

    Raises TransactionExpiredError in that case, instead of FileMissingError or VersionExpiredError. This happens to a
    transaction whose age is below the current time to live, but exceeded the time to live that applied at the purge.
    """
    try:
        yield
    except (FileMissingError, VersionExpiredError) as error:
        for base in bases:
            if base.is_sealed_now():
                raise TransactionExpiredError(
                    f"transaction expired: its base version {base.version} was expired and purged; begin a new one",
                    path=base.location,
                    version=base.version,
                ) from error
        raise
