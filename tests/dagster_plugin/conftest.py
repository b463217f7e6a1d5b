"""The fixtures of the flights samples, and lakehouses, for all tests of this folder."""

from tests.flights import flights_csv, sample_folder, spark
from tests.lakes import lakes

__all__ = ["flights_csv", "lakes", "sample_folder", "spark"]
