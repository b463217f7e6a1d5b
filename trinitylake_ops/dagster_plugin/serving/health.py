"""Whether a server for engines answers, as a check of the lakehouse's asset."""

import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from urllib.parse import urlsplit

import dagster as dg

from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.errors import InvalidInputError

_READY = "/readyz"
_LONGEST_ANSWER_BYTES = 10_000


def build_server_check(
    url: str, names: LakehouseNames = ONLY, *, name: str = "server_ready", seconds: float = 10.0
) -> dg.AssetChecksDefinition:
    """Return a check of the lakehouse's asset that asks a server whether it is ready (``trinitylake serve``).

    ``url`` is its address without a path, such as ``https://lake.example.com``. Of several replicas each has a check
    with a name of its own, or the proxy before them has one. Within ``seconds`` the answer must be there. No token is
    sent, and none is needed. Raises InvalidInputError for an address that is none, or that holds a user or a path.
    """
    split = urlsplit(url)
    is_plain = split.path in ("", "/") and not split.query and not split.fragment and "@" not in split.netloc
    if split.scheme not in ("http", "https") or not split.hostname or not is_plain:
        raise InvalidInputError("a server's address is http:// or https:// with a host, and perhaps a port")
    if not seconds > 0:
        raise InvalidInputError(f"the seconds to wait must be above 0, not {seconds}")

    @dg.asset_check(
        asset=names.lakehouse_key,
        name=name,
        description=f"The server for engines at {split.netloc} answers, and so do the lakehouses that it serves.",
    )
    def run() -> dg.AssetCheckResult:
        begun_s = time.monotonic()
        kind = HTTPSConnection if split.scheme == "https" else HTTPConnection
        connection = kind(split.hostname or "", split.port, timeout=seconds)
        try:
            connection.request("GET", _READY)
            answer = connection.getresponse()
            answer.read(_LONGEST_ANSWER_BYTES)
            told, passed = f"status {answer.status}", answer.status == 200
        except (OSError, HTTPException) as error:
            told, passed = f"no answer: {type(error).__name__}", False
        finally:
            connection.close()
        took = dg.MetadataValue.float(round(1_000 * (time.monotonic() - begun_s), 1))
        return dg.AssetCheckResult(passed=passed, metadata={"answer": told, "milliseconds": took, "server": url})

    return run
