"""Roots ``hdfs://namenode:port/path/`` or ``hdfs://nameservice/path/``, and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import READ_TIMEOUT
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, read_settings
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Variables that decide which server a root is on, and which user asks.
HDFS_ENVIRONMENT = (
    "HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_PROXY_USER", "HADOOP_TOKEN_FILE_LOCATION", "HADOOP_USER_NAME",
    "KRB5CCNAME", "KRB5_CONFIG",
)  # fmt: skip

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?"
_PORT = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_AUTHORITY = re.compile(rf"({_HOST})(?::({_PORT}))?")
_NAMENODE = rf"{_HOST}:{_PORT}"
_MAX_NAMENODES = 16
#: Of a name service that Hadoop's files describe: enough for three NameNodes, of which one is active.
_MOST_FAILOVERS = "2"


#: Options of ``hdfs://`` roots.
HDFS_OPTIONS = (
    Option(
        "namenodes",
        "the NameNodes of a name service, if 'HADOOP_CONF_DIR' does not describe it",
        pattern=re.compile(rf"\s*{_NAMENODE}(?:\s+{_NAMENODE}){{0,{_MAX_NAMENODES - 1}}}\s*"),
        form=f"1 to {_MAX_NAMENODES} of HOST:PORT with white space between them",
    ),
    Option(
        "replication",
        "how many DataNodes keep each new file, instead of the server's default",
        Kind.INTEGER,
        minimum=1,
        maximum=512,  # dfs.replication.max of Hadoop
    ),
    Option(
        "fsync",
        "the bytes of a file are on the disks of all its DataNodes (hsync) before it gets its name; with 'false' they"
        " are in their memory",
        Kind.FLAG,
        default=True,
    ),
    READ_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class HdfsLocation:
    """Server and folder of a root. The folder begins and ends with ``/``."""

    root: str
    host: str
    port: int | None
    folder: str

    @classmethod
    def of(cls, root: str) -> HdfsLocation:
        """Split a normalized root URI.

        Raises InvalidLocationError for another form, and for names that HDFS keeps for itself. The message does not
        repeat what may be a credential.
        """
        found = _AUTHORITY.fullmatch(root.removeprefix("hdfs://").partition("/")[0])
        if not found or not root.startswith("hdfs://"):
            raise InvalidLocationError(
                "a root on HDFS has the form hdfs://NAMENODE:PORT/PATH/ or hdfs://NAMESERVICE/PATH/; the user comes"
                " from the variable HADOOP_USER_NAME or from Kerberos"
            )
        _, folder = split_root(root, "hdfs")
        if folder.startswith("/.reserved/"):
            raise InvalidLocationError("HDFS keeps the folder /.reserved for itself: choose another root")
        _check_names(folder, root)
        return cls(root, found[1], int(found[2]) if found[2] else None, folder)

    @property
    def url(self) -> str:
        """The server alone, as hdfs-native takes it."""
        return f"hdfs://{self.host}" + (f":{self.port}" if self.port else "")

    def absolute(self, path: str) -> str:
        """Return the absolute path of a file. Raises InvalidLocationError for a path that cannot be stored."""
        check_path(path)
        _check_names(path, path)
        return self.folder + path

    def check_prefix(self, prefix: str) -> None:
        """Refuse a prefix that no path has. Raises InvalidLocationError."""
        check_prefix(prefix)
        _check_names(prefix, prefix)

    def absolute_folder(self, path: str) -> str:
        """Return the absolute path of a folder that is given with its final ``/``, or empty for the root."""
        return (self.folder + path).rstrip("/") or "/"


@dataclass(frozen=True, slots=True)
class HdfsSettings:
    """The checked options of a root. ``replication`` None leaves it to the server."""

    fsync: bool
    namenodes: tuple[str, ...]
    replication: int | None
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions, location: HdfsLocation) -> HdfsSettings:
        """Check the options. Raises InvalidInputError."""
        if "namenodes" in options and location.port is not None:
            raise InvalidInputError(
                "storage option 'namenodes' is for a root on a name service, hdfs://NAMESERVICE/PATH/, and this"
                " root names a port: leave one of the two out"
            )
        return read_settings(cls, HDFS_OPTIONS, options, namenodes=tuple(options.get("namenodes", "").split()))

    def configuration(self, location: HdfsLocation) -> Mapping[str, str]:
        """Return what hdfs-native is told. It stands before what Hadoop's own files say.

        Each NameNode is asked once: RetryStorage repeats, and knows what may be repeated.
        """
        service = location.host
        config = {
            "dfs.client.failover.sleep.base.millis": "10",
            "dfs.client.failover.sleep.max.millis": "100",
            # Where no other DataNode is to be had, those that are left do. The NameNode makes up for it later.
            "dfs.client.block.write.replace-datanode-on-failure.best-effort": "true",
        }
        if location.port is not None:
            config["dfs.client.failover.max.attempts"] = "0"
        if self.namenodes:
            names = [f"namenode{number}" for number in range(len(self.namenodes))]
            config["dfs.client.failover.max.attempts"] = str(len(names) - 1)
            config[f"dfs.ha.namenodes.{service}"] = ",".join(names)
            for name, address in zip(names, self.namenodes, strict=True):
                config[f"dfs.namenode.rpc-address.{service}.{name}"] = address
        else:
            config.setdefault("dfs.client.failover.max.attempts", _MOST_FAILOVERS)
        return config


def _check_names(path: str, shown: str) -> None:
    """Refuse names that HDFS does not have. Raises InvalidLocationError."""
    if ":" in path:
        raise InvalidLocationError(f"{shown!r} holds a ':', which no name in HDFS has: choose another", path=shown)
    if ".snapshot" in path.split("/"):
        raise InvalidLocationError(f"{shown!r} names '.snapshot', which HDFS keeps for itself", path=shown)
