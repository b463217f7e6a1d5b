"""The eight tables of the flights pipeline, described once, as a scheduler or a test needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from trinitylake_ops.demo import flights_model as model
from trinitylake_ops.demo import flights_schema as schema
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.errors import InvalidInputError

_Read: TypeAlias = Callable[[SparkSession, FlightsSource, int | None], DataFrame]
_Derive: TypeAlias = Callable[[Mapping[str, DataFrame]], DataFrame]

#: Partition columns of every table that grows by the month.
BY_MONTH = ("year", "month")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightsTable:
    """One table. ``inputs`` are the tables it is derived from, none for a table of the source.

    ``primary_key`` columns are never null and together unique. ``partition_by`` is ``("year", "month")`` or, for a
    table that is written as a whole, empty. ``schema`` is that of every frame :meth:`build` returns.
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
        """Whether a monthly run replaces only that month's partition."""
        return self.partition_by == BY_MONTH

    def build(
        self,
        spark: SparkSession,
        source: FlightsSource,
        inputs: Mapping[str, DataFrame] | None = None,
        month: int | None = None,
    ) -> DataFrame:
        """Return the table's rows, of one month (1 to 12) or of all. A table without months returns all.

        ``inputs`` are frames by table name. Of each monthly frame only ``month`` is used. Raises InvalidInputError for
        a missing input or a wrong month, and what FlightsSource raises.
        """
        if self.read is not None:
            return self.read(spark, source, month)
        given = inputs or {}
        missing = [name for name in self.inputs if name not in given]
        if missing or self.derive is None:
            raise InvalidInputError(f"table {self.name} needs the inputs {', '.join(missing)}")
        return self.derive(
            {
                name: model.of_month(given[name], month) if TABLES[name].is_monthly else given[name]
                for name in self.inputs
            }
        )


def _by_name(*tables: FlightsTable) -> dict[str, FlightsTable]:
    return {table.name: table for table in tables}


#: The tables by name, each after its inputs.
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
        description="Aircraft by registration: maker, model, year built, seats.",
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
        description="Every flight that was to leave New York in 2013.",
        schema=schema.FLIGHTS,
        primary_key=("flight_id",),
        partition_by=BY_MONTH,
        read=model.flights,
    ),
    FlightsTable(
        name="delay_by_carrier_month",
        description="Delays and cancellations by carrier and month beside the weather at departure.",
        schema=schema.DELAY_BY_CARRIER_MONTH,
        primary_key=("year", "month", "carrier"),
        partition_by=BY_MONTH,
        inputs=("flights", "weather", "airlines"),
        derive=lambda inputs: model.delay_by_carrier_month(inputs["flights"], inputs["weather"], inputs["airlines"]),
    ),
    FlightsTable(
        name="route_performance",
        description="Air time, speed and delays by route and month, with the distance checked on the globe.",
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
