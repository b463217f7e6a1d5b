"""Clones of a lakehouse at another root: create, compare, promote, refresh and drop them."""
