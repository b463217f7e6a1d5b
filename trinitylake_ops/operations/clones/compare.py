"""Compare a clone with its parent, based on the version that both share and the latest version of each.

Locations are compared as URIs. Subtrees that both sides share are not read.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import CorruptFileError, InvalidInputError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.format.definitions import ExportRecord, ExportState, PromotionRecord
from trinitylake_ops.format.file_names import derived_uuid
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.metadata import load_table_metadata
from trinitylake_ops.operations.base import Cost, MeteredLakehouse
from trinitylake_ops.operations.clones.clone_records import (
    OpenedClone,
    check_is_clone_of,
    check_no_table_root,
    clone_record,
    open_clone,
    records_of_clone,
)
from trinitylake_ops.operations.diff.versions import TableDelta, TableState, signed, table_delta
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.transfer.names import definition_path
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.snapshot import Snapshot

_UNREADABLE = "an expired version of the clone may have been promoted and then rolled back in the parent"


class ChangedOn(StrEnum):
    """The side on which an object changed since the shared version."""

    CLONE = "clone"
    PARENT = "parent"
    BOTH = "both"
    #: Both sides made the same change, by a promotion or a refresh.
    SAME = "same"


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object that differs between versions, with the URIs of its definitions; None where it does not exist."""

    #: The key of the object in the tree.
    key: str
    #: The name of the object.
    name: ObjectName
    #: The definition in the last state that both sides had in common.
    base: str | None
    #: The definition in the latest version of the parent.
    parent: str | None
    #: The definition in the latest version of the clone.
    clone: str | None
    #: The side on which the object changed.
    changed_on: ChangedOn
    #: Why changes on both sides cannot be combined, if this is already clear from the history of the object.
    reason: str = ""


@dataclass(frozen=True)
class MergeInputs:
    """The open parent and clone, with the versions to compare."""

    #: The parent.
    lake: Lakehouse
    #: The clone's record in the parent.
    record: ExportRecord
    #: The clone.
    clone: OpenedClone
    #: The parent version that both sides share.
    base: Snapshot
    #: The latest version of the parent.
    latest: Snapshot

    @classmethod
    def open(cls, metered: MeteredLakehouse, name: str, target_options: Mapping[str, str] | None) -> MergeInputs:
        """Open a clone and the versions to compare.

        Args:
            metered: The parent, which counts requests.
            name: The name of the clone.
            target_options: Options of the clone's storage; None to derive them from the options of the parent.

        Raises:
            ExportNotFoundError: The clone does not exist.
            LakehouseNotFoundError: The clone's lakehouse does not exist.
            InvalidInputError: The clone is incomplete, or belongs to another lakehouse.
            LocationNotAllowedError: The root of the clone is outside the allowed roots.
            CorruptFileError: The parent no longer keeps the version that the clone shares with it.
            StorageError: A storage request failed.
        """
        latest = metered.lake.snapshot()
        record = clone_record(latest.definition, name)
        if record.state != ExportState.COMPLETE:
            raise InvalidInputError(f"clone {name!r} is incomplete; clone again to finish it, or drop it")
        check_no_table_root(latest.definition, metered.lake.root)
        clone = open_clone(metered, record, target_options)
        check_is_clone_of(metered.lake, clone)
        check_no_table_root(clone.latest.definition, clone.lake.root)
        kept_versions = {clone_record.version for clone_record in records_of_clone(latest.definition, record.clone_id)}
        if clone.parent.version not in kept_versions:
            raise CorruptFileError(
                f"clone {name!r} claims to share version {clone.parent.version} with this lakehouse, which keeps only"
                f" these versions for it: {', '.join(map(str, sorted(kept_versions)))}",
                path=clone.latest.definition_location,
                version=clone.latest.version,
            )
        base = metered.lake.snapshot(clone.parent.version, latest=latest)
        return cls(metered.lake, record, clone, base, latest)

    def clone_io(self) -> StorageFileIO:
        """Return a reader for table files referenced by the clone. Files of the parent are read through its storage."""
        return reading_io(self.clone.lake, [self.lake.storage])

    @cached_attribute
    def states(self) -> list[ObjectState]:
        """All objects of known types that differ from the shared version on at least one side, in key order."""
        in_parent = {change.key: change for change in self._parent_changes()}
        in_clone = {change.key: change for change in self._clone_changes()}
        states = []
        for key in sorted(in_parent.keys() | in_clone.keys()):
            name = self.latest.keys.decode(key)
            if name is not None:
                state = self._state(key, name, in_parent.get(key), in_clone.get(key))
                states += [] if state is None else [state]
        return states

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

    def _state(
        self, key: str, name: ObjectName, in_parent: KeyChange | None, in_clone: KeyChange | None
    ) -> ObjectState | None:
        change = in_parent or in_clone
        assert change is not None
        base = change.before
        parent = base if in_parent is None else in_parent.after
        clone = base if in_clone is None else in_clone.after
        if self.record.namespaces and name.namespace not in self.record.namespaces:
            if clone is None or in_clone is None:
                return None  # the namespace was not cloned
            base = None
        if parent == clone:
            return None if parent == base else ObjectState(key, name, base, parent, clone, ChangedOn.SAME)
        last = self._last_promotion(key, name, base)
        if parent in last.unreadable or (last.is_promoted and parent in last.parent):
            # The parent has the promoted state, so only the clone can have changed since.
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
        """Return the last state of an object that both sides had in common: the last promoted state, or the base."""
        last = _LastPromotion(base, frozenset([base]))
        for promotion in self.record.promotions:
            # Promotions before the last refresh are part of the base.
            if promotion.version <= self.base.version or not _may_promote(promotion, name, last):
                continue
            limit_bytes = self.latest.definition.file_path_max_size_bytes
            promoted = to_uri(self.lake.root, promoted_path(name, key, promotion.id, limit_bytes))
            try:
                clone = _uri(self.clone.lake.root, self._promoted_version(promotion.clone_version).entry(key))
            except (VersionExpiredError, VersionNotFoundError):
                last = replace(last, unreadable=last.unreadable | {promoted})
                continue
            if clone == last.clone:
                last = replace(last, unreadable=frozenset())
            elif clone is None:
                last = _LastPromotion(None, frozenset([None]), is_promoted=True)
            else:
                # A promotion keeps the location of a definition in the parent, but copies a definition in the clone.
                last = _LastPromotion(clone, last.unreadable | {promoted, clone}, is_promoted=True)
        return last

    def _promoted_version(self, version: int) -> Snapshot:
        """Return a promoted version of the clone. Raises VersionExpiredError or VersionNotFoundError."""
        if version not in self._promoted_versions:
            self._promoted_versions[version] = self.clone.lake.snapshot(version, latest=self.clone.latest)
        return self._promoted_versions[version]

    @cached_attribute
    def _promoted_versions(self) -> dict[int, Snapshot]:
        return {}


@dataclass(frozen=True, slots=True)
class _LastPromotion:
    """The last state of an object that both sides had in common."""

    #: The URI of the clone's definition.
    clone: str | None
    #: The URIs of the same definition in the parent.
    parent: frozenset[str | None]
    #: The URIs of definitions that later promotions of expired versions may have written.
    unreadable: frozenset[str] = frozenset()
    #: Whether a promotion copied this state to the parent.
    is_promoted: bool = False


def _may_promote(promotion: PromotionRecord, name: ObjectName, last: _LastPromotion) -> bool:
    """Whether a promotion would have included an object that the clone had changed.

    A promotion of selected tables also creates their namespaces in the parent.
    """
    if str(name) in promotion.kept:
        return False
    if not promotion.only or not {str(name), name.namespace}.isdisjoint(promotion.only):
        return True
    is_new_namespace = name.table is None and last.clone is None
    return is_new_namespace and any(selected.startswith(f"{name}.") for selected in promotion.only)


def promoted_path(name: ObjectName, key: str, promotion_id: str, limit_bytes: int) -> str:
    """Return the path of a definition that a promotion writes.

    Args:
        name: The name of the object.
        key: The key of the object.
        promotion_id: The id of the promotion.
        limit_bytes: The maximum length of a path.
    """
    return definition_path(name, limit_bytes, derived_uuid(uuid.UUID(promotion_id), key))


def _uri(root: str, location: str | None) -> str | None:
    return None if location is None else to_uri(root, location)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedObject:
    """A namespace or table that differs between a clone and its parent."""

    #: ``namespace`` or ``namespace.table``.
    name: str
    #: The namespace.
    namespace: str
    #: The table; None for a namespace.
    table: str | None
    #: The side on which the object changed.
    changed_on: ChangedOn
    #: The change in the clone: "added", "changed", "removed", or None.
    in_clone: str | None
    #: The change in the parent: "added", "changed", "removed", or None.
    in_parent: str | None
    #: The changes to the clone's table; None if there are none.
    clone: TableDelta | None = None
    #: The changes to the parent's table; None if there are none.
    parent: TableDelta | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Document):
    """The differences between a clone and its parent, and identical changes on both sides, such as promotions."""

    #: The name of the clone.
    name: str
    #: The root of the clone.
    root: str
    #: The parent version with which both sides are compared.
    shared_version: int
    #: The latest version of the parent.
    version: int
    #: The latest version of the clone.
    clone_version: int
    #: The objects that differ, in key order.
    objects: tuple[ComparedObject, ...]
    #: The requests and time that the comparison took.
    cost: Cost

    def on(self, side: ChangedOn) -> tuple[ComparedObject, ...]:
        """Return the objects that changed on a side."""
        return tuple(compared for compared in self.objects if compared.changed_on == side)

    @property
    def headline(self) -> str:
        """A one-sentence summary."""
        counts = (
            f"{len(self.on(ChangedOn.CLONE))} objects changed only in the clone, {len(self.on(ChangedOn.PARENT))} only"
            f" in the parent, {len(self.on(ChangedOn.BOTH))} in both"
        )
        same = f"; {len(self.on(ChangedOn.SAME))} changed alike in both" if self.on(ChangedOn.SAME) else ""
        return f"Clone {self.name}: since version {self.shared_version}, {counts}{same}"

    def table(self) -> Table:
        """Return one row for each object that differs between the clone and its parent."""
        columns = ("changed in", "object", "clone", "parent", "rows", "files", "bytes", "columns")
        different = [compared for compared in self.objects if compared.changed_on != ChangedOn.SAME]
        return new_table(self.headline, *columns, rows=map(_row, different))


def compare(lake: Lakehouse, name: str, *, target_options: Mapping[str, str] | None = None) -> Comparison:
    """Compare a clone with its parent. This reads metadata, but no manifests and no data.

    Args:
        lake: The parent.
        name: The name of the clone.
        target_options: Options of the clone's storage; None to derive them from the options of the parent.

    Raises:
        ExportNotFoundError: The clone does not exist.
        LakehouseNotFoundError: The clone's lakehouse does not exist.
        InvalidInputError: The clone is incomplete, or another lakehouse exists at its root.
        LocationNotAllowedError: The root of the clone is outside the allowed roots.
        CorruptFileError: A file cannot be read.
        StorageError: A storage request failed.
    """
    metered = MeteredLakehouse(lake)
    sides = MergeInputs.open(metered, name, target_options)
    states = sides.states
    compared = run_parallel(_ObjectComparison(sides), states, sides.clone.lake.storage.concurrency)
    return Comparison(
        name=name,
        root=sides.clone.lake.root,
        shared_version=sides.base.version,
        version=sides.latest.version,
        clone_version=sides.clone.latest.version,
        objects=tuple(compared),
        cost=metered.cost(),
    )


class _ObjectComparison:
    """Read the definition and metadata of an object on each side where it changed."""

    def __init__(self, sides: MergeInputs):
        self._definitions = sides.clone.lake.files.definitions
        self._io = sides.clone_io()

    def __call__(self, state: ObjectState) -> ComparedObject:
        name = state.name
        compared = ComparedObject(
            name=str(name),
            namespace=name.namespace,
            table=name.table,
            changed_on=state.changed_on,
            in_clone=_kind(state.base, state.clone),
            in_parent=_kind(state.base, state.parent),
        )
        if name.table is None:
            return compared
        base = self._read(state.base)
        clone = None if state.clone == state.base else table_delta(base, self._read(state.clone))
        parent = None if state.parent == state.base else table_delta(base, self._read(state.parent))
        return replace(compared, clone=clone, parent=parent)

    def _read(self, uri: str | None) -> TableState | None:
        if uri is None:
            return None
        definition = self._definitions.table(uri)
        has_metadata = bool(iceberg_metadata(definition)) and definition.is_managed
        return TableState(definition, load_table_metadata(definition, self._io).metadata if has_metadata else None)


def _kind(base: str | None, current: str | None) -> str | None:
    if base == current:
        return None
    if base is None:
        return "added"
    return "removed" if current is None else "changed"


def _row(compared: ComparedObject) -> tuple[object, ...]:
    name = compared.name if compared.table is not None else f"namespace {compared.name}"
    deltas = [delta for delta in (compared.clone, compared.parent) if delta is not None]
    counts = [
        " / ".join(signed(getattr(delta, f"{unit}_added"), getattr(delta, f"{unit}_removed")) for delta in deltas)
        for unit in ("rows", "files", "bytes")
    ]
    columns = " / ".join("; ".join(delta.schema) for delta in deltas if delta.schema)
    return (compared.changed_on, name, compared.in_clone, compared.in_parent, *counts, columns)
