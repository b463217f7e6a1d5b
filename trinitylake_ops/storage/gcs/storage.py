"""Storage in a bucket of Google Cloud Storage, through gcsfs."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from datetime import datetime
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, urlencode

import aiohttp

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileMissingError,
    StorageError,
    TransientError,
)
from trinitylake_ops.storage.gcs.client import (
    CLIENT_ERRORS,
    Call,
    GcsClient,
    batch_of_deletes,
    batch_responses,
    object_target,
    typed_error,
    upload_body,
)
from trinitylake_ops.storage.gcs.errors import error_from_response, unreadable
from trinitylake_ops.storage.gcs.settings import (
    MAX_CALLS_PER_BATCH,
    MAX_NAMES_PER_PAGE,
    GcsLocation,
    GcsSettings,
    gcs_of_environment,
)
from trinitylake_ops.storage.http.clock import ServerClock, monotonic_ms
from trinitylake_ops.storage.http.requests import Request, StorageRequest, range_header, requested_part
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import check_range, is_hidden
from trinitylake_ops.storage.retry import retry_listing

T = TypeVar("T")

#: A body is read in chunks of this size.
_CHUNK_BYTES = 1 << 20
#: Maximum number of bytes that are read from an error response.
_MAX_ERROR_BYTES = 64 << 10
_FILE_FIELDS = "name,size,updated"


class ObjectResponse(NamedTuple):
    """A response with its whole body."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class GcsStorage(Storage):
    """Files under ``gs://bucket/`` or ``gs://bucket/prefix/``. The path is the rest of the object name, unchanged.

    Each operation is one request of the JSON API, which is sent once: a ``create`` is one multipart upload with the
    condition ``ifGenerationMatch=0``, never a resumable upload, and a read is one GET. RetryStorage retries requests,
    except for the second and later pages of a listing, which this class retries. Times are truncated to seconds.
    Objects whose names are not paths, for example ``folder/``, are omitted from listings.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``GCS_OPTIONS`` (docs/storages/README.md).

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    concurrency = 16
    lists_by_prefix = True
    delete_batch_size = MAX_CALLS_PER_BATCH

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        self.root = root
        self.options = StorageOptions(options)
        self.whole_file_limit_bytes = WHOLE_FILE_LIMIT.value(self.options)
        self._location = GcsLocation.of(root)
        settings = GcsSettings.of(self.options)
        self._endpoint = settings.endpoint or "Google's default endpoint"
        self._secrets = settings.secrets
        self._project = settings.project
        self._client = GcsClient(settings)
        self._clock = ServerClock()

    def __repr__(self) -> str:
        return f"GcsStorage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[GcsStorage], tuple[str, StorageOptions]]:
        return (GcsStorage, (self.root, self.options.on_top_of(gcs_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        target = object_target(self._location.bucket, self._location.key(path))
        if length == 0:
            self.stat(path)
            return b""
        call = Call("GET", f"/download/storage/v1/{target}", {"alt": "media"}, range_header(offset, length))

        async def body_of(response: aiohttp.ClientResponse) -> bytes:
            return await self._body(response, path, length, limit_bytes)

        object_response = self._send(Request.READ, path, call, body_of)
        if object_response.status == 416:
            return b""
        data = requested_part(object_response.body, object_response.headers.get("Content-Range"), None, offset, length)
        if data is None:
            raise TransientError(
                f"{self._request(Request.READ, path).failure}: the server sent {len(object_response.body)} bytes that"
                " are not the requested range; retry",
                path=path,
            )
        return data

    def stat(self, path: str) -> FileInfo:
        target = object_target(self._location.bucket, self._location.key(path))
        object_response = self._send(Request.STAT, path, Call("GET", f"/storage/v1/{target}", {"fields": _FILE_FIELDS}))
        request = self._request(Request.STAT, path)
        return _file_info(request, path, _decoded(request, object_response))

    def create(self, path: str, data: bytes) -> None:
        self._upload(Request.CREATE, path, data, {"ifGenerationMatch": "0"})

    def write(self, path: str, data: bytes) -> None:
        self._upload(Request.WRITE, path, data, {})

    def delete(self, path: str) -> None:
        target = object_target(self._location.bucket, self._location.key(path))
        try:
            self._send(Request.DELETE, path, Call("DELETE", f"/storage/v1/{target}"))
        except FileMissingError:
            return  # the service reports missing files

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to 100 files in one batch request."""
        by_target = {object_target(self._location.bucket, self._location.key(path)): path for path in paths}
        if not by_target:
            return {}
        query = f"?{urlencode({'userProject': self._project})}" if self._project else ""
        body = batch_of_deletes([f"/storage/v1/{target}{query}" for target in by_target])
        call = Call("POST", "/batch/storage/v1", {}, {"Content-Type": body.content_type}, body.data)
        batch_response = self._send(Request.DELETE, paths[0], call)
        responses = batch_responses(batch_response.headers.get("Content-Type", ""), batch_response.body)
        failures: dict[str, StorageError] = {}
        for number, path in enumerate(by_target.values()):
            request = self._request(Request.DELETE, path)
            if number not in responses:
                failures[path] = AmbiguousWriteError(
                    f"{request.failure}: the response to the batch does not include it, so it may have taken effect",
                    path=path,
                )
            elif not 200 <= responses[number].status < 300:
                error = error_from_response(request, *responses[number])
                if isinstance(error, StorageError) and not isinstance(error, FileMissingError):
                    failures[path] = error
        return failures

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._files(prefix, self._location.listed(prefix))

    def now_ms(self) -> int:
        # List one object, because a request for the bucket metadata requires a different permission.
        parameters = {"maxResults": "1", "prefix": self._location.key_prefix, "fields": "kind"}
        return self._clock.now_ms(lambda: self._send(Request.CLOCK, "", Call("GET", self._objects(), parameters)))

    def _upload(self, operation: Request, path: str, data: bytes, condition: Mapping[str, str]) -> None:
        body = upload_body(self._location.key(path), data)
        parameters = {"uploadType": "multipart", "fields": "generation", **condition}
        headers = {"Content-Type": body.content_type}
        self._send(operation, path, Call("POST", f"/upload{self._objects()}", parameters, headers, body.data))

    def _objects(self) -> str:
        return f"/storage/v1/b/{quote(self._location.bucket, safe='')}/o"

    def _files(self, prefix: str, name_prefix: str) -> Iterator[FileInfo]:
        request = self._request(Request.LIST, prefix)
        for page in self._pages(prefix, name_prefix):
            for item in _items(request, page):
                path = self._location.path(item["name"])
                if path is not None and not is_hidden(path, prefix):
                    yield _file_info(request, path, item)

    def _pages(self, prefix: str, name_prefix: str) -> Iterator[Mapping[str, Any]]:
        parameters = {
            "prefix": name_prefix,
            "maxResults": str(MAX_NAMES_PER_PAGE),
            "fields": f"nextPageToken,items({_FILE_FIELDS})",
        }
        request = self._request(Request.LIST, prefix)

        def page(token: str | None = None) -> Mapping[str, Any]:
            position = {} if token is None else {"pageToken": token}
            object_response = self._send(Request.LIST, prefix, Call("GET", self._objects(), {**parameters, **position}))
            return _decoded(request, object_response)

        current = page()
        yield current
        last_token: str | None = None
        while token := current.get("nextPageToken"):
            if token == last_token:
                raise StorageError(
                    f"{request.failure}: the server repeated a page; check the server and any proxy", path=prefix
                )
            last_token, current = token, retry_listing(page, token)
            yield current

    def _send(
        self,
        operation: Request,
        path: str,
        call: Call,
        body_of: Callable[[aiohttp.ClientResponse], Coroutine[Any, Any, bytes]] | None = None,
    ) -> ObjectResponse:
        """Send a request. Raise typed errors, including for error responses."""

        async def exchange() -> ObjectResponse:
            return await self._exchange(call, body_of)

        try:
            object_response = self._client.run(exchange)
        except CLIENT_ERRORS as error:
            failure = typed_error(self._request(operation, path), error, self._endpoint)
        else:
            if 200 <= object_response.status < 300 or (object_response.status == 416 and operation is Request.READ):
                return object_response
            raise error_from_response(self._request(operation, path), object_response.status, object_response.body)
        # Raised outside the handler, because messages of client libraries may contain parts of the request.
        raise failure

    async def _exchange(
        self, call: Call, body_of: Callable[[aiohttp.ClientResponse], Coroutine[Any, Any, bytes]] | None
    ) -> ObjectResponse:
        """Send one request, update the estimate of the server's clock, and read the response."""
        await self._client.authorize()
        async with AsyncExitStack() as scope:
            sent_at_ms = monotonic_ms()
            async with self._client.time_limit(len(call.data)):
                response = await scope.enter_async_context(self._client.send(call))
            self._clock.observe(response.headers.get("Date"), sent_at_ms, monotonic_ms())
            if 200 <= response.status < 300 and body_of is not None:
                body = await body_of(response)
            else:
                async with self._client.time_limit():
                    body = await _read_bounded(response)
            return ObjectResponse(response.status, response.headers, body)

    async def _body(
        self, response: aiohttp.ClientResponse, path: str, length: int | None, limit_bytes: int | None
    ) -> bytes:
        """Read a file. Raise CorruptFileError as soon as it exceeds its limit."""
        size_bytes = response.content_length or 0
        self._check_size(path, size_bytes, length, limit_bytes)
        async with self._client.time_limit(size_bytes):
            if response.content_length is not None:
                return await response.read()
            chunks: list[bytes] = []
            async for chunk in response.content.iter_chunked(_CHUNK_BYTES):
                chunks.append(chunk)
                size_bytes += len(chunk)
                self._check_size(path, size_bytes, length, limit_bytes)
            return b"".join(chunks)

    def _request(self, operation: Request, path: str) -> StorageRequest:
        return StorageRequest(operation, path, self.root, self.options, self._secrets)


async def _read_bounded(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of a response. For an error response, read only the beginning."""
    if response.status < 400:
        return await response.read()
    chunks, n_bytes = [], 0
    async for chunk in response.content.iter_chunked(_MAX_ERROR_BYTES):
        chunks.append(chunk)
        n_bytes += len(chunk)
        if n_bytes >= _MAX_ERROR_BYTES:
            break
    return b"".join(chunks)


def _decoded(request: StorageRequest, object_response: ObjectResponse) -> Mapping[str, Any]:
    try:
        content = json.loads(object_response.body)
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, Mapping):
        raise unreadable(request)
    return content


def _items(request: StorageRequest, page: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    items = page.get("items", [])
    if not isinstance(items, list) or not all(
        isinstance(item, Mapping) and isinstance(item.get("name"), str) for item in items
    ):
        raise unreadable(request)
    return items


def _file_info(request: StorageRequest, path: str, item: Mapping[str, Any]) -> FileInfo:
    """Return the metadata of an object. Times are truncated to seconds, the precision of the ``Date`` header."""
    try:
        updated = datetime.fromisoformat(item["updated"])
        if updated.tzinfo is not None:
            return FileInfo(path, int(item["size"]), int(updated.timestamp()) * 1000)
    except (KeyError, TypeError, ValueError):
        raise unreadable(request) from None
    raise unreadable(request)
