"""What a policy means, in sentences for operators, and how two policies differ."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trinitylake_ops.operations.policy.document import (
    ExportRule,
    ExportTarget,
    Limits,
    MaintenancePolicy,
    Retention,
    Step,
    TableRule,
    Targets,
    VersionRules,
)
from trinitylake_ops.operations.policy.values import size_text
from trinitylake_ops.operations.retention import span_text

_PERIODS = {"keep_hourly": "hour", "keep_daily": "day", "keep_weekly": "week", "keep_monthly": "month"}


def policy_sentences(policy: MaintenancePolicy) -> tuple[str, ...]:
    """Return what a policy means, one sentence each."""
    return (*_when(policy), *_retention(policy.retention), *_limits(policy.limits), *_targets(policy), *_steps(policy))


def policy_changes(before: MaintenancePolicy, after: MaintenancePolicy) -> tuple[tuple[str, Any, Any], ...]:
    """Return the fields that differ, each with its name in the document and its two values.

    Rules for versions that ``after`` leaves out do not differ, because they stay as they are.
    """
    old, new = dict(_leaves(before.to_document())), dict(_leaves(after.to_document()))
    kept = "retention.versions."
    names = [name for name in dict.fromkeys((*old, *new)) if not (name.startswith(kept) and new.get(name) is None)]
    return tuple((name, old.get(name), new.get(name)) for name in names if old.get(name) != new.get(name))


def _leaves(document: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in document.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _when(policy: MaintenancePolicy) -> Iterator[str]:
    if policy.windows:
        yield f"Maintenance runs only within these windows: {'; '.join(map(str, policy.windows))}."
    for window in policy.blackouts:
        yield f"Maintenance does not run {window}."


def _retention(retention: Retention) -> Iterator[str]:
    yield _versions(retention.versions)
    yield from map(_table_rule, retention.tables)
    yield from map(_export_rule, retention.exports)
    if not retention.exports:
        yield "Exports are kept until their own retention ends."


def _versions(rules: VersionRules) -> str:
    kept = []
    if rules.max_age_ms:
        kept.append(f"was superseded in the last {span_text(rules.max_age_ms)}")
    numbers = [number for number in (rules.min_versions, rules.keep_last) if number]
    if numbers:
        kept.append(f"is one of the newest {max(numbers):,}")
    kept += _by_period(rules)
    if not kept:
        return "The rules for versions stay as they are."
    return f"A version is kept if it {', or if it '.join(kept)}, and always if an export or a clone needs it."


def _by_period(rules: VersionRules | ExportRule) -> list[str]:
    numbers = {unit: getattr(rules, name) for name, unit in _PERIODS.items()}
    return [f"is the newest of one of the last {number:,} {unit}s" for unit, number in numbers.items() if number]


def _table_rule(rule: TableRule) -> str:
    age = f"snapshots of the last {span_text(rule.max_snapshot_age_ms)}, and " if rule.max_snapshot_age_ms else ""
    return (
        f"Tables that match {rule.pattern} keep {age}the newest {rule.min_snapshots:,} snapshots of each branch, and"
        " those of kept versions."
    )


def _export_rule(rule: ExportRule) -> str:
    kept = [f"was made in the last {span_text(rule.max_age_ms)}"] if rule.max_age_ms else []
    numbers = [number for number in (rule.min_exports, rule.keep_last) if number]
    kept += [f"is one of the newest {max(numbers):,}"] if numbers else []
    kept += _by_period(rule)
    return f"An export that matches {rule.pattern} is kept if it {', or if it '.join(kept)}."


def _limits(limits: Limits) -> Iterator[str]:
    if limits.min_age_ms:
        yield f"Nothing younger than {span_text(limits.min_age_ms)} is expired, purged or removed as an orphan."
    deleted = _most(limits.max_deleted_files, limits.max_deleted_bytes)
    yield (
        f"A run deletes {deleted}; a larger deletion waits for approval."
        if deleted
        else "A run deletes any number of files without approval."
    )
    rewritten = _most(limits.max_rewritten_files, limits.max_rewritten_bytes)
    if rewritten:
        yield f"A run rewrites {rewritten} to compact tables, and leaves the rest for the next run."
    if limits.max_requests is not None:
        yield f"A run stops after {limits.max_requests:,} storage requests."
    if limits.max_duration_ms is not None:
        yield f"A run stops after {span_text(limits.max_duration_ms)}."


def _most(files: int | None, size_bytes: int | None) -> str:
    parts = [] if files is None else [f"{files:,} files"]
    parts += [] if size_bytes is None else [size_text(size_bytes)]
    return f"at most {' and '.join(parts)}" if parts else ""


def _targets(policy: MaintenancePolicy) -> Iterator[str]:
    targets: Targets = policy.targets
    size = "128MiB" if targets.file_size_bytes is None else size_text(targets.file_size_bytes)
    yield (
        f"Tables are compacted to files of {size}, unless their own properties say otherwise, where a partition has"
        f" {targets.small_files:,} small files, or a table has {targets.delete_files:,} delete files."
    )
    if targets.verify_every_ms is not None:
        yield f"The lakehouse is verified every {span_text(targets.verify_every_ms)}."
    if targets.orphans_every_ms is not None:
        yield f"Orphans are removed every {span_text(targets.orphans_every_ms)}."
    yield f"An export that is unfinished for {span_text(targets.unfinished_after_ms)} is resumed."
    if targets.export is not None:
        yield _export(targets.export)


def _export(export: ExportTarget) -> str:
    where = "" if export.target is None else f" to {export.target}"
    until = "until it is dropped" if export.retain_for_ms is None else f"for {span_text(export.retain_for_ms)}"
    return f"A {export.level} export is made{where} every {span_text(export.every_ms)} and kept {until}."


def _steps(policy: MaintenancePolicy) -> Iterator[str]:
    if policy.approval:
        yield f"These steps always wait for approval: {_names(policy.approval)}."
    if policy.skip:
        yield f"These steps are left out: {_names(policy.skip)}."


def _names(steps: list[Step]) -> str:
    return ", ".join(step.value for step in steps)
