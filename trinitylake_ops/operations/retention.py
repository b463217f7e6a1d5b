"""Decides which versions to keep, and why (docs/internals/protocol.md, "Expiry").

The decision is a pure function of the versions, the policy and the time. A version is kept if any rule keeps it, so an
additional rule never makes more versions expire. The age of a version starts when it was superseded, not when it was
created: the latest version of a lakehouse that has not changed for a year may have been in use until yesterday.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import LakehouseDef, RetentionRules
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.versions.snapshot import utc_datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionAge:
    """The facts that decide whether a version is kept. Times are in milliseconds since the epoch."""

    version: int
    created_at_ms: int
    #: None for the latest version.
    superseded_at_ms: int | None
    #: Descriptions of everything that needs the version regardless of its age.
    pins: tuple[str, ...] = ()

    def settled(self, reset_ms: int, now_ms: int) -> VersionAge:
        """Return the age of a version that was committed before a clock reset.

        Times in the future are replaced by the time of the reset, because the version was superseded by then.

        Args:
            reset_ms: The time of the version that set the clock back, in milliseconds since the epoch.
            now_ms: The storage's time, in milliseconds since the epoch.
        """
        superseded_ms = self.superseded_at_ms
        if superseded_ms is None or max(self.created_at_ms, superseded_ms) <= now_ms:
            return self
        return replace(
            self, created_at_ms=min(self.created_at_ms, reset_ms), superseded_at_ms=min(superseded_ms, reset_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """Retention rules. A version is kept if any of them keeps it."""

    #: Keeps versions that were superseded within this time.
    maximum_age_ms: int
    #: Keeps this number of the newest versions.
    minimum_versions: int
    #: Protects versions that were superseded within this time in any case, because transactions may be based on them.
    protected_ms: int
    #: Replaces ``maximum_age_ms`` for individual versions.
    age_overrides: Mapping[int, int] = field(default_factory=dict)
    #: Keeps this number of the newest versions.
    keep_last: int = 0
    #: Keeps the newest version of each of the last N hours (UTC) that have a version. The following rules do the same
    #: for days, weeks (from Monday) and months.
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0

    def __post_init__(self) -> None:
        for name in ("maximum_age_ms", "minimum_versions", "protected_ms", "keep_last", *_PERIODS):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise InvalidInputError(f"{name} of a retention policy is {number!r}; it must be an int of at least 0")

    @classmethod
    def of(cls, definition: LakehouseDef) -> RetentionPolicy:
        """Return the policy defined by the settings of a lakehouse."""
        rules = definition.retention_rules or RetentionRules()
        return cls(
            maximum_age_ms=definition.maximum_version_age_millis,
            minimum_versions=definition.minimum_versions_to_keep,
            protected_ms=protected_ms(definition),
            age_overrides=definition.maximum_version_age_millis_overrides,
            keep_last=rules.keep_last,
            keep_hourly=rules.keep_hourly,
            keep_daily=rules.keep_daily,
            keep_weekly=rules.keep_weekly,
            keep_monthly=rules.keep_monthly,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the rules keep nothing except the latest version."""
        rules = (
            self.maximum_age_ms,
            self.minimum_versions,
            self.keep_last,
            *(getattr(self, name) for name in _PERIODS),
        )
        return not any(rules)


def duration_ms(duration: timedelta | int, name: str) -> int:
    """Convert a duration to milliseconds.

    Args:
        duration: A timedelta, or milliseconds.
        name: The name of the duration, for messages.

    Raises:
        InvalidInputError: The duration has the wrong type or is negative.
    """
    duration_in_ms = duration // timedelta(milliseconds=1) if isinstance(duration, timedelta) else duration
    if type(duration_in_ms) is not int:
        raise InvalidInputError(f"{name} is {duration!r}; pass a timedelta, or milliseconds as an int")
    if duration_in_ms < 0:
        raise InvalidInputError(f"{name} is {duration_in_ms} ms; it must be at least 0")
    return duration_in_ms


def protected_ms(definition: LakehouseDef) -> int:
    """Return how long a transaction may rely on files, in milliseconds: its time to live plus a clock skew margin."""
    return definition.txn_ttl_millis + CLOCK_MARGIN_MS


def barred_before_ms(now_ms: int, age_ms: int) -> int:
    """Return the time before which transactions are barred, because they may have written files of this age.

    Args:
        now_ms: The time of the plan, in milliseconds since the epoch.
        age_ms: The age of the newest file to delete, in milliseconds.

    Returns:
        A time in milliseconds since the epoch.
    """
    return now_ms - age_ms + CLOCK_MARGIN_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a version expires, and why."""

    version: int
    expires: bool
    reason: str


def judge(versions: Sequence[VersionAge], policy: RetentionPolicy, now_ms: int) -> tuple[Verdict, ...]:
    """Decide which versions expire. The result does not depend on the order of the rules.

    The latest version is always kept, and so are pinned versions, versions with a time in the future, and versions
    superseded within ``policy.protected_ms``.

    Args:
        versions: All versions that are neither expired nor sealed, including the latest.
        policy: The rules.
        now_ms: The storage's time, in milliseconds since the epoch.

    Returns:
        A verdict for each version, in the same order.

    Raises:
        InvalidInputError: The policy has no rule.
    """
    if policy.is_empty:
        raise InvalidInputError(
            "the retention policy is empty, so all versions but the latest would expire; set a maximum age, a minimum"
            " number of versions, or another rule"
        )
    newest_first = sorted(versions, key=lambda age: age.version, reverse=True)
    # Versions with a time in the future are always kept, and must not count as the newest, as a clock may be wrong.
    ages = [age for age in newest_first if age.created_at_ms <= now_ms]
    by_rule = _retained_by_count(ages, policy) | _retained_by_period(ages, policy)
    return tuple(_verdict(age, policy, now_ms, by_rule.get(age.version)) for age in versions)


def _verdict(age: VersionAge, policy: RetentionPolicy, now_ms: int, rule: str | None) -> Verdict:
    def kept(reason: str) -> Verdict:
        return Verdict(version=age.version, expires=False, reason=reason)

    if age.superseded_at_ms is None:
        return kept("it is the latest")
    if age.pins:
        return kept(f"pinned by {', '.join(age.pins)}")
    if max(age.created_at_ms, age.superseded_at_ms) > now_ms:
        return kept("its time is in the future")
    superseded_ms = now_ms - age.superseded_at_ms
    if superseded_ms <= policy.protected_ms:
        return kept(
            f"superseded {span_text(superseded_ms)} ago: transactions may be based on it for"
            f" {span_text(policy.protected_ms)}"
        )
    maximum_ms = policy.age_overrides.get(age.version, policy.maximum_age_ms)
    if superseded_ms <= maximum_ms:
        suffix = " of its own" if age.version in policy.age_overrides else ""
        return kept(
            f"superseded {span_text(superseded_ms)} ago, within the maximum age{suffix} of {span_text(maximum_ms)}"
        )
    if rule is not None:
        return kept(rule)
    return Verdict(
        version=age.version,
        expires=True,
        reason=f"superseded {span_text(superseded_ms)} ago, the maximum age is {span_text(maximum_ms)}",
    )


def _retained_by_count(newest_first: Sequence[VersionAge], policy: RetentionPolicy) -> dict[int, str]:
    kept = {age.version: f"among the last {policy.keep_last}" for age in newest_first[: policy.keep_last]}
    minimum = {
        age.version: f"among the minimum of {policy.minimum_versions}"
        for age in newest_first[: policy.minimum_versions]
    }
    return kept | minimum


_PERIODS: Mapping[str, Callable[[datetime], tuple[int, ...]]] = {
    "keep_hourly": lambda time: (time.year, time.month, time.day, time.hour),
    "keep_daily": lambda time: (time.year, time.month, time.day),
    "keep_weekly": lambda time: tuple(time.isocalendar())[:2],
    "keep_monthly": lambda time: (time.year, time.month),
}


def _retained_by_period(newest_first: Sequence[VersionAge], policy: RetentionPolicy) -> dict[int, str]:
    """Return the versions kept by period: the newest version of each of the last periods, with the rule."""
    kept: dict[int, str] = {}
    for name, period_of in _PERIODS.items():
        wanted: int = getattr(policy, name)
        newest: dict[tuple[int, ...], int] = {}
        for age in newest_first:
            period = period_of(utc_datetime(age.created_at_ms))
            if period not in newest and len(newest) == wanted:
                continue
            newest.setdefault(period, age.version)
        for period, version in newest.items():
            period_text = "-".join(f"{part:02}" for part in period)
            kept.setdefault(version, f"{name.removeprefix('keep_')} version of {period_text}")
    return kept


def span_text(duration_ms: int) -> str:
    """Format a duration in human-readable form, for example as 3 d 4 h."""
    rest = duration_ms // 1000
    parts = []
    for name, seconds in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, seconds)
        if number:
            parts.append(f"{number} {name}")
    return " ".join(parts[:2]) or "0 s"
