"""Fixtures of the flights, and of the deployment, for all tests of this folder."""

from tests.e2e.topology import topology
from tests.flights import flights_csv

__all__ = ["flights_csv", "topology"]
