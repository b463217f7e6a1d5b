"""The flights data set as Spark tables: five are read, typed and cleaned, and three are derived from them.

Rules of the model:

- No row is dropped silently. A row with the wrong number of columns stops every job. A value of the wrong type stops
  each job that reads its column or writes the table. ``spark_failures`` raises both as typed errors. Duplicate keys are
  caught by the checks (:mod:`~trinitylake_ops.demo.flights_tables`).
- ``month`` selects by local month, 1 to 12; None means all. A flight and the weather of its hour are in the same local
  month, so month m of every table depends on month m of its inputs only.
- Results do not depend on the order of rows, because sums are computed over integers and decimals.
"""

from __future__ import annotations

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from trinitylake_ops.demo import flights_schema as schema
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.errors import InvalidInputError

#: Departures later than this many minutes count as delayed.
DELAYED_OVER_MIN = 15
#: Bad weather: any precipitation, wind of at least this speed, or visibility below the limit of visual flight rules.
STRONG_WIND_MPH = 25
POOR_VISIBILITY_MI = 3
#: The tolerance between a reported distance and the great-circle distance: the larger of these two values.
DISTANCE_TOLERANCE_MI = 10
DISTANCE_TOLERANCE_SHARE = 0.005

# No higher wind speed on the ground has ever been measured. The data contain a value of 1,048 miles per hour.
_IMPOSSIBLE_WIND_MPH = 250
_EARTH_RADIUS_MI = 3958.7613
_MAKERS = {
    "AIRBUS INDUSTRIE": "AIRBUS",
    "MCDONNELL DOUGLAS AIRCRAFT CO": "MCDONNELL DOUGLAS",
    "MCDONNELL DOUGLAS CORPORATION": "MCDONNELL DOUGLAS",
}


def airlines(spark: SparkSession, source: FlightsSource) -> DataFrame:
    """Return the carriers (schema ``AIRLINES``). Raises FileMissingError, or CorruptFileError.

    Args:
        spark: The session.
        source: The source files.
    """
    return schema.conform(_read(spark, source, "airlines"), schema.AIRLINES)


def airports(spark: SparkSession, source: FlightsSource) -> DataFrame:
    """Return the airports (schema ``AIRPORTS``). Raises FileMissingError, or CorruptFileError.

    Args:
        spark: The session.
        source: The source files.
    """
    # The source escapes apostrophes in the same way as some database dumps.
    cleaned = _read(spark, source, "airports").withColumn("name", F.regexp_replace("name", r"\\+", ""))
    return schema.conform(cleaned, schema.AIRPORTS)


def planes(spark: SparkSession, source: FlightsSource) -> DataFrame:
    """Return the aircraft (schema ``PLANES``). Raises FileMissingError, or CorruptFileError.

    Args:
        spark: The session.
        source: The source files.
    """
    renamed = _read(spark, source, "planes").withColumnRenamed("year", "year_built")
    cleaned = renamed.replace(list(_MAKERS), list(_MAKERS.values()), subset=["manufacturer"])
    return schema.conform(cleaned, schema.PLANES)


def weather(spark: SparkSession, source: FlightsSource, month: int | None = None) -> DataFrame:
    """Return hourly weather at the origins (schema ``WEATHER``).

    Raises FileMissingError, CorruptFileError, or InvalidInputError for a month outside 1 to 12.

    Args:
        spark: The session.
        source: The source files.
        month: The month, 1 to 12, or None for all.
    """
    cleaned = of_month(_read(spark, source, "weather"), month).withColumns(
        {name: F.when(F.col(name) < _IMPOSSIBLE_WIND_MPH, F.col(name)) for name in ("wind_speed", "wind_gust")}
    )
    return schema.conform(cleaned, schema.WEATHER)


def flights(spark: SparkSession, source: FlightsSource, month: int | None = None) -> DataFrame:
    """Return the flights, one row per row of the source (schema ``FLIGHTS``).

    Raises FileMissingError, CorruptFileError, or InvalidInputError for a month outside 1 to 12.

    Args:
        spark: The session.
        source: The source files.
        month: The month, 1 to 12, or None for all.
    """
    typed = of_month(_read(spark, source, "flights"), month)
    flight_date = F.make_date("year", "month", "day")
    sched_dep_at = F.timestamp_add("MINUTE", F.col("minute"), F.col("time_hour"))
    flight_id = F.concat(  # null if any part is null, which the key check rejects
        F.date_format(flight_date, "yyyyMMdd"), *_join_with_dashes(F.col("carrier"), F.col("flight"), F.col("origin"))
    )
    cleaned = typed.withColumns(
        {
            "flight_id": flight_id,
            "flight_date": flight_date,
            "sched_dep_at": sched_dep_at,
            "dep_at": F.timestamp_add("MINUTE", F.col("dep_delay"), sched_dep_at),
            "cancelled": F.col("dep_time").isNull(),
        }
    )
    return schema.conform(cleaned, schema.FLIGHTS)


def delay_by_carrier_month(flights: DataFrame, weather: DataFrame, airlines: DataFrame) -> DataFrame:
    """Return delays by carrier and month, with the weather at departure (schema ``DELAY_BY_CARRIER_MONTH``).

    Args:
        flights: The flights.
        weather: The weather.
        airlines: The carriers.
    """
    is_bad = (
        F.coalesce(F.col("precip") > 0, F.lit(False))
        | F.coalesce(F.col("wind_speed") >= STRONG_WIND_MPH, F.lit(False))
        | F.coalesce(F.col("visib") < POOR_VISIBILITY_MI, F.lit(False))
    )
    observed = weather.select(
        "origin", "time_hour", "precip", "wind_speed", "visib", is_bad.alias("bad"), F.lit(True).alias("observed")
    )
    delayed = F.col("dep_delay") > DELAYED_OVER_MIN
    by_carrier = (
        flights.join(observed, ["origin", "time_hour"], "left")
        .groupBy("year", "month", "carrier")
        .agg(
            F.count("*").alias("flights"),
            F.count_if("cancelled").alias("cancelled"),
            F.count("arr_delay").alias("arrived"),
            _mean("dep_delay").alias("mean_dep_delay_min"),
            _mean("arr_delay").alias("mean_arr_delay_min"),
            F.count_if(delayed).alias("dep_delayed_over_15_min"),
            _ratio(F.count_if(delayed), F.count("dep_delay")).alias("share_dep_delayed_over_15_min"),
            F.count_if("observed").alias("flights_with_weather"),
            _mean("wind_speed").alias("mean_wind_speed_mph"),
            _mean("precip").alias("mean_precip_in"),
            _mean("visib").alias("mean_visib_mi"),
            F.count_if("bad").alias("flights_in_bad_weather"),
            _ratio(F.count_if("bad"), F.count_if("observed")).alias("share_in_bad_weather"),
            _mean(F.when(F.col("bad"), F.col("dep_delay"))).alias("mean_dep_delay_bad_weather_min"),
        )
    )
    names = airlines.select("carrier", F.col("name").alias("carrier_name"))
    return schema.conform(by_carrier.join(F.broadcast(names), "carrier", "left"), schema.DELAY_BY_CARRIER_MONTH)


def route_performance(flights: DataFrame, airports: DataFrame) -> DataFrame:
    """Return times, speed and delays by route and month, with checked distances (schema ``ROUTE_PERFORMANCE``).

    Args:
        flights: The flights.
        airports: The airports.
    """
    by_route = flights.groupBy("year", "month", "origin", "dest").agg(
        F.count("*").alias("flights"),
        F.count_if("cancelled").alias("cancelled"),
        F.count("air_time").alias("flown"),
        _mean("air_time").alias("mean_air_time_min"),
        _ratio(60 * _sum_flown("distance"), F.sum("air_time")).alias("mean_speed_mph"),
        *(
            F.round(F.percentile(delay, share / 100), 4).alias(f"{delay}_p{share}_min")
            for delay in ("dep_delay", "arr_delay")
            for share in (50, 90)
        ),
        F.max("distance").alias("distance_mi"),
    )
    from_here = airports.select(F.col("faa").alias("origin"), F.col("lat").alias("lat_1"), F.col("lon").alias("lon_1"))
    to_there = airports.select(
        F.col("faa").alias("dest"),
        F.col("name").alias("dest_name"),
        F.col("lat").alias("lat_2"),
        F.col("lon").alias("lon_2"),
    )
    error_mi = F.col("distance_mi") - F.col("great_circle_mi")
    tolerance_mi = F.greatest(F.lit(DISTANCE_TOLERANCE_MI), F.col("distance_mi") * DISTANCE_TOLERANCE_SHARE)
    located = (
        by_route.join(F.broadcast(from_here), "origin", "left")
        .join(F.broadcast(to_there), "dest", "left")
        .withColumn("great_circle_mi", F.round(_great_circle_mi(), 2))
        .withColumn("distance_error_mi", F.round(error_mi, 2))
        .withColumn("distance_agrees", F.abs(error_mi) <= tolerance_mi)
    )
    return schema.conform(located, schema.ROUTE_PERFORMANCE)


def aircraft_utilisation(flights: DataFrame, planes: DataFrame) -> DataFrame:
    """Return the utilization of each aircraft by month (schema ``AIRCRAFT_UTILISATION``).

    Flights without a registration, most of which were cancelled, are excluded.

    Args:
        flights: The flights.
        planes: The aircraft.
    """
    flown = F.col("air_time").isNotNull()
    by_aircraft = (
        flights.where(F.col("tailnum").isNotNull())
        .groupBy("year", "month", "tailnum")
        .agg(
            F.count("*").alias("flights"),
            F.count("air_time").alias("flown"),
            F.coalesce(F.sum("air_time"), F.lit(0)).alias("air_min"),
            F.coalesce(_sum_flown("distance"), F.lit(0)).alias("distance_mi"),
            F.count_distinct(F.when(flown, F.col("flight_date"))).alias("days_flown"),
            F.count_distinct(F.when(flown, F.col("dest"))).alias("destinations"),
        )
    )
    known = planes.select("tailnum", "manufacturer", "model", "seats", "year_built")
    described = by_aircraft.join(F.broadcast(known), "tailnum", "left").withColumns(
        {
            "age_years": F.col("year") - F.col("year_built"),
            "seats_flown": F.col("seats") * F.col("flown"),
        }
    )
    return schema.conform(described, schema.AIRCRAFT_UTILISATION)


def of_month(frame: DataFrame, month: int | None) -> DataFrame:
    """Return the rows of one local month, or None for all. Raises InvalidInputError for a month outside 1 to 12.

    Args:
        frame: The rows.
        month: The month, 1 to 12, or None for all.
    """
    if month is None:
        return frame
    if not 1 <= month <= 12:
        raise InvalidInputError(f"invalid month {month}; use 1 to 12")
    return frame.where(F.col("month") == month)


def _read(spark: SparkSession, source: FlightsSource, name: str) -> DataFrame:
    return (
        spark.read.schema(schema.CSV_SCHEMAS[name])
        .option("header", True)
        .option("enforceSchema", False)  # the header must have these columns in this order
        .option("mode", "FAILFAST")
        .option("columnPruning", False)  # so that a row with the wrong number of columns stops every query
        .option("nullValue", "NA")
        .option("escape", '"')
        .option("encoding", "UTF-8")
        .csv(source.spark_path(name))
    )


def _join_with_dashes(*columns: Column) -> list[Column]:
    return [part for column in columns for part in (F.lit("-"), column)]


def _mean(column: Column | str) -> Column:
    # Sums of decimals do not depend on the order of rows, unlike those of doubles.
    value = F.col(column) if isinstance(column, str) else column
    return F.round(F.avg(value.cast("decimal(14,6)")).cast("double"), 4)


def _ratio(numerator: Column, denominator: Column) -> Column:
    return F.round(F.try_divide(numerator.cast("double"), denominator.cast("double")), 4)


def _sum_flown(column: str) -> Column:
    return F.sum(F.when(F.col("air_time").isNotNull(), F.col(column)))


def _great_circle_mi() -> Column:
    lat_1, lat_2 = F.radians("lat_1"), F.radians("lat_2")
    half_lat = F.sin((lat_2 - lat_1) / 2)
    half_lon = F.sin((F.radians("lon_2") - F.radians("lon_1")) / 2)
    haversine = half_lat * half_lat + F.cos(lat_1) * F.cos(lat_2) * half_lon * half_lon
    return 2 * _EARTH_RADIUS_MI * F.asin(F.sqrt(haversine))
