"""Garbage collection: the mark of all files that kept versions reach, trim, expire, purge and orphans."""
