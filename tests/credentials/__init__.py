"""Credentials never appear in output, logs, errors, records, or data passed to Spark and Dagster."""
