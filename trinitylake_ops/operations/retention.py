"""Decides which versions to keep, and why (docs/internals/protocol.md, "Expiry").

One pure function of versions, a policy and the time decides. A version is kept when any rule keeps it, so another rule
never expires more. Ages count from the moment when a version was superseded, not from its creation. The latest version
of a lakehouse that nobody changed for a year was in use until yesterday.
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
    """The facts that decide about a version: when it was made and superseded, and its pins.

    Times are in milliseconds since the epoch. Nothing supersedes the latest version (None). ``pins`` say, for people,
    what needs the version in any case.
    """

    version: int
    created_at_ms: int
    superseded_at_ms: int | None
    pins: tuple[str, ...] = ()

    def settled(self, reset_ms: int, now_ms: int) -> VersionAge:
        """Return the age of a version before one that set the clock back.

        Times that are still to come are replaced by that of the later version, as this one was superseded by then.

        Args:
            reset_ms: The time of the version that set the clock back.
            now_ms: The storage's time.
        """
        superseded_ms = self.superseded_at_ms
        if superseded_ms is None or max(self.created_at_ms, superseded_ms) <= now_ms:
            return self
        return replace(
            self, created_at_ms=min(self.created_at_ms, reset_ms), superseded_at_ms=min(superseded_ms, reset_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The rules by which versions are kept; each keeps on its own.

    ``maximum_age_ms`` keeps versions that were superseded no longer ago than that. ``age_overrides`` replace it for
    single versions. ``minimum_versions`` and ``keep_last`` keep so many of the newest. ``keep_hourly`` to
    ``keep_monthly`` keep the newest version of each of the last periods with versions: hours, days, weeks (from Monday)
    and months (UTC). ``protected_ms`` protects versions that were superseded less long ago, whatever else is asked for,
    as transactions may be based on them.
    """

    maximum_age_ms: int
    minimum_versions: int
    protected_ms: int
    age_overrides: Mapping[int, int] = field(default_factory=dict)
    keep_last: int = 0
    keep_hourly: int = 0
    keep_daily: int = 0
    keep_weekly: int = 0
    keep_monthly: int = 0

    def __post_init__(self) -> None:
        for name in ("maximum_age_ms", "minimum_versions", "protected_ms", "keep_last", *_PERIODS):
            number = getattr(self, name)
            if type(number) is not int or number < 0:
                raise InvalidInputError(f"{name} of a retention policy is {number!r}, it must be a number, at least 0")

    @classmethod
    def of(cls, definition: LakehouseDef) -> RetentionPolicy:
        """Return the policy of a lakehouse's settings."""
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
        """Whether no rule keeps anything beyond the latest version."""
        rules = (
            self.maximum_age_ms,
            self.minimum_versions,
            self.keep_last,
            *(getattr(self, name) for name in _PERIODS),
        )
        return not any(rules)


def duration_ms(duration: timedelta | int, name: str) -> int:
    """Return a duration in milliseconds, from a timedelta or milliseconds. Raises InvalidInputError below 0."""
    found_ms = duration // timedelta(milliseconds=1) if isinstance(duration, timedelta) else duration
    if type(found_ms) is not int:
        raise InvalidInputError(f"{name} is {duration!r}; give a timedelta, or milliseconds as an int")
    if found_ms < 0:
        raise InvalidInputError(f"{name} is {found_ms} ms, it must be at least 0")
    return found_ms


def protected_ms(definition: LakehouseDef) -> int:
    """Return how long files must stay on which a transaction may rely: its time to live and a margin for clocks."""
    return definition.txn_ttl_millis + CLOCK_MARGIN_MS


def barred_before_ms(now_ms: int, age_ms: int) -> int:
    """Return the moment before which transactions must have begun that may have written files as old as ``age_ms``."""
    return now_ms - age_ms + CLOCK_MARGIN_MS


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a version expires, and why."""

    version: int
    expires: bool
    reason: str


def judge(versions: Sequence[VersionAge], policy: RetentionPolicy, now_ms: int) -> tuple[Verdict, ...]:
    """Return a verdict for each version, in their order.

    ``versions`` are all that are neither expired nor sealed, the latest included. The latest is always kept. So are
    pinned versions, versions with a future time, and those superseded less than ``policy.protected_ms`` ago. Raises
    InvalidInputError for a policy without any rule.
    """
    if policy.is_empty:
        raise InvalidInputError(
            "the retention policy is empty: all versions but the latest would expire; give a maximum age, a minimum"
            " number of versions or a rule that keeps some"
        )
    newest_first = sorted(versions, key=lambda age: age.version, reverse=True)
    # A version of the future replaces no other. Its time may be a wrong clock's, and it is kept in any case.
    past = [age for age in newest_first if age.created_at_ms <= now_ms]
    by_rule = _retained_by_count(past, policy) | _retained_by_period(past, policy)
    return tuple(_verdict(age, policy, now_ms, by_rule.get(age.version)) for age in versions)


def _verdict(age: VersionAge, policy: RetentionPolicy, now_ms: int, rule: str | None) -> Verdict:
    def kept(reason: str) -> Verdict:
        return Verdict(version=age.version, expires=False, reason=reason)

    if age.superseded_at_ms is None:
        return kept("it is the latest")
    if age.pins:
        return kept(f"pinned by {', '.join(age.pins)}")
    if max(age.created_at_ms, age.superseded_at_ms) > now_ms:
        return kept("its time is still to come")
    superseded_ms = now_ms - age.superseded_at_ms
    if superseded_ms <= policy.protected_ms:
        return kept(
            f"superseded {span_text(superseded_ms)} ago: transactions may be based on it for"
            f" {span_text(policy.protected_ms)}"
        )
    maximum_ms = policy.age_overrides.get(age.version, policy.maximum_age_ms)
    if superseded_ms <= maximum_ms:
        own = " of its own" if age.version in policy.age_overrides else ""
        return kept(
            f"superseded {span_text(superseded_ms)} ago, within the maximum age{own} of {span_text(maximum_ms)}"
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
    """Return the newest version of each of the last periods that have one, with the rule that keeps it."""
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
            shown = "-".join(f"{part:02}" for part in period)
            kept.setdefault(version, f"{name.removeprefix('keep_')} version of {shown}")
    return kept


def span_text(duration_ms: int) -> str:
    """Return a duration as people say it: 3 d 4 h."""
    rest = duration_ms // 1000
    parts = []
    for name, seconds in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        number, rest = divmod(rest, seconds)
        if number:
            parts.append(f"{number} {name}")
    return " ".join(parts[:2]) or "0 s"
