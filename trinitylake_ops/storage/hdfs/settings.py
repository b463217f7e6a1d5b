"""Roots ``hdfs://namenode:port/path/`` or ``hdfs://nameservice/path/``, and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import READ_TIMEOUT
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, read_settings
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Environment variables that determine the server of a root and the user.
HDFS_ENVIRONMENT = (
    "HADOOP_CONF_DIR", "HADOOP_HOME", "HADOOP_PROXY_USER", "HADOOP_TOKEN_FILE_LOCATION", "HADOOP_USER_NAME",
    "KRB5CCNAME", "KRB5_CONFIG",
)  # fmt: skip

_HOST = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,252}[A-Za-z0-9])?"
_PORT = r"(?:6553[0-5]|655[0-2][0-9]|65[0-4][0-9]{2}|6[0-4][0-9]{3}|[1-5][0-9]{4}|[1-9][0-9]{0,3})"
_AUTHORITY = re.compile(rf"({_HOST})(?::({_PORT}))?")
_NAMENODE = rf"{_HOST}:{_PORT}"
_MAX_NAMENODES = 16
#: Number of failovers for a name service in Hadoop's configuration: enough for three NameNodes, one of them active.
_MAX_FAILOVERS = "2"


#: Options of ``hdfs://`` roots.
HDFS_OPTIONS = (
    Option(
        "namenodes",
        "NameNodes of a name service that 'HADOOP_CONF_DIR' does not describe",
        pattern=re.compile(rf"\s*{_NAMENODE}(?:\s+{_NAMENODE}){{0,{_MAX_NAMENODES - 1}}}\s*"),
        form=f"1 to {_MAX_NAMENODES} addresses HOST:PORT, separated by white space",
    ),
    Option(
        "replication",
        "number of DataNodes that store each new file; default: the server's setting",
        Kind.INTEGER,
        minimum=1,
        maximum=512,  # dfs.replication.max of Hadoop
    ),
    Option(
        "fsync",
        "wait until a file is on the disks of all its DataNodes (hsync) before it becomes visible; with 'false', until"
        " it is in their memory",
        Kind.FLAG,
        default=True,
    ),
    READ_TIMEOUT,
)


@dataclass(frozen=True, slots=True)
class HdfsLocation:
    """Server and folder of a root."""

    root: str
    #: NameNode or name service.
    host: str
    #: Port of the NameNode. None for a name service.
    port: int | None
    #: Absolute path, which begins and ends with ``/``.
    folder: str

    @classmethod
    def of(cls, root: str) -> HdfsLocation:
        """Parse a normalized root URI.

        Raise InvalidLocationError if its form is invalid or its path is reserved. The message does not repeat an
        invalid server address, which may contain credentials.
        """
        match = _AUTHORITY.fullmatch(root.removeprefix("hdfs://").partition("/")[0])
        if not match or not root.startswith("hdfs://"):
            raise InvalidLocationError(
                "invalid HDFS root: it must have the form hdfs://NAMENODE:PORT/PATH/ or hdfs://NAMESERVICE/PATH/; set"
                " the user by the variable HADOOP_USER_NAME or by Kerberos"
            )
        _, folder = split_root(root, "hdfs")
        if folder.startswith("/.reserved/"):
            raise InvalidLocationError("invalid HDFS root: the folder /.reserved is reserved by HDFS; use another root")
        _check_names(folder, root)
        return cls(root, match[1], int(match[2]) if match[2] else None, folder)

    @property
    def url(self) -> str:
        """URL of the server, for hdfs-native."""
        return f"hdfs://{self.host}" + (f":{self.port}" if self.port else "")

    def absolute(self, path: str) -> str:
        """Return the absolute path of a file. Raise InvalidLocationError if the path is invalid."""
        check_path(path)
        _check_names(path, path)
        return self.folder + path

    def check_prefix(self, prefix: str) -> None:
        """Raise InvalidLocationError if a prefix is invalid."""
        check_prefix(prefix)
        _check_names(prefix, prefix)

    def absolute_folder(self, path: str) -> str:
        """Return the absolute path of a folder. ``path`` ends with ``/``, or is empty for the root."""
        return (self.folder + path).rstrip("/") or "/"


@dataclass(frozen=True, slots=True)
class HdfsSettings:
    """Validated options."""

    fsync: bool
    namenodes: tuple[str, ...]
    #: Replication factor. None selects the server's default.
    replication: int | None
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions, location: HdfsLocation) -> HdfsSettings:
        """Validate options. Raise InvalidInputError if they are invalid.

        Args:
            options: Options of the root.
            location: Parsed root.
        """
        if "namenodes" in options and location.port is not None:
            raise InvalidInputError(
                "storage option 'namenodes' requires a root on a name service, hdfs://NAMESERVICE/PATH/, but this root"
                " has a port; remove one of them"
            )
        return read_settings(cls, HDFS_OPTIONS, options, namenodes=tuple(options.get("namenodes", "").split()))

    def configuration(self, location: HdfsLocation) -> Mapping[str, str]:
        """Return the configuration of hdfs-native, which takes precedence over Hadoop's files.

        Each NameNode is tried once, because RetryStorage repeats requests that are safe to repeat.
        """
        service = location.host
        config = {
            "dfs.client.failover.sleep.base.millis": "10",
            "dfs.client.failover.sleep.max.millis": "100",
            # If there is no replacement for a failed DataNode, continue without it. The NameNode restores replicas
            # later.
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
            config.setdefault("dfs.client.failover.max.attempts", _MAX_FAILOVERS)
        return config


def _check_names(path: str, label: str) -> None:
    """Raise InvalidLocationError if HDFS does not support a path."""
    if ":" in path:
        raise InvalidLocationError(f"{label!r} contains ':', which HDFS does not allow; use another name", path=label)
    if ".snapshot" in path.split("/"):
        raise InvalidLocationError(
            f"{label!r} contains '.snapshot', which is reserved by HDFS; use another name", path=label
        )
