"""Find the files of a table that name a former location of its lakehouse, and the copies that replace them.

Iceberg's files contain full URIs. In a lakehouse whose files were copied or moved, they name the former location. The
metadata file of a table is written again under a new name, and so are the manifest lists, manifests and position
deletes that name the former location. No data file is read, and the names of other lakehouses' files stay.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from pyiceberg.catalog import MetastoreCatalog
from pyiceberg.manifest import DataFileContent, ManifestEntry, ManifestEntryStatus

from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.locations import is_uri, to_uri
from trinitylake_ops.iceberg.copied_deletes import is_copied_format
from trinitylake_ops.iceberg.copy import FileCopy, TableCopy, TableFileMap, copied_definition
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import metadata_uri
from trinitylake_ops.iceberg.metadata import COMPRESSED, read_table_metadata
from trinitylake_ops.iceberg.reach import FileKind, entries_in, manifests_in
from trinitylake_ops.storage.parallel import run_parallel

#: The advice for a table with position deletes that hold paths and cannot be written anew.
DELETES_REMEDY = (
    "let 'trinitylake compact-tables' apply them, or the engine that wrote them, and then trim the table; until then it"
    " is read at this place by this program alone"
)
_LONGEST_NAME_CHARS = 150


@dataclass(frozen=True, slots=True)
class MovedFiles:
    """The files of a table that name its former place, as paths under ``home``: the own root, or the table root.

    ``lists`` and ``manifests`` are rewritten, and so are all lists that name such a manifest. ``deletes`` are files of
    position deletes that are rewritten, with their sizes. ``unmoved_deletes`` is one that cannot be, empty if there is
    none. ``uris`` are those of the table's place and of all its lists, as the metadata names them. Files elsewhere are
    given by URIs.
    """

    home: str
    metadata: str
    lists: tuple[str, ...]
    manifests: tuple[str, ...]
    deletes: Mapping[str, int]
    unmoved_deletes: str
    uris: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many files are written anew."""
        return 1 + len(self.lists) + len(self.manifests) + len(self.deletes)


@dataclass(frozen=True, slots=True)
class _Relocated(TableFileMap):
    """The places of files: those written anew under their new names, others by their paths, here or in a source."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    def uri(self, io: StorageFileIO, uri: str) -> str:
        path = _path_at(uri, self.target_root, io)
        return path if is_uri(path) else self.target_root + self.renamed.get(path, path)

    def is_copied(self, uri: str) -> bool:
        return uri.removeprefix(self.target_root) in self.written


def moved_files(definition: TableDef, io: StorageFileIO) -> MovedFiles | None:
    """Return the files of a MANAGED Iceberg table that name its former place, None if no file does.

    Reads its metadata and all manifest lists and manifests. Raises CorruptFileError, StorageError.
    """
    io = io.for_table(definition)
    uri, home = metadata_uri(definition, io.root), io.home_of(definition.id)
    metadata = read_table_metadata(io, uri)
    snapshots = {_path_at(one.manifest_list, home, io): one for one in metadata.snapshots if one.manifest_list}
    listed = run_parallel(lambda one: manifests_in(one, io), list(snapshots.values()), io.storage.concurrency)
    found = {manifest.manifest_path: manifest for several in listed for manifest in several}
    entries = run_parallel(lambda one: entries_in(one, io), list(found.values()), io.storage.concurrency)
    listing = {_path_at(path, home, io): several for path, several in zip(found, entries, strict=True)}
    moved = {
        path
        for path, several in listing.items()
        if not is_uri(path) and any(_is_moved(entry.data_file.file_path, home, io) for entry in several)
    }
    deletes: dict[str, int] = {}
    for path, several in listing.items() if moved else ():
        positions = _position_deletes(several, home, io)
        deletes |= positions
        moved.update([path] if positions and not is_uri(path) else [])

    def is_rewritten(path: str) -> bool:
        return _is_moved(path, home, io) or _path_at(path, home, io) in moved

    lists = [
        location
        for (location, _), several in zip(snapshots.items(), listed, strict=True)
        if not is_uri(location) and any(is_rewritten(one.manifest_path) for one in several)
    ]
    named = [*(one.manifest_list for one in snapshots.values()), *(one.statistics_path for one in metadata.statistics)]
    named += [one.statistics_path for one in metadata.partition_statistics]
    is_own = not is_uri(_path_at(uri, home, io))
    names_former = any(_is_moved(one, home, io) for one in (*named, uri))
    names_former |= is_own and not metadata.location.startswith(home) and io.note_former_location(metadata.location)
    if not moved and not lists and not names_former:
        return None
    uris = (metadata.location, *(snapshot.manifest_list for snapshot in metadata.snapshots))
    metadata_path = _path_at(uri, home, io)
    unmoved = next((path for path in sorted(deletes) if is_uri(path) or not is_copied_format(path)), "")
    return MovedFiles(home, metadata_path, tuple(lists), tuple(sorted(moved)), deletes, unmoved, uris)


def _position_deletes(entries: Iterable[ManifestEntry], home: str, io: StorageFileIO) -> dict[str, int]:
    """Return the sizes of live files of position deletes, by their paths. Whatever they name, it may have moved."""
    files = [entry.data_file for entry in entries if entry.status != ManifestEntryStatus.DELETED]
    return {
        _path_at(file.file_path, home, io): file.file_size_in_bytes
        for file in files
        if file.content == DataFileContent.POSITION_DELETES
    }


def _path_at(uri: str, home: str, io: StorageFileIO) -> str:
    """Return the path under ``home`` where a file is read, its URI if that is elsewhere."""
    return to_uri(io.root, io.location(uri)).removeprefix(home)


def _is_moved(uri: str, home: str, io: StorageFileIO) -> bool:
    return not uri.startswith(home) and not is_uri(_path_at(uri, home, io))


def relocated(definition: TableDef, moved: MovedFiles, io: StorageFileIO) -> tuple[TableCopy, TableDef]:
    """Return the copies that replace a table's moved files, under new names, and the definition that names them.

    Args:
        definition: The table.
        moved: Its moved files. All its position deletes can be rewritten.
        io: Reads and writes its files.

    Raises:
        LocationNotAllowedError: The table may not have a file.
        StorageError: The owner of its folder cannot be read or written.
    """
    folder, identifier = f"{table_prefix(definition.id)}metadata/", uuid.uuid4()
    paths = (*moved.lists, *moved.manifests, *moved.deletes)
    renamed = {path: f"{folder}{identifier}-{path.rpartition('/')[2][-_LONGEST_NAME_CHARS:]}" for path in paths}
    metadata = f"{folder}{_next_name(moved.metadata, identifier)}"
    written = frozenset(renamed.values())
    places = _Relocated(definition.id, io.root, moved.home, holder_root=io.root, renamed=renamed, written=written)
    files = []
    for kind, sources in (
        (FileKind.POSITION_DELETES, tuple(moved.deletes)),
        (FileKind.MANIFEST, moved.manifests),
        (FileKind.MANIFEST_LIST, moved.lists),
        (FileKind.METADATA, (moved.metadata,)),
    ):
        for path in sources:
            source = path if is_uri(path) else places.location(path)
            io.for_table(definition).check_may_have(to_uri(io.root, source))
            files.append(FileCopy(kind, source, renamed.get(path, metadata), moved.deletes.get(path)))
    io.folders.check(io.storage_at(moved.home), metadata)
    return TableCopy(places, tuple(files)), copied_definition(definition, places.location(metadata))


def _next_name(location: str, identifier: uuid.UUID) -> str:
    version = MetastoreCatalog._parse_metadata_version(location) + 1
    is_compressed = location.endswith(COMPRESSED)
    return f"{max(version, 0):05d}-{identifier}{'.gz' if is_compressed else ''}.metadata.json"
