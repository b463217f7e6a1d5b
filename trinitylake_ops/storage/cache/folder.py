"""A folder on the local disk that keeps immutable files for all processes and later runs.

The folder may be lost, damaged or full at any time. No such failure is an error for the reader, who then asks the
storage. A file's name is a hash of the storage and the path that it copies. The file holds::

    8 bytes    magic
    32 bytes   SHA-256 of its own name and of the body
    the body

so that a body that was cut, changed, or copied from another file can be told from a right one.
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
#: After each written part of the limit of this size, the folder is looked through once.
_SCAN_SHARE = 32
_TOUCH_AFTER_S = 60
_ABANDONED_AFTER_S = 3600
_PAUSE_AFTER_FAILURE_S = 300


class CacheFolder:
    """Verified copies of immutable files, at most ``limit_bytes`` of them, shared by processes.

    The copies are in a folder of their own below ``folder``. It must belong to the user of the process and be closed to
    others (mode 0700; files 0600). Files count in blocks of 4 KiB. A file of more than a sixteenth of the limit is not
    kept. When the folder nears its limit, the least recently used files are deleted. A use is noted at most once a
    minute. The first failure is logged. After a failed write, nothing is written for five minutes.
    """

    def __init__(self, folder: str, limit_bytes: int):
        self.folder = folder
        self.limit_bytes = limit_bytes
        self._own_folder = os.path.join(folder, _OWN_FOLDER)
        self._is_ready = False
        self._has_failed = False
        self._writes_paused_until_s = 0.0
        self._undeletable: set[str] = set()
        # A short-lived process writes less than that part of the limit, so whether it looks is a matter of chance.
        self._until_scan_bytes = random.uniform(0, limit_bytes / _SCAN_SHARE)

    def get(self, identity: str, path: str) -> bytes | None:
        """Return the body kept for a path, or None. A file that is not a right copy is deleted."""
        name = _name(identity, path)
        place = os.path.join(self._own_folder, name)
        try:
            self._make_ready()
            data = read_range(os.open(os.fsencode(place), READING), 0, None)
        except FileNotFoundError:
            return None  # the file was not kept, or another process evicted it
        except OSError as error:
            self._failed("read", error)
            return None
        if name in self._undeletable:
            return None
        if not _is_right(name, data):
            logger.warning("dropped the damaged file %s of the cache; it is read again from the storage", place)
            self._delete(name)
            return None
        self._note_use(place)
        return data[_HEADER_BYTES:]

    def put(self, identity: str, path: str, body: bytes) -> None:
        """Keep a copy of a file, best effort."""
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
            self._is_ready = False  # the folder was removed: the next call makes it again
        except OSError as error:
            self._writes_paused_until_s = time.monotonic() + _PAUSE_AFTER_FAILURE_S
            self._failed("write to", error)

    def drop(self, identity: str, path: str) -> bool:
        """Delete the copy of a path, or if that fails never hand it out again. Returns whether there was one."""
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
        """Make the folder. Raises OSError when that fails, and for a folder that others could write to."""
        if self._is_ready:
            return
        try:
            os.makedirs(self.folder, mode=0o700, exist_ok=True)
            os.makedirs(self._own_folder, mode=0o700, exist_ok=True)
            status = os.lstat(self._own_folder)
        except FileNotFoundError as error:
            raise NotADirectoryError(f"{self._own_folder!r} cannot be made") from error
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise PermissionError(f"{self._own_folder!r} must be a folder of this user with mode 0700")
        self._is_ready = True

    def _note_use(self, place: str) -> None:
        try:
            if time.time() - os.stat(place).st_mtime > _TOUCH_AFTER_S:
                os.utime(place)
        except FileNotFoundError:
            return  # evicted meanwhile
        except OSError as error:
            self._failed("note a use in", error)

    def _failed(self, verb: str, error: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            logger.warning("cannot %s the cache folder %s: %s; going on without it", verb, self.folder, error)

    def _evict(self) -> None:
        """Once the files take more than 7/8 of the limit, delete the least recently used ones, down to 3/4 of it."""
        files = sorted(self._files())
        total_bytes = sum(file.size_bytes for file in files)
        if total_bytes * 8 <= self.limit_bytes * 7:
            return
        for file in files:
            if total_bytes * 4 <= self.limit_bytes * 3:
                return
            _remove(file.place)
            total_bytes -= file.size_bytes

    def _files(self) -> Iterator[_CachedFile]:
        """Return all files of the cache. Temporary files of writers that were killed are deleted on the way."""
        now_s = time.time()
        with os.scandir(self._own_folder) as entries:
            for entry in entries:
                match = _OWN_NAME.fullmatch(entry.name)
                if match is None:
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue  # another process was faster
                if match[1] and now_s - status.st_mtime > _ABANDONED_AFTER_S:
                    _remove(entry.path)
                else:
                    yield _CachedFile(status.st_mtime_ns, _disk_bytes(status.st_size), entry.path)


@dataclass(frozen=True, slots=True, order=True)
class _CachedFile:
    used_at_ns: int
    size_bytes: int
    place: str


def _name(identity: str, path: str) -> str:
    return hashlib.sha256(f"{identity}\0{path}".encode(errors="surrogatepass")).hexdigest()


def _checksum(name: str, body: bytes) -> bytes:
    return hashlib.sha256(name.encode() + body).digest()


def _is_right(name: str, data: bytes) -> bool:
    return data[:_HEADER_BYTES] == _MAGIC + _checksum(name, data[_HEADER_BYTES:])


def _disk_bytes(size_bytes: int) -> int:
    return -(-size_bytes // _BLOCK_BYTES) * _BLOCK_BYTES


def _write(place: str, data: bytes) -> None:
    """Write a file whole or not at all. The file is not synced: the checksum shows what a crash left of it."""
    temporary = f"{place}.{uuid.uuid4().hex}.tmp"
    try:
        write_new_file(os.fsencode(temporary), data, fsync=False, mode=0o600)
        os.replace(temporary, place)
    except OSError:
        _remove(temporary)
        raise


def _remove(place: str) -> None:
    try:
        os.unlink(place)
    except FileNotFoundError:
        return  # another process was faster
