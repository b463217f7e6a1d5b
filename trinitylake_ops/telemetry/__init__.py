"""Telemetry of the engine: spans, metrics, JSON logs and lineage. Without a listener, nothing is recorded.

The engine depends on no telemetry library. Spans are sent to OpenTelemetry if the process has configured it. Metrics
are passed to listeners, which ``telemetry/prometheus.py`` and ``telemetry/otel.py`` provide.
"""
