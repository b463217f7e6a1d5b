"""Garbage collection: trim, expire, purge and orphans."""
