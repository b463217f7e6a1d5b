"""Test the data checks of the demo: good data passes all checks, and each check fails for its kind of bad data."""

import json
from collections.abc import Callable

import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from trinitylake_ops.demo.flights_model import delay_by_carrier_month
from trinitylake_ops.demo.flights_tables import (
    FAULTY_CARRIER,
    SHIFT_MIN,
    TABLES,
    CheckResult,
    checks_for,
    corrupt,
    run_checks,
)
from trinitylake_ops.errors import InvalidInputError

#: In normal test runs, `tests/e2e/test_demo.py` covers these checks by running the demo as a user does.
pytestmark = pytest.mark.soak

BROKEN: dict[str, Callable[[DataFrame], DataFrame]] = {
    "has_rows": lambda flights: flights.where("false"),
    "key_not_null": lambda flights: set_in_one_row(flights, flight_id=None),
    "key_unique": lambda flights: flights.union(flights.limit(2)),
    "expected_month": lambda flights: set_in_one_row(flights, month=3),
    "plausible_dep_delay": lambda flights: set_in_one_row(flights, dep_delay=2001),
    "few_null_dep_delays": lambda flights: flights.withColumn(
        "dep_delay", F.when(F.col("day") > 1, F.col("dep_delay"))
    ),
    "known_carriers": lambda flights: set_in_one_row(flights, carrier="ZZ"),
    "known_origins": lambda flights: set_in_one_row(flights, origin="PHL"),
    "positive_distance": lambda flights: set_in_one_row(flights, distance=0),
}


def set_in_one_row(flights: DataFrame, **values: object) -> DataFrame:
    is_selected = F.col("flight_id") == "20130101-UA-1545-EWR"
    return flights.withColumns(
        {name: F.when(is_selected, F.lit(value)).otherwise(F.col(name)) for name, value in values.items()}
    )


def january(sample: dict[str, DataFrame]) -> DataFrame:
    return sample["flights"].where("month = 1")


def check_january(sample: dict[str, DataFrame], flights: DataFrame) -> dict[str, CheckResult]:
    return {result.name: result for result in run_checks("flights", flights, month=1, airlines=sample["airlines"])}


@pytest.mark.parametrize("name", TABLES)
def test_good_tables_pass(name: str, sample: dict[str, DataFrame]) -> None:
    results = run_checks(name, sample[name], airlines=sample["airlines"])
    assert [result.name for result in results] == [check.name for check in checks_for(name)]
    assert [result.name for result in results if not result.passed] == []
    assert results[0].observed == {"row_count": sample[name].count()}
    json.dumps([result.observed for result in results])


def test_check_names_are_the_same_for_every_month() -> None:
    assert [check.name for check in checks_for("flights")] == list(BROKEN)
    assert [check.name for check in checks_for("flights", 7)] == list(BROKEN)
    assert {check.name for check in checks_for("flights") if not check.blocking} == {"few_null_dep_delays"}


@pytest.mark.parametrize("name", BROKEN)
def test_bad_data_fails_only_matching_check(name: str, sample: dict[str, DataFrame]) -> None:
    results = check_january(sample, BROKEN[name](january(sample)))
    assert [result.name for result in results.values() if not result.passed] == [name]


def test_observed_values_describe_failure(sample: dict[str, DataFrame]) -> None:
    results = check_january(sample, BROKEN["key_unique"](january(sample)))
    assert results["key_unique"].observed == {"duplicate_key_rows": 2}
    results = check_january(sample, BROKEN["plausible_dep_delay"](january(sample)))
    assert results["plausible_dep_delay"].observed["implausible_dep_delays"] == 1
    assert results["plausible_dep_delay"].observed["max_dep_delay_min"] == 2001


@pytest.mark.parametrize("null_column", ["year", "month", "carrier"])
def test_checks_detect_nulls_in_derived_tables(null_column: str, sample: dict[str, DataFrame]) -> None:
    broken = sample["delay_by_carrier_month"].withColumn(
        null_column, F.lit(None).cast(TABLES["flights"].schema[null_column].dataType)
    )
    failed = {result.name for result in run_checks("delay_by_carrier_month", broken) if not result.passed}
    assert failed == ({"key_not_null"} if null_column == "carrier" else {"key_not_null", "expected_month"})


@pytest.mark.parametrize("column", ["carrier", "origin", "distance", "month"])
def test_checks_detect_nulls_in_flights(column: str, sample: dict[str, DataFrame]) -> None:
    flights = january(sample)
    broken = flights.withColumn(column, F.lit(None).cast(flights.schema[column].dataType))
    assert any(result.blocking and not result.passed for result in check_january(sample, broken).values())


def test_blocked_fault_fails_blocking_checks(sample: dict[str, DataFrame]) -> None:
    faulty = corrupt(january(sample), "blocked")
    assert faulty.schema == january(sample).schema
    blocking_failures = {
        result.name for result in check_january(sample, faulty).values() if result.blocking and not result.passed
    }
    assert blocking_failures == {"known_carriers", "positive_distance"}


def test_subtle_fault_passes_checks_with_wrong_delays(sample: dict[str, DataFrame]) -> None:
    faulty = corrupt(january(sample), "subtle")
    assert faulty.schema == january(sample).schema
    assert all(result.passed for result in check_january(sample, faulty).values())

    def mean_delays(flights: DataFrame) -> dict[str, float]:
        delays = delay_by_carrier_month(flights, sample["weather"], sample["airlines"])
        return {row["carrier"]: row["mean_dep_delay_min"] for row in delays.collect()}

    expected_delays, faulty_delays = mean_delays(january(sample)), mean_delays(faulty)
    assert faulty_delays.pop(FAULTY_CARRIER) == pytest.approx(expected_delays.pop(FAULTY_CARRIER) + SHIFT_MIN)
    assert faulty_delays == expected_delays


def test_invalid_arguments_are_rejected(sample: dict[str, DataFrame]) -> None:
    with pytest.raises(InvalidInputError, match="'trains'"):
        checks_for("trains")
    with pytest.raises(InvalidInputError):
        run_checks("flights", sample["flights"])
    with pytest.raises(InvalidInputError, match="'odd'"):
        corrupt(sample["flights"], "odd")  # type: ignore[arg-type]
