"""Local folders."""
