"""Options of every root on a service of AWS, or on a server that speaks its protocol."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.remote.settings import check_endpoint, check_filled, connect_timeout_of, read_timeout_of

#: Credentials and places that are not given come from AWS's environment.
AWS_OPTIONS = frozenset(
    {
        "access_key_id", "connect_timeout_seconds", "endpoint", "read_timeout_seconds", "region", "secret_access_key",
        "session_token",
    }
)  # fmt: skip
#: Variables that decide which server a root is on, and which user asks, if the options do not.
AWS_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID", "AWS_CONFIG_FILE", "AWS_DEFAULT_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL",
    "AWS_PROFILE", "AWS_REGION", "AWS_ROLE_ARN", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


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
        return AwsSettings(endpoint, options.get("region"), connect_timeout_of(options), read_timeout_of(options))
