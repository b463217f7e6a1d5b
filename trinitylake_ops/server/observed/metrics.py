"""Metrics of a server in the format of Prometheus.

Labels have few values: an operation by its path with names left out, a status, a lakehouse by its name in the settings.
No name of a table, token or person is among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from trinitylake_ops.storage import MeteredStorage
from trinitylake_ops.telemetry.hub import listen
from trinitylake_ops.telemetry.instruments import STORAGE_BYTES, STORAGE_REQUESTS
from trinitylake_ops.telemetry.prometheus import PrometheusListener

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0, 300.0)
_OUTCOMES = {200: "committed", 204: "committed", 409: "conflict", 500: "unknown", 503: "unavailable", 504: "unknown"}


class Metrics:
    """Counts of one server, and what the engine tells in its process.

    ``storages`` are those of its lakehouses, by their names, which count by themselves.
    """

    def __init__(self, storages: Mapping[str, MeteredStorage]):
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "trinitylake_requests", "Requests that were answered.", ("operation", "status"), registry=self._registry
        )
        self._seconds = Histogram(
            "trinitylake_request_seconds",
            "How long requests took.",
            ("operation",),
            buckets=_SECONDS,
            registry=self._registry,
        )
        self._in_progress = Gauge(
            "trinitylake_requests_in_progress", "Requests without an answer so far.", registry=self._registry
        )
        self._commits = Counter(
            "trinitylake_commits", "Requests to change a lakehouse.", ("lakehouse", "outcome"), registry=self._registry
        )
        self._lost = Counter(
            "trinitylake_lost_attempts",
            "Attempts to change a table that lost to another commit and were made again.",
            ("lakehouse",),
            registry=self._registry,
        )
        self._registry.register(_OfStorages(storages))
        self._listener = PrometheusListener(self._registry, without=(STORAGE_REQUESTS, STORAGE_BYTES))
        self._end = listen(self._listener)

    def close(self) -> None:
        """Hear no more of the engine."""
        self._end()

    @contextmanager
    def in_progress(self) -> Iterator[None]:
        """Count a request as being in progress."""
        with self._in_progress.track_inprogress():
            yield

    def note_request(self, operation: str, status: int, seconds: float) -> None:
        """Count a request that was answered. ``operation`` is its method and the template of its path."""
        self._requests.labels(operation, str(status)).inc()
        self._seconds.labels(operation).observe(seconds)

    def note_commit(self, lakehouse: str, status: int) -> None:
        """Count a request that would change a lakehouse, by its answer."""
        self._commits.labels(lakehouse, _OUTCOMES.get(status, "refused")).inc()

    def note_lost(self, lakehouse: str) -> None:
        """Count an attempt that lost to another commit."""
        self._lost.labels(lakehouse).inc()

    def text(self) -> bytes:
        """Return all metrics as Prometheus reads them."""
        return self._listener.text()


class _OfStorages(Collector):
    """What the storages have counted so far."""

    def __init__(self, storages: Mapping[str, MeteredStorage]):
        self._storages = storages

    def collect(self) -> Iterable[Metric]:
        requests = CounterMetricFamily(
            "trinitylake_storage_requests", "Requests to the storage.", labels=("lakehouse", "storage", "kind")
        )
        rounds = CounterMetricFamily(
            "trinitylake_storage_rounds", "Waits for the storage, one after the other.", labels=("lakehouse",)
        )
        n_bytes = CounterMetricFamily(
            "trinitylake_storage_bytes",
            "Bytes read from the storage and written to it.",
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
