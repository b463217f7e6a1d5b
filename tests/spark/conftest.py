"""Fixtures for the Spark tests: samples of the flight data, and lakehouses."""

from tests.flights import flights_csv, sample, sample_folder, spark
from tests.lakes import lakes

__all__ = ["flights_csv", "lakes", "sample", "sample_folder", "spark"]
