"""Roots ``s3://bucket/prefix/`` and their options, for all S3 clients."""

from __future__ import annotations

import re
from dataclasses import dataclass

from trinitylake_ops.storage.http.aws import AWS_ENVIRONMENT, AwsSettings, aws_environment, aws_options
from trinitylake_ops.storage.http.settings import BucketLocation
from trinitylake_ops.storage.options import Kind, Option

#: Maximum number of keys in a DeleteObjects request and on a page of a listing.
MAX_KEYS_PER_REQUEST = 1000

CLIENT = Option(
    "client",
    "client library; the extras 's3' and 'obstore' install them",
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
        "whether the bucket is in the path or in the host of URLs",
        Kind.CHOICE,
        default="auto",
        choices=("auto", "path", "virtual"),
    ),
)
#: Environment variables that determine the server of a root and the user, unless options specify them.
S3_ENVIRONMENT = (*AWS_ENVIRONMENT, "AWS_ENDPOINT_URL_S3")
s3_of_environment = aws_environment(S3_OPTIONS)


class S3Location(BucketLocation):
    """Bucket and key prefix of a root on S3."""

    __slots__ = ()
    scheme = "s3"
    service = "S3"
    bucket_name = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,61}[A-Za-z0-9]")
    root_form = (
        "invalid S3 root: it must have the form s3://BUCKET/PREFIX/, where BUCKET has 3 to 63 letters, digits, '.', '_'"
        " and '-'; set credentials and endpoint by storage options"
    )


@dataclass(frozen=True, slots=True)
class S3Settings(AwsSettings):
    """Validated options. A field is None if AWS's environment variables and configuration files determine its value."""

    specs = S3_OPTIONS
    addressing_style: str
