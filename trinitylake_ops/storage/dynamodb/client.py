"""The botocore client of a storage: one per process, each request sent once, every answer whole and bounded in time."""

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

from trinitylake_ops.storage.dynamodb.settings import DynamoDBSettings
from trinitylake_ops.storage.fork import at_fork
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.remote.settings import MAX_CONNECTIONS, MIN_BYTES_PER_SECOND, longest_seconds

Answer = Mapping[str, Any]

_PIECE_BYTES = 64 * 1024
_CHECKSUM = "x-amz-crc32"


class _WholeAnswers:
    """botocore's transport, which itself takes an answer that was cut, and waits for one that trickles.

    DynamoDB gives the checksum of every answer. Without it, what a proxy or another server says would look like an
    answer that holds nothing: like a missing file.
    """

    def __init__(self, session: URLLib3Session, settings: DynamoDBSettings):
        self._session = session
        self._settings = settings

    def send(self, request: AWSPreparedRequest) -> AWSResponse:
        """Send a request. Raises what botocore's transport raises."""
        n_sent = len(request.body or b"")
        deadline = time.monotonic() + longest_seconds(self._settings, n_sent)
        request.stream_output = True  # the body is read here
        response = self._session.send(request)
        try:
            response._content = self._body(response, deadline)
        except URLLib3ReadTimeoutError as error:
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from None
        except ProtocolError as error:
            raise ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from None
        finally:
            if response._content is None:
                response.raw.close()  # what is left of the answer must not be taken for the next one
        response.raw.release_conn()
        return response

    def close(self) -> None:
        """Close the connections."""
        self._session.close()

    def _body(self, response: AWSResponse, deadline: float) -> bytes:
        pieces: list[bytes] = []
        n_bytes = 0
        while piece := response.raw.read1(_PIECE_BYTES):
            pieces.append(piece)
            n_bytes += len(piece)
            if time.monotonic() > deadline + n_bytes / MIN_BYTES_PER_SECOND:
                raise TimeoutError
        length, checksum = response.headers.get("content-length"), response.headers.get(_CHECKSUM)
        body = b"".join(pieces)
        if length is not None and length != str(n_bytes):
            raise ProtocolError(f"{n_bytes} of {length} bytes arrived")
        if checksum is not None and checksum != str(zlib.crc32(body)):
            raise ProtocolError("the answer does not have its checksum")
        if checksum is None and response.status_code == 200:
            raise ProtocolError("the answer has no checksum, so it is not DynamoDB's")
        return body


class DynamoDBClient:
    """Requests of botocore from any thread of any process.

    Connections do not survive a fork, so a forked child gets a client of its own at its first request.
    """

    def __init__(self, settings: DynamoDBSettings, options: StorageOptions):
        self._settings = settings
        self._options = options
        self.forget()
        at_fork(self)

    def forget(self) -> None:
        """Start anew in a forked child. The client is its parent's, and the thread that held the lock is gone."""
        self._lock = threading.Lock()
        self._client: Any = None

    def open(self) -> None:
        """Load botocore's data about DynamoDB, which takes a while. Raises botocore's exceptions."""
        with self._lock:
            if self._client is None:
                self._client = self._new_client()

    def call(self, method: str, arguments: Mapping[str, Any]) -> Answer:
        """Send one request, once. Raises botocore's exceptions, OSError and ValueError."""
        self.open()
        answer: Answer = getattr(self._client, method)(**arguments)
        return answer

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
        # There is no public place for it. A test on the wire watches that answers go through it.
        client._endpoint.http_session = _WholeAnswers(client._endpoint.http_session, settings)
        return client


@functools.cache
def _service_models() -> Any:
    """Return botocore's data about DynamoDB: most of the time and memory that a client takes, the same for each."""
    return botocore.session.get_session().get_component("data_loader")
