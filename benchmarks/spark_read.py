"""Compare reading a table with ``read_table`` and the data source to reading its files with Spark's own reader.

Run from the project's root: ``.venv/bin/python -m benchmarks.spark_read``. It writes
``benchmarks/results/spark_read.md`` and a plot. The table contains ten copies of one year of flights in three
versions. Only the ratios within one run are meaningful, because each reader is compared with a run of Spark's reader
directly before or after it.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import duckdb
from matplotlib.axes import Axes
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from benchmarks.report import plot, seconds, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.demo import flights_model
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.spark.tables.reader import read_table
from trinitylake_ops.spark.tables.writer import stage_dataframe

TABLE = "facts.flights"
YEARS_BY_VERSION = ((2004, 2005, 2006, 2007), (2008, 2009, 2010), (2011, 2012, 2013))
ROUNDS = 9
FEW_COLUMNS = "carrier, distance"
ONE_YEAR = "year = 2013"
SUMS = "count(*), sum(distance), sum(dep_delay), count(tailnum), min(sched_dep_at), max(sched_dep_at)"


def fill(spark: SparkSession, lake: Lakehouse) -> None:
    """Commit the years, one version for each group."""
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
    """Return the table read by the data source."""
    return spark.read.format("trinitylake").option("root", lake.root).options(**options).load(TABLE)


def check_rows(spark: SparkSession, lake: Lakehouse) -> list[list[object]]:
    """Assert that the sums of all readers equal those of DuckDB at each version, and return table rows."""
    lines = []
    duck = duckdb.connect()
    duck.execute("SET TimeZone = 'UTC'")
    for version in range(1, len(YEARS_BY_VERSION) + 1):
        paths = [path.removeprefix("file://") for path in data_files(lake, version)]
        query = f"SELECT {SUMS.replace('sched_dep_at', 'epoch_us(sched_dep_at)')} FROM read_parquet($1)"
        expected = duck.execute(query, [paths]).fetchall()[0]
        for frame in (read_table(spark, lake, TABLE, version), by_source(spark, lake, version=str(version))):
            columns = SUMS.replace("sched_dep_at", "unix_micros(sched_dep_at)").split(", ")
            sums = frame.selectExpr(*columns).first()
            assert sums is not None
            assert tuple(sums) == tuple(expected), (version, sums, expected)
        lines.append([version, len(paths), f"{expected[0]:,}", "equal"])
    return lines


def read_all(frame: Callable[[], DataFrame]) -> float:
    """Return the seconds that it takes to create a frame and to read all its rows and columns."""
    return seconds(lambda: frame().write.format("noop").mode("overwrite").save())


@dataclass
class Pair:
    """One of our readers and Spark's reader, for the same rows and columns, with the seconds of each in each round."""

    spark: Callable[[], DataFrame]
    ours: Callable[[], DataFrame]
    spark_seconds: list[float] = field(default_factory=list)
    our_seconds: list[float] = field(default_factory=list)

    @property
    def speeds(self) -> list[float]:
        """Our speed as a multiple of Spark's in each round, in ascending order."""
        return sorted(spark_s / our_s for spark_s, our_s in zip(self.spark_seconds, self.our_seconds, strict=True))


def pairs_to_read(spark: SparkSession, lake: Lakehouse) -> dict[str, Pair]:
    """Return the pairs of readers to compare, by name."""
    read = partial(spark.read.parquet, *data_files(lake, len(YEARS_BY_VERSION)))
    few = FEW_COLUMNS.split(", ")
    return {
        "`read_table`": Pair(read, partial(read_table, spark, lake, TABLE)),
        f"`read_table`, {FEW_COLUMNS}": Pair(
            lambda: read().select(*few), partial(read_table, spark, lake, TABLE, columns=few)
        ),
        '`format("trinitylake")`': Pair(read, partial(by_source, spark, lake)),
        f'`format("trinitylake")`, {FEW_COLUMNS}': Pair(
            lambda: read().select(*few), partial(by_source, spark, lake, columns=FEW_COLUMNS)
        ),
        f'`format("trinitylake")`, {ONE_YEAR}': Pair(
            lambda: read().where(ONE_YEAR), partial(by_source, spark, lake, row_filter=ONE_YEAR)
        ),
    }


def measure(pairs: Mapping[str, Pair]) -> None:
    """Measure all pairs after a warm-up round. The first reader of a pair alternates from round to round."""
    for round_number in range(ROUNDS + 1):
        for pair in pairs.values():
            readers = [(pair.spark, pair.spark_seconds), (pair.ours, pair.our_seconds)]
            for frame, times in readers if round_number % 2 else reversed(readers):
                elapsed_s = read_all(frame)
                if round_number:
                    times.append(elapsed_s)


def draw(pairs: Mapping[str, Pair], axes: Sequence[Axes]) -> None:
    """Draw a bar for the median speed of each reader, and a line from its minimum to its maximum."""
    speeds = [pair.speeds for pair in pairs.values()]
    medians = [statistics.median(values) for values in speeds]
    below = [median - values[0] for median, values in zip(medians, speeds, strict=True)]
    above = [values[-1] - median for median, values in zip(medians, speeds, strict=True)]
    axes[0].barh([name.replace("`", "") for name in pairs], medians, xerr=[below, above], capsize=3)
    axes[0].axvline(1, color="black", linestyle=":")
    axes[0].invert_yaxis()
    axes[0].set_xlabel("speed relative to spark.read.parquet")


def main() -> None:
    """Run the benchmark."""
    with tempfile.TemporaryDirectory() as folder, session_scope("spark_read", **{"spark.driver.memory": "2g"}) as spark:
        lake = Lakehouse.create(f"file://{Path(folder)}/lake/", {"fsync": "false"})
        fill(spark, lake)
        versions = check_rows(spark, lake)
        pairs = pairs_to_read(spark, lake)
        measure(pairs)
    lines = [
        [name, *(f"{value:.2f}" for value in (
            statistics.median(pair.spark_seconds), statistics.median(pair.our_seconds),
            statistics.median(pair.speeds), pair.speeds[0], pair.speeds[-1],
        ))]
        for name, pair in pairs.items()
    ]  # fmt: skip
    header = ["reader", "`spark.read.parquet`, median s", "ours, median s", "speed: median of rounds", "min", "max"]
    write_result(
        "spark_read",
        [
            "# Reading a table with Spark",
            "",
            f"Generated by `python -m benchmarks.spark_read`: {versions[-1][2]} rows of {versions[-1][1]} local files,"
            " `local[2]`. Seconds to create the frame and read its rows and columns; all of them unless the row names"
            " a selection. Each reader runs alternately with `spark.read.parquet` of the same files, rows and columns,"
            f" {ROUNDS} times; its speed is Spark's seconds divided by ours, in each round.",
            "",
            *table(header, lines),
            "",
            plot("spark_read", partial(draw, pairs), width=7.5),
            "",
            "Sums over the rows by `read_table` and the data source, compared with DuckDB's over the same files:",
            "",
            *table(["version", "files", "rows", "sums"], versions),
        ],
    )


if __name__ == "__main__":
    main()
