"""The history of one table: the versions that changed it, and what each did to its rows, files and columns.

Nothing but definitions and Iceberg metadata is read, no manifest and no data file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trinitylake_ops.errors import CorruptFileError, FileMissingError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.format.definitions import Column, Schema, TableDef
from trinitylake_ops.tables.catalog.catalog import catalog_at
from trinitylake_ops.tables.files.metadata import table_metadata
from trinitylake_ops.tables.files.totals import totals_of
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.history import VersionInfo, version_infos
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableState:
    """A table at one version. Totals are None where its writer did not count them, or its metadata cannot be read."""

    definition: TableDef
    rows: int | None = None
    data_files: int | None = None
    size_bytes: int | None = None
    snapshot_id: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVersion:
    """A version that changed a table. ``before`` and ``after`` are None where there is no table.

    ``since`` is the version that it is compared with: the one before it, as far as that can still be read.
    """

    info: VersionInfo
    since: int
    before: TableState | None
    after: TableState | None

    @property
    def kind(self) -> Literal["added", "changed", "removed"]:
        """What happened to the table."""
        if self.before is None:
            return "added"
        return "removed" if self.after is None else "changed"

    @property
    def row_delta(self) -> int | None:
        """How many rows more the table has than before, None where one of both was not counted."""
        rows = [0 if state is None else state.rows for state in (self.before, self.after)]
        return None if rows[0] is None or rows[1] is None else rows[1] - rows[0]

    @property
    def columns(self) -> tuple[str, ...]:
        """What changed in its columns, one line each."""
        if self.before is None or self.after is None:
            return ()
        return column_changes(self.before.definition.schema, self.after.definition.schema)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableHistory:
    """The versions that changed a table, newest first. ``looked_back_to`` is the oldest one that was compared."""

    versions: tuple[TableVersion, ...]
    looked_back_to: int


def table_history(
    lake: Lakehouse, namespace: str, table: str, *, head: Snapshot | None = None, most: int = 10, look_back: int = 50
) -> TableHistory:
    """Return the newest versions that changed a table, at most ``most``, among the last ``look_back`` ones.

    Versions that cannot be read any more are passed over: what they did counts for the next one. ``head`` is the
    version to begin at, by default the latest. Raises InvalidNameError, CorruptFileError, StorageError.
    """
    head = head or lake.snapshot()
    io = catalog_at(lake, head.version).io
    found: list[tuple[Snapshot, Snapshot]] = []
    newer, oldest = head, head.version
    for older in _readable_before(lake, head, look_back):
        if _entry(older, namespace, table) != _entry(newer, namespace, table):
            found.append((older, newer))
            if len(found) > most:
                break
        newer, oldest = older, older.version
    listed = found[:most]
    states = {one.version: _state(one, namespace, table, io) for pair in listed for one in pair}
    infos = {info.version: info for info in version_infos(lake.files, [new.version for _, new in listed], head)}
    versions = [
        TableVersion(info=infos[new.version], since=old.version, before=states[old.version], after=states[new.version])
        for old, new in listed
        if new.version in infos
    ]
    return TableHistory(versions=tuple(versions), looked_back_to=oldest)


def _readable_before(lake: Lakehouse, head: Snapshot, look_back: int) -> Iterator[Snapshot]:
    for version in range(head.version - 1, max(-1, head.version - 1 - look_back), -1):
        try:
            yield lake.snapshot(version, latest=head)
        except (VersionExpiredError, VersionNotFoundError):
            continue  # what it did shows in the next one that can be read


def _entry(snapshot: Snapshot, namespace: str, table: str) -> object:
    return snapshot.entry(snapshot.keys.table_key(namespace, table))


def _state(snapshot: Snapshot, namespace: str, table: str, io: StorageFileIO) -> TableState | None:
    if not snapshot.has_table(namespace, table):
        return None
    definition = snapshot.table(namespace, table)
    try:
        return table_state(definition, io)
    except (CorruptFileError, FileMissingError):  # an old version need not hide the newer ones; verify names the file
        return TableState(definition=definition)


def table_state(definition: TableDef, io: StorageFileIO) -> TableState:
    """Return the totals of a table. They are None for a table of another format.

    Raises CorruptFileError, FileMissingError and other StorageErrors.
    """
    state = TableState(definition=definition)
    if not definition.is_iceberg:
        return state
    snapshot = table_metadata(definition, io).current_snapshot()
    totals = totals_of(snapshot)
    return replace(
        state,
        rows=totals.rows,
        data_files=totals.files,
        size_bytes=totals.bytes,
        snapshot_id=None if snapshot is None else snapshot.snapshot_id,
    )


def column_changes(before: Schema, after: Schema) -> tuple[str, ...]:
    """Return what changed between two lists of columns, one line for each column, by their ids."""
    old, new = ({column.id: column for column in schema.columns} for schema in (before, after))
    lines = [f"dropped {old[at].name}" for at in old if at not in new]
    lines += [f"added {new[at].name} {type_name(new[at])}" for at in new if at not in old]
    for at in old.keys() & new.keys():
        was, now = old[at], new[at]
        if was.name != now.name:
            lines.append(f"renamed {was.name} to {now.name}")
        if type_name(was) != type_name(now):
            lines.append(f"{now.name} was {type_name(was)}, is {type_name(now)}")
        elif _parts(was) != _parts(now):
            lines.append(f"{now.name} has other parts")
        if was.nullable != now.nullable:
            lines.append(f"{now.name} {'may be null' if now.nullable else 'is never null'}")
    return tuple(lines)


def _parts(column: Column) -> tuple[object, ...]:
    return column.struct_fields, column.map_key, column.map_value, column.list_element


def type_name(column: Column) -> str:
    """Return the type of a column as people read it, such as ``decimal(10, 2)``."""
    arguments = ", ".join(column.properties[name] for name in ("precision", "scale") if name in column.properties)
    return f"{column.type.name.lower()}({arguments})" if arguments else column.type.name.lower()
