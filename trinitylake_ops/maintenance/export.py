"""Snapshot exports: a version kept under a name (docs/protocol.md, "Export").

A minimal export copies the root alone. It runs in three steps, each of which can be repeated: a
commit records the export as COPYING, which keeps the version from expiring; manifest and root are
copied, root last; a commit records it as COMPLETE. A cut-off export goes on where it stopped when it
is executed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from rich.table import Table

from trinitylake_ops.errors import (
    CorruptFileError,
    ExportExistsError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    InvalidNameError,
)
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.file_names import new_export_root_path, new_manifest_path
from trinitylake_ops.format.keys import validate_name
from trinitylake_ops.format.node_file import MAX_TIME_MS
from trinitylake_ops.maintenance.report import Cost, Document, MeteredLakehouse, Plan, digest_of, new_table, utc_of
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.write_outcome import create_settled
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.lakehouse import Lakehouse, check_not_expired
from trinitylake_ops.transaction.snapshot import Snapshot

#: The levels that can be made; the format knows more.
LEVELS = ("minimal",)
MAX_NAME_BYTES = 200

_OPERATION = "export"


@dataclass(frozen=True, kw_only=True)
class ExportReport(Document):
    """A finished export: where its root stands, and the bytes that were copied."""

    name: str
    version: int
    level: str
    location: str
    manifest_path: str
    committed_version: int
    copied_files: int
    copied_bytes: int
    resumed: bool
    cost: Cost

    def table(self) -> Table:
        """Return one row."""
        row = (self.name, self.version, self.level, self.location, self.copied_bytes)
        return new_table("Export", "name", "version", "level", "root", "bytes copied", rows=[row])


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """What an export would copy. ``resumes`` says that a cut-off export of this name goes on."""

    base_version: int
    name: str
    version: int
    level: str
    retain_for_ms: int | None
    files: int
    bytes: int
    resumes: bool
    _lake: Lakehouse = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the name, the version and what is copied."""
        return digest_of(
            self.base_version, _OPERATION, self.name, self.version, self.level, self.retain_for_ms, self.files
        )

    def table(self) -> Table:
        """Return one row."""
        row = (self.name, self.version, self.level, self.files, self.bytes, "goes on" if self.resumes else "new")
        return new_table("Export plan", "name", "version", "level", "files", "bytes", "state", rows=[row])

    def execute(self, approved_digest: str | None = None) -> ExportReport:
        """Export, or finish an export that was cut off; the run that finishes it says how long it is retained.

        Raises PlanChangedError when an approved digest is not that of the plan made again now,
        ExportExistsError, VersionExpiredError, CommitConflictError, CorruptFileError when the copy is
        not the source, StorageError.
        """
        if approved_digest is not None:
            now = plan_export(self._lake, self.name, self.level, self.version, retain_for=self.retain_for_ms)
            now.check_approved(approved_digest)
        metered = MeteredLakehouse(self._lake)
        record, resumed = self._begin(metered.lake)
        try:
            copied_bytes = _copy_root(metered.lake, record)
            version = _complete(metered.lake, record, self._retain_until_ms(metered.lake))
        except (ExportNotFoundError, FileMissingError):
            _clean_up_if_dropped(metered.lake, record)
            raise
        return ExportReport(
            name=record.name,
            version=record.version,
            level=self.level,
            location=record.root_location,
            manifest_path=record.manifest_path,
            committed_version=version,
            copied_files=1,
            copied_bytes=copied_bytes,
            resumed=resumed,
            cost=metered.cost(),
        )

    def _begin(self, lake: Lakehouse) -> tuple[ExportRecord, bool]:
        """Commit the record, or find the one of a cut-off export."""
        record = ExportRecord(
            name=self.name,
            version=self.version,
            level=ExportLevel[self.level.upper()],
            root_location=new_export_root_path(),
            state=ExportState.COPYING,
            created_at_millis=lake.storage.now_ms(),
            retain_until_millis=self._retain_until_ms(lake),
            manifest_path=new_manifest_path(),
        )
        with lake.transaction(message=f"{self.name}: keep version {self.version}", operation=_OPERATION) as txn:
            existing = _record(txn.definition, self.name)
            if existing is not None and _is_cut_off(existing, self.version):
                return existing, True
            txn.require(lambda base: _check_unused(base.definition, self.name))
            txn.require(lambda base: check_not_expired(self.version, base.definition))
            txn.alter_definition(replace(txn.definition, exports=(*txn.definition.exports, record)))
        return record, False

    def _retain_until_ms(self, lake: Lakehouse) -> int | None:
        return None if self.retain_for_ms is None else lake.storage.now_ms() + self.retain_for_ms


def plan_export(
    lake: Lakehouse,
    name: str,
    level: str = "minimal",
    version: int | str | None = None,
    target: str | None = None,
    retain_for: timedelta | int | None = None,
) -> ExportPlan:
    """Plan an export of a version, by default the latest; reads only.

    ``retain_for``, a timedelta or milliseconds, is how long the export keeps its version from
    expiring; None is until it is dropped. Raises InvalidNameError, ExportExistsError, InvalidInputError
    for a level or a target that cannot be made, VersionNotFoundError, VersionExpiredError.
    """
    _check_name(name)
    if level not in LEVELS:
        raise InvalidInputError(f"level {level!r} cannot be exported; levels: {', '.join(LEVELS)}")
    if target is not None:
        raise InvalidInputError(f"a {level} export stays in its own lakehouse; leave the target out")
    latest = lake.snapshot()
    record = _record(latest.definition, name)
    if version is None and record is not None and record.state == ExportState.COPYING:
        version = record.version
    source = latest if version is None else lake.snapshot(version)
    _check_free(latest.definition, name, source.version)
    retain_for_ms = _millis(retain_for)
    if retain_for_ms is not None and lake.storage.now_ms() + retain_for_ms > MAX_TIME_MS:
        raise InvalidInputError("an export is retained until the year 9999 at most; leave the duration out for ever")
    return ExportPlan(
        base_version=latest.version,
        name=name,
        version=source.version,
        level=level,
        retain_for_ms=retain_for_ms,
        files=1,
        bytes=lake.storage.stat(source.location).size_bytes,
        resumes=record is not None,
        _lake=lake,
    )


def _check_name(name: str) -> None:
    validate_name(name, MAX_NAME_BYTES, "export")
    if name.isdecimal():
        raise InvalidNameError(f"export name {name!r} is digits only, which would mean a version")


def _millis(retain_for: timedelta | int | None) -> int | None:
    if retain_for is None:
        return None
    retain_for_ms = retain_for if isinstance(retain_for, int) else retain_for // timedelta(milliseconds=1)
    if retain_for_ms <= 0:
        raise InvalidInputError(f"an export is retained for more than 0 ms, not for {retain_for_ms}")
    return retain_for_ms


def _record(definition: LakehouseDef, name: str) -> ExportRecord | None:
    return next((record for record in definition.exports if record.name == name), None)


def _is_cut_off(record: ExportRecord, version: int) -> bool:
    return record.state == ExportState.COPYING and record.version == version and record.level == ExportLevel.MINIMAL


def _check_free(definition: LakehouseDef, name: str, version: int) -> None:
    """Raise ExportExistsError unless the name is free, or that of this very export, cut off."""
    record = _record(definition, name)
    if record is None or not _is_cut_off(record, version):
        _check_unused(definition, name)


def _check_unused(definition: LakehouseDef, name: str) -> None:
    """Raise ExportExistsError when an export has the name."""
    record = _record(definition, name)
    if record is not None or name in definition.exported_snapshots:
        what = f"of version {record.version}" if record is not None else "there"
        raise ExportExistsError(f"an export {name!r} {what} exists; drop it first, or choose another name")


def _copy_root(lake: Lakehouse, record: ExportRecord) -> int:
    """Write manifest and root of an export, root last; returns the bytes of the root."""
    source = lake.snapshot(record.version).location
    data = lake.storage.read(source)
    manifest = {
        "name": record.name,
        "version": record.version,
        "level": record.level.name.lower(),
        "files": [
            {
                "source": source,
                "target": record.root_location,
                "size_bytes": len(data),
                "sha256": hashlib.sha256(data).hexdigest(),
            }
        ],
    }
    _place(lake.storage, record.manifest_path, json.dumps(manifest, indent=1, sort_keys=True).encode())
    _place(lake.storage, record.root_location, data)
    return len(data)


def check_manifest(storage: Storage, record: ExportRecord) -> None:
    """Check that the manifest of an export can be read, and that the exported root is the copy it describes.

    Raises FileMissingError, CorruptFileError, InvalidLocationError, naming the file, and other StorageErrors.
    """
    try:
        files = {file["target"]: file for file in json.loads(storage.read(record.manifest_path))["files"]}
        expected = files[record.root_location]["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CorruptFileError("the manifest cannot be read", path=record.manifest_path) from error
    if hashlib.sha256(storage.read(record.root_location)).hexdigest() != expected:
        raise CorruptFileError("the exported root is not what was copied", path=record.root_location)


def _place(storage: Storage, path: str, data: bytes) -> None:
    """Create a file and read it back; an earlier attempt, or this one with its answer lost, may have been here."""
    is_copy = create_settled(storage, path, data, is_ours=lambda found: found == data)
    if not is_copy or storage.read(path) != data:
        raise CorruptFileError("the file of an export is not what was copied; drop the export", path=path)


def _complete(lake: Lakehouse, record: ExportRecord, retain_until_ms: int | None) -> int:
    """Commit the record as complete; nothing when another run that resumed it was faster."""
    done = replace(record, state=ExportState.COMPLETE, retain_until_millis=retain_until_ms)
    with lake.transaction(message=f"{record.name}: complete", operation=_OPERATION) as txn:
        txn.require(lambda base: _check_copying(base, record))
        definition = txn.definition
        if record in definition.exports:
            exports = tuple(done if other == record else other for other in definition.exports)
            snapshots = {**definition.exported_snapshots, record.name: record.root_location}
            txn.alter_definition(replace(definition, exports=exports, exported_snapshots=snapshots))
    assert txn.committed_version is not None
    return txn.committed_version


def _clean_up_if_dropped(lake: Lakehouse, record: ExportRecord) -> None:
    """Delete what was copied for an export that was dropped meanwhile, and raise ExportNotFoundError for it."""
    latest = lake.snapshot()
    try:
        _check_copying(latest, record)
    except ExportNotFoundError:
        discard(lake.storage, [record.root_location, record.manifest_path])
        raise


def _check_copying(base: Snapshot, record: ExportRecord) -> None:
    found = _record(base.definition, record.name)
    if found is None or found.root_location != record.root_location:
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
    )


def drop_export(lake: Lakehouse, name: str) -> int:
    """Forget an export in one commit, then delete its own files; returns the version.

    Its version can expire from then on. Files that cannot be deleted are left to orphan removal.
    Raises ExportNotFoundError, CommitConflictError.
    """
    with lake.transaction(message=name, operation="drop-export") as txn:
        txn.require(lambda base: _check_known(base.definition, name))
        definition = txn.definition
        record = _record(definition, name)
        txn.alter_definition(without_exports(definition, [name]))
    assert txn.committed_version is not None
    if record is not None:
        lake.storage.delete_many(_own_files(record, txn.definition))
    return txn.committed_version


def _own_files(record: ExportRecord, remaining: LakehouseDef) -> list[str]:
    """Return the files of a dropped export that carry the names we give, and that no other export needs."""
    own = [
        path
        for path, prefix in ((record.root_location, "_export_"), (record.manifest_path, "_ops/export-"))
        if path.startswith(prefix) and "/" not in path.removeprefix("_ops/")
    ]
    needed = {other.root_location for other in remaining.exports} | set(remaining.exported_snapshots.values())
    needed |= {other.manifest_path for other in remaining.exports}
    return [path for path in own if path not in needed]


def _check_known(definition: LakehouseDef, name: str) -> None:
    if _record(definition, name) is None and name not in definition.exported_snapshots:
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
