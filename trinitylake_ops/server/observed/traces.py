"""Traces: one span for each request, and one for the change in it, by OpenTelemetry's interface.

The interface alone does nothing. The extra ``traces`` brings what sends spans away, and ``send_traces`` switches it on.
A request may name its caller's span by the header ``traceparent``. Attributes have the values that metrics have as
labels, and the request's id, which is in the log.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, StatusCode

T = TypeVar("T")

_NAME = "trinitylake_ops.server"
_CALLERS = ("traceparent", "tracestate")
_LONGEST_CHARS = 512


@contextmanager
def request_span(method: str, headers: Mapping[str, str], request_id: str) -> Iterator[Span]:
    """Begin the span of a request, within that of its caller if it names one."""
    carrier = {name: headers[name] for name in _CALLERS if len(headers.get(name, "")) in range(1, _LONGEST_CHARS)}
    tracer = trace.get_tracer(_NAME)
    with tracer.start_as_current_span(
        method,
        context=propagate.extract(carrier),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method, "trinitylake.request": request_id},
        record_exception=False,
    ) as span:
        yield span


def note_answer(span: Span, operation: str, status: int, error: str | None) -> None:
    """Say on a span how its request was answered. ``error`` is the type of the failure."""
    span.update_name(operation)
    span.set_attributes({"http.route": operation.partition(" ")[2], "http.response.status_code": status})
    if error is not None:
        span.set_attribute("error.type", error)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


@contextmanager
def change_span(lakehouse: str) -> Iterator[Span]:
    """Begin the span of a change of a lakehouse, with all its attempts."""
    with trace.get_tracer(_NAME).start_as_current_span(
        "change", attributes={"trinitylake.lakehouse": lakehouse}, record_exception=False
    ) as span:
        yield span


def in_this_context(work: Callable[[], T]) -> Callable[[], T]:
    """Return work that belongs to the present span, whichever thread does it."""
    context = contextvars.copy_context()
    return lambda: context.run(work)
