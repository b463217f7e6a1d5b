"""Check table files before a decoder trusts their declared sizes."""
