"""The meaning of the service's answer, or the lack of one, for the caller of a storage (S7). This module is pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from trinitylake_ops.errors import (
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
from trinitylake_ops.storage.http.requests import Request, StorageRequest


@dataclass(frozen=True, slots=True)
class GcsRequest(StorageRequest):
    """One request to a bucket."""

    @property
    def bucket(self) -> str:
        """Name of the bucket in the root URI."""
        return self.root.removeprefix("gs://").partition("/")[0]


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


_SLOWER = {"rateLimitExceeded", "userRateLimitExceeded", "usageLimits.rateLimitExceeded", "slowDown"}
_FULL = {"quotaExceeded", "storageQuotaExceeded"}
_PROJECT_MISSING = {"userProjectMissing", "required"}
_NO_BUCKET = re.compile(r"bucket does not exist", re.IGNORECASE)
_REQUESTER_PAYS = re.compile(r"requester pays", re.IGNORECASE)


def error_from_response(request: GcsRequest, status: int, body: bytes) -> TrinityLakeError:
    """Return the typed error for an answer of the server: one line that says what to do.

    The server's text is shown shortened, on one line and redacted.
    """
    refusal = Refusal.of(status, body)
    what = f"{request.failure}: the server says {request.described(status, refusal.reason, refusal.message)}"
    return (
        _transient_error(request, what, refusal)
        or _permission_error(request, what, refusal)
        or _file_error(request, what, refusal)
        or StorageError(f"{what}; check the request and the server's log", path=request.path)
    )


def error_without_credentials(request: GcsRequest, reason: str, *, is_passing: bool) -> StorageError:
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


def unreadable(request: GcsRequest) -> StorageError:
    """Return the error for an answer of success that is none of the service's."""
    return StorageError(
        f"{request.failure}: the answer is not one of Google Cloud Storage; check that the option 'endpoint' names "
        "such a server",
        path=request.path,
    )


def _transient_error(request: GcsRequest, what: str, refusal: Refusal) -> TrinityLakeError | None:
    status, reason, _ = refusal
    if reason in _SLOWER or (status == 429 and (reason is not None or not request.operation.changes_files)):
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if status in (408, 429):
        return request.ambiguous_error(what)  # a proxy that names no reason may still hold the request
    if status == 409 and (reason is not None or not request.operation.changes_files):
        return TransientError(f"{what}: another request for the same name is under way; retry", path=request.path)
    if status == 409:
        return request.ambiguous_error(what)
    if status == 501:
        return StorageError(f"{what}: the server cannot do this; use another", path=request.path)
    if status >= 500:
        return request.ambiguous_error(what)
    return None


def _permission_error(request: GcsRequest, what: str, refusal: Refusal) -> TrinityLakeError | None:
    status, reason, message = refusal
    if status == 403 and reason in _FULL:
        return StorageFullError(f"{what}; raise the quota, then retry", path=request.path)
    if status == 400 and (reason in _PROJECT_MISSING or _REQUESTER_PAYS.search(message)):
        advice = "the requester pays for this bucket: name the project in the option 'project'"
    elif reason is not None and reason.startswith("userProject"):
        advice = "check the option 'project', and the rights to let it pay"
    elif status == 401:
        advice = "the credentials are wrong or have expired"
    elif reason in ("retentionPolicyNotMet", "objectUnderActiveHold"):
        advice = "a retention policy or a hold of the bucket keeps the file"
    elif status == 403:
        advice = "not allowed; check the credentials and the roles on the bucket"
    else:
        return None
    # The server's own words are left out, as they may quote the request or who sent it.
    response = request.described(status, reason)
    return StoragePermissionError(f"{request.failure}: {advice} (the server says {response})", path=request.path)


def _file_error(request: GcsRequest, what: str, refusal: Refusal) -> TrinityLakeError | None:
    status, reason, message = refusal
    path = request.path
    if status == 404:
        names_a_file = request.operation in (Request.READ, Request.STAT, Request.DELETE)
        if names_a_file and not _NO_BUCKET.search(message):
            return FileMissingError(f"there is no file {path!r} under {request.root}", path=path)
        return StorageError(
            f"{request.failure}: the bucket {request.bucket!r} does not exist; check its name and the option "
            "'endpoint', or create it",
            path=path,
        )
    if status == 412 and request.operation is Request.CREATE:
        return FileExistsAlreadyError(f"a file stands at {path!r} already; choose another name", path=path)
    if 300 <= status < 400:
        return StorageError(f"{what}: the bucket lives elsewhere; set the option 'endpoint' to its place", path=path)
    if status == 413 or reason == "uploadTooLarge":
        return StorageError(f"{what}: the file is too large for one request; write smaller files", path=path)
    if reason == "keyTooLong":
        return InvalidLocationError(f"{what}; use a shorter name", path=path)
    return None
