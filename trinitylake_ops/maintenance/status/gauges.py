"""The state of a lakehouse as numbers over time, for whoever listens to telemetry."""

from __future__ import annotations

import math

from trinitylake_ops.maintenance.status.due import DueState
from trinitylake_ops.maintenance.status.state import Status
from trinitylake_ops.telemetry import hub
from trinitylake_ops.telemetry import instruments as named

_SEVERITIES = ("error", "warning")
#: What is due without a known moment is due since a second: the gauge must not say that it is not.
_UNKNOWN_SINCE = 1.0


def tell_status(status: Status, lakehouse: str) -> None:
    """Set the gauges of a lakehouse, by the name that an operator gave it. What never happened is +Inf ago."""
    ages = status.ages
    told = {
        "commit": ages.commit_seconds,
        "verify": ages.verify_seconds,
        "export": ages.export_seconds,
        "expiry": ages.expiry_seconds,
        "orphans": ages.orphans_seconds,
    }
    for of, seconds in told.items():
        hub.put(named.AGE_SECONDS, math.inf if seconds is None else seconds, lakehouse=lakehouse, of=of)
    for one in status.due:
        since = (one.since_seconds or _UNKNOWN_SINCE) if one.state == DueState.DUE else 0.0
        hub.put(named.DUE_SECONDS, since, lakehouse=lakehouse, what=one.what)
    for severity in _SEVERITIES:
        count = sum(one.severity == severity for one in status.findings)
        hub.put(named.FINDINGS, count, lakehouse=lakehouse, severity=severity)
    reclaimable = status.space.reclaimable_bytes
    if reclaimable is not None:
        hub.put(named.RECLAIMABLE_BYTES, reclaimable, lakehouse=lakehouse)
    hub.put(named.VERSION, status.version, lakehouse=lakehouse)
    hub.put(named.RECENT_ATTEMPTS, status.commits.attempts, lakehouse=lakehouse)
    hub.put(named.RECENT_LOST, status.commits.lost, lakehouse=lakehouse)
    hub.put(named.READ_AT, status.now.timestamp(), lakehouse=lakehouse)
