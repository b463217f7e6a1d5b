"""Operations for TrinityLake lakehouses: engine, Spark jobs, Dagster plugin, command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops import errors, operations
    from trinitylake_ops.format.definitions import Column, DataType, Schema, TableDef
    from trinitylake_ops.transaction.lakehouse import Lakehouse
    from trinitylake_ops.transaction.transaction import Transaction
    from trinitylake_ops.versions.snapshot import Snapshot

__all__ = [
    "Column",
    "DataType",
    "Lakehouse",
    "Schema",
    "Snapshot",
    "TableDef",
    "Transaction",
    "errors",
    "operations",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "errors": (),
        "format.definitions": ("Column", "DataType", "Schema", "TableDef"),
        "operations": (),
        "transaction.lakehouse": ("Lakehouse",),
        "transaction.transaction": ("Transaction",),
        "versions.snapshot": ("Snapshot",),
    },
)
