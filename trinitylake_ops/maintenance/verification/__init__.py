"""Verify: every file of a lakehouse checked, and what was found."""
