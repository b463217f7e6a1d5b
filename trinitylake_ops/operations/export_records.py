"""Records of exports and clones in a lakehouse, and the manifests of exports."""

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
    """Check that a text is a valid name for an export or clone.

    Args:
        name: The text to check.
        kind: ``EXPORT`` or ``CLONE``, for the message.

    Raises:
        InvalidNameError: The name is not valid.
    """
    validate_name(name, MAX_NAME_BYTES, kind)
    if name.isdecimal():
        raise InvalidNameError(f"{kind} name {name!r} has only digits, like a version number; choose another name")


def kind_of(record: ExportRecord | None) -> str:
    """Return ``CLONE`` or ``EXPORT``. Exports made by other programs have no record."""
    return CLONE if record is not None and record.clone_id else EXPORT


def record_of(definition: LakehouseDef, name: str) -> ExportRecord | None:
    """Return the record of an export or clone, or None."""
    return next((record for record in definition.exports if record.name == name), None)


def is_used(definition: LakehouseDef, name: str) -> bool:
    """Whether an export or a clone has the name."""
    return record_of(definition, name) is not None or name in definition.exported_snapshots


def check_unused(definition: LakehouseDef, name: str) -> None:
    """Raise ExportExistsError if an export or a clone has the name."""
    if is_used(definition, name):
        record = record_of(definition, name)
        version = f" of version {record.version}" if record is not None else ""
        kind = kind_of(record)
        raise ExportExistsError(f"{kind} {name!r}{version} already exists; drop it, or choose another name")


def is_interrupted(record: ExportRecord | None, wanted: ExportRecord) -> bool:
    """Whether a record belongs to an interrupted export that the wanted export would resume."""
    return (
        record is not None
        and record.state == ExportState.COPYING
        and (record.version, record.level, record.target_uri, record.namespaces, bool(record.clone_id))
        == (wanted.version, wanted.level, wanted.target_uri, wanted.namespaces, bool(wanted.clone_id))
    )


def begin(lake: Lakehouse, wanted: ExportRecord, check_source: Callable[[Snapshot], None]) -> tuple[ExportRecord, bool]:
    """Commit the record of an export, or find the record of an interrupted export to resume.

    Args:
        lake: The lakehouse.
        wanted: The record to commit.
        check_source: Raises if the source is not kept in the given version.

    Returns:
        The record, and whether it belongs to an interrupted export.

    Raises:
        ExportExistsError: Another export has the name.
        VersionExpiredError: The version has expired.
        CommitAttemptsExhaustedError: All attempts conflicted with other commits.
        StorageError: A storage request failed.
    """
    interrupted: list[ExportRecord] = []

    def add_record(base: Snapshot) -> LakehouseDef | None:
        existing = record_of(base.definition, wanted.name)
        interrupted[:] = [existing] if existing is not None and is_interrupted(existing, wanted) else []
        if interrupted:
            return None
        check_unused(base.definition, wanted.name)
        check_not_expired(wanted.version, base.definition)
        check_source(base)
        return replace(base.definition, exports=(*base.definition.exports, wanted))

    message = f"{wanted.name}: keep version {wanted.version}"
    DefinitionChange(kind_of(wanted), message, add_record).commit(lake, lake.snapshot())
    return (interrupted[0], True) if interrupted else (wanted, False)


def complete(
    lake: Lakehouse,
    record: ExportRecord,
    root_location: str,
    retain_until_ms: int | None,
    check_source: Callable[[Snapshot], None],
) -> int:
    """Commit an export as complete, unless another run already did, and return the version.

    Args:
        lake: The lakehouse.
        record: The record that :func:`begin` returned.
        root_location: The location of the exported root.
        retain_until_ms: When the export stops keeping its version, in milliseconds since the epoch; None for never.
        check_source: Raises if the source is not kept in the given version.

    Raises:
        ExportNotFoundError: The export was dropped during the run.
        CommitAttemptsExhaustedError: All attempts conflicted with other commits.
        StorageError: A storage request failed.
    """
    completed = replace(
        record, state=ExportState.COMPLETE, root_location=root_location, retain_until_millis=retain_until_ms
    )

    def complete_record(base: Snapshot) -> LakehouseDef | None:
        if check_copying(base, record).state == ExportState.COMPLETE:
            return None
        check_source(base)
        definition = base.definition
        exports = tuple(completed if other.name == record.name else other for other in definition.exports)
        snapshots = {**definition.exported_snapshots, record.name: root_location}
        return replace(definition, exports=exports, exported_snapshots=snapshots)

    return DefinitionChange(kind_of(record), f"{record.name}: complete", complete_record).commit(lake, lake.snapshot())


def check_copying(base: Snapshot, record: ExportRecord) -> ExportRecord:
    """Return the current record of an export. Raises ExportNotFoundError if it was dropped or replaced."""
    current = record_of(base.definition, record.name)
    if current is None or current.manifest_path != record.manifest_path:
        raise ExportNotFoundError(f"{kind_of(record)} {record.name!r} was dropped or replaced by another process")
    return current


@dataclass(frozen=True, kw_only=True)
class ExportInfo:
    """One export, as recorded in the lakehouse.

    An export recorded by another program has only a name and a location; its version, level and times are None.
    """

    #: The name of the export.
    name: str
    #: The exported version.
    version: int | None
    #: "minimal", "partial" or "full".
    level: str | None
    #: "copying" or "complete".
    state: str
    #: The location of the exported root.
    location: str
    #: When the export was recorded.
    created_at: datetime | None
    #: When the export stops keeping its version; None for never.
    retain_until: datetime | None
    #: The path of the export's manifest.
    manifest_path: str | None
    #: The root of the lakehouse that it was exported to; None for an export within the lakehouse.
    target: str | None = None
    #: The exported namespaces; empty for all.
    namespaces: tuple[str, ...] = ()


def list_exports(lake: Lakehouse, latest: Snapshot | None = None) -> list[ExportInfo]:
    """List all exports, complete or not, sorted by name. Clones are not included (see ``list_clones``).

    Args:
        lake: The lakehouse.
        latest: The latest version, if the caller already has it.

    Raises:
        StorageError: A storage request failed.
    """
    definition = (latest or lake.snapshot()).definition
    clones = {record.name for record in definition.exports if record.clone_id}
    recorded = {record.name: _info(record) for record in definition.exports if not record.clone_id}
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
        if name not in recorded and name not in clones
    }
    return [info for _, info in sorted({**recorded, **foreign}.items())]


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
    """Raise InvalidInputError if a record belongs to a clone, because clones have separate operations."""
    if record is not None and record.clone_id:
        raise InvalidInputError(
            f"{record.name!r} is a clone at {record.target_uri}, not an export; use compare, promote or drop-clone"
        )


def without_exports(definition: LakehouseDef, names: Iterable[str]) -> LakehouseDef:
    """Return a definition without the records of some exports."""
    dropped = set(names)
    snapshots = definition.exported_snapshots
    return replace(
        definition,
        exports=tuple(record for record in definition.exports if record.name not in dropped),
        exported_snapshots={name: location for name, location in snapshots.items() if name not in dropped},
    )


@dataclass(frozen=True, slots=True)
class CopiedFile:
    """A verified copy of a file."""

    #: The location of the original; None for a rebuilt node.
    source: str | None
    #: The location of the copy.
    target: str
    #: The file size.
    size_bytes: int
    #: The SHA-256 of the file, as hexadecimal digits.
    sha256: str

    @classmethod
    def of(cls, source: str | None, target: str, data: bytes) -> CopiedFile:
        """Return the record of a copy with this content.

        Args:
            source: The location of the original; None for a rebuilt node.
            target: The location of the copy.
            data: The content.
        """
        return cls(source, target, len(data), hashlib.sha256(data).hexdigest())


def begin_manifest(
    storage: Storage, record: ExportRecord, targets: Iterable[tuple[str | None, str]], *, with_definitions: bool
) -> None:
    """Write a manifest that names the planned copies, so that no operation deletes them as orphans.

    An existing manifest of an interrupted export is kept.

    Args:
        storage: The storage of the lakehouse that records the export.
        record: The record of the export.
        targets: The planned copies, as pairs (location of the original, location of the copy).
        with_definitions: Whether definitions are copied.

    Raises:
        ExportExistsError: The existing manifest names other copies.
        StorageError: A storage request failed.
    """
    files = [{"source": source, "target": target} for source, target in targets]
    data = _encode(record, files, with_definitions=with_definitions)

    def is_ours(existing: bytes) -> bool:
        try:
            manifest = _decode(existing, record.manifest_path)
        except CorruptFileError:
            return False
        names = {file["target"] for file in manifest["files"]}
        return manifest.get("definitions", False) == with_definitions and names >= {file["target"] for file in files}

    if not create_settled(storage, record.manifest_path, data, is_ours=is_ours):
        raise ExportExistsError(
            f"export {record.name!r} cannot be resumed: it was begun with other definitions or files; drop it first",
            path=record.manifest_path,
        )


def finish_manifest(
    storage: Storage, record: ExportRecord, files: Iterable[CopiedFile], *, with_definitions: bool
) -> None:
    """Write the manifest with the size and checksum of all copies, including those of earlier interrupted runs.

    Args:
        storage: The storage of the lakehouse that records the export.
        record: The record of the export.
        files: The copies of this run.
        with_definitions: Whether definitions are copied.

    Raises:
        StorageError: A storage request failed.
    """
    copies = {**_copies_of_earlier_runs(storage, record.manifest_path), **{file.target: file for file in files}}
    ordered = [asdict(copies[target]) for target in sorted(copies)]
    storage.write(record.manifest_path, _encode(record, ordered, with_definitions=with_definitions))


def _copies_of_earlier_runs(storage: Storage, path: str) -> dict[str, CopiedFile]:
    try:
        files = _read(storage, path)["files"]
    except FileMissingError:
        return {}
    return {file["target"]: _parse_copy(file, path) for file in files if "sha256" in file}


def read_manifest(storage: Storage, path: str) -> list[CopiedFile]:
    """Return the copies listed in the manifest of a complete export.

    Args:
        storage: The storage of the lakehouse that records the export.
        path: The path of the manifest.

    Raises:
        FileMissingError: The manifest does not exist.
        CorruptFileError: The manifest cannot be read.
        StorageError: A storage request failed.
    """
    return [_parse_copy(file, path) for file in _read(storage, path)["files"]]


def _parse_copy(file: Mapping[str, Any], path: str) -> CopiedFile:
    size_bytes, source = file.get("size_bytes"), file.get("source")
    is_measured = type(size_bytes) is int and size_bytes >= 0 and isinstance(file.get("sha256"), str)
    if not is_measured or not isinstance(source, str | None):
        raise CorruptFileError("the manifest cannot be read", path=path)
    try:
        return CopiedFile(**file)
    except TypeError as error:
        raise CorruptFileError("the manifest cannot be read", path=path) from error


def manifest_targets(storage: Storage, path: str) -> set[str]:
    """Return the locations of the copies listed in an export's manifest; none if it has not been written yet.

    Args:
        storage: The storage of the lakehouse that records the export.
        path: The path of the manifest; empty if the export has none.

    Raises:
        CorruptFileError: The manifest cannot be read.
        StorageError: A storage request failed.
    """
    if not path:
        return set()
    try:
        return {file["target"] for file in _read(storage, path)["files"]}
    except FileMissingError:
        return set()


def check_manifest(storage: Storage, record: ExportRecord) -> None:
    """Check that the manifest of an export can be read, and that a root within the lakehouse matches its checksum.

    Args:
        storage: The storage of the lakehouse that records the export.
        record: The record of the export.

    Raises:
        FileMissingError: The manifest or the root does not exist.
        CorruptFileError: The manifest cannot be read, or the root does not match its checksum.
        InvalidLocationError: A location is not valid.
        StorageError: A storage request failed.
    """
    copies = {file.target: file for file in read_manifest(storage, record.manifest_path)}
    if record.target_uri:
        return
    if record.root_location not in copies:
        raise CorruptFileError("the manifest does not name the exported root", path=record.manifest_path)
    if hashlib.sha256(storage.read(record.root_location)).hexdigest() != copies[record.root_location].sha256:
        raise CorruptFileError("the exported root differs from the manifest", path=record.root_location)


def _encode(record: ExportRecord, files: list[dict[str, Any]], *, with_definitions: bool) -> bytes:
    options = {"target": record.target_uri, "namespaces": list(record.namespaces), "definitions": with_definitions}
    manifest = {
        "name": record.name,
        "version": record.version,
        "level": record.level.name.lower(),
        **{name: value for name, value in options.items() if value},
        "files": files,
    }
    return encode_sealed_json(dict(sorted(manifest.items())), record.manifest_path, indent=1)


def _read(storage: Storage, path: str) -> Mapping[str, Any]:
    return _decode(storage.read(path, limit_bytes=MAX_FILE_LIST_BYTES), path)


def _decode(data: bytes, path: str) -> Mapping[str, Any]:
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
