"""Operations as telemetry hears of them: a span, how they ended, how long they took, and the field in the log."""

from __future__ import annotations

import functools
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

from trinitylake_ops.telemetry import hub, spans
from trinitylake_ops.telemetry.instruments import OPERATION_SECONDS, OPERATIONS
from trinitylake_ops.telemetry.logs import about, fields_now
from trinitylake_ops.versions.commit_info import acting_run

logger = logging.getLogger(__name__)

C = TypeVar("C", bound=Callable[..., Any])

_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_FIELD = "operation"


def told(execute: C) -> C:
    """Return the method ``execute`` of an operation, which tells of itself under the name of its class."""

    @functools.wraps(execute)
    def telling_of_it(self: Any, *arguments: Any, **options: Any) -> Any:
        name = _WORD.sub("-", type(self).__name__).lower()
        if fields_now().get(_FIELD) == name:  # it calls that of its base
            return execute(self, *arguments, **options)
        with telling(name):
            return execute(self, *arguments, **options)

    return cast(C, telling_of_it)


def told_as(operation: str) -> Callable[[C], C]:
    """Return a decorator for a function that is an operation. Within the operation of that name it tells nothing."""

    def decorated(work: C) -> C:
        @functools.wraps(work)
        def telling_of_it(*arguments: Any, **options: Any) -> Any:
            if fields_now().get(_FIELD) == operation:
                return work(*arguments, **options)
            with telling(operation):
                return work(*arguments, **options)

        return cast(C, telling_of_it)

    return decorated


@contextmanager
def telling(operation: str) -> Iterator[None]:
    """Tell of an operation that a block is."""
    begun_s, outcome = time.monotonic(), "failed"
    run_id = acting_run()
    attributes = {"trinitylake.operation": operation, **({"trinitylake.run": run_id} if run_id else {})}
    try:
        with about(operation=operation, run_id=run_id), spans.span(f"operation {operation}", attributes):
            yield
        outcome = "done"
    finally:
        seconds = time.monotonic() - begun_s
        said = {"operation": operation, "outcome": outcome, "seconds": round(seconds, 3)}
        logger.info("%s: %s", operation, outcome, extra={"fields": said})
        hub.add(OPERATIONS, operation=operation, outcome=outcome)
        hub.observe(OPERATION_SECONDS, seconds, operation=operation)
