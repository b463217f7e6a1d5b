"""Roots ``s3://bucket/prefix/`` and their options, as every S3 client understands them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trinitylake_ops.storage.http.aws import AWS_ENVIRONMENT, AwsSettings, aws_environment, aws_options
from trinitylake_ops.storage.http.settings import BucketLocation
from trinitylake_ops.storage.options import Kind, Option

#: S3 handles at most this many keys in one DeleteObjects or one page of a list.
MAX_KEYS_PER_REQUEST = 1000

CLIENT = Option(
    "client",
    "library that sends the requests; the extras 's3' and 'obstore' install them",
    Kind.CHOICE,
    default="s3fs",
    choices=("s3fs", "obstore"),
)
#: Options of ``s3://`` roots.
S3_OPTIONS = (
    *aws_options("S3"),
    CLIENT,
    Option(
        "addressing_style",
        "whether the bucket is in the path or the host of addresses",
        Kind.CHOICE,
        default="auto",
        choices=("auto", "path", "virtual"),
    ),
)
#: Variables that decide which server a root is on, and which user asks, if the options do not.
S3_ENVIRONMENT = (*AWS_ENVIRONMENT, "AWS_ENDPOINT_URL_S3")
s3_of_environment = aws_environment(S3_OPTIONS)


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

    specs = S3_OPTIONS
    addressing_style: str
