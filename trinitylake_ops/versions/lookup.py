"""Finds one version of a lakehouse by its number, by a time, or by the name of an export."""

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

#: How a version of the parent is named in its clone.
PARENT_VERSION = "parent@"
_OF_PARENT = re.compile(rf"{PARENT_VERSION}(\d{{1,10}})", re.ASCII)
_MAX_VERSION_DIGITS = 100  # far more than any version has, and few enough to convert and show

#: Returns a version of the lakehouse at another root. It gets that root's storage options, if the caller gave any.
VersionAtRoot = Callable[[str, int, Mapping[str, str] | None], Snapshot]
#: Returns a version of the parent of a clone, by its number or a time in milliseconds.
VersionOfParent = Callable[[ParentRecord, int | None, int | None], Snapshot]


class VersionLookup:
    """Finds the versions of one lakehouse.

    ``version_at_root`` opens exports at another root, and ``of_parent`` what came before the beginning of a clone.
    """

    def __init__(self, files: LakehouseFiles, version_at_root: VersionAtRoot, of_parent: VersionOfParent):
        self._files = files
        self._version_at_root = version_at_root
        self._of_parent = of_parent

    def snapshot(
        self, version: int | str | None, timestamp: datetime | int | None, latest: Snapshot | None
    ) -> Snapshot:
        """Return a version, or the latest one where neither argument is given.

        ``latest`` is the latest version, if the caller has just found it.

        Raises VersionNotFoundError, VersionExpiredError, ExportNotFoundError, InvalidInputError when both are given.
        """
        if version is not None and timestamp is not None:
            raise InvalidInputError("give a version or a timestamp, not both")
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
        """Return the version of a time. In a clone, one from before its beginning is the parent's."""
        try:
            found = find_version_at(self._files.roots, timestamp_ms, latest.version, probed)
        except VersionNotFoundError:
            if latest.definition.parent is None:
                raise
            return self._of_parent(latest.definition.parent, None, timestamp_ms)
        return self._of(found, latest, probed)

    def _named(self, name: str, latest: Snapshot) -> Snapshot:
        """Return an export's version, or in a clone one of the parent's, ``parent@N``."""
        number, definition = _parents_version(name), latest.definition
        if number is not None and definition.parent is not None and name not in definition.exported_snapshots:
            return self._of_parent(definition.parent, number, None)
        return self.exported(name, latest)

    def _of_number(self, version: int, latest: Snapshot | None) -> Snapshot:
        """Return a version, whose root is read together with the latest one's. This takes four requests in two rounds.

        If the settings of the lakehouse were changed since, or files expired, the latest definition is read, too.
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
        # A definition older than a version cannot say that it expired.
        if root is None or root.system.get(LAKEHOUSE_DEF) != latest.definition_location:
            check_not_expired(version, latest.definition)
        if root is None:
            raise VersionNotFoundError(
                f"version {version} is gone: its root was deleted by another program", path=path, version=version
            )
        if root.is_sealed:
            raise VersionExpiredError(f"version {version} was expired and purged", path=path, version=version)
        return Snapshot(self._files, version, path, root)

    def exported(self, name: str, latest: Snapshot, storage_options: Mapping[str, str] | None = None) -> Snapshot:
        """Return the version that an export holds, by the definition of the latest version.

        Raises ExportNotFoundError, VersionNotFoundError for a name that looks like a number, CorruptFileError,
        StorageError.
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
                raise ExportNotFoundError(f"export {name!r} was dropped meanwhile", path=path) from error
            raise ExportNotFoundError(
                f"the root of export {name!r} is gone: if another program went back to settings from before it was"
                " dropped, reconcile; else it was deleted by others: drop the export",
                path=path,
            ) from error
        return Snapshot(self._files, _exported_version(name, path, root, latest.definition), path, root)

    def _foreign_export(self, name: str, uri: str, storage_options: Mapping[str, str] | None) -> Snapshot:
        """Return the version of another lakehouse, the one that an export made there."""
        folder, _, file_name = uri.rpartition("/")
        version, root = parse_root_path(file_name), normalize_root_uri(f"{folder}/")
        if version is None:
            raise CorruptFileError(f"export {name!r} stands at {uri!r}, which is no root of a version", path=uri)
        return self._version_at_root(root, version, storage_options)


def _no_such_name(name: str, latest: Snapshot) -> ExportNotFoundError | VersionNotFoundError:
    """Return the error for a name that is none of a version."""
    definition = latest.definition
    for record in definition.exports:
        if record.name == name:
            kind = "clone" if record.clone_id else "export"
            return ExportNotFoundError(f"{kind} {name!r} is not finished; {kind} it again to finish it, or drop it")
    if name.startswith(PARENT_VERSION):
        if definition.parent is None:
            return ExportNotFoundError(f"{name!r} means a version of a parent, and this lakehouse is no clone")
        return ExportNotFoundError(
            f"{name!r} names no version of {cut(definition.parent.root)}; give its number, such as parent@12"
        )
    if name[:1] in ("-", "+") and name[1:].isdecimal():
        return VersionNotFoundError(
            f"{name!r} is no version: they are numbered from 0 to {latest.version}; nor is it an export or a clone"
        )
    clones = {record.name for record in definition.exports if record.clone_id}
    exports = ", ".join(sorted(definition.exported_snapshots.keys() - clones)) or "none"
    clones_text = f"; clones: {', '.join(record.name for record in clones_of(definition))}" if clones else ""
    is_warehouse = name.startswith("at-") or (name[:1] == "v" and name[1:].isdecimal())
    hint = "; a version is named by its number, such as 12, and a time is a timestamp" if is_warehouse else ""
    return ExportNotFoundError(f"there is no export {name!r}; exports: {exports}{clones_text}{hint}")


def clones_of(definition: LakehouseDef) -> list[ExportRecord]:
    """Return the record of each clone, by name.

    A refresh keeps a further version for its clone by another record. That one is returned only if the clone's own
    record is missing, so that every clone that keeps versions is reported and can be dropped.
    """
    by_id: dict[str, list[ExportRecord]] = {}
    for record in definition.exports:
        if record.clone_id:
            by_id.setdefault(record.clone_id, []).append(record)
    own = (next(filter(_is_own, records), records[0]) for records in by_id.values())
    return sorted(own, key=lambda record: record.name)


def _is_own(record: ExportRecord) -> bool:
    """Return whether a record is that of a clone itself, and not of a further version that it needs."""
    return record.manifest_path == manifest_path(record.clone_id)


def check_not_expired(version: int, definition: LakehouseDef) -> None:
    """Raise VersionExpiredError when the latest definition lists a version as expired."""
    for batch in definition.expirations:
        if batch.contains(version):
            can_undelete = batch.state == ExpirationState.EXPIRED
            hint = "undelete can bring it back" if can_undelete else "its purge has begun, it cannot come back"
            raise VersionExpiredError(f"version {version} was expired; {hint}", version=version)


def _number(version: int | str) -> int:
    """Return the number of a version from its text. Raises VersionNotFoundError for a number too long to be shown."""
    if isinstance(version, str):
        version = version.lstrip("0") or "0"
        is_too_long = len(version) > _MAX_VERSION_DIGITS
    else:
        is_too_long = abs(version) > 10**_MAX_VERSION_DIGITS
    if is_too_long:
        raise VersionNotFoundError(f"no version has that many digits; the last possible one is {MAX_VERSION}")
    return int(version)


def _check_kind(name: str, value: object, kinds: tuple[type, ...]) -> None:
    if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
        raise InvalidInputError(
            f"a {name} is given as {' or '.join(kind.__name__ for kind in kinds)}, not as {value!r}"
        )


def _millis(timestamp: datetime | int) -> int:
    if isinstance(timestamp, int):
        return timestamp
    if timestamp.tzinfo is None:
        raise InvalidInputError(f"timestamp {timestamp.isoformat()} has no time zone; add one, such as +00:00")
    return epoch_ms(timestamp)


def _exported_version(name: str, path: str, root: NodeFile, definition: LakehouseDef) -> int:
    """Return the version that an export holds: as we recorded it, otherwise by the root's own name or predecessor."""
    for record in definition.exports:
        if record.name == name:
            return record.version
    version = parse_root_path(path)
    if version is not None:
        return version
    previous = parse_root_path(root.system.get(PREVIOUS_ROOT, ""))
    return 0 if previous is None else min(previous + 1, MAX_VERSION)


def _parents_version(name: str) -> int | None:
    """Return the number in ``parent@N``, None for any other name of a version."""
    match = _OF_PARENT.fullmatch(name)
    return int(match[1]) if match else None


def check_within(parent: ParentRecord, version: int) -> int:
    """Return a version of the parent. Raises VersionNotFoundError for one that came after the clone was made."""
    if version > parent.cloned_version:
        raise VersionNotFoundError(
            f"version {version} of {cut(parent.root)} is none of this clone's past, which ends at the version that was"
            f" cloned, {parent.cloned_version}; open that lakehouse itself",
            version=version,
        )
    return version


def check_granted(parent: ParentRecord, latest: LakehouseDef, places: AllowedRoots) -> None:
    """Raise LocationNotAllowedError unless a parent, by its latest definition, knows this clone at this root.

    The names of roots can be guessed. So a clone's own content does not decide that all versions of another lakehouse
    may be read. A root that the operator allows may be read in any case.
    """
    root = normalize_root_uri(parent.root)
    if any(root.startswith(known) for known in (*places.allowed, *places.given)):
        return
    for record in latest.exports:
        if record.clone_id and record.clone_id == parent.clone_id and record.target_uri == places.root:
            return
    raise LocationNotAllowedError(
        f"the lakehouse at {cut(parent.root)!r} records no such clone at {places.root}: its versions are not read from"
        " here; if you trust whoever writes here with them, allow that root, by --allow-root or the storage option"
        " 'allowed_roots'",
        path=cut(parent.root),
    )
