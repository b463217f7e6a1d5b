"""Clones as operations: made, compared, promoted, refreshed, dropped."""
