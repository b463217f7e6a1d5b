"""Export the engine's metrics with Prometheus's client library: for scraping, to a file, or to a Pushgateway."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
    push_to_gateway,
    write_to_textfile,
)

from trinitylake_ops.errors import InvalidInputError, StorageError
from trinitylake_ops.telemetry.hub import INSTRUMENTS, Instrument, Kind

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "trinitylake_"
_PUSH_SECONDS = 10.0


class PrometheusListener:
    """Collects the metrics of this process.

    Args:
        registry: The registry to use. By default a new registry.
        without: Instruments that the caller already provides in ``registry``.
    """

    def __init__(self, registry: CollectorRegistry | None = None, without: Collection[str] = ()):
        self.registry = registry or CollectorRegistry()
        self._metrics = {
            name: _metric(instrument, self.registry)
            for name, instrument in INSTRUMENTS.items()
            if name not in set(without)
        }
        #: Counters and histograms by their labels, because a lookup in the library takes longer than counting.
        self._series: dict[tuple[object, ...], Counter | Gauge | Histogram | None] = {}

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """Increase a counter."""
        metric = self._of_labels(name, labels)
        if isinstance(metric, Counter):
            metric.inc(amount)

    def observe(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Add a value to a histogram."""
        metric = self._of_labels(name, labels)
        if isinstance(metric, Histogram):
            metric.observe(value)

    def put(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Set a gauge."""
        metric = self._metrics.get(name)
        if isinstance(metric, Gauge):
            (metric.labels(**labels) if labels else metric).set(value)

    def _of_labels(self, name: str, labels: dict[str, str]) -> Counter | Gauge | Histogram | None:
        key = (name, *labels.items())
        series = self._series.get(key)
        if series is None:
            metric = self._metrics.get(name)
            series = metric.labels(**labels) if labels and metric is not None else metric
            self._series[key] = series
        return series

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def write(self, path: Path) -> None:
        """Write a file for the node exporter's textfile collector atomically. Raises StorageError."""
        try:
            write_to_textfile(os.fspath(path), self.registry)
        except OSError as error:
            raise StorageError(
                f"metrics cannot be written to {str(path)!r}: {error.strerror or error}", path=str(path)
            ) from error

    def push(self, url: str, job: str) -> None:
        """Replace the metrics of a job at a Pushgateway.

        Args:
            url: The HTTP or HTTPS URL of the Pushgateway.
            job: The name of the job.

        Raises:
            InvalidInputError: The URL has another scheme.
            StorageError: The request failed.
        """
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidInputError("metrics are pushed to a URL such as http://pushgateway:9091")
        try:
            push_to_gateway(url, job=job, registry=self.registry, timeout=_PUSH_SECONDS)
        except OSError as error:  # includes HTTP errors
            raise StorageError(f"metrics cannot be pushed: {type(error).__name__}: {error}") from error


def _metric(instrument: Instrument, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name, description, labels = f"{PREFIX}{instrument.name}", instrument.description, instrument.labels
    if instrument.kind == Kind.HISTOGRAM:
        return Histogram(name, description, labels, buckets=instrument.bounds, registry=registry)
    kind = Counter if instrument.kind == Kind.COUNTER else Gauge
    return kind(name, description, labels, registry=registry)
