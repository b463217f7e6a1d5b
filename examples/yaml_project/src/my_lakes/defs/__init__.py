"""What dg loads."""
