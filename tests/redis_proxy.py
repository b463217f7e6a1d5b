"""A proxy for a Redis server that logs every command and injects faults on the wire.

Each fault numbers the commands that it matches from 1. ``target`` can be changed while the proxy runs, like a host name
that resolves to another server after a failover.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal

Action = Literal["drop_request", "drop_response", "never_respond", "respond"]
Command = list[bytes]

_TIMEOUT_S = 30


def is_create(command: Command) -> bool:
    """Whether a command runs the script of a create."""
    return command[0] == b"EVAL" and b"'NX'" in command[1]


def is_write(command: Command) -> bool:
    return command[0] == b"EVAL" and b"'SET'" in command[1] and not is_create(command)


def is_delete(command: Command) -> bool:
    return command[0] == b"EVAL" and b"'UNLINK'" in command[1]


def is_read(command: Command) -> bool:
    return command[0] == b"EVAL" and b"'GETRANGE'" in command[1]


def is_list(command: Command) -> bool:
    return command[0] == b"ZRANGEBYLEX" and command[-1] == b"1000"


def is_named(name: str) -> Callable[[Command], bool]:
    """Return a predicate for commands with this name."""
    return lambda command: command[0] == name.encode()


@dataclass
class RedisFault:
    """A fault at ``times`` consecutive commands, from the ``at``-th command for which ``matches`` is true.

    ``times`` None means all following commands. ``drop_request`` closes the connection before the server receives the
    command, ``drop_response`` closes it after the command took effect, ``never_respond`` forwards the command without
    ever responding, and ``respond`` responds with ``error`` instead of the server.
    """

    action: Action
    matches: Callable[[Command], bool]
    at: int = 1
    times: int | None = 1
    error: bytes = b""
    n_matches: int = field(default=0, init=False)

    def hits(self, command: Command) -> bool:
        if not self.matches(command):
            return False
        self.n_matches += 1
        return self.at <= self.n_matches and (self.times is None or self.n_matches < self.at + self.times)


class RedisProxy:
    """Context manager: ``with RedisProxy(server_port) as proxy`` listens on ``proxy.port`` of the loopback interface.

    On exit, the proxy closes all connections and waits for its threads to end. An exception of the proxy itself is
    raised on exit.
    """

    def __init__(self, target: int):
        self.target = target
        self.log: list[Command] = []
        self._faults: Sequence[RedisFault] = ()
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._failures: list[BaseException] = []
        self._threads: list[threading.Thread] = []
        self._sockets: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._threads.append(threading.Thread(target=self._accept, name="redis proxy"))

    def begin(self, *faults: RedisFault) -> None:
        """Clear the log and replace the faults."""
        with self._lock:
            self._faults, self.log = faults, []

    def names(self) -> list[str]:
        """Return the names of the commands since ``begin``."""
        with self._lock:
            return [command[0].decode() for command in self.log]

    def close_connections(self) -> None:
        """Close all connections."""
        with self._lock:
            sockets = list(self._sockets)
        for connection in sockets:
            _close(connection)

    def __enter__(self) -> RedisProxy:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stopping.set()
        _close(self._listener)
        self.close_connections()
        for thread in self._threads:
            thread.join(_TIMEOUT_S)
            assert not thread.is_alive()
        if self._failures and error is None:
            raise self._failures[0]

    def _accept(self) -> None:
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            thread = threading.Thread(target=self._serve, args=(client,), name="redis proxy connection")
            with self._lock:
                self._threads.append(thread)
            thread.start()

    def _serve(self, client: socket.socket) -> None:
        try:
            with client, socket.create_connection(("127.0.0.1", self.target), _TIMEOUT_S) as server:
                with self._lock:
                    self._sockets |= {client, server}
                try:
                    self._forward(client, server)
                finally:
                    with self._lock:
                        self._sockets -= {client, server}
        except OSError:
            return  # either side may disconnect
        except BaseException as error:  # noqa: BLE001 - raised where the test sees it
            self._failures.append(error)

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        client_stream, server_stream = client.makefile("rb"), server.makefile("rb")
        with client_stream, server_stream:
            while (raw := _message(client_stream)) is not None:
                fault = self._register(_arguments(raw))
                action = fault.action if fault else None
                if action == "drop_request":
                    return
                if fault and action == "respond":
                    client.sendall(fault.error)
                    continue
                server.sendall(raw)
                response = _message(server_stream)
                if action == "never_respond":
                    self._stopping.wait(_TIMEOUT_S)
                if response is None or action in ("drop_response", "never_respond"):
                    return
                client.sendall(response)

    def _register(self, command: Command) -> RedisFault | None:
        with self._lock:
            self.log.append(command)
            return next((fault for fault in self._faults if fault.hits(command)), None)


def _message(stream: io.BufferedReader) -> bytes | None:
    """Return the bytes of one complete RESP message, or None at the end of the stream."""
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        return None
    kind, number = line[:1], line[1:-2]
    if kind in (b"$", b"=", b"!"):
        if number == b"-1":
            return line
        body = stream.read(int(number) + 2)
        return line + body if len(body) == int(number) + 2 else None
    if kind not in (b"*", b"%", b"~", b">"):
        return line
    parts = [line]
    for _ in range(max(0, int(number)) * (2 if kind == b"%" else 1)):
        part = _message(stream)
        if part is None:
            return None
        parts.append(part)
    return b"".join(parts)


def _arguments(raw: bytes) -> Command:
    """Return the arguments of a command, which clients send as an array of strings."""
    stream = io.BytesIO(raw)
    words = []
    for _ in range(int(stream.readline()[1:])):
        words.append(stream.read(int(stream.readline()[1:])))
        stream.read(2)
    return words


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # the other side closed it
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()
