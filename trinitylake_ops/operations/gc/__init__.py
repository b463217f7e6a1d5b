"""Garbage collection: mark the files that kept versions reach, and trim, expire, purge and orphan removal."""
