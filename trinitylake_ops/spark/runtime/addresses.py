"""Where Spark runs, as it is written; nothing here needs Spark itself."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit

from trinitylake_ops.errors import InvalidInputError, JobFailedError

DEFAULT_MASTER = "local[2]"

#: How long a server of Spark may take to answer before it counts as unreachable.
RESPONSE_SECONDS = 10.0

_STANDALONE = "spark://"
_TOKEN = "token"
_TOKEN_VARIABLE = "SPARK_CONNECT_AUTHENTICATE_TOKEN"


def check_remote(url: str) -> str:
    """Return ``host:port`` of ``sc://host:port/;option=value``.

    Raises InvalidInputError for another form, and for a token, which would be seen: it comes from the environment.
    """
    parts = urlsplit(url)
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if parts.scheme != "sc" or not host:
        raise InvalidInputError("a remote Spark is written sc://HOST:PORT, such as sc://spark.example:15002")
    options = [option.partition("=")[0].strip().lower() for option in parts.path.split(";")]
    if _TOKEN in options or parts.username is not None:
        raise InvalidInputError(f"a token in the address would be seen by others: put it into {_TOKEN_VARIABLE}")
    return f"{host}:{port or 15002}"


def check_master(master: str) -> None:
    """Check that a standalone master can be reached. Spark itself reports that after a minute.

    Raises:
        InvalidInputError: The address has no host and port.
        JobFailedError: No master accepts connections.
    """
    if not master.startswith(_STANDALONE):
        return
    servers = [_server(master, address) for address in master.removeprefix(_STANDALONE).split(",")]
    if not any(_is_reachable(host, port) for host, port in servers):
        raise JobFailedError(
            f"cannot start Spark at {master}: no master accepts connections there within {RESPONSE_SECONDS:.0f} s;"
            " check the address, and that the master runs"
        )


def _server(master: str, address: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{address}")
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise InvalidInputError(f"{master!r} is no address of a Spark master; write spark://HOST:PORT")
    return host, port


def _is_reachable(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), RESPONSE_SECONDS):
            return True
    except OSError:
        return False
