"""What a rollback brings back: the target, the objects that were chosen, the changes, and whether they can be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from trinitylake_ops.errors import (
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    NamespaceNotFoundError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.keys import TABLE_KEY_PREFIX, ObjectName
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import DAMAGE
from trinitylake_ops.operations.export_records import record_of
from trinitylake_ops.operations.gc.tables import check_table_files, missing_file_error
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.versions.latest import latest_snapshot
from trinitylake_ops.versions.lookup import check_not_expired
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import OneName, resolve_table, table_ids


@dataclass(frozen=True)
class Target:
    """The target of a rollback: a snapshot, the version or the name of the export that it is, and its table files."""

    to: int | str
    snapshot: Snapshot
    io: StorageFileIO

    def check_retained(self, latest: LakehouseDef) -> None:
        """Raise VersionExpiredError or ExportNotFoundError when the files of the target are not kept any more."""
        if isinstance(self.to, int):
            check_not_expired(self.to, latest)
        elif self.to not in latest.exported_snapshots:
            raise ExportNotFoundError(f"export {self.to!r} was dropped since the rollback was planned")


def target_of(lake: Lakehouse, base: Snapshot, to: int | str | None, timestamp: datetime | int | None = None) -> Target:
    """Resolve the target of a rollback.

    Args:
        lake: The lakehouse.
        base: Its latest version.
        to: A version, or the name of an export.
        timestamp: A time, in milliseconds since the epoch if it is a number, instead of ``to``.

    Raises:
        InvalidInputError: If the target is a version of another lakehouse.
        NotFoundError: If there is no such version or export, or if it was expired or purged.
        StorageError: If a file cannot be read.
    """
    snapshot = lake.snapshot(to, timestamp, latest=base)
    if snapshot.files is not lake.files:
        is_export = isinstance(to, str) and to in base.definition.exported_snapshots
        if base.definition.parent is not None and not is_export:
            raise InvalidInputError(
                f"version {snapshot.version} of {snapshot.files.storage.root} is from before the beginning of this"
                " clone, which goes back to versions of its own; the first of them, 0, is the version that was cloned"
            )
        raise InvalidInputError(
            f"export {to!r} is a lakehouse of its own, at {snapshot.files.storage.root}; what it holds is brought back"
            f" by: trinitylake restore {to}"
        )
    if snapshot.root.is_sealed:
        raise VersionExpiredError(f"version {snapshot.version} was expired and purged", path=snapshot.location)
    is_name = isinstance(to, str) and not (to.isascii() and to.isdecimal())
    io = reading_io(lake)
    return Target(str(to) if is_name else snapshot.version, snapshot, io)


def selected_objects(
    base: Snapshot,
    target: Snapshot,
    to: int | str,
    namespaces: Sequence[str] | None,
    tables: Sequence[str] | None,
) -> tuple[ObjectName, ...]:
    """Return what was named, else the namespaces that an export is limited to; nothing where all comes back.

    Raises InvalidInputError for what a limited export does not hold: that would be dropped; NamespaceNotFoundError
    and the like.
    """
    record = record_of(base.definition, to) if isinstance(to, str) else None
    held = () if record is None else record.namespaces
    chosen = chosen_objects(base, target, namespaces or (() if tables else held), tables or ())
    for name in chosen:
        if held and name.namespace not in held:
            raise InvalidInputError(
                f"export {to!r} holds only the namespaces {', '.join(held)}, not that of {str(name)!r}"
            )
    return chosen


def chosen_objects(
    base: Snapshot, target: Snapshot, namespaces: Sequence[str], tables: Sequence[str]
) -> tuple[ObjectName, ...]:
    """Return what was named: namespaces with their tables, and tables. Raises NamespaceNotFoundError and the like."""
    for namespace in namespaces:
        if not base.has_namespace(namespace) and not target.has_namespace(namespace):
            raise NamespaceNotFoundError(
                f"there is no namespace {namespace!r}, neither in version {base.version} nor in {target.version}"
            )
    named = [ObjectName(*resolve_table(table, base, target)) for table in tables]
    return (*map(ObjectName, namespaces), *named)


def changes_between(base: Snapshot, target: Snapshot, chosen: Sequence[ObjectName]) -> list[KeyChange]:
    """Return what leads from ``base`` to ``target``, of the chosen objects or of all."""
    try:
        changes = diff_trees(base.files.nodes, base.root, target.root)
    except FileMissingError as error:
        raise FileMissingError(
            f"cannot go from version {base.version} back to version {target.version}: a node of one of them is missing;"
            " nothing was changed",
            path=error.path,
        ) from error
    return [change for change in changes if is_chosen(base, change.key, chosen)]


def is_chosen(base: Snapshot, key: str, chosen: Sequence[ObjectName]) -> bool:
    """Whether a key is that of a chosen object, or of a table in a chosen namespace; without a choice all are."""
    if not chosen:
        return True
    name = base.keys.decode(key)
    return name is not None and any(wanted in (name, ObjectName(name.namespace)) for wanted in chosen)


def checked_changes(
    base: Snapshot, target: Target, chosen: Sequence[ObjectName], failures: dict[ObjectName, TrinityLakeError]
) -> list[KeyChange]:
    """Return the changes that lead from ``base`` to ``target`` after checking that they can be made.

    Args:
        base: The version to roll back.
        target: The version to return to.
        chosen: The objects to roll back, empty for all.
        failures: The errors of damaged tables that would come back are added to it, by the tables' names.

    Raises:
        FileMissingError, CorruptFileError, LocationNotAllowedError: A node or a definition is missing or damaged, or
            a table that was chosen by its name is.
        VersionExpiredError: The target has expired meanwhile.
    """
    try:
        changes = changes_between(base, target.snapshot, chosen)
        _check_namespaces(base, changes)
        failures |= _damaged_tables(target, changes)
        for error in (failures[name] for name in chosen if name in failures):
            raise error
        if any(isinstance(error, FileMissingError) for error in failures.values()):
            target.check_retained(latest_snapshot(base.files).definition)  # it may have been purged meanwhile
        _check_names(base, target, changes)
    except FileMissingError:
        target.check_retained(latest_snapshot(base.files).definition)  # it may have been purged meanwhile
        raise
    return changes


def _check_namespaces(base: Snapshot, changes: Sequence[KeyChange]) -> None:
    """Raise NamespaceNotFoundError when a table would come back into a namespace that is not there."""
    restored = [name for change in changes if change.after is not None and (name := base.keys.decode(change.key))]
    coming = {name.namespace for name in restored if name.table is None}
    for name in restored:
        if name.namespace not in coming and not base.has_namespace(name.namespace):
            raise NamespaceNotFoundError(
                f"table {name} needs namespace {name.namespace!r}, which version {base.version} does not have;"
                " bring the namespace back instead"
            )


def _check_names(base: Snapshot, target: Target, changes: Sequence[KeyChange]) -> None:
    """Raise TableHasAnotherNameError when a table would come back that now has another name, and keeps it."""
    tables = {change.key: change.after for change in changes if change.key.startswith(TABLE_KEY_PREFIX)}
    restored = table_ids(target.snapshot, tables)
    OneName({key: restored.get(key) for key in tables})(base)


def _damaged_tables(target: Target, changes: Sequence[KeyChange]) -> dict[ObjectName, TrinityLakeError]:
    """Return the errors of damaged tables that would come back, by their names.

    Raises FileMissingError, CorruptFileError for a definition.
    """
    snapshot = target.snapshot
    files = snapshot.files
    namespaces: list[str] = []
    tables: dict[ObjectName, str] = {}
    for change in changes:
        name = snapshot.keys.decode(change.key)
        if change.after is not None and name is not None:
            if name.table is None:
                namespaces.append(change.after)
            else:
                tables[name] = change.after
    try:
        run_parallel(files.definitions.namespace, namespaces, files.storage.concurrency)
        definitions = files.definitions.tables(list(tables.values()))
    except FileMissingError as error:
        raise missing_file_error(snapshot.version, "a definition", error.path) from error
    failures: dict[ObjectName, TrinityLakeError] = {}
    for name, definition in zip(tables, definitions, strict=True):
        try:
            check_table_files(snapshot.version, target.io, definition)
        except DAMAGE as error:
            failures[name] = error
    return failures
