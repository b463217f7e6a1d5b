"""Finding and reading the latest version (docs/internals/protocol.md, F)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trinitylake_ops.errors import CorruptFileError, FileMissingError, TransactionExpiredError, VersionExpiredError
from trinitylake_ops.versions.root_files import ProbedRoots, read_hint
from trinitylake_ops.versions.roots import RootProbe, confirm_latest, find_latest_after, find_latest_from, open_roots
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot

_MOST_PROBES = 5


def latest_snapshot(files: LakehouseFiles, probed: ProbedRoots | None = None) -> Snapshot:
    """Return the latest version, and read the versions that ``probed`` wants on the way.

    Raises LakehouseNotFoundError, CorruptFileError, StorageError.
    """
    snapshot = _resolve_latest(files, probed)
    for _ in range(_MOST_PROBES):
        if not snapshot.root.is_sealed:
            return snapshot
        # A reader that sleeps long enough finds the latest version, and reads it when it was purged.
        snapshot = _resolve_latest(files)
    raise CorruptFileError(
        f"the root of version {snapshot.version}, the latest, is sealed: another program copied one of a purged"
        " version; move such files away, from the latest version down to one that is not sealed",
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
        found = confirm_latest(files.roots, newest, probed or ProbedRoots(files.roots.storage))
        return _snapshot(files, *found, read_at_ms)
    files.storage.expect_clock()
    hinted = read_hint(files.storage)
    read_at_ms = files.storage.now_ms()  # asked before any root is read; a storage may know it from the hint's answer
    return _snapshot(files, *find_latest_from(files.roots, hinted, probed), read_at_ms)


def open_latest(files: LakehouseFiles) -> None:
    """Find the latest version of a lakehouse that was not looked at before; who asks for it next asks no storage.

    Raises LakehouseNotFoundError, StorageError, and CorruptFileError when roots of several namings are there.
    """
    files.roots.opened(*open_roots(files.roots))


def latest_after(files: LakehouseFiles, probe: RootProbe) -> Snapshot:
    """Return the latest version from a look after one that exists, mostly without another request."""
    snapshot = _snapshot(files, *find_latest_after(files.roots, probe), probe.read_at_ms)
    return latest_snapshot(files) if snapshot.root.is_sealed else snapshot


def _snapshot(files: LakehouseFiles, version: int, root_file: bytes, read_at_ms: int) -> Snapshot:
    root = files.roots.known(version, root_file)
    return Snapshot(files, version, root.path, root.node, read_at_ms)


@contextlib.contextmanager
def reading_bases(*bases: Snapshot) -> Iterator[None]:
    """Read files of versions in the block. An error tells when a file vanished because its version was purged.

    Raises TransactionExpiredError instead of FileMissingError or VersionExpiredError in that case. This can happen to a
    transaction that is young enough now, but was too old for the time to live at the purge.
    """
    try:
        yield
    except (FileMissingError, VersionExpiredError) as error:
        for base in bases:
            if base.is_sealed_now():
                raise TransactionExpiredError(
                    f"version {base.version}, which it is based on, was expired and purged; begin a new one",
                    path=base.location,
                    version=base.version,
                ) from error
        raise
