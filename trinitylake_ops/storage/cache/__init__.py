"""Caches of immutable files: in memory, and in a folder that processes share."""
