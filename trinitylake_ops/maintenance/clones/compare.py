"""Shows what changed in a clone and in its parent since the version that both share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot as TableSnapshot

from trinitylake_ops.format.definitions import Column, TableDef
from trinitylake_ops.maintenance.clones.promoted import clone_io
from trinitylake_ops.maintenance.clones.three_way import ChangedOn, ObjectState, Sides
from trinitylake_ops.maintenance.plans.cost import Cost, MeteredLakehouse
from trinitylake_ops.maintenance.plans.document import Document, Table, new_table
from trinitylake_ops.maintenance.reach.table_files import iceberg_metadata
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.files.metadata import load_table_metadata
from trinitylake_ops.transaction.lakehouse import Lakehouse


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDelta:
    """How one side changed a table: rows, data files and bytes that came and went, and columns.

    Numbers are those of the snapshots' summaries, None where those in between are gone. ``schema`` has a text for each
    column that differs.
    """

    rows_added: int | None = None
    rows_removed: int | None = None
    files_added: int | None = None
    files_removed: int | None = None
    bytes_added: int | None = None
    bytes_removed: int | None = None
    schema: tuple[str, ...] = ()


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
    """What differs between a clone and its parent.

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
        return f"Clone {self.name}: since version {self.shared_version}, changed are {counts}"

    def table(self) -> Table:
        """Return one row for each object that differs."""
        columns = ("changed in", "object", "clone", "parent", "rows", "files", "bytes", "columns")
        return new_table(self.headline, *columns, rows=[_row(one) for one in self.objects])


def compare(lake: Lakehouse, name: str, *, target_options: Mapping[str, str] | None = None) -> Comparison:
    """Compare a clone with its parent, ``lake``. Only reads; no file of data is read, and no manifest.

    Raises ExportNotFoundError, LakehouseNotFoundError if the clone is gone, InvalidInputError for another lakehouse
    there, LocationNotAllowedError, CorruptFileError, StorageError.
    """
    metered = MeteredLakehouse(lake)
    sides = Sides.open(metered, name, target_options)
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

    def __init__(self, sides: Sides):
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
        clone = None if state.clone == state.base else _delta(base, self._read(state.clone))
        parent = None if state.parent == state.base else _delta(base, self._read(state.parent))
        return replace(found, clone=clone, parent=parent)

    def _read(self, uri: str | None) -> _TableSide | None:
        if uri is None:
            return None
        definition = self._definitions.table(uri)
        is_known = bool(iceberg_metadata(definition)) and definition.is_managed
        return _TableSide(definition, load_table_metadata(definition, self._io).metadata if is_known else None)


@dataclass(frozen=True, slots=True)
class _TableSide:
    definition: TableDef
    metadata: TableMetadata | None

    @property
    def totals(self) -> tuple[int, int, int]:
        """Rows, data files and bytes of the current snapshot."""
        current = None if self.metadata is None else self.metadata.current_snapshot()
        return (
            (0, 0, 0) if current is None else _numbers(current, "total-records", "total-data-files", "total-files-size")
        )


def _delta(base: _TableSide | None, side: _TableSide | None) -> TableDelta:
    added, removed = _counted(base, side)
    before = () if base is None else base.definition.schema.columns
    after = () if side is None else side.definition.schema.columns
    rows, files, size = added or (None, None, None)
    rows_gone, files_gone, size_gone = removed or (None, None, None)
    return TableDelta(
        rows_added=rows,
        rows_removed=rows_gone,
        files_added=files,
        files_removed=files_gone,
        bytes_added=size,
        bytes_removed=size_gone,
        schema=() if side is None or base is None else tuple(schema_changes(before, after)),
    )


_Counts = tuple[int, int, int]


def _counted(base: _TableSide | None, side: _TableSide | None) -> tuple[_Counts | None, _Counts | None]:
    """Return what came and what went."""
    if base is None or side is None or base.definition.id != side.definition.id:
        nothing = (0, 0, 0)
        return (nothing if side is None else side.totals), (nothing if base is None else base.totals)
    between = _between(base.metadata, side.metadata)
    if between is None:
        return None, None
    added = [_numbers(one, "added-records", "added-data-files", "added-files-size") for one in between]
    removed = [_numbers(one, "deleted-records", "deleted-data-files", "removed-files-size") for one in between]
    return _sum(added), _sum(removed)


def _between(base: TableMetadata | None, side: TableMetadata | None) -> list[TableSnapshot] | None:
    """Return the snapshots after that of ``base`` up to that of ``side``, None where some are gone."""
    end = None if base is None else base.current_snapshot_id
    found: list[TableSnapshot] = []
    number = None if side is None else side.current_snapshot_id
    seen: set[int] = set()
    while number is not None and number != end and side is not None:
        snapshot = side.snapshot_by_id(number)
        if snapshot is None or number in seen:
            return None
        seen.add(number)
        found.append(snapshot)
        number = snapshot.parent_snapshot_id
    return found if number == end else None


def _numbers(snapshot: TableSnapshot, *names: str) -> Any:
    """Return entries of a summary as numbers; what another writer left out, or wrote as no number, counts as 0."""
    summary = snapshot.summary
    texts = [str(summary.get(name, "0") if summary is not None else "0") for name in names]
    return tuple(int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else 0 for text in texts)


def _sum(counts: Sequence[_Counts]) -> _Counts:
    rows, files, size = (sum(column) for column in zip(*counts, strict=True)) if counts else (0, 0, 0)
    return rows, files, size


def schema_changes(before: Sequence[Column], after: Sequence[Column]) -> list[str]:
    """Return a text for each column that was added, removed, renamed or changed, by its id."""
    old, new = ({column.id: column for column in columns} for columns in (before, after))
    found = [f"- {old[number].name}" for number in old if number not in new]
    for number, column in new.items():
        was = old.get(number)
        if was is None:
            found.append(f"+ {column.name} {column.type.name}")
        elif was != column:
            found.append(f"{was.name} {was.type.name} -> {column.name} {column.type.name}")
    return found


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
        " / ".join(_signed(getattr(delta, f"{what}_added"), getattr(delta, f"{what}_removed")) for delta in shown)
        for what in ("rows", "files", "bytes")
    ]
    columns = " / ".join("; ".join(delta.schema) for delta in shown if delta.schema)
    return (one.changed_on, name, one.in_clone, one.in_parent, *pairs, columns)


def _signed(added: int | None, removed: int | None) -> str:
    return "?" if added is None or removed is None else f"+{added} -{removed}"
