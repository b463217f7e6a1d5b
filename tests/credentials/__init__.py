"""Credentials stay out of all text: what the package prints, logs, raises, records or hands to Spark and Dagster."""
