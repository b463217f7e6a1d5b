"""What the engine tells of its work: spans, counters and histograms, logs, and lineage. Nobody listens by default.

The engine depends on no library for it. Spans go to OpenTelemetry if the process has set it up. Numbers go to
listeners, which ``telemetry/prometheus.py`` and ``telemetry/otel.py`` bring. A program that sets up OpenTelemetry
itself adds ``DeferredSpans`` to its provider, so that no commit waits for spans.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.telemetry.deferred_spans import DeferredSpans

__all__ = ["DeferredSpans"]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "deferred_spans": ("DeferredSpans",),
    },
    extra="otel",
)
