"""The error table of Google Cloud Storage (S7)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    FileExistsAlreadyError,
    FileMissingError,
    InvalidLocationError,
    StorageError,
    StorageFullError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
    TrinityLakeError,
    UnreachableError,
)
from trinitylake_ops.storage.error_table import EXISTS, MISSING, SLOWER, ErrorRow
from trinitylake_ops.storage.http.requests import (
    CHANGES,
    OF_ONE_FILE,
    REDIRECTS,
    SERVER_ERRORS,
    Request,
    StorageRequest,
    error_from_table,
)


class ErrorResponse(NamedTuple):
    """The parsed body of an error response."""

    status: int
    #: The service's error code, if there is one.
    reason: str | None
    message: str

    @classmethod
    def of(cls, status: int, body: bytes) -> ErrorResponse:
        """Parse a body: JSON of the service, the plain text of a failed download, or any text of a proxy."""
        text = body.decode("utf-8", "replace")
        try:
            error = json.loads(text)["error"]
        except (ValueError, KeyError, TypeError, RecursionError):
            return cls(status, None, text)
        if not isinstance(error, Mapping):
            return cls(status, None, str(error))
        details: Any = error.get("errors")
        first = details[0] if isinstance(details, list) and details else None
        reason = first.get("reason") if isinstance(first, Mapping) else None
        return cls(status, reason if isinstance(reason, str) else None, str(error.get("message", "")))


_NO_BUCKET = "{failure}: the bucket {bucket!r} does not exist; check its name and the option 'endpoint', or create it"
_REQUESTER_PAYS = (
    "{failure}: the requester pays for this bucket; set the option 'project' to the project that pays (the server"
    " responded {response})"
)

_ERRORS = (
    ErrorRow(
        ThrottledError,
        SLOWER,
        codes={"rateLimitExceeded", "slowDown", "usageLimits.rateLimitExceeded", "userRateLimitExceeded"},
    ),
    # A response without a code may be from a proxy that still forwards the request.
    ErrorRow(AmbiguousWriteError, "{what}", statuses={408}),
    ErrorRow(AmbiguousWriteError, "{what}", bare_statuses={409, 429}, operations=CHANGES),
    ErrorRow(ThrottledError, SLOWER, statuses={429}),
    ErrorRow(TransientError, "{what}: another request for the same path is in progress; retry", statuses={409}),
    ErrorRow(StorageError, "{what}: the server does not support this request; use another server", statuses={501}),
    ErrorRow(AmbiguousWriteError, "{what}", statuses=SERVER_ERRORS),
    # Permission errors omit the server's message, which may quote the request or the user.
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials are invalid or have expired; check them (the server responded {response})",
        statuses={401},
    ),
    ErrorRow(StoragePermissionError, _REQUESTER_PAYS, codes={"userProjectMissing"}),
    ErrorRow(
        StoragePermissionError,
        "{failure}: requests cannot be billed to the project; check the option 'project' and the permission to use it"
        " (the server responded {response})",
        codes={"userProjectAccessDenied", "userProjectInconsistent", "userProjectInvalid"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: a retention policy or a hold of the bucket protects the file; change it (the server responded"
        " {response})",
        codes={"objectUnderActiveHold", "retentionPolicyNotMet"},
    ),
    ErrorRow(StorageError, _NO_BUCKET, statuses={404}, text=re.compile(r"bucket does not exist", re.IGNORECASE)),
    ErrorRow(FileMissingError, MISSING, statuses={404}, operations=OF_ONE_FILE),
    ErrorRow(StorageError, _NO_BUCKET, statuses={404}),
    ErrorRow(FileExistsAlreadyError, EXISTS, statuses={412}, operations={Request.CREATE}),
    ErrorRow(StorageError, "{what}: the bucket is on another server; set the option 'endpoint'", statuses=REDIRECTS),
    ErrorRow(
        StorageError,
        "{what}: the file is too large for one request; write smaller files",
        codes={"uploadTooLarge"},
        statuses={413},
    ),
    ErrorRow(InvalidLocationError, "{what}; use a shorter name", codes={"keyTooLong"}),
    ErrorRow(StorageFullError, "{what}; raise the quota, then retry", codes={"quotaExceeded", "storageQuotaExceeded"}),
    ErrorRow(StoragePermissionError, _REQUESTER_PAYS, codes={"required"}),
    ErrorRow(
        StoragePermissionError, _REQUESTER_PAYS, statuses={400}, text=re.compile(r"requester pays", re.IGNORECASE)
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: not allowed; check the credentials and the roles on the bucket (the server responded {response})",
        statuses={403},
    ),
    ErrorRow(StorageError, "{what}; check the request and the server's log"),
)


def error_from_response(request: StorageRequest, status: int, body: bytes) -> TrinityLakeError:
    """Return the typed error for a response.

    Args:
        request: The request that failed.
        status: HTTP status.
        body: Body of the response.
    """
    return error_from_table(_ERRORS, request, *ErrorResponse.of(status, body))


def error_without_credentials(request: StorageRequest, reason: str, *, is_transient: bool) -> StorageError:
    """Return the error for a request that was not sent because there is no token.

    Args:
        request: The request.
        reason: Why there is no token, which is redacted.
        is_transient: Whether the token service could not be reached.
    """
    why = request.safe(reason)
    if is_transient:
        return UnreachableError(
            f"{request.failure}: the token service did not issue a token ({why}); check the network, then retry",
            path=request.path,
        )
    return StoragePermissionError(
        f"{request.failure}: there is no token for the credentials ({why}); check the option 'credentials', or"
        " configure application default credentials",
        path=request.path,
    )


def unreadable(request: StorageRequest) -> StorageError:
    """Return the error for a successful response that is invalid."""
    return StorageError(
        f"{request.failure}: the response is not from Google Cloud Storage; check the option 'endpoint'",
        path=request.path,
    )
