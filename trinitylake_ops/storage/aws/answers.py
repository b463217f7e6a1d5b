"""What the answers of all services of AWS mean, by their status and their own words (S7). This module is pure.

Servers give the same failure different bodies, and client libraries give it different exceptions. So a client reduces a
failure to status, error code and message. A service asks here about what it has in common with others.
"""

from __future__ import annotations

from trinitylake_ops.errors import StorageError, StoragePermissionError, ThrottledError, TransientError
from trinitylake_ops.storage.remote.requests import StorageRequest

_NOT_ALLOWED = {
    "AccessDenied", "AccessForbidden", "AccountProblem", "AllAccessDisabled", "CredentialsNotSupported", "InvalidPayer",
    "InvalidSecurity", "MethodNotAllowed", "NotSignedUp", "UnauthorizedAccess", "UserSuspended",
}  # fmt: skip
_WRONG_CREDENTIALS = {
    "AuthFailure", "AuthorizationQueryParametersError", "InvalidAccessKeyId", "InvalidClientTokenId", "InvalidToken",
    "MissingAuthenticationToken", "MissingSecurityHeader", "SignatureDoesNotMatch", "UnrecognizedClientException",
}  # fmt: skip
_EXPIRED_CREDENTIALS = {"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"}
_SLOWER = {
    "BandwidthLimitExceeded", "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable", "SlowDown",
    "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests",
    "TooManyRequestsException",
}  # fmt: skip
_DAMAGED_ON_THE_WAY = {"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"}
_LOST = {"RequestTimeout"}


def error_without_credentials(request: StorageRequest, reason: str) -> StoragePermissionError:
    """Return the error for a request that could not be signed; nothing was sent."""
    return StoragePermissionError(
        f"{request.failure}: {request.safe(reason)}; give the options 'access_key_id' and 'secret_access_key', "
        "or set up AWS credentials",
        path=request.path,
    )


def about_credentials(
    request: StorageRequest, status: int | None, code: str | None, place: str
) -> StoragePermissionError | None:
    """Return the error for a refusal of who asks. ``place`` is what has a policy, such as a bucket."""
    # The server's own words are left out, as they may quote the request, its key id or its signature.
    if code == "RequestTimeTooSkewed":
        advice = "the clocks of this machine and of the server differ too much; set them right"
    elif code in _EXPIRED_CREDENTIALS:
        advice = "the credentials have expired; get new ones"
    elif code in _WRONG_CREDENTIALS:
        advice = "the credentials are wrong; check access key, secret and session token"
    elif code in _NOT_ALLOWED:
        advice = f"not allowed; check the credentials and the policy of the {place}"
    elif status in (401, 403):
        advice = f"not allowed; check the credentials, the clock and the policy of the {place}"
    else:
        return None
    answer = request.answered(status, code)
    return StoragePermissionError(f"{request.failure}: {advice} (the server says {answer})", path=request.path)


def about_the_moment(request: StorageRequest, what: str, status: int | None, code: str | None) -> StorageError | None:
    """Return the error for what failed in passing, or may have had its effect. ``what`` begins its message."""
    if code in _LOST or status == 408:
        return request.lost(what)
    if code is None and status in (409, 429) and request.operation.changes_files:
        # A service names its reason. A proxy that names none may still hold the request.
        return request.lost(what)
    if status == 429 or code in _SLOWER:
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if status == 409:
        return TransientError(f"{what}: another request for the same name is under way; retry", path=request.path)
    if code in _DAMAGED_ON_THE_WAY:
        return TransientError(f"{what}: the data was damaged on its way; retry", path=request.path)
    if status == 501 or code == "NotImplemented":
        return StorageError(f"{what}: the server cannot do this; use another server", path=request.path)
    if (status is not None and status >= 500) or code == "InternalError":
        return request.lost(what)
    return None
