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
class RecordedRequest:
    """A request that the server received."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass(frozen=True)
class ScriptedResponse:
    """A response. ``content_length`` is a wrong value of Content-Length, ``byte_delay_s`` a delay per byte."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    content_length: int | None = None
    byte_delay_s: float = 0.0


class DropConnection:
    """Close the connection without a response."""


class NoResponse:
    """Keep the connection open without a response."""


def s3_error(status: int, code: str, message: str = "injected") -> ScriptedResponse:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return ScriptedResponse(status, body.encode(), {"Content-Type": "application/xml"})


class ScriptedServer:
    """Responds to each request with the result of a script, a function of the request's index and the request."""

    def __init__(self, script: Callable[[int, RecordedRequest], ScriptedResponse | DropConnection | NoResponse]):
        self.requests: list[RecordedRequest] = []
        self.closing = threading.Event()
        self._lock = threading.Lock()
        self.script = script
        scripted_server = self

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

            def respond(self) -> None:
                scripted_server.respond(self)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = respond  # noqa: N815 - names required by http.server

            def log_message(self, format: str, *arguments: Any) -> None:
                """Do not log requests."""

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._http.server_address[1]}"

    def respond(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        request = RecordedRequest(handler.command, handler.path, dict(handler.headers.items()), body)
        with self._lock:
            self.requests.append(request)
            number = len(self.requests) - 1
        response = self.script(number, request)
        if isinstance(response, NoResponse):
            self.closing.wait(30)
        if isinstance(response, DropConnection | NoResponse):
            handler.close_connection = True
            return
        self._send(handler, response)

    def _send(self, handler: BaseHTTPRequestHandler, response: ScriptedResponse) -> None:
        handler.send_response_only(response.status)
        headers = {"Date": handler.date_time_string(), **response.headers}
        size_bytes = len(response.body) if response.content_length is None else response.content_length
        length_header = {} if "Transfer-Encoding" in headers else {"Content-Length": str(size_bytes)}
        for name, value in {**length_header, **headers}.items():
            handler.send_header(name, value)
        handler.end_headers()
        if handler.command == "HEAD":
            return
        chunks = [response.body] if not response.byte_delay_s else [bytes([byte]) for byte in response.body]
        for chunk in chunks:
            handler.wfile.write(chunk)
            if response.byte_delay_s and self.closing.wait(response.byte_delay_s):
                break
        if response.content_length is not None:
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
