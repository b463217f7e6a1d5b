"""Find the files of a table that contain a previous location of its lakehouse, and the copies that replace them.

Iceberg's files contain full URIs. If the files of a lakehouse were copied or moved, the URIs refer to the previous
location. The metadata file of such a table is rewritten under a new name, as are its position deletes and the manifest
lists and manifests that contain the previous location. Data files are not read, and URIs of other lakehouses' files do
not change.
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

#: Advice for a table with position deletes that contain paths and cannot be rewritten.
DELETES_REMEDY = (
    "compact the table with 'trinitylake compact-tables', or with the engine that wrote the deletes, and then trim it;"
    " until then only this program can read it at its new location"
)
_MAX_NAME_CHARS = 150


@dataclass(frozen=True, slots=True)
class MovedFiles:
    """The files of a table that contain its previous location.

    Files are paths under ``home``, or URIs if they are external.
    """

    #: The lakehouse's root, or the table root.
    home: str
    #: The metadata file.
    metadata: str
    #: Manifest lists to rewrite, including those that list a rewritten manifest.
    lists: tuple[str, ...]
    #: Manifests to rewrite.
    manifests: tuple[str, ...]
    #: Position delete files to rewrite, with their sizes in bytes.
    deletes: Mapping[str, int]
    #: A position delete file that cannot be rewritten; empty if there is none.
    unmoved_deletes: str
    #: The table's location and the locations of all manifest lists, as in the metadata.
    uris: tuple[str, ...]

    @property
    def count(self) -> int:
        """Number of files to rewrite."""
        return 1 + len(self.lists) + len(self.manifests) + len(self.deletes)


@dataclass(frozen=True, slots=True)
class _RelocatedFileMap(TableFileMap):
    """Maps rewritten files to their new names, and other files to their current paths."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    written: frozenset[str] = frozenset()

    def uri(self, io: StorageFileIO, uri: str) -> str:
        path = _path_at(uri, self.target_root, io)
        return path if is_uri(path) else self.target_root + self.renamed.get(path, path)

    def is_copied(self, uri: str) -> bool:
        return uri.removeprefix(self.target_root) in self.written


def moved_files(definition: TableDef, io: StorageFileIO) -> MovedFiles | None:
    """Return the files of a MANAGED Iceberg table that contain its previous location, or None if there are none.

    Reads its metadata and all manifest lists and manifests.

    Args:
        definition: Definition of the table.
        io: File IO of the lakehouse.

    Raises:
        CorruptFileError: A file is corrupt.
        StorageError: A file cannot be read.
    """
    io = io.for_table(definition)
    uri, home = metadata_uri(definition, io.root), io.home_of(definition.id)
    metadata = read_table_metadata(io, uri)
    snapshots = {_path_at(shot.manifest_list, home, io): shot for shot in metadata.snapshots if shot.manifest_list}
    listed = run_parallel(lambda shot: manifests_in(shot, io), list(snapshots.values()), io.storage.concurrency)
    manifests = {manifest.manifest_path: manifest for group in listed for manifest in group}
    entries = run_parallel(lambda manifest: entries_in(manifest, io), list(manifests.values()), io.storage.concurrency)
    entries_by_path = {_path_at(path, home, io): group for path, group in zip(manifests, entries, strict=True)}
    moved = {
        path
        for path, group in entries_by_path.items()
        if not is_uri(path) and any(_is_moved(entry.data_file.file_path, home, io) for entry in group)
    }
    deletes: dict[str, int] = {}
    for path, group in entries_by_path.items() if moved else ():
        positions = _position_deletes(group, home, io)
        deletes |= positions
        moved.update([path] if positions and not is_uri(path) else [])

    def is_rewritten(path: str) -> bool:
        return _is_moved(path, home, io) or _path_at(path, home, io) in moved

    lists = [
        location
        for (location, _), group in zip(snapshots.items(), listed, strict=True)
        if not is_uri(location) and any(is_rewritten(manifest.manifest_path) for manifest in group)
    ]
    named = [snapshot.manifest_list for snapshot in snapshots.values()]
    named += [file.statistics_path for file in (*metadata.statistics, *metadata.partition_statistics)]
    is_own = not is_uri(_path_at(uri, home, io))
    names_former = any(_is_moved(location, home, io) for location in (*named, uri))
    names_former |= is_own and not metadata.location.startswith(home) and io.note_former_location(metadata.location)
    if not moved and not lists and not names_former:
        return None
    uris = (metadata.location, *(snapshot.manifest_list for snapshot in metadata.snapshots))
    metadata_path = _path_at(uri, home, io)
    unmoved = next((path for path in sorted(deletes) if is_uri(path) or not is_copied_format(path)), "")
    return MovedFiles(home, metadata_path, tuple(lists), tuple(sorted(moved)), deletes, unmoved, uris)


def _position_deletes(entries: Iterable[ManifestEntry], home: str, io: StorageFileIO) -> dict[str, int]:
    """Return the sizes of live position delete files by path. Each may contain the paths of moved files."""
    files = [entry.data_file for entry in entries if entry.status != ManifestEntryStatus.DELETED]
    return {
        _path_at(file.file_path, home, io): file.file_size_in_bytes
        for file in files
        if file.content == DataFileContent.POSITION_DELETES
    }


def _path_at(uri: str, home: str, io: StorageFileIO) -> str:
    """Return the path of a file under ``home``, or its URI if it is external."""
    return to_uri(io.root, io.location(uri)).removeprefix(home)


def _is_moved(uri: str, home: str, io: StorageFileIO) -> bool:
    return not uri.startswith(home) and not is_uri(_path_at(uri, home, io))


def plan_relocated_files(definition: TableDef, moved: MovedFiles, io: StorageFileIO) -> tuple[TableCopy, TableDef]:
    """Plan the copies that replace a table's moved files under new names.

    Args:
        definition: Definition of the table.
        moved: The moved files of the table. All position deletes must be rewritable.
        io: Reads and writes the files of the table.

    Returns:
        The copies, and the definition that refers to the new metadata file.

    Raises:
        LocationNotAllowedError: The table may not refer to a file.
        StorageError: The owner file of its folder cannot be read or written.
    """
    folder, identifier = f"{table_prefix(definition.id)}metadata/", uuid.uuid4()
    paths = (*moved.lists, *moved.manifests, *moved.deletes)
    renamed = {path: f"{folder}{identifier}-{path.rpartition('/')[2][-_MAX_NAME_CHARS:]}" for path in paths}
    metadata = f"{folder}{_next_name(moved.metadata, identifier)}"
    written = frozenset(renamed.values())
    places = _RelocatedFileMap(
        definition.id, io.root, moved.home, holder_root=io.root, renamed=renamed, written=written
    )
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
