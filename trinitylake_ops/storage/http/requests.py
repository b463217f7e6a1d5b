"""Descriptions of requests for error messages, errors from responses, and HTTP ranges. No I/O.

Each storage reduces a failure of its client library to a status and code, or to a :class:`TransportFailure`.
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
    """The operation of a request. The value is the verb that messages use."""

    READ = "read"
    STAT = "look up"
    CREATE = "create"
    WRITE = "write"
    DELETE = "delete"
    LIST = "list"
    CLOCK = "get the time of"

    @property
    def changes_files(self) -> bool:
        """Whether the request may take effect even if its response is lost."""
        return self in (Request.CREATE, Request.WRITE, Request.DELETE)


#: Operations that may take effect even if the response is lost.
CHANGES = tuple(request for request in Request if request.changes_files)
#: Statuses of responses after which the request may have taken effect.
SERVER_ERRORS = range(500, 1000)
#: Statuses of responses that refer to another server.
REDIRECTS = range(300, 400)
#: Operations for which status 404 means that the file does not exist.
OF_ONE_FILE = (Request.READ, Request.STAT, Request.DELETE)


class TransportFailure(Enum):
    """Why a request has no response."""

    NOT_CONNECTED = "no connection"  # refused, unknown host, timeout while connecting: nothing was sent
    NOT_TRUSTED = "no TLS connection"  # the handshake failed: nothing was sent
    NO_RESPONSE = "no response"  # lost, truncated, invalid or late: the request may have taken effect


# AWS, Google and Azure credentials in requests that a server or a client library quotes.
_SECRET_TEXT = re.compile(
    r"(?i)\b(?:AKIA|ASIA)[A-Z0-9]{8,}\b|\bya29\.[\w.-]+|\bbearer\s+[^\s,;&]+"
    r"|\b(?:sig|signature|credential|x-amz-[a-z-]+|security-?token|access-?key-?id|account-?key|access_token"
    r"|refresh_token|secret)\s*[=:]\s*[^\s,;&]+"
)
_MAX_SHOWN_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class StorageRequest:
    """A request to a storage, described for error messages."""

    operation: Request
    #: Path relative to the root. For LIST, the prefix.
    path: str
    root: str
    #: Options of the storage, which may contain credentials.
    options: StorageOptions
    #: Additional texts that messages must not contain.
    secrets: tuple[str, ...] = ()

    @property
    def bucket(self) -> str:
        """Name of the bucket, container or table in the root URI."""
        return self.root.partition("://")[2].partition("/")[0].partition("@")[0]

    @property
    def failure(self) -> str:
        """The first part of every message: which operation failed, and where."""
        if self.operation is Request.CLOCK:
            return f"cannot {self.operation.value} {self.root}"
        return f"cannot {self.operation.value} {self.path!r} under {self.root}"

    def safe(self, text: str) -> str:
        """Shorten a text to one line, without credentials and markup."""
        for secret in self.secrets:
            text = text.replace(secret, "***")
        text = _SECRET_TEXT.sub("***", self.options.redact(text))
        text = re.sub(r"<[^>]*>?", " ", text)
        text = " ".join(part for part in re.split(r"[\s\x00-\x1f\x7f]+", text) if part).rstrip(".;: ")
        return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."

    def described(self, status: int | None, code: str | None, message: str | None = None) -> str:
        """Format a response for messages.

        Args:
            status: HTTP status.
            code: The service's error code.
            message: The service's message, which is shortened and redacted.
        """
        response = " ".join(part for part in (str(status) if status is not None else None, code) if part) or "no reason"
        text = self.safe(message or "")
        return f"{self.safe(response)} ({text})" if text else self.safe(response)

    def ambiguous_error(self, what: str) -> StorageError:
        """Return the error for this request if it has no response: ambiguous for changes, otherwise transient."""
        return ambiguous_error(what, self.path, changes_files=self.operation.changes_files)


def ambiguous_error(what: str, path: str, *, changes_files: bool) -> StorageError:
    """Return the error for a request without a response.

    Args:
        what: What failed, for the message.
        path: Path of the file.
        changes_files: Whether the request may have taken effect. Otherwise the error is transient.
    """
    if changes_files:
        return AmbiguousWriteError(f"{what}; it may have taken effect: read the path to find out", path=path)
    return TransientError(f"{what}; retry", path=path)


def error_from_table(
    table: Iterable[ErrorRow], request: StorageRequest, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for a response.

    Args:
        table: Error table of the storage. Its messages may also use ``bucket`` and ``response``, which is the response
            without the server's message, because that message may quote the request or its signature.
        request: The request that failed.
        status: HTTP status. None for the result of one file in a batch.
        code: The service's error code. None if the response has none, for example because it is from a proxy.
        message: The server's message, which is shortened and redacted.
    """
    row = find_row(table, request.operation, status, code, message or "")
    names = {"failure": request.failure, "path": request.path, "root": request.root, "bucket": request.bucket}
    if "{what}" in row.message:
        names["what"] = f"{request.failure}: the server responded {request.described(status, code, message)}"
    if "{response}" in row.message:
        names["response"] = request.described(status, code)
    text = row.message.format(**names)
    if row.error is AmbiguousWriteError:
        return request.ambiguous_error(text)
    return row.error(text, path=request.path)


def error_from_transport(
    request: StorageRequest, failure: TransportFailure, endpoint: str, reason: str
) -> StorageError:
    """Return the typed error for a request without a response.

    Args:
        request: The request.
        failure: The kind of failure.
        endpoint: Address of the server, which is redacted.
        reason: Reason from the client library, which is redacted.
    """
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
    return request.ambiguous_error(f"{where}: no complete response ({why})")


def aiohttp_failure(error: BaseException) -> tuple[TransportFailure, str]:
    """Return the kind of failure and its reason for an exception of aiohttp without a response."""
    import aiohttp

    failure = TransportFailure.NO_RESPONSE  # a lost connection, or a timeout after it was established
    if isinstance(error, (aiohttp.ClientSSLError, aiohttp.ServerFingerprintMismatch)):
        failure = TransportFailure.NOT_TRUSTED
    elif isinstance(error, (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError)):
        failure = TransportFailure.NOT_CONNECTED
    if isinstance(error, aiohttp.ConnectionTimeoutError):
        return failure, "timeout while connecting"
    if isinstance(error, TimeoutError):
        return failure, "timeout"
    if isinstance(error, OSError) and error.strerror:
        return failure, error.strerror
    return failure, str(error).splitlines()[0] if str(error) else type(error).__name__


_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def range_header(offset: int, length: int | None, name: str = "Range") -> dict[str, str]:
    """Return the header of a range request. It is empty for a whole file.

    Args:
        offset: First byte of the range.
        length: Number of bytes, at least 1. None reads to the end of the file.
        name: Name of the header.
    """
    if offset == 0 and length is None:
        return {}
    last = "" if length is None else str(offset + length - 1)
    return {name: f"bytes={offset}-{last}"}


def requested_part(
    data: bytes, content_range: str | None, size_bytes: int | None, offset: int, length: int | None
) -> bytes | None:
    """Return the requested range of a response, or None if the response contradicts its headers or the request.

    Args:
        data: Body of the response.
        content_range: ``Content-Range`` header, if there is one.
        size_bytes: ``Content-Length`` header, if there is one.
        offset: First byte of the requested range.
        length: Length of the requested range. None reads to the end of the file.
    """
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:  # the whole file: a server may ignore the Range header
        end = None if length is None else offset + length
        return data[offset:end] if size_bytes in (None, len(data)) else None
    first, last, total = (int(number) for number in match.groups())
    end = total if length is None else min(offset + length, total)
    return data if (first, last + 1, len(data)) == (offset, end, end - offset) else None
