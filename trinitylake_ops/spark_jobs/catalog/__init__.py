"""The catalog for Spark's SQL: a jar that Spark asks, and what answers it in Python."""
