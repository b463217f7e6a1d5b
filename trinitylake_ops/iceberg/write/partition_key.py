"""Partitions by their typed values: as the key of a data file, as a filter of rows, and as JSON."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from typing import Any, TypeAlias, cast

from pyiceberg.conversions import from_bytes, to_bytes
from pyiceberg.expressions import And, BooleanExpression, EqualTo, IsNull, Reference
from pyiceberg.expressions.literals import AboveMax, BelowMin, Literal, literal
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record
from pyiceberg.types import DateType, DecimalType, IcebergType, IntegerType, LongType, PrimitiveType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.staged_table import EncodedPartition

PartitionValue: TypeAlias = bool | int | str | bytes | Decimal | dt.date | dt.datetime | dt.time | None

_WHOLE_NUMBER = re.compile(r"[+-]?[0-9]+")
_DECIMAL_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")


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
        typed = {name: typed_value(schema, name, values[name]) for name in names}
        record = Record(*(None if value is None else value.value for value in typed.values()))
        return cls(record, _rows_with(typed))


def typed_value(schema: Schema, column: str, value: PartitionValue) -> Literal[Any] | None:
    """Return a value as one of a column's type, None for NULL.

    Args:
        schema: The columns of the table.
        column: The name of a column.
        value: Text is read as the column's type. Text for a whole number has only digits and a sign. A decimal may have
            fewer digits after the point than its type, such as ``1.5`` for 1.50.

    Raises:
        InvalidInputError: The schema has no such column of a primitive type, or the value is not exactly one of its
            type.
    """
    kind: IcebergType | None = schema.find_type(column) if column in schema.column_names else None
    if not isinstance(kind, PrimitiveType):
        raise InvalidInputError(f"the table has no column {column!r} that can be the value of a partition")
    if value is None:
        return None
    try:
        given: Any = _scaled(value, kind) if isinstance(kind, DecimalType) else value
        typed: Literal[Any] = literal(given).to(kind)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _no_value(value, column, kind) from error
    if isinstance(typed, AboveMax | BelowMin) or not _is_exact(value, kind):
        raise _no_value(value, column, kind)
    return typed


def _no_value(value: PartitionValue, column: str, kind: IcebergType) -> InvalidInputError:
    return InvalidInputError(
        f"{value!r} is no value of the partition column {column!r}, {kind}; use one of that type, or give the column"
        " another type"
    )


def _scaled(value: PartitionValue, kind: DecimalType) -> PartitionValue:
    """Return a number with as many digits after the point as a type has. Raises ArithmeticError if it has too many."""
    if isinstance(value, str) and _DECIMAL_NUMBER.fullmatch(value):
        value = Decimal(value)
    if not isinstance(value, Decimal):
        return value
    scaled = value.quantize(Decimal(1).scaleb(-kind.scale), context=Context(prec=kind.precision))
    return scaled if scaled == value else value


def _is_exact(value: PartitionValue, kind: IcebergType) -> bool:
    """Whether pyiceberg's conversion keeps a value: it rounds fractions, and cuts times off dates."""
    if isinstance(kind, IntegerType | LongType):
        if isinstance(value, str):
            return _WHOLE_NUMBER.fullmatch(value) is not None
        return not isinstance(value, Decimal) or value == value.to_integral_value()
    return not (isinstance(kind, DateType) and isinstance(value, dt.datetime))


def rows_where(schema: Schema, values: Mapping[str, PartitionValue]) -> BooleanExpression:
    """Return the filter for rows with a value in each of some columns. Raises InvalidInputError."""
    return _rows_with({column: typed_value(schema, column, value) for column, value in values.items()})


def _rows_with(typed: Mapping[str, Literal[Any] | None]) -> BooleanExpression:
    terms: list[BooleanExpression] = [
        IsNull(term=Reference(column)) if value is None else EqualTo(term=Reference(column), value=value)
        for column, value in typed.items()
    ]
    return terms[0] if len(terms) == 1 else And(*terms)


def encode_partitions(
    partitions: Iterable[Record], spec: PartitionSpec, schema: Schema
) -> tuple[EncodedPartition, ...]:
    """Return partitions of a spec in a form that JSON keeps, each once and sorted."""
    kinds = _types_of(spec, schema)

    def encoded(partition: Record) -> EncodedPartition:
        values = [partition[at] for at in range(len(kinds))]
        return tuple(
            None if value is None else to_bytes(kind, value).hex() for kind, value in zip(kinds, values, strict=True)
        )

    distinct = {encoded(partition) for partition in partitions}
    return tuple(sorted(distinct, key=lambda partition: [(value is not None, value or "") for value in partition]))


def _types_of(spec: PartitionSpec, schema: Schema) -> list[PrimitiveType]:
    return [cast(PrimitiveType, field.field_type) for field in spec.partition_type(schema).fields]


def decode_partitions(encoded: Iterable[EncodedPartition], spec: PartitionSpec, schema: Schema) -> frozenset[Record]:
    """Return the partitions that :func:`encode_partitions` encoded. Raises InvalidInputError for any other value."""
    kinds = _types_of(spec, schema)
    try:
        return frozenset(
            Record(
                *(
                    None if value is None else from_bytes(kind, bytes.fromhex(value))
                    for kind, value in zip(kinds, partition, strict=True)
                )
            )
            for partition in encoded
        )
    except Exception as error:  # from_bytes raises errors of struct, decimal and uuid
        raise InvalidInputError(f"the partitions of a staged table cannot be read: {error}; stage it again") from error


def check_partitions(data_files: Sequence[DataFile], wanted: Collection[Record] | None, columns: Sequence[str]) -> None:
    """Refuse rows of partitions that were not to be written. Raises InvalidInputError."""
    if wanted is None:
        return
    for data_file in data_files:
        if data_file.partition not in wanted:
            values = {column: data_file.partition[at] for at, column in enumerate(columns)}
            raise InvalidInputError(f"rows arrived for the partition {values!r}, which is not among those to write")
