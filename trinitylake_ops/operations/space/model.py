"""The content of a space summary: catalog files, tables, and the files that those of tables name."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import IntEnum

from trinitylake_ops.iceberg.reach import FileKind
from trinitylake_ops.operations.space.presence import NOWHERE, Presence, export_number

#: The size of a file that belongs to another owner and is not counted.
NOT_COUNTED = -1


def location_hash(location: str) -> int:
    """Return the hash that identifies a location, or the id of a table, in a summary. It is never 0."""
    digest = hashlib.blake2b(location.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


class CatalogKind(IntEnum):
    """The kinds of catalog files."""

    NODE = 1
    #: The definition of a table.
    TABLE = 2
    #: The definition of a namespace or of the lakehouse.
    OTHER = 3


@dataclass(slots=True)
class CatalogFile:
    """A node or a definition."""

    kind: CatalogKind
    #: ``NOT_COUNTED`` for a file of another lakehouse.
    size_bytes: int = 0
    presence: Presence = NOWHERE
    #: How often the tree of the summarized version names it.
    references: int = 0
    #: For the definition of a table: the hash of the table's id; 0 while it could not be read.
    table: int = 0
    #: For the definition of a table: the hash of the location of its metadata; 0 for a table that is not counted.
    metadata: int = 0
    #: The location, while the file could not be read. It is read again by the next run.
    unread_location: str | None = None


#: The kinds of files of tables. The position of a kind is its number in a summary.
TABLE_FILE_KINDS = (
    FileKind.METADATA,
    FileKind.MANIFEST_LIST,
    FileKind.MANIFEST,
    FileKind.DATA,
    FileKind.DELETES,
    FileKind.STATISTICS,
)


@dataclass(slots=True)
class StoredObject:
    """A file of a table, and the hashes of the files that it names."""

    kind: FileKind
    #: ``NOT_COUNTED`` for a file outside of the lakehouse.
    size_bytes: int
    target_bytes: int = 0
    names: tuple[int, ...] = ()
    kept: tuple[int, ...] = ()
    current: tuple[int, ...] = ()


#: The files of one table, by the hash of their location.
TableObjects = dict[int, StoredObject]


@dataclass(slots=True)
class Counts:
    """Numbers of files and bytes."""

    data_files: int = 0
    data_bytes: int = 0
    #: Data files of the current snapshot that are smaller than three quarters of the target size.
    small_files: int = 0
    small_bytes: int = 0
    delete_files: int = 0
    delete_bytes: int = 0
    #: Metadata files, manifest lists, manifests and statistics.
    metadata_files: int = 0
    metadata_bytes: int = 0

    def add(self, other: Counts) -> None:
        """Add other numbers."""
        self.data_files += other.data_files
        self.data_bytes += other.data_bytes
        self.small_files += other.small_files
        self.small_bytes += other.small_bytes
        self.delete_files += other.delete_files
        self.delete_bytes += other.delete_bytes
        self.metadata_files += other.metadata_files
        self.metadata_bytes += other.metadata_bytes

    @property
    def files(self) -> int:
        """The number of all files."""
        return self.data_files + self.delete_files + self.metadata_files

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return self.data_bytes + self.delete_bytes + self.metadata_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """What the files of a group have in common."""

    #: The versions whose metadata reaches the files.
    reach: Presence
    #: The versions that need the files after a trim: their current snapshot, a branch or a tag refers to them.
    use: Presence
    #: Whether the current snapshot of the table in the summarized version contains the files.
    is_current: bool


@dataclass(slots=True)
class TableSums:
    """The sums of one table."""

    id: str
    namespace: str
    name: str
    #: The hash of the location of its definition in the summarized version; 0 if the table was dropped.
    definition: int = 0
    #: False for tables whose files belong to other owners, and for tables of other formats.
    is_counted: bool = True
    #: Why not all of its files are known; empty if they are.
    damage: str = ""
    groups: dict[Group, Counts] = field(default_factory=dict)


class PartKind(IntEnum):
    """The kinds of parts of a summary."""

    CATALOG = 1
    SUMS = 2
    OBJECTS = 3


@dataclass(slots=True)
class Summary:
    """The summary of a lakehouse up to a version."""

    lakehouse_id: str
    #: The summarized version; -1 before the first one.
    version: int = -1
    #: Identifies the content of that version.
    version_id: str = ""
    #: When each version was created that a root file has and that is not purged, in milliseconds since the epoch.
    created_ms: dict[int, int] = field(default_factory=dict)
    #: The same for purged versions whose predecessor is not purged, which was in use until then.
    successor_ms: dict[int, int] = field(default_factory=dict)
    #: The positions of exports, by the path of a root that is not that of a version.
    exports: dict[str, int] = field(default_factory=dict)
    #: The versions whose trees these exports share completely. The trees of other exports are added separately.
    copied_versions: dict[str, int] = field(default_factory=dict)
    next_export: int = 0
    #: The size of data files of tables that do not specify one, by which small files were counted.
    target_bytes: int = 0
    n_shards: int = 1
    catalog: dict[int, CatalogFile] = field(default_factory=dict)
    tables: dict[int, TableSums] = field(default_factory=dict)
    #: Catalog files and tables that changed since the summary was read, or that were removed.
    changed_catalog: set[int] = field(default_factory=set)
    changed_tables: set[int] = field(default_factory=set)

    def export_numbers(self) -> list[int]:
        """Return the numbers that stand for exports in presences."""
        return [export_number(position) for position in self.exports.values()]

    def definitions_of(self, tables: Iterable[int]) -> dict[int, list[int]]:
        """Return the hashes of the definitions of tables."""
        definitions: dict[int, list[int]] = {table: [] for table in tables}
        for number, file in self.catalog.items():
            if file.table in definitions:
                definitions[file.table].append(number)
        return definitions
