"""Options and error tables that are common to all AWS services.

Response bodies differ between servers, and exceptions differ between client libraries. Each client therefore reduces a
failure to status, error code and message, which the rows of these tables match.
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

#: Errors for requests that lack permission, by response code. The server's message is not shown.
PERMISSION_CODES = (
    ErrorRow(
        StoragePermissionError,
        "{failure}: the clocks of this machine and of the server differ too much; correct them (the server responded"
        " {response})",
        codes={"RequestTimeTooSkewed"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials have expired; get new ones (the server responded {response})",
        codes={"ExpiredToken", "ExpiredTokenException", "RequestExpired", "TokenRefreshRequired"},
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: the credentials are invalid; check access key, secret and session token (the server responded"
        " {response})",
        codes={
            "AuthFailure", "AuthorizationQueryParametersError", "IncompleteSignatureException", "InvalidAccessKeyId",
            "InvalidClientTokenId", "InvalidSignatureException", "InvalidToken", "MissingAuthenticationToken",
            "MissingAuthenticationTokenException", "MissingSecurityHeader", "SignatureDoesNotMatch",
            "UnrecognizedClientException",
        },
    ),
    ErrorRow(
        StoragePermissionError,
        "{failure}: not allowed; check the credentials and the policy of the bucket or table (the server responded"
        " {response})",
        codes={
            "AccessDenied", "AccessDeniedException", "AccessForbidden", "AccountProblem", "AllAccessDisabled",
            "CredentialsNotSupported", "InvalidPayer", "InvalidSecurity", "KMSAccessDeniedException",
            "MethodNotAllowed", "NotAuthorized", "NotSignedUp", "OptInRequired", "UnauthorizedAccess", "UserSuspended",
        },
    ),
)  # fmt: skip
#: The error for a request that lacks permission, by response status.
PERMISSION_STATUSES = ErrorRow(
    StoragePermissionError,
    "{failure}: not allowed; check the credentials, the clock and the policy of the bucket or table (the server"
    " responded {response})",
    statuses={401, 403},
)
#: Errors for requests that failed temporarily, may have taken effect, or are not supported by the server.
TRANSIENT = (
    ErrorRow(AmbiguousWriteError, "{what}", codes={"RequestTimeout"}, statuses={408}),
    # A response without a code may be from a proxy that still forwards the request.
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
    ErrorRow(TransientError, "{what}: another request for the same path is in progress; retry", statuses={409}),
    ErrorRow(
        TransientError,
        "{what}: the data was damaged in transit; retry",
        codes={"BadDigest", "IncompleteBody", "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch"},
    ),
    ErrorRow(
        StorageError,
        "{what}: the server does not support this request; use another server",
        codes={"NotImplemented"},
        statuses={501},
    ),
    ErrorRow(AmbiguousWriteError, "{what}", codes={"InternalError"}, statuses=SERVER_ERRORS),
    ErrorRow(StorageError, "{what}; check the request and the server's log"),
)  # fmt: skip


def error_without_credentials(request: StorageRequest, reason: str) -> StoragePermissionError:
    """Return the error for a request that could not be signed and was not sent.

    Args:
        request: The request.
        reason: Message of the client library, which is redacted.
    """
    return StoragePermissionError(
        f"{request.failure}: {request.safe(reason)}; set the options 'access_key_id' and 'secret_access_key', "
        "or configure AWS credentials",
        path=request.path,
    )


def is_without_credentials(error: BaseException) -> bool:
    """Whether an exception of botocore means that a request could not be signed and was not sent."""
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


#: Environment variable with the endpoint of all services. A service-specific variable takes precedence.
ENDPOINT_VARIABLE = "AWS_ENDPOINT_URL"
#: Environment variables that determine the server of a root and the user, unless options specify them.
AWS_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID", "AWS_CONFIG_FILE", "AWS_DEFAULT_PROFILE", "AWS_DEFAULT_REGION", ENDPOINT_VARIABLE,
    "AWS_PROFILE", "AWS_REGION", "AWS_ROLE_ARN", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


#: Default paths of AWS's configuration files, by the variable that overrides the path.
_FILES = {"AWS_CONFIG_FILE": "~/.aws/config", "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials"}
#: Variables that a client reads when it is created: credentials, endpoints, proxies and certificates.
_CLIENT_VARIABLES = re.compile(r"(?i)AWS_.*|.*_PROXY|HOME|.*_CA_BUNDLE|SSL_CERT_(?:FILE|DIR)|BOTO_CONFIG")

#: Regions that botocore accepts. For any other value it raises an error that repeats the value.
_REGION = re.compile(r"(?![0-9]+\Z)(?!-)[A-Za-z0-9-]{1,63}(?<!-)")
#: The variable that botocore reads. It ignores AWS_REGION, which the other AWS clients read.
_BOTOCORE_REGION_VARIABLE = "AWS_DEFAULT_REGION"


def aws_options(service: str) -> tuple[Option, ...]:
    """Return the options that all AWS services accept.

    Args:
        service: Name of the service in variables, for example ``S3``.
    """
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
            environment=(_BOTOCORE_REGION_VARIABLE, "AWS_REGION"),
        ),
        Option("access_key_id", "ID of the access key", Kind.TOKEN, is_secret=True, environment=("AWS_ACCESS_KEY_ID",)),
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
    """Validated options. A field is None if AWS's environment variables and configuration files determine its value."""

    #: The options of the service.
    specs: ClassVar[tuple[Option, ...]]
    #: URL of the server.
    endpoint: str | None
    region: str | None
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> Self:
        """Validate options. Raise InvalidInputError, whose message contains no credentials, if they are invalid."""
        for name, required in (("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id"),
                               ("session_token", "access_key_id")):  # fmt: skip
            if options.get(name) and not options.get(required):
                raise InvalidInputError(f"storage option {name!r} requires {required!r}; set both or neither")
        settings = read_settings(cls, cls.specs, options)
        if settings.region is None and not os.environ.get(_BOTOCORE_REGION_VARIABLE):
            return replace(settings, region=os.environ.get("AWS_REGION") or None)
        return settings


def aws_environment(specs: tuple[Option, ...]) -> Callable[[str, Mapping[str, str]], dict[str, str]]:
    """Return a function that reads the options of a root that environment variables set.

    These are the region, the endpoint, and the credentials unless the root's options contain credentials.

    Args:
        specs: The options of the service.

    Returns:
        A function of the root URI and its options.
    """

    def from_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
        del root  # the same for every root
        values = {spec.name: spec.from_environment() for spec in specs if spec.environment}
        if os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "").lower() == "true":
            del values["endpoint"]
        is_complete = values["access_key_id"] and values["secret_access_key"]
        if any(map(is_secret, options)) or not is_complete:
            values = {name: value for name, value in values.items() if not is_secret(name)}
        return {name: value for name, value in values.items() if value and name not in options}

    return from_environment


def environment_of_clients() -> Hashable:
    """Return the state of the environment variables and files that an AWS client reads when it is created."""
    variables = frozenset(item for item in os.environ.items() if _CLIENT_VARIABLES.fullmatch(item[0]))
    return variables, *(_file_state(os.environ.get(name) or default) for name, default in _FILES.items())


def _file_state(path: str) -> tuple[int, int] | None:
    try:
        state = os.stat(os.path.expanduser(path))
    except OSError:  # AWS clients ignore files that they cannot read
        return None
    return state.st_mtime_ns, state.st_size
