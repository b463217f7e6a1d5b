"""Telemetry of the engine: spans, metrics, JSON logs and lineage. Without a listener it does nothing.

The engine depends on no telemetry library. Spans go to OpenTelemetry if the process has configured it. Metrics go to
listeners, which ``telemetry/prometheus.py`` and ``telemetry/otel.py`` provide.
"""
