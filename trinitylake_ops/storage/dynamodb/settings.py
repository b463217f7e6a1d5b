"""Roots ``dynamodb://table/prefix/`` and their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.http.aws import AWS_ENVIRONMENT, AwsSettings, aws_environment, aws_options
from trinitylake_ops.storage.options import Kind, Option
from trinitylake_ops.storage.paths import check_path, check_prefix, split_root

#: DynamoDB limits a sort key, here the path, to this many bytes of UTF-8.
MAX_PATH_BYTES = 1024
#: DynamoDB limits a partition key to this many bytes of UTF-8. Those of parts are longer than the root's own.
MAX_PARTITION_KEY_BYTES = 2048
_LONGEST_ADDITION = len("parts/") + 32 + len("/") + 10

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
#: Variables that decide which server a root is on, and which user asks, if the options do not.
DYNAMODB_ENVIRONMENT = (*AWS_ENVIRONMENT, "AWS_ENDPOINT_URL_DYNAMODB")
dynamodb_of_environment = aws_environment(DYNAMODB_OPTIONS)

#: The table's partition key and sort key.
ROOT_KEY, PATH_KEY = "root", "path"
Key = Mapping[str, Mapping[str, str]]

_TABLE = re.compile(r"[A-Za-z0-9_.-]{3,255}")


@dataclass(frozen=True, slots=True)
class DynamoDBLocation:
    """Table and partition key of a root; the partition key begins and ends with ``/``."""

    root: str
    table: str
    partition: str

    @classmethod
    def of(cls, root: str) -> DynamoDBLocation:
        """Split a normalized root URI.

        Raises InvalidLocationError for another form, a root that is too long, and a name that no table has. Such a
        name may be credentials, or a host with a port. The message does not repeat it.
        """
        authority = root.removeprefix("dynamodb://").partition("/")[0]
        if not _TABLE.fullmatch(authority):
            raise InvalidLocationError(
                "a root in DynamoDB has the form dynamodb://TABLE/PREFIX/, with 3 to 255 letters, digits, '.', '_' or "
                "'-' as TABLE; credentials and the server's address are storage options"
            )
        table, partition = split_root(root, "dynamodb")
        n_bytes, most_bytes = len(partition.encode()), MAX_PARTITION_KEY_BYTES - _LONGEST_ADDITION
        if n_bytes > most_bytes:
            raise InvalidLocationError(
                f"the prefix of {root[:80]!r}... has {n_bytes} bytes, and {most_bytes} is the most: use a shorter one"
            )
        return cls(root, table, partition)

    def key(self, path: str) -> Key:
        """Return the key of a file's item. Raises InvalidLocationError for a path not accepted, or too long."""
        check_path(path)
        _check_length(path)
        return _key(self.partition, path)

    def listed(self, prefix: str) -> str:
        """Return a prefix that lists take. Raises InvalidLocationError as ``key`` does."""
        check_prefix(prefix)
        _check_length(prefix)
        return prefix

    # No root has such a partition key, as it does not end with "/".

    def upload_partition(self) -> str:
        """Return the partition key under which the root's uploads stand."""
        return f"{self.partition}uploads"

    def upload_key(self, upload: str) -> Key:
        """Return the key of the record of an upload."""
        return _key(self.upload_partition(), upload)

    def part_key(self, upload: str, number: int) -> Key:
        """Return the key of a part. Each has a partition key of its own, so their load is spread."""
        return _key(f"{self.partition}parts/{upload}/{number}", "part")

    def clock_key(self) -> Key:
        """Return a key that no item has: no file has this path."""
        return _key(self.partition, ".")


@dataclass(frozen=True, slots=True)
class DynamoDBSettings(AwsSettings):
    """The checked options of a root. None means that AWS's environment and configuration files decide."""

    specs = DYNAMODB_OPTIONS
    create_table: bool


def _key(partition: str, path: str) -> Key:
    return {ROOT_KEY: {"S": partition}, PATH_KEY: {"S": path}}


def _check_length(path: str) -> None:
    n_bytes = len(path.encode())
    if n_bytes > MAX_PATH_BYTES:
        raise InvalidLocationError(
            f"the path {path[:80]!r}... has {n_bytes} bytes, DynamoDB allows {MAX_PATH_BYTES}: use a shorter name"
        )
