"""The target of a rollback, the selected objects, the changes to make, and checks of them."""

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
    """The target of a rollback."""

    #: The version, or the name of the export.
    to: int | str
    #: The version whose content is restored.
    snapshot: Snapshot
    #: Reads the table files of the snapshot.
    io: StorageFileIO

    def check_retained(self, latest: LakehouseDef) -> None:
        """Raise VersionExpiredError or ExportNotFoundError if the files of the target are no longer retained."""
        if isinstance(self.to, int):
            check_not_expired(self.to, latest)
        elif self.to not in latest.exported_snapshots:
            raise ExportNotFoundError(f"export {self.to!r} was dropped since the rollback was planned")


def target_of(lake: Lakehouse, base: Snapshot, to: int | str | None, timestamp: datetime | int | None = None) -> Target:
    """Resolve the target of a rollback.

    Args:
        lake: The lakehouse.
        base: The latest version of the lakehouse.
        to: A version, or the name of an export.
        timestamp: A time, as a datetime or in milliseconds since the epoch, instead of ``to``.

    Raises:
        InvalidInputError: The target is a version of another lakehouse.
        NotFoundError: The version or export does not exist, or was expired or purged.
        StorageError: A storage request failed.
    """
    snapshot = lake.snapshot(to, timestamp, latest=base)
    if snapshot.files is not lake.files:
        is_export = isinstance(to, str) and to in base.definition.exported_snapshots
        if base.definition.parent is not None and not is_export:
            raise InvalidInputError(
                f"cannot roll back to version {snapshot.version} of {snapshot.files.storage.root}: it is older than"
                " this clone; roll back to version 0 for the content that was cloned"
            )
        raise InvalidInputError(
            f"cannot roll back to export {to!r}: it is a lakehouse at {snapshot.files.storage.root}; restore it with:"
            f" trinitylake restore {to}"
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
    """Return the selected objects, or the namespaces that an export is limited to; empty for everything.

    Args:
        base: The latest version.
        target: The version whose content is restored.
        to: The version number or the name of the export.
        namespaces: Names of namespaces.
        tables: Names of tables, as ``namespace.table``.

    Raises:
        InvalidInputError: The export does not contain a selected object, which would therefore be dropped.
        NamespaceNotFoundError: A namespace exists in neither version.
        TableNotFoundError: A table exists in neither version.
    """
    record = record_of(base.definition, to) if isinstance(to, str) else None
    exported = () if record is None else record.namespaces
    selected = _resolve_objects(base, target, namespaces or (() if tables else exported), tables or ())
    for name in selected:
        if exported and name.namespace not in exported:
            raise InvalidInputError(
                f"export {to!r} contains only the namespaces {', '.join(exported)}, not that of {str(name)!r}"
            )
    return selected


def _resolve_objects(
    base: Snapshot, target: Snapshot, namespaces: Sequence[str], tables: Sequence[str]
) -> tuple[ObjectName, ...]:
    for namespace in namespaces:
        if not base.has_namespace(namespace) and not target.has_namespace(namespace):
            raise NamespaceNotFoundError(
                f"namespace {namespace!r} exists neither in version {base.version} nor in version {target.version}"
            )
    table_names = [ObjectName(*resolve_table(table, base, target)) for table in tables]
    return (*map(ObjectName, namespaces), *table_names)


def changes_between(base: Snapshot, target: Snapshot, selected: Sequence[ObjectName]) -> list[KeyChange]:
    """Return the changes from one version to another.

    Args:
        base: The version to change.
        target: The version with the desired content.
        selected: The objects to change; empty for all.

    Raises:
        FileMissingError: A node is missing.
        StorageError: A storage request failed.
    """
    try:
        changes = diff_trees(base.files.nodes, base.root, target.root)
    except FileMissingError as error:
        raise FileMissingError(
            f"cannot roll back version {base.version} to version {target.version}: a node of one of them is missing;"
            " nothing was changed",
            path=error.path,
        ) from error
    return [change for change in changes if is_selected(base, change.key, selected)]


def is_selected(base: Snapshot, key: str, selected: Sequence[ObjectName]) -> bool:
    """Whether a key belongs to a selected object, or to a table in a selected namespace.

    Args:
        base: A version, which decodes the key.
        key: The key.
        selected: The selected objects; empty for all.
    """
    if not selected:
        return True
    name = base.keys.decode(key)
    return name is not None and any(wanted in (name, ObjectName(name.namespace)) for wanted in selected)


def checked_changes(
    base: Snapshot, target: Target, selected: Sequence[ObjectName], failures: dict[ObjectName, TrinityLakeError]
) -> list[KeyChange]:
    """Return the changes from ``base`` to ``target`` after checking that they can be made.

    Args:
        base: The version to roll back.
        target: The version to return to.
        selected: The objects to roll back; empty for all.
        failures: Receives the errors of damaged tables that would be restored, by table name.

    Raises:
        FileMissingError: A node, a definition, or a file of a table selected by name is missing.
        CorruptFileError: A node, a definition or a table file is damaged.
        LocationNotAllowedError: A table selected by name refers to a file outside the allowed roots.
        VersionExpiredError: The target has expired.
    """
    try:
        changes = changes_between(base, target.snapshot, selected)
        _check_namespaces(base, changes)
        failures |= _damaged_tables(target, changes)
        for error in (failures[name] for name in selected if name in failures):
            raise error
        if any(isinstance(error, FileMissingError) for error in failures.values()):
            target.check_retained(latest_snapshot(base.files).definition)  # it may have been purged since
        _check_names(base, target, changes)
    except FileMissingError:
        target.check_retained(latest_snapshot(base.files).definition)  # it may have been purged since
        raise
    return changes


def _check_namespaces(base: Snapshot, changes: Sequence[KeyChange]) -> None:
    """Raise NamespaceNotFoundError if a table would be restored into a namespace that does not exist."""
    restored = [name for change in changes if change.after is not None and (name := base.keys.decode(change.key))]
    restored_namespaces = {name.namespace for name in restored if name.table is None}
    for name in restored:
        if name.namespace not in restored_namespaces and not base.has_namespace(name.namespace):
            raise NamespaceNotFoundError(
                f"table {name} needs namespace {name.namespace!r}, which version {base.version} does not have;"
                " roll back the namespace instead"
            )


def _check_names(base: Snapshot, target: Target, changes: Sequence[KeyChange]) -> None:
    """Raise TableHasAnotherNameError if a table to restore was renamed and also keeps its new name."""
    tables = {change.key: change.after for change in changes if change.key.startswith(TABLE_KEY_PREFIX)}
    restored = table_ids(target.snapshot, tables)
    OneName({key: restored.get(key) for key in tables})(base)


def _damaged_tables(target: Target, changes: Sequence[KeyChange]) -> dict[ObjectName, TrinityLakeError]:
    """Return the errors of damaged tables that would be restored, by name.

    Raises FileMissingError or CorruptFileError for a definition.
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
