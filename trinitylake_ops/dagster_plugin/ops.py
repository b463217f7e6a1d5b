"""Operations on a lakehouse as Dagster ops. They are ops, not assets: nothing materializes them by accident."""

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


@contextmanager
def clear_failures() -> Iterator[None]:
    """Turn a typed error into a Dagster failure of one clear line, which is not retried."""
    try:
        yield
    except TrinityLakeError as error:
        raise dg.Failure(
            description=str(error), metadata={"error": type(error).__name__}, allow_retries=False
        ) from error


@dg.op(description="Commits a new version with the tree of an earlier one; nothing is lost, it can be rolled back too.")
def rollback(context: dg.OpExecutionContext, config: RollbackConfig, lakehouse: TrinityLakeResource) -> int:
    """Roll the lakehouse back, or some of its namespaces and tables."""
    with clear_failures():
        lake = lakehouse.open()
        plan = maintenance.plan_rollback(
            lake,
            config.to,
            namespaces=config.namespaces or None,
            tables=config.tables or None,
            reapply=config.reapply,
            run_id=context.run_id,
        )
        version = plan.execute()
    changes = markdown_table(
        ("change", "namespace", "table"), ((c.kind, c.namespace, c.table or "") for c in plan.changes)
    )
    context.log_event(
        dg.AssetMaterialization(
            LAKEHOUSE_KEY,
            metadata={"lakehouse_version": version, "operation": "rollback", "to": config.to, "changes": changes},
        )
    )
    return version
