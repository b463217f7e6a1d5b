"""Faulty months, made on purpose from good ones: one that checks stop, and one that passes them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from trinitylake_ops.demo.flights_schema import FLIGHTS, conform
from trinitylake_ops.errors import InvalidInputError

FaultKind: TypeAlias = Literal["blocked", "subtle"]

#: The carrier with the fault: the largest one, so that its delays are seen in every month.
FAULTY_CARRIER = "UA"
#: The minutes that the subtle fault adds to delays: an hour, as from a clock in the wrong time zone.
SHIFT_MIN = 60


def corrupt(flights: DataFrame, kind: FaultKind) -> DataFrame:
    """Return the flights with a fault in the rows of :data:`FAULTY_CARRIER`. Rows and schema are the same.

    ``"blocked"`` loses the carrier and makes distances negative. ``known_carriers`` and ``positive_distance`` stop it.
    ``"subtle"`` makes delays an hour too long. Every check passes, the derived tables are wrong, and only a rollback
    helps. Raises InvalidInputError for another kind.
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
        raise InvalidInputError(f"no fault {kind!r}: give blocked or subtle")
    return conform(faulty, FLIGHTS)
