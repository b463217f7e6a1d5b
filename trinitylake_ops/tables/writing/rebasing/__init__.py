"""Rebases of staged tables: what others did since, and the staged files on the newer table."""
