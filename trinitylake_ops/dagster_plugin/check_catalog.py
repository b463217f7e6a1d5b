"""Checks of an entire lakehouse, and the jobs that repair the problems."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.dagster_plugin.metadata import table_value
from trinitylake_ops.declarations.checks import findings_table
from trinitylake_ops.declarations.clone_list import find_clone_problems
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations import Budget, ExportCheck, ExportInfo, RetentionPolicy
from trinitylake_ops.operations.base import uncached
from trinitylake_ops.operations.compaction.data_files import TableFileCounts, survey_data_files
from trinitylake_ops.operations.gc.survey import is_lapsed, survey_versions, versions_in
from trinitylake_ops.operations.retention import protected_ms, span_text
from trinitylake_ops.versions.snapshot import utc_of

_UNPURGED = (ExpirationState.EXPIRED, ExpirationState.PURGING)
_MILLISECOND = timedelta(milliseconds=1)
_CUT_OFF_AFTER = timedelta(days=1)
_TEN_MINUTES = Budget(max_seconds=600)
# Limits that must be finite numbers of at least 0.
_NUMBERS = (
    "verified_exports", "orphan_files", "orphan_bytes", "min_leaf_fill", "max_buffer_fill",
    "small_files", "small_file_bytes", "data_files_seconds",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckLimits:
    """Thresholds beyond which the checks of a lakehouse fail.

    Raises:
        InvalidInputError: A limit is negative or not finite, or ``min_leaf_fill`` is above 1.
    """

    #: Maximum delay of an expiration after a version is due, and of a purge after the grace period has ended.
    overdue: timedelta = timedelta(days=3)
    #: Limits how much verify reads.
    verify_budget: Budget = _TEN_MINUTES
    #: Whether verify records its progress, so that the next check continues from there.
    verify_incremental: bool = False
    #: Glob pattern for the names of the exports to check.
    export_pattern: str = "*"
    #: Maximum age of the newest full export. If None, no full export is required.
    export_max_age: timedelta | None = timedelta(days=8)
    #: Number of newest exports to compare with their manifests.
    verified_exports: int = 3
    #: Whether to compare the checksums of these exports as well.
    deep: bool = False
    #: Maximum number of orphan files.
    orphan_files: int = 1000
    #: Maximum total size of orphan files.
    orphan_bytes: int = 1 << 30
    #: Minimum age of an orphan file to be counted.
    orphan_age: timedelta = timedelta(days=1)
    #: Minimum average fill of leaves, from 0 to 1.
    min_leaf_fill: float = 0.25
    #: Maximum buffer fill of a tree level, relative to the target size.
    max_buffer_fill: float = 1.0
    #: Tables with fewer data files are not checked for small files.
    small_files: int = 100
    #: Minimum average size of a table's data files, unless a compaction would merge none of them.
    small_file_bytes: int = 8 << 20
    #: Maximum time for reading table metadata files.
    data_files_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("overdue", "orphan_age", "export_max_age"):
            age = getattr(self, name)
            if age is not None and age < timedelta(0):
                raise InvalidInputError(f"{name} is {age}; it must be at least 0")
        for name in _NUMBERS:
            number = getattr(self, name)
            if not 0 <= number < math.inf:
                raise InvalidInputError(f"{name} is {number}; it must be a finite number of at least 0")
        if self.min_leaf_fill > 1:
            raise InvalidInputError(f"min_leaf_fill is {self.min_leaf_fill}; it must be between 0 and 1 (full leaves)")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    """The result of a check, with the job that repairs any problems."""

    #: Problems. The check passes if there are none.
    wrong: Sequence[str]
    #: Description of the result if there are no problems.
    fine: str
    #: Operation whose job repairs the problems.
    repaired_by: str
    #: Run configuration for that job's launchpad.
    repair_config: Mapping[str, Any] = field(default_factory=dict)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    #: Whether problems are errors instead of warnings.
    is_error: bool = False


Check = Callable[[Lakehouse, CheckLimits], CheckResult]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeclaredCheck:
    """Declaration of a check: its function, its description, and the jobs that repair its findings."""

    check: Check
    description: str
    repaired_by: tuple[str, ...]


def _hint(lake: Lakehouse, _limits: CheckLimits) -> CheckResult:
    report = operations.inspect_hint(lake)
    wrong = () if report.is_right else (f"the hint is {report.state}, the latest version is {report.latest}",)
    return CheckResult(
        wrong=wrong,
        fine=f"the hint names version {report.latest}",
        repaired_by="repair_hint",
        metadata={"state": str(report.state), "hinted": report.hinted, "latest": report.latest},
    )


def _verify(lake: Lakehouse, limits: CheckLimits) -> CheckResult:
    report = operations.verify(lake, incremental=limits.verify_incremental, budget=limits.verify_budget)
    errors = [finding for finding in report.findings if finding.severity == "error"]
    unfinished = "" if report.is_complete else f"not finished because {report.stopped}: "
    return CheckResult(
        wrong=[f"{len(errors)} errors; first error: {errors[0].message}"] if errors else [],
        fine=f"{unfinished}no errors in {report.versions} versions and {report.nodes} nodes",
        repaired_by="repair",
        is_error=True,
        metadata={
            "errors": len(errors),
            "warnings": len(report.findings) - len(errors),
            "findings": findings_table(report),
            "damaged_versions": report.damaged_versions,
            "not_checked": "; ".join(report.unchecked),
            "requests": report.cost.total_requests,
        },
    )


def _retention(lake: Lakehouse, limits: CheckLimits) -> CheckResult:
    survey = survey_versions(uncached(lake))
    survey.check_reconciled()
    definition = survey.definition
    due_ms = lake.storage.now_ms() - limits.overdue // _MILLISECOND
    late = VersionRanges.of(
        verdict.version for verdict in survey.verdicts(RetentionPolicy.of(definition), due_ms) if verdict.expires
    )
    exports = sorted(record.name for record in definition.exports if is_lapsed(record, due_ms))
    grace_ms = protected_ms(definition)
    batches = [batch for batch in definition.expirations if batch.expired_at_millis + grace_ms <= due_ms]
    unpurged = versions_in(batches, _UNPURGED)
    overdue = _span(limits.overdue)
    wrong = []
    if late:
        wrong.append(f"{len(late)} versions should have expired more than {overdue} ago: {late}")
    if exports:
        wrong.append(f"exports should have ended more than {overdue} ago: {', '.join(exports)}")
    if unpurged:
        wrong.append(f"{len(unpurged)} versions could have been purged more than {overdue} ago: {unpurged}")
    return CheckResult(
        wrong=wrong,
        fine="nothing is overdue",
        repaired_by="expire" if late or exports else "purge",
        metadata={
            "versions_to_expire": len(late),
            "versions_to_purge": len(unpurged),
            "exports_to_end": len(exports),
            "live_versions": len(survey.live()),
        },
    )


def _exports(lake: Lakehouse, limits: CheckLimits) -> CheckResult:
    now = utc_of(lake.storage.now_ms())
    exports = sorted(
        (info for info in operations.list_exports(lake) if fnmatchcase(info.name, limits.export_pattern)),
        key=lambda info: info.created_at or utc_of(0),
        reverse=True,
    )
    complete = [info for info in exports if info.state == "complete" and info.manifest_path is not None]
    checks = [
        operations.verify_export(lake, info.name, deep=limits.deep) for info in complete[: limits.verified_exports]
    ]
    damaged = [check for check in checks if not check.is_clean]
    wrong = [_damage(check) for check in damaged]
    wrong += [
        f"export {info.name!r} was started more than {_span(_CUT_OFF_AFTER)} ago and is not complete"
        for info in exports
        if info.state != "complete" and info.created_at is not None and now - info.created_at > _CUT_OFF_AFTER
    ]
    full = [info for info in complete if info.level == "full"]
    age = now - full[0].created_at if full and full[0].created_at is not None else None
    if limits.export_max_age is not None and (age is None or age > limits.export_max_age):
        youngest = _span(limits.export_max_age)
        wrong.append(f"no full export matching {limits.export_pattern} is newer than {youngest}; {_newest(full)}")
    return CheckResult(
        wrong=wrong,
        fine=f"{len(checks)} exports match their manifests",
        repaired_by="export",
        repair_config={"name": None, "level": "full"},
        is_error=bool(damaged),
        metadata={
            "exports": len(exports),
            "verified": ", ".join(check.name for check in checks),
            "newest_full_export_age_hours": None if age is None else age / timedelta(hours=1),
        },
    )


def _clones(lake: Lakehouse, _limits: CheckLimits) -> CheckResult:
    wrong, metadata = find_clone_problems(lake)
    fine = f"none of {metadata['clones']} clones is overdue"
    return CheckResult(
        wrong=wrong, fine=fine, repaired_by="drop_clone", repair_config={"name": None}, metadata=metadata
    )


def _span(duration: timedelta) -> str:
    return span_text(duration // _MILLISECOND)


def _damage(check: ExportCheck) -> str:
    first = (*check.missing, *check.changed)[0]
    return (
        f"export {check.name!r}: {len(check.missing)} of {check.files} files are missing and {len(check.changed)} have"
        f" changed, for example {first}"
    )


def _newest(full: Sequence[ExportInfo]) -> str:
    if not full:
        return "no full export exists"
    return f"the newest is {full[0].name!r}, created at {full[0].created_at:%Y-%m-%d %H:%M} UTC"


def _orphans(lake: Lakehouse, limits: CheckLimits) -> CheckResult:
    plan = operations.plan_orphan_removal(lake, limits.orphan_age)
    is_beyond = len(plan.paths) > limits.orphan_files or plan.bytes > limits.orphan_bytes
    message = f"{len(plan.paths)} orphan files, {plan.bytes} bytes"
    beyond = f"{message}; the limits are {limits.orphan_files} files and {limits.orphan_bytes} bytes"
    return CheckResult(
        wrong=[beyond] if is_beyond else [],
        fine=message,
        repaired_by="orphans",
        metadata={
            "files": len(plan.paths),
            "bytes": plan.bytes,
            "unowned_files": plan.unowned_files,
            "unowned_bytes": plan.unowned_bytes,
            "files_by_kind": table_value(("kind", "files"), plan.files.items()),
        },
    )


def _tree(lake: Lakehouse, limits: CheckLimits) -> CheckResult:
    shape = lake.snapshot().tree_shape()
    leaves, buffers = shape.levels[-1], shape.buffer_fill
    wrong = []
    if leaves.nodes > 1 and leaves.fill < limits.min_leaf_fill:
        wrong.append(f"the {leaves.nodes} leaves are {leaves.fill:.0%} full; the minimum is {limits.min_leaf_fill:.0%}")
    if buffers > limits.max_buffer_fill:
        wrong.append(f"the buffers of a level are {buffers:.0%} full; the maximum is {limits.max_buffer_fill:.0%}")
    header = ("level", "nodes", "keys", "fill", "messages", "bytes")
    rows = [
        (level.depth, level.nodes, level.keys, f"{level.fill:.0%}", level.messages, level.file_bytes)
        for level in shape.levels
    ]
    return CheckResult(
        wrong=wrong,
        fine=f"{shape.nodes} nodes; leaves are {leaves.fill:.0%} full",
        repaired_by="compact",
        repair_config={"unattended": True},
        metadata={
            "height": shape.height,
            "nodes": shape.nodes,
            "bytes": shape.file_bytes,
            "bytes_per_node": shape.file_bytes / shape.nodes,
            "leaf_fill": leaves.fill,
            "buffer_fill": buffers,
            "messages": shape.messages,
            "levels": table_value(header, rows),
        },
    )


def _data_files(lake: Lakehouse, limits: CheckLimits) -> CheckResult:
    head = lake.snapshot()
    survey = survey_data_files(lake, head, limits.data_files_seconds)
    fragmented = [table for table in survey.tables if table.data_files >= limits.small_files]
    small = [table for table in fragmented if table.mean_bytes < limits.small_file_bytes and _is_mergeable(lake, table)]
    small.sort(key=lambda table: -table.data_files)
    wrong = [f"{len(small)} tables have many small data files; most in {_summary(small[0])}"] if small else []
    if survey.unreadable:
        wrong.append(f"cannot read the metadata of {len(survey.unreadable)} tables, for example {survey.unreadable[0]}")
    unfinished = f"; {survey.not_checked} tables were not checked in time" if survey.not_checked else ""
    rows = [(table.name, table.data_files, table.bytes, round(table.mean_bytes)) for table in small]
    return CheckResult(
        wrong=wrong,
        fine=f"{len(survey.tables)} tables have few or sufficiently large data files{unfinished}",
        repaired_by="repair" if survey.unreadable else "compact_tables",
        repair_config={} if survey.unreadable else {"tables": [table.name for table in small], "unattended": True},
        metadata={
            "tables": len(survey.tables),
            "tables_with_small_files": len(small),
            "data_files": sum(table.data_files for table in survey.tables),
            "bytes": sum(table.bytes for table in survey.tables),
            "uncounted_tables": len(survey.uncounted),
            "not_checked": survey.not_checked,
            "small_files": table_value(("table", "data files", "bytes", "bytes per file"), rows),
        },
    )


def _is_mergeable(lake: Lakehouse, table: TableFileCounts) -> bool:
    """Whether a compaction would merge files of a table.

    A compaction merges no files if each partition has few files. A table that compaction rejects counts as mergeable,
    so that the table is reported.
    """
    try:
        return not operations.plan_compact_tables(lake, [table.name]).is_empty
    except InvalidInputError:
        return True


def _summary(table: TableFileCounts) -> str:
    return f"{table.name}: {table.data_files} files of {table.mean_bytes / 1024:,.1f} KiB on average"


CHECKS: Mapping[str, DeclaredCheck] = {
    "verify_clean": DeclaredCheck(
        check=_verify,
        description="Protects all data: verify reports no errors in versions, trees, definitions, tables and exports."
        " Costs: reads every catalog file and checks the existence of every table file, for up to ten minutes.",
        repaired_by=("repair",),
    ),
    "retention_kept": DeclaredCheck(
        check=_retention,
        description="Protects storage costs: versions and exports expire, and expired versions are purged, without"
        " long delays. Costs: reads the roots of all unpurged versions.",
        repaired_by=("expire", "purge"),
    ),
    "exports_fresh": DeclaredCheck(
        check=_exports,
        description="Protects against the loss of the lakehouse's storage: the newest exports are complete and"
        " unchanged, and the newest full export is recent. Costs: checks every file of the newest three exports.",
        repaired_by=("export",),
    ),
    "data_files_in_shape": DeclaredCheck(
        check=_data_files,
        description="Protects query speed: no table of the latest version has many small data files. Costs: reads the"
        " metadata of every table, for up to one minute.",
        repaired_by=("compact_tables", "repair"),
    ),
    "orphans_bounded": DeclaredCheck(
        check=_orphans,
        description="Protects storage costs: failed commits and aborted writes have not left too many orphan files."
        " Costs: lists the whole storage and reads the trees of all versions.",
        repaired_by=("orphans",),
    ),
    "clones_in_time": DeclaredCheck(
        check=_clones,
        description="Protects storage costs: no clone is overdue, deleted or unfinished. Costs: a few reads per clone.",
        repaired_by=("drop_clone",),
    ),
    "tree_in_shape": DeclaredCheck(
        check=_tree,
        description="Protects the speed of commits and lookups: the nodes of the latest tree are well filled, and their"
        " buffers are not overfull. Costs: reads the latest tree.",
        repaired_by=("compact",),
    ),
    "hint_right": DeclaredCheck(
        check=_hint,
        description="Protects read speed: the hint names the latest version. Costs: two or three requests.",
        repaired_by=("repair_hint",),
    ),
}
