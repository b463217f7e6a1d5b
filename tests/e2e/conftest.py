"""Fixtures of the flights, for all tests of this folder."""

from tests.flights import flights_csv

__all__ = ["flights_csv"]
