"""The fixtures of the flights samples, for all tests of this folder."""

from tests.flights import flights_csv, sample, sample_folder, spark

__all__ = ["flights_csv", "sample", "sample_folder", "spark"]
