"""Endpoint and credentials of the test servers of AWS services."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

SECRET_ACCESS_KEY = "tests-secret-key"
REGION = "us-east-1"


@dataclass(frozen=True)
class AwsServer:
    """Endpoint and credentials of a server, and the folder with its logs."""

    kind: str
    endpoint: str
    folder: Path
    access_key_id: str = "tests-access-key"
    secret_access_key: str = SECRET_ACCESS_KEY
    region: str = REGION

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options for roots on this server."""
        return {
            "endpoint": self.endpoint,
            "region": self.region,
            "access_key_id": self.access_key_id,
            "secret_access_key": self.secret_access_key,
        }

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which roots on this server can be opened without options."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": self.region,
            "AWS_ACCESS_KEY_ID": self.access_key_id,
            "AWS_SECRET_ACCESS_KEY": self.secret_access_key,
        }
