"""Storage in Redis, Valkey or a compatible server, through redis-py."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    StorageError,
    TransientError,
)
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.error_table import EXISTS, MISSING
from trinitylake_ops.storage.http.requests import Request, StorageRequest
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import check_range, is_hidden
from trinitylake_ops.storage.redis.client import RedisClient
from trinitylake_ops.storage.redis.errors import (
    NoConnectionError,
    NoResponseError,
    error_from_reply,
    error_without_connection,
    error_without_response,
)
from trinitylake_ops.storage.redis.server import (
    AFTER_ALL,
    AFTER_PATH,
    CREATE,
    DELETE,
    READ,
    WRITE,
    Command,
    ServerClock,
    file_info,
    member_range,
    path_of,
)
from trinitylake_ops.storage.redis.settings import (
    MAX_FILE_BYTES,
    MAX_FILES_PER_REQUEST,
    RedisLocation,
    RedisSettings,
    redis_of_environment,
)
from trinitylake_ops.storage.retry import retry_listing

T = TypeVar("T")


class RedisStorage(Storage):
    """Files under ``redis://host:port/db/name/`` or ``rediss://...``, and in folders below.

    Each operation is one request, which is sent once. A ``create`` is one script that sets the value if it does not
    exist and adds the file to the index. RetryStorage retries requests, except for the second and later pages of a
    listing, which this class retries. If creates and writes wait for a disk or for replicas, the script and the wait
    are sent together on one connection.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``REDIS_OPTIONS`` (docs/storages/README.md).

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    concurrency = 16
    lists_by_prefix = True
    delete_batch_size = MAX_FILES_PER_REQUEST

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        self.root = root
        self.options = StorageOptions(options)
        self.whole_file_limit_bytes = WHOLE_FILE_LIMIT.value(self.options)
        self._location = RedisLocation.of(root)
        self._settings = RedisSettings.of(self.options, self._location)
        self._client = RedisClient(self._location, self._settings)
        self._clock = ServerClock()
        self._unconfirmed: set[str] = set()
        self.after_fork_in_child()
        at_fork(self)

    def __repr__(self) -> str:
        return f"RedisStorage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[RedisStorage], tuple[str, StorageOptions]]:
        return (RedisStorage, (self.root, self.options.on_top_of(redis_of_environment(self.root, self.options))))

    def after_fork_in_child(self) -> None:
        """Replace the lock: a forked child does not have the thread that held it."""
        self._lock = threading.Lock()

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        key = self._location.content_key(self._location.member_path(path))
        if path in self._unconfirmed:
            self._confirm(path)
        max_bytes = self.whole_file_limit_bytes if limit_bytes is None else limit_bytes
        command: Command = ("EVAL", READ, 1, key, offset, -1 if length is None else length, max_bytes)
        reply = self._send(Request.READ, path, command)
        if reply is None:
            raise FileMissingError(MISSING.format(path=path, root=self.root), path=path)
        if isinstance(reply, int):
            self._check_size(path, reply, length, limit_bytes)
        assert isinstance(reply, bytes)
        return reply

    def stat(self, path: str) -> FileInfo:
        first, last = member_range(self._location.member_path(path))
        members = self._send(Request.STAT, path, ("ZRANGEBYLEX", self._location.index_key, first, last, "LIMIT", 0, 1))
        if not members:
            raise FileMissingError(MISSING.format(path=path, root=self.root), path=path)
        return self._file_info(path, members[0])

    def create(self, path: str, data: bytes) -> None:
        if self._put(Request.CREATE, CREATE, path, data) == 0:
            raise FileExistsAlreadyError(EXISTS.format(path=path, root=self.root), path=path)

    def write(self, path: str, data: bytes) -> None:
        self._put(Request.WRITE, WRITE, path, data)

    def delete(self, path: str) -> None:
        self.delete_batch([path])

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to 1,000 files in one script, which deletes all of them or fails as a whole."""
        members = [self._location.member_path(path) for path in paths]
        if members:
            keys = [self._location.index_key, *map(self._location.content_key, members)]
            self._send(Request.DELETE, paths[0], ("EVAL", DELETE, len(keys), *keys, *members))
        return {}

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._files(prefix, self._location.member_prefix(prefix))

    def now_ms(self) -> int:
        return self._clock.now_ms(self._fetch_time)

    def _fetch_time(self) -> float:
        seconds, microseconds = self._send(Request.CLOCK, "", ("TIME",))
        return int(seconds) * 1000 + int(microseconds) / 1000

    def _put(self, operation: Request, script: str, path: str, data: bytes) -> int:
        member, body = self._location.member_path(path), bytes(data)
        if len(body) > MAX_FILE_BYTES:
            raise StorageError(
                f"cannot {operation.value} {path!r} under {self.root}: it has {len(body)} bytes, more than the limit of"
                f" {MAX_FILE_BYTES} bytes of a Redis value; write smaller files",
                path=path,
            )
        keys = self._location.index_key, self._location.content_key(member)
        command: Command = ("EVAL", script, len(keys), *keys, member, body)
        if self._settings.wait is None:
            reply: int = self._send(operation, path, command)
            return reply
        try:
            return self._send_and_wait(operation, path, command)
        except AmbiguousWriteError:
            self._unconfirmed.add(path)
            raise

    def _send_and_wait(self, operation: Request, path: str, command: Command) -> int:
        """Send a script and, in the same request, wait until its effects are on the disk or on enough replicas.

        Raise AmbiguousWriteError if the wait fails: the file exists, but may be lost in a crash or a failover.
        """
        wait = self._settings.wait
        assert wait is not None
        reply, copies = self._exchange(operation, path, command, wait)
        request = self._request(operation, path)
        if isinstance(reply, Exception):
            raise error_from_reply(request, reply)
        if not isinstance(copies, Exception) and self._are_enough(copies):
            return int(reply)
        outcome = str(copies) if isinstance(copies, Exception) else f"{wait[0]} returned {copies}"
        raise AmbiguousWriteError(
            f"{request.failure}: the disk or the replicas did not confirm it in time ({self.options.redact(outcome)});"
            " a failover or a crash may lose it: read the path to find out",
            path=path,
        )

    def _are_enough(self, copies: Any) -> bool:
        if self._settings.waits_for_disk:
            return int(copies[0]) >= 1 and int(copies[1]) >= self._settings.wait_replicas
        return int(copies) >= self._settings.wait_replicas

    def _confirm(self, path: str) -> None:
        """Wait for the confirmation of an unconfirmed file before it is read, because it may be a commit.

        The wait covers all earlier changes. Raise TransientError if it fails.
        """
        key = self._location.index_key + b":confirmed"
        try:
            # A wait only covers changes up to the last change of its own connection, so this must change a key.
            self._send_and_wait(Request.WRITE, path, ("INCR", key))
        except AmbiguousWriteError as error:
            raise TransientError(f"{error.message}; readers cannot rely on the file yet", path=path) from None
        with self._lock:
            self._unconfirmed.discard(path)

    def _files(self, prefix: str, first: bytes) -> Iterator[FileInfo]:
        start, end = b"[" + first, b"(" + first + AFTER_ALL
        page = self._page(prefix, start, end)
        while page:
            for member in page:
                info = self._file_info(prefix, member)
                if not is_hidden(info.path, prefix):
                    yield info
            if len(page) < MAX_FILES_PER_REQUEST:
                return
            # Continue after all members of the last path, because a write may have replaced its member.
            after = b"[" + path_of(page[-1]) + AFTER_PATH
            page = retry_listing(self._page, prefix, after, end)

    def _page(self, prefix: str, start: bytes, end: bytes) -> Sequence[bytes]:
        command: Command = (
            "ZRANGEBYLEX", self._location.index_key, start, end, "LIMIT", 0, MAX_FILES_PER_REQUEST,
        )  # fmt: skip
        page: Sequence[bytes] = self._send(Request.LIST, prefix, command)
        return page

    def _file_info(self, path: str, member: bytes) -> FileInfo:
        info = file_info(member, self._location.folder)
        if info is None:
            raise StorageError(
                f"the index of {self.root} contains an invalid entry: another program writes to the key"
                f" {self._location.index_key.decode()!r}; delete its entries",
                path=path,
            )
        return info

    def _send(self, operation: Request, path: str, command: Command) -> Any:
        """Send one command and return its reply. Raise typed errors."""
        (reply,) = self._exchange(operation, path, command)
        if isinstance(reply, Exception):
            raise error_from_reply(self._request(operation, path), reply)
        return reply

    def _exchange(self, operation: Request, path: str, *commands: Command) -> Sequence[Any]:
        """Send commands and return their replies, which may be exceptions. Raise typed errors if there are none."""
        failure: StorageError
        try:
            return self._client.send(commands, changes_files=operation.changes_files)
        except NoConnectionError as error:
            failure = error_without_connection(self._request(operation, path), error)
        except NoResponseError as error:
            failure = error_without_response(self._request(operation, path), error)
        # Raised outside the handler, because messages of client libraries may contain parts of the request.
        raise failure

    def _request(self, operation: Request, path: str) -> StorageRequest:
        return StorageRequest(operation, path, self.root, self.options)
