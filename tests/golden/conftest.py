"""Check the lakehouses of these tests when they end."""

from tests.lakes import lake, lakes

__all__ = ["lake", "lakes"]
