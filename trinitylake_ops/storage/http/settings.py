"""Options of storages on servers, and roots in buckets."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.options import Kind, Option
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: The slowest transfer that a request waits for, on top of the time-outs for connecting and for the answer.
MIN_BYTES_PER_SECOND = 128 * 1024
#: More than the threads of the pool that storages share, so that no request waits for a connection.
MAX_CONNECTIONS = 128

_MIN_TIMEOUT_SECONDS = 0.001
_MAX_TIMEOUT_SECONDS = 86_400


class Timeouts(Protocol):
    """Settings that say how long a request waits for a connection, and without a byte of an answer."""

    @property
    def connect_timeout_seconds(self) -> float:
        """Seconds until a connection stands."""

    @property
    def read_timeout_seconds(self) -> float:
        """Seconds without a byte of an answer."""


def longest_seconds(timeouts: Timeouts, n_bytes: int = 0) -> float:
    """Return how long a request, or an answer, with this many bytes of body may take.

    A client's own time-outs see a silent server, but not one that trickles or stops reading.
    """
    return timeouts.connect_timeout_seconds + 2 * timeouts.read_timeout_seconds + n_bytes / MIN_BYTES_PER_SECOND


CONNECT_TIMEOUT = Option(
    "connect_timeout_seconds",
    "how long a request waits for a connection before it is tried again, in seconds",
    Kind.NUMBER,
    default=5.0,
    minimum=_MIN_TIMEOUT_SECONDS,
    maximum=_MAX_TIMEOUT_SECONDS,
)
READ_TIMEOUT = Option(
    "read_timeout_seconds",
    "how long a request waits without a byte of the response before it is tried again, in seconds",
    Kind.NUMBER,
    default=30.0,
    minimum=_MIN_TIMEOUT_SECONDS,
    maximum=_MAX_TIMEOUT_SECONDS,
)
TIMEOUTS = (CONNECT_TIMEOUT, READ_TIMEOUT)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


#: S3 and Google Cloud Storage limit a key, the prefix of the root included, to this many bytes of UTF-8.
MAX_KEY_BYTES = 1024


@dataclass(frozen=True, slots=True)
class BucketLocation:
    """Bucket and key prefix of a root; the prefix is empty or ends with ``/``.

    Each service says by a class of its own what its buckets are called, and which keys it takes. ``root_form`` is what
    a root of another form is answered. It repeats nothing, as that may hold credentials, or a host with a port.
    """

    root: str
    bucket: str
    key_prefix: str

    scheme: ClassVar[str]
    service: ClassVar[str]
    bucket_name: ClassVar[re.Pattern[str]]
    root_form: ClassVar[str]

    @classmethod
    def of(cls, root: str) -> Self:
        """Split a normalized root URI.

        Raises InvalidLocationError for another form, for a root that is too long, and for a bucket that is no name of
        one.
        """
        if not cls.bucket_name.fullmatch(root.removeprefix(f"{cls.scheme}://").partition("/")[0]):
            raise InvalidLocationError(cls.root_form)
        bucket, path = split_root(root, cls.scheme)
        location = cls(root, bucket, path[1:])
        location.check_key(location.key_prefix, root)
        return location

    def key(self, path: str) -> str:
        """Return the key of a path.

        Raises InvalidLocationError for a path that no storage accepts, or whose key the service does not take.
        """
        check_path(path)
        key = self.key_prefix + path
        self.check_key(key, path)
        return key

    def listed(self, prefix: str) -> str:
        """Return the start of all keys below a path prefix. Raises InvalidLocationError as ``key`` does."""
        check_prefix(prefix)
        start = self.key_prefix + prefix
        self.check_key(start, prefix)
        return start

    def path(self, key: str) -> str | None:
        """Return the path of a listed key, or None for a key that no path has (``folder/``, ``a//b``)."""
        path = key.removeprefix(self.key_prefix)
        try:
            check_path(path)
        except InvalidLocationError:
            return None
        return path

    def check_key(self, key: str, shown: str) -> None:
        """Raise InvalidLocationError for a key that the service does not take; ``shown`` is what the caller gave."""
        n_bytes = len(key.encode())
        if n_bytes > MAX_KEY_BYTES:
            raise InvalidLocationError(
                f"the key of {shown[:80]!r}... would have {n_bytes} bytes with the prefix of its root, {self.service}"
                f" allows {MAX_KEY_BYTES}: use a shorter name"
            )
