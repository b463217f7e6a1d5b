"""Send metrics through OpenTelemetry's API, and set up its SDK in processes that have not configured an SDK.

Importing this module requires the API; ``send`` requires the extra ``otel``. OpenTelemetry's own variables, such as
``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_TRACES_SAMPLER``, configure the target, the sampling and the headers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from importlib.metadata import version as package_version

from opentelemetry import metrics, trace
from opentelemetry.context import Context, get_current
from opentelemetry.metrics import CallbackOptions, Histogram, MeterProvider, Observation

from trinitylake_ops.extras import needs
from trinitylake_ops.telemetry.hub import INSTRUMENTS, Kind, listen
from trinitylake_ops.telemetry.spans import SCOPE

_PACKAGE = "trinitylake-ops"
_VALUES = 256


class OtelListener:
    """Passes measurements to the instruments of a meter, by default the meter of the process.

    Counts are buffered until a reader of the meter collects them. Histogram values are buffered until then or until
    there are 256 of them. A commit makes dozens of measurements, and an SDK call costs far more than an addition. Each
    value keeps its context, from which the SDK creates exemplars.
    """

    def __init__(self, provider: MeterProvider | None = None):
        meter = (provider or metrics.get_meter_provider()).get_meter(SCOPE, package_version(_PACKAGE))
        self._lock = threading.Lock()
        self._counts: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._values: deque[tuple[str, float, dict[str, str], Context]] = deque()
        self._gauges = {}
        for name, instrument in INSTRUMENTS.items():
            full_name, unit, description = f"trinitylake.{name}", instrument.unit, instrument.description
            if instrument.kind == Kind.COUNTER:
                self._counts[name] = {}
                meter.create_observable_counter(full_name, [partial(self._observe_counts, name)], unit, description)
            elif instrument.kind == Kind.HISTOGRAM:
                self._histograms[name] = meter.create_histogram(
                    full_name, unit, description, explicit_bucket_boundaries_advisory=instrument.bounds
                )
            else:
                self._gauges[name] = meter.create_gauge(full_name, unit, description)

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """Increase a counter."""
        counts, key = self._counts[name], tuple(labels.items())
        with self._lock:
            counts[key] = counts.get(key, 0) + amount

    def _observe_counts(self, name: str, _options: CallbackOptions) -> list[Observation]:
        self._record()  # a reader collects counters before histograms
        with self._lock:
            return [Observation(amount, dict(key)) for key, amount in self._counts[name].items()]

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Add a value to a histogram."""
        self._values.append((name, value, labels, get_current()))
        if len(self._values) >= _VALUES:
            self._record()

    def _record(self) -> None:
        while self._values:
            try:
                name, value, labels, context = self._values.popleft()
            except IndexError:  # another thread took the last value
                return
            self._histograms[name].record(value, labels, context)

    def put(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Set a gauge."""
        self._gauges[name].set(value, labels)


_lock = threading.Lock()
_ends: list[Callable[[], None]] = []


def listen_once() -> Callable[[], None]:
    """Start passing all measurements to the meters of the process, at most once. Return a function that stops this."""
    with _lock:
        if not _ends:
            _ends.append(listen(OtelListener()))
    return stop_listening


def stop_listening() -> None:
    """Stop passing measurements to the meters of the process."""
    with _lock:
        while _ends:
            _ends.pop()()


def send() -> Callable[[], None]:
    """Send spans and metrics of this process with OTLP over HTTP. Return a function that flushes and stops the export.

    Raises:
        MissingExtraError: The extra ``otel`` is not installed.
    """
    with needs("otel"):
        from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.metrics import MeterProvider as SdkMeterProvider
        from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    resource = Resource.create({"service.name": "trinitylake", "service.version": package_version(_PACKAGE)})
    spans = TracerProvider(resource=resource)
    spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(spans)
    meters = SdkMeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource)
    metrics.set_meter_provider(meters)
    end = listen_once()

    def shutdown() -> None:
        end()
        spans.shutdown()
        meters.shutdown()

    return shutdown
