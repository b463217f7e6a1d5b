"""Compaction of the tree and of tables."""
