"""The client of Google Cloud Storage: credentials, multipart uploads, and its exceptions as errors of a storage.

gcsfs knows the addresses of the service and gives the token of each request. Its own calls are not used: they repeat
requests, and lose status and headers of the answers.
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
from trinitylake_ops.storage.http.settings import MAX_CONNECTIONS, longest_seconds


def scoped_credentials(credentials: str | Mapping[str, Any], scope: str) -> Any:
    """Return the credentials of a file, or of a text, whose tokens have a scope. Raises ``AUTH_ERRORS``."""
    if isinstance(credentials, str):
        with open(credentials, encoding="utf-8") as file:
            credentials = json.load(file)
    information = dict(check_kind(credentials))
    if information["type"] == "service_account":
        return service_account.Credentials.from_service_account_info(information, scopes=[scope])  # type: ignore[no-untyped-call]
    return user_credentials.Credentials.from_authorized_user_info(information, scopes=[scope])  # type: ignore[no-untyped-call]


class CredentialsError(Exception):
    """Credentials could not be loaded, or gave no token. Nothing was sent to the storage."""


#: What loading credentials and asking for a token may end with.
AUTH_ERRORS = (GoogleAuthError, HttpError, NonRetryableError, OSError, ValueError, KeyError, TypeError)
#: Every exception that a request may end with.
CLIENT_ERRORS = (CredentialsError, aiohttp.ClientError, OSError)  # TimeoutError is an OSError


def typed_error(request: StorageRequest, error: BaseException, endpoint: str) -> StorageError:
    """Return the typed error for the end of a request, one of ``CLIENT_ERRORS``."""
    if isinstance(error, CredentialsError):
        causes = list(_causes(error))
        auth_error = next((cause for cause in causes if isinstance(cause, GoogleAuthError)), error.__cause__)
        is_passing = any(
            isinstance(cause, (TransportError, TimeoutError)) or getattr(cause, "retryable", False) for cause in causes
        )
        return error_without_credentials(request, _reason_for_no_token(auth_error), is_passing=is_passing)
    failure, reason = aiohttp_failure(error)
    return error_from_transport(request, failure, endpoint, reason)


def _reason_for_no_token(cause: BaseException | None) -> str:
    """Return the first text of google-auth's exception. Errors of other kinds may quote a file: only their name."""
    if isinstance(cause, GoogleAuthError) and cause.args:
        return str(cause.args[0]).splitlines()[0] if str(cause.args[0]) else type(cause).__name__
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return type(cause).__name__


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Return the causes of an exception. gcsfs wraps those of google-auth."""
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
    """One request: ``target`` is the path of the URL, quoted; ``parameters`` are its query."""

    method: str
    target: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""


class Opened:
    """What a process holds open for a storage: gcsfs, and the session with its connections."""

    def __init__(self, settings: GcsSettings):
        self.file_system = GCSFileSystem(
            project="",
            access=_ACCESS,
            token=_token(settings.credentials),
            endpoint_url=settings.endpoint,
            requester_pays=settings.project or False,
            asynchronous=True,  # otherwise gcsfs closes itself in a way that fails in a forked child
            use_listings_cache=False,
            skip_instance_cache=True,
        )
        self.session: aiohttp.ClientSession | None = None

    def session_on_loop(self, settings: GcsSettings) -> aiohttp.ClientSession:
        """Return the session, made at the first request. It is called on the event loop only."""
        if self.session is None:
            self.session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS),
                timeout=aiohttp.ClientTimeout(
                    total=None,
                    sock_connect=settings.connect_timeout_seconds,
                    sock_read=settings.read_timeout_seconds,
                ),
            )
            # aiohttp repeats a PUT or DELETE whose connection broke before the answer, without a word. There is no
            # public switch for it. A test on the wire watches that this one keeps working.
            self.session._retry_connection = False
        return self.session


class GcsClient:
    """Requests to the service from any thread of any process.

    The client and its event loop do not survive a fork, so a forked child gets a client of its own at its first
    request. The client closes when this object is dropped.
    """

    def __init__(self, settings: GcsSettings):
        self._settings = settings
        self._lock = threading.Lock()
        self._opened: list[Opened] = []  # the client of this process, once it is needed
        weakref.finalize(self, _close, self._opened)
        at_fork(self)

    def run(self, request: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run a request on the client's event loop and wait for it. Raises ``CLIENT_ERRORS``."""
        self._open()  # credentials are loaded in the caller's thread, as that may wait
        return run_on_loop(request())

    async def authorize(self) -> None:
        """Get a new token where the old one is about to expire. A thread does that, as it waits for a server."""
        credentials = self._open().file_system.credentials
        if credentials.credentials is None or credentials._credentials_valid(LOCAL_REFRESH_BUFFER):
            return
        try:
            async with self.time_limit():
                await asyncio.to_thread(credentials.maybe_refresh)
        except AUTH_ERRORS as error:
            raise CredentialsError("the credentials give no token") from error

    @asynccontextmanager
    async def send(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request once, to the one place it is meant for, and give the answer, whose body is still to come."""
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
        # Not by gcsfs, which may ask for a token once more, and wait for it on the event loop.
        headers = {"Accept-Encoding": "identity", "User-Agent": _USER_AGENT, **call.headers}
        if file_system.credentials.credentials is not None:
            file_system.credentials.credentials.apply(headers)
        return headers

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
            leak(opened)
        self._opened.clear()

    def _open(self) -> Opened:
        with self._lock:
            if not self._opened:
                try:
                    self._opened.append(Opened(self._settings))
                except AUTH_ERRORS as error:
                    raise CredentialsError("credentials cannot be loaded") from error
            return self._opened[0]


def _token(credentials: str | Mapping[str, Any] | None) -> Any:
    """Return what gcsfs takes as token. Without an option these are the application default credentials."""
    if credentials is None:
        return "google_default"
    if credentials == ANONYMOUS:
        return "anon"
    return scoped_credentials(credentials, _SCOPE)


def _close(opened: list[Opened]) -> None:
    session = opened[0].session if opened else None
    if session is not None:
        close_on_loop(session.close)


_NUMBER = re.compile(r"\+([0-9]{1,9})>\s*$")
_STATUS = re.compile(rb"HTTP/[0-9.]+ (\d{3})")
#: Anybody may read an object that is public from caches for an hour, unless it says so. A storage shows the newest.
_CACHE_CONTROL = "no-store"


class Body(NamedTuple):
    """The body of a request and its content type."""

    data: bytes
    content_type: str


class PartResponse(NamedTuple):
    """The answer to one call of a batch."""

    status: int
    body: bytes


def upload_body(name: str, data: bytes) -> Body:
    """Return the body that creates or replaces an object: its metadata, then its bytes as they are now.

    The boundary is random, so no content can end its own part.
    """
    boundary = secrets.token_hex(16)
    metadata = json.dumps({"name": name, "cacheControl": _CACHE_CONTROL})
    head = (
        f"--{boundary}\r\nContent-Type: application/json; charset=UTF-8\r\n\r\n{metadata}\r\n"
        f"--{boundary}\r\nContent-Type: application/octet-stream\r\n\r\n"
    )
    whole = b"".join((head.encode(), data, f"\r\n--{boundary}--\r\n".encode()))
    return Body(whole, f"multipart/related; boundary={boundary}")


def batch_of_deletes(targets: Sequence[str]) -> Body:
    """Return the body of a batch that deletes what the targets, paths of URLs, name."""
    boundary = secrets.token_hex(16)
    parts = [
        f"--{boundary}\r\nContent-Type: application/http\r\nContent-Transfer-Encoding: binary\r\n"
        f"Content-ID: <{boundary}+{number}>\r\n\r\nDELETE {target} HTTP/1.1\r\nContent-Length: 0\r\n\r\n\r\n"
        for number, target in enumerate(targets)
    ]
    return Body("".join([*parts, f"--{boundary}--\r\n"]).encode(), f"multipart/mixed; boundary={boundary}")


def batch_responses(content_type: str, body: bytes) -> dict[int, PartResponse]:
    """Return the answers of a batch by the numbers of its calls. An answer that cannot be read is not among them."""
    parser = email.parser.BytesParser(policy=email.policy.HTTP)
    message = parser.parsebytes(b"Content-Type: %b\r\n\r\n%b" % (content_type.encode("latin-1", "replace"), body))
    found: dict[int, PartResponse] = {}
    for part in message.iter_parts() if message.is_multipart() else ():
        number = _NUMBER.search(str(part.get("Content-ID", "")))
        payload = part.get_payload(decode=True)
        status = _STATUS.match(payload.lstrip()) if isinstance(payload, bytes) else None
        if number is None or status is None or not isinstance(payload, bytes):
            continue
        content = re.split(rb"\r?\n\r?\n", payload.lstrip(), maxsplit=1)
        found[int(number[1])] = PartResponse(int(status[1]), content[1].strip() if len(content) > 1 else b"")
    return found


def object_target(bucket: str, name: str) -> str:
    """Return what stands after ``b/`` and ``o/`` in the URL of an object: nothing in it means something to a server."""
    return f"b/{quote(bucket, safe='')}/o/{quote(name, safe='')}"
