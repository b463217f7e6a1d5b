"""The options of ``readStream``, ``write`` and ``writeStream``, beside those of every read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.tables.writing.partition_key import PartitionValue

OnProblem: TypeAlias = Literal["fail", "skip"]
#: The first content of a new stream: everything, or only later changes.
LATEST = "latest"

STREAM_OPTIONS: Mapping[str, str] = {
    "starting_version": "of a new stream: the first version to read, inclusive, or 'latest'; without, all there is",
    "max_versions": "how many versions a batch takes at most",
    "on_gap": "where versions expired before the stream came to them: 'fail', or 'skip' to go on after them",
    "on_overwrite": "where rows of the table were replaced or deleted: 'fail', or 'skip' to pass such commits by",
}
WRITE_OPTIONS: Mapping[str, str] = {
    "stream_id": "of streams, required: the identity of the stream, the same when it is started again",
    "run_id": "of batch writes: a write with such an id commits once, however often it is repeated",
    "partition_by": "columns of a new table's partitions, with commas between them",
    "primary_key": "columns of a new table's key, with commas between them",
    "replace": "of batch writes in the mode overwrite: 'table', or 'partitions' for those that rows arrive for",
    "partition": "of batch writes in the mode overwrite: only this partition, JSON of a value for each of its columns",
    "create": "of batch writes: 'true' if the table must not exist yet",
    "reads": 'of batch writes: tables that the rows come from and the version of each, JSON such as {"ns.t": 12}',
    "message": "why, for the log",
}

_MOST_VERSIONS = 1_000_000
_LONGEST_ID_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """How a stream reads. With ``starting_version`` None a stream reads everything. ``max_versions`` None no limit."""

    starting_version: int | Literal["latest"] | None = None
    max_versions: int | None = None
    on_gap: OnProblem = "fail"
    on_overwrite: OnProblem = "fail"

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> StreamOptions:
        """Return the settings in options; others are ignored. Raises InvalidInputError."""
        start = given.get("starting_version")
        return cls(
            starting_version="latest" if start == LATEST else _number(given, "starting_version", 0),
            max_versions=_number(given, "max_versions", 1),
            on_gap=_on_problem(given, "on_gap"),
            on_overwrite=_on_problem(given, "on_overwrite"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """How rows are written."""

    stream_id: str | None = None
    run_id: str | None = None
    partition_by: tuple[str, ...] | None = None
    primary_key: tuple[str, ...] = ()
    replaces_partitions: bool = False
    partition: Mapping[str, PartitionValue] | None = None
    must_create: bool = False
    reads: Mapping[str, int] | None = None
    message: str | None = None

    @classmethod
    def parse(cls, given: Mapping[str, str]) -> WriteOptions:
        """Return the settings in options; others are ignored. Raises InvalidInputError."""
        replace = given.get("replace", "table")
        if replace not in ("table", "partitions"):
            raise InvalidInputError(f"the option 'replace' takes 'table' or 'partitions', not {replace!r}")
        if "replace" in given and "partition" in given:
            raise InvalidInputError("give one of the options replace and partition, not both")
        for name in ("stream_id", "run_id"):
            if name in given and not 0 < len(given[name]) <= _LONGEST_ID_CHARS:
                raise InvalidInputError(f"the option {name!r} takes 1 to {_LONGEST_ID_CHARS} characters")
        return cls(
            stream_id=given.get("stream_id"),
            run_id=given.get("run_id"),
            partition_by=_names(given, "partition_by"),
            primary_key=_names(given, "primary_key") or (),
            replaces_partitions=replace == "partitions",
            partition=_partition(given.get("partition")),
            must_create=_is_true(given, "create"),
            reads=_reads(given.get("reads")),
            message=given.get("message"),
        )


def _number(given: Mapping[str, str], name: str, least: int) -> int | None:
    text = given.get(name)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(2**32))
    if not is_number or int(text) < least or (least and int(text) > _MOST_VERSIONS):
        raise InvalidInputError(f"the option {name!r} takes a number from {least} on, not {text!r}")
    return int(text)


def _on_problem(given: Mapping[str, str], name: str) -> OnProblem:
    text = given.get(name, "fail")
    if text == "fail":
        return "fail"
    if text == "skip":
        return "skip"
    raise InvalidInputError(f"the option {name!r} takes 'fail' or 'skip', not {text!r}")


def _is_true(given: Mapping[str, str], name: str) -> bool:
    text = given.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidInputError(f"the option {name!r} takes 'true' or 'false', not {given[name]!r}")
    return text == "true"


def _partition(text: str | None) -> Mapping[str, PartitionValue] | None:
    if text is None:
        return None
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = None
    is_value = values and isinstance(values, dict)
    if not is_value or not all(value is None or isinstance(value, bool | int | str) for value in values.values()):
        raise InvalidInputError(f"the option 'partition' takes JSON such as {{\"month\": 2}}, not {text!r}")
    partition: Mapping[str, PartitionValue] = values
    return partition


def _reads(text: str | None) -> Mapping[str, int] | None:
    if text is None:
        return None
    try:
        versions = json.loads(text)
    except (ValueError, RecursionError):
        versions = None
    if not isinstance(versions, dict) or not all(type(one) is int and one >= 0 for one in versions.values()):
        raise InvalidInputError(
            f"the option 'reads' takes JSON of tables and versions such as {{\"ns.t\": 12}}, or {{}}, not {text!r}"
        )
    reads: Mapping[str, int] = versions
    return reads


def _names(given: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = given.get(name)
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise InvalidInputError(f"the option {name!r} takes names with commas between them, not {text!r}")
    return names
