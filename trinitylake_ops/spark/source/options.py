"""Options of the data source, for reads, writes and streams.

Spark shows options in its plans, so they must not contain credentials. Credentials come from the environment of the
driver at the time Spark was started.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal, TypeAlias

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.partition_key import PartitionValue
from trinitylake_ops.storage.opening import with_environment
from trinitylake_ops.storage.options import OPTIONS_VARIABLE, StorageOptions, is_secret

ROOT = "root"
#: The argument of ``load(...)``.
TABLE = "path"
STORAGE_PREFIX = "storage."

#: All options except ``storage.*``, with their descriptions.
OPTIONS: Mapping[str, str] = {
    ROOT: "the lakehouse's root URI",
    "version": "read at this version, a number",
    "timestamp": "read at this time: ISO 8601 with a time zone, or milliseconds since the epoch",
    "export": "read the export of this name",
    "row_filter": "read only rows that match this filter, in Iceberg's filter syntax",
    "columns": "read only these columns, in this order; comma-separated names, or a JSON list",
    "from": "for changes: the first version, inclusive",
    "to": "for changes: the last version, inclusive",
    "parallelism": "the minimum number of tasks for large reads; the default is the number of the driver's processors",
}

_MAX_TASKS = 100_000

Time: TypeAlias = datetime | int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequest:
    """The target of a read. At most one of ``version``, ``timestamp`` and ``export`` is set."""

    #: A metadata table, or ``NAMESPACE.TABLE``.
    table: str
    #: The version to read.
    version: int | None = None
    #: The time to read at: an aware datetime, or milliseconds since the epoch.
    timestamp: Time | None = None
    #: The name of the export to read.
    export: str | None = None
    #: The rows to read, or None for all.
    row_filter: str | None = None
    #: The columns to read, or None for all.
    columns: tuple[str, ...] | None = None
    #: For changes, the first version, inclusive.
    first_version: int | None = None
    #: For changes, the last version, inclusive.
    last_version: int | None = None
    #: The minimum number of tasks for large reads.
    parallelism: int = 1

    def __post_init__(self) -> None:
        times = {"version": self.version, "timestamp": self.timestamp, "export": self.export}
        options = [name for name, value in times.items() if value is not None]
        if len(options) > 1:
            raise InvalidInputError(f"the options {' and '.join(options)} exclude each other; use one of them")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise InvalidInputError(f"duplicate column in {', '.join(self.columns)}")

    @property
    def time(self) -> str | None:
        """The option that selects the version, or None for the latest version."""
        times = {"version": self.version, "timestamp": self.timestamp, "export": self.export}
        return next((name for name, value in times.items() if value is not None), None)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The parsed options of a read."""

    #: The root URI of the lakehouse.
    root: str
    #: The storage options, including those from the driver's environment.
    storage_options: StorageOptions
    #: The target of the read.
    request: TableRequest

    @classmethod
    def parse(cls, options: Mapping[str, str], also: Collection[str] = ()) -> SourceOptions:
        """Parse options.

        Args:
            options: The options, with names in any case.
            also: Further allowed options, which are ignored here.

        Raises:
            InvalidInputError: If an option is unknown, missing or invalid. The message contains no storage options.
        """
        by_name = {name.lower(): value for name, value in options.items()}
        storage = {
            name.removeprefix(STORAGE_PREFIX): by_name[name] for name in by_name if name.startswith(STORAGE_PREFIX)
        }
        if secret := next(filter(is_secret, storage), None):
            raise InvalidInputError(
                f"option {STORAGE_PREFIX + secret!r} would be visible in Spark's plans and logs; pass credentials in"
                f" the driver's environment, in {OPTIONS_VARIABLE} or the storage's own variables, before Spark starts"
            )
        plain = {name: value for name, value in by_name.items() if not name.startswith(STORAGE_PREFIX)}
        if unknown := next((name for name in plain if name not in (*OPTIONS, *also, TABLE)), None):
            names_of_options = ", ".join([*OPTIONS, *also, f"{STORAGE_PREFIX}*"])
            raise InvalidInputError(f"unknown option {unknown!r}; the options are {names_of_options}")
        if not plain.get(ROOT):
            raise InvalidInputError(f"option {ROOT!r} is missing; set it to the lakehouse's root URI")
        if not plain.get(TABLE):
            raise InvalidInputError("the table to read is missing; use load('versions') or load('NAMESPACE.TABLE')")
        request = TableRequest(
            table=plain[TABLE],
            version=_number(plain, "version"),
            timestamp=_time(plain.get("timestamp")),
            export=plain.get("export"),
            row_filter=plain.get("row_filter"),
            columns=_names(plain.get("columns")),
            first_version=_number(plain, "from"),
            last_version=_number(plain, "to"),
            parallelism=min(_number(plain, "parallelism") or os.cpu_count() or 1, _MAX_TASKS),
        )
        return cls(plain[ROOT], _with_environment(plain[ROOT], storage), request)


def _with_environment(root: str, explicit: Mapping[str, str]) -> StorageOptions:
    """Return storage options, supplemented by this process's environment.

    The options include credentials, so that tasks on other machines use the driver's credentials.
    """
    options = {**StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, "")), **StorageOptions(explicit)}
    return with_environment(root, options)


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(2**32))):
        raise InvalidInputError(f"invalid value {text!r} of option {name!r}; use a number such as 12")
    return int(text)


def _time(text: str | None) -> Time | None:
    if text is None:
        return None
    if text.isascii() and text.isdecimal() and len(text) <= len(str(2**63)):
        return int(text)
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"invalid value {text!r} of option 'timestamp'; use a time such as 2013-01-31T12:00:00Z, or milliseconds"
        ) from None


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
    except ValueError:
        names = []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInputError(f"invalid value {text!r} of option 'columns'; use comma-separated names")
    return tuple(names)


OnProblem: TypeAlias = Literal["fail", "skip"]
#: The value of ``starting_version`` that reads only later changes.
LATEST = "latest"

STREAM_OPTIONS: Mapping[str, str] = {
    "starting_version": "for a new stream: the first version to read, inclusive, or 'latest'; by default all",
    "max_versions": "the maximum number of versions in a batch",
    "on_gap": "if versions expired before the stream read them: 'fail', or 'skip' to continue after them",
    "on_overwrite": "if rows of the table were replaced or deleted: 'fail', or 'skip' to ignore such commits",
}
WRITE_OPTIONS: Mapping[str, str] = {
    "stream_id": "for streams, required: the identity of the stream, which must stay the same after a restart",
    "run_id": "for batch writes: the id of the write, which is committed once, however often it is repeated",
    "partition_by": "the partition columns of a new table, comma-separated",
    "primary_key": "the primary key columns of a new table, comma-separated",
    "replace": "for batch writes in mode overwrite: replace the 'table', or only the 'partitions' of the rows",
    "partition": "for batch writes in mode overwrite: replace only this partition; JSON with a value for each column",
    "create": "for batch writes: 'true' if the table must not exist yet",
    "reads": 'for batch writes: the tables that were read, with their versions; JSON such as {"ns.t": 12}',
    "message": "the commit message",
}

_MAX_VERSIONS = 1_000_000
_MAX_ID_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOptions:
    """The read options of a stream."""

    #: The first version of a new stream, or None to read everything.
    starting_version: int | Literal["latest"] | None = None
    #: The maximum number of versions in a batch, or None for no limit.
    max_versions: int | None = None
    #: What to do if versions expired before the stream read them.
    on_gap: OnProblem = "fail"
    #: What to do if rows of the table were replaced or deleted.
    on_overwrite: OnProblem = "fail"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> StreamOptions:
        """Parse options, by lower-case names; others are ignored. Raises InvalidInputError."""
        start = options.get("starting_version")
        return cls(
            starting_version="latest" if start == LATEST else _stream_number(options, "starting_version", 0),
            max_versions=_stream_number(options, "max_versions", 1),
            on_gap=_on_problem(options, "on_gap"),
            on_overwrite=_on_problem(options, "on_overwrite"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """The options of a write. They are described under the same names in ``WRITE_OPTIONS``."""

    #: The identity of a stream.
    stream_id: str | None = None
    #: The id of a batch write.
    run_id: str | None = None
    #: The partition columns of a new table, or None for the table's own.
    partition_by: tuple[str, ...] | None = None
    #: The primary key columns of a new table.
    primary_key: tuple[str, ...] = ()
    #: Whether an overwrite replaces only the partitions of the rows.
    replaces_partitions: bool = False
    #: The only partition that an overwrite replaces.
    partition: Mapping[str, PartitionValue] | None = None
    #: Whether the table must not exist yet.
    must_create: bool = False
    #: The tables that were read, with their versions; None if unknown.
    reads: Mapping[str, int] | None = None
    #: The commit message.
    message: str | None = None

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> WriteOptions:
        """Parse options, by lower-case names; others are ignored. Raises InvalidInputError."""
        replace = options.get("replace", "table")
        if replace not in ("table", "partitions"):
            raise InvalidInputError(f"invalid value {replace!r} of option 'replace'; use 'table' or 'partitions'")
        if "replace" in options and "partition" in options:
            raise InvalidInputError("the options replace and partition exclude each other; use one of them")
        for name in ("stream_id", "run_id"):
            if name in options and not 0 < len(options[name]) <= _MAX_ID_CHARS:
                raise InvalidInputError(f"option {name!r} must have 1 to {_MAX_ID_CHARS} characters")
        return cls(
            stream_id=options.get("stream_id"),
            run_id=options.get("run_id"),
            partition_by=_stream_names(options, "partition_by"),
            primary_key=_stream_names(options, "primary_key") or (),
            replaces_partitions=replace == "partitions",
            partition=_partition(options.get("partition")),
            must_create=_is_true(options, "create"),
            reads=_reads(options.get("reads")),
            message=options.get("message"),
        )


def _stream_number(options: Mapping[str, str], name: str, least: int) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    is_number = text.isascii() and text.isdecimal() and len(text) <= len(str(2**32))
    if not is_number or int(text) < least or (least and int(text) > _MAX_VERSIONS):
        raise InvalidInputError(f"invalid value {text!r} of option {name!r}; use a number of at least {least}")
    return int(text)


def _on_problem(options: Mapping[str, str], name: str) -> OnProblem:
    text = options.get(name, "fail")
    if text == "fail":
        return "fail"
    if text == "skip":
        return "skip"
    raise InvalidInputError(f"invalid value {text!r} of option {name!r}; use 'fail' or 'skip'")


def _is_true(options: Mapping[str, str], name: str) -> bool:
    text = options.get(name, "false").lower()
    if text not in ("true", "false"):
        raise InvalidInputError(f"invalid value {options[name]!r} of option {name!r}; use 'true' or 'false'")
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
        raise InvalidInputError(f"invalid value {text!r} of option 'partition'; use JSON such as {{\"month\": 2}}")
    partition: Mapping[str, PartitionValue] = values
    return partition


def _reads(text: str | None) -> Mapping[str, int] | None:
    if text is None:
        return None
    try:
        versions = json.loads(text)
    except (ValueError, RecursionError):
        versions = None
    if not isinstance(versions, dict) or not all(
        type(version) is int and version >= 0 for version in versions.values()
    ):
        raise InvalidInputError(
            f"invalid value {text!r} of option 'reads'; use JSON of tables and versions, such as {{\"ns.t\": 12}}"
        )
    reads: Mapping[str, int] = versions
    return reads


def _stream_names(options: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = options.get(name)
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise InvalidInputError(f"invalid value {text!r} of option {name!r}; use comma-separated names")
    return names
