"""The log as JSON: one object a line, with the version of this package, the run and the operation that it is about."""

from __future__ import annotations

import contextvars
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from typing import Any

_about: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("trinitylake_log", default=None)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Add fields, such as ``operation`` and ``run_id``, to each line of this block. None leaves one as it is."""
    token = _about.set({**fields_now(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


def fields_now() -> Mapping[str, Any]:
    """Return the fields of the present block."""
    return _about.get() or {}


class JsonFormatter(logging.Formatter):
    """One JSON object in ASCII for each record, so that no name of a client can break a line or a terminal.

    ``redact`` takes credentials out of messages and exceptions.
    """

    def __init__(self, redact: Callable[[str], str]):
        super().__init__()
        self._redact = redact
        self._engine = package_version("trinitylake-ops")

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        said = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        said["message"] = self._redact(record.getMessage())
        said["version"] = self._engine
        if record.exc_info:
            said["exception"] = self._redact(self.formatException(record.exc_info))
        return json.dumps({**said, **fields_now(), **getattr(record, "fields", {})}, default=str)


def log_as_json(redact: Callable[[str], str]) -> None:
    """Let all loggers of the process write JSON lines to standard error, without what ``redact`` takes out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(redact))
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("trinitylake_ops").setLevel(logging.INFO)
