"""Convert Dagster metadata to plain values, and tables to Markdown, so that tests can compare them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import dagster as dg

from trinitylake_ops.declarations.rendering import markdown_table


def plain(metadata: Mapping[str, dg.MetadataValue[Any]]) -> dict[str, Any]:
    """Return the values of metadata. A table without rows becomes an empty string."""
    return {name: _plain(value) for name, value in metadata.items()}


def _plain(value: dg.MetadataValue[Any]) -> Any:
    if not isinstance(value, dg.TableMetadataValue):
        return value.value
    names = [column.name for column in value.schema.columns]
    return markdown_table(names, ([record.data[name] for name in names] for record in value.records)).text
