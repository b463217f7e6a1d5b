"""Brings the changes of one side into the other, as far as they do not conflict.

``ours`` is the side that gets the changes, ``theirs`` the one that has them.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, TypeVar

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, InvalidNameError
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.file_names import new_lakehouse_def_path
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.operations.base import MeteredLakehouse, Plan, PlannedOperation, ReportT
from trinitylake_ops.operations.clones.appends import Appends
from trinitylake_ops.operations.clones.compare import ChangedOn, MergeInputs, ObjectState
from trinitylake_ops.operations.rendering import Table, change_rows, new_table
from trinitylake_ops.transaction.change_set import NewNames
from trinitylake_ops.transaction.draft import Draft, RootStamp, Writes
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.history import Change
from trinitylake_ops.versions.snapshot import Entry, Snapshot
from trinitylake_ops.versions.table_names import OneName, keys_changed_since, table_ids

_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class Conflict:
    """An object that both sides changed, or that cannot stand beside what the other side did, and how."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The sides that were chosen for conflicts, as ``namespace`` or ``namespace.table``.

    A namespace stands for all conflicts in it.
    """

    ours: frozenset[str]
    theirs: frozenset[str]

    @classmethod
    def of(cls, ours: Collection[str], theirs: Collection[str]) -> Choices:
        """Check the names that somebody chose. Raises InvalidInputError for a name on both sides."""
        if both := sorted(set(ours) & set(theirs)):
            raise InvalidInputError(f"{both[0]!r} is chosen from both sides; choose one")
        return cls(frozenset(ours), frozenset(theirs))

    def side_of(self, name: ObjectName) -> str | None:
        """Return "ours", "theirs", or None without a choice. That of a table comes before that of its namespace."""
        for text in (str(name), name.namespace):
            if text in self.ours:
                return "ours"
            if text in self.theirs:
                return "theirs"
        return None


@dataclass
class Merge:
    """The changes to make: key -> URI of a definition, None for what goes; and what nobody has decided yet.

    ``name`` is the clone's. ``into`` is the latest version of the side that gets them. ``into_parent`` says which side
    that is. ``appends`` finds what the clone appended to a table that both sides appended to. ``appended`` has those
    with files to combine. ``kept`` are the names of conflicts for which "ours" was chosen.
    """

    name: str
    into: Snapshot
    theirs: Snapshot
    states: Sequence[ObjectState]
    choices: Choices
    into_parent: bool
    appends: Callable[[ObjectState], Appends | str]
    changes: dict[str, str | None] = field(default_factory=dict)
    appended: list[Appends] = field(default_factory=list)
    conflicts: list[Conflict] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    #: The ids of the tables in ``changes`` by their keys, None for tables that are dropped.
    table_ids: dict[str, str | None] = field(default_factory=dict)
    _named: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        sides: MergeInputs,
        chosen: Sequence[ObjectState],
        choices: Choices,
        appends: Callable[[ObjectState], Appends | str],
        *,
        into_parent: bool,
    ) -> Merge:
        """Merge the ``chosen`` ones of all states.

        Raises InvalidInputError for a choice where there is no conflict, and TableHasAnotherNameError for choices that
        would leave one table under two names.
        """
        states = sides.states
        into, theirs = sides.latest, sides.clone.latest
        if not into_parent:
            into, theirs = theirs, into
        merge = cls(sides.record.name, into, theirs, states, choices, into_parent, appends)
        for state in chosen:
            merge._take(state)
        by_key = {state.key: state for state in states}
        for state in chosen:
            if state.name.table is not None:
                merge._check_namespace(state, by_key)
        for state in chosen:
            if state.name.table is None and merge.changes.get(state.key, "") is None:
                merge._check_empty(state)
        unknown = sorted((choices.ours | choices.theirs) - merge._named)
        if not merge.conflicts:  # what is chosen for them decides which names stay
            merge._check_names()
        # If nothing is left to do, an earlier run may have applied the same choices, which may be repeated.
        if unknown and (merge.changes or merge.appended or merge.conflicts):
            raise InvalidInputError(f"{unknown[0]!r} is in no conflict, so there is nothing to choose; leave it out")
        for text in unknown:
            if not any(_names_object(text, version) for version in (into, theirs, sides.base)):
                raise InvalidInputError(f"{text!r} is no namespace and no table of either side; leave it out")
        return merge

    def check_names(self) -> None:
        """Raise ObjectExistsError if a table and a view would have the same name, unless conflicts are undecided."""
        if self.conflicts:
            return
        entries: dict[str, Entry | None] = dict(self.changes)
        for key, location in self.changes.items():
            name = self.theirs.object_name(key)
            if location is not None and name.table is None:
                # The new definition may not be written yet. It will have the properties of this one.
                entries[key] = self.theirs.namespace(name.namespace)
        NewNames(self.into, entries).check(self.into)

    def _take(self, state: ObjectState) -> None:
        source = ChangedOn.CLONE if self.into_parent else ChangedOn.PARENT
        if state.changed_on == source:
            self.changes[state.key] = self._other_state(state)
        elif state.changed_on == ChangedOn.BOTH:
            # Where somebody chose a side, nobody asks for the appends.
            is_open = self.choices.side_of(state.name) is None
            found = self.appends(state) if is_open and not state.reason else state.reason
            if isinstance(found, str):
                self._decide(state, found)
            elif found.files:
                self.appended.append(found)
            elif not self.into_parent:  # the parent has all of the clone's
                self.changes[state.key] = state.parent

    def _decide(self, state: ObjectState, why: str) -> None:
        parent, clone = _verb(state.base, state.parent), _verb(state.base, state.clone)
        reason = f"the parent {parent} it, clone {self.name} {clone} it"
        if self._is_other_side(state.name, f"{reason} ({why})" if why else reason):
            self.changes[state.key] = self._other_state(state)

    def _other_state(self, state: ObjectState) -> str | None:
        return state.clone if self.into_parent else state.parent

    def _is_other_side(self, name: ObjectName, reason: str) -> bool:
        """Whether the other side was chosen for a conflict. Without a choice the conflict is noted."""
        self._named |= {str(name), name.namespace}
        side = self.choices.side_of(name)
        if side is None:
            self.conflicts.append(Conflict(str(name), reason))
        elif side == "ours":
            self.kept.append(str(name))
        return side == "theirs"

    def _check_namespace(self, state: ObjectState, by_key: Mapping[str, ObjectState]) -> None:
        """A table that comes needs its namespace. One that is new on the other side comes with it."""
        if self.changes.get(state.key) is None:
            return
        key = self.into.keys.namespace_key(state.name.namespace)
        existing = self.changes[key] if key in self.changes else self.into.entry(key)
        if existing is not None:
            return
        there = by_key.get(key)
        is_new = there is not None and there.base is None and self._other_state(there) is not None
        ours, theirs = side_labels(self.name, into_parent=self.into_parent)
        if is_new or self._is_other_side(state.name, f"{ours} dropped its namespace, {theirs} has it new or changed"):
            location = self._other_state(there) if there is not None else None
            assert location is not None, "a table there has a namespace there"
            self.changes[key] = location
        else:
            del self.changes[state.key]

    def _check_names(self) -> None:
        """Raise TableHasAnotherNameError when a table would come under a second name.

        The other name differs between the two sides, so that it is among the states.
        """
        states = [state for state in self.states if state.name.table is not None]
        ids = table_ids(self.theirs, {state.key: self.changes.get(state.key) for state in states})
        present = table_ids(self.into, {state.key: self.into.entry(state.key) for state in states} if ids else {})
        self.table_ids = {state.key: ids.get(state.key) for state in states if state.key in self.changes}

        def keys_of(_: Snapshot, table_id: str) -> list[str]:
            return [key for key, found in present.items() if found == table_id]

        OneName(self.table_ids, keys_of)(self.into)

    def _check_empty(self, state: ObjectState) -> None:
        """A namespace that goes must leave no table."""
        namespace = state.name.namespace
        left = {
            key: table
            for table in self.into.tables(namespace)
            if self.changes.get(key := self.into.keys.table_key(namespace, table), "") is not None
        }
        if not left:
            return
        names = ", ".join(sorted(left.values())[:_MOST_NAMED]) + (", ..." if len(left) > _MOST_NAMED else "")
        ours, theirs = side_labels(self.name, into_parent=self.into_parent)
        if self._is_other_side(state.name, f"{theirs} dropped it, {ours} has new or changed tables in it ({names})"):
            self.changes |= dict.fromkeys(left)
        else:
            del self.changes[state.key]


def _names_object(text: str, version: Snapshot) -> bool:
    """Whether a text is ``namespace`` or ``namespace.table`` of a version. Any dot may divide the two names."""
    names = [(text, None), *((text[:at], text[at + 1 :]) for at, character in enumerate(text) if character == ".")]
    for namespace, table in names:
        with contextlib.suppress(InvalidNameError):
            if version.has_namespace(namespace) if table is None else version.has_table(namespace, table):
                return True
    return False


def _verb(base: str | None, now: str | None) -> str:
    if base is None:
        return "created"
    return "dropped" if now is None else "altered"


def side_labels(name: str, *, into_parent: bool) -> tuple[str, str]:
    """Return how messages name the side that gets the changes, "ours", and the other one, "theirs"."""
    parent, clone = "the parent", f"clone {name}"
    return (parent, clone) if into_parent else (clone, parent)


def count_of(conflicts: Sequence[Conflict]) -> str:
    """Return how many conflicts there are, in words."""
    return "1 conflict" if len(conflicts) == 1 else f"{len(conflicts)} conflicts"


class MergePlan(Plan):
    """Base of plans to bring one side's changes into the other. Each declares these fields in its own order."""

    into_parent: ClassVar[bool]
    base_version: int
    name: str
    changes: tuple[Change, ...]
    conflicts: tuple[Conflict, ...]
    appended: tuple[Appends, ...]
    #: The ids of the tables that change by their keys, None for tables that are dropped.
    table_ids: Mapping[str, str | None]
    #: The new locations of objects by their keys, None for those that are dropped. Combined tables are not among them.
    entries: Mapping[str, str | None]

    def how_to_choose(self, option: str = "--") -> str:
        """Return which option decides the first conflict for which side. ``option`` is what stands before its name."""
        ours, theirs = side_labels(self.name, into_parent=self.into_parent)
        name = self.conflicts[0].name
        return f"{option}ours {name} keeps what {ours} has, {option}theirs {name} takes what {theirs} has"

    def conflict_error(self) -> CommitConflictError:
        """Return the error for conflicts that nobody decided. It names them, and how to choose."""
        texts = tuple(f"{conflict.name}: {conflict.reason}" for conflict in self.conflicts)
        shown = "; ".join(texts[:_MOST_NAMED]) + ("; ..." if len(texts) > _MOST_NAMED else "")
        return CommitConflictError(
            f"{count_of(self.conflicts)}, nothing was changed: {shown}; choose a side for each, for example:"
            f" {self.how_to_choose()}",
            conflicts=texts,
            base_version=self.base_version,
            latest_version=self.base_version,
        )

    @abstractmethod
    def steps(self) -> Table:
        """Return what would be done, step by step: the files to write, and the objects that change."""

    @property
    def is_empty(self) -> bool:
        """Whether the other side has nothing that this one lacks."""
        return not self.changes and not self.conflicts

    def rows(self) -> list[Sequence[object]]:
        """Return one row for each namespace and table that would change, and for each conflict."""
        combined = {str(one.name): f"{len(one.files)} files of the clone are appended" for one in self.appended}
        changed: list[Sequence[object]] = [(*row, combined.get(str(row[1]), "")) for row in change_rows(self.changes)]
        return changed + [("conflict", conflict.name, conflict.reason) for conflict in self.conflicts]


MergePlanT = TypeVar("MergePlanT", bound=MergePlan)


@dataclass(frozen=True, kw_only=True)
class MergeOperation(PlannedOperation[MergePlanT, ReportT]):
    """Base of what brings one side's changes into the other: the clone's name, and the sides chosen for conflicts."""

    name: str
    choices: Choices
    target_options: Mapping[str, str] | None

    @abstractmethod
    def planned(self, sides: MergeInputs) -> MergePlanT:
        """Plan on both sides, as they were opened."""

    def plan(self) -> MergePlanT:
        """Plan on the latest versions of both sides. Raises what opening them and :meth:`planned` raise."""
        return self.planned(self.opened(MeteredLakehouse(self.lake)))

    def opened(self, metered: MeteredLakehouse) -> MergeInputs:
        """Open both sides at their latest versions. Raises what :meth:`MergeInputs.open` raises."""
        return MergeInputs.open(metered, self.name, self.target_options)

    def decided(self, plan: MergePlanT, approved_digest: str | None, sides: MergeInputs) -> MergePlanT:
        """Return the plan to execute, made again if a digest was approved.

        Raises PlanChangedError, and CommitConflictError for conflicts that nobody decided.
        """
        if approved_digest is not None:
            plan = self.planned(sides)
            plan.check_approved(approved_digest)
        if plan.conflicts:
            raise plan.conflict_error()
        return plan


def steps_table(title: str, rows: Sequence[Sequence[object]]) -> Table:
    """Return the steps of a plan, one row each: what is done with what, from where and to where."""
    return new_table(title, "step", "what", "from", "to", rows=rows)


def change_steps(changes: Sequence[Change], version: int) -> list[Sequence[object]]:
    """Return the last steps of a plan: the objects that a version changes."""
    return [(kind, name, "", f"version {version}") for kind, name in change_rows(changes)]


@dataclass(frozen=True)
class MergeCommit(ABC):
    """The commit of a merge, with a new definition of the lakehouse that gets it (commit.Committable)."""

    #: What the messages of conflicts call it.
    noun: ClassVar[str]

    plan: MergePlan
    info: CommitInfo
    #: The definitions of combined tables and their paths, by key.
    combined: Mapping[str, tuple[str, TableDef]]

    @abstractmethod
    def definition(self, base: Snapshot) -> LakehouseDef:
        """Return the definition of the lakehouse after the merge into a version."""

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft:
        definition, path = self.definition(base), new_lakehouse_def_path()
        files = {path: definition.to_bytes(path)}
        files |= {place: table.to_bytes(place) for place, table in self.combined.values()}
        NewNames(base, self._entries).check(base)
        return Writes(self._entries, files, self.info, path, definition).draft(base, stamp)

    @property
    def _entries(self) -> dict[str, str | None]:
        return {**self.plan.entries, **{key: path for key, (path, _) in self.combined.items()}}

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check that commits in between do not conflict with the merge.

        Args:
            base: The version on which the merge was checked.
            latest: The version on which it is committed next.

        Raises:
            CommitConflictError: If a commit touched what is written, or what that presupposes.
            TableHasAnotherNameError: If a commit gave the id of a table another name.
            StorageError: If the versions cannot be read for now.
        """
        _check_untouched(base, latest, self._entries, self.noun)
        OneName(self.plan.table_ids, keys_changed_since(base))(latest)


def _check_untouched(base: Snapshot, latest: Snapshot, written: Mapping[str, str | None], what: str) -> None:
    keys = base.keys
    names = {key: name for key in written if (name := keys.decode(key)) is not None}
    relied = {keys.namespace_key(name.namespace) for key, name in names.items() if name.table is not None}
    dropped = {name.namespace for key, name in names.items() if name.table is None and written[key] is None}
    touched = []
    for change in diff_trees(base.files.nodes, base.root, latest.root):
        name = keys.decode(change.key)
        in_dropped = name is not None and name.namespace in dropped
        if change.key in written or change.key in relied or in_dropped:
            touched.append(f"{name}: a concurrent commit changed it")
    if touched:
        raise CommitConflictError(
            f"version {latest.version} changed what the {what} writes, as planned on version {base.version}: "
            f"{'; '.join(touched[:_MOST_NAMED])}; look at the new plan",
            conflicts=tuple(touched),
            base_version=base.version,
            latest_version=latest.version,
        )
