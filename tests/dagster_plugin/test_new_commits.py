"""Test commit sensors on random histories: each change is reported, or is part of a reported gap."""

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
steps = st.lists(st.one_of(commits, commits, ticks, expiries), max_size=25)


@contextmanager
def fresh_lake() -> Iterator[Lakehouse]:
    root = f"memory://news-{uuid.uuid4()}/"
    try:
        yield Lakehouse.create(root, storage=MemoryStorage(root))
    finally:
        drop_memory_root(root)


@dataclass
class Watched:
    """A lakehouse, the sensor's cursor, and what was reported."""

    lake: Lakehouse
    cursor: str | None = None
    foreign: list[tuple[int, str]] = field(default_factory=list)
    own_versions: set[int] = field(default_factory=set)
    reported: set[tuple[int, str]] = field(default_factory=set)
    gaps: set[int] = field(default_factory=set)
    requested: list[int] = field(default_factory=list)

    def commit(self, names: set[str], is_own: bool) -> None:
        with acting_for_run(OURS if is_own else OTHERS), self.lake.transaction() as txn:
            for name in sorted(names):
                txn.alter_table("ns", name, table(stamp=str(uuid.uuid4())))
        version = txn.committed_version
        assert version is not None
        if is_own:
            self.own_versions.add(version)
        else:
            self.foreign += [(version, name) for name in names]

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
            self.requested.append(commit_batch.head.version)
        if not is_killed:
            self.cursor = commit_batch.cursor.encode()
        return commit_batch


@settings(max_examples=100)
@given(steps)
def test_external_changes_are_reported_or_part_of_reported_gap(history: list[tuple[object, ...]]) -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
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
        missed = {(version, name) for version, name in watched.foreign if version not in watched.gaps}
        assert missed <= watched.reported
        if watched.foreign:
            assert watched.requested[-1] >= watched.foreign[-1][0]
        assert len(set(watched.requested)) == len(watched.requested)
        assert watched.tick(Limits(versions=3, changes=2, seconds=60)).commit_ranges == ()


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sets(st.sampled_from(TABLES), min_size=1), st.booleans()), max_size=12))
def test_own_versions_are_never_reported_without_expiry(commits: list[tuple[set[str], bool]]) -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
        watched.tick(Limits(versions=5, changes=5, seconds=60))
        for names, is_own in commits:
            watched.commit(names, is_own)
        while watched.tick(Limits(versions=4, changes=3, seconds=60)).versions_left:
            continue
        assert {version for version, _ in watched.reported}.isdisjoint(watched.own_versions)
        assert set(watched.foreign) <= watched.reported


def test_expired_own_version_is_reported_with_next_readable_version() -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
        generous = Limits(versions=50, changes=50, seconds=60)
        watched.tick(generous)
        watched.commit({"a"}, is_own=True)
        watched.commit({"b"}, is_own=False)
        watched.commit({"c"}, is_own=True)
        expire(lake, "2")
        (commit_range, settings_stretch) = watched.tick(generous).commit_ranges
        assert (commit_range.versions, [change.table for change in commit_range.changes]) == ("2-3", ["a", "b"])
        assert (settings_stretch.versions, settings_stretch.changes) == ("5", ())


def test_split_commit_restarts_when_its_version_expired() -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
        small = Limits(versions=50, changes=2, seconds=60)
        watched.tick(small)
        watched.commit({"b", "c", "d"}, is_own=False)
        watched.tick(small)
        assert watched.reported == {(2, "b"), (2, "c")}
        watched.commit({"a"}, is_own=False)
        expire(lake, "2")
        for _ in range(3):
            watched.tick(small)
        assert watched.reported >= {(3, name) for name in TABLES}
        assert watched.requested == [2, 4]


def test_split_commit_continues_when_its_version_is_beyond_tick_limit() -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
        small = Limits(versions=1, changes=1, seconds=60)
        watched.tick(small)
        watched.commit({"a"}, is_own=False)
        watched.commit({"b"}, is_own=False)
        expire(lake, "2")
        reported = [
            [change.table for commit_range in watched.tick(small).commit_ranges for change in commit_range.changes]
            for _ in range(4)
        ]
        assert reported == [["a"], ["b"], [], []]
        assert watched.requested == [4]


@pytest.mark.parametrize("keeps_unknown", [False, True])
def test_external_version_with_carried_over_own_record_is_reported(
    keeps_unknown: bool,
) -> None:
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
        generous = Limits(versions=50, changes=50, seconds=60)
        watched.tick(generous)
        watched.commit({"a"}, is_own=True)
        ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=keeps_unknown)
        watched.lake = Lakehouse(lake.storage)
        (commit_range,) = watched.tick(generous).commit_ranges
        assert [(change.kind, change.table) for change in commit_range.changes] == [("added", "foreign")]
        assert commit_range.versions == "3"


def test_external_version_after_cursor_is_detected_by_record_at_cursor() -> None:
    """Without version numbers in the records, the carried-over record of the cursor's version is not reported twice."""
    with fresh_lake() as lake:
        create(lake, "ns", *TABLES)
        watched = Watched(lake)
        generous = Limits(versions=50, changes=50, seconds=60)
        watched.commit({"a"}, is_own=True)
        path = lake.files.roots.path(2)
        node = decode_node(lake.storage.read(path), path)
        info = {name: value for name, value in decode_commit_info(node.system).items() if name != "version"}
        system = {**node.system, COMMIT_INFO: encode_commit_info(info)}
        lake.storage.write(path, encode_node(replace(node, system=system), 128))
        watched.lake = Lakehouse(lake.storage)
        watched.tick(generous)
        ForeignLake(lake.storage).commit_table("ns", "foreign", keeps_unknown=True)
        watched.lake = Lakehouse(lake.storage)
        (commit_range,) = watched.tick(generous).commit_ranges
        assert commit_range.versions == "3"
