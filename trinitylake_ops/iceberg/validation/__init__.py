"""Check files of tables before a decoder trusts the sizes that they declare."""
