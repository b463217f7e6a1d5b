"""Roots ``redis://host:port/db/name/`` and ``rediss://...``, and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.http.settings import TIMEOUTS
from trinitylake_ops.storage.options import Kind, Option, StorageOptions, read_settings
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: A Redis string, hence a file, has at most this many bytes (``proto-max-bulk-len``).
MAX_FILE_BYTES = 512 << 20
#: The most bytes of a path with the folders of its root. Redis would take longer keys; no storage beside it would.
MAX_PATH_BYTES = 4096
#: So many files one page of a list has, and one request deletes. Redis serves nobody else meanwhile.
MAX_FILES_PER_REQUEST = 1000
DEFAULT_PORT = 6379

#: Variables that say who asks, if the options do not.
REDIS_ENVIRONMENT = ("REDIS_PASSWORD", "REDIS_USERNAME")
_ROOT = re.compile(
    r"(?P<scheme>rediss?)://(?P<host>[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?|\[[0-9A-Fa-f:.]{2,45}\])"
    r"(:(?P<port>[1-9][0-9]{0,4}))?/(?P<db>0|[1-9][0-9]{0,4})/(?P<name>[A-Za-z0-9][A-Za-z0-9._-]{0,63})/"
)
_MAX_PORT = 65_535
#: The part of the read timeout that the server may wait for its disk or its replicas, so that its answer comes in time.
_WAIT_SHARE = 0.8

_USERNAME = Option("username", "user of the ACL, with a password", environment=("REDIS_USERNAME",))
_PASSWORD = Option(
    "password",
    "password; without a user name it is that of the user 'default'",
    pattern=re.compile(r"(?s).+"),
    form="any text",
    is_secret=True,
    environment=("REDIS_PASSWORD",),
)
_TLS_FILES = (
    Option("tls_ca_file", "file of trusted certificates, instead of the system's"),
    Option("tls_client_pem_file", "file of our certificate and its key, for servers that ask for one"),
)
#: Options of ``redis://`` and ``rediss://`` roots.
REDIS_OPTIONS = (
    _USERNAME,
    _PASSWORD,
    Option(
        "durability",
        "what makes an acknowledged write durable: the server's own setting, a wait for its disk, or the assurance of"
        " the operator",
        Kind.CHOICE,
        default="always",
        choices=("always", "waitaof", "everysec", "assured"),
    ),
    Option("volatile", "accept a server that may lose all files", Kind.FLAG, default=False),
    Option("wait_replicas", "how many replicas confirm each create and write", Kind.INTEGER, default=0, maximum=1000),
    Option("cluster", "the host of the root is any node of a cluster", Kind.FLAG, default=False),
    *TIMEOUTS,
    *_TLS_FILES,
)


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """Where a root is: a server, a database, and the name that all keys of the root bear.

    ``name`` is the first segment of the path, as a bucket is on S3. It is the hash tag of all keys, so a cluster keeps
    all of it on one node. ``folder`` is the rest of the path; it is empty or ends with ``/``. Roots with one name show
    the same files.
    """

    root: str
    is_tls: bool
    host: str
    port: int
    database: int
    name: str
    folder: str

    @classmethod
    def of(cls, root: str) -> RedisLocation:
        """Split a normalized root URI.

        Raises InvalidLocationError for another form. The message does not repeat it, as it may hold credentials.
        """
        match = _ROOT.match(root)
        port = int((match and match["port"]) or DEFAULT_PORT)
        if match is None or port > _MAX_PORT:
            raise InvalidLocationError(
                "a root on Redis has the form redis://HOST:PORT/DB/NAME/, or rediss:// by TLS; NAME has 1 to 64"
                " letters, digits, '.', '_' or '-', and folders may follow; '?prefix=' is not known, credentials are"
                " storage options"
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
        """Host and port as messages show them."""
        return f"{self.host}:{self.port}"

    @property
    def index_key(self) -> bytes:
        """Key of the sorted set with all files of the name."""
        return b"{%b}" % self.name.encode()

    def member_path(self, path: str) -> bytes:
        """Return how the index and the key of its content spell a path.

        Raises InvalidLocationError for a path that no storage accepts or that is too long.
        """
        check_path(path)
        return self._spelled(path)

    def member_prefix(self, prefix: str) -> bytes:
        """Return the start of all spellings below a path prefix. Raises InvalidLocationError as ``member_path``."""
        check_prefix(prefix)
        return self._spelled(prefix)

    def content_key(self, member_path: bytes) -> bytes:
        """Return the key of a file's content. The index has no ``/``, so no content has its key."""
        return b"%b/%b" % (self.index_key, member_path)

    def _spelled(self, path: str) -> bytes:
        spelled = self.folder + path
        _check_length(spelled, path)
        return spelled.encode()


@dataclass(frozen=True, slots=True)
class RedisSettings:
    """The checked options of a root."""

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
        """Check the options. Credentials that are not given come from the environment.

        Raises InvalidInputError, which repeats no credentials.
        """
        username, password = _credentials(options)
        settings = read_settings(cls, REDIS_OPTIONS, options, username=username, password=password)
        if settings.volatile and "durability" in options:
            raise InvalidInputError(
                "storage option 'volatile=true' says that files may be lost; leave it out, or leave out 'durability'"
            )
        if settings.cluster and location.database != 0:
            raise InvalidInputError("storage option 'cluster' needs a root in database 0: a cluster has no other")
        for option in _TLS_FILES:
            if option.name in options and not location.is_tls:
                raise InvalidInputError(
                    f"storage option {option.name!r} is of no use without TLS: write rediss:// as scheme"
                )
        return settings

    @property
    def waits_for_disk(self) -> bool:
        """Whether each create or write waits until the server's append-only file is on its disk."""
        return self.durability == "waitaof" and not self.volatile

    @property
    def wait(self) -> tuple[str | int, ...] | None:
        """The command that follows each create and write, or None: it waits for disk or replicas."""
        wait_ms = max(1, int(self.read_timeout_seconds * 1000 * _WAIT_SHARE))
        if self.waits_for_disk:
            return ("WAITAOF", 1, self.wait_replicas, wait_ms)
        return ("WAIT", self.wait_replicas, wait_ms) if self.wait_replicas else None


def _credentials(options: StorageOptions) -> tuple[str | None, str | None]:
    """Return user and password. They belong together: what one place gives is not mixed with the other."""
    if "username" in options or "password" in options:
        username, password = options.get("username"), options.get("password")
    else:
        username, password = _USERNAME.from_environment(), _PASSWORD.from_environment()
    if username and not password:
        raise InvalidInputError("a user name for Redis is of no use without a password; give both or neither")
    return username or None, password or None


def redis_of_environment(root: str, options: Mapping[str, str]) -> dict[str, str]:
    """Return user and password that the environment gives to a root whose options have neither."""
    del root  # the same for every root
    if "username" in options or "password" in options:
        return {}
    found = {option.name: option.from_environment() for option in (_USERNAME, _PASSWORD)}
    return {name: value for name, value in found.items() if value} if found["password"] else {}


def _check_length(spelled: str, shown: str) -> None:
    n_bytes = len(spelled.encode())
    if n_bytes > MAX_PATH_BYTES:
        raise InvalidLocationError(
            f"the path {shown[:80]!r}... would have {n_bytes} bytes with the folders of its root, and at most "
            f"{MAX_PATH_BYTES} are stored: use a shorter name"
        )
