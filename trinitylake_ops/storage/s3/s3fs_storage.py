"""Storage in a bucket of Amazon S3 or a compatible server, through s3fs."""

from __future__ import annotations

import re
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeVar

import s3fs

from trinitylake_ops.errors import FileMissingError, StorageError, TransientError
from trinitylake_ops.storage.http.clock import ServerClock, monotonic_ms
from trinitylake_ops.storage.http.requests import Request, StorageRequest, range_header, requested_part
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import check_range, is_hidden
from trinitylake_ops.storage.retry import retry_listing
from trinitylake_ops.storage.s3.errors import error_from_response, is_range_beyond_end
from trinitylake_ops.storage.s3.s3fs_client import CLIENT_ERRORS, S3Client, error_response, status_and_code, typed_error
from trinitylake_ops.storage.s3.settings import MAX_KEYS_PER_REQUEST, S3Location, S3Settings, s3_of_environment

T = TypeVar("T")
S3Response = Mapping[str, Any]

#: A response without a length is read in chunks of this size.
_CHUNK_BYTES = 1 << 20
# Characters that XML cannot represent, or that do not survive a round trip through XML.
_NOT_IN_XML = re.compile("[\x00-\x08\x0b-\x1f\ufffe\uffff]")


class S3Storage(Storage):
    """Files under ``s3://bucket/`` or ``s3://bucket/prefix/``. The path is the rest of the key, unchanged.

    Each operation is one request, which is sent once: a ``create`` is one PUT with ``If-None-Match: *``, up to S3's
    limit of 5 GiB, and a read is one GET. RetryStorage retries requests, except for the second and later pages of a
    listing, which this class retries. Times are truncated to seconds, both in ``list`` and in ``stat``. Objects whose
    keys are not paths, for example ``folder/``, are omitted from listings.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``S3_OPTIONS`` (docs/storages/README.md).

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    # Enough to hide the latency of a distant bucket. Near a server, the single event loop is the bottleneck.
    concurrency = 16
    lists_by_prefix = True
    delete_batch_size = MAX_KEYS_PER_REQUEST

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        self.root = root
        self.options = StorageOptions(options)
        self.whole_file_limit_bytes = WHOLE_FILE_LIMIT.value(self.options)
        self._location = S3Location.of(root)
        self._settings = S3Settings.of(self.options)
        self._endpoint = self._settings.endpoint or "the endpoint of the AWS configuration"
        self._client = S3Client.shared(self._settings, self.options)
        self._clock = ServerClock()

    def __repr__(self) -> str:
        return f"S3Storage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[S3Storage], tuple[str, StorageOptions]]:
        return (S3Storage, (self.root, self.options.on_top_of(s3_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        key = self._location.key(path)
        if length == 0:
            self.stat(path)
            return b""

        async def get(file_system: s3fs.S3FileSystem) -> tuple[S3Response, bytes] | None:
            try:
                response = await self._call(file_system, "get_object", Key=key, **range_header(offset, length))
            except CLIENT_ERRORS as error:
                if is_range_beyond_end(*status_and_code(error_response(error) or {})):
                    return None
                raise
            size_bytes = response.get("ContentLength", 0)
            async with response["Body"] as body, self._client.time_limit(size_bytes):
                self._check_size(path, size_bytes, length, limit_bytes)
                if "ContentLength" in response:
                    return response, await body.read()
                chunks: list[bytes] = []
                while chunk := await body.read(_CHUNK_BYTES):
                    chunks.append(chunk)
                    size_bytes += len(chunk)
                    self._check_size(path, size_bytes, length, limit_bytes)
                return response, b"".join(chunks)

        response_and_body = self._run(Request.READ, path, get)
        if response_and_body is None:
            return b""
        data = _requested_part(*response_and_body, offset, length)
        if data is None:
            raise TransientError(
                f"{self._request(Request.READ, path).failure}: the server sent {len(response_and_body[1])} bytes that"
                " are not the requested range; retry",
                path=path,
            )
        return data

    def stat(self, path: str) -> FileInfo:
        response = self._send(Request.STAT, path, "head_object", Key=self._location.key(path))
        if "ContentLength" not in response or "LastModified" not in response:
            raise StorageError(
                f"cannot look up {path!r} under {self.root}: the response has no size or no time; check that the option"
                " 'endpoint' is the URL of an S3 server",
                path=path,
            )
        return FileInfo(path, int(response["ContentLength"]), _whole_seconds_ms(response["LastModified"]))

    def create(self, path: str, data: bytes) -> None:
        key, body = self._location.key(path), bytes(data)
        self._send(Request.CREATE, path, "put_object", Key=key, Body=body, IfNoneMatch="*")

    def write(self, path: str, data: bytes) -> None:
        key, body = self._location.key(path), bytes(data)
        self._send(Request.WRITE, path, "put_object", Key=key, Body=body)

    def delete(self, path: str) -> None:
        try:
            self._send(Request.DELETE, path, "delete_object", Key=self._location.key(path))
        except FileMissingError:
            return  # some servers report missing files

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to 1,000 files in one DeleteObjects request.

        Files with control characters in their names are deleted by separate requests, because XML cannot represent
        them.
        """
        path_by_key = {self._location.key(path): path for path in paths}
        in_xml = {key: path for key, path in path_by_key.items() if not _NOT_IN_XML.search(key)}
        failures = super().delete_batch([path for key, path in path_by_key.items() if key not in in_xml])
        if in_xml:
            failures |= self._delete_objects(in_xml)
        return failures

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._files(prefix, self._location.listed(prefix))

    def now_ms(self) -> int:
        return self._clock.now_ms(self._fetch_time)

    def _fetch_time(self) -> None:
        self._send(Request.CLOCK, "", "head_bucket")

    def _delete_objects(self, path_by_key: Mapping[str, str]) -> dict[str, StorageError]:
        objects = [{"Key": key} for key in path_by_key]
        first_path = next(iter(path_by_key.values()))
        response = self._send(Request.DELETE, first_path, "delete_objects", Delete={"Objects": objects, "Quiet": True})
        failures: dict[str, StorageError] = {}
        for failed in response.get("Errors", ()):
            path = path_by_key.get(failed.get("Key", ""))
            if path is None:
                raise StorageError(
                    f"cannot determine which files under {self.root} were deleted: the server reported a failure for a"
                    " name that was not in the request; delete them again"
                )
            error = error_from_response(
                self._request(Request.DELETE, path), None, failed.get("Code"), failed.get("Message")
            )
            if isinstance(error, StorageError) and not isinstance(error, FileMissingError):
                failures[path] = error
        return failures

    def _files(self, prefix: str, key_prefix: str) -> Iterator[FileInfo]:
        for page in self._pages(prefix, key_prefix):
            for item in page.get("Contents", ()):
                if not item.keys() >= {"Key", "Size", "LastModified"}:
                    raise StorageError(
                        f"cannot list {prefix!r} under {self.root}: the response has no key, size or time; check that"
                        " the option 'endpoint' is the URL of an S3 server",
                        path=prefix,
                    )
                path = self._location.path(item["Key"])
                if path is not None and not is_hidden(path, prefix):
                    yield FileInfo(path, int(item["Size"]), _whole_seconds_ms(item["LastModified"]))

    def _pages(self, prefix: str, key_prefix: str) -> Iterator[S3Response]:
        def page(**position: str) -> S3Response:
            return self._send(Request.LIST, prefix, "list_objects_v2", Prefix=key_prefix, **position)

        current, token = page(), None
        yield current
        while current.get("IsTruncated"):
            last_token, token = token, current.get("NextContinuationToken")
            if not token or token == last_token:
                how = "repeated a page" if token else "sent an incomplete listing"
                raise StorageError(
                    f"cannot list {prefix!r} under {self.root}: the server {how}; check the server and any proxy",
                    path=prefix,
                )
            current = retry_listing(page, ContinuationToken=token)
            yield current

    def _send(self, operation: Request, path: str, method: str, **arguments: Any) -> S3Response:
        def call(file_system: s3fs.S3FileSystem) -> Coroutine[Any, Any, S3Response]:
            return self._call(file_system, method, **arguments)

        return self._run(operation, path, call)

    def _run(self, operation: Request, path: str, send: Callable[[s3fs.S3FileSystem], Coroutine[Any, Any, T]]) -> T:
        """Send a request. Raise typed errors."""
        try:
            return self._client.run(send)
        except CLIENT_ERRORS as error:
            if error_response(error) is None:
                self._client.unshare()
            failure = typed_error(self._request(operation, path), error, self._endpoint)
        # Raised outside the handler, because messages of client libraries may contain parts of the request and its
        # credentials.
        raise failure

    async def _call(self, file_system: s3fs.S3FileSystem, method: str, **arguments: Any) -> S3Response:
        """Send one request, and update the estimate of the server's clock."""
        await file_system.set_session()  # the first call is slow, and must not count as server latency
        sent_at_ms = monotonic_ms()
        response: S3Response | None = None
        try:
            async with self._client.time_limit(len(arguments.get("Body", b""))):
                response = await file_system._call_s3(method, Bucket=self._location.bucket, **arguments)
                return response
        except CLIENT_ERRORS as error:
            response = error_response(error)
            raise
        finally:
            headers = (response or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
            self._clock.observe(headers.get("date"), sent_at_ms, monotonic_ms())

    def _request(self, operation: Request, path: str) -> StorageRequest:
        return StorageRequest(operation, path, self.root, self.options)


def _requested_part(response: S3Response, data: bytes, offset: int, length: int | None) -> bytes | None:
    # aiohttp detects a truncated chunked body, which has no length.
    chunked = "transfer-encoding" in response["ResponseMetadata"]["HTTPHeaders"]
    size_bytes = None if chunked else response.get("ContentLength", -1)
    return requested_part(data, response.get("ContentRange"), size_bytes, offset, length)


def _whole_seconds_ms(last_modified: datetime) -> int:
    """Truncate a time to seconds. S3 returns milliseconds in listings, and whole seconds for single files."""
    return int(last_modified.timestamp()) * 1000
