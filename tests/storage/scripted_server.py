"""An HTTP server that returns scripted responses and records all requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class Answer:
    """A response. ``announced_bytes`` is the size in a wrong Content-Length, ``trickle_seconds`` a delay per byte."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    announced_bytes: int | None = None
    trickle_seconds: float = 0.0


class Drop:
    """Close the connection without a response."""


class Silence:
    """Keep the connection open without a response."""


def s3_error(status: int, code: str, message: str = "as the test says") -> Answer:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return Answer(status, body.encode(), {"Content-Type": "application/xml"})


class ScriptedServer:
    def __init__(self, script: Callable[[int, Seen], Answer | Drop | Silence]):
        self.requests: list[Seen] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self._script = script
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_one_request(self) -> None:
                try:
                    super().handle_one_request()
                except (ConnectionError, TimeoutError):
                    self.close_connection = True

            def handle_expect_100(self) -> bool:
                """Wait for the body without a response, like servers and proxies that do not support ``Expect``."""
                return True

            def answer(self) -> None:
                scripted.answer(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = answer  # noqa: N815 - as http.server wants them

            def log_message(self, format: str, *arguments: Any) -> None:
                """Log nothing."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        n_bytes = int(handler.headers.get("Content-Length") or 0)
        seen = Seen(handler.command, handler.path, dict(handler.headers.items()), handler.rfile.read(n_bytes))
        with self._lock:
            self.requests.append(seen)
            number = len(self.requests) - 1
        answer = self._script(number, seen)
        if isinstance(answer, Silence):
            self.closing.wait(30)
        if isinstance(answer, Drop | Silence):
            handler.close_connection = True
            return
        self._send(handler, answer)

    def _send(self, handler: BaseHTTPRequestHandler, answer: Answer) -> None:
        handler.send_response_only(answer.status)
        headers = {"Date": handler.date_time_string(), **answer.headers}
        n_bytes = len(answer.body) if answer.announced_bytes is None else answer.announced_bytes
        length = {} if "Transfer-Encoding" in headers else {"Content-Length": str(n_bytes)}
        for name, value in {**length, **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        pieces = [answer.body] if not answer.trickle_seconds else [bytes([byte]) for byte in answer.body]
        for piece in pieces:
            handler.wfile.write(piece)
            if answer.trickle_seconds and self.closing.wait(answer.trickle_seconds):
                break
        if answer.announced_bytes is not None:
            handler.close_connection = True

    @contextmanager
    def running(self) -> Iterator[ScriptedServer]:
        thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield self
        finally:
            self.closing.set()
            self._http.shutdown()
            self._http.server_close()
            thread.join()


def http_date(seconds: float) -> str:
    return time.strftime("%a, %d %b %Y %H:%M:%S GMT", time.gmtime(seconds))
