"""The versions of a lakehouse for an operator: a page of them, what checks found in each, and links that act on them."""
