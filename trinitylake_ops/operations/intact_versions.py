"""Search older versions for intact content that can replace damaged objects in the latest version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, NotFoundError
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.format.keys import KeyCodec, ObjectName
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.iceberg.reach import TableFile, files_of
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot

#: Errors of damaged or missing files, as opposed to failed requests.
DAMAGED_FILE_ERRORS = (FileMissingError, CorruptFileError)


@dataclass(frozen=True, slots=True)
class IntactDefinition:
    """The newest intact definition of an object."""

    key: str
    name: ObjectName
    #: The newest version that has the definition.
    version: int
    location: str


def newest_intact_version(lake: Lakehouse, base: Snapshot, damaged: VersionRanges) -> Snapshot | None:
    """Return the newest version before ``base`` that is neither damaged nor expired, or None.

    Args:
        lake: The lakehouse.
        base: The latest version.
        damaged: The damaged versions.

    Raises:
        StorageError: A storage request failed.
    """
    return next((snapshot for snapshot in _older_versions(lake, base) if snapshot.version not in damaged), None)


def _older_versions(lake: Lakehouse, base: Snapshot) -> Iterator[Snapshot]:
    """Yield the readable versions before ``base``, newest first."""
    for version in range(base.version - 1, -1, -1):
        try:
            yield lake.snapshot(version)
        except (NotFoundError, *DAMAGED_FILE_ERRORS):
            continue  # expired or damaged


class IntactDefinitionSearch:
    """Find the newest intact definitions of damaged objects."""

    def __init__(self, lake: Lakehouse, damaged_files: Collection[str | None]):
        self._lake = lake
        self._damaged_files = damaged_files

    def find(self, base: Snapshot, damaged: Iterable[ObjectName]) -> tuple[list[IntactDefinition], set[str]]:
        """Find the newest version with an intact definition for each damaged object.

        The search for an object stops at a version without it, because in earlier versions the name belonged to another
        object, which was dropped.

        Args:
            base: The latest version.
            damaged: The names of the damaged objects.

        Returns:
            The definitions, and the locations of the current definitions of objects that are intact in no version.

        Raises:
            StorageError: A storage request failed.
        """
        missing = {_key(base.keys, name): name for name in damaged}
        current = {key: location for key in missing if (location := base.entry(key)) is not None}
        ids = {key: self._id_of(base, location, missing[key]) for key, location in current.items()}
        rejected = set(current.values())
        intact: dict[str, IntactDefinition] = {}
        for snapshot in _older_versions(self._lake, base):
            if not missing:
                break
            for key, name in list(missing.items()):
                if not _may_have(snapshot, key):
                    del missing[key]
                    continue
                location = self._intact_entry(snapshot, key, name, rejected, ids.get(key))
                if location is not None:
                    intact[key] = IntactDefinition(key, missing.pop(key), snapshot.version, location)
        return list(intact.values()), {location for key, location in current.items() if key not in intact}

    def _id_of(self, snapshot: Snapshot, location: str, name: ObjectName) -> str | None:
        """Return the id in a definition, or None if it cannot be read."""
        try:
            return snapshot.namespace_at(location).id if name.table is None else snapshot.table_at(location).id
        except DAMAGED_FILE_ERRORS:
            return None

    def _intact_entry(
        self, snapshot: Snapshot, key: str, name: ObjectName, rejected: set[str], known_id: str | None
    ) -> str | None:
        """Return the location of a version's definition if it is intact and has the known id, if the id is known."""
        try:
            location = snapshot.entry(key)
            if location is None or location in rejected:
                return None
            rejected.add(location)
            is_same = known_id in (None, self._id_of(snapshot, location, name))
            is_intact = is_same and location not in self._damaged_files and self._is_intact(snapshot, location, name)
        except (InvalidInputError, *DAMAGED_FILE_ERRORS):
            return None
        return location if is_intact else None

    def _is_intact(self, snapshot: Snapshot, location: str, name: ObjectName) -> bool:
        """Whether a definition can be read and all files of its table exist. Raises StorageError."""
        if name.table is None:
            return bool(snapshot.namespace_at(location).id)
        definition = snapshot.table_at(location)
        if (
            not definition.is_managed
            or not definition.is_iceberg
            or METADATA_LOCATION not in definition.format_properties
        ):
            return True
        io = reading_io(self._lake)
        return all(self._exists(io, file) for file in files_of(definition, io) if file.live)

    def _exists(self, io: StorageFileIO, file: TableFile) -> bool:
        if file.location in self._damaged_files:
            return False
        size_bytes = io.size_bytes(file.location)
        return size_bytes is not None and file.size_bytes in (None, size_bytes)


def _may_have(snapshot: Snapshot, key: str) -> bool:
    """Whether a version contains an object, or its tree is damaged."""
    try:
        return snapshot.entry(key) is not None
    except DAMAGED_FILE_ERRORS:
        return True


def _key(keys: KeyCodec, name: ObjectName) -> str:
    return keys.namespace_key(name.namespace) if name.table is None else keys.table_key(name.namespace, name.table)
