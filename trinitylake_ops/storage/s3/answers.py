"""The meaning of an S3 server's answer, or the lack of one, for the caller of a storage (S7).

This module is pure, and every S3 client uses it. Servers give the same failure different bodies, and client libraries
give it different exceptions. So a client reduces a failure to status, error code and message, or to the kind of a
:class:`TransportFailure`. It asks here for the typed error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

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


class TransportFailure(Enum):
    """Why there is no answer at all."""

    NOT_CONNECTED = "no connection"  # refused, unknown host, time-out while connecting: nothing was sent
    NOT_TRUSTED = "no TLS connection"  # the handshake failed: nothing was sent
    NO_ANSWER = "no answer"  # lost, cut short, unreadable, or too late: the server may have done its work


@dataclass(frozen=True, slots=True)
class S3Request:
    """One request. ``path`` is relative to ``root``, a prefix for LIST. ``options`` know what to hide."""

    operation: Request
    path: str
    root: str
    options: StorageOptions

    @property
    def bucket(self) -> str:
        """Name of the bucket in the root URI."""
        return self.root.removeprefix("s3://").partition("/")[0]

    @property
    def failure(self) -> str:
        """The first half of every message: what could not be done, and where."""
        if self.operation is Request.CLOCK:
            return f"cannot {self.operation.value} {self.root}"
        return f"cannot {self.operation.value} {self.path!r} under {self.root}"


_NOT_ALLOWED = {
    "AccessDenied", "AccessForbidden", "AccountProblem", "AllAccessDisabled", "CredentialsNotSupported", "InvalidPayer",
    "InvalidSecurity", "MethodNotAllowed", "NotSignedUp", "UnauthorizedAccess", "UserSuspended",
}  # fmt: skip
_WRONG_CREDENTIALS = {
    "AuthFailure", "AuthorizationQueryParametersError", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken",
    "MissingAuthenticationToken", "MissingSecurityHeader", "SignatureDoesNotMatch", "UnrecognizedClientException",
}  # fmt: skip
_EXPIRED_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_WRONG_PLACE = {
    "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "IllegalLocationConstraintException",
    "IncorrectEndpoint", "InvalidRegionName", "PermanentRedirect", "Redirect", "TemporaryRedirect",
}  # fmt: skip
_SLOWER = {
    "BandwidthLimitExceeded", "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable", "SlowDown",
    "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests",
    "TooManyRequestsException",
}  # fmt: skip
_NAMELESS = {"InvalidBucketName", "InvalidObjectName", "InvalidURI", "KeyTooLong", "KeyTooLongError"}
_FULL = {
    "InsufficientCapacity", "InsufficientStorage", "InsufficientStorageSpace", "NotEnoughDiskSpace", "QuotaExceeded",
    "StorageFull", "XMinioStorageFull",
}  # fmt: skip
_TOO_LARGE = {"EntityTooLarge", "MaxMessageLengthExceeded"}
_DAMAGED_ON_THE_WAY = {"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_LOST = {"RequestTimeout"}

_LOOKS_SECRET = re.compile(
    r"(?i)\b(?:AKIA|ASIA)[A-Z0-9]{8,}\b"
    r"|\b(?:sig|signature|credential|x-amz-[a-z-]+|security-?token|access-?key-?id|account-?key|secret)"
    r"\s*[=:]\s*[^\s,;&]+"
)
_MAX_SHOWN_CHARACTERS = 160


def is_range_beyond_end(status: int | None, code: str | None) -> bool:
    """Whether the answer says that the file exists and the range starts at or past its end."""
    return status == 416 or code == "InvalidRange"


def error_from_answer(
    request: S3Request, status: int | None, code: str | None, message: str | None
) -> TrinityLakeError:
    """Return the typed error for an answer of the server: one line that says what to do.

    ``code`` is S3's own word (``NoSuchKey``). Where the answer has no body (HEAD), it is None or, with some client
    libraries, the bare status. ``message`` is the server's text, shown shortened, on one line and redacted. ``status``
    may be None for a file's own result in a batch.
    """
    code = None if not code or code.isdigit() else code
    what = f"{request.failure}: the server says {shown(request, status, code, message)}"
    return (
        _about_credentials(request, status, code)
        or _about_the_place(request, what, status, code)
        or _about_the_file(request, what, status, code)
        or _about_the_moment(request, what, status, code)
        or StorageError(f"{what}; check the request and the server's log", path=request.path)
    )


def error_from_transport(request: S3Request, failure: TransportFailure, endpoint: str, reason: str) -> TrinityLakeError:
    """Return the typed error for a request that got no answer. ``endpoint`` and ``reason`` are shown redacted."""
    where = f"{request.failure} at {safe(request, endpoint)}"
    why = safe(request, reason)
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
    return lost(request, f"{where}: no complete answer ({why})")


def error_without_credentials(request: S3Request, reason: str) -> StoragePermissionError:
    """Return the error for a request that could not be signed; nothing was sent."""
    return StoragePermissionError(
        f"{request.failure}: {safe(request, reason)}; give the options 'access_key_id' and 'secret_access_key', "
        "or set up AWS credentials",
        path=request.path,
    )


def _about_credentials(request: S3Request, status: int | None, code: str | None) -> TrinityLakeError | None:
    # The server's own words are left out, as they may quote the request, its key id or its signature.
    if code == "RequestTimeTooSkewed":
        advice = "the clocks of this machine and of the server differ too much; set them right"
    elif code in _EXPIRED_CREDENTIALS:
        advice = "the credentials have expired; get new ones"
    elif code in _WRONG_CREDENTIALS:
        advice = "the credentials are wrong; check access key, secret and session token"
    elif code in _NOT_ALLOWED:
        advice = "not allowed; check the credentials and the policy of the bucket"
    elif status in (401, 403) and code not in _FULL | _WRONG_PLACE | {"InvalidObjectState"}:
        advice = "not allowed; check the credentials, the clock and the policy of the bucket"
    else:
        return None
    answer = shown(request, status, code, None)
    return StoragePermissionError(f"{request.failure}: {advice} (the server says {answer})", path=request.path)


def _about_the_place(request: S3Request, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    whole_bucket = request.operation not in (Request.READ, Request.STAT, Request.DELETE)
    if code == "NoSuchBucket" or (status == 404 and code is None and whole_bucket):
        return StorageError(
            f"{request.failure}: the bucket {request.bucket!r} does not exist; check its name and the options "
            "'endpoint' and 'region', or create it",
            path=request.path,
        )
    if code in _WRONG_PLACE or (status is not None and 300 <= status < 400):
        return StorageError(
            f"{what}: the bucket lives elsewhere; set the option 'region' or 'endpoint' to its place", path=request.path
        )
    if status == 400 and code is None and not request.operation.changes_files:
        return StorageError(
            f"{what}; check that the credentials have not expired and that the option 'region' is right",
            path=request.path,
        )
    return None


def _about_the_file(request: S3Request, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    path = request.path
    if code == "NoSuchKey" or (status == 404 and code is None):
        return FileMissingError(f"there is no file {path!r} under {request.root}", path=path)
    if status == 412 and request.operation is Request.CREATE:
        return FileExistsAlreadyError(f"a file stands at {path!r} already; choose another name", path=path)
    if code == "InvalidObjectState":
        return StorageError(f"{what}: the file is archived; restore it to a class that can be read", path=path)
    if code in _NAMELESS:
        return InvalidLocationError(f"{what}; use a shorter or plainer name", path=path)
    if code in _TOO_LARGE or status == 413:
        return StorageError(f"{what}: the file is too large for one request; write smaller files", path=path)
    if code in _FULL or status == 507:
        return StorageFullError(f"{what}; free space or raise the quota, then retry", path=path)
    return None


def _about_the_moment(request: S3Request, what: str, status: int | None, code: str | None) -> TrinityLakeError | None:
    if code in _LOST or status == 408:
        return lost(request, what)
    if code is None and status in (409, 429) and request.operation.changes_files:
        # S3 names its reason. A proxy that names none may still hold the request.
        return lost(request, what)
    if status == 429 or code in _SLOWER:
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if status == 409:
        return TransientError(f"{what}: another request for the same name is under way; retry", path=request.path)
    if code in _DAMAGED_ON_THE_WAY:
        return TransientError(f"{what}: the data was damaged on its way; retry", path=request.path)
    if status == 501 or code == "NotImplemented":
        condition = " a create under the condition If-None-Match" if request.operation is Request.CREATE else " this"
        return StorageError(f"{what}: the server cannot do{condition}; use another S3 server", path=request.path)
    if (status is not None and status >= 500) or code == "InternalError":
        return lost(request, what)
    return None


def lost(request: S3Request, what: str) -> StorageError:
    """Return the error for a request that may have had its effect, if it has one."""
    if request.operation.changes_files:
        return AmbiguousWriteError(f"{what}; it may have taken effect: read the name to see", path=request.path)
    return TransientError(f"{what}; retry", path=request.path)


def shown(request: S3Request, status: int | None, code: str | None, message: str | None) -> str:
    """Return what the server said as messages show it, on one line and redacted."""
    answer = " ".join(part for part in (str(status) if status is not None else None, code) if part) or "no reason"
    text = safe(request, message or "")
    return f"{safe(request, answer)} ({text})" if text else safe(request, answer)


def safe(request: S3Request, text: str) -> str:
    """Return one short line without credentials and without markup."""
    text = _LOOKS_SECRET.sub("***", request.options.redact(text))
    text = re.sub(r"<[^>]*>?", " ", text)
    text = " ".join(part for part in re.split(r"[\s\x00-\x1f\x7f]+", text) if part).rstrip(".;: ")
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else f"{text[:_MAX_SHOWN_CHARACTERS]}..."
