"""Operations that compact the tree or the data files of tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from trinitylake_ops import operations
from trinitylake_ops.declarations.operation import CommandSpec, OperationContext, ReportingContext, report_entries
from trinitylake_ops.declarations.options import ARGUMENT, TableTexts
from trinitylake_ops.declarations.planned import NOTHING_TO_DO, PlanDeclaration, UnattendedOptions
from trinitylake_ops.declarations.rendering import listing

if TYPE_CHECKING:
    from trinitylake_ops.operations import CompactionPlan, CompactionReport, CompactTablesPlan, CompactTablesReport


class CompactOptions(UnattendedOptions):
    """An option with the commit message."""

    message: str | None = Field(default=None, description="The commit message, for the log of the lakehouse.")


def _compaction_metrics(report: CompactionReport) -> dict[str, Any]:
    """Return the metrics of the tree before and after a compaction."""
    shapes = {
        f"{figure}_{when}": getattr(shape, figure)
        for when, shape in (("before", report.before), ("after", report.after))
        for figure in ("nodes", "leaf_fill", "messages", "file_bytes")
    }
    return {**report_entries(report.to_dict()), **shapes}


def _compaction_metadata(plan: CompactionPlan) -> dict[str, Any]:
    before = plan.before
    return {
        "nodes_written": plan.nodes_written,
        "bytes_written": plan.bytes_written,
        **{f"{name}_before": getattr(before, name) for name in ("nodes", "leaf_fill", "messages", "file_bytes")},
    }


def _report_compact(run: ReportingContext[Any], _plan: CompactionPlan | None, report: CompactionReport) -> None:
    run.report(str(report), _compaction_metrics(report), committed="compact" if report.has_changed else None)


COMPACT: PlanDeclaration[CompactOptions, CompactionPlan, CompactionReport] = PlanDeclaration(
    name="compact",
    description="Flushes the tree's buffers and merges thin nodes, in a version that changes no object.",
    options=CompactOptions,
    plan=lambda run: operations.plan_compact(run.lake, run.options.message),
    plan_metadata=_compaction_metadata,
    execute=lambda _run, plan, digest: plan.execute(digest),
    report=_report_compact,
    direct=lambda run: operations.compact(run.lake, run.options.message),
    command=CommandSpec(working="reading and packing the tree"),
)


class CompactTablesOptions(UnattendedOptions):
    """Options that select the tables to compact and the files to merge."""

    tables: Annotated[TableTexts, ARGUMENT] = Field(
        default=[], description="Only these tables, each as namespace.table. Default: all managed tables."
    )
    target_file_size_bytes: int | None = Field(
        default=None,
        gt=0,
        description="The size of the files to write. Files smaller than three quarters of it are merged. Default: the"
        " table's property write.target-file-size-bytes, otherwise 128 MiB.",
    )
    min_input_files: int = Field(
        default=5, ge=2, description="Merge at least this number of files of a partition, unless they fill a file."
    )
    repartition: bool = Field(
        default=False,
        description="Rewrite all files of older partition specs with the current one, whatever their size.",
    )
    run_id: str | None = Field(
        default=None,
        description="The id under which a run commits at most once, even if it is restarted. Default: the id of the"
        " job's or the task's run; a command has none.",
    )
    message: str | None = Field(default=None, description="The commit message, for the log of the lakehouse.")


def _plan_tables(run: OperationContext[CompactTablesOptions]) -> CompactTablesPlan:
    options = run.options
    return operations.plan_compact_tables(
        run.lake,
        options.tables or None,
        target_file_size_bytes=options.target_file_size_bytes,
        min_input_files=options.min_input_files,
        repartition=options.repartition,
    )


def _tables_metadata(plan: CompactTablesPlan) -> dict[str, Any]:
    rows = [(table.name, table.files, table.data_files, table.groups, table.bytes) for table in plan.tables]
    older = [(name, f"{number} files of an older partition spec") for name, number in plan.older_spec_files.items()]
    return {
        "tables": len(plan.tables),
        "files": plan.files,
        "bytes": sum(table.bytes for table in plan.tables),
        "plan": listing(("table", "small files", "data files", "become", "bytes"), rows),
        "left": listing(("table", "why"), [*plan.left.items(), *older]),
    }


def _execute_tables(
    run: OperationContext[CompactTablesOptions], plan: CompactTablesPlan, digest: str | None
) -> CompactTablesReport:
    options = run.options
    run_id = options.run_id or run.run_id
    if plan.is_empty:  # no Spark session needed
        return plan.execute(run_id=run_id, approved_digest=digest, message=options.message)
    with run.group_writer() as write:
        return plan.execute(write, run_id=run_id, approved_digest=digest, message=options.message)


def _report_tables(run: ReportingContext[Any], plan: CompactTablesPlan | None, report: CompactTablesReport) -> None:
    assert plan is not None
    if plan.is_empty:
        run.report(f"{plan.table().title}; {NOTHING_TO_DO}", {"is_empty": True, **_tables_metadata(plan)})
        return
    rows = [
        (table.table, table.files_before, table.files_after, table.rows, table.bytes_before, table.bytes_after)
        for table in report.tables
    ]
    metadata = {
        **report_entries(report.to_dict()),
        "tables": len(report.tables),
        "files_before": sum(table.files_before for table in report.tables),
        "files_after": sum(table.files_after for table in report.tables),
        "compacted": listing(("table", "files", "became", "rows", "bytes", "became bytes"), rows),
        "left": listing(("table", "why"), [*plan.left.items(), *report.left.items()]),
    }
    if report.left:
        run.log.warning("skipped, because concurrent commits changed them: %s", ", ".join(report.left))
    run.report(str(report.table().title), metadata, committed="compact-tables")


COMPACT_TABLES: PlanDeclaration[CompactTablesOptions, CompactTablesPlan, CompactTablesReport] = PlanDeclaration(
    name="compact_tables",
    description="Merges small data files of tables into fewer with Spark, as one version. Rows do not change.",
    options=CompactTablesOptions,
    plan=_plan_tables,
    plan_metadata=_tables_metadata,
    execute=_execute_tables,
    report=_report_tables,
    command=CommandSpec(uses_engine=True, working="reading the tables"),
)
