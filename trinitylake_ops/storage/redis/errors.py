"""From redis-py's exceptions and the server's errors to typed errors (S7)."""

from __future__ import annotations

import re
import ssl

from redis.exceptions import (
    AskError,
    AuthenticationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    TimeoutError,
    TryAgainError,
)
from redis.exceptions import (
    ConnectionError as RedisConnectionError,
)

from trinitylake_ops.errors import (
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    UnreachableError,
)
from trinitylake_ops.storage.http.requests import StorageRequest

#: Every exception that a request may end with. The one of clusters is no RedisError.
CLIENT_ERRORS = (RedisError, RedisClusterException, OSError)


class NoConnectionError(Exception):
    """No usable connection was made, for the reason given: the request was not sent."""

    def __init__(self, address: str, cause: Exception):
        super().__init__(address)
        self.address = address
        self.cause = cause


class NoResponseError(Exception):
    """The request was sent, at least in part, and no whole answer came, for the reason given."""

    def __init__(self, address: str, cause: Exception):
        super().__init__(address)
        self.address = address
        self.cause = cause


_CODE = re.compile(r"[A-Z]{2,20}")
# Older servers put the error of a command within a script into the text of another.
_INNER_CODE = re.compile(r"-(OOM|MISCONF|NOPERM|NOREPLICAS|READONLY) ")
#: The server's words that redis-py takes off the text, by the class that it makes of them; subclasses first.
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (OutOfMemoryError, "OOM"),
    (NoPermissionError, "NOPERM"),
    (ReadOnlyError, "READONLY"),
    (BusyLoadingError, "LOADING"),
    (MasterDownError, "MASTERDOWN"),
    (ClusterDownError, "CLUSTERDOWN"),
    (TryAgainError, "TRYAGAIN"),
    (MovedError, "MOVED"),
    (AskError, "ASK"),
)
_OF_TRANSPORT = (RedisConnectionError, TimeoutError, OSError, RedisClusterException)
_PASSING = {"ASK", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "TRYAGAIN"}


def error_from_reply(request: StorageRequest, error: Exception) -> StorageError:
    """Return the typed error for an error that the server answered.

    The request had no effect: our scripts undo what they did before they report a failure.
    """
    text = request.safe(_text(error))
    what = f"{request.failure}: the server says {text}"
    code = _code(error)
    if isinstance(error, AuthenticationError) or code in ("NOAUTH", "WRONGPASS"):
        return StoragePermissionError(
            f"{request.failure}: user or password are wrong or missing; give the options 'username' and 'password', or"
            " set REDIS_USERNAME and REDIS_PASSWORD",
            path=request.path,
        )
    if code == "NOPERM":
        return StoragePermissionError(f"{what}; check the server's ACL for this user", path=request.path)
    return _transient_error(request, what, code, text) or StorageError(
        f"{what}; check the root, the options and the server's log", path=request.path
    )


def error_without_connection(request: StorageRequest, failed: NoConnectionError) -> StorageError:
    """Return the typed error for a request that was not sent."""
    error, where = failed.cause, f"{request.failure} at {failed.address}"
    if isinstance(error, RedisClusterException) and isinstance(error.__cause__, RedisError):
        error = error.__cause__
    if isinstance(error, (AuthenticationError, BusyLoadingError)) or not isinstance(error, _OF_TRANSPORT):
        return error_from_reply(request, error)
    reason = request.safe(_text(error))
    if "Cluster mode is not enabled" in reason:
        return StorageError(f"{where}: the server is no cluster; leave out the option 'cluster'", path=request.path)
    if "max number of clients" in reason:
        return ThrottledError(f"{where}: the server has too many clients; retry at a slower pace", path=request.path)
    if isinstance(error.__context__, (ssl.SSLError, FileNotFoundError, PermissionError)):  # of files of certificates
        return StorageError(
            f"{where}: the TLS handshake failed ({reason}); check the option 'tls_ca_file', the certificate, and that"
            " the port takes TLS: redis:// is for one that does not",
            path=request.path,
        )
    return UnreachableError(
        f"{where}: no connection ({reason}); check the root and that the server runs, then retry", path=request.path
    )


def error_without_response(request: StorageRequest, failed: NoResponseError) -> StorageError:
    """Return the typed error for a request whose answer did not come."""
    reason = "time-out" if isinstance(failed.cause, TimeoutError) else request.safe(_text(failed.cause))
    what = f"{request.failure} at {failed.address}: no complete answer ({reason})"
    return request.ambiguous_error(what)


def _transient_error(request: StorageRequest, what: str, code: str, text: str) -> StorageError | None:
    if code == "OOM":
        return StorageFullError(f"{what}; raise the server's maxmemory or free space, then retry", path=request.path)
    if code == "MISCONF":
        kind = StorageFullError if "No space left" in text else StorageError
        return kind(f"{what}; the server cannot write to its disk: free space there, then retry", path=request.path)
    if code == "READONLY":
        return TransientError(
            f"{what}; it is a replica: let the root name the primary, or wait until it is promoted", path=request.path
        )
    if code == "NOREPLICAS":
        return TransientError(f"{what}; the server wants more replicas than it has: retry", path=request.path)
    if code == "BUSY":
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if code == "MOVED" and request.options.get("cluster") != "true":
        return StorageError(f"{what}; it is a node of a cluster: set the option 'cluster=true'", path=request.path)
    if code in _PASSING:
        return TransientError(f"{what}; retry", path=request.path)
    if "DB index is out of range" in text:
        return StorageError(
            f"{request.failure}: the server has no such database; check the number in the root, or raise the server's"
            " setting 'databases'",
            path=request.path,
        )
    return None


def _code(error: Exception) -> str:
    """Return the server's word for an error. redis-py takes it off the text where it has a class for it."""
    text = str(error)
    if inner := _INNER_CODE.search(text):
        return inner[1]
    if text.startswith("The user executing the script can't"):
        return "NOPERM"
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code
    word = text.partition(" ")[0]
    return word if _CODE.fullmatch(word) else ""


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
