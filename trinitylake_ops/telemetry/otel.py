"""Numbers by OpenTelemetry's interface, and its SDK with exporters, for processes that have not set one up.

Importing this needs the interface; ``send`` needs the extra ``otel``. Where to, how many and with which headers stands
in the environment, in OpenTelemetry's own variables, such as ``OTEL_EXPORTER_OTLP_ENDPOINT`` and
``OTEL_TRACES_SAMPLER``.
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
    """Hands numbers to instruments of a meter, by default that of the process.

    Counts are kept here until a reader of the meter asks for them, and values of histograms until then or until they
    are many. A commit makes dozens, and a call of the SDK costs far more than an addition. Each value keeps its
    context, of which the SDK makes exemplars.
    """

    def __init__(self, provider: MeterProvider | None = None):
        meter = (provider or metrics.get_meter_provider()).get_meter(SCOPE, package_version(_PACKAGE))
        self._lock = threading.Lock()
        self._counts: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        self._histograms: dict[str, Histogram] = {}
        self._values: deque[tuple[str, float, dict[str, str], Context]] = deque()
        self._gauges = {}
        for name, one in INSTRUMENTS.items():
            full = f"trinitylake.{name}"
            if one.kind == Kind.COUNTER:
                self._counts[name] = {}
                meter.create_observable_counter(full, [partial(self._counted, name)], one.unit, one.description)
            elif one.kind == Kind.HISTOGRAM:
                self._histograms[name] = meter.create_histogram(
                    full, one.unit, one.description, explicit_bucket_boundaries_advisory=one.bounds
                )
            else:
                self._gauges[name] = meter.create_gauge(full, one.unit, one.description)

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """Count."""
        counts, key = self._counts[name], tuple(labels.items())
        with self._lock:
            counts[key] = counts.get(key, 0) + amount

    def _counted(self, name: str, _options: CallbackOptions) -> list[Observation]:
        self._record()  # a reader asks for counts before it takes the histograms
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
            except IndexError:  # another thread took the last
                return
            self._histograms[name].record(value, labels, context)

    def put(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Set a gauge."""
        self._gauges[name].set(value, labels)


_lock = threading.Lock()
_ends: list[Callable[[], None]] = []


def listen_once() -> Callable[[], None]:
    """Let the meters of the process hear all numbers, once however often it is asked for. Returns what ends that."""
    with _lock:
        if not _ends:
            _ends.append(listen(OtelListener()))
    return stop_listening


def stop_listening() -> None:
    """Let the meters of the process hear no more."""
    with _lock:
        while _ends:
            _ends.pop()()


def send() -> Callable[[], None]:
    """Send spans and numbers of this process by OTLP over HTTP. Returns what sends the rest at its end.

    Raises MissingExtraError without the extra ``otel``.
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
    numbers = SdkMeterProvider([PeriodicExportingMetricReader(OTLPMetricExporter())], resource)
    metrics.set_meter_provider(numbers)
    end = listen_once()

    def shutdown() -> None:
        end()
        spans.shutdown()
        numbers.shutdown()

    return shutdown
