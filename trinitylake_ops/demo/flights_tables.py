"""The eight tables of the flights pipeline, their checks before publishing, and deliberate faults.

Each check declares the SQL aggregates that it needs. All aggregates of a table's checks are computed in one pass, and
only one row is returned to the driver, whatever the size of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.types import StructType

from trinitylake_ops.demo import flights_model as model
from trinitylake_ops.demo import flights_schema as schema
from trinitylake_ops.demo.flights_schema import FLIGHTS, conform
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.errors import InvalidInputError

_Read: TypeAlias = Callable[[SparkSession, FlightsSource, int | None], DataFrame]
_Derive: TypeAlias = Callable[[Mapping[str, DataFrame]], DataFrame]

#: The partition columns of all monthly tables.
BY_MONTH = ("year", "month")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightsTable:
    """One table. ``inputs`` are the tables from which it is derived; empty for a source table.

    ``primary_key`` columns are never null and together unique. ``partition_by`` is ``("year", "month")`` or, for a
    table that is written as a whole, empty. ``schema`` is the schema of every frame that :meth:`build` returns.
    """

    name: str
    description: str
    schema: StructType
    primary_key: tuple[str, ...]
    partition_by: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    read: _Read | None = None
    derive: _Derive | None = None

    @property
    def is_monthly(self) -> bool:
        """Whether a monthly run replaces only the partition of that month."""
        return self.partition_by == BY_MONTH

    def build(
        self,
        spark: SparkSession,
        source: FlightsSource,
        inputs: Mapping[str, DataFrame] | None = None,
        month: int | None = None,
    ) -> DataFrame:
        """Return the rows of one month or of all months. Tables without months always return all rows.

        Args:
            session: The Spark session.
            source: The source files.
            inputs: The frames of the input tables, by name. Only ``month`` of each monthly frame is used.
            month: The month, 1 to 12, or None for all.

        Raises:
            InvalidInputError: If an input is missing or the month is invalid. Errors of FlightsSource are also raised.
        """
        if self.read is not None:
            return self.read(spark, source, month)
        provided = inputs or {}
        missing = [name for name in self.inputs if name not in provided]
        if missing or self.derive is None:
            raise InvalidInputError(f"table {self.name} is missing the inputs {', '.join(missing)}")
        return self.derive(
            {
                name: model.of_month(provided[name], month) if TABLES[name].is_monthly else provided[name]
                for name in self.inputs
            }
        )


def _by_name(*tables: FlightsTable) -> dict[str, FlightsTable]:
    return {table.name: table for table in tables}


#: The tables by name. Each follows its inputs.
TABLES: Mapping[str, FlightsTable] = _by_name(
    FlightsTable(
        name="airlines",
        description="Carriers by their two-letter code.",
        schema=schema.AIRLINES,
        primary_key=("carrier",),
        read=lambda spark, source, _month: model.airlines(spark, source),
    ),
    FlightsTable(
        name="airports",
        description="Airports of the United States with their positions.",
        schema=schema.AIRPORTS,
        primary_key=("faa",),
        read=lambda spark, source, _month: model.airports(spark, source),
    ),
    FlightsTable(
        name="planes",
        description="Aircraft by registration: manufacturer, model, year built, seats.",
        schema=schema.PLANES,
        primary_key=("tailnum",),
        read=lambda spark, source, _month: model.planes(spark, source),
    ),
    FlightsTable(
        name="weather",
        description="Hourly weather at the three New York airports.",
        schema=schema.WEATHER,
        primary_key=("origin", "time_hour"),
        partition_by=BY_MONTH,
        read=model.weather,
    ),
    FlightsTable(
        name="flights",
        description="All scheduled departures from New York in 2013.",
        schema=schema.FLIGHTS,
        primary_key=("flight_id",),
        partition_by=BY_MONTH,
        read=model.flights,
    ),
    FlightsTable(
        name="delay_by_carrier_month",
        description="Delays and cancellations by carrier and month, with the weather at departure.",
        schema=schema.DELAY_BY_CARRIER_MONTH,
        primary_key=("year", "month", "carrier"),
        partition_by=BY_MONTH,
        inputs=("flights", "weather", "airlines"),
        derive=lambda inputs: model.delay_by_carrier_month(inputs["flights"], inputs["weather"], inputs["airlines"]),
    ),
    FlightsTable(
        name="route_performance",
        description="Air time, speed and delays by route and month, with distances checked against the great circle.",
        schema=schema.ROUTE_PERFORMANCE,
        primary_key=("year", "month", "origin", "dest"),
        partition_by=BY_MONTH,
        inputs=("flights", "airports"),
        derive=lambda inputs: model.route_performance(inputs["flights"], inputs["airports"]),
    ),
    FlightsTable(
        name="aircraft_utilisation",
        description="Flights, hours, distance and seats flown by aircraft and month.",
        schema=schema.AIRCRAFT_UTILISATION,
        primary_key=("year", "month", "tailnum"),
        partition_by=BY_MONTH,
        inputs=("flights", "planes"),
        derive=lambda inputs: model.aircraft_utilisation(inputs["flights"], inputs["planes"]),
    ),
)


#: The airports of the data set.
ORIGINS = ("EWR", "JFK", "LGA")
#: Departure delays outside this range, in minutes and inclusive, are considered errors.
PLAUSIBLE_DEP_DELAY_MIN = (-120, 2000)
#: In the worst month of the data set, 5 % of the flights have no departure delay, because they were cancelled.
MAX_DEP_DELAY_NULL_SHARE = 0.1

Observed: TypeAlias = dict[str, int | float | None]

_KNOWN_CARRIER = "known_carrier"


@dataclass(frozen=True, slots=True)
class Check:
    """A check of a table. A blocking check stops the publication if it fails.

    ``aggregates`` are SQL expressions, by the name under which the result reports them.
    """

    name: str
    description: str
    aggregates: Mapping[str, str]
    holds: Callable[[Observed], bool]
    blocking: bool = True


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. ``observed`` contains its aggregates as plain numbers."""

    name: str
    passed: bool
    blocking: bool
    description: str
    observed: Observed


def checks_for(table: str, month: int | None = None) -> tuple[Check, ...]:
    """Return the checks of a table. Their names do not depend on the month.

    Args:
        table: The table name.
        month: The month, 1 to 12, that all rows must have; None for any.

    Raises:
        InvalidInputError: If the table is unknown.
    """
    if table not in TABLES:
        raise InvalidInputError(f"unknown table {table!r}; use one of {', '.join(TABLES)}")
    described = TABLES[table]
    checks = [*_key_checks(described)]
    if described.is_monthly:
        checks.append(_month_check(month))
    if table == "flights":
        checks.extend(_flight_checks())
    return tuple(checks)


def run_checks(
    table: str, frame: DataFrame, *, month: int | None = None, airlines: DataFrame | None = None
) -> tuple[CheckResult, ...]:
    """Run the checks of a table on a frame in one pass, in the order of :func:`checks_for`.

    Args:
        table: The table name.
        frame: The rows.
        month: The month, 1 to 12, that all rows must have; None for any.
        airlines: The table ``airlines``, required for the checks of ``flights``.

    Raises:
        InvalidInputError: If the table is unknown, or ``airlines`` is missing.
    """
    checks = checks_for(table, month)
    if table == "flights":
        if airlines is None:
            raise InvalidInputError("the checks of flights need airlines=")
        carriers = airlines.select("carrier").distinct().withColumn(_KNOWN_CARRIER, F.lit(True))
        frame = frame.join(F.broadcast(carriers), "carrier", "left")
    aggregates = {name: sql for check in checks for name, sql in check.aggregates.items()}
    row = frame.agg(*(F.expr(sql).alias(name) for name, sql in aggregates.items())).first()
    aggregates_row: Observed = row.asDict() if row is not None else {}
    results = []
    for check in checks:
        observed = {name: aggregates_row[name] for name in check.aggregates}
        results.append(CheckResult(check.name, check.holds(observed), check.blocking, check.description, observed))
    return tuple(results)


def _is_zero(name: str) -> Callable[[Observed], bool]:
    return lambda observed: observed[name] == 0


def _key_checks(table: FlightsTable) -> tuple[Check, ...]:
    key = ", ".join(table.primary_key)
    is_null = " OR ".join(f"{column} IS NULL" for column in table.primary_key)
    return (
        Check(
            "has_rows",
            "The table has at least one row.",
            {"row_count": "count(*)"},
            lambda observed: (observed["row_count"] or 0) > 0,
        ),
        Check(
            "key_not_null",
            f"The key ({key}) is never null.",
            {"null_key_rows": f"count_if({is_null})"},
            _is_zero("null_key_rows"),
        ),
        Check(
            "key_unique",
            f"The key ({key}) is unique.",
            {"duplicate_key_rows": f"count_if(NOT ({is_null})) - count(DISTINCT {key})"},
            _is_zero("duplicate_key_rows"),
        ),
    )


def _month_check(month: int | None) -> Check:
    expected = "BETWEEN 1 AND 12" if month is None else f"= {int(month)}"
    return Check(
        "expected_month",
        "Every row belongs to the month of the run.",
        {"rows_of_other_months": f"count_if(NOT coalesce(month {expected}, false) OR year IS NULL)"},
        _is_zero("rows_of_other_months"),
    )


def _flight_checks() -> tuple[Check, ...]:
    low, high = PLAUSIBLE_DEP_DELAY_MIN
    origins = ", ".join(f"'{origin}'" for origin in ORIGINS)
    return (
        Check(
            "plausible_dep_delay",
            f"Departure delays lie between {low} and {high} minutes.",
            {
                "implausible_dep_delays": f"count_if(dep_delay NOT BETWEEN {low} AND {high})",
                "min_dep_delay_min": "min(dep_delay)",
                "max_dep_delay_min": "max(dep_delay)",
            },
            _is_zero("implausible_dep_delays"),
        ),
        Check(
            "few_null_dep_delays",
            f"At most {MAX_DEP_DELAY_NULL_SHARE:.0%} of the flights have no departure delay.",
            {"null_dep_delay_share": "round(avg(if(dep_delay IS NULL, 1, 0)), 6)"},
            lambda observed: (observed["null_dep_delay_share"] or 0) <= MAX_DEP_DELAY_NULL_SHARE,
            blocking=False,  # a snowstorm is not a data error
        ),
        Check(
            "known_carriers",
            "Every carrier is in airlines.",
            {"unknown_carrier_rows": f"count_if({_KNOWN_CARRIER} IS NULL)"},
            _is_zero("unknown_carrier_rows"),
        ),
        Check(
            "known_origins",
            f"Every origin is one of {', '.join(ORIGINS)}.",
            {"unknown_origin_rows": f"count_if(NOT coalesce(origin IN ({origins}), false))"},
            _is_zero("unknown_origin_rows"),
        ),
        Check(
            "positive_distance",
            "Every distance is known and more than 0 miles.",
            {
                "rows_without_distance": "count_if(NOT coalesce(distance > 0, false))",
                "min_distance_mi": "min(distance)",
            },
            _is_zero("rows_without_distance"),
        ),
    )


FaultKind: TypeAlias = Literal["blocked", "subtle"]

#: The carrier with the fault: the largest one, so that the fault is visible in every month.
FAULTY_CARRIER = "UA"
#: The minutes that the subtle fault adds to delays: one hour, like a wrong time zone.
SHIFT_MIN = 60


def corrupt(flights: DataFrame, kind: FaultKind) -> DataFrame:
    """Return the flights with a fault in the rows of :data:`FAULTY_CARRIER`, with the same schema and number of rows.

    Args:
        frame: The flights.
        kind: ``"blocked"`` removes the carrier and makes distances negative, which the checks ``known_carriers`` and
            ``positive_distance`` catch. ``"subtle"`` makes delays one hour too long: all checks pass, the derived
            tables are wrong, and a rollback is needed.

    Raises:
        InvalidInputError: If the kind is unknown.
    """
    hit = F.col("carrier") == FAULTY_CARRIER
    if kind == "blocked":
        faulty = flights.withColumns(
            {
                "distance": F.when(hit, -F.col("distance")).otherwise(F.col("distance")),
                "carrier": F.when(hit, F.lit(None).cast("string")).otherwise(F.col("carrier")),
            }
        )
    elif kind == "subtle":
        faulty = flights.withColumns(
            {name: F.when(hit, F.col(name) + SHIFT_MIN).otherwise(F.col(name)) for name in ("dep_delay", "arr_delay")}
        )
    else:
        raise InvalidInputError(f"unknown fault {kind!r}; use blocked or subtle")
    return conform(faulty, FLIGHTS)
