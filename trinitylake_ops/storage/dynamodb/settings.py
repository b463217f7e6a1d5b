"""Roots ``dynamodb://table/prefix/`` and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.http.aws import AWS_ENVIRONMENT, AwsSettings, aws_environment, aws_options
from trinitylake_ops.storage.options import Kind, Option
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: Maximum size in UTF-8 of a sort key, which is the path.
MAX_PATH_BYTES = 1024
#: Maximum size of a partition key in UTF-8.
MAX_PARTITION_KEY_BYTES = 2048
#: Maximum size of the suffix of a part's partition key.
_MAX_SUFFIX_BYTES = len("parts/") + 32 + len("/") + 10

#: Options of ``dynamodb://`` roots.
DYNAMODB_OPTIONS = (
    *aws_options("DYNAMODB"),
    Option(
        "create_table",
        "treat a missing table as an empty one, and create it with on-demand billing at the first write",
        Kind.FLAG,
        default=False,
    ),
)
#: Environment variables that determine the server of a root and the user, unless options specify them.
DYNAMODB_ENVIRONMENT = (*AWS_ENVIRONMENT, "AWS_ENDPOINT_URL_DYNAMODB")
dynamodb_of_environment = aws_environment(DYNAMODB_OPTIONS)

#: The table's partition key and sort key.
ROOT_KEY, PATH_KEY = "root", "path"
Key = Mapping[str, Mapping[str, str]]

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")


@dataclass(frozen=True, slots=True)
class DynamoDBLocation:
    """Table and partition key of a root."""

    root: str
    table: str
    #: Partition key, which begins and ends with ``/``.
    partition: str

    @classmethod
    def of(cls, root: str) -> DynamoDBLocation:
        """Parse a normalized root URI.

        Raise InvalidLocationError if its form, table or length is invalid. The message does not repeat an invalid
        table, which may be a credential.
        """
        authority = root.removeprefix("dynamodb://").partition("/")[0]
        if not _TABLE.fullmatch(authority):
            raise InvalidLocationError(
                "invalid DynamoDB root: it must have the form dynamodb://TABLE/PREFIX/, where TABLE has 3 to 255"
                " letters, digits, '.', '_' and '-'; set credentials and endpoint by storage options"
            )
        table, partition = split_root(root, "dynamodb")
        n_bytes, max_bytes = len(partition.encode()), MAX_PARTITION_KEY_BYTES - _MAX_SUFFIX_BYTES
        if n_bytes > max_bytes:
            raise InvalidLocationError(
                f"{root[:80]!r}... is too long: its prefix has {n_bytes} bytes, more than the limit of {max_bytes}"
                " bytes; use a shorter prefix"
            )
        return cls(root, table, partition)

    def key(self, path: str) -> Key:
        """Return the key of a file's item. Raise InvalidLocationError if the path is invalid or too long."""
        check_path(path)
        _check_length(path)
        return _key(self.partition, path)

    def listed(self, prefix: str) -> str:
        """Return the prefix of a listing. Raise InvalidLocationError if it is invalid or too long."""
        check_prefix(prefix)
        _check_length(prefix)
        return prefix

    # The following partition keys do not end with "/", so they are not the partition key of a root.

    def upload_partition(self) -> str:
        """Return the partition key of the root's upload records."""
        return f"{self.partition}uploads"

    def upload_key(self, upload: str) -> Key:
        """Return the key of an upload record."""
        return _key(self.upload_partition(), upload)

    def part_key(self, upload: str, number: int) -> Key:
        """Return the key of a part. Each part has a separate partition key, which distributes the load.

        Args:
            upload: ID of the upload.
            number: Number of the part.
        """
        return _key(f"{self.partition}parts/{upload}/{number}", "part")

    def clock_key(self) -> Key:
        """Return a key that no item has, because it is not a valid path."""
        return _key(self.partition, ".")


@dataclass(frozen=True, slots=True)
class DynamoDBSettings(AwsSettings):
    """Validated options. A field is None if AWS's environment variables and configuration files determine its value."""

    specs = DYNAMODB_OPTIONS
    create_table: bool


def _key(partition: str, path: str) -> Key:
    return {ROOT_KEY: {"S": partition}, PATH_KEY: {"S": path}}


def _check_length(path: str) -> None:
    n_bytes = len(path.encode())
    if n_bytes > MAX_PATH_BYTES:
        raise InvalidLocationError(
            f"{path[:80]!r}... is too long: it has {n_bytes} bytes, and DynamoDB allows {MAX_PATH_BYTES}; use a shorter"
            " name"
        )
