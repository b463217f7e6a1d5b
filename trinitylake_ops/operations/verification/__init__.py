"""Verify the files of a lakehouse and report findings."""
