"""The error table of Redis (S7), and typed errors for exceptions of redis-py."""

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
from trinitylake_ops.storage.error_table import RETRY, SLOWER, ErrorRow, find_row
from trinitylake_ops.storage.http.requests import StorageRequest

#: All exceptions that a request may raise. RedisClusterException is not a RedisError.
CLIENT_ERRORS = (RedisError, RedisClusterException, OSError)


class NoConnectionError(Exception):
    """The request was not sent, because there is no usable connection."""

    def __init__(self, address: str, cause: Exception):
        super().__init__(address)
        self.address = address
        self.cause = cause


class NoResponseError(Exception):
    """The request was sent, at least in part, but there is no complete response."""

    def __init__(self, address: str, cause: Exception):
        super().__init__(address)
        self.address = address
        self.cause = cause


_CODE = re.compile(r"[A-Z]{2,20}")
# Older servers wrap the error of a command in a script in the text of another error.
_INNER_CODE = re.compile(r"-(OOM|MISCONF|NOPERM|NOREPLICAS|READONLY) ")
#: Error codes by the class of redis-py that replaces them, because redis-py removes the code from the text. Subclasses
#: precede their base classes.
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
_DISK = "{what}; the server cannot write to its disk: free space on it, then retry"
#: Code for MOVED if the option 'cluster' is not set.
_NOT_A_CLUSTER = "MOVED without the option 'cluster'"
_OF_TRANSPORT = (RedisConnectionError, TimeoutError, OSError, RedisClusterException)

_ERRORS = (
    ErrorRow(
        StoragePermissionError,
        "{failure}: the user or the password is wrong or missing; set the options 'username' and 'password', or the"
        " variables REDIS_USERNAME and REDIS_PASSWORD",
        codes={"NOAUTH", "WRONGPASS"},
    ),
    ErrorRow(StoragePermissionError, "{what}; check the server's ACL for this user", codes={"NOPERM"}),
    ErrorRow(StorageFullError, "{what}; raise the server's maxmemory or free space, then retry", codes={"OOM"}),
    ErrorRow(StorageFullError, _DISK, codes={"MISCONF"}, text=re.compile("No space left")),
    ErrorRow(StorageError, _DISK, codes={"MISCONF"}),
    ErrorRow(
        TransientError,
        "{what}; the server is a replica: use the primary in the root, or wait until the replica is promoted",
        codes={"READONLY"},
    ),
    ErrorRow(TransientError, "{what}; the server has fewer replicas than it requires: retry", codes={"NOREPLICAS"}),
    ErrorRow(ThrottledError, SLOWER, codes={"BUSY"}),
    ErrorRow(
        StorageError, "{what}; the server is a node of a cluster: set the option 'cluster=true'", codes={_NOT_A_CLUSTER}
    ),
    ErrorRow(TransientError, RETRY, codes={"ASK", "CLUSTERDOWN", "LOADING", "MASTERDOWN", "MOVED", "TRYAGAIN"}),
    ErrorRow(
        StorageError,
        "{failure}: the server has no such database; check the number in the root, or raise the server's setting"
        " 'databases'",
        text=re.compile("DB index is out of range"),
    ),
    ErrorRow(StorageError, "{what}; check the root, the options and the server's log"),
)


def error_from_reply(request: StorageRequest, error: Exception) -> StorageError:
    """Return the typed error for an error response. The request had no effect, because scripts undo partial changes.

    Args:
        request: The request that failed.
        error: The exception of redis-py.
    """
    text, code = request.safe(_text(error)), _code(error)
    if code == "MOVED" and request.options.get("cluster") != "true":
        code = _NOT_A_CLUSTER
    row = find_row(_ERRORS, request.operation, None, code, text)
    message = row.message.format(failure=request.failure, what=f"{request.failure}: the server responded {text}")
    typed = row.error(message, path=request.path)
    assert isinstance(typed, StorageError)
    return typed


def error_without_connection(request: StorageRequest, failed: NoConnectionError) -> StorageError:
    """Return the typed error for a request that was not sent."""
    error, where = failed.cause, f"{request.failure} at {failed.address}"
    if isinstance(error, RedisClusterException) and isinstance(error.__cause__, RedisError):
        error = error.__cause__
    if isinstance(error, (AuthenticationError, BusyLoadingError)) or not isinstance(error, _OF_TRANSPORT):
        return error_from_reply(request, error)
    reason = request.safe(_text(error))
    if "Cluster mode is not enabled" in reason:
        return StorageError(f"{where}: the server is not a cluster; remove the option 'cluster'", path=request.path)
    if "max number of clients" in reason:
        return ThrottledError(f"{where}: the server has too many clients; retry at a slower pace", path=request.path)
    if isinstance(error.__context__, (ssl.SSLError, FileNotFoundError, PermissionError)):  # files of certificates
        return StorageError(
            f"{where}: the TLS handshake failed ({reason}); check the option 'tls_ca_file' and the certificate, or use"
            " redis:// if the port does not support TLS",
            path=request.path,
        )
    return UnreachableError(
        f"{where}: no connection ({reason}); check the root and that the server runs, then retry", path=request.path
    )


def error_without_response(request: StorageRequest, failed: NoResponseError) -> StorageError:
    """Return the typed error for a request without a response."""
    reason = "timeout" if isinstance(failed.cause, TimeoutError) else request.safe(_text(failed.cause))
    what = f"{request.failure} at {failed.address}: no complete response ({reason})"
    return request.ambiguous_error(what)


def _code(error: Exception) -> str:
    """Return the error code of an exception. redis-py removes the code from the text if it has a class for it."""
    if isinstance(error, AuthenticationError):
        return "WRONGPASS"
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
