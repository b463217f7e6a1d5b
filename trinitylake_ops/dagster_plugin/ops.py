"""Operations on a lakehouse as Dagster ops. They are ops, not assets: nothing materializes them by accident."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import dagster as dg
from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.dagster_plugin.metadata import figures, markdown_table
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.errors import TrinityLakeError


class RollbackConfig(dg.Config):
    """What to go back to, and how much of it."""

    to: str = Field(description="The version to go back to, by its number, or the name of an export.")
    namespaces: list[str] = Field(
        default=[], description="Only these namespaces, with their tables; empty here and below: everything."
    )
    tables: list[str] = Field(default=[], description="Only these tables, each as namespace.table.")
    reapply: bool = Field(
        default=False,
        description="Whether to roll back on top of a commit that gets in between, instead of failing with a conflict.",
    )


class ExportConfig(dg.Config):
    """What to export, and how long to keep it."""

    name: str = Field(description="Name of the export; names are not reused, and not digits only.")
    version: int | None = Field(default=None, description="The version to export; empty: the latest.")
    retain_days: float | None = Field(
        default=None, description="Days for which the version is kept for this export; empty: until it is dropped."
    )
