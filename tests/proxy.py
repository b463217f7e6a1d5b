"""A reverse proxy for a storage server that logs every request and injects faults on the wire.

Clients use its ``url`` as their endpoint. The Host header is forwarded unchanged, so signatures stay valid. Requests
are numbered from 1 in the order in which they arrive completely. A run without faults shows in its ``log`` how many
requests there are, and one run per number and fault then covers everything that can happen to a request or response in
transit.
"""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Literal
from urllib.parse import urlsplit

Action = Literal["drop_request", "drop_response", "hold_request", "delay_response", "cut_head", "cut_body", "respond"]

_LOGGED_HEADERS = frozenset(
    {"content-length", "expect", "host", "if-match", "if-none-match", "range", "transfer-encoding", "x-amz-target"}
)
_HOP_BY_HOP = frozenset({"connection", "expect", "keep-alive", "proxy-connection", "transfer-encoding"})
_SERVER_TIMEOUT_S = 60


class ServerFailedError(Exception):
    """The server behind the proxy sent no complete response. This is not a planned fault, so the test fails."""


@dataclass(frozen=True)
class CannedResponse:
    """A response of the proxy itself: an S3 error document with a code, another document, or no body."""

    status: int
    code: str | None = None
    document: bytes | None = None

    def body(self) -> bytes:
        if self.document is not None:
            return self.document
        if self.code is None:
            return b""
        return (
            '<?xml version="1.0" encoding="UTF-8"?>'
            f"<Error><Code>{self.code}</Code><Message>injected</Message><RequestId>tx1</RequestId></Error>"
        ).encode()


@dataclass(frozen=True)
class WireFault:
    """A fault at the ``at``-th request among the requests of ``method`` whose target contains ``target_part``.

    ``times`` is the number of consecutive requests with the fault; None means all following requests.
    """

    action: Action
    at: int = 1
    method: str | None = None
    target_part: str = ""
    times: int | None = 1
    seconds: float = 0
    response: CannedResponse | None = None
    is_forwarded: bool = False

    def matches(self, exchange: Exchange) -> bool:
        return self.method in (None, exchange.method) and self.target_part in exchange.target

    def hits(self, n_matches: int) -> bool:
        return self.at <= n_matches and (self.times is None or n_matches < self.at + self.times)


def drop_request(at: int = 1, **where: Any) -> WireFault:
    """Close the connection when the request has arrived, and do not forward the request."""
    return WireFault("drop_request", at, **where)


def drop_response(at: int = 1, **where: Any) -> WireFault:
    """Forward the request, but close the connection without a response."""
    return WireFault("drop_response", at, **where)


def hold_request(at: int = 1, **where: Any) -> WireFault:
    """Hold the request until ``release()``, and only then forward it to the server."""
    return WireFault("hold_request", at, **where)


def delay_response(at: int = 1, *, seconds: float, **where: Any) -> WireFault:
    """Forward the request, and delay its response."""
    return WireFault("delay_response", at, seconds=seconds, **where)


def cut_head(at: int = 1, **where: Any) -> WireFault:
    """Forward the request, send half of the response head and close the connection."""
    return WireFault("cut_head", at, **where)


def cut_body(at: int = 1, **where: Any) -> WireFault:
    """Forward the request, send half of the response body and close the connection.

    A response without a body arrives completely, but the connection is still closed.
    """
    return WireFault("cut_body", at, **where)


def respond(
    at: int = 1, *, status: int, code: str | None = None, document: bytes | None = None, **where: Any
) -> WireFault:
    """Respond instead of the server. With ``is_forwarded``, the request is forwarded first."""
    return WireFault("respond", at, response=CannedResponse(status, code, document), **where)


@dataclass
class Exchange:
    """A request as it arrived, and its outcome.

    ``server_status`` is the status code of the server's response, or None if the request was not forwarded. ``status``
    and ``response_body_bytes`` describe the response to the client; ``status`` is None if no complete head was sent.
    ``arrived_s`` and ``responded_s`` are times of ``time.monotonic()``. ``responded_s`` is taken just before the
    response is sent, so a request that a client sends after it received the response always arrives later.
    """

    number: int
    method: str
    path: str
    query: str
    headers: Mapping[str, str]
    request_body_bytes: int
    fault: WireFault | None = None
    server_status: int | None = None
    status: int | None = None
    response_body_bytes: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    responded_s: float | None = None
    released: threading.Event = field(default_factory=threading.Event, repr=False)
    done: threading.Event = field(default_factory=threading.Event, repr=False)

    @property
    def target(self) -> str:
        return f"{self.path}?{self.query}" if self.query else self.path


@dataclass(frozen=True)
class _Response:
    """A serialized response. ``size_bytes`` is the size of the body without chunk framing."""

    status: int
    head: bytes
    body: bytes
    size_bytes: int


class FaultyProxy:
    """Context manager: ``with FaultyProxy(server_url) as proxy`` listens on a free port of the loopback interface.

    On exit, the proxy closes all connections, drops held requests and waits for its threads to end. An exception of the
    proxy itself is raised on exit, so that it fails the test.
    """

    def __init__(self, server_url: str, plan: Sequence[WireFault] = ()):
        parts = urlsplit(server_url)
        assert parts.scheme == "http"
        assert parts.hostname is not None
        self._server_address = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self.begin(*plan)
        self._listener = _Listener(self)
        self._thread = threading.Thread(target=self._listener.serve_forever, args=(0.01,), name="proxy")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._listener.server_address[1]}"

    @property
    def log(self) -> tuple[Exchange, ...]:
        """All requests since ``begin``, in the order of arrival."""
        with self._lock:
            return tuple(self._log)

    def begin(self, *plan: WireFault) -> None:
        """Reset the log, restart the numbering at 1, and set a new plan. Requests in flight keep their faults."""
        with self._lock:
            self._plan = plan
            self._log: list[Exchange] = []
            self._n_matches = [0] * len(plan)

    def held(self) -> tuple[Exchange, ...]:
        """Return the logged requests that wait for ``release()``."""
        return tuple(
            exchange
            for exchange in self.log
            if exchange.fault and exchange.fault.action == "hold_request" and not exchange.released.is_set()
        )

    def release(self) -> tuple[Exchange, ...]:
        """Forward all held requests to the server, wait for its responses, and return the requests."""
        held = self.held()
        for exchange in held:
            exchange.released.set()
        for exchange in held:
            assert exchange.done.wait(_SERVER_TIMEOUT_S)
        return held

    def __enter__(self) -> FaultyProxy:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        for exchange in self.held():
            exchange.released.set()
        self._listener.shutdown()
        self._listener.close_connections()
        self._listener.server_close()  # waits for the threads of all connections
        self._thread.join()
        if self._failures and error is None:
            raise self._failures[0]

    # Called by the threads of the connections

    def register(self, method: str, target: str, headers: Mapping[str, str], body_bytes: int) -> Exchange:
        path, _, query = target.partition("?")
        logged = {name.lower(): value for name, value in headers.items() if name.lower() in _LOGGED_HEADERS}
        with self._lock:
            exchange = Exchange(len(self._log) + 1, method, path, query, logged, body_bytes)
            for index, fault in enumerate(self._plan):
                if fault.matches(exchange):
                    self._n_matches[index] += 1
                    if exchange.fault is None and fault.hits(self._n_matches[index]):
                        exchange.fault = fault
            self._log.append(exchange)
        return exchange

    def pause(self, seconds: float) -> None:
        self._stopping.wait(seconds)

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self._failures.append(error)

    def forward(self, exchange: Exchange, headers: Sequence[tuple[str, str]], body: bytes) -> _Response:
        """Forward a request to the server on a separate connection, and return its response."""
        connection = http.client.HTTPConnection(*self._server_address, timeout=_SERVER_TIMEOUT_S)
        try:
            connection.putrequest(exchange.method, exchange.target, skip_host=True, skip_accept_encoding=True)
            is_chunked = "transfer-encoding" in exchange.headers
            for name, value in headers:
                if name.lower() not in _HOP_BY_HOP:
                    connection.putheader(name, value)
            if is_chunked:
                connection.putheader("Transfer-Encoding", "chunked")
            connection.endheaders(_chunked(body) if is_chunked else body or None)
            response = connection.getresponse()
            data = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailedError(
                f"the server behind the proxy failed at {exchange.method} {exchange.target}"
            ) from error
        finally:
            connection.close()
        exchange.server_status = response.status
        return _serialized(exchange.method, response.status, response.reason, response.getheaders(), data)


def _serialized(method: str, status: int, reason: str, headers: Sequence[tuple[str, str]], data: bytes) -> _Response:
    is_chunked = any(name.lower() == "transfer-encoding" for name, _ in headers)
    lines = [f"{name}: {value}" for name, value in headers if name.lower() not in _HOP_BY_HOP]
    if is_chunked:
        lines.append("Transfer-Encoding: chunked")
    elif not any(name.lower() == "content-length" for name, _ in headers) and status not in (204, 304):
        lines.append(f"Content-Length: {len(data)}")
    body = b"" if method == "HEAD" else _chunked(data) if is_chunked else data
    return _Response(status, _head(status, reason, lines), body, len(data))


def _canned(method: str, canned: CannedResponse) -> _Response:
    data = b"" if method == "HEAD" else canned.body()
    lines = ["Content-Type: application/xml", f"Content-Length: {len(data)}"]
    return _Response(canned.status, _head(canned.status, http.client.responses[canned.status], lines), data, len(data))


def _head(status: int, reason: str, lines: Sequence[str]) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status} {reason}", *lines, "", ""]).encode("latin-1")


def _chunked(data: bytes) -> bytes:
    return (b"%x\r\n%b\r\n" % (len(data), data) if data else b"") + b"0\r\n\r\n"


class _Listener(ThreadingHTTPServer):
    daemon_threads = False
    block_on_close = True
    request_queue_size = 128

    def __init__(self, proxy: FaultyProxy):
        self.proxy = proxy
        self._connections: set[socket.socket] = set()
        self._connections_lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Connection)

    def get_request(self) -> tuple[socket.socket, Any]:
        connection, address = super().get_request()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._connections_lock:
            self._connections.add(connection)
        return connection, address

    def shutdown_request(self, request: Any) -> None:
        with self._connections_lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def close_connections(self) -> None:
        """Close all connections, so that threads stop waiting for further requests."""
        with self._connections_lock:
            for connection in self._connections:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # the client already closed it

    def handle_error(self, request: Any, client_address: Any) -> None:
        raise AssertionError("connections report their errors themselves")


class _Connection(BaseHTTPRequestHandler):
    """One connection of a client, kept alive until either side closes it. The base class sends 100 Continue."""

    protocol_version = "HTTP/1.1"
    server: _Listener

    def handle(self) -> None:
        threading.current_thread().name = "proxy connection"
        try:
            super().handle()
        except ConnectionError:
            self.close_connection = True  # the client may disconnect
        except BaseException as error:  # noqa: BLE001 - raised where the test sees it
            self.server.proxy.fail(error)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing, because the proxy has its own log."""

    def _exchange(self) -> None:
        proxy = self.server.proxy
        body = self._read_body()
        if body is None:
            self.close_connection = True
            return
        exchange = proxy.register(self.command, self.path, dict(self.headers.items()), len(body))
        try:
            self._respond(proxy, exchange, body)
        finally:
            exchange.done.set()

    do_DELETE = do_GET = do_HEAD = do_POST = do_PUT = _exchange  # noqa: N815 - the names that http.server calls

    def _respond(self, proxy: FaultyProxy, exchange: Exchange, body: bytes) -> None:
        fault = exchange.fault
        action = fault.action if fault else None
        if action == "hold_request":
            while not (exchange.released.wait(0.1) or proxy.is_stopping):
                continue
        if action == "drop_request" or (action == "hold_request" and proxy.is_stopping):
            self.close_connection = True
            return
        if fault and fault.response and not fault.is_forwarded:
            response_to_send = _canned(self.command, fault.response)
        else:
            response_to_send = proxy.forward(exchange, self.headers.items(), body)
            if fault and fault.response:
                response_to_send = _canned(self.command, fault.response)
        if action == "drop_response":
            self.close_connection = True
            return
        if fault and action == "delay_response":
            proxy.pause(fault.seconds)
        self._send_response(exchange, response_to_send, action)

    def _send_response(self, exchange: Exchange, response_to_send: _Response, action: Action | None) -> None:
        head, body = response_to_send.head, response_to_send.body
        if action in ("cut_head", "cut_body"):
            self.close_connection = True
        if action == "cut_head":
            self.wfile.write(head[: len(head) // 2])
            return
        if action == "cut_body":
            body = body[: len(body) // 2]
        exchange.status, exchange.response_body_bytes = response_to_send.status, response_to_send.size_bytes
        exchange.responded_s = time.monotonic()
        self.wfile.write(head + body)

    def _read_body(self) -> bytes | None:
        """Return the request body, or None if the client disconnected before its end."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            return self._read_chunks()
        size = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(size)
        return body if len(body) == size else None

    def _read_chunks(self) -> bytes | None:
        parts: list[bytes] = []
        while True:
            size_line = self.rfile.readline()
            if not size_line.endswith(b"\n"):
                return None
            size = int(size_line.split(b";")[0], 16)
            part = self.rfile.read(size + 2)
            if len(part) < size + 2:
                return None
            if size == 0:
                return b"".join(parts)
            parts.append(part[:-2])
