"""Configure telemetry from the environment of a process, and log JSON lines."""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.extras import needs
from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.hub import listen

logger = logging.getLogger(__name__)

FILE_VARIABLE = "TRINITYLAKE_METRICS_FILE"
PUSH_VARIABLE = "TRINITYLAKE_METRICS_PUSH"
JOB_VARIABLE = "TRINITYLAKE_METRICS_JOB"
OTEL_VARIABLE = "TRINITYLAKE_OTEL"
_TRUE, _FALSE = ("1", "true", "yes"), ("", "0", "false", "no")
_JOB = "trinitylake"


@dataclass(frozen=True, slots=True)
class TelemetrySettings:
    """Where a process sends its metrics. ``otel`` requires the extra ``otel``; the other fields require ``metrics``."""

    #: The file to write at the end of the process.
    metrics_file: Path | None = None
    #: The URL of a Pushgateway to push to at the end of the process.
    push_url: str | None = None
    #: The job name for the Pushgateway.
    job: str = _JOB
    #: Whether to send metrics and spans with OpenTelemetry.
    otel: bool = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> TelemetrySettings:
        """Read the settings from the environment. Raises InvalidInputError for an invalid value."""
        variables = os.environ if environment is None else environment
        choice = variables.get(OTEL_VARIABLE, "").strip().lower()
        if choice not in (*_TRUE, *_FALSE):
            raise InvalidInputError(f"{OTEL_VARIABLE} is {choice[:20]!r}; set it to 1 or 0")
        file = variables.get(FILE_VARIABLE, "")
        return cls(
            Path(file) if file else None,
            variables.get(PUSH_VARIABLE, "") or None,
            variables.get(JOB_VARIABLE, "") or _JOB,
            choice in _TRUE,
        )

    def start(self) -> Callable[[], None]:
        """Start collecting telemetry, and return a function that sends everything and stops the collection.

        The returned function logs a warning instead of raising an error.

        Raises:
            MissingExtraError: A required extra is not installed.
        """
        ends = contextlib.ExitStack()
        if self.otel:
            with needs("otel"):
                from trinitylake_ops.telemetry.otel import send
            ends.callback(send())
        if self.metrics_file is not None or self.push_url is not None:
            ends.callback(self._count())
        return ends.close

    def _count(self) -> Callable[[], None]:
        with needs("metrics"):
            from trinitylake_ops.telemetry.prometheus import PrometheusListener
        listener = PrometheusListener()
        end = listen(listener)

        def finish() -> None:
            end()
            try:
                if self.metrics_file is not None:
                    listener.write(self.metrics_file)
                if self.push_url is not None:
                    listener.push(self.push_url, self.job)
            except TrinityLakeError as error:  # the work succeeded and must not be reported as failed
                logger.warning("%s", error)

        return finish


def is_enabled() -> bool:
    """Whether telemetry is collected. Registers the meters of a process that has configured OpenTelemetry."""
    if spans.tracer() is None:
        return hub.is_heard()
    from trinitylake_ops.telemetry.otel import listen_once

    listen_once()
    return True


_lock = threading.Lock()
_has_started: list[int] = []  # the id of the process that started telemetry: a forked child must start it again


def start_once() -> None:
    """Start the telemetry that the environment configures, once per process and until it exits.

    Raises:
        InvalidInputError: A variable has an invalid value.
        MissingExtraError: A required extra is not installed.
    """
    with _lock:
        if _has_started == [os.getpid()]:
            return
        end = TelemetrySettings.of_environment().start()
        _has_started[:] = [os.getpid()]
        atexit.register(end)


_about: contextvars.ContextVar[Mapping[str, Any] | None] = contextvars.ContextVar("trinitylake_log", default=None)


@contextmanager
def about(**fields: Any) -> Iterator[None]:
    """Add fields, such as ``operation`` and ``run_id``, to each log line in a block. None keeps the current value."""
    token = _about.set({**_fields_now(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


def _fields_now() -> Mapping[str, Any]:
    """Return the fields of the current block."""
    return _about.get() or {}


class JsonFormatter(logging.Formatter):
    """Formats each record as one JSON object in ASCII, so that names from clients cannot break a line or a terminal.

    Args:
        redact: Removes credentials from messages and exceptions.
    """

    def __init__(self, redact: Callable[[str], str]):
        super().__init__()
        self._redact = redact
        self._engine = package_version("trinitylake-ops")

    def format(self, record: logging.LogRecord) -> str:
        timestamp = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        fields = {"time": timestamp, "level": record.levelname.lower(), "logger": record.name}
        fields["message"] = self._redact(record.getMessage())
        fields["version"] = self._engine
        if record.exc_info:
            fields["exception"] = self._redact(self.formatException(record.exc_info))
        return json.dumps({**fields, **_fields_now(), **getattr(record, "fields", {})}, default=str)


def log_as_json(redact: Callable[[str], str]) -> None:
    """Make all loggers of the process write JSON lines to stderr. ``redact`` removes credentials from them."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(redact))
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("trinitylake_ops").setLevel(logging.INFO)
