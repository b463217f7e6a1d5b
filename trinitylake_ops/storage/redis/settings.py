"""Roots ``redis://host:port/db/name/`` and ``rediss://...``, and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import TIMEOUTS
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, read_settings
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Maximum size of a Redis value (``proto-max-bulk-len``).
MAX_FILE_BYTES = 512 << 20
#: Maximum size in UTF-8 of a path, including the folders of its root. Redis itself allows longer keys.
MAX_PATH_BYTES = 4096
#: Maximum number of files on a listing page and in a bulk delete, during which Redis serves no other client.
MAX_FILES_PER_REQUEST = 1000
DEFAULT_PORT = 6379

#: Environment variables that determine the user, unless options specify the user.
REDIS_ENVIRONMENT = ("REDIS_PASSWORD", "REDIS_USERNAME")
_ROOT = re.compile(
    r"(?P<scheme>rediss?)://(?P<host>[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(:(?P<port>[1-9][0-9]{0,4}))?/(?P<db>0|[1-9][0-9]{0,4})/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})/"
)
_MAX_PORT = 65_535
#: Fraction of the read timeout that the server may wait for its disk or replicas, so that its response arrives in time.
_WAIT_SHARE = 0.8

_USERNAME = Option("username", "ACL user; requires a password", environment=("REDIS_USERNAME",))
_PASSWORD = Option(
    "password",
    "password of the user; without 'username', of the user 'default'",
    pattern=re.compile(r"(?s).+"),
    form="any text",
    is_secret=True,
    environment=("REDIS_PASSWORD",),
)
_TLS_FILES = (
    Option("tls_ca_file", "file with trusted certificates; default: the system's certificates"),
    Option("tls_client_pem_file", "file with a client certificate and its key, for servers that require one"),
)
#: Options of ``redis://`` and ``rediss://`` roots.
REDIS_OPTIONS = (
    _USERNAME,
    _PASSWORD,
    Option(
        "durability",
        "how acknowledged writes are made durable: by the server's setting, by a wait for its disk, or by assurance of"
        " the operator",
        Kind.CHOICE,
        default="always",
        choices=("always", "waitaof", "everysec", "assured"),
    ),
    Option("volatile", "accept a server that may lose all files", Kind.FLAG, default=False),
    Option(
        "wait_replicas", "number of replicas that confirm each create and write", Kind.INTEGER, default=0, maximum=1000
    ),
    Option("cluster", "the server is a cluster; the root contains any of its nodes", Kind.FLAG, default=False),
    *TIMEOUTS,
    *_TLS_FILES,
)


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """Server, database and keys of a root."""

    root: str
    is_tls: bool
    host: str
    port: int
    database: int
    #: First segment of the path, like a bucket on S3. Roots with the same name share their files. It is the hash tag of
    #: all keys, so that a cluster stores them on one node.
    name: str
    #: Rest of the path: empty, or ends with ``/``.
    folder: str

    @classmethod
    def of(cls, root: str) -> RedisLocation:
        """Parse a normalized root URI.

        Raise InvalidLocationError if it is invalid. The message does not repeat the root, which may contain
        credentials.
        """
        match = _ROOT.match(root)
        port = int((match and match["port"]) or DEFAULT_PORT)
        if match is None or port > _MAX_PORT:
            raise InvalidLocationError(
                "invalid Redis root: it must have the form redis://HOST:PORT/DB/NAME/, or rediss:// for TLS, where NAME"
                " has 1 to 64 letters, digits, '.', '_' and '-', and folders may follow; '?prefix=' is not supported;"
                " set credentials by storage options"
            )
        _, path = split_root(root, match["scheme"])
        folder = path.removeprefix(f"/{match['db']}/{match['name']}/")
        _check_length(folder, root)
        return cls(
            root=root,
            is_tls=match["scheme"] == "rediss",
            host=match["host"].strip("[]"),
            port=port,
            database=int(match["db"]),
            name=match["name"],
            folder=folder,
        )

    @property
    def address(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"

    @property
    def index_key(self) -> bytes:
        """Key of the index: the sorted set of all files."""
        return b"{%b}" % self.name.encode()

    def member_path(self, path: str) -> bytes:
        """Return a path including the folder of the root. Raise InvalidLocationError if it is invalid or too long."""
        check_path(path)
        return self._in_folder(path)

    def member_prefix(self, prefix: str) -> bytes:
        """Return a prefix including the folder of the root. Raise InvalidLocationError if it is invalid or too long."""
        check_prefix(prefix)
        return self._in_folder(prefix)

    def content_key(self, member_path: bytes) -> bytes:
        """Return the key of a file's content. It contains a ``/``, which the key of the index does not."""
        return b"%b/%b" % (self.index_key, member_path)

    def _in_folder(self, path: str) -> bytes:
        member_path = self.folder + path
        _check_length(member_path, path)
        return member_path.encode()


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """Validated options."""

    username: str | None
    password: str | None
    volatile: bool
    durability: str
    wait_replicas: int
    cluster: bool
    connect_timeout_seconds: float
    read_timeout_seconds: float
    tls_ca_file: str | None
    tls_client_pem_file: str | None

    @classmethod
    def of(cls, options: StorageOptions, location: RedisLocation) -> RedisSettings:
        """Validate options. Credentials default to environment variables.

        Args:
            options: Options of the root.
            location: Parsed root.

        Raises:
            InvalidInputError: An option is invalid. The message contains no credentials.
        """
        username, password = _credentials(options)
        settings = read_settings(cls, REDIS_OPTIONS, options, username=username, password=password)
        if settings.volatile and "durability" in options:
            raise InvalidInputError(
                "storage options 'volatile' and 'durability' exclude each other; remove one of them"
            )
        if settings.cluster and location.database != 0:
            raise InvalidInputError("storage option 'cluster' requires a root in database 0, the only one of a cluster")
        for option in _TLS_FILES:
            if option.name in options and not location.is_tls:
                raise InvalidInputError(f"storage option {option.name!r} requires TLS; use the scheme rediss://")
        return settings

    @property
    def waits_for_disk(self) -> bool:
        """Whether each create and write waits until the server's append-only file is on its disk."""
        return self.durability == "waitaof" and not self.volatile

    @property
    def wait(self) -> tuple[str | int, ...] | None:
        """The command that waits for the disk or replicas after each create and write, or None if there is no wait."""
        wait_ms = max(1, int(self.read_timeout_seconds * 1000 * _WAIT_SHARE))
        if self.waits_for_disk:
            return ("WAITAOF", 1, self.wait_replicas, wait_ms)
        return ("WAIT", self.wait_replicas, wait_ms) if self.wait_replicas else None


def _credentials(options: StorageOptions) -> tuple[str | None, str | None]:
    """Return the user and password, both from options or both from environment variables."""
    if "username" in options or "password" in options:
        username, password = options.get("username"), options.get("password")
    else:
        username, password = _USERNAME.from_environment(), _PASSWORD.from_environment()
    if username and not password:
        raise InvalidInputError("a user name for Redis requires a password; set both or neither")
    return username or None, password or None


def redis_of_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a root that environment variables set: user and password, unless options set either.

    Args:
        root: Normalized root URI.
        options: Options of the root.
    """
    del root  # the same for every root
    if "username" in options or "password" in options:
        return {}
    values = {option.name: option.from_environment() for option in (_USERNAME, _PASSWORD)}
    return {name: value for name, value in values.items() if value} if values["password"] else {}


def _check_length(member_path: str, label: str) -> None:
    n_bytes = len(member_path.encode())
    if n_bytes > MAX_PATH_BYTES:
        raise InvalidLocationError(
            f"{label[:80]!r}... is too long: with the folders of the root it has {n_bytes} bytes, more than the limit"
            f" of {MAX_PATH_BYTES} bytes; use a shorter name"
        )
