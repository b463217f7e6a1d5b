"""Exports: making, checking, restoring and pruning them."""
