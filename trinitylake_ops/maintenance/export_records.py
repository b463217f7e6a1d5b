"""Exports as the lakehouse definition records them: names, states, what is listed and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial

from trinitylake_ops.errors import ExportExistsError, ExportNotFoundError, InvalidNameError
from trinitylake_ops.format.definitions import ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.keys import validate_name
from trinitylake_ops.maintenance.report import utc_of
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.snapshot import Snapshot

MAX_NAME_BYTES = 200

EXPORT = "export"

_LONGEST_MESSAGE_CHARS = 500


def check_name(name: str) -> None:
    """Raise InvalidNameError for what cannot be the name of an export."""
    validate_name(name, MAX_NAME_BYTES, "export")
    if name.isdecimal():
        raise InvalidNameError(f"export name {name!r} is digits only, which would mean a version")


def record_of(definition: LakehouseDef, name: str) -> ExportRecord | None:
    """Return the record of an export, None where there is none of this name."""
    return next((record for record in definition.exports if record.name == name), None)


def check_unused(definition: LakehouseDef, name: str) -> None:
    """Raise ExportExistsError when an export has the name."""
    record = record_of(definition, name)
    if record is not None or name in definition.exported_snapshots:
        what = f"of version {record.version}" if record is not None else "there"
        raise ExportExistsError(f"an export {name!r} {what} exists; drop it first, or choose another name")


def is_cut_off(record: ExportRecord | None, wanted: ExportRecord) -> bool:
    """Whether a record is that of an export which was begun as the wanted one would be, and not finished."""
    return (
        record is not None
        and record.state == ExportState.COPYING
        and (record.version, record.level, record.target_uri, record.namespaces)
        == (wanted.version, wanted.level, wanted.target_uri, wanted.namespaces)
    )


def complete(lake: Lakehouse, record: ExportRecord, root_location: str, retain_until_ms: int | None) -> int:
    """Commit an export as complete, and return the version; nothing when another run was faster.

    Raises ExportNotFoundError when it was dropped meanwhile, CommitConflictError, StorageError.
    """
    done = replace(record, state=ExportState.COMPLETE, root_location=root_location, retain_until_millis=retain_until_ms)
    with lake.transaction(message=f"{record.name}: complete", operation=EXPORT) as txn:
        txn.require(lambda base: check_copying(base, record))
        definition = txn.definition
        if record in definition.exports:
            exports = tuple(done if other == record else other for other in definition.exports)
            snapshots = {**definition.exported_snapshots, record.name: root_location}
            txn.alter_definition(replace(definition, exports=exports, exported_snapshots=snapshots))
    assert txn.committed_version is not None
    return txn.committed_version


def check_copying(base: Snapshot, record: ExportRecord) -> None:
    """Raise ExportNotFoundError unless an export is recorded as it was begun."""
    found = record_of(base.definition, record.name)
    if found is None or found.manifest_path != record.manifest_path:
        raise ExportNotFoundError(f"export {record.name!r} was dropped or changed while it was copied")


@dataclass(frozen=True, kw_only=True)
class ExportInfo:
    """One export as the lakehouse records it.

    Of an export that another program recorded by name and root only, level and times are None.
    """

    name: str
    version: int | None
    level: str | None
    state: str
    location: str
    created_at: datetime | None
    retain_until: datetime | None
    manifest_path: str | None
    target: str | None = None
    namespaces: tuple[str, ...] = ()


def list_exports(lake: Lakehouse) -> list[ExportInfo]:
    """Return all exports, complete or not, by name."""
    definition = lake.snapshot().definition
    known = {record.name: _info(record) for record in definition.exports}
    foreign = {
        name: ExportInfo(
            name=name,
            version=None,
            level=None,
            state="complete",
            location=location,
            created_at=None,
            retain_until=None,
            manifest_path=None,
        )
        for name, location in definition.exported_snapshots.items()
        if name not in known
    }
    return [info for _, info in sorted({**known, **foreign}.items())]


def _info(record: ExportRecord) -> ExportInfo:
    return ExportInfo(
        name=record.name,
        version=record.version,
        level=record.level.name.lower(),
        state=record.state.name.lower(),
        location=record.root_location,
        created_at=utc_of(record.created_at_millis),
        retain_until=None if record.retain_until_millis is None else utc_of(record.retain_until_millis),
        manifest_path=record.manifest_path or None,
        target=record.target_uri or None,
        namespaces=record.namespaces,
    )


def drop_export(lake: Lakehouse, name: str) -> int:
    """Forget an export in one commit, then delete its root and manifest; returns the version.

    Its version can expire from then on. Other copies under this root, and what cannot be deleted, are left to
    orphan removal: a version that the export was restored to may need them. Another root is left as it is.
    Raises ExportNotFoundError, CommitConflictError.
    """
    return drop_exports(lake, [name])


def drop_exports(lake: Lakehouse, names: Sequence[str]) -> int:
    """Forget several exports in one commit, as :func:`drop_export` does one; returns the version."""
    message = ", ".join(names)[:_LONGEST_MESSAGE_CHARS]
    with lake.transaction(message=message, operation="drop-export") as txn:
        for name in names:
            txn.require(partial(_check_known, name=name))
        definition = txn.definition
        records = [record for name in names if (record := record_of(definition, name)) is not None]
        txn.alter_definition(without_exports(definition, names))
    assert txn.committed_version is not None
    own = [path for record in records for path in _own_files(record, txn.definition)]
    if own:
        lake.storage.delete_many(own)
    return txn.committed_version


def _own_files(record: ExportRecord, remaining: LakehouseDef) -> list[str]:
    """Return root and manifest of a dropped export where they carry names that we give, and no other export needs."""
    own = [
        path
        for path, prefix in ((record.root_location, "_export_"), (record.manifest_path, "_ops/export-"))
        if path.startswith(prefix) and "/" not in path.removeprefix("_ops/")
    ]
    needed = {other.root_location for other in remaining.exports} | set(remaining.exported_snapshots.values())
    needed |= {other.manifest_path for other in remaining.exports}
    return [path for path in own if path not in needed]


def _check_known(base: Snapshot, name: str) -> None:
    if record_of(base.definition, name) is None and name not in base.definition.exported_snapshots:
        raise ExportNotFoundError(f"there is no export {name!r}")


def without_exports(definition: LakehouseDef, names: Iterable[str]) -> LakehouseDef:
    """Return a definition that has forgotten exports."""
    dropped = set(names)
    snapshots = definition.exported_snapshots
    return replace(
        definition,
        exports=tuple(record for record in definition.exports if record.name not in dropped),
        exported_snapshots={name: location for name, location in snapshots.items() if name not in dropped},
    )
