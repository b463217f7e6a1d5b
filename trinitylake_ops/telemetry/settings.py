"""What a process tells, and to whom, by its environment: the same for commands, Dagster's runs and Spark's drivers."""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

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
        said = found.get(OTEL_VARIABLE, "").strip().lower()
        if said not in (*_TRUE, *_FALSE):
            raise InvalidInputError(f"{OTEL_VARIABLE} is {said[:20]!r}; it is 1 or 0")
        file = found.get(FILE_VARIABLE, "")
        return cls(
            Path(file) if file else None,
            found.get(PUSH_VARIABLE, "") or None,
            found.get(JOB_VARIABLE, "") or _JOB,
            said in _TRUE,
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


def is_told() -> bool:
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
