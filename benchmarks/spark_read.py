"""What reading a table costs: ``read_table`` and the data source beside Spark's own reader of the same files.

Run from the project's root: ``.venv/bin/python -m benchmarks.spark_read``; it writes
``benchmarks/results/spark_read.md``.
Ten years of flights, the real year ten times, three versions. Times are only worth as ratios in one run.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import duckdb
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.report import seconds, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.spark_jobs import flights_model
from trinitylake_ops.spark_jobs.flights_source import FlightsSource
from trinitylake_ops.spark_jobs.session import session_scope
from trinitylake_ops.spark_jobs.table_reader import read_table
from trinitylake_ops.spark_jobs.table_writer import stage_dataframe
from trinitylake_ops.tables.catalog import catalog_at
from trinitylake_ops.tables.staging import publish

TABLE = "facts.flights"
YEARS_BY_VERSION = ((2004, 2005, 2006, 2007), (2008, 2009, 2010), (2011, 2012, 2013))
ROUNDS = 7
FEW_COLUMNS = "carrier, distance"
SUMS = "count(*), sum(distance), sum(dep_delay), count(tailnum), min(sched_dep_at), max(sched_dep_at)"


def fill(spark: SparkSession, lake: Lakehouse) -> None:
    """Commit the years, a version for each group of them."""
    flights = flights_model.flights(spark, FlightsSource()).cache()
    for years in YEARS_BY_VERSION:
        frame = flights.withColumn("year", F.explode(F.array(*(F.lit(year).cast("int") for year in years))))
        staged = stage_dataframe(lake, frame, *TABLE.split("."), partition_by=("year",), mode="append")
        with lake.transaction() as txn:
            publish(txn, [staged])
    flights.unpersist()


def data_files(lake: Lakehouse, version: int) -> list[str]:
    """Return the URIs of the data files of a version."""
    with catalog_at(lake, version) as catalog:
        return [task.file.file_path for task in catalog.load_table(TABLE).scan().plan_files()]


def by_source(spark: SparkSession, lake: Lakehouse, **options: str) -> DataFrame:
    """Return the table as the data source gives it."""
    return spark.read.format("trinitylake").option("root", lake.root).options(**options).load(TABLE)


def check_rows(spark: SparkSession, lake: Lakehouse) -> list[list[object]]:
    """Compare sums over all ways with DuckDB's, at each version. Raises AssertionError."""
    lines = []
    duck = duckdb.connect()
    duck.execute("SET TimeZone = 'UTC'")
    for version in range(1, len(YEARS_BY_VERSION) + 1):
        paths = [path.removeprefix("file://") for path in data_files(lake, version)]
        query = f"SELECT {SUMS.replace('sched_dep_at', 'epoch_us(sched_dep_at)')} FROM read_parquet($1)"
        expected = duck.execute(query, [paths]).fetchall()[0]
        for frame in (read_table(spark, lake, TABLE, version), by_source(spark, lake, version=str(version))):
            columns = SUMS.replace("sched_dep_at", "unix_micros(sched_dep_at)").split(", ")
            found = frame.selectExpr(*columns).first()
            assert found is not None
            assert tuple(found) == tuple(expected), (version, found, expected)
        lines.append([version, len(paths), f"{expected[0]:,}", "equal"])
    return lines


def read_all(frame: Callable[[], DataFrame]) -> float:
    """Return how long it takes to make a frame and to read all its rows and columns."""
    return seconds(lambda: frame().write.format("noop").mode("overwrite").save())


def measured(ways: Mapping[str, Callable[[], DataFrame]]) -> dict[str, list[float]]:
    """Return the times of each way, taken in turns, after one round that does not count."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(ROUNDS + 1):
        for name, frame in ways.items():
            taken = read_all(frame)
            if round_number:
                times[name].append(taken)
    return times


def main() -> None:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory() as folder, session_scope("spark_read", **{"spark.driver.memory": "2g"}) as spark:
        lake = Lakehouse.create(f"file://{Path(folder)}/lake/", {"fsync": "false"})
        fill(spark, lake)
        versions = check_rows(spark, lake)
        paths = data_files(lake, len(YEARS_BY_VERSION))
        ways: dict[str, Callable[[], DataFrame]] = {
            "`spark.read.parquet` on the files": partial(spark.read.parquet, *paths),
            "`read_table`": partial(read_table, spark, lake, TABLE),
            '`format("trinitylake")`': partial(by_source, spark, lake),
            f'`format("trinitylake")`, `columns` "{FEW_COLUMNS}"': partial(by_source, spark, lake, columns=FEW_COLUMNS),
            f"`spark.read.parquet`, {FEW_COLUMNS}": lambda: spark.read.parquet(*paths).select(*FEW_COLUMNS.split(", ")),
        }
        times = measured(ways)
    first = statistics.median(next(iter(times.values())))
    lines = [
        [name, f"{statistics.median(taken):.2f}", f"{min(taken):.2f}", f"{max(taken):.2f}",
         f"{first / statistics.median(taken):.2f}"]
        for name, taken in times.items()
    ]  # fmt: skip
    write_result(
        "spark_read",
        [
            "# Reading a table with Spark",
            "",
            f"Made by `python -m benchmarks.spark_read`: {versions[-1][2]} rows of {versions[-1][1]} local files,"
            f" all rows and columns, `local[2]`, {ROUNDS} rounds in turns. Seconds to make the frame and read it.",
            "",
            *table(["way", "median s", "least", "most", "times the first's speed"], lines),
            "",
            "Sums over the rows by both ways, compared with DuckDB's over the same files:",
            "",
            *table(["version", "files", "rows", "sums"], versions),
        ],
    )


if __name__ == "__main__":
    main()
