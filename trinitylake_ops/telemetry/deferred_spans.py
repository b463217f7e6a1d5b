"""Spans of the engine that a thread lets OpenTelemetry's SDK make, so that no commit waits for it.

Between the steps of a commit, the code of the SDK and its memory are in no cache of the CPU. Made one after the other,
spans cost less than half. So a commit only notes what a span is. A thread has the SDK make many at a time, mostly while
commits wait for their storage.

Importing this needs the SDK.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextvars import Token
from typing import Any
from weakref import WeakSet

from opentelemetry.context import Context, attach, detach, get_current
from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.trace import Span, SpanContext, StatusCode, Tracer, get_current_span, set_span_in_context

from trinitylake_ops.telemetry import spans
from trinitylake_ops.telemetry.spans import Attributes

logger = logging.getLogger(__name__)

_BATCH = 256
_MOST = 1_024  # half of what the SDK's own queue takes by default
_SECONDS = 1.0


class DeferredSpan(Span):
    """A span that the SDK has not made yet.

    The SDK begins it as soon as somebody asks for its id, such as a client that traces its requests below it. So
    parents are those that they would be, and the sampler decides on each.
    """

    #: Guards the begin of all of them in the SDK, as a span begins that of its parent.
    beginning = threading.RLock()

    # What it begins with stands here, as a commit makes five of them.
    _ended_ns: int | None = None
    _later: Attributes | None = None
    _error: str | None = None
    _made: Span | None = None
    _token: Token[Context] | None = None

    def __init__(
        self, keeper: DeferredSpans, tracer: Tracer, name: str, attributes: Attributes | None, begun_ns: int | None
    ):
        self._keeper = keeper
        self._tracer = tracer
        self._name = name
        self._attributes = attributes
        self._above = get_current()
        self._is_part = begun_ns is not None
        self._begun_ns = begun_ns or time.time_ns()

    # As the engine uses it

    def __enter__(self) -> DeferredSpan:
        self._token = attach(set_span_in_context(self, self._above))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._token is not None:
            detach(self._token)
        if kind is not None:
            self.fail(kind.__name__)
        self.keep()

    def set(self, attributes: Attributes) -> None:
        """Add attributes."""
        self._later = attributes if self._later is None else {**self._later, **attributes}

    def fail(self, error: str) -> None:
        """Say that it failed, and with an error of which type."""
        self._error = error

    def keep(self) -> None:
        """End it now, and leave it to the thread."""
        self._ended_ns = time.time_ns()
        self._keeper.keep(self)

    def make(self) -> None:
        """Let the SDK make it, with what is known at its end. Parts of a span that is not recorded are left out."""
        above = get_current_span(self._above)
        if self._is_part and isinstance(above, DeferredSpan) and not above.is_recorded_by_sampler():
            return
        span = self._begun()
        if self._later is not None:
            span.set_attributes(self._later)
        if self._error is not None:
            span.set_attribute("error.type", self._error)
            span.set_status(StatusCode.ERROR)
        span.end(self._ended_ns)

    def is_recorded_by_sampler(self) -> bool:
        """Whether the sampler wants it."""
        return self._begun().get_span_context().trace_flags.sampled

    def _begun(self) -> Span:
        """Return the SDK's span, begun when this one was."""
        if self._made is None:
            with self.beginning:
                if self._made is None:
                    self._made = self._tracer.start_span(
                        self._name, self._above, attributes=self._attributes, start_time=self._begun_ns
                    )
        return self._made

    # As others see it, who find it as the present span

    def is_recording(self) -> bool:
        return self._made is None or self._made.is_recording()

    def get_span_context(self) -> SpanContext:
        return self._begun().get_span_context()

    def set_attributes(self, attributes: Mapping[str, Any]) -> None:
        self._begun().set_attributes(attributes)

    def set_attribute(self, key: str, value: Any) -> None:
        self._begun().set_attribute(key, value)

    def add_event(self, *args: Any, **named: Any) -> None:
        self._begun().add_event(*args, **named)

    def add_link(self, *args: Any, **named: Any) -> None:
        self._begun().add_link(*args, **named)

    def record_exception(self, *args: Any, **named: Any) -> None:
        self._begun().record_exception(*args, **named)

    def update_name(self, name: str) -> None:
        self._begun().update_name(name)

    def set_status(self, *args: Any, **named: Any) -> None:
        self._begun().set_status(*args, **named)

    def end(self, end_time: int | None = None) -> None:
        self._begun().end(end_time)


class DeferredSpans(SpanProcessor):
    """Has the process' spans of the engine made by a thread from now on.

    Add it to a provider before the processor that exports, since the SDK flushes processors in that order.
    """

    def __init__(self) -> None:
        self._ended: deque[DeferredSpan] = deque()
        self._is_shut = False
        self._begin()
        self._stop_batching = spans.defer(self)
        _processors.add(self)

    def begin(self, tracer: Tracer, name: str, attributes: Attributes | None) -> DeferredSpan:
        """Begin a span within the present one."""
        return DeferredSpan(self, tracer, name, attributes, None)

    def note(self, tracer: Tracer, name: str, begun_ns: int, attributes: Attributes) -> None:
        """Keep a part of the present span, which ends now."""
        DeferredSpan(self, tracer, name, attributes, begun_ns).keep()

    def keep(self, span: DeferredSpan) -> None:
        """Take a span that has ended. Whoever brings too many has to make them."""
        self._ended.append(span)
        n_ended = len(self._ended)
        if n_ended > _MOST or self._is_shut:
            self._make()
        elif n_ended > _BATCH and not self._wanted.is_set():
            self._wanted.set()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Make all that have ended."""
        self._make()
        return True

    def shutdown(self) -> None:
        """Make all that have ended. Those that begin from now on are made at once."""
        self._is_shut = True
        self._stop_batching()
        self._wanted.set()
        self._thread.join()
        self._make()

    def _begin(self) -> None:
        self._wanted = threading.Event()
        self._making = threading.RLock()  # an exporter may commit, too
        self._thread = threading.Thread(target=self._work, name="trinitylake-spans", daemon=True)
        self._thread.start()

    def begin_in_child(self) -> None:
        """Begin anew after a fork: the thread is in the parent, which makes its own spans."""
        self._ended.clear()
        if not self._is_shut:
            self._begin()

    def _work(self) -> None:
        while not self._is_shut:
            self._wanted.wait(_SECONDS)
            self._wanted.clear()
            self._make()

    def _make(self) -> None:
        with self._making:
            while self._ended:
                span = self._ended.popleft()  # nobody else takes any meanwhile
                try:
                    span.make()
                except Exception:  # whoever traces must fail no commit, nor the thread
                    logger.warning("a span could not be made; the work goes on", exc_info=True)


def _begin_present() -> None:
    """Begin the present span in the SDK, so that in a forked child it is the same."""
    get_current_span().get_span_context()


def _begin_in_child() -> None:
    DeferredSpan.beginning = threading.RLock()  # a thread of the parent may have held the other
    for one in list(_processors):
        one.begin_in_child()


_processors: WeakSet[DeferredSpans] = WeakSet()
os.register_at_fork(before=_begin_present, after_in_child=_begin_in_child)
