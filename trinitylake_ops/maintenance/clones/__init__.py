"""Clones: a whole lakehouse at another root, made, compared, promoted, refreshed and dropped."""
