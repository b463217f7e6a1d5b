"""The fixtures of the flights samples and of lakehouses, for all tests of this folder."""

from tests.flights import flights_csv, sample, sample_folder, spark
from tests.lakes import lakes

__all__ = ["flights_csv", "lakes", "sample", "sample_folder", "spark"]
