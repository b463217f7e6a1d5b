"""Test retention policies: properties of random policies, and an example for each rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import LakehouseDef, RetentionRules
from trinitylake_ops.operations.retention import RetentionPolicy, VersionAge, judge, protected_ms
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
NOW_MS = int(datetime(2024, 3, 1, 12, tzinfo=UTC).timestamp() * 1000)
COUNT_FIELDS = ("minimum_versions", "keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly")
RULE_FIELDS = ("maximum_age_ms", *COUNT_FIELDS)
few_examples = settings(max_examples=50)


@st.composite
def histories(draw: st.DrawFn, *, is_past: bool = False) -> list[VersionAge]:
    """Return versions, some with times in the future or decreasing times, as other programs may write them."""
    ages = []
    steps_ms = st.integers(-2 * HOUR_MS, 40 * DAY_MS) if not is_past else st.integers(0, 10 * DAY_MS)
    created_at_ms = NOW_MS - draw(st.integers(0, 400 * DAY_MS))
    for version in range(draw(st.integers(1, 12))):
        superseded_at_ms = max(0, created_at_ms + draw(steps_ms))
        pins = draw(st.sampled_from(((), (), (), ("export 'e'",))))
        ages.append(
            VersionAge(version=version, created_at_ms=created_at_ms, superseded_at_ms=superseded_at_ms, pins=pins)
        )
        created_at_ms = superseded_at_ms
    ages[-1] = replace(ages[-1], superseded_at_ms=None)
    return ages


durations_ms = st.sampled_from((0, 1, HOUR_MS, DAY_MS, 30 * DAY_MS)) | st.integers(0, 400 * DAY_MS)
policies = st.builds(
    RetentionPolicy,
    maximum_age_ms=durations_ms,
    protected_ms=durations_ms,
    age_overrides=st.dictionaries(st.integers(0, 12), durations_ms, max_size=3),
    **{name: st.integers(0, 5) for name in COUNT_FIELDS},
).filter(lambda policy: not policy.is_empty)


def expired_versions(ages: Sequence[VersionAge], policy: RetentionPolicy, now_ms: int = NOW_MS) -> set[int]:
    return {verdict.version for verdict in judge(ages, policy, now_ms) if verdict.expires}


@few_examples
@given(histories(), policies, st.integers(0, 800 * DAY_MS))
def test_latest_pinned_future_and_young_versions_are_kept(
    ages: list[VersionAge], policy: RetentionPolicy, later_ms: int
) -> None:
    now_ms = NOW_MS + later_ms
    verdicts = {verdict.version: verdict for verdict in judge(ages, policy, now_ms)}
    assert [verdict.version for verdict in judge(ages, policy, now_ms)] == [age.version for age in ages]
    assert all(verdict.reason for verdict in verdicts.values())
    for age in ages:
        if (
            age.superseded_at_ms is None
            or age.pins
            or max(age.created_at_ms, age.superseded_at_ms) > now_ms
            or now_ms - age.superseded_at_ms < policy.protected_ms
        ):
            assert not verdicts[age.version].expires


@few_examples
@given(histories(), policies, st.sampled_from((*RULE_FIELDS, "protected_ms")), st.integers(1, 60 * DAY_MS))
def test_larger_value_of_a_rule_expires_no_more_versions(
    ages: list[VersionAge], policy: RetentionPolicy, rule: str, increment: int
) -> None:
    step = increment if rule.endswith("_ms") else 1 + increment % 7
    larger = replace(policy, **{rule: getattr(policy, rule) + step})
    assert expired_versions(ages, larger) <= expired_versions(ages, policy)


@few_examples
@given(histories(), policies, st.integers(0, 11), st.integers(0, 400 * DAY_MS))
def test_pins_and_age_overrides_expire_no_more_versions(
    ages: list[VersionAge], policy: RetentionPolicy, version: int, override_ms: int
) -> None:
    before = expired_versions(ages, policy)
    pinned = [replace(age, pins=("a user",)) if age.version == version else age for age in ages]
    assert expired_versions(pinned, policy) == before - {version}
    override_ms = max(override_ms, policy.age_overrides.get(version, policy.maximum_age_ms))
    assert (
        expired_versions(ages, replace(policy, age_overrides={**policy.age_overrides, version: override_ms})) <= before
    )


@few_examples
@given(histories(), policies, st.randoms(use_true_random=False))
def test_order_of_versions_does_not_matter(ages: list[VersionAge], policy: RetentionPolicy, rng: object) -> None:
    shuffled_ages = list(ages)
    rng.shuffle(shuffled_ages)  # type: ignore[attr-defined]
    assert {verdict.version: verdict for verdict in judge(shuffled_ages, policy, NOW_MS)} == {
        verdict.version: verdict for verdict in judge(ages, policy, NOW_MS)
    }


@few_examples
@given(
    histories(),
    durations_ms,
    durations_ms,
    st.integers(1, 3),
    st.lists(st.integers(0, 300 * DAY_MS), min_size=2, max_size=5),
)
def test_version_expired_by_age_stays_expired(
    ages: list[VersionAge], maximum_age_ms: int, protection_ms: int, minimum_versions: int, times_ms: list[int]
) -> None:
    policy = RetentionPolicy(
        maximum_age_ms=maximum_age_ms, minimum_versions=minimum_versions, protected_ms=protection_ms
    )
    expired_by_time = [expired_versions(ages, policy, NOW_MS + time_ms) for time_ms in sorted(times_ms)]
    assert all(earlier <= later for earlier, later in pairwise(expired_by_time))


@few_examples
@given(histories(is_past=True), policies)
def test_policy_matches_a_simple_model(ages: list[VersionAge], policy: RetentionPolicy) -> None:
    """In the model, a version expires if no rule keeps it."""
    assume(all(age.created_at_ms <= NOW_MS for age in ages))
    kept_versions = set()
    for age in ages:
        end_ms = age.superseded_at_ms
        maximum_age_ms = max(policy.protected_ms, policy.age_overrides.get(age.version, policy.maximum_age_ms))
        if end_ms is None or age.pins or NOW_MS - end_ms <= maximum_age_ms:
            kept_versions.add(age.version)
    n_last = max(policy.minimum_versions, policy.keep_last)
    kept_versions |= {age.version for age in ages[max(0, len(ages) - n_last) :]}
    for count, pattern in (
        (policy.keep_hourly, "%Y-%m-%d %H"),
        (policy.keep_daily, "%Y-%m-%d"),
        (policy.keep_weekly, "%G-%V"),
        (policy.keep_monthly, "%Y-%m"),
    ):
        newest = {f"{datetime.fromtimestamp(age.created_at_ms / 1000, UTC):{pattern}}": age.version for age in ages}
        kept_versions |= set(sorted(newest.values())[len(newest) - min(count, len(newest)) :])
    assert expired_versions(ages, policy) == {age.version for age in ages} - kept_versions


@pytest.mark.parametrize("fields", [{}, {"protected_ms": DAY_MS}, {"age_overrides": {3: DAY_MS}}])
def test_empty_policy_is_rejected(fields: dict[str, object]) -> None:
    policy = RetentionPolicy(**{"maximum_age_ms": 0, "minimum_versions": 0, "protected_ms": 0, **fields})  # type: ignore[arg-type]
    assert policy.is_empty
    with pytest.raises(InvalidInputError):
        judge([], policy, NOW_MS)


@pytest.mark.parametrize("name", RULE_FIELDS)
@pytest.mark.parametrize("number", [-1, 1.5, True, "3", None])
def test_policy_numbers_are_validated(name: str, number: object) -> None:
    with pytest.raises(InvalidInputError, match=name):
        RetentionPolicy(**{"maximum_age_ms": 1, "minimum_versions": 1, "protected_ms": 1, name: number})  # type: ignore[arg-type]


# Examples


def history_of(*times: datetime) -> list[VersionAge]:
    """Return versions created at these times, each superseded by the next, and a latest version created now."""
    times_ms = [int(time.timestamp() * 1000) for time in times] + [NOW_MS]
    ages = [
        VersionAge(version=version, created_at_ms=time_ms, superseded_at_ms=times_ms[version + 1])
        for version, time_ms in enumerate(times_ms[:-1])
    ]
    return [*ages, VersionAge(version=len(times), created_at_ms=NOW_MS, superseded_at_ms=None)]


def kept_versions(ages: list[VersionAge], **rules: int) -> set[int]:
    policy = RetentionPolicy(**{"maximum_age_ms": 0, "minimum_versions": 1, "protected_ms": 0, **rules})
    return {age.version for age in ages[:-1]} - expired_versions(ages, policy, NOW_MS + 1)


def utc(*parts: int) -> datetime:
    return datetime(*parts, tzinfo=UTC)  # type: ignore[arg-type]


def test_keep_hourly_keeps_the_newest_version_of_each_hour() -> None:
    ages = history_of(utc(2024, 2, 1, 9, 59), utc(2024, 2, 1, 10, 0), utc(2024, 2, 1, 10, 59), utc(2024, 2, 1, 11, 0))
    assert kept_versions(ages, keep_hourly=1) == set(), "the version of this hour is the latest version"
    assert kept_versions(ages, keep_hourly=2) == {3}
    assert kept_versions(ages, keep_hourly=3) == {2, 3}
    assert kept_versions(ages, keep_hourly=4) == kept_versions(ages, keep_hourly=99) == {0, 2, 3}


def test_keep_daily_keeps_the_newest_version_of_each_day() -> None:
    ages = history_of(
        utc(2023, 12, 31, 23, 59), utc(2024, 1, 1), utc(2024, 1, 1, 23), utc(2024, 2, 29), utc(2024, 2, 29, 5)
    )
    assert kept_versions(ages, keep_daily=2) == {4}
    assert kept_versions(ages, keep_daily=3) == {2, 4}, "days without a version do not count"
    assert kept_versions(ages, keep_daily=4) == {0, 2, 4}


def test_keep_weekly_starts_on_monday_and_crosses_years() -> None:
    """31 December 2024 is in the first week of 2025, and 3 January 2021 in week 53 of 2020."""
    ages = history_of(
        utc(2020, 12, 28), utc(2021, 1, 3), utc(2021, 1, 4), utc(2023, 12, 31), utc(2024, 1, 1), utc(2024, 1, 7)
    )
    assert kept_versions(ages, keep_weekly=2) == {5}
    assert kept_versions(ages, keep_weekly=3) == {3, 5}
    assert kept_versions(ages, keep_weekly=4) == {2, 3, 5}
    assert kept_versions(ages, keep_weekly=5) == {1, 2, 3, 5}
    reasons = {
        verdict.version: verdict.reason
        for verdict in judge(
            ages, RetentionPolicy(maximum_age_ms=0, minimum_versions=0, protected_ms=0, keep_weekly=5), NOW_MS + 1
        )
    }
    assert (reasons[1], reasons[5]) == ("weekly version of 2020-53", "weekly version of 2024-01")


def test_keep_monthly_keeps_the_newest_version_of_each_month() -> None:
    ages = history_of(utc(2023, 1, 31), utc(2023, 12, 1), utc(2024, 1, 1), utc(2024, 1, 31, 23), utc(2024, 2, 1))
    assert kept_versions(ages, keep_monthly=2) == {4}
    assert kept_versions(ages, keep_monthly=3) == {3, 4}
    assert kept_versions(ages, keep_monthly=4) == {1, 3, 4}
    assert kept_versions(ages, keep_monthly=5) == {0, 1, 3, 4}, "January of another year is another month"


def test_counts_ages_and_overrides_keep_versions() -> None:
    ages = history_of(*(utc(2024, 2, day) for day in range(1, 11)))
    assert kept_versions(ages, minimum_versions=3) == {8, 9}, "the latest version counts"
    assert kept_versions(ages, keep_last=4) == {7, 8, 9}
    day_ms = 24 * HOUR_MS
    # Version 7 was superseded on 9 February, 21 days and 12 hours ago.
    assert kept_versions(ages, maximum_age_ms=22 * day_ms) == {7, 8, 9}
    policy = RetentionPolicy(
        maximum_age_ms=22 * day_ms, minimum_versions=1, protected_ms=0, age_overrides={2: 300 * day_ms, 8: 1}
    )
    assert {age.version for age in ages} - expired_versions(ages, policy, NOW_MS + 1) == {2, 7, 9, 10}
    assert kept_versions(ages, protected_ms=22 * day_ms) == {7, 8, 9}


def test_age_starts_when_a_version_is_superseded() -> None:
    """A version that was the latest until yesterday is one day old, regardless of its creation time."""
    ages = history_of(utc(2020, 1, 1), utc(2024, 2, 29))
    assert kept_versions(ages, maximum_age_ms=2 * DAY_MS) == {0, 1}


def test_policy_of_lakehouse_settings() -> None:
    definition = LakehouseDef(
        id="x",
        maximum_version_age_millis=5,
        minimum_versions_to_keep=6,
        maximum_version_age_millis_overrides={1: 2},
        txn_ttl_millis=HOUR_MS,
        retention_rules=RetentionRules(keep_last=1, keep_hourly=2, keep_daily=3, keep_weekly=4, keep_monthly=5),
    )
    assert RetentionPolicy.of(definition) == RetentionPolicy(
        maximum_age_ms=5,
        minimum_versions=6,
        protected_ms=HOUR_MS + CLOCK_MARGIN_MS,
        age_overrides={1: 2},
        keep_last=1,
        keep_hourly=2,
        keep_daily=3,
        keep_weekly=4,
        keep_monthly=5,
    )
    assert protected_ms(definition) == HOUR_MS + timedelta(minutes=5) // timedelta(milliseconds=1)
    assert not RetentionPolicy.of(LakehouseDef(id="x")).is_empty, "the defaults keep versions"
