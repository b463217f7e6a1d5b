"""The numbers of the engine for Prometheus, by its own client library: to be read, written to a file, or pushed."""

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
    """Keeps the numbers of this process. ``without`` names instruments that somebody else keeps in ``registry``."""

    def __init__(self, registry: CollectorRegistry | None = None, without: Collection[str] = ()):
        self.registry = registry or CollectorRegistry()
        self._kept = {
            name: _metric(one, self.registry) for name, one in INSTRUMENTS.items() if name not in set(without)
        }
        #: Counters and histograms with their labels: asking the library for one costs more than counting.
        self._labelled: dict[tuple[object, ...], Counter | Gauge | Histogram | None] = {}

    def add(self, name: str, amount: float, labels: dict[str, str]) -> None:
        """Count."""
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
        metric = self._kept.get(name)
        if isinstance(metric, Gauge):
            (metric.labels(**labels) if labels else metric).set(value)

    def _of_labels(self, name: str, labels: dict[str, str]) -> Counter | Gauge | Histogram | None:
        key = (name, *labels.items())
        found = self._labelled.get(key)
        if found is None:
            metric = self._kept.get(name)
            found = metric.labels(**labels) if labels and metric is not None else metric
            self._labelled[key] = found
        return found

    def text(self) -> bytes:
        """Return all of them as Prometheus reads them."""
        return generate_latest(self.registry)

    def write(self, path: Path) -> None:
        """Write a file for the node exporter's textfile collector, whole or not at all. Raises StorageError."""
        try:
            write_to_textfile(os.fspath(path), self.registry)
        except OSError as error:
            raise StorageError(
                f"metrics cannot be written to {str(path)!r}: {error.strerror or error}", path=str(path)
            ) from error

    def push(self, url: str, job: str) -> None:
        """Replace what a Pushgateway has of a job. Raises InvalidInputError for another URL, StorageError."""
        if urlsplit(url).scheme not in ("http", "https"):
            raise InvalidInputError("metrics are pushed to a URL such as http://pushgateway:9091")
        try:
            push_to_gateway(url, job=job, registry=self.registry, timeout=_PUSH_SECONDS)
        except OSError as error:  # among them those of HTTP
            raise StorageError(f"metrics cannot be pushed: {type(error).__name__}: {error}") from error


def _metric(one: Instrument, registry: CollectorRegistry) -> Counter | Gauge | Histogram:
    name = f"{PREFIX}{one.name}"
    if one.kind == Kind.HISTOGRAM:
        return Histogram(name, one.description, one.labels, buckets=one.bounds, registry=registry)
    kind = Counter if one.kind == Kind.COUNTER else Gauge
    return kind(name, one.description, one.labels, registry=registry)
