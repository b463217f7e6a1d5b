"""Requests to servers as messages name them, and ranges of HTTP.

This module is pure. Each storage reduces a failure of its client to the meaning of an answer, or to the kind of a
:class:`TransportFailure`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    StorageError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.error_table import ErrorRow, find_row
from trinitylake_ops.storage.options import StorageOptions


class Request(Enum):
    """The purpose of a request. The value is the verb that messages use."""

    READ = "read"
    STAT = "look up"
    CREATE = "create"
    WRITE = "write"
    DELETE = "delete"
    LIST = "list"
    CLOCK = "ask for the time of"

    @property
    def changes_files(self) -> bool:
        """Whether the request may have had an effect although no answer says so."""
        return self in (Request.CREATE, Request.WRITE, Request.DELETE)


#: Requests that may have had an effect although no response says so.
CHANGES = tuple(request for request in Request if request.changes_files)
#: Statuses of responses that leave open whether the request had its effect.
SERVER_ERRORS = range(500, 1000)
#: Statuses of responses that refer to another server.
REDIRECTS = range(300, 400)
#: Requests for one file, whose absence a response of the status 404 means.
OF_ONE_FILE = (Request.READ, Request.STAT, Request.DELETE)


class TransportFailure(Enum):
    """Why there is no answer at all."""

    NOT_CONNECTED = "no connection"  # refused, unknown host, time-out while connecting: nothing was sent
    NOT_TRUSTED = "no TLS connection"  # the handshake failed: nothing was sent
    NO_ANSWER = "no answer"  # lost, cut short, unreadable, or too late: the server may have done its work


# What gives away credentials of AWS, Google and Azure, where a server or a client library quotes a request.
_LOOKS_SECRET = re.compile(
    r"(?i)\b(?:AKIA|ASIA)[A-Z0-9]{8,}\b|\bya29\.[\w.-]+|\bbearer\s+[^\s,;&]+"
    r"|\b(?:sig|signature|credential|x-amz-[a-z-]+|security-?token|access-?key-?id|account-?key|access_token"
    r"|refresh_token|secret)\s*[=:]\s*[^\s,;&]+"
)
_MAX_SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """One request. ``path`` is relative to ``root``, a prefix for LIST. ``options`` and ``secrets`` are not shown."""

    operation: Request
    path: str
    root: str
    options: StorageOptions
    secrets: tuple[str, ...] = ()

    @property
    def bucket(self) -> str:
        """Name of the bucket, container or table in the root URI."""
        return self.root.partition("://")[2].partition("/")[0].partition("@")[0]

    @property
    def failure(self) -> str:
        """The first half of every message: what could not be done, and where."""
        if self.operation is Request.CLOCK:
            return f"cannot {self.operation.value} {self.root}"
        return f"cannot {self.operation.value} {self.path!r} under {self.root}"

    def safe(self, text: str) -> str:
        """Return one short line without credentials and without markup."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        text = _LOOKS_SECRET.sub("***", self.options.redact(text))
        text = re.sub(r"<[^>]*>?", " ", text)
        text = " ".join(part for part in re.split(r"[\s\x00-\x1f\x7f]+", text) if part).rstrip(".;: ")
        return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."

    def described(self, status: int | None, code: str | None, message: str | None = None) -> str:
        """Return what the server said, as messages show it: status, its own word for the reason, and its text."""
        response = " ".join(part for part in (str(status) if status is not None else None, code) if part) or "no reason"
        text = self.safe(message or "")
        return f"{self.safe(response)} ({text})" if text else self.safe(response)

    def ambiguous_error(self, what: str) -> StorageError:
        """Return the error for a request that may have had its effect, if it has one."""
        return ambiguous_error(what, self.path, changes_files=self.operation.changes_files)


def ambiguous_error(what: str, path: str, *, changes_files: bool) -> StorageError:
    """Return the error for what may have taken effect although no answer says so, if it has an effect."""
    if changes_files:
        return AmbiguousWriteError(f"{what}; it may have taken effect: read the name to see", path=path)
    return TransientError(f"{what}; retry", path=path)


def error_from_table(
    table: Iterable[ErrorRow], request: StorageRequest, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for a response of a server: one line that says what to do.

    Args:
        table: the errors of the storage. Their messages may also have the names ``bucket`` and
            ``response``: the response without the server's text, which may quote the request or its signature.
        request: the request that failed.
        status: the HTTP status. None for the result of one file in a batch.
        code: the service's name of the failure. None if the response has none, like that of a proxy.
        message: the server's text, which is shown shortened, on one line and redacted.
    """
    row = find_row(table, request.operation, status, code, message or "")
    names = {"failure": request.failure, "path": request.path, "root": request.root, "bucket": request.bucket}
    if "{what}" in row.message:
        names["what"] = f"{request.failure}: the server says {request.described(status, code, message)}"
    if "{response}" in row.message:
        names["response"] = request.described(status, code)
    text = row.message.format(**names)
    if row.error is AmbiguousWriteError:
        return request.ambiguous_error(text)
    return row.error(text, path=request.path)


def error_from_transport(
    request: StorageRequest, failure: TransportFailure, endpoint: str, reason: str
) -> StorageError:
    """Return the typed error for a request that got no answer. ``endpoint`` and ``reason`` are shown redacted."""
    where = f"{request.failure} at {request.safe(endpoint)}"
    why = request.safe(reason)
    if failure is TransportFailure.NOT_TRUSTED:
        return StorageError(
            f"{where}: the TLS handshake failed ({why}); check the option 'endpoint' and the server's certificate",
            path=request.path,
        )
    if failure is TransportFailure.NOT_CONNECTED:
        return UnreachableError(
            f"{where}: no connection ({why}); check the option 'endpoint' and that the server runs, then retry",
            path=request.path,
        )
    return request.ambiguous_error(f"{where}: no complete answer ({why})")


def aiohttp_failure(error: BaseException) -> tuple[TransportFailure, str]:
    """Return how far a request of aiohttp without a response got, and why there is none."""
    import aiohttp

    failure = TransportFailure.NO_ANSWER  # an established connection that broke, or a time-out after that
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)):
        failure = TransportFailure.NOT_TRUSTED
    elif isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        failure = TransportFailure.NOT_CONNECTED
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return failure, "time-out while connecting"
    if isinstance(error, TimeoutError):
        return failure, "time-out"
    if isinstance(error, OSError) and error.strerror:
        return failure, error.strerror
    return failure, str(error).splitlines()[0] if str(error) else type(error).__name__


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def range_header(offset: int, length: int | None, name: str = "Range") -> dict[str, str]:
    """Return the header that asks for a range, if it is not the whole file. Lengths are positive."""
    if offset == 0 and length is None:
        return {}
    last = "" if length is None else str(offset + length - 1)
    return {name: f"bytes={offset}-{last}"}


def requested_part(
    data: bytes, content_range: str | None, size_bytes: int | None, offset: int, length: int | None
) -> bytes | None:
    """Return the bytes of the range, or None when the answer does not hold what its headers and the request say.

    ``size_bytes`` is the length that the answer gives, None if it gives none.
    """
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:  # the whole file, also if a server ignores ranges
        end = None if length is None else offset + length
        return data[offset:end] if size_bytes in (None, len(data)) else None
    first, last, total = (int(number) for number in match.groups())
    end = total if length is None else min(offset + length, total)
    return data if (first, last + 1, len(data)) == (offset, end, end - offset) else None
