"""Spans by OpenTelemetry's interface, where the process has set it up; otherwise nothing.

The interface is never imported here. Who wants spans has loaded it, and has set a tracer provider: an application, its
auto-instrumentation, or ``telemetry/otel.py``. So the engine needs no library, and a process without one pays a look
into a dictionary.
"""

from __future__ import annotations

import contextvars
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

T = TypeVar("T")

SCOPE = "trinitylake_ops"
Attributes = Mapping[str, str | int | float | bool]

_known: tuple[Any, Any] = (None, None)  # a provider, and its tracer


def tracer() -> Any | None:
    """Return the tracer of the process, None where no provider was set."""
    global _known  # noqa: PLW0603 - making a tracer costs more than a span
    interface = sys.modules.get("opentelemetry.trace")
    provider_of = getattr(interface, "get_tracer_provider", None)  # None while another thread imports it
    if interface is None or provider_of is None:
        return None
    provider = provider_of()
    if isinstance(provider, interface.ProxyTracerProvider):
        return None
    if _known[0] is not provider:
        _known = (provider, provider.get_tracer(SCOPE))
    return _known[1]


class SpanBatcher(Protocol):
    """Has spans made later than the block that they tell of (``telemetry/deferred_spans.py``)."""

    def begin(self, tracer: Any, name: str, attributes: Attributes | None) -> AbstractContextManager[Any]:
        """Begin a span within the present one."""

    def note(self, tracer: Any, name: str, begun_ns: int, attributes: Attributes) -> None:
        """Record a span that ends now."""


_batcher: SpanBatcher | None = None


def defer(batcher: SpanBatcher) -> Callable[[], None]:
    """Let all spans from now on be made later. Returns what ends that."""
    global _batcher  # noqa: PLW0603 - that of the process
    _batcher = batcher

    def end() -> None:
        global _batcher  # noqa: PLW0603
        if _batcher is batcher:
            _batcher = None

    return end


def is_recorded() -> bool:
    """Whether the present span is recorded, so that parts of it are worth a span."""
    interface = sys.modules.get("opentelemetry.trace")
    current = getattr(interface, "get_current_span", None)
    return current is not None and bool(current().is_recording())


class _Nothing:
    """A span that nobody records."""

    def set(self, attributes: Attributes) -> None:
        """Forget attributes."""

    def fail(self, error: str) -> None:
        """Forget a failure."""


class _Recorded:
    """A span that is recorded, unless it was sampled out."""

    def __init__(self, span: Any):
        self._span = span

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def fail(self, error: str) -> None:
        """Say that it failed, and with an error of which type. Messages may hold names, and stay out."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error)
        self._span.set_status(StatusCode.ERROR)


_NOTHING = _Nothing()


class _NoopSpan:
    """A block within no span."""

    def __enter__(self) -> _Nothing:
        return _NOTHING

    def __exit__(self, *_: object) -> None:
        pass


class _SpanScope:
    """A block within a span. By hand: half of what the interface's own context manager costs is not the span."""

    __slots__ = ("_contexts", "_span", "_token")

    def __init__(self, own: Any, name: str, attributes: Attributes | None):
        self._contexts = sys.modules["opentelemetry.context"]
        self._span = own.start_span(name, attributes=attributes)
        self._token: Any = None

    def __enter__(self) -> _Recorded:
        interface = sys.modules["opentelemetry.trace"]
        self._token = self._contexts.attach(interface.set_span_in_context(self._span))
        return _Recorded(self._span)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._contexts.detach(self._token)
        if kind is not None:
            _Recorded(self._span).fail(kind.__name__)
        self._span.end()


_NOOP_SPAN = _NoopSpan()


def span(name: str, attributes: Attributes | None = None) -> AbstractContextManager[_Nothing | _Recorded]:
    """Begin a span within the present one, and end it with the block. An exception is its failure."""
    own = tracer()
    if own is None:
        return _NOOP_SPAN
    return _SpanScope(own, name, attributes) if _batcher is None else _batcher.begin(own, name, attributes)


def note(name: str, begun_ns: int, attributes: Attributes) -> None:
    """Record a span that ends now, and began at a time of ``time.time_ns``, within the present one."""
    own = tracer()
    if own is None:
        return
    if _batcher is None:
        own.start_span(name, attributes=attributes, start_time=begun_ns).end(time.time_ns())
    else:
        _batcher.note(own, name, begun_ns, attributes)


def in_this_context(work: Callable[[], T]) -> Callable[[], T]:
    """Return work that belongs to the present span, whichever thread does it."""
    context = contextvars.copy_context()
    return lambda: context.run(work)
