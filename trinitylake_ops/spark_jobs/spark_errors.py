"""Failures of Spark jobs as this package's errors: one line with the root cause."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import unquote

from py4j.protocol import Py4JJavaError
from pyspark.errors import PySparkException

from trinitylake_ops.errors import CorruptFileError, JobFailedError, TrinityLakeError

_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(r"^(?P<module>[A-Za-z_][\w.]*\.)?(?P<name>[A-Za-z_]\w*)(?:: (?P<message>.*))?$")
_SQL_STATE = re.compile(r"\s*SQLSTATE: \w{5}.*$")
_OWN_PACKAGE = "trinitylake_ops."


@contextmanager
def spark_failures(what: str) -> Iterator[None]:
    """Raise what made a Spark job fail as a typed error.

    An error of this package that a task raised keeps its class; a file that Spark cannot read is a
    CorruptFileError with its path; anything else a JobFailedError that says ``what`` failed and why.
    """
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise _translated(what, _messages(error)) from error


def _translated(what: str, messages: list[str]) -> TrinityLakeError:
    """Return the error for a chain of messages, outermost first."""
    for message in reversed(messages):
        if _TRACEBACK in message:
            return _from_traceback(what, message)
    for position, message in enumerate(messages):
        if "FAILED_READ_FILE" in message:
            path = message.partition(" file ")[2].partition(".  SQLSTATE")[0].strip()
            return CorruptFileError(
                f"cannot {what}: Spark cannot read a file: {_one_line(messages[-1] if position + 1 else message)}",
                path=unquote(path.removeprefix("file://")) or None,
            )
    return JobFailedError(f"cannot {what}: {_one_line(messages[-1])}")


def _from_traceback(what: str, message: str) -> TrinityLakeError:
    """Return the error that a Python task raised last, by the last line of a traceback that names one."""
    lines = [line.rstrip() for line in message.partition(_TRACEBACK)[2].splitlines()]
    raised = [match for line in lines if not line.startswith(" ") and (match := _RAISED.match(line))]
    named = [match for match in raised if match["message"] is not None] or raised
    if not named:
        return JobFailedError(f"cannot {what}: {_one_line(message)}")
    last = named[-1]
    text = _one_line(last["message"] or "")
    error_class = _own_error_class(last["module"] or "", last["name"])
    if error_class is not None:
        return error_class(text)
    return JobFailedError(f"cannot {what}: {last['name']}{f': {text}' if text else ''}")


def _own_error_class(module: str, name: str) -> type[TrinityLakeError] | None:
    if not module.startswith(_OWN_PACKAGE):
        return None
    found = getattr(importlib.import_module(module.rstrip(".")), name, None)
    is_plain = isinstance(found, type) and issubclass(found, TrinityLakeError)
    return found if is_plain else None


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
        messages.append(str(java_error.getMessage() or java_error.getClass().getName()))
        java_error = java_error.getCause()
    return messages


def _one_line(message: str) -> str:
    """Return the first line that says something, without Spark's own decoration."""
    first = next((line.strip() for line in message.splitlines() if line.strip()), "no reason given")
    return _SQL_STATE.sub("", first).partition(" Parse Mode:")[0]
