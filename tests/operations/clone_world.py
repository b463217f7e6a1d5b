"""Run random steps on a lakehouse and its clone, with faults at random requests, and compare with a model.

The model maps each table of a side to its content: a text for a table without files, or the rows of an Iceberg
table. An interrupted step must have happened completely or not at all.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from unittest import mock

import pyarrow as pa

from tests.faults import DeathError
from tests.lakes import table
from tests.operations.aging import DAY_MS, keeping
from tests.operations.changes import small_sizes
from tests.operations.clone_faults import Disturbance, Event, storage_with_disturbance
from tests.operations.copy_world import Clock
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CommitConflictError,
    CorruptFileError,
    ExportExistsError,
    ExportNotFoundError,
    FileMissingError,
    LakehouseNotFoundError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.clones import clone as clone_module
from trinitylake_ops.operations.clones import clone_records
from trinitylake_ops.storage import MemoryStorage, Storage, background, drop_memory_root
from trinitylake_ops.storage.cache.storage import clear_process_caches

_NAME = "feature"
_STAMPED = ("a", "b", "c")
_FILLED = ("s", "t")
SIDES = ("parent", "clone")
_LONG_MS = 2 * DAY_MS
#: Maintenance operations that can run on one side while the other side is used.
MAINTENANCE = ("expire", "purge", "orphans", "compact")


@dataclass(frozen=True)
class FilledTable:
    """An Iceberg table: its rows in the order of their appends, and the number of its latest metadata change."""

    rows: tuple[int, ...]
    change: int


#: The content of a side: table -> its stamp, or its rows.
Content = dict[str, object]


@dataclass
class Side:
    """The expected content of the parent or the clone."""

    content: Content = field(default_factory=dict)

    def set(self, content: Content) -> None:
        self.content = dict(content)


class CloneWorld:
    """Both sides, their shared content, and a journal of all steps.

    ``promoted`` maps each table that was promoted since the last refresh to its content in the clone and in the
    parent after that promotion. ``undo_points`` are the parent's versions before promotions, with their content.
    ``ambiguous`` are tables of which a side compacted or trimmed the snapshots that distinguish appends from other
    changes. The model predicts the result of combining their appends, but not whether they are combined. ``events``
    counts disturbances by request, and orders of maintenance operations.
    """

    def __init__(self, seed: int, clock: Clock, counts: Counter[Event]):
        self.rng = random.Random(seed)
        self.clock = clock
        self.events = counts
        self.roots = {side: f"memory://clones-{seed}-{side}/" for side in SIDES}
        self.parent, self.clone = Side(), Side()
        self.shared: Content = {}
        self.promoted: dict[str, tuple[object, object]] = {}
        self.undo_points: list[tuple[int, Content]] = []
        self.ambiguous: set[str] = set()
        self.clone_exists = False
        self._is_being_dropped = False
        self.journal: list[str] = []
        self._tokens = itertools.count()
        lake = Lakehouse.create(self.roots["parent"], order=3, txn_ttl_millis=60_000, **small_sizes(3))
        with lake.transaction() as txn:
            txn.create_namespace("n")
        for name in (*_STAMPED[:2], *_FILLED):
            self._change("parent", name)

    def close(self) -> None:
        for root in self.roots.values():
            drop_memory_root(root)

    def lake(self, side: str) -> Lakehouse:
        background.drain()
        clear_process_caches()
        return Lakehouse.open(self.roots[side])

    def step(self) -> None:
        """Run one random step, possibly with a fault, and check both sides."""
        self.clock.later(self.rng.choice((1_000, 30_000, DAY_MS)))
        steps: list[Callable[[], None]] = [self._change_parent] * 3 + [self._clean_parent]
        if self.clone_exists:
            steps += [self._change_clone] * 3 + [self._clean_clone]
            steps += [self._promote] * 3 + [self._refresh] * 2 + [self._drop]
            steps += [self._undo] * 2 if self.undo_points else []
        else:
            steps += [self._create_clone] * 4
        self.rng.choice(steps)()
        self.check()

    # Checks

    def check(self) -> None:
        assert _content(self.lake("parent")) == _sorted(self.parent.content), self.journal
        if self.clone_exists:
            assert _content(self.lake("clone")) == _sorted(self.clone.content), self.journal

    def check_all(self) -> None:
        """Verify all versions of both sides, then drop the clone and verify the parent."""
        for side in ("parent", "clone") if self.clone_exists else ("parent",):
            report = operations.verify(self.lake(side), deep=True)
            assert report.is_clean, (self.journal, report.findings)
        if self.clone_exists:
            self.journal.append("final drop")
            self._advance_clock()
            operations.drop_clone(self.lake("parent"), _NAME, delete_files=True)
            self.clone_exists = False
        for _ in range(2):
            self._clean("parent")
        self.check()
        report = operations.verify(self.lake("parent"), deep=True)
        assert report.is_clean, (self.journal, report.findings)

    # Steps

    def _change_parent(self) -> None:
        self._change("parent", self.rng.choice((*_STAMPED, *_FILLED)))

    def _change_clone(self) -> None:
        self._change("clone", self.rng.choice((*_STAMPED, *_FILLED)))

    def _change(self, side: str, name: str) -> None:
        state = self.parent if side == "parent" else self.clone
        lake, token = self.lake(side), next(self._tokens)
        content = dict(state.content)
        self.journal.append(f"{side}: change {name} ({token})")
        if name in content and self.rng.random() < 0.2:
            with lake.transaction() as txn:
                txn.drop_table("n", name)
            del content[name]
        elif name in _FILLED:
            rows = pa.table({"id": pa.array([token], pa.int64())})
            with catalog_at(lake) as catalog:
                catalog.create_table_if_not_exists(f"n.{name}", rows.schema).append(rows)
            before = content.get(name, FilledTable((), 0))
            assert isinstance(before, FilledTable)
            content[name] = FilledTable((*before.rows, token), token)
        else:
            with lake.transaction() as txn:
                write = txn.alter_table if name in content else txn.create_table
                write("n", name, table(stamp=str(token)))
            content[name] = str(token)
        state.set(content)

    def _advance_clock(self) -> None:
        self.clock.later(_LONG_MS)

    def _clean_parent(self) -> None:
        self._clean("parent")

    def _clean_clone(self) -> None:
        self._clean("clone")

    def _clean(self, side: str) -> None:
        """Run all maintenance operations in random order."""
        lake = self.lake(side)
        actions: list[Callable[[], None]] = [partial(self._maintain, side, operation) for operation in MAINTENANCE]
        actions.append(lambda: self._rewrite(side, "trim", operations.plan_trim_tables(lake, keeping(1)).execute))
        compact = partial(operations.plan_compact_tables, lake, min_input_files=2)
        actions.append(lambda: self._rewrite(side, "compact tables", lambda: compact().execute()))
        self.rng.shuffle(actions)
        self.journal.append(f"{side}: clean up")
        for action in actions:
            action()
            self._advance_clock()
        operations.plan_purge(lake).execute()
        operations.plan_orphan_removal(lake).execute()

    def _rewrite(self, side: str, operation: str, execute: Callable[[], object]) -> None:
        """Rewrite metadata of tables without changing their rows."""
        state = self.parent if side == "parent" else self.clone
        before = self.lake(side).latest_version()
        execute()
        lake = self.lake(side)
        changed_tables = {
            change.table for change in lake.diff(before, lake.latest_version()) if change.table is not None
        }
        content = dict(state.content)
        for name in changed_tables:
            value = content[name]
            assert isinstance(value, FilledTable), self.journal
            content[name] = FilledTable(value.rows, next(self._tokens))
        if (operation, side) != ("compact tables", "parent"):
            self.ambiguous |= changed_tables
        self.journal.append(f"{side}: {operation} of {sorted(changed_tables)}")
        state.set(content)

    def _maintain(self, side: str, operation: str) -> None:
        """Run one maintenance operation."""
        lake = self.lake(side)
        if operation == "expire":
            operations.plan_expiration(lake, keeping(self.rng.choice((1, 2)))).execute()
        elif operation == "purge":
            operations.plan_purge(lake).execute()
        elif operation == "orphans":
            operations.plan_orphan_removal(lake).execute()
        else:
            operations.compact(lake)

    def _clean_concurrently(self) -> None:
        """Run maintenance operations during another operation, in random order, with or without days in between."""
        actions = [(side, operation) for side in SIDES for operation in MAINTENANCE]
        self.rng.shuffle(actions)
        is_slow = self.rng.random() < 0.5
        completed = []
        for side, operation in actions:
            if is_slow:
                self._advance_clock()
            try:
                self._maintain(side, operation)
            except LakehouseNotFoundError:  # the clone does not exist yet or was dropped
                continue
            except (FileMissingError, CorruptFileError):  # for example missing roots
                assert self._is_being_dropped and side == "clone", self.journal  # the clone is partly deleted
                continue
            completed.append(f"{side}'s {operation}")
        background.drain()  # a hint written later would remain after a drop
        self.events.update(Event("order", first, second) for first, second in itertools.combinations(completed, 2))
        self.journal.append(f"concurrent cleanup, {'slow' if is_slow else 'fast'}: {', '.join(completed)}")

    def _create_clone(self) -> None:
        def create_clone(lake: Lakehouse) -> object:
            return operations.plan_clone(lake, self.roots["clone"], _NAME).execute()

        self._run_disturbed("clone", create_clone, ExportExistsError)
        self.clone_exists, self.clone, self.ambiguous = True, Side(), set()
        self.clone.set(self.parent.content)
        self.shared, self.promoted, self.undo_points = dict(self.parent.content), {}, []

    def _drop(self) -> None:
        def drop(lake: Lakehouse) -> None:
            report = operations.drop_clone(lake, _NAME, delete_files=True)
            assert report.is_complete

        self._advance_clock()
        self._is_being_dropped = True
        self._run_disturbed("drop", drop, ExportNotFoundError)
        self.clone_exists = self._is_being_dropped = False
        remaining = [info.path for info in MemoryStorage(self.roots["clone"]).list()]
        assert not remaining, (self.journal, remaining)

    def _promote(self) -> None:
        self.undo_points.append((self.lake("parent").latest_version(), dict(self.parent.content)))
        self._merge("promote", self.parent, self.clone)

    def _undo(self) -> None:
        """Roll the parent or one of its tables back to a version before a promotion, if it has not expired."""
        version, content = self.rng.choice(self.undo_points)
        existing = [name for name in (*_STAMPED, *_FILLED) if name in content or name in self.parent.content]
        tables = self.rng.choice([[], [self.rng.choice(existing)]]) if existing else []
        self.journal.append(f"parent: roll {tables or 'everything'} back to version {version}")
        try:
            operations.plan_rollback(self.lake("parent"), version, tables=[f"n.{name}" for name in tables]).execute()
        except VersionExpiredError:
            return
        after = dict(self.parent.content)
        for name in tables or (*_STAMPED, *_FILLED):
            _set_table(after, name, content.get(name))
        self.parent.set(after)

    def _refresh(self) -> None:
        self._merge("refresh", self.clone, self.parent)

    def _merge(self, operation: str, ours: Side, theirs: Side) -> None:
        """Merge one side's changes into the other, with random choices for conflicts."""
        make_plan = operations.plan_promotion if operation == "promote" else operations.plan_refresh
        expected, conflicts = self._expected_merge(ours, theirs)
        plan = make_plan(self.lake("parent"), _NAME)
        reported = {conflict.name.removeprefix("n.") for conflict in plan.conflicts}
        for name in self.ambiguous & reported - set(conflicts):
            ours_state, theirs_state = ours.content.get(name), theirs.content.get(name)
            # Compacted and trimmed tables count as altered, even if the other side dropped them.
            assert {type(ours_state), type(theirs_state)} <= {FilledTable, type(None)} and ours_state != theirs_state, (
                self.journal,
                name,
            )
            conflicts.append(name)
            _set_table(expected, name, ours_state)
        assert reported == set(conflicts), (self.journal, reported, conflicts)
        chosen_sides = {name: self.rng.choice(("ours", "theirs")) for name in sorted(conflicts)}
        choices = {
            side: [f"n.{name}" for name, chosen in chosen_sides.items() if chosen == side]
            for side in ("ours", "theirs")
        }
        for name, side in chosen_sides.items():
            if side == "theirs":
                _set_table(expected, name, theirs.content.get(name))
        if conflicts:
            try:
                plan.execute()
            except CommitConflictError:
                pass
            else:
                raise AssertionError(self.journal)
        before = dict(ours.content)
        side = "parent" if operation == "promote" else "clone"
        changes = not make_plan(self.lake("parent"), _NAME, **choices).is_empty
        self._run_disturbed(
            operation,
            lambda lake: make_plan(lake, _NAME, **choices).execute(),
            has_happened=lambda: _content(self.lake(side)) in (_sorted(before), _sorted(expected)),
        )
        ours.set(expected)
        if operation == "refresh" and changes:
            self.shared, self.promoted = dict(self.parent.content), {}
        if operation == "promote":
            for name in (*_STAMPED, *_FILLED):
                theirs_state, last = theirs.content.get(name), self._last_common_content(name)[0]
                if theirs_state not in (last, before.get(name)) and chosen_sides.get(name) != "ours":
                    self.promoted[name] = (theirs_state, expected.get(name))

    def _expected_merge(self, ours: Side, theirs: Side) -> tuple[Content, list[str]]:
        """Return the expected content of the side that receives the changes, and the unresolved conflicts.

        A table that neither side dropped since then still has all its rows, because all other changes append. The first
        row is unique to the table, so it shows whether both sides have the same table.
        """
        expected, conflicts = dict(ours.content), []
        for name in (*_STAMPED, *_FILLED):
            ours_state, theirs_state = ours.content.get(name), theirs.content.get(name)
            if ours_state == theirs_state:
                continue
            clone, parent = self._last_common_content(name)
            into_parent = ours is self.parent
            has_changed_here = ours_state != (parent if into_parent else clone)
            has_changed_there = theirs_state != (clone if into_parent else parent)
            if not has_changed_here and has_changed_there and clone == parent:
                _set_table(expected, name, theirs_state)
            elif not has_changed_there and clone == parent:
                continue
            elif self.clone.content.get(name) == clone:  # only the parent changed it
                if not into_parent:
                    _set_table(expected, name, theirs_state)
            elif (
                isinstance(ours_state, FilledTable)
                and isinstance(theirs_state, FilledTable)
                and self._keeps_common_rows(ours_state, theirs_state, clone)
            ):
                expected[name] = self._combine_appends(ours_state, theirs_state, into_parent=into_parent)
            else:
                conflicts.append(name)
        return expected, conflicts

    def _last_common_content(self, name: str) -> tuple[object, object]:
        """Return the content of a table in the clone and in the parent when both were last in sync."""
        shared = self.shared.get(name)
        return self.promoted.get(name, (shared, shared))

    def _keeps_common_rows(self, ours_state: FilledTable, theirs_state: FilledTable, last: object) -> bool:
        """Whether two tables are the same table, and neither lost common rows."""
        rows = set(last.rows) if isinstance(last, FilledTable) else set()
        return (
            ours_state.rows[0] == theirs_state.rows[0]
            and rows <= set(ours_state.rows)
            and rows <= set(theirs_state.rows)
        )

    def _combine_appends(self, ours_state: FilledTable, theirs_state: FilledTable, *, into_parent: bool) -> FilledTable:
        """Combine the rows of a table from which neither side deleted rows."""
        new = [row for row in theirs_state.rows if row not in ours_state.rows]
        if into_parent:
            return FilledTable((*ours_state.rows, *new), next(self._tokens)) if new else ours_state
        has_more = any(row not in theirs_state.rows for row in ours_state.rows)
        return FilledTable((*ours_state.rows, *new), next(self._tokens)) if has_more else theirs_state

    def _run_disturbed(
        self,
        operation: str,
        run: Callable[[Lakehouse], object],
        *completed: type[Exception],
        has_happened: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run an operation with a disturbance at a random request of one side, and repeat it if it failed."""
        side = self.rng.choice(SIDES)
        actions = {
            "maintenance": self._clean_concurrently,
            "concurrent run": lambda: self._run_concurrently(run, completed),
        }
        disturbance = Disturbance.of(self.rng, actions)
        self.journal.append(f"{operation}, with {disturbance.name} at request {disturbance.at} of {side}")
        storages: dict[str, Storage] = {
            root: storage_with_disturbance(
                MemoryStorage(root), f"{operation} in the {name}", self.events, disturbance if name == side else None
            )
            for name, root in self.roots.items()
        }
        action = disturbance.action
        try:
            with ExitStack() as stack:
                for module in (clone_module, clone_records):
                    stack.enter_context(mock.patch.object(module, "open_storage", lambda root, _=None: storages[root]))
                clear_process_caches()
                run(Lakehouse(storages[self.roots["parent"]], cache="off"))
                background.drain()  # the thread that writes the hint can die as well
        except (DeathError, TrinityLakeError) as error:
            if isinstance(error, TrinityLakeError) and action is None and not isinstance(error, AmbiguousWriteError):
                raise
            assert has_happened(), self.journal
            self.journal.append(f"it ended with {error!r}")
            try:
                run(self.lake("parent"))
            except (*completed, LakehouseNotFoundError) as error:
                assert isinstance(error, completed), self.journal

    def _run_concurrently(self, run: Callable[[Lakehouse], object], completed: tuple[type[Exception], ...]) -> None:
        """Run the same operation concurrently in another process."""
        try:
            run(self.lake("parent"))
        except (*completed, LakehouseNotFoundError, CommitConflictError) as error:
            self.journal.append(f"the concurrent operation ended with {error!r}")


def _set_table(content: Content, name: str, value: object) -> None:
    if value is None:
        content.pop(name, None)
    else:
        content[name] = value


def _sorted(content: Content) -> Content:
    return {name: sorted(value.rows) if isinstance(value, FilledTable) else value for name, value in content.items()}


def _content(lake: Lakehouse) -> Content:
    snapshot = lake.snapshot()
    content: Content = {}
    with catalog_at(lake) as catalog:
        for name in snapshot.tables("n"):
            if name in _FILLED:
                content[name] = sorted(catalog.load_table(f"n.{name}").scan().to_arrow()["id"].to_pylist())
            else:
                content[name] = snapshot.table("n", name).properties["stamp"]
    return content
