"""Checks of the flights tables before they are published: the rules, and the observed values.

Each check names the SQL aggregates it looks at. All aggregates of a table's checks are computed in one pass over it.
One row comes back to the driver, whatever the size of the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from trinitylake_ops.demo.flights_tables import TABLES, FlightsTable
from trinitylake_ops.errors import InvalidInputError

#: The airports of the data set.
ORIGINS = ("EWR", "JFK", "LGA")
#: Departure delays outside this range, in minutes and inclusive, count as mistakes.
PLAUSIBLE_DEP_DELAY_MIN = (-120, 2000)
#: The worst month of the data set has 5 % without a departure delay: its cancelled flights.
MAX_DEP_DELAY_NULL_SHARE = 0.1

Observed: TypeAlias = dict[str, int | float | None]

_KNOWN_CARRIER = "known_carrier"


@dataclass(frozen=True, slots=True)
class Check:
    """One rule for a table. A blocking one stops the publish.

    ``aggregates`` are SQL expressions by the name under which the result reports them.
    """

    name: str
    description: str
    aggregates: Mapping[str, str]
    holds: Callable[[Observed], bool]
    blocking: bool = True


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of a check. ``observed`` holds its aggregates, plain numbers."""

    name: str
    passed: bool
    blocking: bool
    description: str
    observed: Observed


def checks_for(table: str, month: int | None = None) -> tuple[Check, ...]:
    """Return the checks of one of the tables, the same names for every month.

    ``month``, 1 to 12, is the only one its rows may have; None allows any. Raises InvalidInputError
    for an unknown table.
    """
    if table not in TABLES:
        raise InvalidInputError(f"no table {table!r}: the pipeline has {', '.join(TABLES)}")
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
    """Check a frame of one of the tables in one pass, in the order of :func:`checks_for`.

    The table ``flights`` also needs ``airlines``. Raises InvalidInputError for an unknown table or
    when ``airlines`` is missing.
    """
    checks = checks_for(table, month)
    if table == "flights":
        if airlines is None:
            raise InvalidInputError("the checks of flights need the table airlines")
        carriers = airlines.select("carrier").distinct().withColumn(_KNOWN_CARRIER, F.lit(True))
        frame = frame.join(F.broadcast(carriers), "carrier", "left")
    aggregates = {name: sql for check in checks for name, sql in check.aggregates.items()}
    row = frame.agg(*(F.expr(sql).alias(name) for name, sql in aggregates.items())).first()
    seen: Observed = row.asDict() if row is not None else {}
    results = []
    for check in checks:
        observed = {name: seen[name] for name in check.aggregates}
        results.append(CheckResult(check.name, check.holds(observed), check.blocking, check.description, observed))
    return tuple(results)


def _none(name: str) -> Callable[[Observed], bool]:
    return lambda observed: observed[name] == 0


def _key_checks(table: FlightsTable) -> tuple[Check, ...]:
    key = ", ".join(table.primary_key)
    is_null = " OR ".join(f"{column} IS NULL" for column in table.primary_key)
    return (
        Check(
            "has_rows",
            "There is at least one row.",
            {"row_count": "count(*)"},
            lambda observed: (observed["row_count"] or 0) > 0,
        ),
        Check(
            "key_not_null",
            f"The key ({key}) is never null.",
            {"null_key_rows": f"count_if({is_null})"},
            _none("null_key_rows"),
        ),
        Check(
            "key_unique",
            f"The key ({key}) is unique.",
            {"duplicate_key_rows": f"count_if(NOT ({is_null})) - count(DISTINCT {key})"},
            _none("duplicate_key_rows"),
        ),
    )


def _month_check(month: int | None) -> Check:
    expected = "BETWEEN 1 AND 12" if month is None else f"= {int(month)}"
    return Check(
        "expected_month",
        "Every row is of the month of the run.",
        {"rows_of_other_months": f"count_if(NOT coalesce(month {expected}, false) OR year IS NULL)"},
        _none("rows_of_other_months"),
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
            _none("implausible_dep_delays"),
        ),
        Check(
            "few_null_dep_delays",
            f"At most {MAX_DEP_DELAY_NULL_SHARE:.0%} of the flights have no departure delay.",
            {"null_dep_delay_share": "round(avg(if(dep_delay IS NULL, 1, 0)), 6)"},
            lambda observed: (observed["null_dep_delay_share"] or 0) <= MAX_DEP_DELAY_NULL_SHARE,
            blocking=False,  # a snowstorm is news, not a mistake
        ),
        Check(
            "known_carriers",
            "Every carrier is in airlines.",
            {"unknown_carrier_rows": f"count_if({_KNOWN_CARRIER} IS NULL)"},
            _none("unknown_carrier_rows"),
        ),
        Check(
            "known_origins",
            f"Every origin is one of {', '.join(ORIGINS)}.",
            {"unknown_origin_rows": f"count_if(NOT coalesce(origin IN ({origins}), false))"},
            _none("unknown_origin_rows"),
        ),
        Check(
            "positive_distance",
            "Every distance is known and more than 0 miles.",
            {
                "rows_without_distance": "count_if(NOT coalesce(distance > 0, false))",
                "min_distance_mi": "min(distance)",
            },
            _none("rows_without_distance"),
        ),
    )
