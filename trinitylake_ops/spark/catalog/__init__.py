"""The catalog for Spark's SQL."""
