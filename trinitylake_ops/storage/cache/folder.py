"""A folder on the local disk that caches immutable files across processes and runs.

The folder may be lost, damaged or full at any time. Such a failure is not an error: the reader then reads from the
storage. The name of a cached file is a hash of the storage and the path of the original. Its content is::

    8 bytes    magic
    32 bytes   SHA-256 of the cached file's name and the body
    the body

so that a body that was truncated, changed, or copied from another cached file is detected.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import re
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from trinitylake_ops.storage.local.posix_files import READING, read_range, write_new_file

logger = logging.getLogger(__name__)

_MAGIC = b"TLCACHE1"
_HEADER_BYTES = len(_MAGIC) + hashlib.sha256().digest_size
_OWN_FOLDER = "trinitylake-cache"
_OWN_NAME = re.compile(r"[0-9a-f]{64}(\.[0-9a-f]{32}\.tmp)?")

_BLOCK_BYTES = 4096
_LARGEST_SHARE = 16
#: The folder is scanned each time that this process has written ``limit_bytes / _SCAN_SHARE`` bytes.
_SCAN_SHARE = 32
_TOUCH_AFTER_S = 60
_ABANDONED_AFTER_S = 3600
_PAUSE_AFTER_FAILURE_S = 300


class CacheFolder:
    """Verified copies of immutable files, shared by processes.

    The copies are stored in a subfolder of ``folder``, which must belong to the user of the process and be inaccessible
    to other users (mode 0700; files 0600). Sizes are rounded up to blocks of 4 KiB. A file larger than one sixteenth of
    the limit is not cached. When the folder approaches its limit, the least recently used files are deleted. The time
    of the last use has a resolution of one minute. Only the first failure is logged. After a failed write, nothing is
    written for five minutes.

    Args:
        folder: Path of the parent folder. It is created if it does not exist.
        limit_bytes: Maximum size of all copies.

    Attributes:
        has_failed: Whether the folder has been unusable at least once.
    """

    def __init__(self, folder: str, limit_bytes: int):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._own_folder = os.path.join(folder, _OWN_FOLDER)
        self._is_ready = False
        self.has_failed = False
        self._writes_paused_until_s = 0.0
        self._undeletable: set[str] = set()
        # A short-lived process writes less than this before it ends. Because the count starts at a random value,
        # some of these processes still scan.
        self._until_scan_bytes = random.uniform(0, limit_bytes / _SCAN_SHARE)

    def get(self, identity: str, path: str) -> bytes | None:
        """Return the cached body of a file, or None. Delete the copy if it is damaged.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.
        """
        name = _name(identity, path)
        cached_path = os.path.join(self._own_folder, name)
        try:
            self._make_ready()
            data = read_range(os.open(os.fsencode(cached_path), READING), 0, None)
        except FileNotFoundError:
            return None  # the file was not cached, or another process evicted it
        except OSError as error:
            self._failed("read", error)
            return None
        if name in self._undeletable:
            return None
        if not _is_right(name, data):
            logger.warning("deleted the damaged cache file %s; the original is read from the storage", cached_path)
            self._delete(name)
            return None
        self._note_use(cached_path)
        return data[_HEADER_BYTES:]

    def put(self, identity: str, path: str, body: bytes) -> None:
        """Cache a copy of a file, best effort.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.
            body: The content of the file.
        """
        size_bytes = _disk_bytes(_HEADER_BYTES + len(body))
        if size_bytes * _LARGEST_SHARE > self.limit_bytes or time.monotonic() < self._writes_paused_until_s:
            return
        name = _name(identity, path)
        try:
            self._make_ready()
            _write(os.path.join(self._own_folder, name), _MAGIC + _checksum(name, body) + body)
            self._undeletable.discard(name)
            self._until_scan_bytes -= size_bytes
            if self._until_scan_bytes <= 0:
                self._until_scan_bytes = self.limit_bytes / _SCAN_SHARE
                self._evict()
        except FileNotFoundError:
            self._is_ready = False  # the folder was removed; the next call creates it again
        except OSError as error:
            self._writes_paused_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
            self._failed("write to", error)

    def drop(self, identity: str, path: str) -> bool:
        """Delete the copy of a file; if that fails, never return the copy again.

        Args:
            identity: The identity of the storage that contains the file.
            path: The path of the file in that storage.

        Returns:
            Whether a copy existed.
        """
        return self._delete(_name(identity, path))

    def _delete(self, name: str) -> bool:
        try:
            os.unlink(os.path.join(self._own_folder, name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            self._failed("delete from", error)
            if name in self._undeletable:
                return False
            self._undeletable.add(name)
        return True

    def _make_ready(self) -> None:
        """Create the folder. Raise OSError if that fails, or if other users can access the folder."""
        if self._is_ready:
            return
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            os.makedirs(self._own_folder, mode=0o700, exist_ok=True)
            status = os.lstat(self._own_folder)
        except FileNotFoundError as error:
            raise NotADirectoryError(f"cannot create {self._own_folder!r}: the parent is not a folder") from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{self._own_folder!r} must be a folder that this user owns, with mode 0700")
        self._is_ready = True

    def _note_use(self, cached_path: str) -> None:
        try:
            if time.time() - os.stat(cached_path).st_mtime > _TOUCH_AFTER_S:
                os.utime(cached_path)
        except FileNotFoundError:
            return  # evicted in the meantime
        except OSError as error:
            self._failed("update a modification time in", error)

    def _failed(self, verb: str, error: OSError) -> None:
        if not self.has_failed:
            self.has_failed = True
            logger.warning("cannot %s the cache folder %s: %s; continuing without it", verb, self.folder, error)

    def _evict(self) -> None:
        """If the files exceed 7/8 of the limit, delete the least recently used files until 3/4 of the limit remain."""
        files = sorted(self._files())
        total_bytes = sum(file.size_bytes for file in files)
        if total_bytes * 8 <= self.limit_bytes * 7:
            return
        for file in files:
            if total_bytes * 4 <= self.limit_bytes * 3:
                return
            _remove(file.path)
            total_bytes -= file.size_bytes

    def _files(self) -> Iterator[_CachedFile]:
        """Yield all cached files, and delete temporary files of writers that were killed."""
        now_s = time.time()
        with os.scandir(self._own_folder) as entries:
            for entry in entries:
                match = _OWN_NAME.fullmatch(entry.name)
                if match is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process deleted it
                if match[1] and now_s - status.st_mtime > _ABANDONED_AFTER_S:
                    _remove(entry.path)
                else:
                    yield _CachedFile(status.st_mtime_ns, _disk_bytes(status.st_size), entry.path)


@dataclass(frozen=True, slots=True, order=True)
class _CachedFile:
    used_at_ns: int
    size_bytes: int
    path: str


def _name(identity: str, path: str) -> str:
    return hashlib.sha256(f"{identity}\0{path}".encode(errors="surrogatepass")).hexdigest()


def _checksum(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + body).digest()


def _is_right(name: str, data: bytes) -> bool:
    return data[:_HEADER_BYTES] == _MAGIC + _checksum(name, data[_HEADER_BYTES:])


def _disk_bytes(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _write(path: str, data: bytes) -> None:
    """Write a file atomically. It is not synced, because the checksum detects incomplete files after a crash."""
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    try:
        write_new_file(os.fsencode(temporary), data, fsync=False, mode=0o600)
        os.replace(temporary, path)
    except OSError:
        _remove(temporary)
        raise


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except FileNotFoundError:
        return  # another process deleted it
