"""Bytes and values of all catalog files, without I/O (FORMAT.md)."""
