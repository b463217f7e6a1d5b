"""Compares a clone with its parent by three sides: the version that both share, and the latest one of each.

Locations are compared as URIs. Subtrees that two sides share are not read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import CorruptFileError, InvalidInputError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.format.definitions import ExportRecord, ExportState, PromotionRecord
from trinitylake_ops.format.file_names import derived_uuid, new_namespace_path, new_table_path
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.operations.base import MeteredLakehouse
from trinitylake_ops.operations.clones.records import (
    OpenedClone,
    check_is_clone_of,
    check_no_table_root,
    clone_record,
    opened_clone,
    records_of_clone,
)
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.snapshot import Snapshot

_UNREADABLE = "an expired version of the clone may have been promoted and undone in the parent"


class ChangedOn(StrEnum):
    """The side on which an object changed since the version that both share."""

    CLONE = "clone"
    PARENT = "parent"
    BOTH = "both"
    #: On both sides, to the same: it was promoted, or refreshed.
    SAME = "same"


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object that differs between sides: the URIs of its definitions, None where it does not exist.

    ``base`` is that of the last state that both sides had. ``reason`` says why an object that changed on both sides
    cannot be combined, where that is known from its history.
    """

    key: str
    name: ObjectName
    base: str | None
    parent: str | None
    clone: str | None
    changed_on: ChangedOn
    reason: str = ""


@dataclass(frozen=True)
class MergeInputs:
    """Both lakehouses, opened: ``base`` is the parent's version that both share, and ``latest`` the parent's latest."""

    lake: Lakehouse
    record: ExportRecord
    clone: OpenedClone
    base: Snapshot
    latest: Snapshot

    @classmethod
    def open(cls, metered: MeteredLakehouse, name: str, target_options: Mapping[str, str] | None) -> MergeInputs:
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
        check_is_clone_of(metered.lake, clone)
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
        here = {change.key: change for change in self._parent_changes()}
        there = {change.key: change for change in self._clone_changes()}
        found = []
        for key in sorted(here.keys() | there.keys()):
            name = self.latest.keys.decode(key)
            if name is not None:
                state = self._state(key, name, here.get(key), there.get(key))
                found += [] if state is None else [state]
        return found

    def _parent_changes(self) -> list[KeyChange]:
        root = self.lake.root
        return [
            KeyChange(change.key, _uri(root, change.before), _uri(root, change.after))
            for change in diff_trees(self.lake.files.nodes, self.base.root, self.latest.root)
        ]

    def _clone_changes(self) -> list[KeyChange]:
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
        if parent == clone:
            return None if parent == base else ObjectState(key, name, base, parent, clone, ChangedOn.SAME)
        last = self._last_promotion(key, name, base)
        if parent in last.unreadable or (last.is_promoted and parent in last.parent):
            # The parent has what the clone brought, and only the clone may have changed since.
            is_same = clone == last.clone and parent not in last.unreadable
            return ObjectState(key, name, base, parent, clone, ChangedOn.SAME if is_same else ChangedOn.CLONE)
        if clone == last.clone:
            return ObjectState(key, name, last.clone, parent, clone, ChangedOn.PARENT)
        if parent not in last.parent:
            return ObjectState(key, name, last.clone, parent, clone, ChangedOn.BOTH)
        if last.unreadable:
            return ObjectState(key, name, last.clone, parent, clone, ChangedOn.BOTH, _UNREADABLE)
        return ObjectState(key, name, base, parent, clone, ChangedOn.CLONE)

    def _last_promotion(self, key: str, name: ObjectName, base: str | None) -> _LastPromotion:
        """Return the last state of an object that both sides had: as the last promotion brought it, or the base."""
        last = _LastPromotion(base, frozenset([base]))
        for promotion in self.record.promotions:
            # A refresh has settled all that was promoted before.
            if promotion.version <= self.base.version or not _may_bring(promotion, name, last):
                continue
            limit_bytes = self.latest.definition.file_path_max_size_bytes
            brought = to_uri(self.lake.root, promoted_path(name, key, promotion.id, limit_bytes))
            try:
                clone = _uri(self.clone.lake.root, self._promoted_version(promotion.clone_version).entry(key))
            except (VersionExpiredError, VersionNotFoundError):
                last = replace(last, unreadable=last.unreadable | {brought})
                continue
            if clone == last.clone:
                last = replace(last, unreadable=frozenset())
            elif clone is None:
                last = _LastPromotion(None, frozenset([None]), is_promoted=True)
            else:
                # A definition of the parent's own is named as it is, any other is a copy.
                last = _LastPromotion(clone, last.unreadable | {brought, clone}, is_promoted=True)
        return last

    def _promoted_version(self, version: int) -> Snapshot:
        """Return a version of the clone that was promoted. Raises VersionExpiredError, VersionNotFoundError."""
        if version not in self._promoted_versions:
            self._promoted_versions[version] = self.clone.lake.snapshot(version, latest=self.clone.latest)
        return self._promoted_versions[version]

    @cached_attribute
    def _promoted_versions(self) -> dict[int, Snapshot]:
        return {}


@dataclass(frozen=True, slots=True)
class _LastPromotion:
    """The last state of an object that both sides had.

    ``clone`` is the URI of the clone's definition, and ``parent`` has the URIs of the same definition in the parent.
    ``unreadable`` has the URIs of definitions that later promotions may have written, of versions of the clone that are
    gone.
    """

    clone: str | None
    parent: frozenset[str | None]
    unreadable: frozenset[str] = frozenset()
    is_promoted: bool = False


def _may_bring(promotion: PromotionRecord, name: ObjectName, last: _LastPromotion) -> bool:
    """Whether a promotion brought an object, if the clone had changed it. One that is limited brings new namespaces."""
    if str(name) in promotion.kept:
        return False
    if not promotion.only or not {str(name), name.namespace}.isdisjoint(promotion.only):
        return True
    is_new_namespace = name.table is None and last.clone is None
    return is_new_namespace and any(one.startswith(f"{name}.") for one in promotion.only)


def promoted_path(name: ObjectName, key: str, promotion_id: str, limit_bytes: int) -> str:
    """Return the path of a definition that a promotion writes."""
    identifier = derived_uuid(uuid.UUID(promotion_id), key)
    if name.table is None:
        return new_namespace_path(name.namespace, limit_bytes, identifier)
    return new_table_path(name.namespace, name.table, limit_bytes, identifier)


def _uri(root: str, location: str | None) -> str | None:
    return None if location is None else to_uri(root, location)
