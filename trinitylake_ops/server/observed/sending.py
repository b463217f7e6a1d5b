"""Sends spans away, by OpenTelemetry's own library. Only who asks for traces needs it: the extra ``traces``."""

from __future__ import annotations

from collections.abc import Callable

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def send_traces() -> Callable[[], None]:
    """Send the spans of this process by OTLP over HTTP, and return what sends the rest at its end.

    Where to, how many and with which headers stands in the environment, in OpenTelemetry's own variables, such as
    ``OTEL_EXPORTER_OTLP_ENDPOINT`` and ``OTEL_TRACES_SAMPLER``.
    """
    provider = TracerProvider(resource=Resource.create({"service.name": "trinitylake"}))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    trace.set_tracer_provider(provider)
    return provider.shutdown
