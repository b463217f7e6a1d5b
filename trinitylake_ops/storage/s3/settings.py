"""Roots ``s3://bucket/prefix/`` and their options, as every S3 client understands them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: S3 limits a key, the prefix of the root included, to this many bytes of UTF-8.
MAX_KEY_BYTES = 1024
#: S3 handles at most this many keys in one DeleteObjects or one page of a list.
MAX_KEYS_PER_REQUEST = 1000

#: Options of ``s3://`` roots. Credentials and places that are not given come from AWS's environment.
S3_OPTIONS = frozenset(
    {
        "access_key_id", "addressing_style", "client", "connect_timeout_seconds", "endpoint", "read_timeout_seconds",
        "region", "secret_access_key", "session_token",
    }
)  # fmt: skip
S3_CLIENTS = ("s3fs", "obstore")
#: Variables that decide which server a root is on, and which user asks, if the options do not.
S3_ENVIRONMENT = (
    "AWS_ACCESS_KEY_ID", "AWS_CONFIG_FILE", "AWS_DEFAULT_PROFILE", "AWS_DEFAULT_REGION", "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3", "AWS_PROFILE", "AWS_REGION", "AWS_ROLE_ARN", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
_MIN_TIMEOUT_SECONDS = 0.001
_MAX_TIMEOUT_SECONDS = 86_400
_NOT_IN_A_HEADER = re.compile(r"[\x00-\x20\x7f]")


@dataclass(frozen=True, slots=True)
class S3Location:
    """Bucket and key prefix of a root; the prefix is empty or ends with ``/``."""

    root: str
    bucket: str
    key_prefix: str

    @classmethod
    def of(cls, root: str) -> S3Location:
        """Split a normalised root URI.

        Raises InvalidLocationError for another form, for a root that is too long, and for a bucket that is no name of
        one. Such a bucket may be credentials, or a host with a port. The message does not repeat a root of another form
        or bucket.
        """
        authority = root.removeprefix("s3://").partition("/")[0]
        if not _BUCKET.fullmatch(authority):
            raise InvalidLocationError(
                "a root on S3 has the form s3://BUCKET/PREFIX/, with 3 to 63 letters, digits, '.', '_' or '-' as "
                "BUCKET; credentials and the server's address are storage options"
            )
        bucket, path = split_root(root, "s3")
        location = cls(root, bucket, path[1:])
        _check_length(location.key_prefix, root)
        return location

    def key(self, path: str) -> str:
        """Return the key of a path.

        Raises InvalidLocationError for a path that no storage accepts or that is too long.
        """
        check_path(path)
        key = self.key_prefix + path
        _check_length(key, path)
        return key

    def listed(self, prefix: str) -> str:
        """Return the start of all keys below a path prefix. Raises InvalidLocationError as ``key`` does."""
        check_prefix(prefix)
        start = self.key_prefix + prefix
        _check_length(start, prefix)
        return start

    def path(self, key: str) -> str | None:
        """Return the path of a listed key, or None for a key that no path has (``folder/``, ``a//b``)."""
        path = key.removeprefix(self.key_prefix)
        try:
            check_path(path)
        except InvalidLocationError:
            return None
        return path


@dataclass(frozen=True, slots=True)
class S3Settings:
    """The checked options of a root. None means that AWS's environment and configuration files decide."""

    endpoint: str | None
    region: str | None
    addressing_style: str
    connect_timeout_seconds: float
    read_timeout_seconds: float

    @classmethod
    def of(cls, options: StorageOptions) -> S3Settings:
        """Check the options. Raises InvalidInputError, which repeats no credentials."""
        for one, other in (("access_key_id", "secret_access_key"), ("secret_access_key", "access_key_id"),
                           ("session_token", "access_key_id")):  # fmt: skip
            if options.get(one) and not options.get(other):
                raise InvalidInputError(
                    f"storage option {one!r} is of no use without {other!r} beside it; give both or neither"
                )
        for name in ("access_key_id", "endpoint", "region", "secret_access_key", "session_token"):
            if options.get(name) == "":
                raise InvalidInputError(f"storage option {name!r} is empty: leave it out, or give a value")
            if _NOT_IN_A_HEADER.search(options.get(name, "")):
                raise InvalidInputError(f"storage option {name!r} holds white space or a control character: remove it")
        endpoint = options.get("endpoint")
        if endpoint is not None:
            check_endpoint(endpoint)
        return cls(
            endpoint=endpoint,
            region=options.get("region"),
            addressing_style=options.one_of("addressing_style", ("auto", "path", "virtual")),
            connect_timeout_seconds=_seconds(options, "connect_timeout_seconds", default=5),
            read_timeout_seconds=_seconds(options, "read_timeout_seconds", default=30),
        )


def check_endpoint(value: str) -> None:
    """Raise InvalidInputError, without repeating the text, when the URL of a server has another form or credentials."""
    try:
        parts = urlsplit(value)
        well_formed = (
            parts.scheme in ("http", "https")
            and bool(parts.hostname)
            and (parts.port is None or parts.port > 0)
            and "@" not in parts.netloc
            and not (parts.query or parts.fragment or re.search(r"\s", value))
        )
    except ValueError:
        well_formed = False
    if not well_formed:
        # Not repeated: people put credentials here.
        raise InvalidInputError(
            "storage option 'endpoint' must be http://HOST[:PORT] or https://HOST[:PORT], without credentials"
        )


def _check_length(key: str, shown: str) -> None:
    n_bytes = len(key.encode())
    if n_bytes > MAX_KEY_BYTES:
        raise InvalidLocationError(
            f"the key of {shown[:80]!r}... would have {n_bytes} bytes with the prefix of its root, S3 allows "
            f"{MAX_KEY_BYTES}: use a shorter name"
        )


def _seconds(options: StorageOptions, name: str, *, default: float) -> float:
    return options.number(name, default=default, minimum=_MIN_TIMEOUT_SECONDS, maximum=_MAX_TIMEOUT_SECONDS)
