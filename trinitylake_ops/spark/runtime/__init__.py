"""Spark itself: its JVM, Connect, jobs of bytes, errors."""
