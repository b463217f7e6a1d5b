"""Fixtures that check the lakehouses of these tests at their end."""

from tests.lakes import lake, lakes

__all__ = ["lake", "lakes"]
