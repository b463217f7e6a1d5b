"""Shows what changed in a clone and in its parent since the version that both share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trinitylake_ops.iceberg.metadata import load_table_metadata
from trinitylake_ops.operations.base import Cost, MeteredLakehouse
from trinitylake_ops.operations.clones.promoted import clone_io
from trinitylake_ops.operations.clones.three_way import ChangedOn, MergeInputs, ObjectState
from trinitylake_ops.operations.diff.versions import TableDelta, TableState, signed, table_delta
from trinitylake_ops.operations.gc.table_files import iceberg_metadata
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse


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
        self._io = clone_io(sides)

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
