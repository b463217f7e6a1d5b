"""Test commit sensors on random histories: each change is reported or is part of a reported gap."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.foreign import ForeignLake
from tests.lakes import table
from tests.operations.changes import create, expire
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.new_commits import CommitBatch, Cursor, Limits, poll_commits
from trinitylake_ops.format.keys import COMMIT_INFO, decode_commit_info, encode_commit_info
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.versions.commit_info import acting_for_run

TABLES = ("a", "b", "c", "d")
OURS, OTHERS = "our-run", "other-run"

commits = st.tuples(st.just("commit"), st.sets(st.sampled_from(TABLES), min_size=1), st.booleans())
ticks = st.tuples(st.just("tick"), st.integers(1, 6), st.integers(1, 5), st.sampled_from([0.0, 60.0]), st.booleans())
expiries = st.tuples(st.just("expire"), st.integers(0, 30), st.integers(0, 3))
actions = st.lists(st.one_of(commits, commits, ticks, expiries), max_size=25)


@contextmanager
def fresh_lake() -> Iterator[Lakehouse]:
    root = f"memory://commits-{uuid.uuid4()}/"
    try:
        yield Lakehouse.create(root, storage=MemoryStorage(root))
    finally:
        drop_memory_root(root)


@dataclass
class WatchedLake:
    """A lakehouse with a sensor's cursor, the commits, and the changes and gaps that were reported."""

    lake: Lakehouse
    cursor: str | None = None
    external_changes: list[tuple[int, str]] = field(default_factory=list)
    versions_of_own_runs: set[int] = field(default_factory=set)
    reported: set[tuple[int, str]] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)
    requested_versions: list[int] = field(default_factory=list)

    def commit(self, names: set[str], is_own_run: bool) -> None:
        with acting_for_run(OURS if is_own_run else OTHERS), self.lake.transaction() as txn:
            for name in sorted(names):
                txn.alter_table("ns", name, table(stamp=str(uuid.uuid4())))
        version = txn.committed_version
        assert version is not None
        if is_own_run:
            self.versions_of_own_runs.add(version)
        else:
            self.external_changes += [(version, name) for name in names]

    def expire(self, first: int, n_versions: int) -> None:
        last = min(first + n_versions, self.lake.latest_version() - 1)
        if first <= last:
            expire(self.lake, f"{first}-{last}")

    def tick(self, limits: Limits, is_killed: bool = False) -> CommitBatch:
        commit_batch = poll_commits(self.lake, self.cursor, lambda run: "own" if run == OURS else "other", limits)
        for commit_range in commit_batch.commit_ranges:
            versions = range(commit_range.first, commit_range.last + 1)
            self.reported |= {(version, change.table or "") for version in versions for change in commit_range.changes}
        for note in commit_batch.notes:
            match = re.search(r"the changes of versions (\d+)(?:-(\d+))? are not reported", note)
            assert match is not None
            self.gaps |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
        if commit_batch.is_run_due and not is_killed:
            self.requested_versions.append(commit_batch.head.version)
        if not is_killed:
            self.cursor = commit_batch.cursor.encode()
        return commit_batch


@settings(max_examples=100)
@given(actions)
def test_external_changes_are_reported_or_part_of_reported_gap(history: list[tuple[object, ...]]) -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        watched.tick(Limits(versions=5, changes=5, seconds=60))
        for kind, *arguments in history:
            if kind == "commit":
                watched.commit(*arguments)  # type: ignore[arg-type]
            elif kind == "expire":
                watched.expire(*arguments)  # type: ignore[arg-type]
            else:
                versions, changes, seconds, is_killed = arguments
                watched.tick(Limits(versions=versions, changes=changes, seconds=seconds), is_killed)  # type: ignore[arg-type]
        latest = lake.latest_version()
        for _ in range(4 * latest + 4):  # each tick reports at least one more change
            if watched.tick(Limits(versions=3, changes=2, seconds=60)).versions_left == 0:
                break
        assert watched.cursor is not None
        cursor = Cursor.decode(watched.cursor)
        assert (cursor.version, cursor.until) == (latest, None)
        expected_changes = {
            (version, name) for version, name in watched.external_changes if version not in watched.gaps
        }
        assert expected_changes <= watched.reported
        if watched.external_changes:
            assert watched.requested_versions[-1] >= watched.external_changes[-1][0]
        assert len(set(watched.requested_versions)) == len(watched.requested_versions)
        assert watched.tick(Limits(versions=3, changes=2, seconds=60)).commit_ranges == ()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sets(st.sampled_from(TABLES), min_size=1), st.booleans()), max_size=12))
def test_versions_of_own_runs_are_not_reported_without_expiry(commits: list[tuple[set[str], bool]]) -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        watched.tick(Limits(versions=5, changes=5, seconds=60))
        for names, is_own_run in commits:
            watched.commit(names, is_own_run)
        while watched.tick(Limits(versions=4, changes=3, seconds=60)).versions_left:
            continue
        assert {version for version, _ in watched.reported}.isdisjoint(watched.versions_of_own_runs)
        assert set(watched.external_changes) <= watched.reported


def test_expired_version_of_own_run_is_reported_with_next_readable_version() -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        large_limits = Limits(versions=50, changes=50, seconds=60)
        watched.tick(large_limits)
        watched.commit({"a"}, is_own_run=True)
        watched.commit({"b"}, is_own_run=False)
        watched.commit({"c"}, is_own_run=True)
        expire(lake, "2")
        (commit_range, expiry_range) = watched.tick(large_limits).commit_ranges
        assert (commit_range.versions, [change.table for change in commit_range.changes]) == ("2-3", ["a", "b"])
        assert (expiry_range.versions, expiry_range.changes) == ("5", ())


def test_split_commit_restarts_when_its_version_expired() -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        small_limits = Limits(versions=50, changes=2, seconds=60)
        watched.tick(small_limits)
        watched.commit({"b", "c", "d"}, is_own_run=False)
        watched.tick(small_limits)
        assert watched.reported == {(2, "b"), (2, "c")}
        watched.commit({"a"}, is_own_run=False)
        expire(lake, "2")
        for _ in range(3):
            watched.tick(small_limits)
        assert watched.reported >= {(3, name) for name in TABLES}
        assert watched.requested_versions == [2, 4]


def test_split_commit_continues_when_its_version_is_beyond_tick_limit() -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        small_limits = Limits(versions=1, changes=1, seconds=60)
        watched.tick(small_limits)
        watched.commit({"a"}, is_own_run=False)
        watched.commit({"b"}, is_own_run=False)
        expire(lake, "2")
        reported = [
            [
                change.table
                for commit_range in watched.tick(small_limits).commit_ranges
                for change in commit_range.changes
            ]
            for _ in range(4)
        ]
        assert reported == [["a"], ["b"], [], []]
        assert watched.requested_versions == [4]


@pytest.mark.parametrize("keeps_unknown", [False, True])
def test_external_version_that_keeps_record_of_own_run_is_reported(
    keeps_unknown: bool,
) -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        large_limits = Limits(versions=50, changes=50, seconds=60)
        watched.tick(large_limits)
        watched.commit({"a"}, is_own_run=True)
        ForeignLake(lake.storage).commit_table("ns", "external", keeps_unknown=keeps_unknown)
        watched.lake = Lakehouse(lake.storage)
        (commit_range,) = watched.tick(large_limits).commit_ranges
        assert [(change.kind, change.table) for change in commit_range.changes] == [("added", "external")]
        assert commit_range.versions == "3"


def test_external_version_is_detected_by_record_of_version_at_cursor() -> None:
    """The record has no version number, and the external version keeps the record of the cursor's version."""
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = WatchedLake(lake)
        large_limits = Limits(versions=50, changes=50, seconds=60)
        watched.commit({"a"}, is_own_run=True)
        path = lake.files.roots.path(2)
        node = decode_node(lake.storage.read(path), path)
        info = {name: value for name, value in decode_commit_info(node.system).items() if name != "version"}
        system = {**node.system, COMMIT_INFO: encode_commit_info(info)}
        lake.storage.write(path, encode_node(replace(node, system=system), 128))
        watched.lake = Lakehouse(lake.storage)
        watched.tick(large_limits)
        ForeignLake(lake.storage).commit_table("ns", "external", keeps_unknown=True)
        watched.lake = Lakehouse(lake.storage)
        (commit_range,) = watched.tick(large_limits).commit_ranges
        assert commit_range.versions == "3"
