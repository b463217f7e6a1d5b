"""Fixtures with lakehouses whose invariants are checked after each test."""

from tests.lakes import lake, lakes

__all__ = ["lake", "lakes"]
