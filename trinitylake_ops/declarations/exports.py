"""Operations on exports, the hint, compaction and reconcile."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from trinitylake_ops import operations
from trinitylake_ops.declarations.operation import Operation, OperationContext, report_entries
from trinitylake_ops.declarations.options import (
    MOST_DAYS,
    ExportText,
    NamespaceTexts,
    NewExportText,
    Options,
    TableTexts,
    TargetText,
    VersionNumber,
    VersionsText,
)
from trinitylake_ops.declarations.planned import NOTHING_TO_DO, Planned, PlannedOptions, UnattendedOptions
from trinitylake_ops.declarations.rendering import listing
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations import (
    CompactionPlan,
    CompactionReport,
    CompactTablesPlan,
    DropExportPlan,
    ReconcilePlan,
    ReconcileReport,
)

_MILLISECOND = timedelta(milliseconds=1)
_MOST_NAMED = 10


class PartOptions(Options):
    """The namespaces and tables that an operation is limited to."""

    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces with their tables; empty, and no tables either: everything."
    )
    tables: TableTexts = Field(default=[], description="Only these tables, each as namespace.table.")


class ExportOptions(Options):
    """The version to export, how much of it is copied, the target, and how long to keep it."""

    name: NewExportText = Field(
        description="Name of the export, without spaces and not digits only. The name of an export that was cut off"
        " continues it.",
    )
    level: Literal["minimal", "partial", "full"] = Field(
        default="full",
        description="How much is copied. Minimal: the root alone, which pins all that it needs in this lakehouse."
        " Partial: all nodes of its tree. Full: everything, with the files of managed tables.",
    )
    version: VersionNumber | None = Field(
        default=None, description="The version to export, by its number. Null: the latest."
    )
    target: TargetText | None = Field(
        default=None,
        description="Another root, where the export becomes a separate lakehouse, and later ones copy only what is"
        " new. Null: the export stays in its lakehouse.",
    )
    retain_days: float | None = Field(
        default=None,
        gt=0,
        le=MOST_DAYS,
        allow_inf_nan=False,
        description="Days for which the export keeps its version from expiring. Null: until it is dropped, or for a"
        " full one until it is complete.",
    )
    namespaces: NamespaceTexts = Field(
        default=[], description="Only these namespaces, at the levels partial and full. Empty: all."
    )
    definitions: bool = Field(
        default=False, description="Whether a partial export copies definitions of namespaces and tables as well."
    )

    @field_validator("retain_days")
    @classmethod
    def _check_retained(cls, days: float | None) -> float | None:
        if days is not None and timedelta(days=days) < _MILLISECOND:
            raise InvalidInputError(f"retain_days is {days}, less than a millisecond; leave it out for no end")
        return days

    @model_validator(mode="after")
    def _check_level(self) -> Self:
        if self.namespaces and self.level == "minimal":
            raise InvalidInputError("namespaces: an export of the level minimal has all of them; choose another level")
        if self.definitions and self.level != "partial":
            raise InvalidInputError(f"definitions: the level {self.level} leaves no choice; choose the level partial")
        return self


class ExportNameOptions(Options):
    """The name of an export."""

    name: ExportText = Field(description="Name of the export.")


def named(damaged: Mapping[str, str]) -> str:
    """Return the names of the first damaged tables."""
    return ", ".join(list(damaged)[:_MOST_NAMED])


def _export(run: OperationContext[ExportOptions]) -> None:
    options = run.options
    plan = operations.plan_export(
        run.lake,
        options.name,
        options.level,
        None if options.version is None else str(options.version),
        options.target,
        None if options.retain_days is None else timedelta(days=options.retain_days),
        namespaces=options.namespaces,
        definitions=options.definitions,
        executor=run.executor(),
    )
    report = plan.execute(progress=run.progress())
    message = f"export {report.name} holds version {report.version}"
    if not report.is_complete:
        raise run.failure(
            f"{message} without damaged tables: {named(report.damaged)}", report_entries(report.to_dict())
        )
    run.report(message, report_entries(report.to_dict()), committed="export")


EXPORT = Operation(
    job="export",
    description="Keeps a version under a name, by copies. An export that was cut off continues.",
    options=ExportOptions,
    step=_export,
    changes_exports=True,
)


def _repair_hint(run: OperationContext[None]) -> None:
    report = operations.repair_hint(run.lake)
    run.report(f"the hint was {report.state}", report_entries(report.to_dict()))


REPAIR_HINT = Operation(
    job="repair_hint",
    description="Writes the number of the latest version into the hint file. A wrong hint costs every reader requests.",
    step=_repair_hint,
)


class DropExportOptions(ExportNameOptions, PlannedOptions):
    """The export to drop."""


def _drop_shown(plan: DropExportPlan) -> dict[str, Any]:
    export = plan.export
    shown = {
        "export": export.name,
        "version": export.version,
        "level": export.level,
        "state": export.state,
        "created_at": None if export.created_at is None else f"{export.created_at:%Y-%m-%d %H:%M:%S}",
        "location": export.location,
    }
    return {**shown, "what_follows": listing(("what follows",), [(one,) for one in plan.consequences])}


def _drop(run: OperationContext[Any], plan: DropExportPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    message = f"export {plan.export.name} is no more, since version {report.version}"
    metadata = {"dropped": plan.export.name, **report_entries(report.to_dict())}
    run.report(message, metadata, committed="drop-export")


DROP_EXPORT: Planned[DropExportOptions, DropExportPlan] = Planned(
    name="drop_export",
    description="Forgets an export, so that its version can expire. What it copied to another root stays there.",
    options=DropExportOptions,
    plan=lambda run: operations.plan_drop_export(run.lake, run.options.name),
    shown=_drop_shown,
    apply=_drop,
    changes_exports=True,
)


def _compaction_metrics(report: CompactionReport) -> dict[str, Any]:
    """Return the figures of a compaction of the tree, before and after."""
    shapes = {
        f"{figure}_{when}": getattr(shape, figure)
        for when, shape in (("before", report.before), ("after", report.after))
        for figure in ("nodes", "leaf_fill", "messages", "file_bytes")
    }
    return {**report_entries(report.to_dict()), **shapes}


def _compaction_shown(plan: CompactionPlan) -> dict[str, Any]:
    before = plan.before
    return {
        "nodes_written": plan.nodes_written,
        "bytes_written": plan.bytes_written,
        **{f"{name}_before": getattr(before, name) for name in ("nodes", "leaf_fill", "messages", "file_bytes")},
    }


def _compact(run: OperationContext[Any], plan: CompactionPlan, digest: str | None) -> None:
    report = plan.execute(digest)
    run.report(str(report), _compaction_metrics(report), committed="compact" if report.has_changed else None)


COMPACT: Planned[UnattendedOptions, CompactionPlan] = Planned(
    name="compact",
    description="Flushes the tree's buffers and merges thin nodes, as a version that changes no object.",
    options=UnattendedOptions,
    plan=lambda run: operations.plan_compact(run.lake),
    shown=_compaction_shown,
    apply=_compact,
    is_pooled=False,
)


class ReconcileOptions(UnattendedOptions):
    """The versions that an operator has inspected."""

    acknowledge: VersionsText | None = Field(
        default=None,
        description="Versions such as 7 or 7,9-12 whose roots another program wrote out of order: verify reports them"
        " as past from then on. Null: none.",
    )


def _reconcile_shown(settled: ReconcilePlan | ReconcileReport) -> dict[str, Any]:
    return {
        "steps": ", ".join(map(str, settled.steps)),
        "restored_exports": ", ".join(settled.restored_exports),
        "dropped_exports": ", ".join(settled.dropped_exports),
        "live_again": settled.live_again,
        "acknowledged": settled.acknowledged,
    }


def _reconcile(run: OperationContext[Any], plan: ReconcilePlan, digest: str | None) -> None:
    report = plan.execute(digest)
    metadata = {**report_entries(report.to_dict()), **_reconcile_shown(report)}
    run.report(str(report.table().title), metadata, committed=None if report.version is None else "reconcile")


RECONCILE: Planned[ReconcileOptions, ReconcilePlan] = Planned(
    name="reconcile",
    description="Corrects exports and expirations after another program returned to older settings.",
    options=ReconcileOptions,
    plan=lambda run: operations.plan_reconcile(run.lake, acknowledge=run.options.acknowledge or ""),
    shown=_reconcile_shown,
    apply=_reconcile,
    is_pooled=False,
    changes_exports=True,
)


class CompactTablesOptions(UnattendedOptions):
    """The tables, and the size of small files."""

    tables: TableTexts = Field(
        default=[], description="Only these tables, each as namespace.table; empty: all managed tables."
    )
    target_file_size_bytes: int | None = Field(
        default=None,
        gt=0,
        description="The size of the files to write. Files below three quarters of it are small. Null: the table's"
        " property write.target-file-size-bytes, else 128 MiB.",
    )
    min_input_files: int = Field(
        default=5, ge=2, description="Merge no fewer small files of a partition, unless they fill a file."
    )
    repartition: bool = Field(
        default=False,
        description="Whether to write all files of older partition specs by the current one, whatever their size.",
    )


def _plan(run: OperationContext[CompactTablesOptions]) -> CompactTablesPlan:
    options = run.options
    return operations.plan_compact_tables(
        run.lake,
        options.tables or None,
        target_file_size_bytes=options.target_file_size_bytes,
        min_input_files=options.min_input_files,
        repartition=options.repartition,
    )


def _shown(plan: CompactTablesPlan) -> dict[str, Any]:
    rows = [(one.name, one.files, one.data_files, one.groups, one.bytes) for one in plan.tables]
    older = [(name, f"{number} files of an older partition spec") for name, number in plan.older_spec_files.items()]
    return {
        "tables": len(plan.tables),
        "files": plan.files,
        "bytes": sum(one.bytes for one in plan.tables),
        "plan": listing(("table", "small files", "data files", "become", "bytes"), rows),
        "left": listing(("table", "why"), [*plan.left.items(), *older]),
    }


def _compact_tables(run: OperationContext[Any], plan: CompactTablesPlan, digest: str | None) -> None:
    if plan.is_empty:
        run.report(f"{plan.table().title}; {NOTHING_TO_DO}", {"is_empty": True, **_shown(plan)})
        return
    # The session is started only now, as that takes seconds.
    with run.session() as spark:
        from trinitylake_ops.spark import write_groups_on

        report = plan.execute(write_groups_on(spark), approved_digest=digest, run_id=run.run_id)
    rows = [
        (one.table, one.files_before, one.files_after, one.rows, one.bytes_before, one.bytes_after)
        for one in report.tables
    ]
    metadata = {
        **report_entries(report.to_dict()),
        "tables": len(report.tables),
        "files_before": sum(one.files_before for one in report.tables),
        "files_after": sum(one.files_after for one in report.tables),
        "compacted": listing(("table", "files", "became", "rows", "bytes", "became bytes"), rows),
        "left": listing(("table", "why"), [*plan.left.items(), *report.left.items()]),
    }
    if report.left:
        run.log.warning("left as they are, since others changed them: %s", ", ".join(report.left))
    run.report(str(report.table().title), metadata, committed="compact-tables")


COMPACT_TABLES: Planned[CompactTablesOptions, CompactTablesPlan] = Planned(
    name="compact_tables",
    description="Merges small data files of tables into fewer, by Spark, as one version; no row changes.",
    options=CompactTablesOptions,
    plan=_plan,
    shown=_shown,
    apply=_compact_tables,
    is_pooled=False,
)
