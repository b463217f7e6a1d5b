"""Record spans through OpenTelemetry's API (``opentelemetry-api``) if the process has configured it, or do nothing.

The API is never imported here, because loading it takes longer than opening a lakehouse. To record spans, an
application, its automatic instrumentation, or ``telemetry/otel.py`` loads the API and sets a tracer provider.
Otherwise, each span costs one dictionary lookup.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

logger = logging.getLogger(__name__)

SCOPE = "trinitylake_ops"
Attributes = Mapping[str, str | int | float | bool]
_FAILED = "a span could not be recorded; the work continues"

_known: tuple[Any, Any] = (None, None)  # a provider, and its tracer


def tracer() -> Any | None:
    """Return the tracer of the process, or None if no provider was set."""
    global _known  # noqa: PLW0603 - creating a tracer costs more than a span
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


def is_recorded() -> bool:
    """Whether the current span is recorded, so that child spans are useful."""
    interface = sys.modules.get("opentelemetry.trace")
    current = getattr(interface, "get_current_span", None)
    return current is not None and bool(current().is_recording())


class _NoopSpan:
    """Context manager without a span."""

    def __enter__(self) -> _NoopSpan:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def set(self, attributes: Attributes) -> None:
        """Ignore attributes."""

    def fail(self, error: str) -> None:
        """Ignore a failure."""


class _Span:
    """Context manager for a span. The API's own context manager takes twice as long."""

    __slots__ = ("_contexts", "_span", "_token")

    def __init__(self, source: Any, name: str, attributes: Attributes | None):
        self._contexts = sys.modules["opentelemetry.context"]
        self._span = source.start_span(name, attributes=attributes)
        self._token: Any = None

    def __enter__(self) -> _Span:
        interface = sys.modules["opentelemetry.trace"]
        self._token = self._contexts.attach(interface.set_span_in_context(self._span))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._contexts.detach(self._token)
        try:
            if kind is not None:
                self.fail(kind.__name__)
            self._span.end()
        except Exception:  # a failing span processor must not fail a commit
            logger.warning(_FAILED, exc_info=True)

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._span.set_attributes(attributes)

    def fail(self, error: str) -> None:
        """Record a failure by the type of its error. Messages may contain names, so they are not recorded."""
        from opentelemetry.trace import StatusCode

        self._span.set_attribute("error.type", error)
        self._span.set_status(StatusCode.ERROR)


_NOOP_SPAN = _NoopSpan()


def span(name: str, attributes: Attributes | None = None) -> AbstractContextManager[_NoopSpan | _Span]:
    """Open a child span of the current span for a block. An exception in the block marks the span as failed."""
    source = tracer()
    if source is None:
        return _NOOP_SPAN
    try:
        return _Span(source, name, attributes)
    except Exception:
        logger.warning(_FAILED, exc_info=True)
        return _NOOP_SPAN


def note(name: str, begun_ns: int, attributes: Attributes) -> None:
    """Record a child span of the current span that ends now.

    Args:
        name: The name of the span.
        begun_ns: When the span began, from ``time.time_ns``.
        attributes: The attributes of the span.
    """
    source = tracer()
    if source is None:
        return
    try:
        source.start_span(name, attributes=attributes, start_time=begun_ns).end(time.time_ns())
    except Exception:
        logger.warning(_FAILED, exc_info=True)
