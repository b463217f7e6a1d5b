"""What a server tells of its work: metrics for Prometheus, traces for OpenTelemetry. Neither holds names of clients."""
