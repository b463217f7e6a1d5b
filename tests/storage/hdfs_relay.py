"""A proxy for a NameNode that drops connections, or lets them hang, at chosen requests.

Requests of Hadoop's RPC contain the name of their method as plain bytes, by which faults match them.
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
    """A fault of the next ``times`` requests of a method.

    ``drop_request`` closes the connection before the server gets it, ``drop_response`` after the server processed it.
    ``silence`` forwards the request but no further responses.
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
        self._refuses = False
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

    def refuse(self) -> None:
        """Accept no connections after the next fault."""
        self._refuses = True

    def __enter__(self) -> Relay:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # ends the wait in accept
        for thread in self._threads[:1]:
            thread.join()
        self._listener.close()
        for state in self._connections:
            state.close()
        for thread in self._threads:
            thread.join()
        for state in self._connections:
            state.client.close()
            state.server.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            if self._refuses and self.n_hits:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._server_port))
            state = _Connection(client, server)
            self._connections.append(state)
            for work in (self._requests, self._answers):
                thread = threading.Thread(target=work, args=(state,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _requests(self, state: _Connection) -> None:
        tail = b""
        while data := state.received(state.client):
            fault = self._fault_in(tail + data)
            tail = (tail + data)[-40:] if fault is None else b""
            if fault is not None:
                if fault.action == "drop_request":
                    break
                state.action = fault.action
            state.send(state.server, data)
        state.close()

    def _answers(self, state: _Connection) -> None:
        while data := state.received(state.server):
            if state.action == "drop_response":
                break
            if state.action is None:
                state.send(state.client, data)
        state.close()

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

    def received(self, one: socket.socket) -> bytes:
        try:
            return one.recv(_CHUNK_BYTES)
        except OSError:
            return b""  # closed by a fault or by the client

    def send(self, one: socket.socket, data: bytes) -> None:
        try:
            one.sendall(data)
        except OSError:
            self.close()

    def close(self) -> None:
        for one in (self.client, self.server):
            try:
                one.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue  # already closed
