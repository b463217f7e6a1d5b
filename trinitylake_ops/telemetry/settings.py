"""Telemetry of a process by its environment, and its log as JSON lines."""

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
    """Where numbers go at the end of a process: to a file, to a Pushgateway as those of a job, or by OpenTelemetry.

    ``otel`` also sends spans. Needs the extra ``metrics`` for the first two, and ``otel`` for the third.
    """

    metrics_file: Path | None = None
    push_url: str | None = None
    job: str = _JOB
    otel: bool = False

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] | None = None) -> TelemetrySettings:
        """Return the settings in an environment. Raises InvalidInputError."""
        found = os.environ if environment is None else environment
        choice = found.get(OTEL_VARIABLE, "").strip().lower()
        if choice not in (*_TRUE, *_FALSE):
            raise InvalidInputError(f"{OTEL_VARIABLE} is {choice[:20]!r}; it is 1 or 0")
        file = found.get(FILE_VARIABLE, "")
        return cls(
            Path(file) if file else None,
            found.get(PUSH_VARIABLE, "") or None,
            found.get(JOB_VARIABLE, "") or _JOB,
            choice in _TRUE,
        )

    def start(self) -> Callable[[], None]:
        """Listen from now on. Returns what sends all at the end, which raises no error: it warns.

        Raises MissingExtraError.
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
            except TrinityLakeError as error:  # the work is done, and must not look as if it had failed
                logger.warning("%s", error)

        return finish


def is_enabled() -> bool:
    """Whether anybody hears of what is begun now. A process that has set up OpenTelemetry does, its meters too."""
    if spans.tracer() is None:
        return hub.is_heard()
    from trinitylake_ops.telemetry.otel import listen_once

    listen_once()
    return True


_lock = threading.Lock()
_has_started: list[int] = []  # the process that did: a forked child begins anew


def start_once() -> None:
    """Start what the environment asks for, once in a process; it ends with the process.

    Raises InvalidInputError, MissingExtraError.
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
    """Add fields, such as ``operation`` and ``run_id``, to each line of this block. None leaves one as it is."""
    token = _about.set({**_fields_now(), **{name: value for name, value in fields.items() if value is not None}})
    try:
        yield
    finally:
        _about.reset(token)


def _fields_now() -> Mapping[str, Any]:
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
        fields = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
        fields["message"] = self._redact(record.getMessage())
        fields["version"] = self._engine
        if record.exc_info:
            fields["exception"] = self._redact(self.formatException(record.exc_info))
        return json.dumps({**fields, **_fields_now(), **getattr(record, "fields", {})}, default=str)


def log_as_json(redact: Callable[[str], str]) -> None:
    """Let all loggers of the process write JSON lines to standard error, without what ``redact`` takes out."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(redact))
    logging.getLogger().handlers[:] = [handler]
    logging.getLogger("trinitylake_ops").setLevel(logging.INFO)
