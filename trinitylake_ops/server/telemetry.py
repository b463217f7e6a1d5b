"""Metrics, traces and the status page of a server.

Metric labels have few distinct values: the route template, the status, and the lakehouse's name in the settings. They
never contain a table, a token or a principal. The state of a lakehouse is read on demand only, and at most once every
few seconds, regardless of how many clients request it.

Spans are exported only if the extra ``otel`` is installed and ``send_traces`` was called. A client may pass its span
in the header ``traceparent``. Span attributes are the same as metric labels, plus the request id from the log.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.operations.status.state import Status, emit_status_metrics, lakehouse_status
from trinitylake_ops.reports.status import status_page
from trinitylake_ops.storage import MeteredStorage
from trinitylake_ops.telemetry.hub import STORAGE_BYTES, STORAGE_REQUESTS, listen
from trinitylake_ops.telemetry.prometheus import PrometheusListener
from trinitylake_ops.transaction.lakehouse import Lakehouse

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
_OUTCOMES = {200: "committed", 204: "committed", 409: "conflict", 500: "unknown", 503: "unavailable", 504: "unknown"}


class Metrics:
    """The metrics of one server, and the metrics that the engine emits in its process.

    Args:
        storages: The storages of its lakehouses, by name. They count their own requests.
    """

    def __init__(self, storages: Mapping[str, MeteredStorage]):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "trinitylake_requests", "Completed requests.", ("operation", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "trinitylake_request_seconds",
            "Duration of requests.",
            ("operation",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._in_progress = Gauge("trinitylake_requests_in_progress", "Requests in progress.", registry=self._registry)
        self._commits = Counter(
            "trinitylake_commits",
            "Requests that change a lakehouse, by outcome.",
            ("lakehouse", "outcome"),
            registry=self._registry,
        )
        self._lost = Counter(
            "trinitylake_lost_attempts",
            "Commit attempts that conflicted with another commit and were retried.",
            ("lakehouse",),
            registry=self._registry,
        )
        self._registry.register(_StorageCollector(storages))
        self._listener = PrometheusListener(self._registry, without=(STORAGE_REQUESTS, STORAGE_BYTES))
        self._end = listen(self._listener)

    def close(self) -> None:
        """Stop listening to the engine's metrics."""
        self._end()

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Count a request as in progress."""
        with self._in_progress.track_inprogress():
            yield

    def note_request(self, operation: str, status: int, seconds: float) -> None:
        """Count a completed request.

        Args:
            operation: The method and the route template.
            status: The HTTP status of the response.
            seconds: The duration of the request.
        """
        self._requests.labels(operation, str(status)).inc()
        self._seconds.labels(operation).observe(seconds)

    def note_commit(self, lakehouse: str, status: int) -> None:
        """Count a request that changes a lakehouse, by its outcome.

        Args:
            lakehouse: The name of the lakehouse.
            status: The HTTP status of the response.
        """
        self._commits.labels(lakehouse, _OUTCOMES.get(status, "refused")).inc()

    def note_conflict(self, lakehouse: str) -> None:
        """Count a commit attempt that conflicted with another commit."""
        self._lost.labels(lakehouse).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return self._listener.text()


class _StorageCollector(Collector):
    """Metrics from the counters of the storages."""

    def __init__(self, storages: Mapping[str, MeteredStorage]):
        self._storages = storages

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "trinitylake_storage_requests", "Requests to the storage.", labels=("lakehouse", "storage", "kind")
        )
        rounds = CounterMetricFamily(
            "trinitylake_storage_rounds", "Sequential round trips to the storage.", labels=("lakehouse",)
        )
        n_bytes = CounterMetricFamily(
            "trinitylake_storage_bytes",
            "Bytes read from and written to the storage.",
            labels=("lakehouse", "storage", "way"),
        )
        for lakehouse, storage in self._storages.items():
            counts, scheme = storage.snapshot(), storage.root.partition(":")[0]
            for kind, number in counts.requests.items():
                requests.add_metric((lakehouse, scheme, kind), number)
            rounds.add_metric((lakehouse,), counts.rounds)
            n_bytes.add_metric((lakehouse, scheme, "read"), counts.bytes_read)
            n_bytes.add_metric((lakehouse, scheme, "written"), counts.bytes_written)
        return (requests, rounds, n_bytes)


logger = logging.getLogger(__name__)

#: The maximum age of a lakehouse state on the status page and in metrics.
PAGE_SECONDS, METRICS_SECONDS = 5.0, 60.0
_REFRESH_SECONDS = 30


class States:
    """The states of lakehouses, by lakehouse name in the server's settings."""

    def __init__(self, lakes: Mapping[str, Lakehouse]):
        self._lakes = lakes
        self._locks = {name: threading.Lock() for name in lakes}
        self._known: dict[str, tuple[float, Status | None]] = {}

    def page(self, names: Collection[str]) -> bytes:
        """Return the status page for some lakehouses. Lakehouses whose state cannot be read are listed separately."""
        states = {name: self._of(name, PAGE_SECONDS) for name in self._lakes if name in names}
        known_states = [(name, status) for name, status in states.items() if status is not None]
        silent = [name for name, status in states.items() if status is None]
        return status_page(known_states, silent=silent, refresh_seconds=_REFRESH_SECONDS).encode("utf-8", "replace")

    def emit(self) -> None:
        """Set the gauges of all lakehouses whose state can be read."""
        for name in self._lakes:
            status = self._of(name, METRICS_SECONDS)
            if status is not None:
                emit_status_metrics(status, name)

    def _of(self, name: str, newest_s: float) -> Status | None:
        with self._locks[name]:
            read_s, status = self._known.get(name, (-newest_s, None))
            if time.monotonic() - read_s < newest_s and name in self._known:
                return status
            try:
                status = lakehouse_status(self._lakes[name])
            except TrinityLakeError as error:
                logger.warning("cannot read the state of lakehouse %s: %s", name, error.message)
                status = None
            self._known[name] = (time.monotonic(), status)
            return status


T = TypeVar("T")

_NAME = "trinitylake_ops.server"
_TRACE_HEADERS = ("traceparent", "tracestate")
_MAX_CHARS = 512


@contextmanager
def request_span(method: str, headers: Mapping[str, str], request_id: str) -> Iterator[Span]:
    """Begin the span of a request, as a child of the client's span if the client passes a span.

    Args:
        method: The HTTP method.
        headers: The headers of the request, in lower case.
        request_id: The id of the request.
    """
    carrier = {name: headers[name] for name in _TRACE_HEADERS if len(headers.get(name, "")) in range(1, _MAX_CHARS)}
    tracer = trace.get_tracer(_NAME)
    with tracer.start_as_current_span(
        method,
        context=propagate.extract(carrier),
        kind=SpanKind.SERVER,
        attributes={"http.request.method": method, "trinitylake.request": request_id},
        record_exception=False,
    ) as span:
        yield span


def record_response(span: Span, operation: str, status: int, error: str | None) -> None:
    """Record the outcome of a request on its span.

    Args:
        span: The span.
        operation: The method and the route template.
        status: The HTTP status of the response.
        error: The type of the failure, or None for success.
    """
    span.update_name(operation)
    span.set_attributes({"http.route": operation.partition(" ")[2], "http.response.status_code": status})
    if error is not None:
        span.set_attribute("error.type", error)
    if status >= 500:
        span.set_status(StatusCode.ERROR)


@contextmanager
def change_span(lakehouse: str) -> Iterator[Span]:
    """Begin the span of a change of a lakehouse, which covers all commit attempts."""
    with trace.get_tracer(_NAME).start_as_current_span(
        "change", attributes={"trinitylake.lakehouse": lakehouse}, record_exception=False
    ) as span:
        yield span


def in_this_context(work: Callable[[], T]) -> Callable[[], T]:
    """Return a function that runs in the current tracing context, in whichever thread it is called."""
    context = contextvars.copy_context()
    return lambda: context.run(work)
