"""Validation of Spark's addresses, without importing Spark."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from trinitylake_ops.errors import InvalidInputError, JobFailedError

DEFAULT_MASTER = "local[2]"

#: How long to wait for a response from a Spark server before the server counts as unreachable.
RESPONSE_SECONDS = 10.0

_STANDALONE = "spark://"
_TOKEN = "token"
_TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"


def check_remote(url: str) -> str:
    """Return ``host:port`` of a URL ``sc://host:port/;option=value``.

    Raises InvalidInputError if the URL is invalid or contains a token, which must be in the environment instead.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "sc" or not host:
        raise InvalidInputError("invalid Spark Connect URL; use sc://HOST:PORT, for example sc://spark.example:15002")
    options = [option.partition("=")[0].strip().lower() for option in parts.path.split(";")]
    if _TOKEN in options or parts.username is not None:
        raise InvalidInputError(f"a token in the URL would be visible to others; set {_TOKEN_VARIABLE} instead")
    return f"{host}:{port or 15002}"


def check_master(master: str) -> None:
    """Check that a standalone master is reachable, because Spark itself would take a minute to fail.

    Raises:
        InvalidInputError: If the address has no host or port.
        JobFailedError: If no master accepts connections.
    """
    if not master.startswith(_STANDALONE):
        return
    servers = [_server(master, address) for address in master.removeprefix(_STANDALONE).split(",")]
    if not any(_is_reachable(host, port) for host, port in servers):
        raise JobFailedError(
            f"cannot connect to {master}: no Spark master accepted a connection within {RESPONSE_SECONDS:.0f} s; check"
            " the address, and that the master is running"
        )


def _server(master: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise InvalidInputError(f"{master!r} is not the address of a Spark master; use spark://HOST:PORT")
    return host, port


def _is_reachable(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), RESPONSE_SECONDS):
            return True
    except OSError:
        return False
