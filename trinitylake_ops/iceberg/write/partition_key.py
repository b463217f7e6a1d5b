"""Represent partitions by their typed values: as the key of a data file, as a row filter, and as JSON."""

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

    #: Values of the partition columns.
    record: Record
    #: Filter that matches the rows of the partition.
    rows: BooleanExpression

    @classmethod
    def of(cls, metadata: TableMetadata, values: Mapping[str, PartitionValue]) -> PartitionKey:
        """Return the partition with these values, one for each partition column. Raises InvalidInputError."""
        spec, schema = metadata.spec(), metadata.schema()
        names = [field.name for field in spec.fields]
        if set(values) != set(names):
            raise InvalidInputError(
                f"partition {dict(values)!r} is incomplete; set a value for each of {', '.join(names)}"
            )
        typed = {name: typed_value(schema, name, values[name]) for name in names}
        record = Record(*(None if value is None else value.value for value in typed.values()))
        return cls(record, _rows_with(typed))


def typed_value(schema: Schema, column: str, value: PartitionValue) -> Literal[Any] | None:
    """Convert a value to a column's type. Return None for NULL.

    Args:
        schema: Columns of the table.
        column: Name of a column.
        value: Strings are parsed as the column's type. A string for an integer may contain only digits and a sign. A
            decimal may have fewer digits after the point than its type, such as ``1.5`` for 1.50.

    Raises:
        InvalidInputError: The schema has no such column of a primitive type, or the value cannot be converted exactly.
    """
    kind: IcebergType | None = schema.find_type(column) if column in schema.column_names else None
    if not isinstance(kind, PrimitiveType):
        raise InvalidInputError(f"the table has no primitive column {column!r}; use one of its partition columns")
    if value is None:
        return None
    try:
        scaled: Any = _scale(value, kind) if isinstance(kind, DecimalType) else value
        typed: Literal[Any] = literal(scaled).to(kind)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _invalid_value(value, column, kind) from error
    if isinstance(typed, AboveMax | BelowMin) or not _is_exact(value, kind):
        raise _invalid_value(value, column, kind)
    return typed


def _invalid_value(value: PartitionValue, column: str, kind: IcebergType) -> InvalidInputError:
    return InvalidInputError(
        f"{value!r} is not a valid value of partition column {column!r} ({kind}); use a value of that type, or change"
        " the column's type"
    )


def _scale(value: PartitionValue, kind: DecimalType) -> PartitionValue:
    """Return a number with the scale of a decimal type. Raises ArithmeticError if the number has more digits."""
    if isinstance(value, str) and _DECIMAL_NUMBER.fullmatch(value):
        value = Decimal(value)
    if not isinstance(value, Decimal):
        return value
    scaled = value.quantize(Decimal(1).scaleb(-kind.scale), context=Context(prec=kind.precision))
    return scaled if scaled == value else value


def _is_exact(value: PartitionValue, kind: IcebergType) -> bool:
    """Whether PyIceberg's conversion preserves a value. PyIceberg rounds fractions, and truncates times to dates."""
    if isinstance(kind, IntegerType | LongType):
        if isinstance(value, str):
            return _WHOLE_NUMBER.fullmatch(value) is not None
        return not isinstance(value, Decimal) or value == value.to_integral_value()
    return not (isinstance(kind, DateType) and isinstance(value, dt.datetime))


def rows_where(schema: Schema, values: Mapping[str, PartitionValue]) -> BooleanExpression:
    """Return the filter for rows with a given value in each of some columns. Raises InvalidInputError."""
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
    """Encode partitions for JSON, without duplicates and sorted.

    Args:
        partitions: The partitions.
        spec: Their partition spec.
        schema: Schema of the table.
    """
    kinds = _types_of(spec, schema)

    def encode(partition: Record) -> EncodedPartition:
        values = [partition[index] for index in range(len(kinds))]
        return tuple(
            None if value is None else to_bytes(kind, value).hex() for kind, value in zip(kinds, values, strict=True)
        )

    distinct = {encode(partition) for partition in partitions}
    return tuple(sorted(distinct, key=lambda partition: [(value is not None, value or "") for value in partition]))


def _types_of(spec: PartitionSpec, schema: Schema) -> list[PrimitiveType]:
    return [cast(PrimitiveType, field.field_type) for field in spec.partition_type(schema).fields]


def decode_partitions(encoded: Iterable[EncodedPartition], spec: PartitionSpec, schema: Schema) -> frozenset[Record]:
    """Decode partitions that :func:`encode_partitions` encoded.

    Args:
        encoded: The encoded partitions.
        spec: Their partition spec.
        schema: Schema of the table.

    Raises:
        InvalidInputError: A partition is not valid.
    """
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
        raise InvalidInputError(f"partitions of a staged table are not valid: {error}; stage it again") from error


def check_partitions(
    data_files: Sequence[DataFile], expected: Collection[Record] | None, columns: Sequence[str]
) -> None:
    """Check that data files belong to expected partitions.

    Args:
        data_files: The files.
        expected: The expected partitions; None if any partition is allowed.
        columns: The partition columns, for errors.

    Raises:
        InvalidInputError: A file belongs to another partition.
    """
    if expected is None:
        return
    for data_file in data_files:
        if data_file.partition not in expected:
            values = {column: data_file.partition[index] for index, column in enumerate(columns)}
            raise InvalidInputError(
                f"rows belong to partition {values!r}, which is not one of those to write; filter them out"
            )
