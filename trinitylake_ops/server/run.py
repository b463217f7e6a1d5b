"""Run a server until it is stopped by a signal."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import ssl
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, ClassVar

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.server.app import Application
from trinitylake_ops.server.settings import Limits, ServerSettings

logger = logging.getLogger(__name__)

_BACKLOG = 2_048
#: The interval of thread switches. By default, a request waits up to 5 ms for the interpreter for each busy thread.
_SWITCH_SECONDS = 0.0005
#: Additional listening sockets. For each listening socket, uvloop accepts only one connection before it serves all
#: connections with pending data, so new clients would wait behind many active connections.
_MORE_LISTENERS = 15
_MAX_FILES = 65_536
#: For TLS 1.2, only cipher suites with forward secrecy and authenticated encryption. All suites of TLS 1.3 are allowed.
_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
_MAX_HEADER_BYTES = 64 << 10
#: The number of open files that are reserved for the storage, regardless of the number of connected clients.
FILES_FOR_STORAGE = 512
#: A body may arrive in ``_FREE_CHUNKS`` chunks of any size, plus one chunk for every ``_BYTES_PER_CHUNK`` bytes.
_FREE_CHUNKS, _BYTES_PER_CHUNK = 128, 256


class TooManyChunksError(Exception):
    """The chunks of a body are too small, which is expensive because h11 parses each chunk on the event loop."""


class ChunkLimitedParser(h11.Connection):
    """An HTTP/1.1 parser that limits the number of chunks in a body in proportion to the body's size."""

    _n_chunks = _n_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return the next event, like h11. Raises TooManyChunksError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._n_chunks = self._n_bytes = 0
        elif isinstance(event, h11.Data):
            self._n_chunks += event.chunk_start
            self._n_bytes += len(event.data)
            if self._n_chunks > _FREE_CHUNKS + self._n_bytes // _BYTES_PER_CHUNK:
                raise TooManyChunksError
        return event


class LimitedConnection(H11Protocol):
    """A connection with limits for slow clients, which send heads or bodies slowly, or do not read responses.

    uvicorn itself only limits the time between requests.
    """

    limits = Limits()
    max_connections = _MAX_FILES
    #: The connections with a response that the client has not read completely, oldest first. Shared by a server.
    unread: ClassVar[dict[LimitedConnection, None]] = {}
    _head_timer: asyncio.TimerHandle | None = None
    _is_new = True
    _is_stopping = False
    _n_responses = 0

    def __init__(self, config: uvicorn.Config, *arguments: Any, **named: Any):
        super().__init__(config, *arguments, **named)
        self.conn = ChunkLimitedParser(h11.SERVER, _MAX_HEADER_BYTES)

    def handle_events(self) -> None:
        """Handle received data. A body in too many chunks ends the connection."""
        try:
            super().handle_events()
        except TooManyChunksError:
            self.transport.abort()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Wait for the head of a request, or close the connection if there are too many."""
        super().connection_made(transport)
        # asyncio's own loop sets this option only for some sockets. Without it, the second part of a response is
        # delayed by 40 ms.
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.max_connections:
            transport.abort()
        else:
            self._wait_for_head(self.limits.idle_seconds)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel all timers."""
        self._head_received()
        self.unread.pop(self, None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received data. Between requests, it is the head of the next request or the rest of an unused body."""
        is_first, self._is_new = self._is_new, False
        super().data_received(data)
        if not getattr(self.cycle, "response_complete", True):
            self._head_received()
        elif self._head_timer is None or is_first:
            self._wait_for_head(self.limits.head_seconds)

    def on_response_complete(self) -> None:
        """Limit the time that the client may take to read the rest of the response."""
        self._n_responses += 1
        is_cut_short: bool = self.cycle.more_body  # the response was sent before the whole body arrived
        super().on_response_complete()
        if is_cut_short and self._head_timer is None:
            self._wait_for_head(self.limits.head_seconds)
        if self.transport.get_write_buffer_size():
            seconds = self.limits.stop_seconds if self._is_stopping else self.limits.seconds
            self.loop.call_later(seconds, self._end_if_unread, self._n_responses)
            self._bound_unread()

    def _bound_unread(self) -> None:
        """Close the connections with the oldest unread responses, until the remaining ones are within the limit."""
        self.unread.pop(self, None)
        self.unread[self] = None
        sizes = {connection: connection.transport.get_write_buffer_size() for connection in self.unread}
        rest_bytes = sum(sizes.values())
        for connection, size_bytes in sizes.items():
            is_beyond = rest_bytes > self.limits.unread_bytes and connection is not self
            if is_beyond and size_bytes:
                connection.transport.abort()
                rest_bytes -= size_bytes
            if is_beyond or not size_bytes:
                del self.unread[connection]

    def shutdown(self) -> None:
        """Finish requests in progress, but do not allow clients to delay the shutdown by sending or reading slowly."""
        self._is_stopping = True
        super().shutdown()
        self.loop.call_later(self.limits.stop_seconds, self._end_if_slow)

    def _end_if_slow(self) -> None:
        if self.transport.get_write_buffer_size() or getattr(self.cycle, "more_body", False):
            self.transport.abort()

    def _wait_for_head(self, seconds: float) -> None:
        self._head_received()
        self._head_timer = self.loop.call_later(seconds, self.transport.abort)

    def _head_received(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _end_if_unread(self, response: int) -> None:
        if self._n_responses == response and self.transport.get_write_buffer_size():
            self.transport.abort()


def serve(settings: ServerSettings) -> None:
    """Serve lakehouses until SIGTERM or SIGINT. Requests in progress are completed before it returns.

    Raises InvalidInputError if the address or the certificate is not usable, and the errors of :class:`Application`.
    """
    settings.check()
    _check_certificate(settings)
    _allow_many_connections()
    with contextlib.closing(_listen(settings.host, settings.port)) as listener:
        application = Application(settings)
        server = uvicorn.Server(configuration_of(application, settings))
        scheme = "http" if settings.tls_certificate is None else "https"
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        logger.info(
            "serving",
            extra={
                "fields": {
                    "address": f"{scheme}://{host}:{listener.getsockname()[1]}",
                    "lakehouses": {served.name or "main": served.lake.root for served in application.warehouses.served},
                    "authentication": _authentication(settings),
                }
            },
        )
        # Exclude existing objects from garbage collection, because scanning them repeatedly would stall all requests.
        gc.collect()
        gc.freeze()
        sys.setswitchinterval(_SWITCH_SECONDS)
        try:
            with _stopped_by_signals(server):
                server.run(sockets=[listener, *(listener.dup() for _ in range(_MORE_LISTENERS))])
        finally:
            application.stop()
        logger.info("stopped")


def _authentication(settings: ServerSettings) -> str:
    kinds = [name for name, path in (("tokens", settings.tokens), ("issuers", settings.issuers)) if path is not None]
    return " and ".join(kinds) or "none"


def _allow_many_connections() -> None:
    """Raise the limit on open files, because each connection needs an open file and the default is often 1,024."""
    try:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = _MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, _MAX_FILES)
        if soft != resource.RLIM_INFINITY and soft < limit:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    except (OSError, ValueError) as error:
        logger.warning("cannot raise the limit on open files: %s", error)


def _check_certificate(settings: ServerSettings) -> None:
    if settings.tls_certificate is None:
        return
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.tls_certificate, settings.tls_key)
    except (OSError, ValueError) as error:  # includes ssl.SSLError
        raise InvalidInputError(
            f"cannot use TLS certificate {str(settings.tls_certificate)!r} with key {str(settings.tls_key)!r}:"
            f" {error}; provide readable PEM files that belong together"
        ) from error


@contextlib.contextmanager
def _stopped_by_signals(server: uvicorn.Server) -> Iterator[None]:
    """Make signals only stop the server. uvicorn raises the signals again afterwards, which would end the process."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(f"cannot listen on {host[:64]} port {port}: {reason}") from error


def configuration_of(application: Application, settings: ServerSettings) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application.

    Args:
        application: The application.
        settings: The settings of the server.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_files = _MAX_FILES if soft == resource.RLIM_INFINITY else max(soft - FILES_FOR_STORAGE, soft // 2)
    bounds = {"limits": settings.limits, "max_connections": max_files, "unread": {}}
    return uvicorn.Config(
        application,
        http=type("Connection", (LimitedConnection,), bounds),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=round(settings.limits.idle_seconds),
        h11_max_incomplete_event_size=_MAX_HEADER_BYTES,
        ssl_certfile=None if settings.tls_certificate is None else str(settings.tls_certificate),
        ssl_keyfile=None if settings.tls_key is None else str(settings.tls_key),
        ssl_ciphers=_CIPHERS,
    )
