"""Options of the data source, for tables and for streams.

Options are part of Spark's plan, so credentials are not among them. Credentials come from the environment of the
driver, as Spark was started with it.
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
from trinitylake_ops.storage.options import OPTIONS_VARIABLE, StorageOptions, is_secret
from trinitylake_ops.storage.registry import with_environment

ROOT = "root"
#: The argument of ``load(...)``.
TABLE = "path"
STORAGE_PREFIX = "storage."

#: Every option except ``storage.*``, with its description.
OPTIONS: Mapping[str, str] = {
    ROOT: "the lakehouse's root URI",
    "version": "read at this version, a number",
    "timestamp": "read at this time: ISO 8601 with a time zone, or milliseconds since the epoch",
    "export": "read what the export of this name holds",
    "row_filter": "rows for which this holds, in the words of Iceberg's filters; the rest is not read",
    "columns": "these columns only, in this order: names with commas between them, or a JSON list",
    "from": "of changes: the first version, inclusive",
    "to": "of changes: the last version, inclusive",
    "parallelism": "how many tasks to make at least of what is large enough; by default the driver's processors",
}

_MOST_TASKS = 100_000

Time: TypeAlias = datetime | int


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRequest:
    """The target of a read: a metadata table, or ``NAMESPACE.TABLE``, at most at one of the three times.

    ``timestamp`` is an aware datetime or milliseconds since the epoch. ``first_version`` and ``last_version`` are
    inclusive. Only changes have them. ``row_filter`` and ``columns`` None mean all.
    """

    table: str
    version: int | None = None
    timestamp: Time | None = None
    export: str | None = None
    row_filter: str | None = None
    columns: tuple[str, ...] | None = None
    first_version: int | None = None
    last_version: int | None = None
    parallelism: int = 1

    def __post_init__(self) -> None:
        times = {"version": self.version, "timestamp": self.timestamp, "export": self.export}
        given = [name for name, value in times.items() if value is not None]
        if len(given) > 1:
            raise InvalidInputError(f"give one of the options {' and '.join(given)}, not several")
        if self.columns is not None and len(set(self.columns)) < len(self.columns):
            raise InvalidInputError(f"a column is asked for twice: {', '.join(self.columns)}")

    @property
    def time(self) -> str | None:
        """The option that gives the time of the read, None for the latest version."""
        times = {"version": self.version, "timestamp": self.timestamp, "export": self.export}
        return next((name for name, value in times.items() if value is not None), None)


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of a read, checked."""

    root: str
    storage_options: StorageOptions
    request: TableRequest

    @classmethod
    def parse(cls, options: Mapping[str, str], also: Collection[str] = ()) -> SourceOptions:
        """Return the settings in options; those in ``also`` are for other code.

        Raises InvalidInputError, which repeats no value of a storage option.
        """
        given = {name.lower(): value for name, value in options.items()}
        storage = {name.removeprefix(STORAGE_PREFIX): given[name] for name in given if name.startswith(STORAGE_PREFIX)}
        if secret := next(filter(is_secret, storage), None):
            raise InvalidInputError(
                f"the option {STORAGE_PREFIX + secret!r} would be seen in Spark's plans and logs; credentials come from"
                f" the environment of the driver, by {OPTIONS_VARIABLE} or the storage's own variables, set before"
                " Spark starts"
            )
        plain = {name: value for name, value in given.items() if not name.startswith(STORAGE_PREFIX)}
        if unknown := next((name for name in plain if name not in (*OPTIONS, *also, TABLE)), None):
            known = ", ".join([*OPTIONS, *also, f"{STORAGE_PREFIX}*"])
            raise InvalidInputError(f"there is no option {unknown!r}; the source has {known}")
        if not plain.get(ROOT):
            raise InvalidInputError(f"the option {ROOT!r} is missing: the lakehouse's root URI")
        if not plain.get(TABLE):
            raise InvalidInputError("say what to read: load('versions'), or load('NAMESPACE.TABLE')")
        request = TableRequest(
            table=plain[TABLE],
            version=_number(plain, "version"),
            timestamp=_time(plain.get("timestamp")),
            export=plain.get("export"),
            row_filter=plain.get("row_filter"),
            columns=_names(plain.get("columns")),
            first_version=_number(plain, "from"),
            last_version=_number(plain, "to"),
            parallelism=min(_number(plain, "parallelism") or os.cpu_count() or 1, _MOST_TASKS),
        )
        return cls(plain[ROOT], _with_environment(plain[ROOT], storage), request)


def _with_environment(root: str, given: Mapping[str, str]) -> StorageOptions:
    """Return storage options with those of this process's environment below them.

    Credentials are among them, so that tasks on other machines have those of the driver.
    """
    options = {**StorageOptions.parse(os.environ.get(OPTIONS_VARIABLE, "")), **StorageOptions(given)}
    return with_environment(root, options)


def _number(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(2**32))):
        raise InvalidInputError(f"the option {name!r} takes a number such as 12, not {text!r}")
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
            f"the option 'timestamp' takes a time such as 2013-01-31T12:00:00Z or milliseconds, not {text!r}"
        ) from None


def _names(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    try:
        names = json.loads(text) if text.lstrip().startswith("[") else [name.strip() for name in text.split(",")]
    except ValueError:
        names = []
    if not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInputError(f"the option 'columns' takes names with commas between them, not {text!r}")
    return tuple(names)


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
            starting_version="latest" if start == LATEST else _stream_number(given, "starting_version", 0),
            max_versions=_stream_number(given, "max_versions", 1),
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
            partition_by=_stream_names(given, "partition_by"),
            primary_key=_stream_names(given, "primary_key") or (),
            replaces_partitions=replace == "partitions",
            partition=_partition(given.get("partition")),
            must_create=_is_true(given, "create"),
            reads=_reads(given.get("reads")),
            message=given.get("message"),
        )


def _stream_number(given: Mapping[str, str], name: str, least: int) -> int | None:
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


def _stream_names(given: Mapping[str, str], name: str) -> tuple[str, ...] | None:
    text = given.get(name)
    if text is None:
        return None
    names = tuple(part.strip() for part in text.split(","))
    if not all(names):
        raise InvalidInputError(f"the option {name!r} takes names with commas between them, not {text!r}")
    return names
