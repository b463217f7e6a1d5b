"""The operation that measures the space of a lakehouse."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from pydantic import Field, model_validator

from trinitylake_ops import operations, reports
from trinitylake_ops.declarations.operation import CommandSpec, OperationContext, ReportingContext, direct
from trinitylake_ops.declarations.options import InventoryText, Options
from trinitylake_ops.declarations.rendering import Json, inline_chart, listing
from trinitylake_ops.errors import InvalidInputError

if TYPE_CHECKING:
    from trinitylake_ops.operations import SpaceReport

_MOST_TABLES = 1_000_000
_MOST_VERSIONS = 10_000


class SpaceOptions(Options):
    """What to report, and whether to measure files that no version needs."""

    top: int = Field(default=10, ge=0, le=_MOST_TABLES, description="How many of the largest tables to report.")
    last: int = Field(default=20, ge=0, le=_MOST_VERSIONS, description="How many of the newest versions to report.")
    find_unreached: bool = Field(
        default=False,
        description="Also measure orphans and staged files. This lists all files, and reads everything that versions"
        " reach.",
    )
    inventory: InventoryText | None = Field(
        default=None,
        description="The manifest.json of a storage inventory (Amazon S3 Inventory) with which to measure orphans,"
        " instead of a listing.",
    )
    read_only: bool = Field(
        default=False,
        description="Do not update the summary in the lakehouse, from which later runs continue.",
    )

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if self.find_unreached and self.inventory is not None:
            raise InvalidInputError("find_unreached lists all files, and an inventory replaces the listing; pass one")
        return self


def _measure(run: OperationContext[SpaceOptions]) -> SpaceReport:
    options = run.options
    report = operations.measure_space(
        run.lake,
        top=options.top,
        last=options.last,
        find_unreached=options.find_unreached,
        inventory=options.inventory,
        read_only=options.read_only,
        progress=run.progress(),
    )
    operations.emit_space_metrics(report, report.root)
    return report


def _metadata(report: SpaceReport) -> dict[str, Any]:
    """Return the figures that orchestrators plot over runs, a chart and tables."""
    from trinitylake_ops.operations.space.uses import SpaceUse

    table = report.table()
    metadata: dict[str, Any] = {"version": report.version, "bytes": report.total.bytes, "files": report.total.files}
    metadata |= {f"{use.value}_bytes": report.use.of_use(use).bytes for use in SpaceUse}
    metadata |= {"small_files": report.small.files, "delete_files": report.deletes.files}
    for name, amount in (("orphan", report.unreached.orphans), ("staged", report.unreached.staged)):
        metadata |= {} if amount is None else {f"{name}_bytes": amount.bytes}
    reclaimable = [
        (item.command, item.amount.files, item.amount.bytes, item.deletable_at or "", item.why)
        for item in report.reclaimable
    ]
    return {
        **metadata,
        "treemap": inline_chart(reports.space_chart(report), "The space of the lakehouse by table"),
        "tables": listing(table.columns, table.rows),
        "reclaimable": listing(("command", "files", "bytes", "from (UTC)", "why"), reclaimable),
        "requests": report.cost.total_requests,
        "duration_ms": report.cost.duration_ms,
        "details": Json(report.to_dict()),
    }


def _report_space(run: ReportingContext[SpaceOptions], report: SpaceReport) -> None:
    for name, why in report.damaged.items():
        run.log.warning("the files of table %s cannot all be read, so it is counted in part: %s", name, why)
    run.report(report.headline, _metadata(report))


SPACE = direct(
    job="space",
    description="Measures bytes and files by namespace and table, and what would reclaim space. Changes no version.",
    options=SpaceOptions,
    execute=_measure,
    report=_report_space,
    command=CommandSpec(working="tables", page=lambda _run, _plan, report: reports.space_page(report)),
)
