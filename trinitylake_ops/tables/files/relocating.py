"""Metadata of a table that was moved with its lakehouse, written anew for the place where it is now.

Iceberg's files hold full URIs. So in a lakehouse whose files were copied or moved, they go on naming the former place.
This module writes a table's metadata file once more, under a fresh name. It does the same for the manifest lists and
manifests that name the former place. No data file is read, and the names of other lakehouses' files stay.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from pyiceberg.catalog import MetastoreCatalog

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.files.copying import FileCopy, TablePlaces, copied_definition, rewritten
from trinitylake_ops.tables.files.metadata import COMPRESSED, read_table_metadata
from trinitylake_ops.tables.files.reach import FileKind, content_file, entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import metadata_uri

#: The advice for a table with position deletes. They hold paths in their rows, which this program does not rewrite.
DELETES_REMEDY = (
    "let an engine rewrite its data files, such as by Spark's rewrite_data_files with 'delete-file-threshold' 1, which"
    " leaves none; until then it is read at this place by this program alone"
)
_LONGEST_NAME_CHARS = 150


@dataclass(frozen=True, slots=True)
class MovedFiles:
    """The files of a table, as paths under the root, that name its former place.

    ``lists`` and ``manifests`` are written anew, and so are all lists that name such a manifest. ``sizes_bytes`` are
    those of all manifests. ``deletes`` is a live file of position deletes, None if there is none. ``uris`` are those
    of the table's place and of all its lists, as the metadata names them.
    """

    metadata: str
    lists: tuple[str, ...]
    manifests: tuple[str, ...]
    sizes_bytes: Mapping[str, int]
    deletes: str | None
    uris: tuple[str, ...]

    @property
    def count(self) -> int:
        """How many files are written anew."""
        return 1 + len(self.lists) + len(self.manifests)


@dataclass(frozen=True, slots=True)
class _Relocated(TablePlaces):
    """The places of files: those written anew under their new names, others by their paths, here or in a source."""

    renamed: Mapping[str, str] = field(default_factory=dict)

    def uri(self, io: StorageFileIO, uri: str) -> str:
        location = io.location(uri)
        return location if is_uri(location) else self.target_root + self.renamed.get(location, location)


def moved_files(definition: TableDef, io: StorageFileIO) -> MovedFiles | None:
    """Return the files of a MANAGED Iceberg table that name its former place, None if no file does.

    Reads its metadata and all manifest lists and manifests. Raises CorruptFileError, StorageError.
    """
    uri = metadata_uri(definition, io.root)
    metadata = read_table_metadata(io, uri)
    snapshots = {io.location(one.manifest_list): one for one in metadata.snapshots if one.manifest_list}
    listed = run_parallel(lambda one: manifests_in(one, io), list(snapshots.values()), io.storage.concurrency)
    found = {manifest.manifest_path: manifest for several in listed for manifest in several}
    entries = run_parallel(lambda one: entries_in(one, io), list(found.values()), io.storage.concurrency)
    moved: set[str] = set()
    deletes: str | None = None
    for path, several in zip(found, entries, strict=True):
        files = [content_file(entry, io, live=True) for entry in several]
        deletes = deletes or next((one.location for one in files if one.kind == FileKind.POSITION_DELETES), None)
        if any(_is_moved(entry.data_file.file_path, io) for entry in several) and not is_uri(io.location(path)):
            moved.add(io.location(path))
    lists = [
        location
        for (location, _), several in zip(snapshots.items(), listed, strict=True)
        if not is_uri(location)
        and any(_is_moved(one.manifest_path, io) or io.location(one.manifest_path) in moved for one in several)
    ]
    named = [*(one.manifest_list for one in snapshots.values()), *(one.statistics_path for one in metadata.statistics)]
    named += [one.statistics_path for one in metadata.partition_statistics]
    is_own = not is_uri(io.location(uri))
    names_former = any(_is_moved(one, io) for one in (*named, uri)) or (is_own and _is_former(metadata.location, io))
    if not moved and not lists and not names_former:
        return None
    sizes_bytes = {io.location(path): manifest.manifest_length for path, manifest in found.items()}
    uris = (metadata.location, *(snapshot.manifest_list for snapshot in metadata.snapshots))
    return MovedFiles(io.location(uri), tuple(lists), tuple(sorted(moved)), sizes_bytes, deletes, uris)


def _is_former(location: str, io: StorageFileIO) -> bool:
    return not location.startswith(io.root) and io.note_place_of(location)


def _is_moved(uri: str, io: StorageFileIO) -> bool:
    return not uri.startswith(io.root) and not is_uri(io.location(uri))


def write_relocated(
    definition: TableDef, moved: MovedFiles, io: StorageFileIO, announce: Callable[[str], None]
) -> TableDef:
    """Write a table's moved files anew and return the definition that names its new metadata file.

    ``announce`` gets each path before it is written. Raises InvalidInputError for a table with position deletes, which
    name data files in their rows. Raises CorruptFileError, StorageError.
    """
    if moved.deletes is not None:
        raise InvalidInputError(
            f"table {definition.id} has position deletes, which name data files by their paths ({moved.deletes!r});"
            f" {DELETES_REMEDY}"
        )
    folder, identifier = f"{table_prefix(definition.id)}metadata/", uuid.uuid4()
    paths = (*moved.lists, *moved.manifests)
    renamed = {path: f"{folder}{identifier}-{path.rpartition('/')[2][-_LONGEST_NAME_CHARS:]}" for path in paths}
    places = _Relocated(definition.id, io.root, io.root, renamed=renamed)
    sizes_bytes = dict(moved.sizes_bytes)
    io.folders.claim(f"{folder}{identifier}")
    for kind, paths in ((FileKind.MANIFEST, moved.manifests), (FileKind.MANIFEST_LIST, moved.lists)):
        for path in paths:
            data = rewritten(FileCopy(kind, path, renamed[path], None), io.read_whole(path), io, places, sizes_bytes)
            sizes_bytes[renamed[path]] = len(data)
            announce(renamed[path])
            create_fresh(io.storage, {renamed[path]: data})
    target = f"{folder}{_next_name(moved.metadata, identifier)}"
    copy = FileCopy(FileKind.METADATA, moved.metadata, target, None)
    data = rewritten(copy, io.read_whole(moved.metadata), io, places, sizes_bytes)
    announce(target)
    create_fresh(io.storage, {target: data})
    return copied_definition(definition, target)


def _next_name(location: str, identifier: uuid.UUID) -> str:
    version = MetastoreCatalog._parse_metadata_version(location) + 1
    is_compressed = location.endswith(COMPRESSED)
    return f"{max(version, 0):05d}-{identifier}{'.gz' if is_compressed else ''}.metadata.json"
