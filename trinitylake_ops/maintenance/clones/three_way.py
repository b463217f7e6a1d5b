"""Compares a clone with its parent by three sides: the version that both share, and the latest one of each.

Locations are compared as URIs. Subtrees that two sides share are not read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trinitylake_ops.cached_attribute import cached_attribute
from trinitylake_ops.errors import CorruptFileError, InvalidInputError, VersionExpiredError
from trinitylake_ops.format.definitions import ExportRecord, ExportState, PromotionRecord
from trinitylake_ops.format.file_names import derived_uuid, new_namespace_path, new_table_path
from trinitylake_ops.format.locations import to_location, to_uri
from trinitylake_ops.format.nodes.keys import ObjectName
from trinitylake_ops.maintenance.clones.records import (
    OpenedClone,
    check_belongs_here,
    check_no_table_root,
    clone_record,
    opened_clone,
    records_of_clone,
)
from trinitylake_ops.maintenance.plans.cost import MeteredLakehouse
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.snapshot import Snapshot


class ChangedOn(StrEnum):
    """The side on which an object changed since the version that both share."""

    CLONE = "clone"
    PARENT = "parent"
    BOTH = "both"
    #: On both sides, to the same: it was promoted, or refreshed.
    SAME = "same"


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object that differs between sides: the URIs of its definitions, None where it does not exist."""

    key: str
    name: ObjectName
    base: str | None
    parent: str | None
    clone: str | None
    changed_on: ChangedOn


@dataclass(frozen=True)
class Sides:
    """Both lakehouses, opened: ``base`` is the parent's version that both share, and ``latest`` the parent's latest."""

    lake: Lakehouse
    record: ExportRecord
    clone: OpenedClone
    base: Snapshot
    latest: Snapshot

    @classmethod
    def open(cls, metered: MeteredLakehouse, name: str, target_options: Mapping[str, str] | None) -> Sides:
        """Open a clone beside its parent.

        Raises ExportNotFoundError, and InvalidInputError for a clone that was cut off or belongs to another lakehouse.
        Raises what :func:`opened_clone` raises.
        """
        latest = metered.lake.snapshot()
        record = clone_record(latest.definition, name)
        if record.state != ExportState.COMPLETE:
            raise InvalidInputError(f"clone {name!r} was cut off; clone once more to finish it, or drop it")
        check_no_table_root(latest.definition, metered.lake.root)
        clone = opened_clone(metered, record, target_options)
        check_belongs_here(metered.lake, clone)
        check_no_table_root(clone.latest.definition, clone.lake.root)
        kept = {one.version for one in records_of_clone(latest.definition, record.clone_id)}
        if clone.parent.version not in kept:
            raise CorruptFileError(
                f"clone {name!r} says that it shares version {clone.parent.version} with this lakehouse, which is kept"
                f" for none of its versions ({', '.join(map(str, sorted(kept)))})",
                path=clone.latest.definition_location,
                version=clone.latest.version,
            )
        base = metered.lake.snapshot(clone.parent.version, latest=latest)
        return cls(metered.lake, record, clone, base, latest)

    @cached_attribute
    def states(self) -> list[ObjectState]:
        """All objects that differ from the shared version on one side at least, by key.

        Objects of unknown type do not count.
        """
        here = {change.key: change for change in self._changes_here()}
        there = {change.key: change for change in self._changes_there()}
        found = []
        for key in sorted(here.keys() | there.keys()):
            name = self.latest.keys.decode(key)
            if name is not None:
                state = self._state(key, name, here.get(key), there.get(key))
                found += [] if state is None else [state]
        return found

    def _changes_here(self) -> list[KeyChange]:
        root = self.lake.root
        return [
            KeyChange(change.key, _uri(root, change.before), _uri(root, change.after))
            for change in diff_trees(self.lake.files.nodes, self.base.root, self.latest.root)
        ]

    def _changes_there(self) -> list[KeyChange]:
        lake = self.clone.lake
        shared = self.base.root.rebased(lambda location: to_uri(self.lake.root, location))
        return [
            KeyChange(change.key, change.before, _uri(lake.root, change.after))
            for change in diff_trees(lake.files.nodes, shared, self.clone.latest.root)
        ]

    def _state(self, key: str, name: ObjectName, here: KeyChange | None, there: KeyChange | None) -> ObjectState | None:
        known = here or there
        assert known is not None
        base = known.before
        parent = base if here is None else here.after
        clone = base if there is None else there.after
        if self.record.namespaces and name.namespace not in self.record.namespaces:
            if clone is None or there is None:
                return None  # the clone never had it
            base = None
        changed_on = self._changed_on(key, name, base, parent, clone)
        return None if changed_on is None else ObjectState(key, name, base, parent, clone, changed_on)

    def _changed_on(
        self, key: str, name: ObjectName, base: str | None, parent: str | None, clone: str | None
    ) -> ChangedOn | None:
        if parent == clone:
            return None if parent == base else ChangedOn.SAME
        if parent != base:
            promotion = self._promotion_of(key, name, parent)
            if promotion is not None:  # the parent has what the clone gave it, and only the clone may have gone on
                return ChangedOn.SAME if self._is_as_promoted(promotion, key, clone) else ChangedOn.CLONE
        if clone == base:
            return ChangedOn.PARENT
        return ChangedOn.CLONE if parent == base else ChangedOn.BOTH

    def _promotion_of(self, key: str, name: ObjectName, location: str | None) -> PromotionRecord | None:
        """Return the promotion that wrote a definition of the parent, None for one of anybody else."""
        if location is None:
            return None
        path = to_location(self.lake.root, location)
        for promotion in reversed(self.record.promotions):
            if path == promoted_path(name, key, promotion.id, self.latest.definition.file_path_max_size_bytes):
                return promotion
        return None

    def _is_as_promoted(self, promotion: PromotionRecord, key: str, clone: str | None) -> bool:
        """Whether the clone has what it had when it was promoted.

        Where that version expired, nobody knows. It counts as changed since then: promoting it once more does no harm.
        """
        try:
            location = self.clone.lake.snapshot(promotion.clone_version, latest=self.clone.latest).entry(key)
        except VersionExpiredError:
            return False
        return _uri(self.clone.lake.root, location) == clone


def promoted_path(name: ObjectName, key: str, promotion_id: str, limit_bytes: int) -> str:
    """Return the path of a definition that a promotion writes."""
    identifier = derived_uuid(uuid.UUID(promotion_id), key)
    if name.table is None:
        return new_namespace_path(name.namespace, limit_bytes, identifier)
    return new_table_path(name.namespace, name.table, limit_bytes, identifier)


def _uri(root: str, location: str | None) -> str | None:
    return None if location is None else to_uri(root, location)
