"""Rollback, exports, and upkeep of the hint and the tree, as operations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from pydantic import Field, field_validator

from trinitylake_ops import maintenance
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.maintenance import CompactionReport, RollbackPlan
from trinitylake_ops.operations.operation import Operation, Running, report_figures
from trinitylake_ops.operations.options import (
    MOST_DAYS,
    ExportText,
    NamespaceTexts,
    NewExportText,
    Options,
    PlaceText,
    TableTexts,
    TargetText,
    VersionText,
)
from trinitylake_ops.operations.shown import listing
from trinitylake_ops.versions.changes import Change

_MILLISECOND = timedelta(milliseconds=1)
_MOST_NAMED = 10


class PartOptions(Options):
    """The namespaces and tables that an operation is limited to."""

    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces with their tables; empty, and no tables either: everything."
    )
    tables: TableTexts = Field(default=[], description="Only these tables, each as namespace.table.")


class RollbackOptions(PartOptions):
    """The target of a rollback, and how much of it."""

    to: PlaceText = Field(
        default="", description="Required: the version to go back to, by its number, or the name of an export."
    )
    reapply: bool = Field(
        default=False,
        description="Whether to roll back on top of a commit that gets in between, instead of failing with a conflict.",
    )


class ExportOptions(Options):
    """The version to export, its target, and how long to keep it."""

    name: NewExportText = Field(
        default="",
        description="Required: name of the export, without spaces and not digits only. That of one that was cut off"
        " goes on with it.",
    )
    version: VersionText = Field(default="", description="The version to export, by its number; empty: the latest.")
    target: TargetText = Field(
        default="",
        description="Another root, where the export becomes a lakehouse of its own, and later ones copy only what is"
        " new; empty: the export stays in its lakehouse.",
    )
    retain_days: float = Field(
        default=0,
        ge=0,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description="Days for which the export keeps its version from expiring; 0: until it is dropped, or for a full"
        " one until it is complete.",
    )

    @field_validator("retain_days")
    @classmethod
    def _check_retained(cls, days: float) -> float:
        if days and timedelta(days=days) < _MILLISECOND:
            raise InvalidInputError(f"retain_days is {days}, less than a millisecond; 0 stands for no end")
        return days


class ExportPartOptions(ExportOptions):
    """An export of all or of some namespaces."""

    namespaces: NamespaceTexts = Field(default=[], description="Only these namespaces; empty: all.")


class ExportPartialOptions(ExportPartOptions):
    """An export with or without definitions."""

    definitions: bool = Field(default=False, description="Whether to copy definitions of namespaces and tables, too.")


class ExportNameOptions(Options):
    """The name of an export."""

    name: ExportText = Field(default="", description="Required: name of the export.")


class RestoreOptions(ExportNameOptions, PartOptions):
    """The export to bring back, and how much of it."""


def _rollback(run: Running[RollbackOptions]) -> None:
    options = run.options
    plan = maintenance.plan_rollback(
        run.lake, options.to, namespaces=options.namespaces or None, tables=options.tables or None
    )
    version = plan.execute(reapply=options.reapply).version
    metadata = {"rolled_back_to": options.to, **_changes(plan.changes)}
    run.report(f"version {version} has the content of {options.to}", metadata, committed="rollback")


def _changes(changes: Sequence[Change]) -> dict[str, Any]:
    """Return how many objects changed, and which."""
    rows = [(change.kind, change.namespace, change.table or "") for change in changes]
    return {"objects": len(rows), "changes": listing(("change", "namespace", "table"), rows)}


def named(damaged: Mapping[str, str]) -> str:
    """Return the names of the first damaged tables."""
    return ", ".join(list(damaged)[:_MOST_NAMED])


def _export(level: str, run: Running[ExportOptions]) -> None:
    options = run.options
    plan = maintenance.plan_export(
        run.lake,
        options.name,
        level,
        options.version or None,
        options.target or None,
        timedelta(days=options.retain_days) if options.retain_days else None,
        namespaces=options.namespaces if isinstance(options, ExportPartOptions) else (),
        definitions=isinstance(options, ExportPartialOptions) and options.definitions,
        executor=run.executor(),
    )
    report = plan.execute(progress=run.progress())
    said = f"export {report.name} holds version {report.version}"
    if not report.is_complete:
        raise run.failure(f"{said} without damaged tables: {named(report.damaged)}", report_figures(report.to_dict()))
    run.report(said, report_figures(report.to_dict()), committed="export")


def _export_operation(level: str, options: type[ExportOptions], copies: str) -> Operation[ExportOptions]:
    return Operation(
        job=f"export_{level}",
        description=f"Keeps a version under a name: {copies}. One that was cut off goes on.",
        options=options,
        step=partial(_export, level),
        changes_exports=True,
    )


def _drop_export(run: Running[ExportNameOptions]) -> None:
    name = run.options.name
    version = maintenance.drop_export(run.lake, name)
    run.report(f"export {name} is no more, since version {version}", {"dropped": name}, committed="drop-export")


def _restore_export(run: Running[RestoreOptions]) -> None:
    options = run.options
    plan = maintenance.plan_restore(run.lake, options.name, options.namespaces or None, options.tables or None)
    copied = {} if isinstance(plan, RollbackPlan) else {"files": plan.files, "bytes": plan.bytes}
    done = plan.execute() if isinstance(plan, RollbackPlan) else plan.execute(progress=run.progress())
    metadata = {"restored_from": options.name, **copied, **_changes(plan.changes)}
    said = f"version {done.version} has what export {options.name} holds"
    if not done.is_complete:
        raise run.failure(f"{said}, without damaged tables: {named(done.damaged)}", metadata)
    run.report(said, metadata, committed="restore")


def _repair_hint(run: Running[None]) -> None:
    report = maintenance.repair_hint(run.lake)
    run.report(f"the hint was {report.state}", report_figures(report.to_dict()))


def compaction_figures(report: CompactionReport) -> dict[str, Any]:
    """Return the figures of a compaction of the tree, before and after."""
    shapes = {
        f"{figure}_{when}": getattr(shape, figure)
        for when, shape in (("before", report.before), ("after", report.after))
        for figure in ("nodes", "leaf_fill", "messages", "file_bytes")
    }
    return {**report_figures(report.to_dict()), **shapes}


def _compact(run: Running[None]) -> None:
    report = maintenance.compact(run.lake)
    run.report(str(report), compaction_figures(report), committed="compact" if report.has_changed else None)


OPERATIONS: tuple[Operation[Any], ...] = (
    Operation(
        job="rollback",
        description="Commits a new version with the content of an earlier one; the versions in between stay readable.",
        options=RollbackOptions,
        step=_rollback,
    ),
    _export_operation("minimal", ExportOptions, "its root alone, which pins all it needs in this lakehouse"),
    _export_operation("partial", ExportPartialOptions, "all nodes of its tree, as chosen with definitions"),
    _export_operation("full", ExportPartOptions, "all there is, with the files of managed tables"),
    Operation(
        job="drop_export",
        description="Forgets an export, so that its version can expire. What it copied to another root stays there.",
        options=ExportNameOptions,
        step=_drop_export,
        is_pooled=True,
        changes_exports=True,
    ),
    Operation(
        job="restore_export",
        description="Brings back what an export holds, as a new version; from another root it is copied back.",
        options=RestoreOptions,
        step=_restore_export,
        changes_exports=True,
    ),
    Operation(
        job="repair_hint",
        description="Lets the hint file name the latest version. A wrong hint costs every reader requests.",
        step=_repair_hint,
    ),
    Operation(
        job="compact",
        description="Flushes the tree's buffers and merges thin nodes, as a version that changes no object.",
        step=_compact,
    ),
)
