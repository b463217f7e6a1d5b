"""Lakehouses of these tests are checked when they end."""

from tests.lakes import lake, lakes

__all__ = ["lake", "lakes"]
