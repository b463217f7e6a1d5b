"""Nodes, and reading and keeping them."""
