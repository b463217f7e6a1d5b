"""Options, and errors in responses, that services of AWS share.

Servers give the same failure different bodies, and client libraries give it different exceptions. So a client reduces a
failure to status, error code and message. A service asks here about what it has in common with others.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Self

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    InvalidInputError,
    StorageError,
    StoragePermissionError,
    ThrottledError,
    TransientError,
)
from trinitylake_ops.storage.error_table import SLOWER, ErrorRow
from trinitylake_ops.storage.http.requests import CHANGES, SERVER_ERRORS, StorageRequest
from trinitylake_ops.storage.http.settings import TIMEOUTS
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, is_secret, read_settings

#: Errors of requests without valid rights, by the code of the response. The server's own text is left out.
PERMISSION_CODES = (
    ErrorRow(
        StoragePermissionError,
        "{failure}: the clocks of this machine and of the server differ too much; set them right (the server says"
        " {response})",
        codes={"RequestTimeTooSkewed"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials have expired; get new ones (the server says {response})",
        codes={"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials are wrong; check access key, secret and session token (the server says {response})",
        codes={
            "AuthFailure", "AuthorizationQueryParametersError", "IncompleteSignatureException", "InvalidAccessKeyId",
            "InvalidClientTokenId", "InvalidSignatureException", "InvalidToken", "MissingAuthenticationToken",
            "MissingAuthenticationTokenException", "MissingSecurityHeader", "SignatureDoesNotMatch",
            "UnrecognizedClientException",
        },
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: not allowed; check the credentials and the policy of the bucket or table (the server says"
        " {response})",
        codes={
            "AccessDenied", "AccessDeniedException", "AccessForbidden", "AccountProblem", "AllAccessDisabled",
            "CredentialsNotSupported", "InvalidPayer", "InvalidSecurity", "KMSAccessDeniedException",
            "MethodNotAllowed", "NotAuthorized", "NotSignedUp", "OptInRequired", "UnauthorizedAccess", "UserSuspended",
        },
    ),
)  # fmt: skip
#: The error of a request without valid rights, by the status of the response.
PERMISSION_STATUSES = ErrorRow(
    StoragePermissionError,
    "{failure}: not allowed; check the credentials, the clock and the policy of the bucket or table (the server says"
    " {response})",
    statuses={401, 403},
)
#: Errors of requests that failed temporarily or may have had their effect, and of those that the server cannot process.
TRANSIENT = (
    ErrorRow(AmbiguousWriteError, "{what}", codes={"RequestTimeout"}, statuses={408}),
    # A service names its reason. A proxy that names none may still hold the request.
    ErrorRow(AmbiguousWriteError, "{what}", bare_statuses={409, 429}, operations=CHANGES),
    ErrorRow(
        ThrottledError,
        SLOWER,
        codes={
            "BandwidthLimitExceeded", "LimitExceededException", "ProvisionedThroughputExceededException",
            "RequestLimitExceeded", "RequestThrottled", "ServiceUnavailable", "SlowDown", "SlowDownRead",
            "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests", "TooManyRequestsException",
        },
        statuses={429},
    ),
    ErrorRow(TransientError, "{what}: another request for the same name is in progress; retry", statuses={409}),
    ErrorRow(
        TransientError,
        "{what}: the data was damaged on its way; retry",
        codes={"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"},
    ),
    ErrorRow(
        StorageError,
        "{what}: the server cannot do this; use another server",
        codes={"NotImplemented"},
        statuses={501},
    ),
    ErrorRow(AmbiguousWriteError, "{what}", codes={"InternalError"}, statuses=SERVER_ERRORS),
    ErrorRow(StorageError, "{what}; check the request and the server's log"),
)  # fmt: skip


def error_without_credentials(request: StorageRequest, reason: str) -> StoragePermissionError:
    """Return the error for a request that could not be signed; nothing was sent."""
    return StoragePermissionError(
        f"{request.failure}: {request.safe(reason)}; give the options 'access_key_id' and 'secret_access_key', "
        "or set up AWS credentials",
        path=request.path,
    )


def is_without_credentials(error: BaseException) -> bool:
    """Whether an exception of botocore means that a request could not be signed, so that nothing was sent."""
    from botocore import exceptions

    return isinstance(
        error,
        (
            exceptions.CredentialRetrievalError,
            exceptions.NoCredentialsError,
            exceptions.PartialCredentialsError,
            exceptions.TokenRetrievalError,
            exceptions.UnauthorizedSSOTokenError,
        ),
    )


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

#: What botocore accepts. Its error for others shows them as they are.
_REGION = re.compile(r"(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
#: The variable that botocore reads itself. AWS_REGION is read by the other clients of AWS only.
_REGION_OF_BOTOCORE = "AWS_DEFAULT_REGION"


def aws_options(service: str) -> tuple[Option, ...]:
    """Return the options that each service of AWS accepts, by the service's name in variables such as ``S3``."""
    return (
        Option(
            "endpoint",
            "URL of another server",
            Kind.URL,
            environment=(f"{ENDPOINT_VARIABLE}_{service}", ENDPOINT_VARIABLE),
        ),
        Option(
            "region",
            "region of the bucket or table",
            pattern=_REGION,
            form="a name of letters, digits and '-', such as us-east-1",
            environment=(_REGION_OF_BOTOCORE, "AWS_REGION"),
        ),
        Option("access_key_id", "id of the access key", Kind.TOKEN, is_secret=True, environment=("AWS_ACCESS_KEY_ID",)),
        Option(
            "secret_access_key",
            "secret of the access key",
            Kind.TOKEN,
            is_secret=True,
            environment=("AWS_SECRET_ACCESS_KEY",),
        ),
        Option(
            "session_token",
            "token of temporary credentials",
            Kind.TOKEN,
            is_secret=True,
            environment=("AWS_SESSION_TOKEN",),
        ),
        *TIMEOUTS,
    )


@dataclass(frozen=True, slots=True)
class AwsSettings:
    """The checked options. None means that AWS's environment and configuration files decide."""

    #: The options of the service.
    specs: ClassVar[tuple[Option, ...]]
    endpoint: str | None
    region: str | None
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> Self:
        """Check the options. Raises InvalidInputError, which repeats no credentials."""
        for name, needed in (("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id"),
                             ("session_token", "access_key_id")):  # fmt: skip
            if options.get(name) and not options.get(needed):
                raise InvalidInputError(
                    f"storage option {name!r} is of no use without {needed!r}; give both or neither"
                )
        settings = read_settings(cls, cls.specs, options)
        if settings.region is None and not os.environ.get(_REGION_OF_BOTOCORE):
            return replace(settings, region=os.environ.get("AWS_REGION") or None)
        return settings


def aws_environment(specs: tuple[Option, ...]) -> Callable[[str, Mapping[str, str]], dict[str, str]]:
    """Return a function of a root and its options that returns what the environment gives to the root.

    These are credentials where the options have none, the region, and the endpoint. ``specs`` are the options of the
    service.
    """

    def given(root: str, options: Mapping[str, str]) -> dict[str, str]:
        del root  # the same for every root
        found = {spec.name: spec.from_environment() for spec in specs if spec.environment}
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            del found["endpoint"]
        is_complete = found["access_key_id"] and found["secret_access_key"]
        if any(map(is_secret, options)) or not is_complete:
            found = {name: value for name, value in found.items() if not is_secret(name)}
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
