"""The Google Cloud Storage client: credentials, requests, multipart bodies, and typed errors for its exceptions.

gcsfs resolves the URL of the service and provides the access tokens. Its methods for requests are not used, because
they resend requests and drop the status and the headers of responses.
"""

from __future__ import annotations

import asyncio
import email.parser
import email.policy
import io
import json
import re
import secrets
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import aiohttp
import gcsfs
from gcsfs.core import GCSFileSystem
from gcsfs.credentials import LOCAL_REFRESH_BUFFER
from gcsfs.retry import HttpError, NonRetryableError
from google.auth.exceptions import GoogleAuthError, TransportError
from google.oauth2 import credentials as user_credentials
from google.oauth2 import service_account

from trinitylake_ops.errors import StorageError
from trinitylake_ops.storage.background import at_fork, leak
from trinitylake_ops.storage.gcs.errors import error_without_credentials
from trinitylake_ops.storage.gcs.settings import ANONYMOUS, GcsSettings, check_kind
from trinitylake_ops.storage.http.clients import close_on_loop, run_on_loop
from trinitylake_ops.storage.http.requests import StorageRequest, aiohttp_failure, error_from_transport
from trinitylake_ops.storage.http.settings import MAX_CONNECTIONS, max_seconds


def scoped_credentials(credentials: str | Mapping[str, Any], scope: str) -> Any:
    """Load credentials whose tokens have the given scope. Raises one of ``AUTH_ERRORS`` if that fails.

    Args:
        credentials: Path of a credentials file, or its parsed contents.
        scope: OAuth scope of the tokens.
    """
    if isinstance(credentials, str):
        with open(credentials, encoding="utf-8") as file:
            credentials = json.load(file)
    information = dict(check_kind(credentials))
    if information["type"] == "service_account":
        return service_account.Credentials.from_service_account_info(information, scopes=[scope])  # type: ignore[no-untyped-call]
    return user_credentials.Credentials.from_authorized_user_info(information, scopes=[scope])  # type: ignore[no-untyped-call]


class CredentialsError(Exception):
    """Credentials could not be loaded, or there is no token for them. Nothing was sent to the storage."""


#: All exceptions that may be raised while credentials are loaded or a token is requested.
AUTH_ERRORS = (GoogleAuthError, HttpError, NonRetryableError, OSError, ValueError, KeyError, TypeError)
#: All exceptions that a request may raise.
CLIENT_ERRORS = (CredentialsError, aiohttp.ClientError, OSError)  # TimeoutError is an OSError


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> StorageError:
    """Return the typed error for an exception of a request.

    Args:
        request: The request that failed.
        error: One of ``CLIENT_ERRORS``.
        endpoint: Address of the server, for the message.
    """
    if isinstance(error, CredentialsError):
        causes = list(_causes(error))
        auth_error = next((cause for cause in causes if isinstance(cause, GoogleAuthError)), error.__cause__)
        is_transient = any(
            isinstance(cause, (TransportError, TimeoutError)) or getattr(cause, "retryable", False) for cause in causes
        )
        return error_without_credentials(request, _reason_without_token(auth_error), is_transient=is_transient)
    failure, reason = aiohttp_failure(error)
    return error_from_transport(request, failure, endpoint, reason)


def _reason_without_token(cause: BaseException | None) -> str:
    """Return the message of a google-auth exception. For others, return only the class: messages may quote a file."""
    if isinstance(cause, GoogleAuthError) and cause.args:
        return str(cause.args[0]).splitlines()[0] if str(cause.args[0]) else type(cause).__name__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield the causes of an exception. gcsfs wraps the exceptions of google-auth."""
    current = error.__cause__
    while current is not None:
        yield current
        current = current.__cause__


T = TypeVar("T")

_USER_AGENT = f"python-gcsfs/{gcsfs.__version__}"
_ACCESS = "read_write"
_SCOPE = f"https://www.googleapis.com/auth/devstorage.{_ACCESS}"


@dataclass(frozen=True, slots=True)
class Call:
    """A request."""

    method: str
    #: Quoted path of the URL.
    target: str
    #: Query of the URL.
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""


class OpenClient:
    """The client of one process: gcsfs, and the session with its connections."""

    def __init__(self, settings: GcsSettings):
        self.file_system = GCSFileSystem(
            project="",
            access=_ACCESS,
            token=_token(settings.credentials),
            endpoint_url=settings.endpoint,
            requester_pays=settings.project or False,
            asynchronous=True,  # otherwise the destructor of gcsfs fails in a forked child
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self.session: aiohttp.ClientSession | None = None

    def session_on_loop(self, settings: GcsSettings) -> aiohttp.ClientSession:
        """Return the session, which is created for the first request. Must be called on the event loop."""
        if self.session is None:
            self.session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=settings.connect_timeout_seconds,
                    sock_read=settings.read_timeout_seconds,
                ),
            )
            # aiohttp silently resends a PUT or DELETE whose connection was lost before the response, and has no public
            # option for it. A wire test checks that the attribute still works.
            self.session._retry_connection = False
        return self.session


class GcsClient:
    """A client that can be used from any thread and in forked children.

    A client and its event loop do not survive a fork, so a forked child creates a separate client for its first
    request. The client is closed when this object is garbage-collected.
    """

    def __init__(self, settings: GcsSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._opened: list[OpenClient] = []  # the client of this process, created on first use
        weakref.finalize(self, _close, self._opened)
        at_fork(self)

    def run(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the event loop and wait for it. Raises one of ``CLIENT_ERRORS`` if it fails."""
        self._open()  # loads credentials in the caller's thread, because that may block
        return run_on_loop(request())

    async def authorize(self) -> None:
        """Renew a token that is about to expire, in a thread, because the request blocks."""
        credentials = self._open().file_system.credentials
        if credentials.credentials is None or credentials._credentials_valid(LOCAL_REFRESH_BUFFER):
            return
        try:
            async with self.time_limit():
                await asyncio.to_thread(credentials.maybe_refresh)
        except AUTH_ERRORS as error:
            raise CredentialsError("cannot renew the token") from error

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request once, without following redirects, and yield the response before its body is read."""
        opened = self._open()
        file_system = opened.file_system
        session = opened.session_on_loop(self._settings)
        async with session.request(
            call.method,
            f"{file_system._location.rstrip('/')}{call.target}",
            params=file_system._get_params(dict(call.parameters)),
            headers=self._headers(file_system, call),
            data=io.BytesIO(call.data) if call.data else None,
            allow_redirects=False,
        ) as response:
            yield response

    def _headers(self, file_system: GCSFileSystem, call: Call) -> dict[str, str]:
        # The same method of gcsfs may request a token and block the event loop.
        headers = {"Accept-Encoding": "identity", "User-Agent": _USER_AGENT, **call.headers}
        if file_system.credentials.credentials is not None:
            file_system.credentials.credentials.apply(headers)
        return headers

    def time_limit(self, n_bytes: int = 0) -> asyncio.Timeout:
        """Return a timeout for the total duration of a request or a response with a body of this size.

        The client's timeouts detect a server that is silent, but not a server that sends or reads very slowly.
        """
        return asyncio.timeout(max_seconds(self._settings, n_bytes))

    def after_fork_in_child(self) -> None:
        """Discard the parent's client, and the lock, whose owner may not exist in the child."""
        self._lock = threading.Lock()
        for opened in self._opened:
            leak(opened)
        self._opened.clear()

    def _open(self) -> OpenClient:
        with self._lock:
            if not self._opened:
                try:
                    self._opened.append(OpenClient(self._settings))
                except AUTH_ERRORS as error:
                    raise CredentialsError("cannot load the credentials") from error
            return self._opened[0]


def _token(credentials: str | Mapping[str, Any] | None) -> Any:
    """Return the ``token`` argument of gcsfs. Without credentials, it uses the application default credentials."""
    if credentials is None:
        return "google_default"
    if credentials == ANONYMOUS:
        return "anon"
    return scoped_credentials(credentials, _SCOPE)


def _close(opened: list[OpenClient]) -> None:
    session = opened[0].session if opened else None
    if session is not None:
        close_on_loop(session.close)


_NUMBER = re.compile(r"\+([0-9]{1,9})>\s*$")
_STATUS = re.compile(rb"HTTP/[0-9.]+ (\d{3})")
#: Without this header, caches serve a public object for an hour after it was replaced.
_CACHE_CONTROL = "no-store"


class Body(NamedTuple):
    """A request body and its content type."""

    data: bytes
    content_type: str


class PartResponse(NamedTuple):
    """The response to one call of a batch."""

    status: int
    body: bytes


def upload_body(name: str, data: bytes) -> Body:
    """Build the body of a multipart upload: the metadata and the content of an object.

    The boundary is random, so that no content can contain it.

    Args:
        name: Name of the object.
        data: Content of the object.
    """
    boundary = secrets.token_hex(16)
    metadata = json.dumps({"name": name, "cacheControl": _CACHE_CONTROL})
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{metadata}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    body = b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))
    return Body(body, f"multipart/related; boundary={boundary}")


def batch_of_deletes(targets: Sequence[str]) -> Body:
    """Build the body of a batch that deletes objects, given the paths of their URLs."""
    boundary = secrets.token_hex(16)
    parts = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
        f"Content-ID: <{boundary}+{number}>\r\n\r\nDELETE {target} HTTP/1.1\r\nContent-Length: 0\r\n\r\n\r\n"
        for number, target in enumerate(targets)
    ]
    return Body("".join([*parts, f"--{boundary}--\r\n"]).encode(), f"multipart/mixed; boundary={boundary}")


def batch_responses(content_type: str, body: bytes) -> dict[int, PartResponse]:
    """Parse the response of a batch. Omit parts that are invalid.

    Args:
        content_type: ``Content-Type`` header of the response.
        body: Body of the response.

    Returns:
        Responses by the index of their call in the batch.
    """
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    message = parser.parsebytes(b"Content-Type: %b\r\n\r\n%b" % (content_type.encode("latin-1", "replace"), body))
    responses: dict[int, PartResponse] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        number = _NUMBER.search(str(part.get("Content-ID", "")))
        payload = part.get_payload(decode=True)
        status = _STATUS.match(payload.lstrip()) if isinstance(payload, bytes) else None
        if number is None or status is None or not isinstance(payload, bytes):
            continue
        content = re.split(rb"\r?\n\r?\n", payload.lstrip(), maxsplit=1)
        responses[int(number[1])] = PartResponse(int(status[1]), content[1].strip() if len(content) > 1 else b"")
    return responses


def object_target(bucket: str, name: str) -> str:
    """Return the quoted path of an object in the JSON API.

    Args:
        bucket: Name of the bucket.
        name: Name of the object.
    """
    return f"b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
