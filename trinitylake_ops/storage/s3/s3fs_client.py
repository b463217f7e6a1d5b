"""The s3fs and botocore clients, and typed errors for their exceptions."""

from __future__ import annotations

import asyncio
import socket
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar
from urllib.parse import urlsplit

import aiohttp
import botocore
import botocore.session
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ProxyConnectionError,
    ResponseStreamingError,
    SSLError,
)
from botocore.exceptions import (
    ConnectionError as BotoConnectionError,
)
from botocore.parsers import ResponseParserError
from botocore.utils import parse_timestamp

from trinitylake_ops.errors import StorageError, TrinityLakeError
from trinitylake_ops.storage.background import at_fork, leak
from trinitylake_ops.storage.http.aws import environment_of_clients, error_without_credentials, is_without_credentials
from trinitylake_ops.storage.http.clients import ClientCache, close_on_loop, run_on_loop
from trinitylake_ops.storage.http.requests import StorageRequest, TransportFailure, error_from_transport
from trinitylake_ops.storage.http.settings import MAX_CONNECTIONS, max_seconds
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.errors import error_from_response
from trinitylake_ops.storage.s3.settings import S3Settings

T = TypeVar("T")


class _SingleRequest:
    """An aiohttp session that does not follow redirects."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    def request(self, method: str, **arguments: Any) -> Any:
        return self._session.request(method, allow_redirects=False, **arguments)


class _SingleRequestSession(AIOHTTPSession):  # type: ignore[misc] # aiobotocore ships no types
    """aiobotocore's transport without the retries of aiohttp.

    aiohttp silently resends a PUT or DELETE whose connection was lost before the response. A resent create would find
    the file of the first send and report that another writer created it, so a lost response must raise an error.
    aiohttp has no public option for it; a wire test checks that the attribute still works.
    """

    async def _get_session(self, proxy_url: str | None) -> _SingleRequest:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False
        return _SingleRequest(session)

    async def send(self, request: Any) -> Any:
        # botocore waits for "100 Continue" before it sends a body, which costs a round trip. aiohttp has no timeout for
        # this response, and some servers and proxies never send it.
        request.headers.pop("Expect", None)
        return await super().send(request)


class S3Client:
    """An s3fs client that can be used from any thread and in forked children.

    s3fs and its event loop do not survive a fork, so a forked child creates a separate client for its first request.
    The client is closed when this object is garbage-collected.
    """

    @classmethod
    def shared(cls, settings: S3Settings, options: StorageOptions) -> S3Client:
        """Return the client of this process for the given settings (decision 33).

        Args:
            settings: Validated options.
            options: The options, with credentials.
        """
        key = (settings, options, environment_of_clients())
        return _clients.get(key, lambda: cls(settings, options))

    def unshare(self) -> None:
        """Remove this client from the cache after a request without a response.

        It may have been created before there were credentials.
        """
        _clients.drop(self)

    def __init__(self, settings: S3Settings, options: StorageOptions):
        self._settings = settings
        self._options = options
        self._lock = threading.Lock()
        self._opened: list[s3fs.S3FileSystem] = []  # the client of this process, created on first use
        weakref.finalize(self, _close, self._opened)
        at_fork(self)

    def run(self, request: Callable[[s3fs.S3FileSystem], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the event loop and wait for it. Errors of the client library are raised unchanged."""
        return run_on_loop(request(self._file_system()))

    def time_limit(self, n_bytes: int = 0) -> asyncio.Timeout:
        """Return a timeout for the total duration of a request or a response with a body of this size.

        The client's timeouts detect a server that is silent, but not a server that sends or reads very slowly.
        """
        return asyncio.timeout(max_seconds(self._settings, n_bytes))

    def after_fork_in_child(self) -> None:
        """Discard the parent's client, and the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()
        for opened in self._opened:
            leak(opened)  # aiohttp warns about unclosed sessions that are destroyed
        self._opened.clear()

    def _file_system(self) -> s3fs.S3FileSystem:
        with self._lock:
            if not self._opened:
                self._opened.append(self._new_file_system())
            return self._opened[0]

    def _new_file_system(self) -> s3fs.S3FileSystem:
        options, settings = self._options, self._settings
        session = AioSession()
        session.register_component("data_loader", service_models())
        session.register("before-call.s3", _stay_in_region)
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=response_time)
        file_system = s3fs.S3FileSystem(
            session=session,
            key=options.get("access_key_id"),
            secret=options.get("secret_access_key"),
            token=options.get("session_token"),
            endpoint_url=settings.endpoint,
            client_kwargs={"region_name": settings.region} if settings.region else {},
            config_kwargs={
                "connect_timeout": settings.connect_timeout_seconds,
                "read_timeout": settings.read_timeout_seconds,
                "max_pool_connections": MAX_CONNECTIONS,
                "retries": {"total_max_attempts": 1, "mode": "standard"},
                "request_checksum_calculation": "when_required",
                "response_checksum_validation": "when_required",
                "s3": {"addressing_style": settings.addressing_style},
                "http_session_cls": _SingleRequestSession,
                "user_agent": _USER_AGENT,
            },
            asynchronous=True,  # otherwise the destructor of s3fs fails in a forked child
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        file_system.retries = 1
        return file_system


#: botocore would build its user agent from about fifteen parts for each request.
_USER_AGENT = f"trinitylake-ops/{version('trinitylake-ops')}"


def response_time(text: str | float) -> datetime:
    """Parse a time in a response: ISO 8601 in listings, otherwise the HTTP format. Raise ValueError if it is invalid.

    botocore's parser guesses the format, which takes longer than processing the rest of a small response.
    """
    if isinstance(text, str):
        with suppress(ValueError):
            return datetime.fromisoformat(text)
        with suppress(ValueError):
            return parsedate_to_datetime(text)
    timestamp: datetime = parse_timestamp(text)
    return timestamp


_clients: ClientCache[S3Client] = ClientCache()


def _stay_in_region(params: dict[str, Any], **_: Any) -> None:
    # For a bucket in another region, botocore sends more requests to find the region, and never stops if these are also
    # redirected. Instead, fail with an error message that asks the user to set the region.
    params.get("context", {}).get("s3_redirect", {})["redirected"] = True


@cache
def service_models() -> Any:
    """Return botocore's service description of S3, which takes most of the time and memory of a client."""
    return AioSession().get_component("data_loader")


def _close(opened: list[s3fs.S3FileSystem]) -> None:
    if not opened:
        return
    creator = getattr(opened[0], "_s3creator", None)
    if creator is not None:
        close_on_loop(lambda: creator.__aexit__(None, None, None))


NO_REGION = "us-east-1"


@dataclass(frozen=True, slots=True)
class BucketAddress:
    """How requests address a bucket."""

    #: URL of the service.
    endpoint: str
    region: str
    #: Whether URLs contain the bucket in the host. Otherwise the path contains it.
    is_virtual: bool


def new_session(options: StorageOptions) -> botocore.session.Session:
    """Create a session with the credentials from the options or, if there are none, from AWS's configuration."""
    session = botocore.session.Session()
    session.register_component("data_loader", service_models())
    if "access_key_id" in options:
        session.set_credentials(options["access_key_id"], options["secret_access_key"], options.get("session_token"))
    return session


def bucket_address(session: botocore.session.Session, settings: S3Settings, bucket: str) -> BucketAddress:
    """Resolve the address of a bucket without sending a request.

    Args:
        session: Session with AWS's configuration.
        settings: Validated options of the root.
        bucket: Name of the bucket.
    """
    # This client sends nothing. It resolves the endpoint and the region from all AWS configuration sources.
    client = session.create_client(
        "s3",
        region_name=settings.region,
        endpoint_url=settings.endpoint,
        config=Config(signature_version=botocore.UNSIGNED, s3={"addressing_style": settings.addressing_style}),
    )
    region = client.meta.region_name
    example = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "key"})
    is_virtual = (urlsplit(example).hostname or "").startswith(f"{bucket.lower()}.")
    is_known = region and region != "aws-global"
    return BucketAddress(client.meta.endpoint_url.rstrip("/"), region if is_known else NO_REGION, is_virtual)


_NO_RESPONSE = (
    BotoConnectionError,
    HTTPClientError,
    IncompleteReadError,
    ResponseParserError,
    ResponseStreamingError,
    aiohttp.ClientError,
    OSError,  # includes TimeoutError
)
#: All exceptions that a request may raise.
CLIENT_ERRORS = (ClientError, BotoCoreError, ValueError, *_NO_RESPONSE)


def error_response(error: BaseException) -> Mapping[str, Any] | None:
    """Return the parsed response that caused an exception, if there is one."""
    for cause in _causes(error):
        if isinstance(cause, ClientError):
            response: Mapping[str, Any] = cause.response
            return response
    return None


def status_and_code(response: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return the HTTP status and the S3 error code of a parsed response."""
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code")


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for an exception of a request.

    Args:
        request: The request that failed.
        error: One of ``CLIENT_ERRORS``.
        endpoint: Address of the server, for the message.
    """
    response = error_response(error)
    if response is not None:
        status, code = status_and_code(response)
        return error_from_response(request, status, code, response.get("Error", {}).get("Message"))
    for cause in _causes(error):
        if is_without_credentials(cause):
            return error_without_credentials(request, str(cause))
        if isinstance(cause, _NO_RESPONSE):
            return error_from_transport(request, _transport_failure(cause), endpoint, _reason(cause))
    return StorageError(
        f"{request.failure}: the S3 client failed ({request.safe(_reason(error))}); check the storage options and the"
        " environment variables and configuration files of AWS",
        path=request.path,
    )


def _transport_failure(error: BaseException) -> TransportFailure:
    inner = _inner(error)
    if isinstance(error, SSLError) or isinstance(
        inner, (aiohttp.ClientSSLError, aiohttp.ClientConnectorCertificateError)
    ):
        return TransportFailure.NOT_TRUSTED
    if isinstance(error, (ConnectTimeoutError, ProxyConnectionError)):
        return TransportFailure.NOT_CONNECTED
    # botocore also raises EndpointConnectionError if an established connection is lost.
    if isinstance(error, EndpointConnectionError) and isinstance(
        inner, (aiohttp.ClientConnectorError, socket.gaierror)
    ):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_RESPONSE


def _reason(error: BaseException) -> str:
    inner = _inner(error)
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(inner, TimeoutError) or "Timeout" in type(error).__name__:
        return "timeout while connecting" if isinstance(error, ConnectTimeoutError) else "timeout"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _inner(error: BaseException) -> BaseException:
    inner_error = getattr(error, "kwargs", {}).get("error") if isinstance(error, BotoCoreError) else None
    return inner_error if isinstance(inner_error, BaseException) else error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an exception and its causes. s3fs raises an OSError whose cause is the exception of botocore."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__
