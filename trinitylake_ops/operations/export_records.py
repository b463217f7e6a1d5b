"""Exports as a lakehouse records them, and the manifest of an export."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from typing import Any

from trinitylake_ops.errors import (
    CorruptFileError,
    ExportExistsError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    InvalidNameError,
)
from trinitylake_ops.format.checksums import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.definitions import ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.keys import validate_name
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.operations.definition_commits import DefinitionChange
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.lookup import check_not_expired
from trinitylake_ops.versions.snapshot import Snapshot, utc_of

MAX_NAME_BYTES = 200

EXPORT = "export"
CLONE = "clone"


def check_name(name: str, kind: str = EXPORT) -> None:
    """Raise InvalidNameError for a text that cannot be the name of an export or clone."""
    validate_name(name, MAX_NAME_BYTES, kind)
    if name.isdecimal():
        raise InvalidNameError(f"{kind} name {name!r} is digits only, which would mean a version")


def kind_of(record: ExportRecord | None) -> str:
    """Return what a record is of: "clone" or "export"; other programs record exports by their names alone."""
    return CLONE if record is not None and record.clone_id else EXPORT


def record_of(definition: LakehouseDef, name: str) -> ExportRecord | None:
    """Return the record of an export, None where there is none of this name."""
    return next((record for record in definition.exports if record.name == name), None)


def is_used(definition: LakehouseDef, name: str) -> bool:
    """Whether an export or a clone has the name."""
    return record_of(definition, name) is not None or name in definition.exported_snapshots


def check_unused(definition: LakehouseDef, name: str) -> None:
    """Raise ExportExistsError when an export has the name."""
    if is_used(definition, name):
        record = record_of(definition, name)
        what = f"of version {record.version}" if record is not None else "there"
        kind = kind_of(record)
        article = "a" if kind == CLONE else "an"
        raise ExportExistsError(
            f"{article} {kind} {name!r} {what} exists; drop-{kind} it first, or choose another name"
        )


def is_cut_off(record: ExportRecord | None, wanted: ExportRecord) -> bool:
    """Whether a record is that of an unfinished export that was begun as the wanted one would be."""
    return (
        record is not None
        and record.state == ExportState.COPYING
        and (record.version, record.level, record.target_uri, record.namespaces, bool(record.clone_id))
        == (wanted.version, wanted.level, wanted.target_uri, wanted.namespaces, bool(wanted.clone_id))
    )


def begin(lake: Lakehouse, wanted: ExportRecord, check_source: Callable[[Snapshot], None]) -> tuple[ExportRecord, bool]:
    """Commit the record of an export, or find the one of a cut-off export. Returns which of both.

    ``check_source`` raises if the source is not kept. Raises ExportExistsError, VersionExpiredError,
    CommitAttemptsExhaustedError, StorageError.
    """
    found: list[ExportRecord] = []

    def recorded(base: Snapshot) -> LakehouseDef | None:
        existing = record_of(base.definition, wanted.name)
        found[:] = [existing] if existing is not None and is_cut_off(existing, wanted) else []
        if found:
            return None
        check_unused(base.definition, wanted.name)
        check_not_expired(wanted.version, base.definition)
        check_source(base)
        return replace(base.definition, exports=(*base.definition.exports, wanted))

    message = f"{wanted.name}: keep version {wanted.version}"
    DefinitionChange(kind_of(wanted), message, recorded).commit(lake, lake.snapshot())
    return (found[0], True) if found else (wanted, False)


def complete(
    lake: Lakehouse,
    record: ExportRecord,
    root_location: str,
    retain_until_ms: int | None,
    check_source: Callable[[Snapshot], None],
) -> int:
    """Commit an export as complete, and return the version. Does nothing when another run was faster.

    Raises ExportNotFoundError when it was dropped meanwhile, the errors of ``check_source``,
    CommitAttemptsExhaustedError, StorageError.
    """
    done = replace(record, state=ExportState.COMPLETE, root_location=root_location, retain_until_millis=retain_until_ms)

    def completed(base: Snapshot) -> LakehouseDef | None:
        if check_copying(base, record).state == ExportState.COMPLETE:
            return None
        check_source(base)
        definition = base.definition
        exports = tuple(done if other.name == record.name else other for other in definition.exports)
        snapshots = {**definition.exported_snapshots, record.name: root_location}
        return replace(definition, exports=exports, exported_snapshots=snapshots)

    return DefinitionChange(kind_of(record), f"{record.name}: complete", completed).commit(lake, lake.snapshot())


def check_copying(base: Snapshot, record: ExportRecord) -> ExportRecord:
    """Return an export as it is recorded now. Raises ExportNotFoundError unless it is the one that was begun."""
    found = record_of(base.definition, record.name)
    if found is None or found.manifest_path != record.manifest_path:
        raise ExportNotFoundError(f"{kind_of(record)} {record.name!r} was dropped or changed while it was made")
    return found


@dataclass(frozen=True, kw_only=True)
class ExportInfo:
    """One export as the lakehouse records it.

    For an export that another program recorded by name and root only, level and times are None.
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


def list_exports(lake: Lakehouse, latest: Snapshot | None = None) -> list[ExportInfo]:
    """Return all exports, complete or not, by name. Clones are none (``list_clones``).

    ``latest`` is the latest version, if the caller has just found it.
    """
    definition = (latest or lake.snapshot()).definition
    clones = {record.name for record in definition.exports if record.clone_id}
    known = {record.name: _info(record) for record in definition.exports if not record.clone_id}
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
        if name not in known and name not in clones
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


def check_no_clone(record: ExportRecord | None) -> None:
    """Raise InvalidInputError for the record of a clone, which other operations are for."""
    if record is not None and record.clone_id:
        raise InvalidInputError(
            f"{record.name!r} is a clone, at {record.target_uri}; clones are looked at by compare and verify, brought"
            " back by promote, and dropped by drop-clone"
        )


def without_exports(definition: LakehouseDef, names: Iterable[str]) -> LakehouseDef:
    """Return a definition that has forgotten exports."""
    dropped = set(names)
    snapshots = definition.exported_snapshots
    return replace(
        definition,
        exports=tuple(record for record in definition.exports if record.name not in dropped),
        exported_snapshots={name: location for name, location in snapshots.items() if name not in dropped},
    )


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A copy that was compared: its location and content. ``source`` is None for a node built anew."""

    source: str | None
    target: str
    size_bytes: int
    sha256: str

    @classmethod
    def of(cls, source: str | None, target: str, data: bytes) -> CopiedFile:
        """Return the record of a copy with these bytes."""
        return cls(source, target, len(data), hashlib.sha256(data).hexdigest())


def begin_manifest(
    storage: Storage, record: ExportRecord, targets: Iterable[tuple[str | None, str]], *, with_definitions: bool
) -> None:
    """Name the copies that will be made, so that no removal takes them for orphans meanwhile.

    The manifest of a cut-off export stays. Raises ExportExistsError when that one has other copies, StorageError.
    """
    files = [{"source": source, "target": target} for source, target in targets]
    data = _encoded(record, files, with_definitions=with_definitions)

    def is_ours(found: bytes) -> bool:
        try:
            known = _decoded(found, record.manifest_path)
        except CorruptFileError:
            return False
        names = {file["target"] for file in known["files"]}
        return known.get("definitions", False) == with_definitions and names >= {file["target"] for file in files}

    if not create_settled(storage, record.manifest_path, data, is_ours=is_ours):
        raise ExportExistsError(
            f"export {record.name!r} was begun with other definitions or files; drop it first",
            path=record.manifest_path,
        )


def finish_manifest(
    storage: Storage, record: ExportRecord, files: Iterable[CopiedFile], *, with_definitions: bool
) -> None:
    """Record all copies with size and checksum, also those of earlier runs that were cut off. Raises StorageError."""
    copies = {**_copies_of_earlier_runs(storage, record.manifest_path), **{file.target: file for file in files}}
    ordered = [asdict(copies[target]) for target in sorted(copies)]
    storage.write(record.manifest_path, _encoded(record, ordered, with_definitions=with_definitions))


def _copies_of_earlier_runs(storage: Storage, path: str) -> dict[str, CopiedFile]:
    try:
        found = _read(storage, path)["files"]
    except FileMissingError:
        return {}
    return {file["target"]: _copied(file, path) for file in found if "sha256" in file}


def read_manifest(storage: Storage, path: str) -> list[CopiedFile]:
    """Return the copies that the manifest of a complete export names.

    Raises FileMissingError, CorruptFileError, other StorageErrors.
    """
    return [_copied(file, path) for file in _read(storage, path)["files"]]


def _copied(file: Mapping[str, Any], path: str) -> CopiedFile:
    size_bytes, source = file.get("size_bytes"), file.get("source")
    is_measured = type(size_bytes) is int and size_bytes >= 0 and isinstance(file.get("sha256"), str)
    if not is_measured or not isinstance(source, str | None):
        raise CorruptFileError("the manifest cannot be read", path=path)
    try:
        return CopiedFile(**file)
    except TypeError as error:
        raise CorruptFileError("the manifest cannot be read", path=path) from error


def manifest_targets(storage: Storage, path: str) -> set[str]:
    """Return the files that the manifest of an export names as copies, none if it is not written yet.

    Raises CorruptFileError, StorageError.
    """
    if not path:
        return set()
    try:
        return {file["target"] for file in _read(storage, path)["files"]}
    except FileMissingError:
        return set()


def check_manifest(storage: Storage, record: ExportRecord) -> None:
    """Check that the manifest of an export can be read, and that a root under this root is the copy it describes.

    Raises FileMissingError, CorruptFileError, InvalidLocationError, naming the file, and other StorageErrors.
    """
    copies = {file.target: file for file in read_manifest(storage, record.manifest_path)}
    if record.target_uri:
        return
    if record.root_location not in copies:
        raise CorruptFileError("the manifest does not name the exported root", path=record.manifest_path)
    if hashlib.sha256(storage.read(record.root_location)).hexdigest() != copies[record.root_location].sha256:
        raise CorruptFileError("the exported root is not what was copied", path=record.root_location)


def _encoded(record: ExportRecord, files: list[dict[str, Any]], *, with_definitions: bool) -> bytes:
    choice = {"target": record.target_uri, "namespaces": list(record.namespaces), "definitions": with_definitions}
    manifest = {
        "name": record.name,
        "version": record.version,
        "level": record.level.name.lower(),
        **{name: value for name, value in choice.items() if value},
        "files": files,
    }
    return encode_sealed_json(dict(sorted(manifest.items())), record.manifest_path, indent=1)


def _read(storage: Storage, path: str) -> Mapping[str, Any]:
    return _decoded(storage.read(path, limit_bytes=MAX_FILE_LIST_BYTES), path)


def _decoded(data: bytes, path: str) -> Mapping[str, Any]:
    try:
        manifest = decode_sealed_json(data, path)
        targets = [file["target"] for file in manifest["files"]]
    except CorruptFileError as error:
        raise CorruptFileError(f"the manifest cannot be read: {error.message}", path=path) from error
    except (KeyError, TypeError) as error:
        raise CorruptFileError("the manifest cannot be read", path=path) from error
    if not all(isinstance(target, str) for target in targets):
        raise CorruptFileError("the manifest cannot be read", path=path)
    return manifest
