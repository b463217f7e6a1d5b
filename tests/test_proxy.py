"""Tests of the fault-injecting proxy, on which the tests of faults on the wire rely."""

from __future__ import annotations

import http.client
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

import boto3
import pytest
from botocore.config import Config
from botocore.exceptions import ClientError, ConnectionClosedError

from tests import proxy as wire
from tests.proxy import FaultyProxy, WireFault
from tests.servers.s3_server import S3Server

BODY = bytes(range(256)) * 40


class _Files(BaseHTTPRequestHandler):
    """A server that stores bodies by target and records the headers of PUT requests."""

    protocol_version = "HTTP/1.1"
    server: Any

    def date_time_string(self, timestamp: float | None = None) -> str:
        """Return the same time for every response, so that responses can be compared."""
        return "Sat, 21 Nov 2026 12:00:00 GMT"

    def do_PUT(self) -> None:
        if self.headers.get("Transfer-Encoding"):
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size + 2)[:-2]
            self.rfile.readline()
        else:
            body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.files[self.path] = body
        self.server.headers.append(dict(self.headers))
        self._respond(200, b"")

    def do_GET(self) -> None:
        body = self.server.files.get(self.path)
        if self.path.startswith("/chunked"):
            self.send_response(200)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(b"5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n")
        else:
            self._respond(404 if body is None else 200, body or b"missing")

    do_HEAD = do_GET  # noqa: N815

    def do_DELETE(self) -> None:
        self.server.files.pop(self.path, None)
        self.send_response(204)
        self.end_headers()

    def _respond(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


@pytest.fixture
def server() -> Iterator[Any]:
    listener: Any = ThreadingHTTPServer(("127.0.0.1", 0), _Files)
    listener.daemon_threads = False
    listener.files, listener.headers = {}, []
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    yield listener
    listener.shutdown()
    listener.server_close()
    thread.join()


@pytest.fixture
def proxy(server: Any) -> Iterator[FaultyProxy]:
    with FaultyProxy(f"http://127.0.0.1:{server.server_address[1]}") as running:
        yield running
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("proxy")] == []


@pytest.fixture
def connection(proxy: FaultyProxy) -> Iterator[http.client.HTTPConnection]:
    parts = urlsplit(proxy.url)
    client = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
    yield client
    client.close()


def send(
    connection: http.client.HTTPConnection,
    method: str,
    target: str,
    body: bytes | None = None,
    **headers: str,
) -> tuple[int, bytes]:
    connection.request(method, target, body, {name.replace("_", "-"): value for name, value in headers.items()})
    response = connection.getresponse()
    return response.status, response.read()


def test_requests_pass_unchanged_on_one_connection_and_are_logged(
    proxy: FaultyProxy, server: Any, connection: http.client.HTTPConnection
) -> None:
    assert send(connection, "PUT", "/b/k%20%C3%A9", BODY, If_None_Match="*") == (200, b"")
    sock = connection.sock
    assert send(connection, "GET", "/b/k%20%C3%A9") == (200, BODY)
    assert send(connection, "HEAD", "/b/k%20%C3%A9") == (200, b"")
    assert send(connection, "GET", "/b?list-type=2&prefix=a%2Fb") == (404, b"missing")
    assert send(connection, "DELETE", "/b/k%20%C3%A9") == (204, b"")
    assert send(connection, "GET", "/chunked") == (200, b"hello world")
    assert connection.sock is sock, "kept alive"
    assert server.headers[0]["Host"] == urlsplit(proxy.url).netloc
    assert [(e.number, e.method, e.path, e.query, e.status, e.server_status) for e in proxy.log] == [
        (1, "PUT", "/b/k%20%C3%A9", "", 200, 200),
        (2, "GET", "/b/k%20%C3%A9", "", 200, 200),
        (3, "HEAD", "/b/k%20%C3%A9", "", 200, 200),
        (4, "GET", "/b", "list-type=2&prefix=a%2Fb", 404, 404),
        (5, "DELETE", "/b/k%20%C3%A9", "", 204, 204),
        (6, "GET", "/chunked", "", 200, 200),
    ]
    assert proxy.log[0].headers["if-none-match"] == "*"
    assert "if-none-match" not in proxy.log[1].headers
    assert (proxy.log[0].request_body_bytes, proxy.log[1].response_body_bytes) == (len(BODY), len(BODY))
    proxy.begin()
    send(connection, "GET", "/x")
    assert [exchange.number for exchange in proxy.log] == [1]


def test_expect_and_chunked_requests(proxy: FaultyProxy, server: Any) -> None:
    parts = urlsplit(proxy.url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as client:
        client.sendall(b"PUT /a HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\nExpect: 100-continue\r\n\r\n")
        assert client.recv(1000) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(b"abc")
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
        client.sendall(
            b"PUT /b HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
        )
        assert client.recv(1000).startswith(b"HTTP/1.1 200 OK\r\n")
        client.sendall(b"PUT /c HTTP/1.1\r\nHost: h\r\nContent-Length: 30\r\n\r\nabc")
    assert server.files == {"/a": b"abc", "/b": b"abcde"}
    assert [headers["Host"] for headers in server.headers] == ["h", "h"]


def test_connections_are_served_concurrently(proxy: FaultyProxy, server: Any) -> None:
    server.files["/a"] = BODY
    proxy.begin(wire.hold_request(1))
    parts = urlsplit(proxy.url)

    def get(_: int) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
        try:
            return send(connection, "GET", "/a")
        finally:
            connection.close()

    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(get, number) for number in range(8)]
        deadline = time.monotonic() + 10
        while sum(future.done() for future in futures) < 7:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        assert [exchange.server_status for exchange in proxy.held()] == [None]
        assert [exchange.server_status for exchange in proxy.release()] == [200]
        assert {future.result() for future in futures} == {(200, BODY)}
    assert proxy.held() == ()


@pytest.mark.parametrize(
    ("fault", "takes_effect", "error"),
    [
        (wire.drop_request(2), False, http.client.RemoteDisconnected),
        (wire.drop_response(2), True, http.client.RemoteDisconnected),
        (wire.drop_response(1, method="PUT", target_part="x?y"), True, http.client.RemoteDisconnected),
        (wire.hold_request(2), False, TimeoutError),
        (wire.delay_response(2, seconds=30), True, TimeoutError),
        (wire.cut_head(2), True, None),
        (wire.cut_body(2), True, None),
    ],
)
def test_faults_are_injected_as_planned(
    proxy: FaultyProxy,
    server: Any,
    connection: http.client.HTTPConnection,
    fault: WireFault,
    takes_effect: bool,
    error: type[Exception] | None,
) -> None:
    proxy.begin(fault)
    connection.timeout = 0.3
    assert send(connection, "GET", "/x?y")[0] == 404
    if error:
        with pytest.raises(error):
            send(connection, "PUT", "/x?y", b"1")
    else:
        send(connection, "PUT", "/x?y", b"1")
    assert server.files == ({"/x?y": b"1"} if takes_effect else {})
    assert proxy.log[1].fault is fault
    connection.close()
    assert send(connection, "GET", "/x?y")[0] == (200 if takes_effect else 404)
    assert len(proxy.log) == 3, "no request was sent twice"


def test_held_request_is_forwarded_after_its_client_disconnected(
    proxy: FaultyProxy, server: Any, connection: http.client.HTTPConnection
) -> None:
    proxy.begin(wire.hold_request())
    connection.timeout = 0.1
    with pytest.raises(TimeoutError):
        send(connection, "PUT", "/x", b"1")
    connection.close()
    assert send(connection, "GET", "/x")[0] == 404
    assert [exchange.server_status for exchange in proxy.release()] == [200]
    assert send(connection, "GET", "/x") == (200, b"1")


def test_held_requests_are_dropped_at_the_end(server: Any) -> None:
    with FaultyProxy(f"http://127.0.0.1:{server.server_address[1]}", [wire.hold_request()]) as proxy:
        parts = urlsplit(proxy.url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=0.1)
        with pytest.raises(TimeoutError):
            send(connection, "PUT", "/x", b"1")
    connection.close()
    assert server.files == {}


@pytest.mark.parametrize("path", ["/x", "/chunked"])
def test_truncated_responses_close_the_connection(proxy: FaultyProxy, server: Any, path: str) -> None:
    server.files["/x"] = b"hello world"
    proxy.begin(wire.cut_body(1), wire.cut_head(2))
    parts = urlsplit(proxy.url)
    responses = []
    for _ in range(3):
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10) as client:
            client.sendall(f"GET {path} HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n".encode())
            received = b""
            while chunk := client.recv(10_000):
                received += chunk
            responses.append(received)
    head, _, body = responses[2].partition(b"\r\n\r\n")
    assert responses[0] == head + b"\r\n\r\n" + body[: len(body) // 2]
    assert responses[1] == (head + b"\r\n\r\n")[: len(head + b"\r\n\r\n") // 2]
    assert b"hello" in body


@pytest.mark.parametrize("is_forwarded", [False, True])
@pytest.mark.parametrize("code", ["SlowDown", None])
def test_replaced_responses_are_sent(
    proxy: FaultyProxy, server: Any, connection: http.client.HTTPConnection, code: str | None, is_forwarded: bool
) -> None:
    proxy.begin(wire.respond(1, status=503, code=code, is_forwarded=is_forwarded, times=2))
    status, body = send(connection, "PUT", "/x", b"1")
    assert status == 503
    assert (f"<Code>{code}</Code>".encode() in body) if code else body == b""
    sock = connection.sock
    assert send(connection, "HEAD", "/x") == (503, b"")
    assert send(connection, "GET", "/x")[0] == (200 if is_forwarded else 404)
    assert connection.sock is sock, "kept alive"
    assert [exchange.server_status for exchange in proxy.log[:2]] == ([200, 200] if is_forwarded else [None, None])


def test_fault_applies_to_all_following_requests(proxy: FaultyProxy, connection: http.client.HTTPConnection) -> None:
    proxy.begin(wire.respond(2, status=400, code="ExpiredToken", method="GET", times=None))
    statuses = [send(connection, method, "/x")[0] for method in ("GET", "HEAD", "GET", "HEAD", "GET", "GET")]
    assert statuses == [404, 404, 400, 404, 400, 400]


def test_error_of_the_proxy_fails_the_test() -> None:
    with socket.socket() as unused, pytest.raises(wire.ServerFailedError):
        unused.bind(("127.0.0.1", 0))
        with FaultyProxy(f"http://127.0.0.1:{unused.getsockname()[1]}") as proxy:
            parts = urlsplit(proxy.url)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=10)
            with pytest.raises(http.client.RemoteDisconnected):
                send(connection, "GET", "/x")
            connection.close()


@pytest.mark.debian_packages
def test_signatures_stay_valid(radosgw: S3Server) -> None:
    with FaultyProxy(radosgw.endpoint) as proxy:
        client = _client(radosgw, proxy.url, radosgw.secret_access_key)
        key = f"{radosgw.fresh_root().removeprefix(f's3://{radosgw.bucket}/')}a b/ü~%"
        client.put_object(Bucket=radosgw.bucket, Key=key, Body=BODY, IfNoneMatch="*")
        assert client.get_object(Bucket=radosgw.bucket, Key=key)["Body"].read() == BODY
        assert client.head_object(Bucket=radosgw.bucket, Key=key)["ContentLength"] == len(BODY)
        assert client.list_objects_v2(Bucket=radosgw.bucket, Prefix=key)["KeyCount"] == 1
        with pytest.raises(ClientError, match="PreconditionFailed"):
            client.put_object(Bucket=radosgw.bucket, Key=key, Body=b"", IfNoneMatch="*")
        assert client.delete_objects(Bucket=radosgw.bucket, Delete={"Objects": [{"Key": key}]})["Deleted"]
        # A server that supports sessions looks up keys there last and returns the less specific error.
        with pytest.raises(ClientError, match=r"SignatureDoesNotMatch|AccessDenied"):
            _client(radosgw, proxy.url, "wrong").get_object(Bucket=radosgw.bucket, Key=key)
        assert [exchange.status for exchange in proxy.log] == [200, 200, 200, 200, 412, 200, 403]
        proxy.begin(wire.drop_request())
        with pytest.raises(ConnectionClosedError):
            client.get_object(Bucket=radosgw.bucket, Key=key)


def _client(server: S3Server, endpoint: str, secret: str) -> Any:
    session = boto3.session.Session(server.access_key_id, secret, region_name=server.region)
    settings = Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1})
    return session.client("s3", endpoint_url=endpoint, config=settings)
