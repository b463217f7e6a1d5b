"""A user of radosgw with unique credentials, and lakehouses of that user."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.credentials.canaries import (
    ACCESS_KEY_ID,
    SECRET_ACCESS_KEY,
    WRONG_ACCESS_KEY_ID,
    WRONG_SECRET_ACCESS_KEY,
)
from tests.servers.daemons import free_port
from tests.servers.plugin import SERVER_RUN
from tests.servers.s3_server import S3Server
from trinitylake_ops.storage.options import is_secret

_USER = "canaries"


class CanaryServer:
    """radosgw as this user accesses it: a separate bucket, and valid and invalid options for it."""

    def __init__(self, server: S3Server):
        self.server = server
        self.root = f"s3://{server.make_bucket()}/lake/"

    @property
    def options(self) -> dict[str, str]:
        """Storage options without credentials."""
        return {name: value for name, value in self.server.storage_options.items() if not is_secret(name)}

    @property
    def options_with_credentials(self) -> dict[str, str]:
        return dict(self.server.storage_options)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of a process that reads its credentials from the environment."""
        return {
            "TRINITYLAKE_ROOT": self.root,
            "TRINITYLAKE_STORAGE_OPTIONS": ",".join(f"{name}={value}" for name, value in self.options.items()),
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
            "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        }

    def failing_configurations(self) -> dict[str, tuple[str, dict[str, str]]]:
        """Return the root and storage options of failing configurations by the kind of failure."""
        root, options = self.root, self.options_with_credentials
        return {
            "wrong secret": (root, {**options, "secret_access_key": WRONG_SECRET_ACCESS_KEY}),
            "wrong key": (root, {**options, "access_key_id": WRONG_ACCESS_KEY_ID}),
            "wrong bucket": ("s3://no-such-bucket-of-the-tests/lake/", options),
            "bucket of another user": (f"s3://{S3Server.bucket}/lake/", options),
            "unreachable": (root, {**options, "endpoint": f"http://127.0.0.1:{free_port()}"}),
        }


def canary_server(config: pytest.Config) -> Iterator[CanaryServer]:
    """Yield a server with an empty bucket, and delete the bucket afterwards."""
    server = config.stash[SERVER_RUN].server("radosgw")
    _make_user(server)
    canaries = CanaryServer(replace(server, access_key_id=ACCESS_KEY_ID, secret_access_key=SECRET_ACCESS_KEY))
    yield canaries
    canaries.server.drop_bucket(canaries.root.removeprefix("s3://").partition("/")[0])


def _make_user(server: S3Server) -> None:
    admin = ["radosgw-admin", "-c", str(server.folder / "ceph.conf"), "user"]
    keys = ["--access-key", ACCESS_KEY_ID, "--secret", SECRET_ACCESS_KEY]
    completed = subprocess.run(
        [*admin, "create", "--uid", _USER, "--display-name", _USER, *keys], capture_output=True, text=True, timeout=60
    )
    if completed.returncode:  # another test worker created the user
        info = subprocess.run([*admin, "info", "--uid", _USER], capture_output=True, text=True, timeout=60)
        assert ACCESS_KEY_ID in info.stdout, completed.stderr
