"""Fixtures for conftest modules: one Spark session per test process, and small samples of the real data."""

import csv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.demo.flights_tables import TABLES
from trinitylake_ops.spark.session import session_scope

SAMPLE_MONTHS = (1, 2)
SAMPLE_ROWS_PER_MONTH = 1000


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    with session_scope("tests") as session:
        yield session


@pytest.fixture(scope="session")
def flights_csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with all real flights, unzipped without the code under test."""
    folder = tmp_path_factory.mktemp("real")
    with zipfile.ZipFile(FlightsSource().path("flights")) as archive:
        return Path(archive.extract("flights.csv", folder))


@pytest.fixture(scope="session")
def sample_folder(tmp_path_factory: pytest.TempPathFactory, flights_csv: Path) -> Path:
    """A folder with the first flights and weather rows of two months, and the other three files unchanged."""
    folder = tmp_path_factory.mktemp("sample [of two] months")  # the name must not be interpreted as a pattern
    real = FlightsSource()
    for name in ("airlines", "airports", "planes"):
        (folder / f"{name}.csv").write_bytes(real.path(name).read_bytes())
    write_sample(flights_csv, folder / "flights.csv", SAMPLE_ROWS_PER_MONTH)
    write_sample(real.path("weather"), folder / "weather.csv", SAMPLE_ROWS_PER_MONTH)
    return folder


@pytest.fixture(scope="session")
def sample(spark: SparkSession, sample_folder: Path) -> dict[str, DataFrame]:
    """All eight tables of the sample."""
    frames: dict[str, DataFrame] = {}
    for name, table in TABLES.items():
        frames[name] = table.build(spark, FlightsSource(str(sample_folder)), frames).cache()
    return frames


def write_sample(source: Path, target: Path, rows_per_month: int) -> None:
    """Copy the first rows of each sample month from one CSV file to another."""
    n_copied = dict.fromkeys(SAMPLE_MONTHS, 0)
    with open(source, newline="") as rows, open(target, "w", newline="") as out:
        reader, writer = csv.reader(rows), csv.writer(out)
        header = next(reader)
        writer.writerow(header)
        month_column = header.index("month")
        for row in reader:
            month = int(row[month_column])
            if month in n_copied and n_copied[month] < rows_per_month:
                n_copied[month] += 1
                writer.writerow(row)
