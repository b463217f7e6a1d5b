"""Checks the lakehouses of these tests after each test."""

from tests.lakes import lake, lakes

__all__ = ["lake", "lakes"]
