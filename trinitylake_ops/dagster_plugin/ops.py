"""Operations on a lakehouse as Dagster ops. They are ops, not assets: nothing materializes them by accident."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import dagster as dg
from pydantic import Field

from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.dagster_plugin.metadata import figures, markdown_table
from trinitylake_ops.dagster_plugin.publish import LAKEHOUSE_KEY
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.transaction.commit_info import acting_for_run
from trinitylake_ops.transaction.lakehouse import Change

_PROGRESS_SECONDS = 10.0


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
    """What to export, where to, and how long to keep it."""

    name: str = Field(description="Name of the export: not taken, and not digits only.")
    level: str = Field(
        default="minimal",
        description="How much is copied: minimal (the root), partial (all nodes) or full (everything, with the files"
        " of managed tables).",
    )
    version: str = Field(default="", description="The version to export, by its number; empty: the latest.")
    target: str = Field(
        default="",
        description="Another root, where the export becomes a lakehouse of its own, and later ones copy only what is"
        " new; empty: the export stays in its lakehouse.",
    )
    namespaces: list[str] = Field(default=[], description="Only these namespaces; empty: all. Not for minimal ones.")
    definitions: bool = Field(default=False, description="Whether a partial export copies definitions, too.")
    retain_days: float = Field(
        default=0,
        ge=0,
        le=1_000_000,
        allow_inf_nan=False,
        description="Days for which the export keeps its version from expiring; 0: until it is dropped.",
    )


class RestoreConfig(dg.Config):
    """Which export to bring back, and how much of it."""

    name: str = Field(description="Name of the export.")
    namespaces: list[str] = Field(
        default=[], description="Only these namespaces with their tables; empty, and no tables either: all it holds."
    )
    tables: list[str] = Field(default=[], description="Only these tables, each as namespace.table.")


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


def changes_metadata(changes: Sequence[Change]) -> dict[str, Any]:
    """Return how many objects changed, and which."""
    rows = [(change.kind, change.namespace, change.table or "") for change in changes]
    return {"objects": len(rows), "changes": markdown_table(("change", "namespace", "table"), rows)}


def logged_progress(context: dg.OpExecutionContext) -> Callable[[str, int, int], None]:
    """Return a callback that says in the log, every few seconds, how far an operation is."""
    said_s: dict[str, float] = {}

    def log(what: str, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - said_s.setdefault(what, now_s) >= _PROGRESS_SECONDS:
            said_s[what] = now_s
            context.log.info("%s: %s of %s", what, f"{done:,}", f"{total:,}")

    return log


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
        log_version(context, lake, "rollback", {"rolled_back_to": config.to, **changes_metadata(plan.changes)})


@dg.op(description="Keeps a version under a name, in its lakehouse or as one of its own; a cut-off export goes on.")
def run_export(context: dg.OpExecutionContext, config: ExportConfig, lakehouse: TrinityLakeResource) -> None:
    """Export a version."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_export(
            lake,
            config.name,
            config.level,
            config.version or None,
            config.target or None,
            timedelta(days=config.retain_days) if config.retain_days else None,
            namespaces=config.namespaces,
            definitions=config.definitions,
        )
        report = plan.execute(progress=logged_progress(context))
        context.log.info("export %s holds version %s", report.name, report.version)
        log_version(context, lake, "export", report_metadata(report.to_dict()))


@dg.op(description="Brings back what an export holds, as a new version; from another root it is copied back.")
def run_restore(context: dg.OpExecutionContext, config: RestoreConfig, lakehouse: TrinityLakeResource) -> None:
    """Restore an export, or some of its namespaces and tables."""
    with operating(context, lakehouse) as lake:
        plan = maintenance.plan_restore(lake, config.name, config.namespaces or None, config.tables or None)
        version = plan.execute()
        context.log.info("version %s has what export %s holds", version, config.name)
        log_version(context, lake, "restore", {"restored_from": config.name, **changes_metadata(plan.changes)})


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
