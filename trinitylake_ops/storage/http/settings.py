"""Options of storages on servers, and locations of roots in buckets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.options import Kind, Option
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Slowest transfer rate that does not time out. The transfer time at this rate is added to the timeouts.
MIN_BYTES_PER_SECOND = 128 * 1024
#: Larger than the thread pool that storages share, so that requests never wait for a connection.
MAX_CONNECTIONS = 128

_MIN_TIMEOUT_SECONDS = 0.001
_MAX_TIMEOUT_SECONDS = 86_400


class Timeouts(Protocol):
    """Settings with timeouts."""

    @property
    def connect_timeout_seconds(self) -> float:
        """Maximum time to establish a connection."""

    @property
    def read_timeout_seconds(self) -> float:
        """Maximum time without a byte of the response."""


def max_seconds(timeouts: Timeouts, n_bytes: int = 0) -> float:
    """Return the maximum total time of a request or a response, in seconds.

    The timeouts of a client detect a server that is silent, but not a server that sends or reads very slowly.

    Args:
        timeouts: The timeouts of the client.
        n_bytes: Size of the body.
    """
    return timeouts.connect_timeout_seconds + 2 * timeouts.read_timeout_seconds + n_bytes / MIN_BYTES_PER_SECOND


CONNECT_TIMEOUT = Option(
    "connect_timeout_seconds",
    "maximum time to connect before the request is retried, in seconds",
    Kind.NUMBER,
    default=5.0,
    minimum=_MIN_TIMEOUT_SECONDS,
    maximum=_MAX_TIMEOUT_SECONDS,
)
READ_TIMEOUT = Option(
    "read_timeout_seconds",
    "maximum time without a byte of the response before the request is retried, in seconds",
    Kind.NUMBER,
    default=30.0,
    minimum=_MIN_TIMEOUT_SECONDS,
    maximum=_MAX_TIMEOUT_SECONDS,
)
TIMEOUTS = (CONNECT_TIMEOUT, READ_TIMEOUT)


def is_loopback(host: str) -> bool:
    """Whether an address is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


#: Maximum size in UTF-8 of a key on S3 and Google Cloud Storage, including the prefix of the root.
MAX_KEY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Bucket and key prefix of a root. Each service has a subclass."""

    root: str
    bucket: str
    #: Empty, or ends with ``/``.
    key_prefix: str

    scheme: ClassVar[str]
    #: Name of the service in messages.
    service: ClassVar[str]
    #: Pattern for valid bucket names.
    bucket_name: ClassVar[re.Pattern[str]]
    #: Error message for an invalid root. It does not repeat the root, which may contain credentials.
    root_form: ClassVar[str]

    @classmethod
    def of(cls, root: str) -> Self:
        """Parse a normalized root URI. Raise InvalidLocationError if its form, bucket or length is invalid."""
        if not cls.bucket_name.fullmatch(root.removeprefix(f"{cls.scheme}://").partition("/")[0]):
            raise InvalidLocationError(cls.root_form)
        bucket, path = split_root(root, cls.scheme)
        location = cls(root, bucket, path[1:])
        location.check_key(location.key_prefix, root)
        return location

    def key(self, path: str) -> str:
        """Return the key for a path. Raise InvalidLocationError if the path or the key is invalid."""
        check_path(path)
        key = self.key_prefix + path
        self.check_key(key, path)
        return key

    def listed(self, prefix: str) -> str:
        """Return the key prefix for a path prefix. Raise InvalidLocationError if it is invalid."""
        check_prefix(prefix)
        start = self.key_prefix + prefix
        self.check_key(start, prefix)
        return start

    def path(self, key: str) -> str | None:
        """Return the path of a listed key, or None if no path has such a key (``folder/``, ``a//b``)."""
        path = key.removeprefix(self.key_prefix)
        try:
            check_path(path)
        except InvalidLocationError:
            return None
        return path

    def check_key(self, key: str, label: str) -> None:
        """Raise InvalidLocationError if a key is too long.

        Args:
            key: The key.
            label: The path or root, for the message.
        """
        n_bytes = len(key.encode())
        if n_bytes > MAX_KEY_BYTES:
            raise InvalidLocationError(
                f"{label[:80]!r}... is too long: its key has {n_bytes} bytes, including the prefix of the root, and"
                f" {self.service} allows {MAX_KEY_BYTES}; use a shorter name"
            )
