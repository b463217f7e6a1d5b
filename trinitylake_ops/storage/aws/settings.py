"""Options of every root on a service of AWS, or on a server that speaks its protocol."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.options import StorageOptions, is_secret
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
        return AwsSettings(endpoint, options.get("region"), connect_timeout_of(options), read_timeout_of(options))


def aws_credentials(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the credentials that the environment's variables give to a root whose options have none."""
    del root  # the same for every root
    if any(map(is_secret, options)):
        return {}
    found = {name: os.environ.get(variable, "") for name, variable in _CREDENTIALS.items()}
    if not (found["access_key_id"] and found["secret_access_key"]):
        return {}
    return {name: value for name, value in found.items() if value}
