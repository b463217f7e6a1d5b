"""The manifest of an export: the location of each copy, with its size and checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trinitylake_ops.errors import CorruptFileError, ExportExistsError, FileMissingError
from trinitylake_ops.format.definitions import ExportRecord
from trinitylake_ops.format.file_sizes import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.sealed_json import decode_sealed_json, encode_sealed_json
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.storage.interface import Storage


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
