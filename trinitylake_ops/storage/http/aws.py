"""Options, and errors in responses, that services of AWS share.

Servers give the same failure different bodies, and client libraries give it different exceptions. So a client reduces a
failure to status, error code and message. A service asks here about what it has in common with others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import (
    InvalidInputError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.storage.http.requests import StorageRequest
from trinitylake_ops.storage.http.settings import check_endpoint, check_filled, connect_timeout_of, read_timeout_of
from trinitylake_ops.storage.options import StorageOptions, is_secret

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


def credentials_error(
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
    response = request.described(status, code)
    return StoragePermissionError(f"{request.failure}: {advice} (the server says {response})", path=request.path)


def transient_error(request: StorageRequest, what: str, status: int | None, code: str | None) -> StorageError | None:
    """Return the error for what failed in passing, or may have had its effect. ``what`` begins its message."""
    if code in _LOST or status == 408:
        return request.ambiguous_error(what)
    if code is None and status in (409, 429) and request.operation.changes_files:
        # A service names its reason. A proxy that names none may still hold the request.
        return request.ambiguous_error(what)
    if status == 429 or code in _SLOWER:
        return ThrottledError(f"{what}; retry at a slower pace", path=request.path)
    if status == 409:
        return TransientError(f"{what}: another request for the same name is under way; retry", path=request.path)
    if code in _DAMAGED_ON_THE_WAY:
        return TransientError(f"{what}: the data was damaged on its way; retry", path=request.path)
    if status == 501 or code == "NotImplemented":
        return StorageError(f"{what}: the server cannot do this; use another server", path=request.path)
    if (status is not None and status >= 500) or code == "InternalError":
        return request.ambiguous_error(what)
    return None


#: Credentials and places that are not given come from AWS's environment.
AWS_OPTIONS = frozenset(
    {
        "access_key_id", "connect_timeout_seconds", "endpoint", "read_timeout_seconds", "region", "secret_access_key",
        "session_token",
    }
)  # fmt: skip
#: The variable with the address of all services. That of a single service comes before it.
ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL"
#: Variables that decide which server a root is on, and which user asks, if the options do not.
AWS_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID", "AWS_CONFIG_FILE", "AWS_DEFAULT_PROFILE", "AWS_DEFAULT_REGION", ENDPOINT_VARIABLE,
    "AWS_PROFILE", "AWS_REGION", "AWS_ROLE_ARN", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


#: Where AWS's configuration files are, by the variable that names another place.
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
#: How the variables begin or end that a client reads when it is made: who asks, where, through which proxy.
_READ_BY_CLIENTS = re.compile(r"(?i)AWS_.*|.*_PROXY|HOME|.*_CA_BUNDLE|SSL_CERT_(?:FILE|DIR)|BOTO_CONFIG")

#: What botocore takes. Its error for others shows them as they are.
_REGION = re.compile(r"(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")

_CREDENTIALS = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


@dataclass(frozen=True, slots=True)
class AwsSettings:
    """The checked options. None means that AWS's environment and configuration files decide."""

    endpoint: str | None
    region: str | None
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> AwsSettings:
        """Check the options. Raises InvalidInputError, which repeats no credentials."""
        for one, other in (("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id"),
                           ("session_token", "access_key_id")):  # fmt: skip
            if options.get(one) and not options.get(other):
                raise InvalidInputError(
                    f"storage option {one!r} is of no use without {other!r} beside it; give both or neither"
                )
        check_filled(options, ("access_key_id", "endpoint", "region", "secret_access_key", "session_token"))
        endpoint = options.get("endpoint")
        if endpoint is not None:
            check_endpoint(endpoint)
        if "region" in options and not _REGION.fullmatch(options["region"]):
            raise InvalidInputError("storage option 'region' must be a name of letters, digits and '-', like us-east-1")
        region = options.get("region") or _region()
        return AwsSettings(endpoint, region, connect_timeout_of(options), read_timeout_of(options))


def aws_environment(service: str) -> Callable[[str, Mapping[str, str]], dict[str, str]]:
    """Return a function of a root of a service and of its options, which says what the environment gives to it.

    These are credentials where the options have none, the region, and the endpoint.
    """

    def given(root: str, options: Mapping[str, str]) -> dict[str, str]:
        del root  # the same for every root
        endpoint = os.environ.get(f"{ENDPOINT_VARIABLE}_{service}") or os.environ.get(ENDPOINT_VARIABLE)
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            endpoint = None
        region = os.environ.get("AWS_DEFAULT_REGION") or _region()
        found = {**_credentials(options), "endpoint": endpoint, "region": region}
        return {name: value for name, value in found.items() if value and name not in options}

    return given


def environment_of_clients() -> Hashable:
    """Return what a client of AWS reads from its environment when it is made, to compare it with later."""
    variables = frozenset(item for item in os.environ.items() if _READ_BY_CLIENTS.fullmatch(item[0]))
    return variables, *(_state(os.environ.get(name) or place) for name, place in _FILES.items())


def _state(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(os.path.expanduser(path))
    except OSError:  # AWS's clients take a file that they cannot read for none, too
        return None
    return found.st_mtime_ns, found.st_size


def _credentials(options: Mapping[str, str]) -> dict[str, str]:
    found = {name: os.environ.get(variable, "") for name, variable in _CREDENTIALS.items()}
    has_own = any(map(is_secret, options))
    return found if not has_own and found["access_key_id"] and found["secret_access_key"] else {}


def _region() -> str | None:
    """Return the region by the variable that botocore, unlike the other clients of AWS, does not look at."""
    return None if os.environ.get("AWS_DEFAULT_REGION") else os.environ.get("AWS_REGION") or None
