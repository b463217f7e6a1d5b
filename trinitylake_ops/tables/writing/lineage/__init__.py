"""Lineage of publications: which tables were made of which others."""
