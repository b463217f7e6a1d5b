"""Find a version of a lakehouse by number, time or export name."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime

from trinitylake_ops.access.allowed_roots import AllowedRoots, cut
from trinitylake_ops.errors import (
    CorruptFileError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    LocationNotAllowedError,
    VersionExpiredError,
    VersionNotFoundError,
)
from trinitylake_ops.format.definitions import ExpirationState, ExportRecord, LakehouseDef, ParentRecord
from trinitylake_ops.format.file_names import MAX_VERSION, manifest_path, parse_root_path
from trinitylake_ops.format.keys import LAKEHOUSE_DEF, PREVIOUS_ROOT
from trinitylake_ops.format.locations import is_uri, normalize_root_uri, to_location
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.versions.latest import latest_snapshot
from trinitylake_ops.versions.root_files import ProbedRoots
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot, epoch_ms
from trinitylake_ops.versions.time_travel import find_version_at

#: Prefix of the name of a parent's version in its clone.
PARENT_VERSION = "parent@"
_OF_PARENT = re.compile(rf"{PARENT_VERSION}(\d{{1,10}})", re.ASCII)
_MAX_VERSION_DIGITS = 100  # longer numbers are rejected before they are converted

#: Returns a version of the lakehouse at another root. The third argument contains the storage options for that root.
VersionAtRoot = Callable[[str, int, Mapping[str, str] | None], Snapshot]
#: Returns a version of the parent of a clone by number, or by a time in milliseconds since the epoch.
VersionOfParent = Callable[[ParentRecord, int | None, int | None], Snapshot]


class VersionLookup:
    """Finds the versions of one lakehouse.

    Args:
        files: The files of the lakehouse.
        version_at_root: Opens an export at another root.
        of_parent: Opens a version of the parent of a clone.
    """

    def __init__(self, files: LakehouseFiles, version_at_root: VersionAtRoot, of_parent: VersionOfParent):
        self._files = files
        self._version_at_root = version_at_root
        self._of_parent = of_parent

    def snapshot(
        self, version: int | str | None, timestamp: datetime | int | None, latest: Snapshot | None
    ) -> Snapshot:
        """Return a version, by default the latest one.

        Args:
            version: A version number, the name of an export, or ``parent@N``.
            timestamp: An aware datetime, or milliseconds since the epoch.
            latest: The latest version, if the caller has just read it.

        Raises:
            VersionNotFoundError: There is no such version.
            VersionExpiredError: The version was expired.
            ExportNotFoundError: There is no such export.
            InvalidInputError: Both ``version`` and ``timestamp`` are set, or one of them is invalid.
        """
        if version is not None and timestamp is not None:
            raise InvalidInputError("pass a version or a timestamp, not both")
        _check_kind("version", version, (int, str))
        _check_kind("timestamp", timestamp, (int, datetime))
        if isinstance(version, int) or (isinstance(version, str) and version.isascii() and version.isdecimal()):
            return self._of_number(_number(version), latest)
        probed = ProbedRoots(self._files.roots.storage)
        latest = latest or latest_snapshot(self._files, probed)
        if timestamp is not None:
            return self._at(_millis(timestamp), latest, probed)
        return latest if version is None else self._named(version, latest)

    def _at(self, timestamp_ms: int, latest: Snapshot, probed: ProbedRoots) -> Snapshot:
        """Return the version at a time. In a clone, earlier times select versions of the parent."""
        try:
            version = find_version_at(self._files.roots, timestamp_ms, latest.version, probed)
        except VersionNotFoundError:
            if latest.definition.parent is None:
                raise
            return self._of_parent(latest.definition.parent, None, timestamp_ms)
        return self._of(version, latest, probed)

    def _named(self, name: str, latest: Snapshot) -> Snapshot:
        """Return the version of an export, or the version ``parent@N`` of a clone's parent."""
        number, definition = _parents_version(name), latest.definition
        if number is not None and definition.parent is not None and name not in definition.exported_snapshots:
            return self._of_parent(definition.parent, number, None)
        return self.exported(name, latest)

    def _of_number(self, version: int, latest: Snapshot | None) -> Snapshot:
        """Return a version by number. Its root is read together with the latest root: four requests, two round trips.

        If the lakehouse definition has changed since that version, the latest definition is also read.
        """
        if latest is not None:
            return self._of(version, latest)
        probed = ProbedRoots(self._files.roots.storage, [version])
        return self._of(version, latest_snapshot(self._files, probed), probed)

    def _of(self, version: int, latest: Snapshot, probed: ProbedRoots | None = None) -> Snapshot:
        if version == latest.version:
            return latest
        if not 0 <= version < latest.version:
            raise VersionNotFoundError(
                f"version {version} does not exist; the latest is {latest.version}", version=version
            )
        path = self._files.roots.path(version)
        probed = probed or ProbedRoots(self._files.roots.storage)
        probed.read([path])
        data = probed.contents[path]
        root = None if data is None else decode_node(data, path)
        # The definition that a version was committed with cannot list this version as expired.
        if root is None or root.system.get(LAKEHOUSE_DEF) != latest.definition_location:
            check_not_expired(version, latest.definition)
        if root is None:
            raise VersionNotFoundError(
                f"version {version} cannot be read: another program deleted its root", path=path, version=version
            )
        if root.is_sealed:
            raise VersionExpiredError(f"version {version} was expired and purged", path=path, version=version)
        return Snapshot(self._files, version, path, root)

    def exported(self, name: str, latest: Snapshot, storage_options: Mapping[str, str] | None = None) -> Snapshot:
        """Return the version of an export.

        Args:
            name: The name of the export.
            latest: The latest version, whose definition lists the exports.
            storage_options: Options for the storage of an export at another root.

        Raises:
            ExportNotFoundError: There is no such export.
            VersionNotFoundError: The name looks like a number.
            CorruptFileError: The export cannot be decoded.
            StorageError: The export cannot be read.
        """
        location = latest.definition.exported_snapshots.get(name)
        if location is None:
            raise _no_such_name(name, latest)
        path = to_location(self._files.roots.storage.root, location)
        if is_uri(path):
            return self._foreign_export(name, path, storage_options)
        try:
            root = decode_node(self._files.roots.storage.read(path), path)
        except FileMissingError as error:
            if latest_snapshot(self._files).definition.exported_snapshots.get(name) != location:
                raise ExportNotFoundError(f"export {name!r} was dropped while it was opened", path=path) from error
            raise ExportNotFoundError(
                f"the root of export {name!r} is missing: if another program restored settings from before the export"
                " was dropped, run reconcile; otherwise another program deleted the root, so drop the export",
                path=path,
            ) from error
        return Snapshot(self._files, _exported_version(name, path, root, latest.definition), path, root)

    def _foreign_export(self, name: str, uri: str, storage_options: Mapping[str, str] | None) -> Snapshot:
        """Return the version of an export at another root."""
        folder, _, file_name = uri.rpartition("/")
        version, root = parse_root_path(file_name), normalize_root_uri(f"{folder}/")
        if version is None:
            raise CorruptFileError(f"export {name!r} points to {uri!r}, which is not the root of a version", path=uri)
        return self._version_at_root(root, version, storage_options)


def _no_such_name(name: str, latest: Snapshot) -> ExportNotFoundError | VersionNotFoundError:
    """Return the error for an export name that does not exist."""
    definition = latest.definition
    for record in definition.exports:
        if record.name == name:
            kind = "clone" if record.clone_id else "export"
            return ExportNotFoundError(f"{kind} {name!r} is incomplete; run {kind} again to complete it, or drop it")
    if name.startswith(PARENT_VERSION):
        if definition.parent is None:
            return ExportNotFoundError(f"{name!r} names a version of a parent, but this lakehouse is not a clone")
        return ExportNotFoundError(
            f"{name!r} is not a version of {cut(definition.parent.root)}; pass a number, for example parent@12"
        )
    if name[:1] in ("-", "+") and name[1:].isdecimal():
        return VersionNotFoundError(
            f"{name!r} is not a version, export or clone; versions are numbered from 0 to {latest.version}"
        )
    clones = {record.name for record in definition.exports if record.clone_id}
    exports = ", ".join(sorted(definition.exported_snapshots.keys() - clones)) or "none"
    clones_text = f"; clones: {', '.join(record.name for record in clones_of(definition))}" if clones else ""
    is_warehouse = name.startswith("at-") or (name[:1] == "v" and name[1:].isdecimal())
    hint = "; pass a version as a number, for example 12, and a time as a timestamp" if is_warehouse else ""
    return ExportNotFoundError(f"there is no export {name!r}; exports: {exports}{clones_text}{hint}")


def clones_of(definition: LakehouseDef) -> list[ExportRecord]:
    """Return the record of each clone, sorted by name.

    When a clone is refreshed, a second record pins another version for the clone. That record is only returned if the
    clone's own record is missing, so that every clone that pins versions is listed and can be dropped.
    """
    by_id: dict[str, list[ExportRecord]] = {}
    for record in definition.exports:
        if record.clone_id:
            by_id.setdefault(record.clone_id, []).append(record)
    clone_records = (next(filter(_is_own, records), records[0]) for records in by_id.values())
    return sorted(clone_records, key=lambda record: record.name)


def _is_own(record: ExportRecord) -> bool:
    """Whether a record is the clone's own record and not a record of another version that the clone pins."""
    return record.manifest_path == manifest_path(record.clone_id)


def check_not_expired(version: int, definition: LakehouseDef) -> None:
    """Check that a version is not expired.

    Args:
        version: The version.
        definition: The latest lakehouse definition.

    Raises:
        VersionExpiredError: The definition lists the version as expired.
    """
    for batch in definition.expirations:
        if batch.contains(version):
            can_undelete = batch.state == ExpirationState.EXPIRED
            hint = "run undelete to restore it" if can_undelete else "its purge has begun, so it cannot be restored"
            raise VersionExpiredError(f"version {version} was expired; {hint}", version=version)


def _number(version: int | str) -> int:
    """Parse a version number. Raises VersionNotFoundError if it is too long."""
    if isinstance(version, str):
        version = version.lstrip("0") or "0"
        is_too_long = len(version) > _MAX_VERSION_DIGITS
    else:
        is_too_long = abs(version) > 10**_MAX_VERSION_DIGITS
    if is_too_long:
        raise VersionNotFoundError(f"version number is too long; the largest possible version is {MAX_VERSION}")
    return int(version)


def _check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        raise InvalidInputError(f"{name} is {value!r}; it must be {' or '.join(kind.__name__ for kind in kinds)}")


def _millis(timestamp: datetime | int) -> int:
    if isinstance(timestamp, int):
        return timestamp
    if timestamp.tzinfo is None:
        raise InvalidInputError(f"timestamp {timestamp.isoformat()} has no time zone; add one, for example +00:00")
    return epoch_ms(timestamp)


def _exported_version(name: str, path: str, root: NodeFile, definition: LakehouseDef) -> int:
    """Return the version of an export, from its record or else from the name of its root or of the previous root."""
    for record in definition.exports:
        if record.name == name:
            return record.version
    version = parse_root_path(path)
    if version is not None:
        return version
    previous = parse_root_path(root.system.get(PREVIOUS_ROOT, ""))
    return 0 if previous is None else min(previous + 1, MAX_VERSION)


def _parents_version(name: str) -> int | None:
    """Return the number in ``parent@N``, None for any other name."""
    match = _OF_PARENT.fullmatch(name)
    return int(match[1]) if match else None


def check_within(parent: ParentRecord, version: int) -> int:
    """Check that a version of the parent is not later than the cloned version, and return it.

    Args:
        parent: The record of the parent.
        version: The version of the parent.

    Raises:
        VersionNotFoundError: The version is later than the cloned version.
    """
    if version > parent.cloned_version:
        raise VersionNotFoundError(
            f"version {version} of {cut(parent.root)} is later than version {parent.cloned_version}, which was cloned;"
            " open that lakehouse itself",
            version=version,
        )
    return version


def check_granted(parent: ParentRecord, latest: LakehouseDef, allowed_roots: AllowedRoots) -> None:
    """Check that this clone may read its parent: the parent records it, or the operator allows the parent's root.

    Root URIs can be guessed, so the content of a clone alone must not grant access to another lakehouse.

    Args:
        parent: The record of the parent in the clone.
        latest: The latest definition of the parent.
        allowed_roots: The allowed roots of the clone.

    Raises:
        LocationNotAllowedError: The parent does not record a clone with this id at this root.
    """
    root = normalize_root_uri(parent.root)
    if any(root.startswith(known) for known in (*allowed_roots.allowed, *allowed_roots.passed_roots)):
        return
    for record in latest.exports:
        if record.clone_id and record.clone_id == parent.clone_id and record.target_uri == allowed_roots.root:
            return
    raise LocationNotAllowedError(
        f"the lakehouse at {cut(parent.root)!r} records no such clone at {allowed_roots.root}, so its versions cannot"
        " be read; if you trust the writers of this lakehouse with its content, allow that root with --allow-root or"
        " the storage"
        " option 'allowed_roots'",
        path=cut(parent.root),
    )
