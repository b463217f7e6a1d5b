"""What the engine tells of its work: spans, counters and histograms, logs, and lineage. Nobody listens by default.

The engine depends on no library for it. Spans go to OpenTelemetry if the process has set it up. Numbers go to
listeners, which ``telemetry/prometheus.py`` and ``telemetry/otel.py`` bring.
"""
