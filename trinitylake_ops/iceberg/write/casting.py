"""Cast rows to the column types of a table without changing values."""

from __future__ import annotations

from collections.abc import Callable
from datetime import date

import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.schema import Schema

from trinitylake_ops.errors import InvalidInputError

_MICROSECONDS_PER_DAY = 86_400_000_000
_EPOCH = date(1970, 1, 1).toordinal()
_FIRST_DAY, _LAST_DAY = date.min.toordinal() - _EPOCH, date.max.toordinal() - _EPOCH
_TRUNCATE = (
    'truncate them: .dt.floor("us") in pandas, .dt.cast_time_unit("us") in polars, .cast(..., safe=False) in pyarrow'
)


def conform(batch: pa.RecordBatch, schema: Schema, arrow_schema: pa.Schema) -> pa.Table:
    """Return a batch with a table's columns, types, order and field ids.

    Columns are matched by name. Missing optional columns are null.

    Args:
        batch: The rows.
        schema: The table's schema.
        arrow_schema: The same schema in Arrow, with field ids.

    Raises:
        InvalidInputError: The table lacks a column, a required column is missing or has nulls, or values do not fit.
    """
    check_distinct(batch.schema)
    unknown = sorted(set(batch.schema.names) - set(arrow_schema.names))
    if unknown:
        raise InvalidInputError(f"column {unknown[0]!r} is not in the table; add it to the schema or drop it")
    columns = [_conformed_column(batch, target, schema) for target in arrow_schema]
    return pa.Table.from_arrays(columns, schema=arrow_schema)


def _conformed_column(batch: pa.RecordBatch, target: pa.Field, schema: Schema) -> pa.Array:
    if target.name not in batch.schema.names:
        column = pa.nulls(batch.num_rows, target.type)
    else:
        kind = batch.schema.field(target.name).type
        _check_time_zones(target.name, kind, target.type)
        if dropped := _dropped_field(kind, target.type):
            raise InvalidInputError(
                f"column {target.name!r} has the field {dropped!r}, which the table's column lacks; add it to the"
                " schema or drop it"
            )
        try:
            column = cast_exactly(batch.column(target.name), target.type)
        except pa.ArrowException as error:
            reason, advice = str(error).partition("\n")[0], "cast it, or change the table's column"
            if _contains(kind, _has_nanoseconds):
                reason, advice = "it has values below a microsecond", _TRUNCATE
            raise InvalidInputError(
                f"column {target.name!r} cannot be stored as {schema.find_type(target.name)}: {reason}; {advice}"
            ) from error
    if column.null_count and not target.nullable:
        raise InvalidInputError(
            f"column {target.name!r} is required, but {column.null_count} rows have no value; add values"
        )
    return column


def cast_exactly(column: pa.Array | pa.ChunkedArray, target: pa.DataType) -> pa.Array | pa.ChunkedArray:
    """Cast a column to another type with the same values.

    Args:
        column: The column.
        target: The type to cast to.

    Raises:
        pyarrow.ArrowInvalid: A value would change.
        pyarrow.ArrowNotImplementedError: Arrow's cast would change values of this type.
        pyarrow.ArrowException: Arrow cannot cast the type.
    """
    if _contains(column.type, _is_list_view):
        raise pa.ArrowNotImplementedError(f"{column.type} would lose its elements in a cast")
    cast = column.cast(target)
    if _may_change(column.type, target) and not _same(column, cast.cast(column.type)):
        raise pa.ArrowInvalid(f"casting {column.type} to {target} would change values")
    return cast


def _may_change(kind: pa.DataType, target: pa.DataType) -> bool:
    """Whether Arrow's checked cast may change values between two types, at any depth."""
    if pa.types.is_dictionary(kind):
        return _may_change(kind.value_type, target)
    if pa.types.is_struct(kind) and pa.types.is_struct(target):
        target_types = {field.name: field.type for field in target}
        return any(field.name in target_types and _may_change(field.type, target_types[field.name]) for field in kind)
    if pa.types.is_map(kind) and pa.types.is_map(target):
        return _may_change(kind.key_type, target.key_type) or _may_change(kind.item_type, target.item_type)
    if _is_list(kind) and _is_list(target):
        return _may_change(kind.value_type, target.value_type)
    return (
        (pa.types.is_floating(kind) and pa.types.is_floating(target) and kind.bit_width > target.bit_width)
        or (pa.types.is_timestamp(kind) and pa.types.is_date(target))
        or (pa.types.is_boolean(target) and not (pa.types.is_boolean(kind) or pa.types.is_null(kind)))
    )


def _same(before: pa.Array | pa.ChunkedArray, after: pa.Array | pa.ChunkedArray) -> bool:
    if pa.types.is_floating(before.type):
        both_nan = pc.and_(pc.is_nan(before), pc.is_nan(after))
        return bool(pc.all(pc.or_(pc.equal(before, after), both_nan), skip_nulls=True).as_py() is not False)
    return before.equals(after) or repr(before.to_pylist()) == repr(after.to_pylist())  # compares NaN as equal


def check_distinct(schema: pa.Schema) -> None:
    """Raise InvalidInputError if two columns have the same name."""
    names = schema.names
    if len(set(names)) < len(names):
        duplicate = next(name for name in names if names.count(name) > 1)
        raise InvalidInputError(
            f"{names.count(duplicate)} columns are named {duplicate!r}; give each column a unique name"
        )


def _dropped_field(source: pa.DataType, target: pa.DataType) -> str | None:
    """Return the path of a nested field that a cast would silently drop, or None."""
    if pa.types.is_struct(source) and pa.types.is_struct(target):
        target_types = {field.name: field.type for field in target}
        for field in source:
            dropped = _dropped_field(field.type, target_types[field.name]) if field.name in target_types else ""
            if dropped is not None:
                return f"{field.name}.{dropped}" if dropped else field.name
    elif pa.types.is_map(source) and pa.types.is_map(target):
        return _dropped_field(source.item_type, target.item_type) or _dropped_field(source.key_type, target.key_type)
    elif _is_list(source) and _is_list(target):
        return _dropped_field(source.value_type, target.value_type)
    return None


def check_values(rows: pa.Table) -> None:
    """Raise InvalidInputError for values that Arrow can store but that readers of Iceberg tables cannot read.

    These are dates and timestamps outside the years 1 to 9999, and invalid values, such as strings that are not UTF-8.
    """
    for name, column in zip(rows.column_names, rows.columns, strict=True):
        for chunk in column.chunks:
            try:
                chunk.validate(full=True)
            except pa.ArrowInvalid as error:
                reason = str(error).partition("\n")[0]
                raise InvalidInputError(f"column {name!r} cannot be stored: {reason}; correct the value") from error
            if _has_far_times(chunk):
                raise InvalidInputError(
                    f"column {name!r} cannot be stored: it has dates or timestamps outside the years 1 to 9999; correct"
                    " them"
                )


def _has_far_times(values: pa.Array) -> bool:
    """Whether dates or timestamps are outside the years 1 to 9999, at any depth."""
    if pa.types.is_date32(values.type):
        per_day = 1
    elif pa.types.is_timestamp(values.type) and values.type.unit == "us":
        per_day = _MICROSECONDS_PER_DAY
    else:
        return any(_has_far_times(column) for _, column in _nested_columns(values))
    ends = pc.min_max(values)
    first, last = ends["min"].value, ends["max"].value
    return first is not None and not _FIRST_DAY * per_day <= first <= last < (_LAST_DAY + 1) * per_day


def lacking_with_values(kind: pa.DataType, values: pa.Array) -> str | None:
    """Return a nested field that a type lacks and that has a value in a column, or None.

    Args:
        kind: Type of the rows that replace the column.
        values: The column, of the table's type.

    Returns:
        The path of the field below the column, such as ``element.price``.
    """
    if not pa.types.is_nested(kind):
        return None
    new_types = _nested_types(kind)
    for name, column in _nested_columns(values):
        if name not in new_types:
            if column.null_count < len(column):
                return name
        elif (missing_path := lacking_with_values(new_types[name], column)) is not None:
            return f"{name}.{missing_path}"
    return None


def _nested_types(kind: pa.DataType) -> dict[str, pa.DataType]:
    """Return the nested types of a type by Iceberg's names."""
    if pa.types.is_struct(kind):
        return {field.name: field.type for field in kind}
    if pa.types.is_map(kind):
        return {"key": kind.key_type, "value": kind.item_type}
    return {"element": kind.value_type} if _is_list(kind) else {}


def _nested_columns(values: pa.Array) -> list[tuple[str, pa.Array]]:
    """Return the nested columns of a column by Iceberg's names. Fields of null structs are null."""
    kind = values.type
    if pa.types.is_struct(kind):
        return list(zip((field.name for field in kind), values.flatten(), strict=True))
    if pa.types.is_map(kind):
        # Keys and items belong to the whole array, even if the array is a slice.
        first, last = (values.offsets[at].as_py() for at in (0, -1)) if len(values) else (0, 0)
        return [
            (name, column.slice(first, last - first))
            for name, column in (("key", values.keys), ("value", values.items))
        ]
    # Arrow cannot create an empty array of an extension type, which would be needed if all lists are null.
    return [("element", values.flatten())] if _is_list(kind) and values.null_count < len(values) else []


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _is_list_view(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind))


def _has_nanoseconds(kind: pa.DataType) -> bool:
    return bool((pa.types.is_timestamp(kind) or pa.types.is_time(kind)) and kind.unit == "ns")


def _contains(kind: pa.DataType, matches: Callable[[pa.DataType], bool]) -> bool:
    """Whether a type or one of its nested types matches."""
    if matches(kind):
        return True
    if pa.types.is_dictionary(kind):
        return _contains(kind.value_type, matches)
    return any(_contains(kind.field(index).type, matches) for index in range(kind.num_fields))


def _check_time_zones(column: str, kind: pa.DataType, target: pa.DataType) -> None:
    """Raise InvalidInputError for a cast that would interpret local times as UTC or vice versa, at any depth."""
    if pa.types.is_dictionary(kind):
        _check_time_zones(column, kind.value_type, target)
    elif pa.types.is_struct(kind) and pa.types.is_struct(target):
        target_types = {field.name: field.type for field in target}
        for field in kind:
            if field.name in target_types:
                _check_time_zones(column, field.type, target_types[field.name])
    elif pa.types.is_map(kind) and pa.types.is_map(target):
        _check_time_zones(column, kind.key_type, target.key_type)
        _check_time_zones(column, kind.item_type, target.item_type)
    elif _is_list(kind) and _is_list(target):
        _check_time_zones(column, kind.value_type, target.value_type)
    elif pa.types.is_timestamp(kind) and pa.types.is_timestamp(target) and (kind.tz is None) != (target.tz is None):
        raise InvalidInputError(
            f"column {column!r} has the type {kind}, but the table's column {target}; convert it explicitly"
        )
