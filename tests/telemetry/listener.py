"""A listener that records metrics, and an exporter that records spans in memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Sampler

from trinitylake_ops.telemetry.hub import listen
from trinitylake_ops.telemetry.otel import stop_listening


class RecordedMetrics:
    """All recorded metrics, by instrument name and label values."""

    def __init__(self) -> None:
        self.added: dict[tuple[str, ...], float] = defaultdict(float)
        self.observed: dict[tuple[str, ...], list[float]] = defaultdict(list)
        self.gauges: dict[tuple[str, ...], float] = {}

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        self.added[name, *labels.values()] += amount

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        self.observed[name, *labels.values()].append(value)

    def put(self, name: str, value: float, labels: dict[str, str]) -> None:
        self.gauges[name, *labels.values()] = value


@contextmanager
def recorded_metrics() -> Iterator[RecordedMetrics]:
    metrics = RecordedMetrics()
    stop = listen(metrics)
    try:
        yield metrics
    finally:
        stop()


@contextmanager
def recorded_spans(patch: pytest.MonkeyPatch, sampler: Sampler | None = None) -> Iterator[InMemorySpanExporter]:
    """Set a tracer provider for the process, as an application does, and yield the exporter with its spans."""
    provider, exporter = TracerProvider(sampler), InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with patch.context() as context:
        context.setattr(trace, "get_tracer_provider", lambda: provider)
        yield exporter
    stop_listening()
    provider.shutdown()


def parents(exporter: InMemorySpanExporter) -> list[tuple[str, str]]:
    """Return the names of each span and of its parent ("" if there is none), in the order in which the spans ended."""
    spans: tuple[ReadableSpan, ...] = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans if span.context is not None}
    return [(span.name, "" if span.parent is None else names.get(span.parent.span_id, "?")) for span in spans]
