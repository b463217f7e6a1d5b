"""Operations for TrinityLake lakehouses: engine, Spark jobs, Dagster plugin, command line."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trinitylake_ops import errors, maintenance
    from trinitylake_ops.format.definitions import Column, DataType, Schema, TableDef
    from trinitylake_ops.transaction.lakehouse import Lakehouse

__all__ = ["Column", "DataType", "Lakehouse", "Schema", "TableDef", "errors", "maintenance"]

_DEFINITIONS = "trinitylake_ops.format.definitions"
_ATTRIBUTES = {
    "Lakehouse": "trinitylake_ops.transaction.lakehouse",
    "Column": _DEFINITIONS,
    "DataType": _DEFINITIONS,
    "Schema": _DEFINITIONS,
    "TableDef": _DEFINITIONS,
}


def __getattr__(name: str) -> Any:
    # Imported on first use: reading the version of the package must not load Arrow or Iceberg.
    if name in _ATTRIBUTES:
        return getattr(import_module(_ATTRIBUTES[name]), name)
    if name in ("errors", "maintenance"):
        return import_module(f"trinitylake_ops.{name}")
    raise AttributeError(f"module 'trinitylake_ops' has no attribute {name!r}")
