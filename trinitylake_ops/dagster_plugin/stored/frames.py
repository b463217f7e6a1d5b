"""What assets return and ask for: DataFrames, by types that need not be installed."""

from __future__ import annotations

import sys
from typing import Any

import pyarrow as pa

from trinitylake_ops.errors import InvalidInputError

# What pandas, polars and Arrow raise for values that Arrow has no type for, or that do not fit its types.
_UNSTORABLE = (ValueError, TypeError, NotImplementedError, OverflowError)


def is_spark(kind: Any) -> bool:
    """Whether a type is Spark's DataFrame, without importing Spark: where nobody did, there is none."""
    if not isinstance(kind, type) or "pyspark.sql.dataframe" not in sys.modules:
        return False
    from pyspark.sql import DataFrame

    return issubclass(kind, DataFrame)


def is_pandas(kind: Any) -> bool:
    """Whether a type is the DataFrame of pandas, without importing pandas, which need not be installed."""
    module = getattr(kind, "__module__", "")
    return getattr(kind, "__name__", "") == "DataFrame" and (module == "pandas" or module.startswith("pandas."))


def is_polars(kind: Any) -> bool:
    """Whether a type is the DataFrame or LazyFrame of polars, without importing polars."""
    module = getattr(kind, "__module__", "")
    is_frame = getattr(kind, "__name__", "") in ("DataFrame", "LazyFrame")
    return is_frame and (module == "polars" or module.startswith("polars."))


def arrow_of_polars(frame: Any) -> pa.Table:
    """Return a frame of polars. A lazy one is collected. Raises InvalidInputError for values that do not fit."""
    collected = frame.collect() if type(frame).__name__ == "LazyFrame" else frame
    for name, kind in collected.schema.items():
        if _has_objects(kind):  # polars would export the addresses of the objects
            raise InvalidInputError(
                f"column {name!r} of the frame of polars has Python objects; cast it to a type such as pl.String"
            )
    try:
        rows: pa.Table = collected.to_arrow()
    except _UNSTORABLE as error:
        reason = str(error).partition("\n")[0]
        raise InvalidInputError(f"the frame of polars cannot be stored: {reason}; cast the column") from error
    return rows


def _has_objects(kind: Any) -> bool:
    """Whether a type of polars is Object, or has it within."""
    if getattr(kind, "__name__", type(kind).__name__) == "Object":
        return True
    fields = [field.dtype for field in getattr(kind, "fields", ())]
    inner = getattr(kind, "inner", None)
    return any(_has_objects(part) for part in (*fields, *([] if inner is None else [inner])))


def arrow_of(frame: Any) -> pa.Table:
    """Return a DataFrame of pandas with its columns and the named levels of its index.

    Row numbers are left out. Raises InvalidInputError for other levels, which would get lost, for columns of several
    levels or the same name, and for values that do not fit.
    """
    if frame.columns.nlevels > 1:
        raise InvalidInputError(
            "the columns of the DataFrame are a MultiIndex, and a table has columns of one name; join the levels, as by"
            " df.columns = ['_'.join(map(str, column)) for column in df.columns]"
        )
    if frame.columns.has_duplicates:
        first = frame.columns[frame.columns.duplicated()][0]
        raise InvalidInputError(
            f"the DataFrame has several columns {first!r}; drop all but one by df.loc[:, ~df.columns.duplicated()], or"
            " rename them"
        )
    levels = frame.index.levels if frame.index.nlevels > 1 else [frame.index]
    for name, level in zip(frame.index.names, levels, strict=True):
        if name is None and len(level) and level.dtype.kind not in "iu":
            raise InvalidInputError(
                f"the index of the DataFrame holds {level.dtype} values and has no name: name it, and it becomes a"
                " column, or drop it with reset_index(drop=True)"
            )
    kept = [name for name in frame.index.names if name is not None and name not in frame.columns]
    try:
        return pa.Table.from_pandas(frame.reset_index(level=kept) if kept else frame, preserve_index=False)
    except _UNSTORABLE as error:
        parts = error.args if isinstance(error, pa.ArrowException) else [error]  # Arrow's has the column as the second
        reason = ", ".join(str(part).partition("\n")[0] for part in parts)
        raise InvalidInputError(
            f"the DataFrame of pandas cannot be stored: {reason}; give the column one type by astype(...)"
        ) from error
