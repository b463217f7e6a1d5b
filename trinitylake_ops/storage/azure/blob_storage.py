"""Storage in a container of Azure Blob Storage or Azure Data Lake Storage, through azure-storage-blob."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from trinitylake_ops.errors import FileMissingError, StorageError, TransientError, TrinityLakeError
from trinitylake_ops.storage.azure.blob_client import (
    CLIENT_ERRORS,
    BlobClient,
    BlobResponse,
    ListedBlob,
    code_of,
    date_ms,
    page_of,
    typed_error,
)
from trinitylake_ops.storage.azure.errors import NO_BATCH_CODES, error_from_response
from trinitylake_ops.storage.azure.settings import (
    MAX_BODY_BYTES,
    MAX_NAMES_PER_BATCH,
    MAX_NAMES_PER_PAGE,
    Account,
    AzureLocation,
    AzureSettings,
    account_of_environment,
)
from trinitylake_ops.storage.http.clock import ServerClock, monotonic_ms
from trinitylake_ops.storage.http.requests import Request, StorageRequest, range_header, requested_part
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import check_range, is_hidden
from trinitylake_ops.storage.retry import retry_listing

T = TypeVar("T")

_MESSAGE = re.compile(rb"<Message>(.*?)</Message>", re.DOTALL)
_CODE = re.compile(rb"<Code>\s*([A-Za-z0-9]+)\s*</Code>")
#: Maximum number of bytes that are read from an error response, because messages are shortened.
_MAX_ERROR_BYTES = 1 << 16
_DELETED = frozenset({202, 404})
#: A path whose stat returns the server's time. The file need not exist.
_CLOCK_PATH = "_ops/clock"


class AzureStorage(Storage):
    """Files under ``abfss://container@account.dfs.core.windows.net/prefix/`` or ``az://container/prefix/``.

    The path is the rest of the blob name, unchanged. Each operation is one request, which is sent once: a ``create`` is
    one Put Blob with ``If-None-Match: *``, never a list of blocks, and a read is one Get Blob. RetryStorage retries
    requests, except for the second and later pages of a listing, which this class retries. Times are truncated to
    seconds. Folders of hierarchical accounts, and folder markers of other accounts, are not files.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``AZURE_OPTIONS`` (docs/storages/README.md).

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    concurrency = 16
    lists_by_prefix = True
    delete_batch_size = MAX_NAMES_PER_BATCH

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        self.root = root
        self.options = StorageOptions(options)
        self.whole_file_limit_bytes = WHOLE_FILE_LIMIT.value(self.options)
        self._location = AzureLocation.of(root)
        self._settings = AzureSettings.of(self.options)
        self._account = Account.of(self._location, self._settings, self.options)
        self._client = BlobClient(self._location.container, self._account, self._settings)
        self._clock = ServerClock()
        self._has_batches = True

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[AzureStorage], tuple[str, StorageOptions]]:
        return (type(self), (self.root, self.options.on_top_of(account_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        name = self._location.name(path)
        if length == 0:
            self.stat(path)
            return b""

        async def get() -> bytes | None:
            headers = range_header(offset, length, "x-ms-range")
            async with self._sent(Request.READ, path, "GET", name, headers=headers, accepted=(416,)) as response:
                if response.status == 416:
                    return b""
                self._reject_folder(path, response)
                if "Content-Length" not in response.headers:
                    return None  # the size of the body would be unbounded
                size_bytes = int(response.headers["Content-Length"])
                self._check_size(path, size_bytes, length, limit_bytes)
                async with self._client.time_limit(size_bytes):
                    data = await response.response.read()
                    return requested_part(data, response.headers.get("Content-Range"), size_bytes, offset, length)

        data = self._run(Request.READ, path, get)
        if data is None:
            raise TransientError(
                f"{self._request(Request.READ, path).failure}: the service did not send the requested range; retry",
                path=path,
            )
        return data

    def stat(self, path: str) -> FileInfo:
        name = self._location.name(path)

        async def head() -> FileInfo:
            async with self._sent(Request.STAT, path, "HEAD", name) as response:
                self._reject_folder(path, response)
                return FileInfo(
                    path, int(response.headers["Content-Length"]), date_ms(response.headers["Last-Modified"])
                )

        try:
            return self._run(Request.STAT, path, head)
        except KeyError as error:
            raise StorageError(
                f"cannot look up {path!r} under {self.root}: the response has no {error.args[0]}; check that the option"
                " 'endpoint' is the URL of a Blob service",
                path=path,
            ) from None

    def create(self, path: str, data: bytes) -> None:
        self._put(Request.CREATE, path, data, {"If-None-Match": "*"})

    def write(self, path: str, data: bytes) -> None:
        self._put(Request.WRITE, path, data, {})

    def delete(self, path: str) -> None:
        try:
            self._send(Request.DELETE, path, "DELETE", self._location.name(path))
        except FileMissingError:
            return

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to 256 files in one request.

        If any delete failed, each file is deleted by a separate request, because the response does not reliably show
        which of them failed.
        """
        path_by_name = {self._location.name(path): path for path in paths}
        if not path_by_name:
            return {}
        if self._has_batches and self._delete_all(path_by_name):
            return {}
        return super().delete_batch(list(path_by_name.values()))

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._files(prefix, self._location.listed(prefix))

    def now_ms(self) -> int:
        return self._clock.now_ms(self._fetch_time)

    def _put(self, operation: Request, path: str, data: bytes, condition: Mapping[str, str]) -> None:
        name, body = self._location.name(path), bytes(data)
        self._check_body(path, body)
        headers = {"x-ms-blob-type": "BlockBlob", **condition}
        self._send(operation, path, "PUT", name, headers=headers, body=body)

    def _check_body(self, path: str, body: bytes) -> None:
        if len(body) > MAX_BODY_BYTES:
            raise StorageError(
                f"cannot write {path!r}: it has {len(body)} bytes, more than Azure's limit of {MAX_BODY_BYTES} bytes"
                " for one request; write smaller files",
                path=path,
            )

    def _reject_folder(self, path: str, response: BlobResponse) -> None:
        headers = response.headers
        is_folder = headers.get("x-ms-resource-type", "").lower() == "directory"
        if is_folder or headers.get("x-ms-meta-hdi_isfolder", "").lower() == "true":
            raise FileMissingError(f"{path!r} under {self.root} is a folder, not a file", path=path)

    def _delete_all(self, path_by_name: Mapping[str, str]) -> bool:
        """Delete files in one request. Return whether all of them were deleted. Record if batches are not supported."""
        first_path = next(iter(path_by_name.values()))

        async def delete() -> Sequence[int] | None:
            sent_at_ms = monotonic_ms()

            def observe_headers(headers: Mapping[str, str]) -> None:
                self._clock.observe(headers.get("Date"), sent_at_ms, monotonic_ms())

            async with self._client.time_limit():
                try:
                    return await self._client.delete_batch(list(path_by_name), observe_headers)
                except CLIENT_ERRORS as error:
                    if code_of(error) in NO_BATCH_CODES:
                        return None
                    raise

        statuses = self._run(Request.DELETE, first_path, delete)
        if statuses is None:
            self._has_batches = False
            return False
        return len(statuses) == len(path_by_name) and _DELETED.issuperset(statuses)

    def _files(self, prefix: str, name_prefix: str) -> Iterator[FileInfo]:
        for blob in self._blobs(prefix, name_prefix):
            path = self._location.path(blob.name) if blob.name.startswith(name_prefix) else None
            if path is not None and not is_hidden(path, prefix):
                yield FileInfo(path, blob.size_bytes, blob.last_modified_ms)

    def _blobs(self, prefix: str, name_prefix: str) -> Iterator[ListedBlob]:
        blobs, marker = self._page(prefix, name_prefix, None)
        yield from blobs
        while marker:
            blobs, next_marker = retry_listing(self._page, prefix, name_prefix, marker)
            if next_marker == marker:
                raise StorageError(
                    f"cannot list {prefix!r} under {self.root}: the service repeated a page; check the service and any"
                    " proxy",
                    path=prefix,
                )
            marker = next_marker
            yield from blobs

    def _page(self, prefix: str, name_prefix: str, marker: str | None) -> tuple[Sequence[ListedBlob], str | None]:
        query = {
            "restype": "container", "comp": "list", "include": "metadata", "maxresults": str(MAX_NAMES_PER_PAGE),
            "prefix": name_prefix, **({"marker": marker} if marker else {}),
        }  # fmt: skip
        document = self._send(Request.LIST, prefix, "GET", None, query=query)
        try:
            return page_of(document)
        except ValueError as error:
            reason = str(error)
        raise StorageError(
            f"cannot list {prefix!r} under {self.root}: {reason}; check that the option 'endpoint' is the URL of a Blob"
            " service",
            path=prefix,
        )

    def _fetch_time(self) -> None:
        try:
            self._send(Request.CLOCK, "", "HEAD", self._location.name(_CLOCK_PATH))
        except FileMissingError:
            return  # the response has a Date header

    def _send(self, operation: Request, path: str, method: str, name: str | None, **arguments: Any) -> bytes:
        """Send a request and return the body of the response. Raise typed errors."""

        async def send() -> bytes:
            async with self._sent(operation, path, method, name, **arguments) as response:
                size_bytes = int(response.headers.get("Content-Length", 0))
                async with self._client.time_limit(size_bytes):
                    body: bytes = await response.response.read()
                    return body

        return self._run(operation, path, send)

    @asynccontextmanager
    async def _sent(
        self,
        operation: Request,
        path: str,
        method: str,
        name: str | None,
        *,
        accepted: Sequence[int] = (),
        **arguments: Any,
    ) -> AsyncIterator[BlobResponse]:
        """Send one request, update the estimate of the server's clock, and yield the response. Raise typed errors."""
        exchange = self._client.send(method, name, **arguments)
        sent_at_ms = monotonic_ms()
        async with self._client.time_limit(len(arguments.get("body") or b"")):
            response = await exchange.__aenter__()
        try:
            self._clock.observe(response.headers.get("Date"), sent_at_ms, monotonic_ms())
            if response.status >= 300 and response.status not in accepted:
                raise await self._failure(self._request(operation, path), response)
            yield response
        finally:
            await exchange.__aexit__(None, None, None)

    async def _failure(self, request: StorageRequest, response: BlobResponse) -> TrinityLakeError:
        async with self._client.time_limit():
            body: bytes = await response.response.content.read(_MAX_ERROR_BYTES)
        message, code = _MESSAGE.search(body), _CODE.search(body)
        return error_from_response(
            request,
            response.status,
            response.error_code or (code.group(1).decode() if code else None),
            message.group(1).decode(errors="replace") if message else None,
        )

    def _run(self, operation: Request, path: str, send: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request. Raise typed errors."""
        try:
            return self._client.run(send)
        except CLIENT_ERRORS as error:
            failure = typed_error(self._request(operation, path), error, self._account.endpoint)
        # Raised outside the handler, because messages of client libraries may contain parts of the request and its
        # credentials.
        raise failure

    def _request(self, operation: Request, path: str) -> StorageRequest:
        return StorageRequest(operation, path, self.root, self.options)
