"""The errors of responses of Google Cloud Storage (S7)."""

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


class Refusal(NamedTuple):
    """What an answer with an error says: the service's own word for the reason, if there is one, and its text."""

    status: int
    reason: str | None
    message: str

    @classmethod
    def of(cls, status: int, body: bytes) -> Refusal:
        """Read the body of an answer: the service's JSON, the plain text of a download, or anything of a proxy's."""
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
    "{failure}: the requester pays for this bucket: name the project in the option 'project' (the server says"
    " {response})"
)

_ERRORS = (
    ErrorRow(
        ThrottledError,
        SLOWER,
        codes={"rateLimitExceeded", "slowDown", "usageLimits.rateLimitExceeded", "userRateLimitExceeded"},
    ),
    # The service names its reason. A proxy that names none may still hold the request.
    ErrorRow(AmbiguousWriteError, "{what}", statuses={408}),
    ErrorRow(AmbiguousWriteError, "{what}", bare_statuses={409, 429}, operations=CHANGES),
    ErrorRow(ThrottledError, SLOWER, statuses={429}),
    ErrorRow(TransientError, "{what}: another request for the same name is in progress; retry", statuses={409}),
    ErrorRow(StorageError, "{what}: the server cannot do this; use another server", statuses={501}),
    ErrorRow(AmbiguousWriteError, "{what}", statuses=SERVER_ERRORS),
    # Errors of permissions leave out the server's own text, as it may quote the request or the user.
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials are wrong or have expired (the server says {response})",
        statuses={401},
    ),
    ErrorRow(StoragePermissionError, _REQUESTER_PAYS, codes={"userProjectMissing"}),
    ErrorRow(
        StoragePermissionError,
        "{failure}: check the option 'project', and the rights to let it pay (the server says {response})",
        codes={"userProjectAccessDenied", "userProjectInconsistent", "userProjectInvalid"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: a retention policy or a hold of the bucket keeps the file (the server says {response})",
        codes={"objectUnderActiveHold", "retentionPolicyNotMet"},
    ),
    ErrorRow(StorageError, _NO_BUCKET, statuses={404}, text=re.compile(r"bucket does not exist", re.IGNORECASE)),
    ErrorRow(FileMissingError, MISSING, statuses={404}, operations=OF_ONE_FILE),
    ErrorRow(StorageError, _NO_BUCKET, statuses={404}),
    ErrorRow(FileExistsAlreadyError, EXISTS, statuses={412}, operations={Request.CREATE}),
    ErrorRow(
        StorageError, "{what}: the bucket is in another place; set the option 'endpoint' to it", statuses=REDIRECTS
    ),
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
        "{failure}: not allowed; check the credentials and the roles on the bucket (the server says {response})",
        statuses={403},
    ),
    ErrorRow(StorageError, "{what}; check the request and the server's log"),
)


def error_from_response(request: StorageRequest, status: int, body: bytes) -> TrinityLakeError:
    """Return the typed error for a response of the server."""
    return error_from_table(_ERRORS, request, *Refusal.of(status, body))


def error_without_credentials(request: StorageRequest, reason: str, *, is_passing: bool) -> StorageError:
    """Return the error for a request without a token, so nothing was sent. It is passing if nobody could be asked."""
    why = request.safe(reason)
    if is_passing:
        return UnreachableError(
            f"{request.failure}: the server of tokens gave none ({why}); check the network, then retry",
            path=request.path,
        )
    return StoragePermissionError(
        f"{request.failure}: no token for the credentials ({why}); check the option 'credentials', or set up "
        "application default credentials",
        path=request.path,
    )


def unreadable(request: StorageRequest) -> StorageError:
    """Return the error for an answer of success that is none of the service's."""
    return StorageError(
        f"{request.failure}: the answer is not one of Google Cloud Storage; check that the option 'endpoint' names "
        "such a server",
        path=request.path,
    )
