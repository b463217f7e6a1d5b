"""Rows that update those of the same keys, by pyiceberg, staged."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.tables.writing.arrow_writer import stage_arrow, storable
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import StagingCatalog


def stage_upsert(
    lake: Lakehouse, rows: pa.Table | pa.RecordBatchReader, name: tuple[str, str], keys: Sequence[str]
) -> StagedTable:
    """Stage rows that update those of the same keys, and add the others. A missing table is made of them.

    A publication of it conflicts with any other change of the table since. All rows are held in memory. Raises
    InvalidInputError for keys that the rows lack or have twice, and for rows that do not fit the table's columns.
    """
    given = rows if isinstance(rows, pa.Table) else rows.read_all()
    held = given.cast(storable(given.schema))
    shown = ".".join(name)
    if missing := [key for key in keys if key not in held.column_names]:
        raise InvalidInputError(f"table {shown}: the rows have no column {missing[0]!r}, which is one of the keys")
    if held.group_by(list(keys)).aggregate([]).num_rows < held.num_rows:
        raise InvalidInputError(f"table {shown}: there are several rows with the same {', '.join(keys)}")
    head = lake.snapshot()
    if not (head.has_namespace(name[0]) and head.has_table(*name)):
        return stage_arrow(lake, held, *name, mode="append")
    catalog = StagingCatalog(lake)
    try:
        catalog.load_table(name).upsert(held, join_cols=list(keys))
    except ValueError as error:
        raise InvalidInputError(f"table {shown}: the rows cannot be upserted: {error}") from error
    return catalog.staged(name)
