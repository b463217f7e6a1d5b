"""Operations that show history: the log, the history of a table, and the differences between versions."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from trinitylake_ops.declarations.operation import Operation, ReportingContext
from trinitylake_ops.declarations.options import Options, TableText, VersionSource, split_name
from trinitylake_ops.declarations.rendering import Json, listing
from trinitylake_ops.operations.rendering import jsonable

_MAX_VERSIONS = 1_000
_MAX_SECONDS = 120.0


class LogOptions(Options):
    """An option that limits how many versions are read."""

    limit: int = Field(default=50, ge=1, le=_MAX_VERSIONS, description="How many versions to read, newest first.")


class HistoryOptions(LogOptions):
    """Options that select a table and limit how many versions are searched."""

    table: TableText = Field(description="The table, as namespace.table.")


class DiffOptions(Options):
    """Options that select the two versions to compare."""

    before: VersionSource = Field(description="The earlier version.")
    after: VersionSource = Field(description="The later version.")


def _log(run: ReportingContext[LogOptions]) -> None:
    latest = run.lake.snapshot()
    infos = list(run.lake.history(run.options.limit, latest))
    rows = run.page.rows(run.lake, latest, infos, max_seconds=_MAX_SECONDS)
    metadata = {
        "versions": listing(run.page.columns, rows),
        "n_versions": len(infos),
        "details": Json(jsonable(infos)),
    }
    run.report(f"the last {len(infos)} of {latest.version + 1} versions", metadata)


def _history(run: ReportingContext[HistoryOptions]) -> None:
    from trinitylake_ops.operations.diff.table_history import table_history
    from trinitylake_ops.operations.diff.versions import delta_texts

    name, latest = run.options.table, run.lake.snapshot()
    limit = run.options.limit
    history = table_history(run.lake, *split_name(name), head=latest, most=limit, look_back=limit)
    changes = {entry.info.version: (entry.change.kind, *delta_texts(entry.change.delta)) for entry in history.versions}
    marks = {
        entry.info.version: "" if entry.undone_by is None else f"undone by {entry.undone_by}"
        for entry in history.versions
    }
    rows = run.page.rows_with(latest, [entry.info for entry in history.versions], changes, marks, only=name)
    columns = [(entry.info.version, line) for entry in history.versions for line in entry.columns]
    metadata = {
        "table": name,
        "n_versions": len(rows),
        "looked_back_to": history.looked_back_to,
        "versions": listing(["change" if column == "tables" else column for column in run.page.columns], rows),
        "columns_changed": listing(("version", "column"), columns),
    }
    run.report(f"{len(rows)} versions since version {history.looked_back_to} changed {name}", metadata)


def _diff(run: ReportingContext[DiffOptions]) -> None:
    from trinitylake_ops.operations.diff.versions import diff_versions

    before, after = (run.lake.snapshot(str(version)) for version in (run.options.before, run.options.after))
    diff = diff_versions(run.lake, before, after)
    table, sums = diff.table(), diff.sums
    numbers: dict[str, Any] = {
        name: getattr(sums, name) for name in ("rows_added", "rows_removed", "files_added", "files_removed")
    }
    metadata = {
        "objects": len(diff.objects),
        **numbers,
        "changes": listing(table.columns, table.rows),
        "details": Json(diff.to_dict()),
    }
    run.report(table.title, metadata)


LOG = Operation(
    job="log",
    description="Shows the newest versions with their committers, changes and check results. Read-only.",
    options=LogOptions,
    step=_log,
)
HISTORY = Operation(
    job="history",
    description="Shows the versions that changed a table. Read-only.",
    options=HistoryOptions,
    step=_history,
)
DIFF = Operation(
    job="diff",
    description="Shows the differences between two versions, with rows, files and bytes of tables. Read-only.",
    options=DiffOptions,
    step=_diff,
)
