"""Test the data model of the demo: all source rows are loaded, and each derived table equals independent SQL."""

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import duckdb
import pytest
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F

from tests.flights import SAMPLE_ROWS_PER_MONTH
from trinitylake_ops.demo import flights_model
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.demo.flights_tables import TABLES
from trinitylake_ops.errors import InvalidInputError

#: In normal test runs, `tests/e2e/test_demo.py` covers the model by running the demo as a user does.
pytestmark = pytest.mark.soak

REFERENCE = {
    "delay_by_carrier_month": """
        with w as (select *, coalesce(precip > 0, false) or coalesce(visib < 3, false)
                             or coalesce(wind between 25 and 250, false) as bad
                   from (select *, case when wind_speed < 250 then wind_speed end as wind from weather)),
             f as (select flights.*, w.wind, w.precip, w.visib, w.bad, w.origin is not null as observed
                   from flights left join w on w.origin = flights.origin and w.time_hour = flights.time_hour)
        select year, month, carrier, (select name from airlines where airlines.carrier = f.carrier),
               count(*), count(*) filter (dep_time is null), count(arr_delay), avg(dep_delay), avg(arr_delay),
               count(*) filter (dep_delay > 15), count(*) filter (dep_delay > 15) / count(dep_delay),
               count(*) filter (observed), avg(wind), avg(precip), avg(visib), count(*) filter (bad),
               count(*) filter (bad) / nullif(count(*) filter (observed), 0), avg(dep_delay) filter (bad)
        from f group by all""",
    "route_performance": """
        with r as (
            select year, month, origin, dest, count(*) as n, count(*) filter (dep_time is null) as cancelled,
                   count(air_time) as flown, avg(air_time) as air,
                   sum(distance) filter (air_time > 0) / (sum(air_time) / 60) as mph,
                   quantile_cont(dep_delay, 0.5) as d50, quantile_cont(dep_delay, 0.9) as d90,
                   quantile_cont(arr_delay, 0.5) as a50, quantile_cont(arr_delay, 0.9) as a90,
                   max(distance) as miles
            from flights group by all),
             -- the angle between two points of the globe by the law of cosines, not by haversine
             g as (select a.faa as origin, b.faa as dest, b.name,
                   3958.7613 * acos(sin(radians(a.lat)) * sin(radians(b.lat))
                       + cos(radians(a.lat)) * cos(radians(b.lat)) * cos(radians(b.lon - a.lon))) as arc
                   from airports a, airports b where a.faa in ('EWR', 'JFK', 'LGA') and a.faa <> b.faa)
        select year, month, r.origin, r.dest, replace(g.name, '\\', ''), n, cancelled, flown, air, mph, d50, d90,
               a50, a90, miles, arc, miles - arc, abs(miles - arc) <= greatest(10, miles * 0.005)
        from r left join g using (origin, dest)""",
    "aircraft_utilisation": """
        select f.year, f.month, f.tailnum,
               case when manufacturer like 'AIRBUS%' then 'AIRBUS'
                    when manufacturer like 'MCDONNELL DOUGLAS%' then 'MCDONNELL DOUGLAS' else manufacturer end,
               p.model, f.year - p.year, p.seats, count(*), count(air_time), coalesce(sum(air_time), 0),
               coalesce(sum(distance) filter (air_time > 0), 0), count(distinct day) filter (air_time > 0),
               count(distinct dest) filter (air_time > 0), p.seats * count(air_time)
        from flights f left join planes p on p.tailnum = f.tailnum
        where f.tailnum is not null group by f.year, f.month, f.tailnum, manufacturer, p.model, p.year, p.seats""",
}


@pytest.fixture(scope="session")
def duck(flights_csv: Path) -> duckdb.DuckDBPyConnection:
    """The real files, read by DuckDB with inferred types."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    paths = {name: FlightsSource().path(name) for name in ("airlines", "airports", "planes", "weather")}
    for name, path in {**paths, "flights": flights_csv}.items():
        connection.execute(f"create table {name} as from read_csv('{path}', nullstr='NA', sample_size=-1)")
    return connection


@pytest.fixture(scope="session")
def real(spark: SparkSession) -> dict[str, DataFrame]:
    """All eight tables of the real data."""
    frames: dict[str, DataFrame] = {}
    for name, table in TABLES.items():
        frames[name] = table.build(spark, FlightsSource(), frames)
    return frames


@pytest.fixture(scope="session")
def derived_rows(real: dict[str, DataFrame]) -> Callable[[str], list[Row]]:
    """A function that returns the rows of a derived table of the real data, and computes them only once."""
    return functools.cache(lambda name: real[name].collect())


def by_key(rows: Sequence[Sequence[object]], width: int) -> list[Sequence[object]]:
    return sorted(rows, key=lambda row: tuple(map(str, row[:width])))


def is_close(left: object, right: object) -> bool:
    if isinstance(left, float) and isinstance(right, int | float):
        return math.isclose(left, right, abs_tol=0.006, rel_tol=1e-9)  # distances are rounded to two decimals
    return left == right


def test_all_real_flights_are_loaded(spark: SparkSession, real: dict[str, DataFrame]) -> None:
    source_counts = FlightsSource().count_source_rows_by_month()
    rows = real["flights"].groupBy("year", "month").count().collect()
    assert {row["month"]: row["count"] for row in rows} == source_counts
    assert {row["year"] for row in rows} == {2013}
    assert sum(source_counts.values()) == FlightsSource().count_source_rows() == 336_776
    assert flights_model.flights(spark, FlightsSource(), 2).count() == source_counts[2] == 24_951


def test_real_flights_are_cleaned(real: dict[str, DataFrame], duck: duckdb.DuckDBPyConnection) -> None:
    names = ["dep_time", "dep_delay", "arr_time", "arr_delay", "flight", "air_time", "distance", "hour", "minute"]
    sums = [F.sum(name) for name in names]
    times = [F.sum(F.unix_timestamp(name)) for name in ("sched_dep_at", "dep_at", "time_hour")]
    counts = [F.count_distinct("flight_id"), F.count_if("cancelled"), F.count("tailnum")]
    days = [F.sum(F.unix_date("flight_date")), F.count_distinct("flight_date")]
    actual = real["flights"].groupBy("month").agg(*sums, *times, *counts, *days).orderBy("month").collect()
    expected = duck.execute(f"""
        select month, {", ".join(f"sum({name})" for name in names)},
               sum(epoch(time_hour) + 60 * minute), sum(epoch(time_hour) + 60 * (minute + dep_delay)),
               sum(epoch(time_hour)), count(distinct (day, carrier, flight, origin)),
               count(*) filter (dep_time is null), count(tailnum),
               sum(make_date(year, month, day) - date '1970-01-01'), count(distinct day)
        from flights group by month order by month""").fetchall()
    assert [tuple(row) for row in actual] == [tuple(map(int, row)) for row in expected]


def test_one_flight_has_expected_values(sample: dict[str, DataFrame]) -> None:
    row = (
        sample["flights"]
        .where("flight_id = '20130101-UA-1545-EWR'")
        .select(
            F.struct("flight_date", "carrier", "flight", "tailnum", "origin", "dest", "cancelled").cast("string"),
            F.date_format("sched_dep_at", "yyyy-MM-dd HH:mm"),
            F.date_format("dep_at", "yyyy-MM-dd HH:mm"),
            F.date_format("time_hour", "yyyy-MM-dd HH:mm"),
        )
    )
    assert [tuple(values) for values in row.collect()] == [
        (
            "{2013-01-01, UA, 1545, N14228, EWR, IAH, false}",
            "2013-01-01 10:15",
            "2013-01-01 10:17",
            "2013-01-01 10:00",
        )
    ]


def test_dimensions_are_cleaned(real: dict[str, DataFrame], duck: duckdb.DuckDBPyConnection) -> None:
    assert real["airlines"].count() == 16
    assert real["airports"].where(r"instr(name, '\\') > 0").count() == 0
    assert real["airports"].where('name = "Martha\'s Vineyard"').count() == 1
    assert real["airports"].count() == 1458
    manufacturers = {row[0] for row in real["planes"].select("manufacturer").distinct().collect()}
    assert {name for name in manufacturers if name.startswith(("AIRBUS", "MCDONNELL"))} == {
        "AIRBUS",
        "MCDONNELL DOUGLAS",
    }
    assert real["planes"].where("year_built is null").count() == 70
    weather = real["weather"].agg(F.count("*"), F.count("wind_speed"), F.max("wind_speed"), F.count("wind_gust"))
    expected = duck.execute(
        "select count(*), count(wind_speed) - 1, max(wind_speed) filter (wind_speed < 1000), count(wind_gust) "
        "from weather"
    ).fetchall()
    assert [tuple(row) for row in weather.collect()] == expected


@pytest.mark.parametrize("name", REFERENCE)
def test_derived_table_equals_reference(
    name: str, derived_rows: Callable[[str], list[Row]], duck: duckdb.DuckDBPyConnection
) -> None:
    table = TABLES[name]
    key_width = len(table.primary_key)
    assert tuple(table.schema.fieldNames()[:key_width]) == table.primary_key
    actual = by_key([tuple(row) for row in derived_rows(name)], key_width)
    expected = by_key(duck.execute(REFERENCE[name]).fetchall(), key_width)
    assert len(actual) == len(expected) > 100
    columns = table.schema.fieldNames()
    differing = [
        (column, row[:key_width], actual_value, expected_value)
        for row, reference in zip(actual, expected, strict=True)
        for column, actual_value, expected_value in zip(columns, row, reference, strict=True)
        if not is_close(actual_value, expected_value)
    ]
    assert differing == []


def test_totals_of_derived_tables(derived_rows: Callable[[str], list[Row]]) -> None:
    totals = {name: sum(row["flights"] for row in derived_rows(name)) for name in REFERENCE}
    without_tailnum = 2_512
    assert totals == {
        "delay_by_carrier_month": 336_776,
        "route_performance": 336_776,
        "aircraft_utilisation": 336_776 - without_tailnum,
    }
    assert {row["distance_agrees"] for row in derived_rows("route_performance")} == {True, None}


@pytest.mark.parametrize("name", TABLES)
def test_schema_has_descriptions(name: str, sample: dict[str, DataFrame]) -> None:
    def field_descriptions(frame_schema: object) -> list[tuple[object, ...]]:
        return [(field.name, field.dataType, field.metadata) for field in frame_schema]  # type: ignore[attr-defined]

    table = TABLES[name]
    assert field_descriptions(sample[name].schema) == field_descriptions(table.schema)
    assert set(table.primary_key) | set(table.partition_by) <= set(table.schema.fieldNames())
    allowed = {"boolean", "date", "double", "int", "bigint", "string", "timestamp"}
    assert {field.dataType.simpleString() for field in table.schema} <= allowed


@pytest.mark.parametrize("name", [name for name, table in TABLES.items() if table.is_monthly])
def test_month_equals_same_month_of_all_rows(
    name: str, spark: SparkSession, sample: dict[str, DataFrame], sample_folder: Path
) -> None:
    """A month depends only on the input rows of that month."""
    source = FlightsSource(str(sample_folder))
    month = TABLES[name].build(spark, source, sample, month=2)
    rows_of_month = sample[name].where("month = 2")
    assert Counter(month.collect()) == Counter(rows_of_month.collect())
    assert not rows_of_month.isEmpty()


def test_rows_per_month(spark: SparkSession, sample_folder: Path) -> None:
    source = FlightsSource(str(sample_folder))
    counts = [flights_model.flights(spark, source, month).count() for month in (1, 2, 3)]
    assert counts == [SAMPLE_ROWS_PER_MONTH, SAMPLE_ROWS_PER_MONTH, 0]


@pytest.mark.parametrize("name", REFERENCE)
def test_order_of_rows_does_not_matter(name: str, spark: SparkSession, sample: dict[str, DataFrame]) -> None:
    shuffled = {key: frame.repartition(5).sortWithinPartitions(F.rand(7)) for key, frame in sample.items()}
    rebuilt = TABLES[name].build(spark, FlightsSource(), shuffled)
    assert Counter(rebuilt.collect()) == Counter(sample[name].collect())


@pytest.mark.parametrize("month", [0, 13, -1])
def test_invalid_month_is_rejected(month: int, spark: SparkSession, sample_folder: Path) -> None:
    with pytest.raises(InvalidInputError, match=f"invalid month {month}"):
        flights_model.weather(spark, FlightsSource(str(sample_folder)), month)


def test_missing_inputs_are_named(spark: SparkSession, sample: dict[str, DataFrame]) -> None:
    with pytest.raises(InvalidInputError, match="route_performance"):
        TABLES["route_performance"].build(spark, FlightsSource(), {"planes": sample["planes"]})


def test_tables_come_after_their_inputs() -> None:
    earlier: set[str] = set()
    for table in TABLES.values():
        assert set(table.inputs) <= earlier
        assert (table.read is None) == bool(table.inputs) == (table.derive is not None)
        earlier.add(table.name)
