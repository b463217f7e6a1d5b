"""Fixtures that check the lakehouses at the end of each test."""

from tests.lakes import lake, lakes

__all__ = ["lake", "lakes"]
