"""The maintenance policy: validation, the stored form, versions, exports, and what it means."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lakes import Lakes
from tests.operations.changes import create
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.declarations.policy_yaml import MAX_YAML_BYTES, policy_of_yaml, policy_yaml
from trinitylake_ops.errors import InvalidInputError, UnreadablePolicyError
from trinitylake_ops.format.definitions import LakehouseDef, RetentionRules
from trinitylake_ops.operations import DueAges, MaintenancePolicy, lakehouse_status, read_policy, set_policy
from trinitylake_ops.operations.policy.document import DEFAULT_POLICY, MAX_POLICY_BYTES, WEEKDAYS, Step
from trinitylake_ops.operations.policy.explanation import policy_changes, policy_sentences
from trinitylake_ops.operations.policy.stored import policy_of, with_policy
from trinitylake_ops.operations.retention import RetentionPolicy

DAY_MS = 86_400_000
_counts = st.integers(0, 2**32 - 1)
_durations = st.builds("{}{}".format, st.integers(1, 999_999), st.sampled_from(["d", "h", "m", "s", "ms"]))
_sizes = st.integers(1, 2**63 - 1) | st.builds(
    "{}{}".format, st.integers(1, 1000), st.sampled_from(["TiB", "GiB", "MiB", "KiB", "B"])
)
_clock = st.builds("{:02}:{:02}".format, st.integers(0, 23), st.integers(0, 59))
_patterns = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
_windows = st.fixed_dictionaries(
    {"start": _clock, "end": _clock},
    optional={"days": st.lists(st.sampled_from(WEEKDAYS), min_size=1, unique=True)},
)


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_periods = dict.fromkeys(("keep_last", "keep_hourly", "keep_daily", "keep_weekly", "keep_monthly"), _counts)
documents = _optional(
    retention=_optional(
        versions=_optional(max_age=_durations, min_versions=st.integers(1, 2**32 - 1), **_periods),
        tables=st.lists(
            st.fixed_dictionaries(
                {"pattern": _patterns},
                optional={"max_snapshot_age": _durations, "min_snapshots": st.integers(1, 1000)},
            ),
            max_size=3,
        ),
        exports=st.lists(
            st.fixed_dictionaries({"pattern": _patterns, "max_age": _durations}, optional=_periods), max_size=3
        ),
    ),
    limits=_optional(
        min_age=_durations,
        max_deleted_files=st.none() | _counts,
        max_deleted_bytes=st.none() | _sizes,
        max_rewritten_files=st.none() | _counts,
        max_rewritten_bytes=st.none() | _sizes,
        max_requests=st.none() | st.integers(1, 2**40),
        max_duration=st.none() | _durations,
    ),
    targets=_optional(
        file_size=st.none() | _sizes,
        small_files=st.integers(2, 100),
        delete_files=st.integers(1, 100),
        verify_every=st.none() | _durations,
        orphans_every=st.none() | _durations,
        unfinished_after=_durations,
        export=st.none()
        | st.fixed_dictionaries(
            {"every": _durations},
            optional={
                "level": st.sampled_from(["minimal", "partial", "full"]),
                "target": st.none() | st.just("s3://bucket/copy"),
                "retain_for": st.none() | _durations,
            },
        ),
    ),
    windows=st.lists(_windows, max_size=3),
    blackouts=st.lists(_windows, max_size=3),
    approval=st.lists(st.sampled_from(["trim", "expire", "purge", "orphans", "drop_overdue_clones", "compact"])),
    skip=st.lists(st.sampled_from(list(Step)).map(str)),
)


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.memory()
    create(lake, "ns", "t")
    return lake


@given(documents)
def test_documents_survive_yaml_json_and_the_definition(document: dict[str, Any]) -> None:
    policy = MaintenancePolicy.of_document(document)
    assert MaintenancePolicy.of_document(policy.to_document()) == policy
    assert MaintenancePolicy.of_document(json.loads(policy.canonical_text())) == policy
    assert policy_of_yaml(policy_yaml(policy)) == policy
    assert policy_of_yaml(json.dumps(document)) == policy
    definition = LakehouseDef(id="a", maximum_version_age_millis=5 * DAY_MS)
    stored = with_policy(definition, policy)
    read = policy_of(LakehouseDef.from_bytes(stored.to_bytes(), "definition"))
    assert read.limits == policy.limits and read.targets == policy.targets
    assert read.retention.tables == policy.retention.tables
    assert with_policy(stored, read) == stored, "what show prints can be set again, and changes nothing"
    assert policy_changes(read, policy) == ()
    assert all(sentence.endswith(".") and "\n" not in sentence for sentence in policy_sentences(read))


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([], "a policy must be a mapping"),
        ({"limit": {}}, "'limit' is not a field of a policy"),
        ({"limits": {"max_files": 1}}, "'limits.max_files' is not a field"),
        ({"limits": None}, "limits: must be a mapping, but it is None"),
        ({"limits": {"min_age": 7}}, "limits.min_age: use a duration"),
        ({"limits": {"min_age": "7 days"}}, "limits.min_age: use a duration"),
        ({"limits": {"min_age": "-1d"}}, "limits.min_age: use a duration"),
        ({"limits": {"min_age": "1000001d"}}, "limits.min_age"),
        ({"limits": {"min_age": "9" * 100_000 + "d"}}, "limits.min_age: use a duration"),
        ({"limits": {"max_duration": "0s"}}, "limits.max_duration"),
        ({"limits": {"max_requests": 0}}, "limits.max_requests"),
        ({"limits": {"max_requests": 1.5}}, "limits.max_requests: must be a whole number"),
        ({"limits": {"max_requests": True}}, "limits.max_requests: must be a whole number"),
        ({"limits": {"max_requests": "5"}}, "limits.max_requests: must be a whole number"),
        ({"limits": {"max_deleted_bytes": "1 TB"}}, "limits.max_deleted_bytes: use a number of bytes"),
        ({"limits": {"max_deleted_bytes": -1}}, "limits.max_deleted_bytes"),
        ({"limits": {"max_deleted_bytes": 2**63}}, "limits.max_deleted_bytes"),
        ({"retention": {"versions": {"min_versions": 0}}}, "retention.versions.min_versions"),
        ({"retention": {"versions": {"keep_daily": 2**32}}}, "retention.versions.keep_daily"),
        ({"retention": {"exports": [{"pattern": "x"}]}}, "retention.exports.0: no rule keeps an export"),
        ({"retention": {"tables": [{}]}}, "retention.tables.0.pattern is required"),
        ({"retention": {"tables": [{"pattern": "x", "min_snapshots": 0}]}}, "min_snapshots"),
        ({"retention": {"tables": [{"pattern": ""}]}}, "retention.tables.0.pattern"),
        ({"retention": {"tables": [{"pattern": "x" * 513}]}}, "retention.tables.0.pattern"),
        ({"retention": {"tables": [{"pattern": "x\n"}]}}, "pattern: must not contain control characters"),
        ({"retention": {"tables": [{"pattern": "x"}] * 257}}, "retention.tables"),
        ({"targets": {"small_files": 1}}, "targets.small_files"),
        ({"targets": {"export": {}}}, "targets.export.every is required"),
        ({"targets": {"export": {"every": "1d", "level": "all"}}}, "targets.export.level"),
        ({"windows": [{"start": "08:00"}]}, "windows.0.end is required"),
        ({"windows": [{"start": "8:00", "end": "24:00"}]}, "windows.0.start: use a time of day"),
        ({"windows": [{"start": 480, "end": "09:00"}]}, "windows.0.start: use a time of day"),
        ({"windows": [{"days": [], "start": "08:00", "end": "09:00"}]}, "windows.0.days"),
        ({"windows": [{"days": ["Monday"], "start": "08:00", "end": "09:00"}]}, "windows.0.days.0"),
        ({"windows": [{"start": "08:00", "end": "09:00"}] * 33}, "windows"),
        ({"approval": ["everything"]}, "approval: 'everything' is not a step; choose from repair_hint, "),
        ({"approval": ["verify"]}, "approval: verify has no plan to approve"),
        ({"approval": "purge"}, "approval: must be a list"),
        ({"skip": [["purge"]]}, "skip: .* is not a step"),
        ({1: 2}, "invalid policy: 1"),
        ({"windows": "\ud800"}, "windows"),
    ],
)
def test_invalid_documents_are_rejected_with_one_line(document: Any, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        MaintenancePolicy.of_document(document)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 500


def test_target_with_credentials_is_rejected_and_not_shown() -> None:
    for target in ("s3://key:secret@bucket/x", "secret", "s3://secret/../x"):
        with pytest.raises(InvalidInputError, match="use an absolute path") as caught:
            MaintenancePolicy.of_document({"targets": {"export": {"every": "1d", "target": target}}})
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: &x 1\nb: *x", "line 1: anchors and aliases are not supported"),
        ("limits: {}\nlimits: {}", "line 2: a key occurs twice"),
        ("[" * 100_000, "nested too deeply"),
        ("{a: " * 10_000, "nested too deeply"),
        ('{"a": ' * 10_000, "it is not valid JSON"),
        ('{"limits": {}, "limits": {}}', "a key occurs twice"),
        ("x: !!python/object/apply:os.system [ls]", "line 1: it is not valid YAML"),
        ("x: !!binary abc", "line 1: it is not valid YAML"),
        ("? [a]\n: 1", "a key is not a text"),
        ("1: 2", "a key is not a text"),
        ("<<: {limits: {}}", "'<<' is not a field"),
        ("limits: {max_requests: 1_000}", "limits.max_requests: must be a whole number, but it is '1_000'"),
        ("limits: {max_requests: 0x10}", "limits.max_requests: must be a whole number"),
        ("limits: {max_requests: 1:30}", "limits.max_requests: must be a whole number"),
        ("\x00", "it is not valid YAML"),
        ("a: \ud800", "it is not valid YAML"),
        ("a: b: c", "line 1: it is not valid YAML"),
        ("---\na: 1\n---\nb: 2", "line 3: it is not valid YAML"),
        ("# " + "x" * MAX_YAML_BYTES, "larger than"),
        ("- limits", "a policy must be a mapping"),
    ],
)
def test_hostile_yaml_is_rejected_with_one_line(text: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        policy_of_yaml(text)
    assert "\n" not in str(caught.value)


def test_yaml_scalars_have_the_types_that_they_show() -> None:
    policy = policy_of_yaml("blackouts: [{start: 22:00, end: 06:30}]\nskip: [verify]\n# comment\nwindows: []\n")
    assert (policy.blackouts[0].start, policy.blackouts[0].end) == (22 * 60, 6 * 60 + 30)
    assert policy_of_yaml("") == policy_of_yaml("{}") == policy_of_yaml("null") == DEFAULT_POLICY
    policy = policy_of_yaml("retention: {tables: [{pattern: no}, {pattern: on.y}, {pattern: 2026-01-01}]}")
    assert [rule.pattern for rule in policy.retention.tables] == ["no", "on.y", "2026-01-01"]


def test_large_policy_is_rejected() -> None:
    rules = [{"pattern": f"{number}{'x' * 500}"} for number in range(200)]
    with pytest.raises(InvalidInputError, match=f"it must have at most {MAX_POLICY_BYTES}"):
        MaintenancePolicy.of_document({"retention": {"tables": rules}})


def test_lakehouse_without_policy_has_the_default(lake: Lakehouse) -> None:
    stored = read_policy(lake)
    assert (stored.version, stored.is_default) == (lake.latest_version(), True)
    versions = stored.policy.retention.versions
    assert (versions.max_age_ms, versions.min_versions, versions.keep_daily) == (7 * DAY_MS, 3, 0)
    assert stored.policy.limits == DEFAULT_POLICY.limits
    assert stored.policy.limits.min_age_ms == 7 * DAY_MS


def test_policy_is_versioned_with_the_lakehouse(lake: Lakehouse) -> None:
    before = lake.latest_version()
    policy = MaintenancePolicy.of_document(
        {"limits": {"max_requests": 7}, "retention": {"versions": {"keep_daily": 9}}}
    )
    version = set_policy(lake, policy)
    assert version == before + 1
    assert set_policy(lake, policy) is None, "nothing changes"
    assert lake.latest_version() == version
    stored = read_policy(Lakehouse(lake.storage))
    assert (stored.is_default, stored.policy.limits.max_requests) == (False, 7)
    assert lake.snapshot().definition.retention_rules == RetentionRules(keep_daily=9)
    assert read_policy(lake, before).is_default
    (info, *_) = lake.history(1)
    assert (info.operation, info.message) == ("set-policy", "maintenance policy")


def test_version_rules_that_a_policy_leaves_out_stay(lake: Lakehouse) -> None:
    lake.alter_definition(
        maximum_version_age_millis=1_500,
        minimum_versions_to_keep=9,
        retention_rules=RetentionRules(keep_last=5, keep_weekly=6),
    )
    set_policy(lake, MaintenancePolicy.of_document({"retention": {"versions": {"keep_last": 0}}}))
    definition = lake.snapshot().definition
    assert (definition.maximum_version_age_millis, definition.minimum_versions_to_keep) == (1_500, 9)
    assert definition.retention_rules == RetentionRules(keep_last=0, keep_weekly=6)
    assert read_policy(lake).policy.to_document()["retention"]["versions"]["max_age"] == "1500ms"
    lake.alter_definition(maximum_version_age_millis=2**64 - 1)
    shown = read_policy(lake).policy
    assert set_policy(lake, MaintenancePolicy.of_document(shown.to_document())) is None


def test_policy_without_any_version_rule_is_rejected(lake: Lakehouse) -> None:
    """Another program can write a minimum of 0, which this program rejects."""
    definition = LakehouseDef(id="a", minimum_versions_to_keep=0)
    policy = MaintenancePolicy.of_document({"retention": {"versions": {"max_age": "0s"}}})
    with pytest.raises(InvalidInputError, match="keeps no version but the latest"):
        with_policy(definition, policy)
    assert RetentionPolicy.of(with_policy(definition, DEFAULT_POLICY)).maximum_age_ms == 7 * DAY_MS


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "null",
        '"x"',
        "[" * 60_000,
        '{"future":1}',
        '{"limits":{"min_age":"1y"}}',
        '{"skip":[],"skip":["purge"]}',
        '{"retention":{"versions":{"max_age":"1d"}}}',
        "x" * (MAX_POLICY_BYTES + 1),
    ],
)
def test_unreadable_policy_is_a_typed_error_and_does_not_affect_readers(lake: Lakehouse, text: str) -> None:
    lake.alter_definition(maintenance_policy=text)
    assert Lakehouse(lake.storage).snapshot().tables("ns") == ["t"]
    with pytest.raises(UnreadablePolicyError, match="maintenance policy"):
        read_policy(lake)
    assert operations.verify(lake).findings == ()
    status = lakehouse_status(lake)
    (finding,) = status.findings
    assert (finding.severity, finding.command) == ("error", "policy show")
    assert {entry.state.value for entry in status.due} == {"fine"}, "the default intervals apply"
    assert set_policy(lake, DEFAULT_POLICY) is not None, "another policy replaces it"
    assert read_policy(lake).policy.limits == DEFAULT_POLICY.limits


def test_policy_is_exported_and_copied_with_the_settings(lake: Lakehouse, lakes: Lakes) -> None:
    set_policy(lake, MaintenancePolicy.of_document({"limits": {"max_requests": 7}}))
    operations.plan_export(lake, "kept").execute()
    set_policy(lake, DEFAULT_POLICY)
    assert read_policy(lake, "kept").policy.limits.max_requests == 7
    target = f"memory://policy-copy-{id(lake)}/"
    operations.plan_export(lake, "copy", "full", version="kept", target=target).execute()
    assert read_policy(Lakehouse.open(target)).policy.limits.max_requests == 7


def test_status_uses_the_intervals_of_the_policy(lake: Lakehouse) -> None:
    document = {"targets": {"verify_every": "1h", "orphans_every": None, "export": {"every": "2d"}}}
    policy = MaintenancePolicy.of_document(document)
    ages = DueAges.of(policy)
    assert (ages.verify_ms, ages.orphans_ms, ages.export_ms) == (3_600_000, None, 2 * DAY_MS)
    assert DueAges.of(DEFAULT_POLICY) == DueAges()
    set_policy(lake, policy)
    why = {entry.what: entry.why for entry in lakehouse_status(lake).due}
    assert "due every 1 h" in why["verify"]
    assert "due every" not in why["orphans"]
    assert "due every 2 d" in why["exports"]
    assert "due every 7 d" in {e.what: e.why for e in lakehouse_status(lake, ages=DueAges()).due}["verify"]


@pytest.mark.parametrize(
    ("at", "is_open"),
    [
        ("2026-01-04T22:00", True),  # a Sunday
        ("2026-01-05T03:59", True),
        ("2026-01-05T04:00", False),
        ("2026-01-04T21:59", False),
        ("2026-01-04T03:00", False),  # the window of Saturday
        ("2026-01-06T12:00", True),  # a Tuesday
        ("2026-01-07T11:59", True),
        ("2026-01-07T12:00", False),
        ("2026-01-04T23:30", False),  # the blackout
    ],
)
def test_windows_and_blackouts(at: str, is_open: bool) -> None:
    policy = MaintenancePolicy.of_document(
        {
            "windows": [
                {"days": ["sun"], "start": "22:00", "end": "04:00"},
                {"days": ["tue"], "start": "12:00", "end": "12:00"},
            ],
            "blackouts": [{"days": ["sun", "sat"], "start": "23:30", "end": "23:45"}],
        }
    )
    closed = policy.closed(datetime.fromisoformat(at).replace(tzinfo=UTC))
    assert (closed is None) == is_open
    if closed is not None:
        assert "blackout sat, sun from 23:30 to 23:45 UTC" in closed or "outside of the windows: sun" in closed


def test_first_matching_table_rule_applies() -> None:
    rules = [{"pattern": "sales.orders"}, {"pattern": "sales.*", "min_snapshots": 3}, {"pattern": "b*"}]
    policy = MaintenancePolicy.of_document({"retention": {"tables": rules}})

    def matched(namespace: str, table: str) -> str | None:
        rule = policy.table_rule(namespace, table)
        return None if rule is None else rule.pattern

    assert matched("sales", "orders") == "sales.orders"
    assert matched("sales", "items") == "sales.*"
    assert matched("beta", "x") == "b*"
    assert matched("sale", "s") is None
    assert matched("Sales", "orders") is None, "names are case-sensitive"


def test_sentences_name_every_restriction() -> None:
    policy = MaintenancePolicy.of_document(
        {
            "retention": {
                "versions": {"max_age": "30d", "min_versions": 2, "keep_last": 4, "keep_monthly": 12},
                "tables": [{"pattern": "sales.*", "max_snapshot_age": "5d", "min_snapshots": 3}],
                "exports": [{"pattern": "nightly-*", "keep_daily": 7}],
            },
            "limits": {"max_deleted_files": None, "max_deleted_bytes": None, "max_requests": 1_000},
            "targets": {
                "verify_every": None,
                "export": {"every": "1d", "target": "s3://copies/lake", "retain_for": "30d"},
            },
            "windows": [{"start": "22:00", "end": "04:00"}],
            "approval": ["purge"],
            "skip": ["verify"],
        }
    )
    assert policy_sentences(policy) == (
        "Maintenance runs only within these windows: every day from 22:00 to 04:00 UTC.",
        "A version is kept if it was superseded in the last 30 d, or if it is one of the newest 4, or if it is the"
        " newest of one of the last 12 months, and always if an export or a clone needs it.",
        "Tables that match sales.* keep snapshots of the last 5 d, and the newest 3 snapshots of each branch, and"
        " those of kept versions.",
        "An export that matches nightly-* is kept if it is the newest of one of the last 7 days.",
        "Nothing younger than 7 d is expired, purged or removed as an orphan.",
        "A run deletes any number of files without approval.",
        "A run rewrites at most 10,000 files and 64GiB to compact tables, and leaves the rest for the next run.",
        "A run stops after 1,000 storage requests.",
        "A run stops after 1 h.",
        "Tables are compacted to files of 128MiB, unless their own properties say otherwise, where a partition has 5"
        " small files, or a table has 1 delete files.",
        "Orphans are removed every 30 d.",
        "An export that is unfinished for 1 d is resumed.",
        "A minimal export is made to s3://copies/lake every 1 d and kept for 30 d.",
        "These steps always wait for approval: purge.",
        "These steps are left out: verify.",
    )
