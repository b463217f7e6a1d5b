"""The DynamoDB client, and requests to the table of a root."""

from __future__ import annotations

import functools
import threading
import time
import zlib
from collections.abc import Mapping
from typing import Any

import botocore.session
from botocore.awsrequest import AWSPreparedRequest, AWSResponse
from botocore.config import Config
from botocore.exceptions import ConnectionClosedError, ReadTimeoutError
from botocore.httpsession import ProtocolError, URLLib3ReadTimeoutError, URLLib3Session

from trinitylake_ops.errors import AmbiguousWriteError, TransientError
from trinitylake_ops.storage.background import at_fork
from trinitylake_ops.storage.dynamodb.errors import CLIENT_ERRORS, MISSING_TABLE, code_of, error_response, typed_error
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, ROOT_KEY, DynamoDBLocation, DynamoDBSettings
from trinitylake_ops.storage.http.clock import ServerClock, monotonic_ms
from trinitylake_ops.storage.http.requests import Request, StorageRequest
from trinitylake_ops.storage.http.settings import MAX_CONNECTIONS, MIN_BYTES_PER_SECOND, max_seconds
from trinitylake_ops.storage.options import StorageOptions

ItemResponse = Mapping[str, Any]

_CHUNK_BYTES = 64 * 1024
_CHECKSUM = "x-amz-crc32"


class _VerifyingSession:
    """A botocore transport that verifies responses and limits their time.

    botocore accepts truncated responses, and waits indefinitely for slow responses. DynamoDB sends a checksum with
    every response. Without this check, a response of a proxy or of another server could be mistaken for an empty
    response, and the file would seem to be missing.
    """

    def __init__(self, session: URLLib3Session, settings: DynamoDBSettings):
        self._session = session
        self._settings = settings

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """Send a request. Raise the exceptions of botocore's transport."""
        n_sent = len(request.body or b"")
        deadline = time.monotonic() + max_seconds(self._settings, n_sent)
        request.stream_output = True  # this class reads the body
        response = self._session.send(request)
        try:
            response._content = self._body(response, deadline)
        except URLLib3ReadTimeoutError as error:
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from None
        except ProtocolError as error:
            raise ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from None
        finally:
            if response._content is None:
                response.raw.close()  # so that the rest of this response is not read as the next response
        response.raw.release_conn()
        return response

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _body(self, response: AWSResponse, deadline: float) -> bytes:
        chunks: list[bytes] = []
        n_bytes = 0
        while chunk := response.raw.read1(_CHUNK_BYTES):
            chunks.append(chunk)
            n_bytes += len(chunk)
            if time.monotonic() > deadline + n_bytes / MIN_BYTES_PER_SECOND:
                raise TimeoutError
        length, checksum = response.headers.get("content-length"), response.headers.get(_CHECKSUM)
        body = b"".join(chunks)
        if length is not None and length != str(n_bytes):
            raise ProtocolError(f"only {n_bytes} of {length} bytes arrived")
        if checksum is not None and checksum != str(zlib.crc32(body)):
            raise ProtocolError("the checksum of the response is wrong")
        if checksum is None and response.status_code == 200:
            raise ProtocolError("the response has no checksum, so it is not from DynamoDB")
        return body


class DynamoDBClient:
    """A client that can be used from any thread and in forked children.

    Connections do not survive a fork, so a forked child creates a separate client for its first request.
    """

    def __init__(self, settings: DynamoDBSettings, options: StorageOptions):
        self._settings = settings
        self._options = options
        self.after_fork_in_child()
        at_fork(self)

    def after_fork_in_child(self) -> None:
        """Discard the parent's client, and the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()
        self._client: Any = None

    def open(self) -> None:
        """Create the client. This is slow because it loads botocore's service description of DynamoDB."""
        with self._lock:
            if self._client is None:
                self._client = self._new_client()

    def call(self, method: str, arguments: Mapping[str, Any]) -> ItemResponse:
        """Send one request without retries. Raises one of ``CLIENT_ERRORS`` if it fails.

        Args:
            method: Name of the client's method.
            arguments: Keyword arguments of the method.
        """
        self.open()
        response: ItemResponse = getattr(self._client, method)(**arguments)
        return response

    def _new_client(self) -> Any:
        options, settings = self._options, self._settings
        session = botocore.session.get_session()
        session.register_component("data_loader", _service_models())
        client = session.create_client(
            "dynamodb",
            region_name=settings.region,
            endpoint_url=settings.endpoint,
            aws_access_key_id=options.get("access_key_id"),
            aws_secret_access_key=options.get("secret_access_key"),
            aws_session_token=options.get("session_token"),
            config=Config(
                connect_timeout=settings.connect_timeout_seconds,
                read_timeout=settings.read_timeout_seconds,
                max_pool_connections=MAX_CONNECTIONS,
                retries={"total_max_attempts": 1, "mode": "standard"},
                user_agent_extra="trinitylake-ops",
            ),
        )
        # botocore has no public option for it. A wire test checks that responses are still verified.
        client._endpoint.http_session = _VerifyingSession(client._endpoint.http_session, settings)
        return client


@functools.cache
def _service_models() -> Any:
    """Return botocore's service description of DynamoDB, which takes most of the time and memory of a client."""
    return botocore.session.get_session().get_component("data_loader")


#: Maximum time to wait for a new table. DynamoDB needs several seconds.
TABLE_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.5


class TableRequests:
    """Sends requests to the table of a root. Each request is sent once."""

    def __init__(self, location: DynamoDBLocation, options: StorageOptions):
        self.options = options
        self._location = location
        self._settings = DynamoDBSettings.of(options)
        self._endpoint = self._settings.endpoint or "the endpoint of the AWS configuration"
        self._client = DynamoDBClient(self._settings, options)
        self._clock = ServerClock()

    def send(self, operation: Request, path: str, method: str, **arguments: Any) -> ItemResponse:
        """Send a request and return the response. Raise typed errors.

        With the option ``create_table``, a missing table is treated as empty, and created by the first create or write.

        Args:
            operation: Operation of the storage, for error messages.
            path: Path of the file, for error messages.
            method: Name of the client's method.
            arguments: Keyword arguments of the method.
        """
        if not method.startswith("batch_"):
            arguments = {"TableName": self._location.table, **arguments}
        try:
            return self._call(method, arguments)
        except CLIENT_ERRORS as error:
            is_missing_table = self._settings.create_table and code_of(error) in MISSING_TABLE
            failure = None if is_missing_table else self._typed_error(operation, path, error)
        # Raised outside the handler, because messages of client libraries may contain parts of the request and its
        # credentials.
        if failure is not None:
            raise failure
        if operation not in (Request.CREATE, Request.WRITE):
            return {}
        self._create_table(operation, path)
        return self._once(operation, path, method, arguments)

    def now_ms(self) -> int:
        """Return the time of the server's clock, in milliseconds since the epoch."""
        return self._clock.now_ms(self._fetch_time)

    def about(self, operation: Request, path: str) -> StorageRequest:
        """Describe a request for error messages."""
        return StorageRequest(operation, path, self._location.root, self.options)

    def _fetch_time(self) -> None:
        self.send(Request.CLOCK, "", "get_item", Key=self._location.clock_key(), ProjectionExpression=ROOT_KEY)

    def _once(self, operation: Request, path: str, method: str, arguments: dict[str, Any]) -> ItemResponse:
        try:
            return self._call(method, arguments)
        except CLIENT_ERRORS as error:
            failure = self._typed_error(operation, path, error)
        raise failure

    def _typed_error(self, operation: Request, path: str, error: BaseException) -> Exception:
        return typed_error(self.about(operation, path), error, self._endpoint)

    def _call(self, method: str, arguments: dict[str, Any]) -> ItemResponse:
        """Send one request, and update the estimate of the server's clock."""
        self._client.open()  # is slow, and must not count as server latency
        sent_at_ms = monotonic_ms()
        response: ItemResponse | None = None
        try:
            response = self._client.call(method, arguments)
            return response
        except CLIENT_ERRORS as error:
            response = error_response(error)
            raise
        finally:
            headers = (response or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
            self._clock.observe(headers.get("date"), sent_at_ms, monotonic_ms())

    def _create_table(self, operation: Request, path: str) -> None:
        """Create the table and wait until it is ready. Another process may create it at the same time."""
        names = (ROOT_KEY, PATH_KEY)
        arguments = {
            "TableName": self._location.table,
            "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in names],
            "KeySchema": [
                {"AttributeName": name, "KeyType": kind} for name, kind in zip(names, ("HASH", "RANGE"), strict=True)
            ],
            "BillingMode": "PAY_PER_REQUEST",
        }
        failure: Exception | None = None
        try:
            self._call("create_table", arguments)
        except CLIENT_ERRORS as error:
            # If the response was lost, the state of the table shows the outcome.
            if code_of(error) != "ResourceInUseException":
                failure = self._typed_error(operation, path, error)
        if failure is not None and not isinstance(failure, AmbiguousWriteError):
            raise failure
        self._wait_for_table(operation, path)

    def _wait_for_table(self, operation: Request, path: str) -> None:
        deadline = time.monotonic() + TABLE_TIMEOUT_SECONDS
        while True:
            failure: Exception | None = None
            try:
                response = self._call("describe_table", {"TableName": self._location.table})
                if response["Table"]["TableStatus"] in ("ACTIVE", "UPDATING"):
                    return
            except CLIENT_ERRORS as error:
                # Reported as LIST, because nothing was written yet. A new table may not be visible immediately.
                failure = None if code_of(error) in MISSING_TABLE else self._typed_error(Request.LIST, path, error)
            if failure is not None:
                raise failure
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{self.about(operation, path).failure}: the table {self._location.table!r} is not ready"
                    f" {TABLE_TIMEOUT_SECONDS:.0f} s after its creation; retry",
                    path=path,
                )
            time.sleep(_POLL_SECONDS)
