"""Conditions of automation that follow what is published."""

from __future__ import annotations

from typing import Any

import dagster as dg


def published() -> Any:
    """Return a condition, an ``AutomationCondition``, to run when a table that an asset depends on was published.

    It is as ``AutomationCondition.eager()``, which also follows published tables only. But this one never joins the run
    that stages a table. There the asset would read what no version has yet.
    """
    condition = dg.AutomationCondition
    is_new = condition.newly_updated() & ~condition.executed_with_root_target()
    return (
        condition.in_latest_time_window()
        & (condition.newly_missing() | condition.any_deps_match(is_new)).since_last_handled()
        & ~condition.any_deps_match(condition.missing())
        & ~condition.any_deps_in_progress()
        & ~condition.in_progress()
    ).with_label("published")
