"""Lakehouses for the tests of this folder."""

from tests.lakes import lakes

__all__ = ["lakes"]
