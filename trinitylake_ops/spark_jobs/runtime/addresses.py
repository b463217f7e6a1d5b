"""Where Spark runs, as it is written; nothing here needs Spark itself."""

from __future__ import annotations

from urllib.parse import urlsplit

from trinitylake_ops.errors import InvalidInputError

DEFAULT_MASTER = "local[2]"

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
