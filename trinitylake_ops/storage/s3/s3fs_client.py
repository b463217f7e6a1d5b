"""The s3fs client of a storage: one per process, one request per call, everything bounded in time."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Coroutine
from contextlib import suppress
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from typing import Any, TypeVar

import aiohttp
import s3fs
from aiobotocore.httpsession import AIOHTTPSession
from aiobotocore.session import AioSession
from botocore.utils import parse_timestamp

from trinitylake_ops.storage.aws.settings import environment_of_clients
from trinitylake_ops.storage.fork import at_fork, keep_for_ever
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.remote.kept_clients import KeptClients
from trinitylake_ops.storage.remote.loop import close_on_loop, run_on_loop
from trinitylake_ops.storage.remote.settings import MAX_CONNECTIONS, longest_seconds
from trinitylake_ops.storage.s3.settings import S3Settings

T = TypeVar("T")


class _OneSend:
    """An aiohttp session that sends each request to the one place it is meant for."""

    def __init__(self, session: aiohttp.ClientSession):
        self._session = session

    def request(self, method: str, **arguments: Any) -> Any:
        return self._session.request(method, allow_redirects=False, **arguments)


class _OneSendSession(AIOHTTPSession):  # type: ignore[misc] # aiobotocore ships no types
    """aiobotocore's transport without aiohttp's own second sends.

    aiohttp repeats a PUT or DELETE whose connection broke before the answer, without a word. A repeated create would
    meet the file of its first send and report it as another writer's. So a lost answer must be raised here. There is no
    public switch for it in aiohttp. A test on the wire watches that this one keeps working.
    """

    async def _get_session(self, proxy_url: str | None) -> _OneSend:
        session: aiohttp.ClientSession = await super()._get_session(proxy_url)
        session._retry_connection = False
        return _OneSend(session)

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
        """Return the client of this process for these settings (docs/decisions/0080)."""
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

    def forget(self) -> None:
        """Start anew in a forked child. The client is its parent's, and the thread that held the lock is gone."""
        self._lock = threading.Lock()
        for opened in self._opened:
            keep_for_ever(opened)  # aiohttp complains about unclosed ones
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
        session.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_moment)
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
                "http_session_cls": _OneSendSession,
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


def _moment(text: str | float) -> datetime:
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


_kept: KeptClients[S3Client] = KeptClients()


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
