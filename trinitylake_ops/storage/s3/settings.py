"""Roots ``s3://bucket/prefix/`` and their options, as every S3 client understands them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.aws.settings import AWS_ENVIRONMENT, AWS_OPTIONS, AwsSettings, aws_environment
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: S3 limits a key, the prefix of the root included, to this many bytes of UTF-8.
MAX_KEY_BYTES = 1024
#: S3 handles at most this many keys in one DeleteObjects or one page of a list.
MAX_KEYS_PER_REQUEST = 1000

#: Options of ``s3://`` roots. Credentials and places that are not given come from AWS's environment.
S3_OPTIONS = AWS_OPTIONS | {"addressing_style", "client"}
S3_CLIENTS = ("s3fs", "obstore")
#: Variables that decide which server a root is on, and which user asks, if the options do not.
S3_ENVIRONMENT = (*AWS_ENVIRONMENT, "AWS_ENDPOINT_URL_S3")
s3_of_environment = aws_environment("S3")

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")


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
class S3Settings(AwsSettings):
    """The checked options of a root. None means that AWS's environment and configuration files decide."""

    addressing_style: str

    @classmethod
    def of(cls, options: StorageOptions) -> S3Settings:
        """Check the options. Raises InvalidInputError, which repeats no credentials."""
        of_aws = AwsSettings.of(options)
        return cls(
            of_aws.endpoint,
            of_aws.region,
            of_aws.connect_timeout_seconds,
            of_aws.read_timeout_seconds,
            options.one_of("addressing_style", ("auto", "path", "virtual")),
        )


def _check_length(key: str, shown: str) -> None:
    n_bytes = len(key.encode())
    if n_bytes > MAX_KEY_BYTES:
        raise InvalidLocationError(
            f"the key of {shown[:80]!r}... would have {n_bytes} bytes with the prefix of its root, S3 allows "
            f"{MAX_KEY_BYTES}: use a shorter name"
        )
