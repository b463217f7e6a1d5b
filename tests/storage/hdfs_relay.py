"""A proxy for a NameNode that drops or stalls connections at chosen requests.

Requests in Hadoop's RPC protocol contain the name of their method as plain bytes, which faults match.
"""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Literal

Action = Literal["drop_request", "drop_response", "silence"]
_CHUNK_BYTES = 1 << 16


@dataclass
class RelayFault:
    """A fault in the next ``times`` requests of a method.

    ``drop_request`` closes the connection before the server receives the request, ``drop_response`` after the server
    has processed it. ``silence`` forwards the request, but no further responses.
    """

    method: bytes
    action: Action
    times: int = 1


class Relay:
    """Relays TCP connections to a port on loopback."""

    def __init__(self, port: int):
        self._server_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._faults: list[RelayFault] = []
        self._connections: list[_Connection] = []
        self._rejects_connections = False
        self.n_hits = 0
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def begin(self, *faults: RelayFault) -> None:
        """Replace the planned faults."""
        with self._lock:
            self._faults, self.n_hits = list(faults), 0

    def reject_connections(self) -> None:
        """Reject all connections after the next fault."""
        self._rejects_connections = True

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # unblocks accept
        for thread in self._threads[:1]:
            thread.join()
        self._listener.close()
        for connection in self._connections:
            connection.close()
        for thread in self._threads:
            thread.join()
        for connection in self._connections:
            connection.client.close()
            connection.server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._rejects_connections and self.n_hits:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            connection = _Connection(client, server)
            self._connections.append(connection)
            for forward in (self._forward_requests, self._forward_responses):
                thread = threading.Thread(target=forward, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _forward_requests(self, connection: _Connection) -> None:
        tail = b""
        while data := connection.receive(connection.client):
            fault = self._fault_in(tail + data)
            tail = (tail + data)[-40:] if fault is None else b""
            if fault is not None:
                if fault.action == "drop_request":
                    break
                connection.action = fault.action
            connection.send(connection.server, data)
        connection.close()

    def _forward_responses(self, connection: _Connection) -> None:
        while data := connection.receive(connection.server):
            if connection.action == "drop_response":
                break
            if connection.action is None:
                connection.send(connection.client, data)
        connection.close()

    def _fault_in(self, data: bytes) -> RelayFault | None:
        with self._lock:
            for fault in self._faults:
                if fault.times and fault.method in data:
                    fault.times -= 1
                    self.n_hits += 1
                    return fault
        return None


class _Connection:
    def __init__(self, client: socket.socket, server: socket.socket):
        self.client, self.server = client, server
        self.action: Action | None = None

    def receive(self, sock: socket.socket) -> bytes:
        try:
            return sock.recv(_CHUNK_BYTES)
        except OSError:
            return b""  # closed by a fault or by the client

    def send(self, sock: socket.socket, data: bytes) -> None:
        try:
            sock.sendall(data)
        except OSError:
            self.close()

    def close(self) -> None:
        for sock in (self.client, self.server):
            try:
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed
