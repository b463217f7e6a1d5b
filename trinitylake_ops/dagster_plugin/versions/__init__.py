"""Versions of a lakehouse for operators: a page of them, what checks found in each, and links that act on them."""
