"""Clients that send slowly or do not read responses occupy no connection or memory indefinitely."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
import uvicorn
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField

from tests.server.live_server import LiveServer, serving, settings_for
from tests.server.request_bodies import TABLE
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.server.app import Application
from trinitylake_ops.server.run import LimitedConnection, configuration_of
from trinitylake_ops.server.settings import Limits, ServerSettings

HEAD = b"POST /v1/main/namespaces HTTP/1.1\r\nHost: 127.0.0.1\r\n"
LARGE_BYTES = 8_000_000
TIMEOUT_S = 60.0  # sufficient on a busy machine


def connect(server: LiveServer) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=TIMEOUT_S)
    connection.settimeout(TIMEOUT_S)
    return connection


def is_closed(client: socket.socket) -> bool:
    """Read everything that the server sent, and return whether it has closed the connection."""
    try:
        while client.recv(1 << 16):
            pass
    except ConnectionError:
        pass
    return True


def count_accepted(client: socket.socket, piece: Callable[[int], bytes]) -> int:
    """Send pieces until the server closes the connection, and return how many it accepted."""
    deadline_s, number = time.monotonic() + TIMEOUT_S, 0
    with contextlib.suppress(ConnectionError):
        while time.monotonic() < deadline_s:
            client.sendall(piece(number))
            number += 1
            time.sleep(0.02)
        pytest.fail("the slow client is still connected")
    return number


def create_large_table(lake: Lakehouse) -> None:
    """Create a table whose metadata is larger than the socket buffers for a client that does not read."""
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    numbers = range(1, 1 + LARGE_BYTES // 10_000)
    columns = [NestedField(number, f"c{number}", LongType(), required=False, doc="x" * 10_000) for number in numbers]
    catalog.create_table("ns.t", Schema(*columns))


@pytest.fixture
def limits() -> Limits:
    return Limits(head_seconds=0.3, idle_seconds=1.0, seconds=0.5, stop_seconds=0.3)


def test_incomplete_request_head_times_out(lake: Lakehouse, limits: Limits) -> None:
    with serving(settings_for(lake, limits=limits)) as server:
        with connect(server) as idle_client, connect(server) as slow_client, connect(server) as keep_alive_client:
            keep_alive_client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert keep_alive_client.recv(1 << 16).startswith(b"HTTP/1.1 200")
            assert count_accepted(slow_client, lambda n: HEAD if n == 0 else b"X-%d: a\r\n" % n) > 1
            assert count_accepted(keep_alive_client, lambda n: HEAD if n == 0 else b"X-%d: a\r\n" % n) > 1
            assert is_closed(idle_client)
        assert server.request("GET", "/v1/main/namespaces").status == 200


@pytest.mark.parametrize("target", [b"POST /v1/main/namespaces", b"GET /healthz"])
def test_request_with_two_body_lengths_closes_connection(lake: Lakehouse, target: bytes) -> None:
    """A proxy that uses the other length would send part of the body as the next client's request."""
    lengths = b"Host: 127.0.0.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    with serving(settings_for(lake)) as server, connect(server) as client:
        client.sendall(target + b" HTTP/1.1\r\n" + lengths + b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        response = b""
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 16):
                response += piece
    assert response.startswith(b"HTTP/1.1 400 ")
    assert response.count(b"HTTP/1.1 ") == 1


def test_slow_body_times_out(lake: Lakehouse, limits: Limits) -> None:
    """The client gets an error, and the connection is closed even if it continues to send."""
    with serving(settings_for(lake, limits=limits)) as server, connect(server) as client:
        client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n")
        count_accepted(client, lambda _: b" ")
        with connect(server) as another_client:
            another_client.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
            assert another_client.recv(1 << 16).startswith(b"HTTP/1.1 408")
            assert is_closed(another_client)
        assert server.request("GET", "/v1/main/namespaces").status == 200


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.parametrize("target", [b"/v1/main/namespaces", b"/unknown"])
def test_body_in_tiny_chunks_closes_connection(lake: Lakehouse, target: bytes) -> None:
    """The parser needs about 10 microseconds for each chunk, even after the response was sent."""
    head = b"POST %b HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n" % target
    limits = Limits(head_seconds=10 * TIMEOUT_S)
    with serving(settings_for(lake, limits=limits)) as server, connect(server) as client:
        with contextlib.suppress(ConnectionError):
            client.sendall(head + b"1\r\n \r\n" * 100_000)
        assert is_closed(client)


def test_bodies_in_chunks_of_common_sizes_are_accepted(lake: Lakehouse) -> None:
    head = b"POST /v1/main/namespaces HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    with serving(settings_for(lake)) as server:
        for number, padding in enumerate((b"1\r\n \r\n" * 100, b"400\r\n%b\r\n" % (b" " * 1024) * 4_000)):
            body = b'{"namespace": ["ns%d"]}' % number
            with connect(server) as client:
                client.sendall(head + padding + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
                assert client.recv(1 << 16).split(b" ", 2)[1] == b"200"


def test_total_size_of_bodies_is_bounded(lake: Lakehouse) -> None:
    """Each body is allowed, but all of them together would exhaust the memory."""
    limits = Limits(body_bytes=1 << 20, bodies_bytes=2 << 20)
    with serving(settings_for(lake, limits=limits)) as server, contextlib.ExitStack() as clients:
        application = server.application
        assert application is not None
        for _ in range(2):
            client = clients.enter_context(connect(server))
            client.sendall(HEAD + b"Content-Length: %d\r\n\r\n" % (1 << 20) + b" " * 900_000)
        wait_until(lambda: application.n_body_bytes == 2 * 900_000)
        response = server.request("POST", "/v1/main/namespaces", b" " * 900_000 + b'{"namespace": ["a"]}')
        assert response.error == (503, "ServiceUnavailableException")
        assert response.headers["retry-after"] == "1"
        assert application.n_body_bytes == 2 * 900_000
        clients.close()
        wait_until(lambda: application.n_body_bytes == 0)
        assert server.request("POST", "/v1/main/namespaces", {"namespace": ["a"]}).status == 200


def test_unread_response_closes_connection(lake: Lakehouse, limits: Limits) -> None:
    """The client receives only the part of the response that was in socket buffers."""
    create_large_table(lake)
    limits = replace(limits, seconds=2.0)
    with serving(settings_for(lake, limits=limits)) as server, connect(server) as client:
        client.sendall(f"GET {TABLE} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 3)
        assert server.request("GET", "/v1/main/namespaces").status == 200
        time.sleep(2 * limits.seconds)
        n_read = 0
        with contextlib.suppress(ConnectionError):
            while piece := client.recv(1 << 20):
                n_read += len(piece)
        assert n_read < 3 * LARGE_BYTES


def test_total_size_of_unread_responses_is_bounded(lake: Lakehouse) -> None:
    """Each response is allowed, but those of 40 clients took a gigabyte. The longest unread ones are closed."""
    create_large_table(lake)
    limits = Limits(unread_bytes=1 << 16)
    with serving(settings_for(lake, limits=limits)) as server, contextlib.ExitStack() as clients:
        readers = []
        for _ in range(3):
            reader = clients.enter_context(connect(server))
            reader.sendall(f"GET {TABLE} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
            assert reader.recv(1)
            readers.append(reader)
        sizes_bytes = [len(read_all(reader)) for reader in reversed(readers)]
        assert sizes_bytes[0] > LARGE_BYTES
        assert max(sizes_bytes[1:]) < LARGE_BYTES
        assert server.request("GET", TABLE).status == 200


def read_all(client: socket.socket) -> bytes:
    """Read the rest of a response after its first byte, until the response or the connection ends."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) <= LARGE_BYTES and (piece := client.recv(1 << 20)):
            data += piece
    return data


def test_slow_clients_do_not_delay_stop(lake: Lakehouse) -> None:
    """One client does not read its response, and one does not send its body. Their own timeouts are hours long."""
    create_large_table(lake)
    limits = Limits(seconds=10_000.0, stop_seconds=0.3)
    with contextlib.ExitStack() as clients, serving(settings_for(lake, limits=limits)) as server:
        reader, sender = (clients.enter_context(connect(server)) for _ in range(2))
        reader.sendall(f"GET {TABLE} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode() * 3)
        sender.sendall(HEAD + b"Content-Length: 1000\r\n\r\n{")
        assert server.request("GET", "/v1/main/namespaces").status == 200


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_responses_are_sent_without_delay(lake: Lakehouse, loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """This applies to uvloop and to the event loop of asyncio, which installations without extras use."""
    no_delay_flags: list[int] = []
    original_connection_made = LimitedConnection.connection_made

    def connection_made(self: LimitedConnection, transport: asyncio.Transport) -> None:
        original_connection_made(self, transport)
        no_delay_flags.append(transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

    def configuration(application: Application, settings: ServerSettings) -> uvicorn.Config:
        uvicorn_config = configuration_of(application, settings)
        uvicorn_config.loop = loop
        return uvicorn_config

    monkeypatch.setattr(LimitedConnection, "connection_made", connection_made)
    monkeypatch.setattr("tests.server.live_server.configuration_of", configuration)
    with serving(settings_for(lake)) as server:
        assert server.request("GET", "/healthz").status == 200
    assert no_delay_flags == [1]


def test_connections_beyond_file_descriptor_limit_are_closed(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trinitylake_ops.server.run.FILES_FOR_STORAGE", 1 << 30)
    monkeypatch.setattr("resource.getrlimit", lambda _: (8, 8))
    with serving(settings_for(lake)) as server, contextlib.ExitStack() as clients:
        connections = [clients.enter_context(connect(server)) for _ in range(4)]
        for client in connections:
            client.sendall(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
        assert is_closed(clients.enter_context(connect(server)))
        connections.pop().close()
        deadline_s = time.monotonic() + TIMEOUT_S
        while True:
            try:
                assert server.request("GET", "/healthz").status == 200
                break
            except (ConnectionError, OSError):
                assert time.monotonic() < deadline_s
