"""Operations on a lakehouse as Dagster ops. They are ops, not assets: nothing materializes them by accident."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import dagster as dg
from pydantic import Field

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.dagster_plugin.metadata import figures, markdown_table, picture
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.maintenance.page import verification_picture
from trinitylake_ops.transaction.commit_info import acting_for_run


class RollbackConfig(dg.Config):
    """What to go back to, and how much of it."""

    to: str = Field(description="The version to go back to, by its number, or the name of an export.")
    namespaces: list[str] = Field(
        default=[], description="Only these namespaces with their tables; empty, and no tables either: everything."
    )
    tables: list[str] = Field(default=[], description="Only these tables, each as namespace.table.")
    reapply: bool = Field(
        default=False,
        description="Whether to roll back on top of a commit that gets in between, instead of failing with a conflict.",
    )


class ExportConfig(dg.Config):
    """What to export, and how long to keep it."""

    name: str = Field(description="Name of the export: not taken, and not digits only.")
    version: str = Field(default="", description="The version to export, by its number; empty: the latest.")
    retain_days: float = Field(
        default=0, description="Days for which the export keeps its version from expiring; 0: until it is dropped."
    )


@contextmanager
def operating(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> Iterator[Lakehouse]:
    """Open the lakehouse for an operation of this run.

    Its commits record the run's id. A typed error becomes a Dagster failure of one clear line, never retried.
    """
    try:
        with acting_for_run(context.run.run_id):
            yield lakehouse.open()
    except TrinityLakeError as error:
        raise dg.Failure(
            description=str(error), metadata={"error": type(error).__name__}, allow_retries=False
        ) from error


def log_version(context: dg.OpExecutionContext, lake: Lakehouse, operation: str, details: Mapping[str, Any]) -> None:
    """Report the latest version as a materialization of the lakehouse."""
    metadata = {"lakehouse_version": lake.latest_version(), "operation": operation, **details}
    context.log_event(dg.AssetMaterialization(LAKEHOUSE_KEY, metadata=metadata))


@dg.op(description="Commits a new version with the content of an earlier one; the versions in between stay readable.")
def run_rollback(context: dg.OpExecutionContext, config: RollbackConfig, lakehouse: TrinityLakeResource) -> None:
    """Roll back the lakehouse, or some of its namespaces and tables."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_rollback(
            lake,
            config.to,
            namespaces=config.namespaces or None,
            tables=config.tables or None,
        )
        version = plan.execute(reapply=config.reapply)
        context.log.info("version %s has the content of %s", version, config.to)
        rows = [(change.kind, change.namespace, change.table or "") for change in plan.changes]
        changes = markdown_table(("change", "namespace", "table"), rows)
        log_version(context, lake, "rollback", {"rolled_back_to": config.to, "objects": len(rows), "changes": changes})


@dg.op(description="Keeps a version under a name: only its root is copied, and its files cannot expire.")
def run_export_minimal(context: dg.OpExecutionContext, config: ExportConfig, lakehouse: TrinityLakeResource) -> None:
    """Export a version at the level minimal."""
    with operating(context, lakehouse) as lake:
        report = maintenance.plan_export(
            lake,
            config.name,
            "minimal",
            version=config.version or None,
            retain_for=timedelta(days=config.retain_days) if config.retain_days else None,
        ).execute()
        context.log.info("export %s holds version %s", report.name, report.version)
        log_version(context, lake, "export", report_metadata(report.to_dict()))


@dg.op(description="Lets the hint file name the latest version. A wrong hint costs every reader requests.")
def run_repair_hint(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> None:
    """Repair the hint."""
    with operating(context, lakehouse) as lake:
        report = maintenance.repair_hint(lake)
        context.log.info("the hint was %s", report.state)
        context.add_output_metadata(report_metadata(report.to_dict()))


@dg.op(description="Flushes the tree's buffers and merges thin nodes, as a version that changes no object.")
def run_compact(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> None:
    """Compact the tree."""
    with operating(context, lakehouse) as lake:
        report = maintenance.compact(lake)
        context.log.info("%s", report)
        shapes = {
            f"{figure}_{when}": getattr(shape, figure)
            for when, shape in (("before", report.before), ("after", report.after))
            for figure in ("nodes", "leaf_fill", "messages", "file_bytes")
        }
        if report.has_changed:
            log_version(context, lake, "compact", {**report_metadata(report.to_dict()), **figures(shapes)})


@dg.op(description="Checks all versions, nodes, definitions, tables and their files; fails when it finds errors.")
def run_verify(context: dg.OpExecutionContext, lakehouse: TrinityLakeResource) -> None:
    """Verify the lakehouse."""
    with operating(context, lakehouse) as lake:
        report = maintenance.verify(lake)
        header = ("severity", "code", "message", "version", "path", "mend")
        rows = [
            (f.severity, f.code, f.message, "" if f.version is None else f.version, f.path or "", f.mend or "")
            for f in report.findings
        ]
        metadata = {
            **report_metadata(report.to_dict()),
            "timeline": picture(verification_picture(report)),
            "findings": markdown_table(header, rows),
        }
        if not report.is_clean:
            raise dg.Failure(
                description=f"{len(rows)} findings, the first: {rows[0][2]}", metadata=metadata, allow_retries=False
            )
        context.add_output_metadata(metadata)


def report_metadata(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a report and of its cost, one entry each."""
    cost = report.get("cost", {})
    plain = {name: value for name, value in report.items() if isinstance(value, str | int | float | None)}
    requests = sum(cost.get("requests", {}).values())
    return figures(
        {
            **plain,
            "requests": requests,
            **{name: cost[name] for name in ("bytes_read", "bytes_written", "duration_ms") if name in cost},
        }
    )
