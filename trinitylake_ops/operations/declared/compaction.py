"""Compaction of the small data files of tables, by Spark."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trinitylake_ops import maintenance
from trinitylake_ops.maintenance import CompactTablesPlan
from trinitylake_ops.operations.operation import Running, report_figures
from trinitylake_ops.operations.options import TableTexts
from trinitylake_ops.operations.planned import NOTHING_TO_DO, Planned, UnattendedOptions
from trinitylake_ops.operations.shown import listing


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


def _plan(run: Running[CompactTablesOptions]) -> CompactTablesPlan:
    options = run.options
    return maintenance.plan_compact_tables(
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


def _compact(run: Running[Any], plan: CompactTablesPlan, digest: str | None) -> None:
    if plan.is_empty:
        run.report(f"{plan.table().title}; {NOTHING_TO_DO}", {"is_empty": True, **_shown(plan)})
        return
    # The session is started only now, as that takes seconds.
    with run.session() as spark:
        from trinitylake_ops.spark_jobs import write_groups_on

        report = plan.execute(write_groups_on(spark), approved_digest=digest, run_id=run.run_id)
    rows = [
        (one.table, one.files_before, one.files_after, one.rows, one.bytes_before, one.bytes_after)
        for one in report.tables
    ]
    metadata = {
        **report_figures(report.to_dict()),
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
    apply=_compact,
    is_pooled=False,
)
