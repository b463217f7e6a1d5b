"""Random nested types of Iceberg, and rows of these types with nulls at every level."""

from __future__ import annotations

import datetime as dt
import itertools
import math
import uuid
from decimal import Decimal
from random import Random
from typing import Any

import pyarrow as pa

#: Arrow types of all primitive types in Iceberg's format version 2.
PRIMITIVES = (
    pa.bool_(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.decimal128(9, 2),
    pa.decimal128(18, 4),
    pa.decimal128(38, 10),
    pa.date32(),
    pa.time64("us"),
    pa.timestamp("us"),
    pa.timestamp("us", "UTC"),
    pa.string(),
    pa.binary(),
    pa.binary(16),
    pa.uuid(),
)
_MAX_DEPTH = 3
_FLOATS = (0.0, -0.0, 1.5, math.nan, math.inf, -math.inf)


def nested_type(random: Random, depth: int = 0) -> pa.DataType:
    """Return a random type, which is nested at depth 0."""
    kinds = ("struct", "list", "map") if depth == 0 else ("struct", "list", "map", "primitive", "primitive")
    kind = "primitive" if depth == _MAX_DEPTH else random.choice(kinds)
    if kind == "struct":
        n_fields = random.randint(1, 3)
        return pa.struct([pa.field(f"f{index}", nested_type(random, depth + 1)) for index in range(n_fields)])
    if kind == "list":
        return pa.list_(nested_type(random, depth + 1))
    if kind == "map":
        is_struct = random.random() < 0.3
        key = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())]) if is_struct else pa.string()
        return pa.map_(key, nested_type(random, depth + 1))
    return random.choice(PRIMITIVES)


def value(random: Random, kind: pa.DataType, *, null_rate: float = 0.3) -> Any:
    """Return a random value of a type, in the form of ``to_pylist``."""
    if random.random() < null_rate:
        return None
    if pa.types.is_struct(kind):
        return {field.name: value(random, field.type, null_rate=null_rate) for field in kind}
    if pa.types.is_list(kind):
        return [value(random, kind.value_type, null_rate=null_rate) for _ in range(random.randint(0, 3))]
    if pa.types.is_map(kind):
        n_entries = random.randint(0, 2)
        return [
            (_key(kind.key_type, index), value(random, kind.item_type, null_rate=null_rate))
            for index in range(n_entries)
        ]
    return _primitive(random, kind)


def _key(kind: pa.DataType, index: int) -> Any:
    return {"a": index, "b": None if index else "b"} if pa.types.is_struct(kind) else f"key {index}"


def _primitive(random: Random, kind: pa.DataType) -> Any:
    number = random.randint(-1_000, 1_000)
    timestamp = dt.datetime(2026, 1, 1, tzinfo=dt.UTC) + dt.timedelta(microseconds=number * 7_777_777)
    if pa.types.is_boolean(kind):
        return number > 0
    if pa.types.is_integer(kind):
        return number
    if pa.types.is_floating(kind):
        return random.choice(_FLOATS)
    if pa.types.is_decimal(kind):
        return Decimal(number).scaleb(-kind.scale)
    if pa.types.is_date(kind):
        return timestamp.date()
    if pa.types.is_time(kind):
        return timestamp.time()
    if pa.types.is_timestamp(kind):
        return timestamp if kind.tz else timestamp.replace(tzinfo=None)
    if pa.types.is_string(kind):
        return random.choice(("", "text", "\u00e9\u4e2d"))
    if pa.types.is_fixed_size_binary(kind):
        return random.randbytes(16)
    if kind == pa.uuid():
        return uuid.UUID(bytes=random.randbytes(16))
    return random.randbytes(random.randint(0, 3))


def nested_rows(seed: int, *, n_columns: int = 6, n_rows: int = 25) -> pa.Table:
    """Return random rows: an id, one column of each primitive type, and nested columns."""
    random = Random(seed)
    fields = [pa.field("id", pa.int64())]
    fields += [pa.field(f"p{index}", kind) for index, kind in enumerate(PRIMITIVES)]
    fields += [pa.field(f"n{index}", nested_type(random)) for index in range(n_columns)]
    columns = [pa.array(range(n_rows), pa.int64())]
    columns += [array([value(random, field.type) for _ in range(n_rows)], field.type) for field in fields[1:]]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields))


def array(values: list[Any], kind: pa.DataType) -> pa.Array:
    """Return an array of values in the form of ``to_pylist``. Arrow itself cannot convert nested UUIDs."""
    is_null = [value is None for value in values]
    mask = pa.array(is_null, pa.bool_())
    if pa.types.is_struct(kind):
        children = [
            array([None if item is None else item[field.name] for item in values], field.type) for field in kind
        ]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        offsets = pa.array([0, *itertools.accumulate(len(item or ()) for item in values)], pa.int32())
        flat = [element for item in values for element in item or ()]
        if pa.types.is_list(kind):
            return pa.ListArray.from_arrays(offsets, array(flat, kind.value_type), type=kind, mask=mask)
        keys = array([key for key, _ in flat], kind.key_type)
        return pa.MapArray.from_arrays(
            offsets, keys, array([entry_value for _, entry_value in flat], kind.item_type), type=kind, mask=mask
        )
    if kind == pa.uuid():
        storage_values = [None if item is None else item.bytes for item in values]
        return pa.ExtensionArray.from_storage(kind, pa.array(storage_values, pa.binary(16)))
    return pa.array(values, kind)
