"""Storage in the memory of one process, for tests, demonstrations and scratch lakehouses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from trinitylake_ops.errors import FileExistsAlreadyError, FileMissingError, InvalidLocationError
from trinitylake_ops.storage.error_table import EXISTS, MISSING
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES, FileInfo, Storage
from trinitylake_ops.storage.paths import check_path, check_prefix, check_range, is_hidden, split_root


class _Files:
    """All files under one ``memory://name`` root."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        #: Content and modification time in milliseconds by key. Guarded by ``lock``.
        self.by_key: dict[str, tuple[bytes, int]] = {}


_files_by_name: dict[str, _Files] = {}
_registry_lock = threading.Lock()


class MemoryStorage(Storage):
    """Files under ``memory://name/`` or ``memory://name/path/``.

    All MemoryStorage objects of a process with the same name share their files, so that a lakehouse can be opened
    again. Another process, for example a Spark worker, has separate files.

    Args:
        root: Normalized root URI.
        whole_file_limit_bytes: Size limit of reads without a length or a limit.

    Raises:
        InvalidLocationError: The root has no name.
    """

    concurrency = 1  # threads would only wait for the lock
    lists_by_prefix = True

    def __init__(self, root: str, *, whole_file_limit_bytes: int = WHOLE_FILE_LIMIT_BYTES):
        name, path = split_root(root, "memory")
        if not name:
            raise InvalidLocationError(f"cannot open {root!r}: the root has no name; use memory://NAME/")
        self.root = root
        self.whole_file_limit_bytes = whole_file_limit_bytes
        self._key_prefix = path
        with _registry_lock:
            self._files = _files_by_name.setdefault(name, _Files())

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        data, _ = self._find(path)
        self._check_size(path, len(data) - offset, length, limit_bytes)
        return data[offset : None if length is None else offset + length]

    def stat(self, path: str) -> FileInfo:
        data, last_modified_ms = self._find(path)
        return FileInfo(path, len(data), last_modified_ms)

    def create(self, path: str, data: bytes) -> None:
        key, body = self._key(path), bytes(data)
        with self._files.lock:
            if key in self._files.by_key:
                raise FileExistsAlreadyError(EXISTS.format(path=path, root=self.root), path=path)
            self._files.by_key[key] = (body, self.now_ms())

    def write(self, path: str, data: bytes) -> None:
        key, body = self._key(path), bytes(data)
        with self._files.lock:
            self._files.by_key[key] = (body, self.now_ms())

    def delete(self, path: str) -> None:
        key = self._key(path)
        with self._files.lock:
            self._files.by_key.pop(key, None)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        check_prefix(prefix)
        with self._files.lock:
            files = tuple(self._files.by_key.items())
        return self._matching(files, prefix)

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopen, (self.root, self.whole_file_limit_bytes))

    def _matching(self, files: tuple[tuple[str, tuple[bytes, int]], ...], prefix: str) -> Iterator[FileInfo]:
        for key, (data, last_modified_ms) in files:
            path = key.removeprefix(self._key_prefix)
            if key.startswith(self._key_prefix + prefix) and not is_hidden(path, prefix):
                yield FileInfo(path, len(data), last_modified_ms)

    def _find(self, path: str) -> tuple[bytes, int]:
        key = self._key(path)
        with self._files.lock:
            entry = self._files.by_key.get(key)
        if entry is None:
            raise FileMissingError(MISSING.format(path=path, root=self.root), path=path)
        return entry

    def _key(self, path: str) -> str:
        check_path(path)
        return self._key_prefix + path


def _reopen(root: str, whole_file_limit_bytes: int) -> MemoryStorage:
    return MemoryStorage(root, whole_file_limit_bytes=whole_file_limit_bytes)


def drop_memory_root(root: str) -> None:
    """Delete all files under a memory root, for all MemoryStorage objects of this process."""
    storage = MemoryStorage(root)
    with storage._files.lock:
        for key in [key for key in storage._files.by_key if key.startswith(storage._key_prefix)]:
            del storage._files.by_key[key]
