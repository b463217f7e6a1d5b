"""S3 through obstore."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

import obstore
from botocore.exceptions import BotoCoreError
from obstore.exceptions import InvalidPathError, UnauthenticatedError

from trinitylake_ops.errors import FileMissingError, StorageError, TrinityLakeError
from trinitylake_ops.storage.http.aws import error_without_credentials
from trinitylake_ops.storage.http.requests import Request, StorageRequest, TransportFailure, error_from_transport
from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import check_range, is_hidden
from trinitylake_ops.storage.retry import retry_listing
from trinitylake_ops.storage.s3 import s3fs_client
from trinitylake_ops.storage.s3.errors import error_from_response, is_range_beyond_end
from trinitylake_ops.storage.s3.obstore_client import Fork, S3Stores
from trinitylake_ops.storage.s3.obstore_errors import (
    OBSTORE_ERRORS,
    is_response_missing,
    reason,
    server_message,
    status_and_code,
    transport_failure,
)
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage
from trinitylake_ops.storage.s3.settings import MAX_KEYS_PER_REQUEST, s3_of_environment

if TYPE_CHECKING:
    from obstore import GetOptions, ListStream, ObjectMeta, PutMode

_PROVIDER = "External AWS credential provider"


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for an exception of obstore.

    Args:
        request: The request that failed.
        error: The exception.
        endpoint: Address of the server, for the message.
    """
    text = str(error)
    status, code = status_and_code(error)
    if status is not None:
        return error_from_response(request, status, code, server_message(error))
    if isinstance(error, UnauthenticatedError) and _PROVIDER in text:
        return error_without_credentials(request, "the AWS configuration has no valid credentials")
    if is_response_missing(error):
        return error_from_transport(request, transport_failure(error), endpoint, reason(error))
    if request.operation.changes_files:
        # The request may have taken effect even though obstore cannot parse the response.
        return error_from_transport(request, TransportFailure.NO_RESPONSE, endpoint, "the response is invalid")
    return StorageError(
        f"{request.failure}: obstore cannot parse the server's response; check the option 'endpoint', or set the option"
        " 'client' to 's3fs'",
        path=request.path,
    )


T = TypeVar("T")

# obstore rejects keys with ASCII control characters. It passes all other characters of paths to S3 literally, including
# '%', '?', ' ' and '\\'.
_NOT_IN_OBSTORE = re.compile(r"[\x00-\x1f\x7f]")


class ObstoreS3Storage(S3Storage):
    """A faster S3Storage: reads, stats, creates, writes and lists through obstore.

    It uses s3fs for everything that obstore does not support in the required way: deletes, because obstore raises a
    single error for a DeleteObjects request that failed for some files; ``now_ms``, because obstore does not expose the
    ``Date`` header; names with control characters; the rest of a listing after a key that obstore rejects, for example
    ``a//b``; and all requests in a forked child. A listing sends one additional request for each empty file and each
    key ``folder/``, to distinguish them.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``S3_OPTIONS`` (docs/storages/README.md).

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    concurrency = 32
    lists_by_prefix = True

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        super().__init__(root, options)
        self._stores = S3Stores.shared(self._client, self._location.bucket, self._settings, self.options)

    def __repr__(self) -> str:
        return f"ObstoreS3Storage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[ObstoreS3Storage], tuple[str, StorageOptions]]:
        return (ObstoreS3Storage, (self.root, self.options.on_top_of(s3_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        if length == 0 or not self._for_obstore(path):
            return super().read(path, offset=offset, length=length, limit_bytes=limit_bytes)
        key = self._location.key(path)
        options: GetOptions = {}
        if length is not None:
            options = {"range": (offset, offset + length)}
        elif offset:
            options = {"range": {"offset": offset}}

        def get() -> bytes | None:
            try:
                response = obstore.get(self._stores.for_reading(), key, options=options)
                self._check_size(path, response.range[1] - response.range[0], length, limit_bytes)
                return self._stores.body_of(response)
            except OBSTORE_ERRORS as error:
                if is_range_beyond_end(*status_and_code(error)):
                    return None
                raise

        return self._send_through_obstore(Request.READ, path, get) or b""

    def stat(self, path: str) -> FileInfo:
        if not self._for_obstore(path):
            return super().stat(path)
        key = self._location.key(path)
        meta = self._send_through_obstore(Request.STAT, path, lambda: obstore.head(self._stores.for_body(), key))
        return _file_info(path, meta)

    def create(self, path: str, data: bytes) -> None:
        if not self._for_obstore(path):
            return super().create(path, data)
        return self._put(Request.CREATE, path, data)

    def write(self, path: str, data: bytes) -> None:
        if not self._for_obstore(path):
            return super().write(path, data)
        return self._put(Request.WRITE, path, data)

    def expect_clock(self) -> None:
        """Request the server's time in parallel, because obstore does not expose the ``Date`` header."""
        self._clock.expect(self._fetch_time)

    def _put(self, operation: Request, path: str, data: bytes) -> None:
        key, body = self._location.key(path), bytes(data)

        def put() -> None:
            # "create" sends If-None-Match: *; use_multipart=False keeps it one PUT at any size.
            mode: PutMode = "create" if operation is Request.CREATE else "overwrite"
            obstore.put(self._stores.for_body(len(body)), key, body, mode=mode, use_multipart=False)

        self._send_through_obstore(operation, path, put)

    def _files(self, prefix: str, key_prefix: str) -> Iterator[FileInfo]:
        last_key, empty_paths = "", set[str]()
        for page in self._obstore_pages(prefix, key_prefix):
            if page is None:
                all_files = super()._files(prefix, key_prefix)
                yield from (file for file in all_files if self._location.key(file.path) > last_key)
                return
            self._check_order(prefix, last_key, page)
            yield from self._files_of_page(prefix, key_prefix, page, empty_paths)
            last_key = max(last_key, *(meta["path"] for meta in page))
            empty_paths = {path for path in empty_paths if is_folder_ahead(self._location.key(path), last_key)}

    def _check_order(self, prefix: str, last_key: str, page: Sequence[ObjectMeta]) -> None:
        """Raise StorageError if a listing is not sorted, because the requested range would seem to end early."""
        keys = [last_key, *(meta["path"] for meta in page if meta["size"])]  # obstore removes the final "/" of folders
        if keys != sorted(keys):
            raise StorageError(
                f"cannot list {prefix!r} under {self.root}: the listing is not sorted, as in directory buckets; set the"
                " option 'client' to 's3fs'",
                path=prefix,
            )

    def _obstore_pages(self, prefix: str, key_prefix: str) -> Iterator[Sequence[ObjectMeta] | None]:
        """Yield the pages of a listing, sorted by key. Yield None if obstore cannot continue.

        obstore lists whole folders. A listing by name prefix therefore starts just before the first
        matching name and stops after the last. It reads at most one unnecessary page, plus the files of the folder
        ``a/`` for a prefix such as ``a0``.
        """
        stream: ListStream[Sequence[ObjectMeta]] | None = None
        start_after = _start_before(key_prefix)

        def next_page() -> Sequence[ObjectMeta] | None:
            nonlocal stream
            if not self._for_obstore(key_prefix):
                return None
            if stream is None:
                folder, store = key_prefix.rpartition("/")[0] or None, self._stores.for_body()
                stream = obstore.list(store, folder, offset=start_after, chunk_size=MAX_KEYS_PER_REQUEST)
            try:
                return next(stream, ())
            except InvalidPathError:
                return None
            except OBSTORE_ERRORS:
                stream = None  # the generator has ended; a retry starts after the last page
                raise

        def send_next_page() -> Sequence[ObjectMeta] | None:
            return self._send_through_obstore(Request.LIST, prefix, next_page)

        page = send_next_page()
        while page:
            yield page
            start_after = max(meta["path"] for meta in page)
            if start_after > key_prefix and not start_after.startswith(key_prefix):
                return
            page = retry_listing(send_next_page)
        if page is None:
            yield None

    def _files_of_page(
        self, prefix: str, key_prefix: str, page: Sequence[ObjectMeta], empty_paths: set[str]
    ) -> Iterator[FileInfo]:
        """Yield the files of a page. Record in ``empty_paths`` the empty files that a later page may list again."""
        empty = []
        for meta in page:
            key = meta["path"]
            path = self._location.path(key) if key.startswith(key_prefix) else None
            if path is None or is_hidden(path, prefix):
                continue
            if meta["size"]:
                yield _file_info(path, meta)
            elif path not in empty_paths:
                empty_paths.add(path)
                empty.append(_file_info(path, meta))
        # obstore lists an object "folder/" as "folder", which looks like an empty file.
        are_files = run_parallel(self._is_empty_file, [file.path for file in empty], self.concurrency)
        yield from (file for file, is_file in zip(empty, are_files, strict=True) if is_file)

    def _is_empty_file(self, path: str) -> bool:
        try:
            return self.stat(path).size_bytes == 0
        except FileMissingError:
            return False

    def _for_obstore(self, path: str) -> bool:
        return not (Fork.happened or _NOT_IN_OBSTORE.search(self._location.key_prefix + path))

    def _send_through_obstore(self, operation: Request, path: str, send: Callable[[], T]) -> T:
        try:
            return send()
        except OBSTORE_ERRORS as error:
            failure = typed_error(self._request(operation, path), error, self._endpoint)
        except BotoCoreError as error:
            failure = s3fs_client.typed_error(self._request(operation, path), error, self._endpoint)
        # Raised outside the handler, because the client's error contains the raw response and the request.
        raise failure


def is_folder_ahead(key: str, last_key: str) -> bool:
    """Whether a sorted listing may still contain an object ``key/`` after ``last_key``."""
    return f"{key}/" >= last_key


def _start_before(key_prefix: str) -> str | None:
    """Return a string that sorts before all keys with this prefix and after almost all smaller keys."""
    last = key_prefix[-1:]
    if last in ("", "/", " "):
        return None  # the listing of the folder starts there
    # obstore rejects control characters and drops a second "/", and surrogates are not characters.
    before = {"0": ".", "\x80": "~", "\ue000": "\ud7ff"}.get(last, chr(ord(last) - 1))
    return f"{key_prefix[:-1]}{before}\U0010fffd"


def _file_info(path: str, meta: ObjectMeta) -> FileInfo:
    # Times in listings have milliseconds; times in responses for individual files have whole seconds.
    return FileInfo(path, meta["size"], int(meta["last_modified"].timestamp()) * 1000)
