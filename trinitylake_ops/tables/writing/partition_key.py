"""A partition named by its values, for data files, and as a filter that selects its rows."""

from __future__ import annotations

import datetime as dt
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypeAlias

from pyiceberg.expressions import And, BooleanExpression, EqualTo, IsNull, Reference
from pyiceberg.expressions.literals import literal
from pyiceberg.manifest import DataFile
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record
from pyiceberg.types import PrimitiveType

from trinitylake_ops.errors import InvalidInputError

PartitionValue: TypeAlias = bool | int | str | bytes | Decimal | dt.date | dt.datetime | dt.time | None


@dataclass(frozen=True)
class PartitionKey:
    """One partition of a table with identity partitions."""

    record: Record
    rows: BooleanExpression

    @classmethod
    def of(cls, metadata: TableMetadata, values: Mapping[str, PartitionValue]) -> PartitionKey:
        """Return the partition of a value for each partition column. Raises InvalidInputError."""
        spec, schema = metadata.spec(), metadata.schema()
        names = [field.name for field in spec.fields]
        if set(values) != set(names):
            raise InvalidInputError(f"partition {dict(values)!r} needs a value for each of {', '.join(names)}")
        record: list[Any] = []
        terms: list[BooleanExpression] = []
        for field in spec.fields:
            value: Any = values[field.name]
            kind = schema.find_type(field.source_id)
            assert isinstance(kind, PrimitiveType)
            try:
                typed = None if value is None else literal(value).to(kind)
            except (TypeError, ValueError) as error:
                raise InvalidInputError(
                    f"{value!r} is no value of the partition column {field.name!r}, {kind}"
                ) from error
            term = Reference(field.name)
            record.append(None if typed is None else typed.value)
            terms.append(IsNull(term=term) if typed is None else EqualTo(term=term, value=typed))
        return cls(Record(*record), terms[0] if len(terms) == 1 else And(*terms))


def check_partitions(data_files: Sequence[DataFile], wanted: Collection[Record] | None, columns: Sequence[str]) -> None:
    """Refuse rows of partitions that were not to be written. Raises InvalidInputError."""
    if wanted is None:
        return
    for data_file in data_files:
        if data_file.partition not in wanted:
            values = {column: data_file.partition[at] for at, column in enumerate(columns)}
            raise InvalidInputError(f"rows arrived for the partition {values!r}, which is not among those to replace")
