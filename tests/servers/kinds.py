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
from tests.servers.hdfs import start_hdfs, started_hdfs
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
    """How to start a server, and how to build its object from kind, endpoint and folder.

    ``start`` returns the endpoint once the server has the shared resources of tests, such as a bucket. It raises
    ServerStartError.
    """

    start: Callable[[Path, Daemons], str]
    server: Callable[[str, str, Path], Server]
    #: Whether it needs the packages of deploy/debian-packages.txt.
    is_of_debian: bool = False
    #: Whether a child that was forked after a root was used can use the server.
    survives_forks: bool = True


KINDS: dict[str, Kind] = {
    "azurite": Kind(start_azurite, AzureServer, is_of_debian=True),
    "dynalite": Kind(start_dynalite, DynamoDBServer, is_of_debian=True),
    "fake_gcs": Kind(start_fake_gcs, GcsServer),
    "hdfs": Kind(start_hdfs, started_hdfs, is_of_debian=True, survives_forks=False),
    "moto": Kind(start_moto, S3Server),
    "radosgw": Kind(start_radosgw, S3Server, is_of_debian=True),
    "redis_server": Kind(redis.start_kept("redis"), redis.kept("redis"), is_of_debian=True),
    "valkey_server": Kind(redis.start_kept("valkey"), redis.kept("valkey")),
}
