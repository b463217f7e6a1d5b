"""Garbage collection: trim, expire, purge, removal of orphans, and the sweep below them."""
