"""The operations themselves."""
