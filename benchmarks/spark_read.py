"""What reading a table costs: ``read_table`` and the data source beside Spark's own reader of the same files.

Run from the project's root: ``.venv/bin/python -m benchmarks.spark_read``; it writes
``benchmarks/results/spark_read.md`` and a plot. Ten years of flights, the real year ten times, three versions.
Times are only worth as ratios in one run: all ways take turns, and each is compared with the first of its round.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import duckdb
from matplotlib.axes import Axes
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.report import plot, seconds, table, write_result
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
ROUNDS = 9
FEW_COLUMNS = "carrier, distance"
ONE_YEAR = "year = 2013"
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


def ways_to_read(spark: SparkSession, lake: Lakehouse) -> dict[str, Callable[[], DataFrame]]:
    """Return what is compared, by name; the first is the measure."""
    paths = data_files(lake, len(YEARS_BY_VERSION))
    return {
        "`spark.read.parquet` of the files": partial(spark.read.parquet, *paths),
        "`read_table`": partial(read_table, spark, lake, TABLE),
        '`format("trinitylake")`': partial(by_source, spark, lake),
        f"`spark.read.parquet`, {FEW_COLUMNS}": lambda: spark.read.parquet(*paths).select(*FEW_COLUMNS.split(", ")),
        f"`read_table`, {FEW_COLUMNS}": partial(read_table, spark, lake, TABLE, columns=FEW_COLUMNS.split(", ")),
        f'`format("trinitylake")`, {FEW_COLUMNS}': partial(by_source, spark, lake, columns=FEW_COLUMNS),
        f"`spark.read.parquet`, {ONE_YEAR}": lambda: spark.read.parquet(*paths).where(ONE_YEAR),
        f'`format("trinitylake")`, {ONE_YEAR}': partial(by_source, spark, lake, row_filter=ONE_YEAR),
    }


def measured(ways: Mapping[str, Callable[[], DataFrame]]) -> dict[str, list[float]]:
    """Return the times of each way in each round, after one round that does not count; every other goes backwards."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(ROUNDS + 1):
        for name in sorted(ways, key=list(ways).index, reverse=round_number % 2 == 1):
            taken = read_all(ways[name])
            if round_number:
                times[name].append(taken)
    return times


def speeds(times: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return how many times as fast as the first each way is: the median over the rounds."""
    first = next(iter(times.values()))
    return {
        name: statistics.median(one / other for one, other in zip(first, taken, strict=True))
        for name, taken in times.items()
    }


def draw(times: Mapping[str, Sequence[float]], axes: Sequence[Axes]) -> None:
    """Draw a bar for each way: its median, and a line from its least to its most."""
    names = [name.replace("`", "") for name in times]
    medians = [statistics.median(taken) for taken in times.values()]
    below = [median - min(taken) for median, taken in zip(medians, times.values(), strict=True)]
    above = [max(taken) - median for median, taken in zip(medians, times.values(), strict=True)]
    axes[0].barh(names, medians, xerr=[below, above], capsize=3)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("seconds")


def main() -> None:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory() as folder, session_scope("spark_read", **{"spark.driver.memory": "2g"}) as spark:
        lake = Lakehouse.create(f"file://{Path(folder)}/lake/", {"fsync": "false"})
        fill(spark, lake)
        versions = check_rows(spark, lake)
        times = measured(ways_to_read(spark, lake))
    ratios = speeds(times)
    lines = [
        [name, f"{statistics.median(taken):.2f}", f"{min(taken):.2f}", f"{max(taken):.2f}", f"{ratios[name]:.2f}"]
        for name, taken in times.items()
    ]
    write_result(
        "spark_read",
        [
            "# Reading a table with Spark",
            "",
            f"Made by `python -m benchmarks.spark_read`: {versions[-1][2]} rows of {versions[-1][1]} local files,"
            f" `local[2]`. Seconds to make the frame and read all its rows and columns, of {ROUNDS} rounds in turns;"
            " the last column is the median of what each round says.",
            "",
            *table(["way", "median s", "least", "most", "times the first's speed"], lines),
            "",
            plot("spark_read", partial(draw, times), width=7.5),
            "",
            "Sums over the rows by `read_table` and the source, compared with DuckDB's over the files of the version:",
            "",
            *table(["version", "files", "rows", "sums"], versions),
        ],
    )


if __name__ == "__main__":
    main()
