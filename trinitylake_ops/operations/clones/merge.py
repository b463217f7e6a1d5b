"""Merge the changes made on one side of a clone into the other side, unless they conflict.

``ours`` is the side that receives the changes, and ``theirs`` is the side on which they were made.
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

_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Conflict:
    """An object whose changes on both sides conflict."""

    #: ``namespace`` or ``namespace.table``.
    name: str
    #: The change on each side, or why the changes cannot be combined.
    reason: str


@dataclass(frozen=True, slots=True)
class Choices:
    """The sides chosen for conflicts. The name of a namespace applies to all conflicts in it."""

    #: Names for which our side is kept, as ``namespace`` or ``namespace.table``.
    ours: frozenset[str]
    #: Names for which their side is taken.
    theirs: frozenset[str]

    @classmethod
    def of(cls, ours: Collection[str], theirs: Collection[str]) -> Choices:
        """Build the choices from the names that the caller passed.

        Args:
            ours: Names for which our side is kept.
            theirs: Names for which their side is taken.

        Raises:
            InvalidInputError: A name is chosen from both sides.
        """
        if both := sorted(set(ours) & set(theirs)):
            raise InvalidInputError(f"{both[0]!r} is chosen from both sides; choose one")
        return cls(frozenset(ours), frozenset(theirs))

    def side_of(self, name: ObjectName) -> str | None:
        """Return "ours", "theirs" or None. The choice for a table overrides the choice for its namespace."""
        for text in (str(name), name.namespace):
            if text in self.ours:
                return "ours"
            if text in self.theirs:
                return "theirs"
        return None


@dataclass
class Merge:
    """The result of a merge: the changes to make, and the conflicts that are not resolved yet."""

    #: The name of the clone.
    name: str
    #: The latest version of the side that receives the changes.
    into: Snapshot
    #: The latest version of the side on which the changes were made.
    theirs: Snapshot
    #: All objects that differ.
    states: Sequence[ObjectState]
    #: The sides chosen for conflicts.
    choices: Choices
    #: Whether the parent receives the changes.
    into_parent: bool
    #: Finds the files that the clone appended to a table that both sides changed.
    appends: Callable[[ObjectState], Appends | str]
    #: The URI of each new definition by key; None for an object to drop.
    changes: dict[str, str | None] = field(default_factory=dict)
    #: Tables whose appended files are combined.
    appended: list[Appends] = field(default_factory=list)
    #: Conflicts for which no side was chosen.
    conflicts: list[Conflict] = field(default_factory=list)
    #: The names of conflicts for which "ours" was chosen.
    kept: list[str] = field(default_factory=list)
    #: The ids of the tables in ``changes`` by key; None for tables to drop.
    table_ids: dict[str, str | None] = field(default_factory=dict)
    _names_in_conflict: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        sides: MergeInputs,
        selected: Sequence[ObjectState],
        choices: Choices,
        appends: Callable[[ObjectState], Appends | str],
        *,
        into_parent: bool,
    ) -> Merge:
        """Merge the changes of selected objects.

        Args:
            sides: The clone and its parent.
            selected: The objects to merge, from ``sides.states``.
            choices: The sides chosen for conflicts.
            appends: Finds the files that the clone appended to a table that both sides changed.
            into_parent: Whether the parent receives the changes.

        Raises:
            InvalidInputError: A choice refers to an object without a conflict.
            TableHasAnotherNameError: The choices would leave a table with two names.
        """
        states = sides.states
        into, theirs = sides.latest, sides.clone.latest
        if not into_parent:
            into, theirs = theirs, into
        merge = cls(sides.record.name, into, theirs, states, choices, into_parent, appends)
        for state in selected:
            merge._merge_object(state)
        by_key = {state.key: state for state in states}
        for state in selected:
            if state.name.table is not None:
                merge._check_namespace(state, by_key)
        for state in selected:
            if state.name.table is None and merge.changes.get(state.key, "") is None:
                merge._check_empty(state)
        unknown = sorted((choices.ours | choices.theirs) - merge._names_in_conflict)
        if not merge.conflicts:  # the names depend on how conflicts are resolved
            merge._check_table_ids()
        # If nothing is left to do, the same choices may already have been applied. Repeating them is not an error.
        if unknown and (merge.changes or merge.appended or merge.conflicts):
            raise InvalidInputError(f"{unknown[0]!r} has no conflict to resolve; leave it out")
        for text in unknown:
            if not any(_names_object(text, version) for version in (into, theirs, sides.base)):
                raise InvalidInputError(f"{text!r} is not a namespace or table of either side; leave it out")
        return merge

    def check_names(self) -> None:
        """Raise ObjectExistsError if a table and a view would have the same name, unless conflicts are unresolved."""
        if self.conflicts:
            return
        entries: dict[str, Entry | None] = dict(self.changes)
        for key, location in self.changes.items():
            name = self.theirs.object_name(key)
            if location is not None and name.table is None:
                # The new definition may not be written yet. It will have the same properties.
                entries[key] = self.theirs.namespace(name.namespace)
        NewNames(self.into, entries).check(self.into)

    def _merge_object(self, state: ObjectState) -> None:
        source = ChangedOn.CLONE if self.into_parent else ChangedOn.PARENT
        if state.changed_on == source:
            self.changes[state.key] = self._their_state(state)
        elif state.changed_on == ChangedOn.BOTH:
            # A chosen side applies to the whole table, so appends to the table are not combined.
            has_choice = self.choices.side_of(state.name) is not None
            appends = state.reason if has_choice or state.reason else self.appends(state)
            if isinstance(appends, str):
                self._resolve(state, appends)
            elif appends.files:
                self.appended.append(appends)
            elif not self.into_parent:  # the parent already has all files of the clone
                self.changes[state.key] = state.parent

    def _resolve(self, state: ObjectState, cause: str) -> None:
        parent, clone = _verb(state.base, state.parent), _verb(state.base, state.clone)
        reason = f"the parent {parent} it, clone {self.name} {clone} it"
        if self._takes_theirs(state.name, f"{reason} ({cause})" if cause else reason):
            self.changes[state.key] = self._their_state(state)

    def _their_state(self, state: ObjectState) -> str | None:
        return state.clone if self.into_parent else state.parent

    def _takes_theirs(self, name: ObjectName, reason: str) -> bool:
        """Whether "theirs" was chosen for a conflict. Without a choice, the conflict is recorded as unresolved."""
        self._names_in_conflict |= {str(name), name.namespace}
        side = self.choices.side_of(name)
        if side is None:
            self.conflicts.append(Conflict(str(name), reason))
        elif side == "ours":
            self.kept.append(str(name))
        return side == "theirs"

    def _check_namespace(self, state: ObjectState, by_key: Mapping[str, ObjectState]) -> None:
        """Add the namespace of a merged table if it is new on their side; otherwise, a missing one is a conflict."""
        if self.changes.get(state.key) is None:
            return
        key = self.into.keys.namespace_key(state.name.namespace)
        existing = self.changes[key] if key in self.changes else self.into.entry(key)
        if existing is not None:
            return
        their_namespace = by_key.get(key)
        is_new = (
            their_namespace is not None
            and their_namespace.base is None
            and self._their_state(their_namespace) is not None
        )
        ours, theirs = side_labels(self.name, into_parent=self.into_parent)
        if is_new or self._takes_theirs(state.name, f"{ours} dropped its namespace, {theirs} has it new or changed"):
            location = self._their_state(their_namespace) if their_namespace is not None else None
            assert location is not None, "the namespace of their table exists on their side"
            self.changes[key] = location
        else:
            del self.changes[state.key]

    def _check_table_ids(self) -> None:
        """Raise TableHasAnotherNameError if a table would get a second name.

        The other name differs between the two sides, so it is among the states.
        """
        states = [state for state in self.states if state.name.table is not None]
        ids = table_ids(self.theirs, {state.key: self.changes.get(state.key) for state in states})
        present = table_ids(self.into, {state.key: self.into.entry(state.key) for state in states} if ids else {})
        self.table_ids = {state.key: ids.get(state.key) for state in states if state.key in self.changes}

        def keys_of(_: Snapshot, table_id: str) -> list[str]:
            return [key for key, present_id in present.items() if present_id == table_id]

        OneName(self.table_ids, keys_of)(self.into)

    def _check_empty(self, state: ObjectState) -> None:
        """Drop the remaining tables of a dropped namespace if "theirs" was chosen; otherwise, keep the namespace."""
        namespace = state.name.namespace
        remaining = {
            key: table
            for table in self.into.tables(namespace)
            if self.changes.get(key := self.into.keys.table_key(namespace, table), "") is not None
        }
        if not remaining:
            return
        names = ", ".join(sorted(remaining.values())[:_MAX_NAMES]) + (", ..." if len(remaining) > _MAX_NAMES else "")
        ours, theirs = side_labels(self.name, into_parent=self.into_parent)
        if self._takes_theirs(state.name, f"{theirs} dropped it, {ours} has new or changed tables in it ({names})"):
            self.changes |= dict.fromkeys(remaining)
        else:
            del self.changes[state.key]


def _names_object(text: str, version: Snapshot) -> bool:
    """Whether a text is a ``namespace`` or ``namespace.table`` in a version. Names can contain dots."""
    names = [(text, None), *((text[:at], text[at + 1 :]) for at, character in enumerate(text) if character == ".")]
    for namespace, table in names:
        with contextlib.suppress(InvalidNameError):
            if version.has_namespace(namespace) if table is None else version.has_table(namespace, table):
                return True
    return False


def _verb(base: str | None, current: str | None) -> str:
    if base is None:
        return "created"
    return "dropped" if current is None else "altered"


def side_labels(name: str, *, into_parent: bool) -> tuple[str, str]:
    """Return the labels used in messages for "ours", the side that receives the changes, and for "theirs".

    Args:
        name: The name of the clone.
        into_parent: Whether the parent receives the changes.
    """
    parent, clone = "the parent", f"clone {name}"
    return (parent, clone) if into_parent else (clone, parent)


def count_of(conflicts: Sequence[Conflict]) -> str:
    """Return the number of conflicts as text."""
    return "1 conflict" if len(conflicts) == 1 else f"{len(conflicts)} conflicts"


class MergePlan(Plan):
    """Base of plans that merge one side of a clone into the other. Subclasses declare the field order."""

    into_parent: ClassVar[bool]
    base_version: int
    name: str
    changes: tuple[Change, ...]
    conflicts: tuple[Conflict, ...]
    appended: tuple[Appends, ...]
    #: The ids of changed tables by key; None for tables to drop.
    table_ids: Mapping[str, str | None]
    #: The new locations of objects by key; None for objects to drop. Combined tables are not included.
    entries: Mapping[str, str | None]

    def how_to_choose(self, option: str = "--") -> str:
        """Return which options resolve the first conflict. ``option`` is the prefix of an option name."""
        ours, theirs = side_labels(self.name, into_parent=self.into_parent)
        name = self.conflicts[0].name
        return f"{option}ours {name} keeps what {ours} has, {option}theirs {name} takes what {theirs} has"

    def conflict_error(self) -> CommitConflictError:
        """Return the error for unresolved conflicts, which lists the conflicts and explains how to choose a side."""
        texts = tuple(f"{conflict.name}: {conflict.reason}" for conflict in self.conflicts)
        text = "; ".join(texts[:_MAX_NAMES]) + ("; ..." if len(texts) > _MAX_NAMES else "")
        return CommitConflictError(
            f"{count_of(self.conflicts)}, nothing was changed: {text}; choose a side for each, for example:"
            f" {self.how_to_choose()}",
            conflicts=texts,
            base_version=self.base_version,
            latest_version=self.base_version,
        )

    @abstractmethod
    def steps(self) -> Table:
        """Return the steps of the merge, one row each: the files to write, then the objects that change."""

    @property
    def is_empty(self) -> bool:
        """Whether there are no changes on their side that are missing on our side."""
        return not self.changes and not self.conflicts

    def rows(self) -> list[Sequence[object]]:
        """Return one row for each namespace and table that would change, and for each conflict."""
        combined = {
            str(appends.name): f"{len(appends.files)} files of the clone are appended" for appends in self.appended
        }
        changed: list[Sequence[object]] = [(*row, combined.get(str(row[1]), "")) for row in change_rows(self.changes)]
        return changed + [("conflict", conflict.name, conflict.reason) for conflict in self.conflicts]


MergePlanT = TypeVar("MergePlanT", bound=MergePlan)


@dataclass(frozen=True, kw_only=True)
class MergeOperation(PlannedOperation[MergePlanT, ReportT]):
    """Base of operations that merge one side of a clone into the other."""

    #: The name of the clone.
    name: str
    #: The sides chosen for conflicts.
    choices: Choices
    #: Options of the clone's storage; None to derive them from the options of the parent.
    target_options: Mapping[str, str] | None

    @abstractmethod
    def plan_for(self, sides: MergeInputs) -> MergePlanT:
        """Make a plan for the opened sides."""

    def plan(self) -> MergePlanT:
        """Make a plan based on the latest versions of both sides. See :meth:`plan_for` for the errors."""
        return self.plan_for(self.open_sides(MeteredLakehouse(self.lake)))

    def open_sides(self, metered: MeteredLakehouse) -> MergeInputs:
        """Open both sides at their latest versions. See :meth:`MergeInputs.open` for the errors."""
        return MergeInputs.open(metered, self.name, self.target_options)

    def executable_plan(self, plan: MergePlanT, approved_digest: str | None, sides: MergeInputs) -> MergePlanT:
        """Return the plan to execute, or a new plan if a digest was approved.

        Args:
            plan: The plan.
            approved_digest: The digest of the approved plan, or None.
            sides: The clone and its parent.

        Raises:
            PlanChangedError: The new plan does not have the approved digest.
            CommitConflictError: The plan has unresolved conflicts.
        """
        if approved_digest is not None:
            plan = self.plan_for(sides)
            plan.check_approved(approved_digest)
        if plan.conflicts:
            raise plan.conflict_error()
        return plan


def steps_table(title: str, rows: Sequence[Sequence[object]]) -> Table:
    """Return the steps of a plan as a table with one row per step: the step, the object, the source and the target.

    Args:
        title: The title.
        rows: The rows.
    """
    return new_table(title, "step", "what", "from", "to", rows=rows)


def change_steps(changes: Sequence[Change], version: int) -> list[Sequence[object]]:
    """Return the last steps of a plan: the objects that the commit changes.

    Args:
        changes: The changes.
        version: The version that the commit creates.
    """
    return [(kind, name, "", f"version {version}") for kind, name in change_rows(changes)]


@dataclass(frozen=True)
class MergeCommit(ABC):
    """Base of merge commits, which also replace the lakehouse definition (commit.Committable)."""

    #: The name of this kind of merge in conflict messages.
    noun: ClassVar[str]

    plan: MergePlan
    info: CommitInfo
    #: The paths and definitions of combined tables, by key.
    combined: Mapping[str, tuple[str, TableDef]]

    @abstractmethod
    def definition(self, base: Snapshot) -> LakehouseDef:
        """Return the lakehouse definition to commit on a base."""

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft:
        definition, path = self.definition(base), new_lakehouse_def_path()
        files = {path: definition.to_bytes(path)}
        files |= {table_path: table.to_bytes(table_path) for table_path, table in self.combined.values()}
        NewNames(base, self._entries).check(base)
        return Writes(self._entries, files, self.info, path, definition).draft(base, stamp)

    @property
    def _entries(self) -> dict[str, str | None]:
        return {**self.plan.entries, **{key: path for key, (path, _) in self.combined.items()}}

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Check that intermediate commits do not conflict with the merge.

        Args:
            base: The version for which the merge was checked.
            latest: The version on which the merge is committed next.

        Raises:
            CommitConflictError: A commit changed an object that the merge writes or depends on.
            TableHasAnotherNameError: A commit renamed a merged table.
            StorageError: A storage request failed.
        """
        _check_untouched(base, latest, self._entries, self.noun)
        OneName(self.plan.table_ids, keys_changed_since(base))(latest)


def _check_untouched(base: Snapshot, latest: Snapshot, written: Mapping[str, str | None], noun: str) -> None:
    keys = base.keys
    names = {key: name for key in written if (name := keys.decode(key)) is not None}
    namespace_keys = {keys.namespace_key(name.namespace) for key, name in names.items() if name.table is not None}
    dropped = {name.namespace for key, name in names.items() if name.table is None and written[key] is None}
    touched = []
    for change in diff_trees(base.files.nodes, base.root, latest.root):
        name = keys.decode(change.key)
        is_in_dropped = name is not None and name.namespace in dropped
        if change.key in written or change.key in namespace_keys or is_in_dropped:
            touched.append(f"{name}: changed by a concurrent commit")
    if touched:
        raise CommitConflictError(
            f"the {noun} planned on version {base.version} conflicts with version {latest.version}: "
            f"{'; '.join(touched[:_MAX_NAMES])}; review the new plan",
            conflicts=tuple(touched),
            base_version=base.version,
            latest_version=latest.version,
        )
