"""Options that storages on servers share, and how long their requests may take."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import Protocol
from urllib.parse import urlsplit

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.storage.options import StorageOptions

#: The slowest transfer that a request waits for, on top of the time-outs for connecting and for the answer.
MIN_BYTES_PER_SECOND = 128 * 1024
#: More than the threads of the pool that storages share, so that no request waits for a connection.
MAX_CONNECTIONS = 128

_MIN_TIMEOUT_SECONDS = 0.001
_MAX_TIMEOUT_SECONDS = 86_400
_NOT_IN_A_HEADER = re.compile(r"[\x00-\x20\x7f]")


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


def connect_timeout_of(options: StorageOptions) -> float:
    """Return the seconds until a connection stands. Raises InvalidInputError."""
    return _seconds(options, "connect_timeout_seconds", default=5)


def read_timeout_of(options: StorageOptions) -> float:
    """Return the seconds without a byte of an answer. Raises InvalidInputError."""
    return _seconds(options, "read_timeout_seconds", default=30)


def check_filled(options: StorageOptions, names: Iterable[str]) -> None:
    """Refuse options that are empty, or that no header or address can hold.

    Raises InvalidInputError, which repeats no value.
    """
    for name in names:
        if options.get(name) == "":
            raise InvalidInputError(f"storage option {name!r} is empty: leave it out, or give a value")
        if _NOT_IN_A_HEADER.search(options.get(name, "")):
            raise InvalidInputError(f"storage option {name!r} holds white space or a control character: remove it")


def check_endpoint(value: str, *, has_path: bool = True) -> None:
    """Refuse a URL of a server that has another form, credentials, or a path where none may be.

    Raises InvalidInputError, which does not repeat the text.
    """
    try:
        parts = urlsplit(value)
        well_formed = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and "@" not in parts.netloc
            and (has_path or parts.path in ("", "/"))
            and not (parts.query or parts.fragment or re.search(r"[\s\x00-\x1f\x7f]", value))
        )
    except ValueError:
        well_formed = False
    if not well_formed:
        # Not repeated: people put credentials here.
        raise InvalidInputError(
            "storage option 'endpoint' must be http://HOST[:PORT] or https://HOST[:PORT], without credentials"
        )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _seconds(options: StorageOptions, name: str, *, default: float) -> float:
    return options.number(name, default=default, minimum=_MIN_TIMEOUT_SECONDS, maximum=_MAX_TIMEOUT_SECONDS)
