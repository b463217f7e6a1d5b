"""Connections by TLS, which begin in bounded time, and tell a port that takes no TLS."""

from __future__ import annotations

import socket
import ssl

from redis import Connection, SSLConnection

_PLAIN_ANSWERS = (b"+", b"-")


class TlsConnection(SSLConnection):
    """A connection whose handshake has the time of a connection, where redis-py gives it that of an answer.

    A server without TLS takes a handshake for the beginning of a line, and waits for its end. So a handshake that got
    no answer is followed by a question in plain text, without credentials. Raises OSError, which redis-py wraps.
    """

    def _connect(self) -> socket.socket:
        answer_s, self.socket_timeout = self.socket_timeout, self.socket_connect_timeout
        try:
            connected: socket.socket = super()._connect()  # type: ignore[no-untyped-call]
        except TimeoutError as error:
            if "handshake" in str(error) and self._answers_plainly():
                raise ssl.SSLError("the port takes no TLS") from error
            raise
        finally:
            self.socket_timeout = answer_s
        connected.settimeout(answer_s)
        return connected

    def _answers_plainly(self) -> bool:
        try:
            plain = Connection._connect(self)
        except OSError:
            return False
        with plain:
            try:
                plain.sendall(b"PING\r\n")
                return plain.recv(1) in _PLAIN_ANSWERS
            except OSError:
                return False
