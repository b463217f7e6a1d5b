"""The kinds of servers that tests start, and their common interface."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.servers import redis
from tests.servers.azurite import AzureServer, start_azurite
from tests.servers.daemons import Daemons
from tests.servers.dynalite import DynamoDBServer, start_dynalite
from tests.servers.gcs import GcsServer, start_fake_gcs
from tests.servers.hdfs import hdfs_server, start_hdfs
from tests.servers.moto import start_moto
from tests.servers.radosgw import start_radosgw
from tests.servers.s3_server import S3Server


class Server(Protocol):
    """A running server that can store lakehouses."""

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options for roots on this server."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which roots on this server can be opened without options."""

    def fresh_root(self, name: str = "lake", /) -> str:
        """Return the root URI of an unused location."""

    def delete_all(self, root: str) -> None:
        """Delete all files below a root from ``fresh_root``."""


@dataclass(frozen=True)
class Kind:
    """How to start a kind of server, and how to create its object from the kind, the endpoint and the folder.

    ``start`` returns the endpoint after it has created the resources that tests share, such as a bucket. It raises
    ServerStartError.
    """

    start: Callable[[Path, Daemons], str]
    server: Callable[[str, str, Path], Server]
    #: Whether the server needs the packages of deploy/debian-packages.txt.
    needs_debian_packages: bool = False
    #: Whether a child process can use the server if it was forked after its parent used it.
    survives_forks: bool = True


KINDS: dict[str, Kind] = {
    "azurite": Kind(start_azurite, AzureServer, needs_debian_packages=True),
    "dynalite": Kind(start_dynalite, DynamoDBServer, needs_debian_packages=True),
    "fake_gcs": Kind(start_fake_gcs, GcsServer),
    "hdfs": Kind(start_hdfs, hdfs_server, needs_debian_packages=True, survives_forks=False),
    "moto": Kind(start_moto, S3Server),
    "radosgw": Kind(start_radosgw, S3Server, needs_debian_packages=True),
    "redis_server": Kind(redis.start_shared("redis"), redis.shared("redis"), needs_debian_packages=True),
    "valkey_server": Kind(redis.start_shared("valkey"), redis.shared("valkey")),
}
