"""Verify: check every file of a lakehouse, and report findings."""
