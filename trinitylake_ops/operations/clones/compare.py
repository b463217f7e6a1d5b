"""Compare a clone with its parent by three sides: the version that both share, and the latest one of each.

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
    opened_clone,
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

    def clone_io(self) -> StorageFileIO:
        """Return a reader of files of tables as the clone names them; those of the parent go through its storage."""
        return reading_io(self.clone.lake, [self.lake.storage])

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
    return definition_path(name, limit_bytes, derived_uuid(uuid.UUID(promotion_id), key))


def _uri(root: str, location: str | None) -> str | None:
    return None if location is None else to_uri(root, location)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedObject:
    """A namespace or table that differs: on which side, and what each side did: "added", "changed" or "removed"."""

    name: str
    namespace: str
    table: str | None
    changed_on: ChangedOn
    in_clone: str | None
    in_parent: str | None
    clone: TableDelta | None = None
    parent: TableDelta | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison(Document):
    """What differs between a clone and its parent, and what both changed to the same, as by a promotion.

    ``shared_version`` of the parent is the one that both are compared with, ``version`` its latest and
    ``clone_version`` the clone's.
    """

    name: str
    root: str
    shared_version: int
    version: int
    clone_version: int
    objects: tuple[ComparedObject, ...]
    cost: Cost

    def on(self, side: ChangedOn) -> tuple[ComparedObject, ...]:
        """Return the objects that changed on a side."""
        return tuple(one for one in self.objects if one.changed_on == side)

    @property
    def headline(self) -> str:
        """Return one sentence."""
        counts = (
            f"{len(self.on(ChangedOn.CLONE))} in the clone alone, {len(self.on(ChangedOn.PARENT))} in the parent alone,"
            f" {len(self.on(ChangedOn.BOTH))} in both"
        )
        same = f"; {len(self.on(ChangedOn.SAME))} became the same in both" if self.on(ChangedOn.SAME) else ""
        return f"Clone {self.name}: since version {self.shared_version}, changed are {counts}{same}"

    def table(self) -> Table:
        """Return one row for each object that differs between both."""
        columns = ("changed in", "object", "clone", "parent", "rows", "files", "bytes", "columns")
        differing = [one for one in self.objects if one.changed_on != ChangedOn.SAME]
        return new_table(self.headline, *columns, rows=map(_row, differing))


def compare(lake: Lakehouse, name: str, *, target_options: Mapping[str, str] | None = None) -> Comparison:
    """Compare a clone with its parent, ``lake``. Only reads; no file of data is read, and no manifest.

    Raises ExportNotFoundError, LakehouseNotFoundError if the clone is gone, InvalidInputError for another lakehouse
    there, LocationNotAllowedError, CorruptFileError, StorageError.
    """
    metered = MeteredLakehouse(lake)
    sides = MergeInputs.open(metered, name, target_options)
    states = sides.states
    compared = run_parallel(_Comparing(sides), states, sides.clone.lake.storage.concurrency)
    return Comparison(
        name=name,
        root=sides.clone.lake.root,
        shared_version=sides.base.version,
        version=sides.latest.version,
        clone_version=sides.clone.latest.version,
        objects=tuple(compared),
        cost=metered.cost(),
    )


class _Comparing:
    """Reads the definitions and metadata of an object on each side where it changed."""

    def __init__(self, sides: MergeInputs):
        self._definitions = sides.clone.lake.files.definitions
        self._io = sides.clone_io()

    def __call__(self, state: ObjectState) -> ComparedObject:
        name = state.name
        found = ComparedObject(
            name=str(name),
            namespace=name.namespace,
            table=name.table,
            changed_on=state.changed_on,
            in_clone=_kind(state.base, state.clone),
            in_parent=_kind(state.base, state.parent),
        )
        if name.table is None:
            return found
        base = self._read(state.base)
        clone = None if state.clone == state.base else table_delta(base, self._read(state.clone))
        parent = None if state.parent == state.base else table_delta(base, self._read(state.parent))
        return replace(found, clone=clone, parent=parent)

    def _read(self, uri: str | None) -> TableState | None:
        if uri is None:
            return None
        definition = self._definitions.table(uri)
        is_known = bool(iceberg_metadata(definition)) and definition.is_managed
        return TableState(definition, load_table_metadata(definition, self._io).metadata if is_known else None)


def _kind(base: str | None, now: str | None) -> str | None:
    if base == now:
        return None
    if base is None:
        return "added"
    return "removed" if now is None else "changed"


def _row(one: ComparedObject) -> tuple[object, ...]:
    name = one.name if one.table is not None else f"namespace {one.name}"
    shown = [delta for delta in (one.clone, one.parent) if delta is not None]
    pairs = [
        " / ".join(signed(getattr(delta, f"{what}_added"), getattr(delta, f"{what}_removed")) for delta in shown)
        for what in ("rows", "files", "bytes")
    ]
    columns = " / ".join("; ".join(delta.schema) for delta in shown if delta.schema)
    return (one.changed_on, name, one.in_clone, one.in_parent, *pairs, columns)
