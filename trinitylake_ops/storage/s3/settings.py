"""Roots ``s3://bucket/prefix/`` and their options, as every S3 client understands them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trinitylake_ops.storage.http.aws import AWS_ENVIRONMENT, AWS_OPTIONS, AwsSettings, aws_environment
from trinitylake_ops.storage.http.settings import BucketLocation
from trinitylake_ops.storage.options import StorageOptions

#: S3 handles at most this many keys in one DeleteObjects or one page of a list.
MAX_KEYS_PER_REQUEST = 1000

#: Options of ``s3://`` roots. Credentials and places that are not given come from AWS's environment.
S3_OPTIONS = AWS_OPTIONS | {"addressing_style", "client"}
S3_CLIENTS = ("s3fs", "obstore")
#: Variables that decide which server a root is on, and which user asks, if the options do not.
S3_ENVIRONMENT = (*AWS_ENVIRONMENT, "AWS_ENDPOINT_URL_S3")
s3_of_environment = aws_environment("S3")


class S3Location(BucketLocation):
    """Bucket and key prefix of a root on S3."""

    __slots__ = ()
    scheme = "s3"
    service = "S3"
    bucket_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
    root_form = (
        "a root on S3 has the form s3://BUCKET/PREFIX/, with 3 to 63 letters, digits, '.', '_' or '-' as BUCKET;"
        " credentials and the server's address are storage options"
    )


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
