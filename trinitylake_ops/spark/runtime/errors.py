"""Translation of Spark failures to errors of this package, and Spark version requirements."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyspark
from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from trinitylake_ops.errors import (
    CommitOutcomeUnknownError,
    CorruptFileError,
    InvalidInputError,
    JobFailedError,
    TrinityLakeError,
)

if TYPE_CHECKING:
    import pyarrow as pa

_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?P<module>[A-Za-z_][\w.]*\.)?(?P<name>[A-Za-z_]\w*)(?:: (?P<message>.*))?$")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}.*$")
#: How the message of a CommitOutcomeUnknownError names the commit.
_RESOLVE = re.compile(r"trinitylake resolve-commit (?P<version>\d+) (?P<commit_id>\S+)")
_OWN_PACKAGE = "trinitylake_ops."
#: The format of this package's errors in exceptions from the catalog's jar.
_OWN_LINE = re.compile(r"(?P<name>[A-Z]\w*): (?P<message>.*)")
_OWN_ERRORS = "trinitylake_ops.errors"


@contextmanager
def spark_failures(description: str) -> Iterator[None]:
    """Raise the cause of a failed Spark job as a typed error.

    An error of this package that a task raised keeps its class. A file that Spark cannot read is reported as a
    CorruptFileError with its path. Any other failure is reported as a JobFailedError.

    Args:
        description: The operation, for messages of the form ``cannot <description>: ...``.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise _translate(description, _messages(error)) from error


def _translate(description: str, messages: list[str]) -> TrinityLakeError:
    """Return the error for a chain of messages, ordered from the outermost to the innermost."""
    for message in reversed(messages):
        if _TRACEBACK in message:
            return _from_traceback(description, message)
    for message in messages:
        line = _OWN_LINE.match(_one_line(message))
        if line is not None and _own_error_class(_OWN_ERRORS, line["name"]) is not None:
            return _error(description, _OWN_ERRORS, line["name"], line["message"])
    reading = [position for position, message in enumerate(messages) if "FAILED_READ_FILE" in message]
    if reading:
        path = messages[reading[-1]].partition(" file ")[2].partition(".  SQLSTATE")[0].strip()
        reason = "; ".join(map(_one_line, messages[reading[-1] + 1 :])) or _one_line(messages[reading[-1]])
        return CorruptFileError(
            f"cannot {description}: Spark cannot read its source: {reason}",
            path=unquote(path.removeprefix("file://")) or None,
        )
    return JobFailedError(f"cannot {description}: {_one_line(messages[-1])}")


def _from_traceback(description: str, message: str) -> TrinityLakeError:
    """Return the error that a Python task raised, from the line after the frames of the last traceback."""
    lines = message.rpartition(_TRACEBACK)[2].splitlines()
    raised = next((line for line in lines if line and not line.startswith(" ")), "")
    match = _RAISED.match(raised)
    if match is None:
        return JobFailedError(f"cannot {description}: {_one_line(raised or message)}")
    return _error(description, match["module"] or "", match["name"], (match["message"] or "").strip())


def _error(description: str, module: str, name: str, text: str) -> TrinityLakeError:
    error_class = _own_error_class(module, name)
    commit = _RESOLVE.search(text)
    if error_class is CommitOutcomeUnknownError and commit is not None:
        return CommitOutcomeUnknownError(text, commit_id=commit["commit_id"], version=int(commit["version"]))
    if error_class is not None and error_class is not CommitOutcomeUnknownError:
        return error_class(text)
    return JobFailedError(f"cannot {description}: {name}{f': {text}' if text else ''}")


def _own_error_class(module: str, name: str) -> type[TrinityLakeError] | None:
    if not module.startswith(_OWN_PACKAGE):
        return None
    attribute = getattr(importlib.import_module(module.rstrip(".")), name, None)
    return attribute if isinstance(attribute, type) and issubclass(attribute, TrinityLakeError) else None


def _messages(error: PySparkException | Py4JJavaError) -> list[str]:
    if isinstance(error, PySparkException):
        messages = [str(error)]
        cause = error.__cause__
        while cause is not None:
            messages.append(str(cause))
            cause = cause.__cause__
        return messages
    messages = []
    java_error = error.java_exception
    while java_error is not None:
        if message := java_error.getMessage():
            messages.append(str(message))
        java_error = java_error.getCause()
    return messages or [str(error.java_exception.getClass().getName())]


def _one_line(message: str) -> str:
    """Return the first non-empty line, without Spark's additions."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    return _SQL_STATE.sub("", first).partition(" Parse Mode:")[0]


#: The first Spark version that supports Arrow batches in streaming writes, and the first one that supports limits in
#: streaming reads.
STREAM_WRITES = (4, 1)
STREAM_READS = (4, 2)
_TIMEZONE_IN_SCHEMAS = (4, 2)


def spark_version() -> tuple[int, int]:
    """Return the major and minor version."""
    major, minor = pyspark.__version__.split(".")[:2]
    return int(major), int(minor)


def too_old(least: tuple[int, int], feature: str) -> InvalidInputError:
    """Return the error for a feature that needs a newer version of Spark.

    Args:
        least: The required version.
        feature: The feature, in the plural.
    """
    needed = ".".join(map(str, least))
    return InvalidInputError(
        f"{feature} with this data source need Spark {needed} or newer, but this is {pyspark.__version__}"
    )


class TooOld(DataSourceStreamReader):
    """The stream reader for older Spark versions. Raises the error on first use, because Spark loses earlier errors."""

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 - Spark's name
        raise too_old(STREAM_READS, "streaming reads")

    def latestOffset(self, *_of_newer: Any) -> dict[str, Any]:  # noqa: N802 - Spark's name
        raise too_old(STREAM_READS, "streaming reads")

    def read(self, partition: InputPartition) -> Iterator[Any]:
        raise too_old(STREAM_READS, "streaming reads")


def arrow_schema(schema: StructType) -> pa.Schema:
    """Return the Arrow schema that Spark expects for batches of a schema, with timestamps in UTC."""
    from pyspark.sql.pandas.types import to_arrow_schema  # needs no pandas

    if spark_version() < _TIMEZONE_IN_SCHEMAS:
        return to_arrow_schema(schema)
    return to_arrow_schema(schema, timezone="UTC")


def value_of(partition: InputPartition | None) -> Any:
    """Return the value of a partition, or None if there are no partitions.

    Without partitions, Spark calls ``read`` once: with a partition without a value, or before 4.2 with None.
    """
    return None if partition is None else partition.value
