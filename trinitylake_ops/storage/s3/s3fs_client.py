"""The clients of s3fs and botocore, and their exceptions as errors of a storage."""

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
from trinitylake_ops.storage.http.settings import MAX_CONNECTIONS, longest_seconds
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.errors import error_from_response
from trinitylake_ops.storage.s3.settings import S3Settings

T = TypeVar("T")


class _SingleRequest:
    """An aiohttp session that sends each request to the one place it is meant for."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    def request(self, method: str, **arguments: Any) -> Any:
        return self._session.request(method, allow_redirects=False, **arguments)


class _SingleRequestSession(AIOHTTPSession):  # type: ignore[misc] # aiobotocore ships no types
    """aiobotocore's transport without aiohttp's own second sends.

    aiohttp repeats a PUT or DELETE whose connection broke before the answer, without a word. A repeated create would
    meet the file of its first send and report it as another writer's. So a lost answer must be raised here. There is no
    public switch for it in aiohttp. A test on the wire watches that this one keeps working.
    """

    async def _get_session(self, proxy_url: str | None) -> _SingleRequest:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False
        return _SingleRequest(session)

    async def send(self, request: Any) -> Any:
        # Before it sends a body, botocore asks whether it may, which costs a round trip. The answer has no time-out in
        # aiohttp, and some servers and proxies never give it.
        request.headers.pop("Expect", None)
        return await super().send(request)


class S3Client:
    """Requests of s3fs from any thread of any process.

    s3fs and its event loop do not survive a fork, so a forked child gets a client of its own at its
    first request. The client closes when this object is dropped.
    """

    @classmethod
    def shared(cls, settings: S3Settings, options: StorageOptions) -> S3Client:
        """Return the client of this process for these settings (decision 33)."""
        key = (settings, options, environment_of_clients())
        return _kept.get(key, lambda: cls(settings, options))

    def unshare(self) -> None:
        """Let storages that are opened from now on make another client: this one had no answer.

        It may have been made before there were credentials.
        """
        _kept.drop(self)

    def __init__(self, settings: S3Settings, options: StorageOptions):
        self._settings = settings
        self._options = options
        self._lock = threading.Lock()
        self._opened: list[s3fs.S3FileSystem] = []  # the client of this process, once it is needed
        weakref.finalize(self, _close, self._opened)
        at_fork(self)

    def run(self, request: Callable[[s3fs.S3FileSystem], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the client's event loop and wait for it. Raises what the client library raises."""
        return run_on_loop(request(self._file_system()))

    def time_limit(self, n_bytes: int = 0) -> asyncio.Timeout:
        """Bound the transfer of a request or an answer with this many bytes of body.

        Raises TimeoutError after that time. The client's own time-outs see a silent server, but not one that trickles
        or stops reading.
        """
        return asyncio.timeout(longest_seconds(self._settings, n_bytes))

    def after_fork_in_child(self) -> None:
        """Start anew in a forked child. The client is its parent's, and the thread that held the lock is gone."""
        self._lock = threading.Lock()
        for opened in self._opened:
            leak(opened)  # aiohttp complains about unclosed ones
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
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
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
            asynchronous=True,  # otherwise s3fs closes itself in a way that fails in a forked child
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        file_system.retries = 1
        return file_system


#: botocore puts its own together from some fifteen parts, at each request.
_USER_AGENT = f"trinitylake-ops/{version('trinitylake-ops')}"


def _timestamp(text: str | float) -> datetime:
    """Return the time of an answer: ISO 8601 in lists, HTTP's form elsewhere. Raises ValueError.

    botocore's own parser guesses the form, which takes longer than all else of a small answer.
    """
    if isinstance(text, str):
        with suppress(ValueError):
            return datetime.fromisoformat(text)
        with suppress(ValueError):
            return parsedate_to_datetime(text)
    moment: datetime = parse_timestamp(text)
    return moment


_kept: ClientCache[S3Client] = ClientCache()


def _stay_in_region(params: dict[str, Any], **_: Any) -> None:
    # For a bucket elsewhere, botocore looks for its region by further requests. When those are redirected too, there is
    # no end. The caller is told to set the region instead.
    params.get("context", {}).get("s3_redirect", {})["redirected"] = True


@cache
def service_models() -> Any:
    """Return botocore's data about S3: most of the time and memory that a client takes, and the same for each."""
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
    """The address of a service, the region, and whether the bucket's name stands in the host's name."""

    endpoint: str
    region: str
    is_virtual: bool


def new_session(options: StorageOptions) -> botocore.session.Session:
    """Return a session with the credentials of the options, else those of AWS's environment."""
    session = botocore.session.Session()
    session.register_component("data_loader", service_models())
    if "access_key_id" in options:
        session.set_credentials(options["access_key_id"], options["secret_access_key"], options.get("session_token"))
    return session


def bucket_address(session: botocore.session.Session, settings: S3Settings, bucket: str) -> BucketAddress:
    """Return the place of a bucket. Nothing is sent."""
    # This client signs and sends nothing. It knows all places where AWS's endpoints and regions are set up.
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
    OSError,  # TimeoutError too
)
#: Every exception that a request may end with.
CLIENT_ERRORS = (ClientError, BotoCoreError, ValueError, *_NO_RESPONSE)


def error_response(error: BaseException) -> Mapping[str, Any] | None:
    """Return the parsed answer of the server that a client's exception stands for, if there was one."""
    for cause in _causes(error):
        if isinstance(cause, ClientError):
            response: Mapping[str, Any] = cause.response
            return response
    return None


def status_and_code(response: Mapping[str, Any]) -> tuple[int | None, str | None]:
    """Return HTTP status and S3 error code of a parsed answer."""
    return response.get("ResponseMetadata", {}).get("HTTPStatusCode"), response.get("Error", {}).get("Code")


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> TrinityLakeError:
    """Return the typed error for the end of a request, one of ``CLIENT_ERRORS``."""
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
        f"{request.failure}: the S3 client cannot be used ({request.safe(_reason(error))}); "
        "check the storage options and AWS's environment variables and configuration files",
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
    # An established connection that breaks is also called a failed connection by botocore.
    if isinstance(error, EndpointConnectionError) and isinstance(
        inner, (aiohttp.ClientConnectorError, socket.gaierror)
    ):
        return TransportFailure.NOT_CONNECTED
    return TransportFailure.NO_ANSWER


def _reason(error: BaseException) -> str:
    inner = _inner(error)
    if isinstance(error, TimeoutError):
        return "time-out"
    if isinstance(inner, TimeoutError) or "Timeout" in type(error).__name__:
        return "time-out while connecting" if isinstance(error, ConnectTimeoutError) else "time-out"
    if isinstance(inner, OSError) and inner.strerror:
        return inner.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _inner(error: BaseException) -> BaseException:
    given = getattr(error, "kwargs", {}).get("error") if isinstance(error, BotoCoreError) else None
    return given if isinstance(given, BaseException) else error


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return the exception and its causes. For answers, s3fs raises OSErrors of its own, with the true one as cause."""
    current: BaseException | None = error
    while current is not None:
        yield current
        current = current.__cause__
