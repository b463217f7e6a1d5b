"""What plan and apply jobs have in common: their configuration, what plans show, how deletions end."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from typing import Any

import dagster as dg
from pydantic import Field, field_validator

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.metadata import figures, markdown_table
from trinitylake_ops.dagster_plugin.ops import log_version, report_metadata
from trinitylake_ops.maintenance import Budget, OrphanReport, PurgeReport, RetentionPolicy
from trinitylake_ops.maintenance.report import Plan

#: The pool of all ops that let go of something, so that an instance that limits it to 1 runs one of them at a time.
DELETES_POOL = "trinitylake_deletes"

_LAKEHOUSES_OWN = -1
_MOST_DAYS = 1_000_000
_MOST_SECONDS = 1_000_000


def _rule(what: str) -> Any:
    return Field(default=_LAKEHOUSES_OWN, ge=_LAKEHOUSES_OWN, description=f"{what}; -1: as the lakehouse's settings.")


def _limit(what: str) -> Any:
    return Field(default=0, ge=0, le=_MOST_SECONDS, allow_inf_nan=False, description=f"{what}; 0: no limit.")


def age_field(what: str) -> Any:
    """Return a field of days that an age is at least, beyond what protects transactions."""
    return Field(
        default=0,
        ge=0,
        le=_MOST_DAYS,
        allow_inf_nan=False,
        description=f"{what} at least so many days ago; never less than the lakehouse's txn_ttl_millis and 5 minutes,"
        " which is what 0 stands for.",
    )


def digest_field(plan_job: str) -> Any:
    """Return the required field of a digest."""
    return Field(
        description=f"Digest of the plan to carry out: a run of {plan_job} shows it, with the whole configuration to"
        " paste here. When something else would happen by now, the run fails and nothing is done."
    )


class RulesConfig(dg.Config):
    """Rules of retention that replace single settings of the lakehouse for one run."""

    max_age_days: float = Field(
        default=_LAKEHOUSES_OWN,
        le=_MOST_DAYS,
        allow_inf_nan=False,
        description="Keep what was superseded no longer ago than so many days; -1: as the lakehouse's settings.",
    )
    min_versions: int = _rule("Keep at least so many of the newest versions")
    keep_last: int = _rule("Keep the last so many versions")
    keep_hourly: int = _rule("Keep the newest version of each of the last so many hours that have one")
    keep_daily: int = _rule("The same for days")
    keep_weekly: int = _rule("The same for weeks, from Monday")
    keep_monthly: int = _rule("The same for months")

    @field_validator("max_age_days")
    @classmethod
    def _check_age(cls, days: float) -> float:
        if days < 0 and days != _LAKEHOUSES_OWN:
            raise ValueError("max_age_days must be at least 0, or -1 for the lakehouse's own setting")
        return days

    def policy(self, lake: Lakehouse) -> RetentionPolicy | None:
        """Return the lakehouse's settings with these rules in their place, None where all are its own."""
        numbers = {
            "minimum_versions": self.min_versions,
            "keep_last": self.keep_last,
            "keep_hourly": self.keep_hourly,
            "keep_daily": self.keep_daily,
            "keep_weekly": self.keep_weekly,
            "keep_monthly": self.keep_monthly,
        }
        rules: dict[str, Any] = {name: number for name, number in numbers.items() if number != _LAKEHOUSES_OWN}
        if self.max_age_days != _LAKEHOUSES_OWN:
            rules["maximum_age_ms"] = timedelta(days=self.max_age_days) // timedelta(milliseconds=1)
        return replace(RetentionPolicy.of(lake.snapshot().definition), **rules) if rules else None


class BudgetConfig(dg.Config):
    """How much a run that deletes may ask of the storage."""

    max_requests: int = Field(
        default=0, ge=0, description="Stop after so many requests that delete; the next run goes on; 0: no limit."
    )
    max_seconds: float = _limit("Stop after so many seconds; the next run goes on")
    requests_per_second: float = _limit("Send no more requests that delete than that")

    def budget(self) -> Budget:
        """Return the limits."""
        return Budget(
            max_requests=self.max_requests or None,
            max_seconds=self.max_seconds or None,
            requests_per_second=self.requests_per_second or None,
        )


def show_plan(
    context: dg.OpExecutionContext,
    plan: Plan,
    shown: Mapping[str, Any],
    *,
    apply_op: str,
    options: dg.Config,
    is_empty: bool,
) -> None:
    """Put a plan into the metadata of the step and say in the log how to carry it out.

    ``apply_op`` is the op that does, ``options`` what it needs besides the digest.
    """
    title = str(plan.table().title)
    config = {"ops": {apply_op: {"config": {**options.model_dump(), "approved_digest": plan.digest}}}}
    apply_job = apply_op.removeprefix("run_")
    if is_empty:
        context.log.info("%s; there is nothing to do", title)
    else:
        context.log.info("%s; to do it, run %s with approved_digest %s", title, apply_job, plan.digest)
    metadata = {"digest": plan.digest, "base_version": plan.base_version, "is_empty": is_empty, **shown}
    launchpad = dg.MetadataValue.md(f"```\n{json.dumps(config, indent=2)}\n```")
    context.add_output_metadata({**figures(metadata), f"configuration of {apply_job}": launchpad})


def check_pool(context: dg.OpExecutionContext, pool: str) -> None:
    """Warn when the Dagster instance does not limit a pool to one op: only the lakehouse's lease is in the way then."""
    storage = context.instance.event_log_storage
    if not storage.supports_global_concurrency_limits:  # an instance in memory, of one process
        return
    default = context.instance.global_op_concurrency_default_limit
    limit = next((known.limit for known in storage.get_pool_limits() if known.name == pool), default)
    if limit is None or limit > 1:
        context.log.warning(
            "this Dagster instance runs %s ops of the pool %s at once, and those that meet fail; let them wait with:"
            " dagster instance concurrency set %s 1",
            "any number of" if limit is None else limit,
            pool,
            pool,
        )


def end_deletion(
    context: dg.OpExecutionContext,
    lake: Lakehouse,
    operation: str,
    report: PurgeReport | OrphanReport,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Report what was deleted: raises Failure for files that the storage refused, warns when a limit was reached.

    ``details`` are further metadata.
    """
    failures = sorted(report.failures.items())
    metadata = {
        **(details or {}),
        **report_metadata(report.to_dict()),
        "failed_files": len(failures),
        "failures": markdown_table(("path", "reason"), failures),
    }
    if failures:
        path, reason = failures[0]
        raise dg.Failure(
            description=f"{len(failures)} files were not deleted; run {operation}_plan and {operation}_apply again once"
            f" the reason is mended, the first is {path}: {reason}",
            metadata=metadata,
            allow_retries=False,
        )
    if report.version is not None or report.stopped is not None:  # one that ended early has committed its begin
        log_version(context, lake, operation, metadata)
    if report.stopped is not None:
        context.log.warning("not finished, as %s: run %s_plan and %s_apply again", report.stopped, operation, operation)
    context.add_output_metadata(metadata)
