"""The gcsfs client of a storage: one per process, one request per call, everything bounded in time.

gcsfs knows the addresses of the service and gives the token of each request. Its own calls are not used: they repeat
requests, and lose status and headers of the answers.
"""

from __future__ import annotations

import asyncio
import io
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import aiohttp
import gcsfs
from gcsfs.core import GCSFileSystem
from gcsfs.credentials import LOCAL_REFRESH_BUFFER

from trinitylake_ops.storage.fork import at_fork, keep_for_ever
from trinitylake_ops.storage.gcs.credentials import given_credentials
from trinitylake_ops.storage.gcs.failures import AUTH_ERRORS, CredentialsError
from trinitylake_ops.storage.gcs.settings import ANONYMOUS, GcsSettings
from trinitylake_ops.storage.remote.loop import close_on_loop, run_on_loop
from trinitylake_ops.storage.remote.settings import MAX_CONNECTIONS, longest_seconds

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
    async def answer(self, call: Call) -> AsyncIterator[aiohttp.ClientResponse]:
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

    def forget(self) -> None:
        """Start anew in a forked child. The client is its parent's, and the thread that held the lock is gone."""
        self._lock = threading.Lock()
        for opened in self._opened:
            keep_for_ever(opened)
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
    return given_credentials(credentials, _SCOPE)


def _close(opened: list[Opened]) -> None:
    session = opened[0].session if opened else None
    if session is not None:
        close_on_loop(session.close)
