"""A lakehouse and a clone of it: random steps on both sides, cut off at random requests, beside a model in Python.

The model is two maps from an object to what it holds: a text for a table without files, or the rows of an Iceberg
table. Every change makes that anew. A step that was cut off has happened as a whole, or not at all.
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
from tests.operations.clone_faults import Disturbance, Met, disturbances
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
#: What keeps a side in order beside the other one.
UPKEEP = ("expire", "purge", "orphans", "compact")


@dataclass(frozen=True)
class Filled:
    """An Iceberg table: its rows in the order in which they came, and which change of its metadata is the latest."""

    rows: tuple[int, ...]
    change: int


#: What a side holds: table -> its stamp, or its rows.
Content = dict[str, object]


@dataclass
class Side:
    """What one lakehouse holds."""

    content: Content = field(default_factory=dict)

    def set(self, content: Content) -> None:
        self.content = dict(content)


class CloneWorld:
    """Both sides, what they share, and a journal of what was done.

    ``promoted`` has, of each table that was promoted since the last refresh, what the clone held then and what the
    parent held after it. ``before`` has the parent's versions before promotions, with their content. ``doubtful`` are
    tables of which a side compacted or trimmed away what tells appends from other changes. Whether appends on both
    sides of these are combined is not foretold, only what comes of it. ``met`` counts what disturbed which request, and
    in which order sides were cleaned up.
    """

    def __init__(self, seed: int, clock: Clock, met: Counter[Met]):
        self.rng = random.Random(seed)
        self.clock = clock
        self.met = met
        self.roots = {side: f"memory://clones-{seed}-{side}/" for side in SIDES}
        self.parent, self.clone = Side(), Side()
        self.shared: Content = {}
        self.promoted: dict[str, tuple[object, object]] = {}
        self.before: list[tuple[int, Content]] = []
        self.doubtful: set[str] = set()
        self.stands = False
        self._ends = False
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
        """Do one thing, perhaps with a fault, and check both sides."""
        self.clock.later(self.rng.choice((1_000, 30_000, DAY_MS)))
        steps: list[Callable[[], None]] = [self._change_parent] * 3 + [self._clean_parent]
        if self.stands:
            steps += [self._change_clone] * 3 + [self._clean_clone]
            steps += [self._promote] * 3 + [self._refresh] * 2 + [self._drop]
            steps += [self._undo] * 2 if self.before else []
        else:
            steps += [self._make] * 4
        self.rng.choice(steps)()
        self.check()

    # What both sides hold

    def check(self) -> None:
        assert _content(self.lake("parent")) == _sorted(self.parent.content), self.journal
        if self.stands:
            assert _content(self.lake("clone")) == _sorted(self.clone.content), self.journal

    def check_all(self) -> None:
        """Verify both sides, every version of them, and let the parent go on alone."""
        for side in ("parent", "clone") if self.stands else ("parent",):
            report = operations.verify(self.lake(side), deep=True)
            assert report.is_clean, (self.journal, report.findings)
        if self.stands:
            self.journal.append("drop in the end")
            self._leap()
            operations.drop_clone(self.lake("parent"), _NAME, delete_files=True)
            self.stands = False
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
        here = self.parent if side == "parent" else self.clone
        lake, token = self.lake(side), next(self._tokens)
        content = dict(here.content)
        self.journal.append(f"{side}: change {name} ({token})")
        if name in content and self.rng.random() < 0.2:
            with lake.transaction() as txn:
                txn.drop_table("n", name)
            del content[name]
        elif name in _FILLED:
            rows = pa.table({"id": pa.array([token], pa.int64())})
            with catalog_at(lake) as catalog:
                catalog.create_table_if_not_exists(f"n.{name}", rows.schema).append(rows)
            before = content.get(name, Filled((), 0))
            assert isinstance(before, Filled)
            content[name] = Filled((*before.rows, token), token)
        else:
            with lake.transaction() as txn:
                put = txn.alter_table if name in content else txn.create_table
                put("n", name, table(stamp=str(token)))
            content[name] = str(token)
        here.set(content)

    def _leap(self) -> None:
        self.clock.later(_LONG_MS)

    def _clean_parent(self) -> None:
        self._clean("parent")

    def _clean_clone(self) -> None:
        self._clean("clone")

    def _clean(self, side: str) -> None:
        """Do steps of upkeep in any order."""
        lake = self.lake(side)
        deeds: list[Callable[[], None]] = [partial(self._keep, side, what) for what in UPKEEP]
        deeds.append(lambda: self._rewrite(side, "trim", operations.plan_trim_tables(lake, keeping(1)).execute))
        compact = partial(operations.plan_compact_tables, lake, min_input_files=2)
        deeds.append(lambda: self._rewrite(side, "compact tables", lambda: compact().execute()))
        self.rng.shuffle(deeds)
        self.journal.append(f"{side}: clean up")
        for deed in deeds:
            deed()
            self._leap()
        operations.plan_purge(lake).execute()
        operations.plan_orphan_removal(lake).execute()

    def _rewrite(self, side: str, what: str, execute: Callable[[], object]) -> None:
        """Change the metadata of tables, and none of their rows."""
        here = self.parent if side == "parent" else self.clone
        before = self.lake(side).latest_version()
        execute()
        lake = self.lake(side)
        changed = {one.table for one in lake.diff(before, lake.latest_version()) if one.table is not None}
        content = dict(here.content)
        for name in changed:
            value = content[name]
            assert isinstance(value, Filled), self.journal
            content[name] = Filled(value.rows, next(self._tokens))
        if (what, side) != ("compact tables", "parent"):
            self.doubtful |= changed
        self.journal.append(f"{side}: {what} of {sorted(changed)}")
        here.set(content)

    def _keep(self, side: str, what: str) -> None:
        """Do one step of upkeep."""
        lake = self.lake(side)
        if what == "expire":
            operations.plan_expiration(lake, keeping(self.rng.choice((1, 2)))).execute()
        elif what == "purge":
            operations.plan_purge(lake).execute()
        elif what == "orphans":
            operations.plan_orphan_removal(lake).execute()
        else:
            operations.compact(lake)

    def _clean_beside(self) -> None:
        """Keep sides in order in the middle of something else, in any order, with or without days in between."""
        deeds = [(side, what) for side in SIDES for what in UPKEEP]
        self.rng.shuffle(deeds)
        is_slow = self.rng.random() < 0.5
        done = []
        for side, what in deeds:
            if is_slow:
                self._leap()
            try:
                self._keep(side, what)
            except LakehouseNotFoundError:  # the clone is not made yet, or gone
                continue
            except (FileMissingError, CorruptFileError):  # such as roots that are missing among others
                assert self._ends and side == "clone", self.journal  # half of it is deleted
                continue
            done.append(f"{side}'s {what}")
        background.drain()  # a hint that comes later would be left by a drop
        self.met.update(Met("order", first, then) for first, then in itertools.combinations(done, 2))
        self.journal.append(f"clean up beside it, {'slowly' if is_slow else 'at once'}: {', '.join(done)}")

    def _make(self) -> None:
        def make(lake: Lakehouse) -> object:
            return operations.plan_clone(lake, self.roots["clone"], _NAME).execute()

        self._cut_off("clone", make, ExportExistsError)
        self.stands, self.clone, self.doubtful = True, Side(), set()
        self.clone.set(self.parent.content)
        self.shared, self.promoted, self.before = dict(self.parent.content), {}, []

    def _drop(self) -> None:
        def drop(lake: Lakehouse) -> None:
            report = operations.drop_clone(lake, _NAME, delete_files=True)
            assert report.is_complete

        self._leap()
        self._ends = True
        self._cut_off("drop", drop, ExportNotFoundError)
        self.stands = self._ends = False
        left = [info.path for info in MemoryStorage(self.roots["clone"]).list()]
        assert not left, (self.journal, left)

    def _promote(self) -> None:
        self.before.append((self.lake("parent").latest_version(), dict(self.parent.content)))
        self._merge("promote", self.parent, self.clone)

    def _undo(self) -> None:
        """Roll the parent, or one table of it, back to a version before a promotion, if it is still there."""
        version, content = self.rng.choice(self.before)
        held = [name for name in (*_STAMPED, *_FILLED) if name in content or name in self.parent.content]
        tables = self.rng.choice([[], [self.rng.choice(held)]]) if held else []
        self.journal.append(f"parent: roll {tables or 'everything'} back to version {version}")
        try:
            operations.plan_rollback(self.lake("parent"), version, tables=[f"n.{name}" for name in tables]).execute()
        except VersionExpiredError:
            return
        after = dict(self.parent.content)
        for name in tables or (*_STAMPED, *_FILLED):
            _put(after, name, content.get(name))
        self.parent.set(after)

    def _refresh(self) -> None:
        self._merge("refresh", self.clone, self.parent)

    def _merge(self, what: str, ours: Side, theirs: Side) -> None:
        """Bring one side's changes into the other; a random side is chosen for each conflict."""
        planned = operations.plan_promotion if what == "promote" else operations.plan_refresh
        expected, conflicts = self._merged(ours, theirs)
        plan = planned(self.lake("parent"), _NAME)
        found = {one.name.removeprefix("n.") for one in plan.conflicts}
        for name in self.doubtful & found - set(conflicts):
            here, there = ours.content.get(name), theirs.content.get(name)
            # What was compacted or trimmed counts as altered, also where the other side dropped it.
            assert {type(here), type(there)} <= {Filled, type(None)} and here != there, (self.journal, name)
            conflicts.append(name)
            _put(expected, name, here)
        assert found == set(conflicts), (self.journal, found, conflicts)
        chosen = {name: self.rng.choice(("ours", "theirs")) for name in sorted(conflicts)}
        choices = {side: [f"n.{name}" for name, text in chosen.items() if text == side] for side in ("ours", "theirs")}
        for name, side in chosen.items():
            if side == "theirs":
                _put(expected, name, theirs.content.get(name))
        if conflicts:
            try:
                plan.execute()
            except CommitConflictError:
                pass
            else:
                raise AssertionError(self.journal)
        before = dict(ours.content)
        side = "parent" if what == "promote" else "clone"
        changes = not planned(self.lake("parent"), _NAME, **choices).is_empty
        self._cut_off(
            what,
            lambda lake: planned(lake, _NAME, **choices).execute(),
            seen=lambda: _content(self.lake(side)) in (_sorted(before), _sorted(expected)),
        )
        ours.set(expected)
        if what == "refresh" and changes:
            self.shared, self.promoted = dict(self.parent.content), {}
        if what == "promote":
            for name in (*_STAMPED, *_FILLED):
                there, last = theirs.content.get(name), self._last(name)[0]
                if there not in (last, before.get(name)) and chosen.get(name) != "ours":
                    self.promoted[name] = (there, expected.get(name))

    def _merged(self, ours: Side, theirs: Side) -> tuple[Content, list[str]]:
        """Return what the side that gets the changes should hold, conflicts left as they are, and the conflicts.

        Rows of a table that neither side dropped since are all there: every change of such a table appends. Its first
        row is of the table alone, so it tells whether both sides have the same one.
        """
        expected, conflicts = dict(ours.content), []
        for name in (*_STAMPED, *_FILLED):
            here, there = ours.content.get(name), theirs.content.get(name)
            if here == there:
                continue
            clone, parent = self._last(name)
            into_parent = ours is self.parent
            has_changed_here = here != (parent if into_parent else clone)
            has_changed_there = there != (clone if into_parent else parent)
            if not has_changed_here and has_changed_there and clone == parent:
                _put(expected, name, there)
            elif not has_changed_there and clone == parent:
                continue
            elif self.clone.content.get(name) == clone:  # the parent alone changed it since
                if not into_parent:
                    _put(expected, name, there)
            elif isinstance(here, Filled) and isinstance(there, Filled) and self._has_all(here, there, clone):
                expected[name] = self._combined(here, there, into_parent=into_parent)
            else:
                conflicts.append(name)
        return expected, conflicts

    def _last(self, name: str) -> tuple[object, object]:
        """Return what the clone and the parent held of a table in the last state that both had."""
        shared = self.shared.get(name)
        return self.promoted.get(name, (shared, shared))

    def _has_all(self, here: Filled, there: Filled, last: object) -> bool:
        """Whether two tables are the same one, and neither lost rows that both had."""
        rows = set(last.rows) if isinstance(last, Filled) else set()
        return here.rows[0] == there.rows[0] and rows <= set(here.rows) and rows <= set(there.rows)

    def _combined(self, here: Filled, there: Filled, *, into_parent: bool) -> Filled:
        """Return what a table holds that both sides have, and of which neither dropped rows."""
        new = [row for row in there.rows if row not in here.rows]
        if into_parent:
            return Filled((*here.rows, *new), next(self._tokens)) if new else here
        has_more = any(row not in there.rows for row in here.rows)
        return Filled((*here.rows, *new), next(self._tokens)) if has_more else there

    def _cut_off(
        self,
        what: str,
        run: Callable[[Lakehouse], object],
        *done: type[Exception],
        seen: Callable[[], bool] = lambda: True,
    ) -> None:
        """Run something that is disturbed at a random request of one side, then as often as it needs to be done."""
        side = self.rng.choice(SIDES)
        visits = {"upkeep": self._clean_beside, "twice at once": lambda: self._beside(run, done)}
        disturbed = Disturbance.of(self.rng, visits)
        self.journal.append(f"{what}, with {disturbed.name} at request {disturbed.at} of {side}")
        storages: dict[str, Storage] = {
            root: disturbances(
                MemoryStorage(root), f"{what} in the {name}", self.met, disturbed if name == side else None
            )
            for name, root in self.roots.items()
        }
        visit = disturbed.visit
        try:
            with ExitStack() as stack:
                for module in (clone_module, clone_records):
                    stack.enter_context(mock.patch.object(module, "open_storage", lambda root, _=None: storages[root]))
                clear_process_caches()
                run(Lakehouse(storages[self.roots["parent"]], cache="off"))
                background.drain()  # the thread that writes the hint may die, too
        except (DeathError, TrinityLakeError) as error:
            if isinstance(error, TrinityLakeError) and visit is None and not isinstance(error, AmbiguousWriteError):
                raise
            assert seen(), self.journal
            self.journal.append(f"it ended with {error!r}")
            try:
                run(self.lake("parent"))
            except (*done, LakehouseNotFoundError) as error:
                assert isinstance(error, done), self.journal

    def _beside(self, run: Callable[[Lakehouse], object], done: tuple[type[Exception], ...]) -> None:
        """Do the same in another process, in the middle of it."""
        try:
            run(self.lake("parent"))
        except (*done, LakehouseNotFoundError, CommitConflictError) as error:
            self.journal.append(f"beside it, the same ended with {error!r}")


def _put(content: Content, name: str, value: object) -> None:
    if value is None:
        content.pop(name, None)
    else:
        content[name] = value


def _sorted(content: Content) -> Content:
    return {name: sorted(value.rows) if isinstance(value, Filled) else value for name, value in content.items()}


def _content(lake: Lakehouse) -> Content:
    snapshot = lake.snapshot()
    found: Content = {}
    with catalog_at(lake) as catalog:
        for name in snapshot.tables("n"):
            if name in _FILLED:
                found[name] = sorted(catalog.load_table(f"n.{name}").scan().to_arrow()["id"].to_pylist())
            else:
                found[name] = snapshot.table("n", name).properties["stamp"]
    return found
