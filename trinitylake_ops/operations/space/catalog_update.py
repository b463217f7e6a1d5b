"""Update the catalog files of a summary: versions, exports and definitions that are new since."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence

from trinitylake_ops.errors import CorruptFileError, FileMissingError, TrinityLakeError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.keys import COMMIT_ID, LAKEHOUSE_DEF, TABLE_KEY_PREFIX
from trinitylake_ops.format.locations import is_uri, located, normalize_root_uri, to_location
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.operations.base import base_id_of
from trinitylake_ops.operations.gc.survey import Progress
from trinitylake_ops.operations.space.catalog_walk import CatalogWalk, NodePointers, OutdatedSummaryError
from trinitylake_ops.operations.space.model import NOT_COUNTED, Summary, TableSums, location_hash
from trinitylake_ops.operations.space.presence import export_number
from trinitylake_ops.operations.space.tables import read_definitions
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.roots import read_roots
from trinitylake_ops.versions.snapshot import Snapshot

logger = logging.getLogger(__name__)

_ROOTS_AT_ONCE = 64


class CatalogUpdate:
    """Updates the catalog files of a summary to a version.

    Args:
        lake: The lakehouse.
        base: The version.
        listed: The files with names that begin with ``_``, by path.
        versions: The versions that can be read or undeleted, in ascending order.
        progress: Called with the unit that is counted, the number done, and the total.
    """

    def __init__(
        self,
        lake: Lakehouse,
        base: Snapshot,
        listed: Mapping[str, FileInfo],
        versions: Sequence[int],
        progress: Progress,
    ):
        self._lake = lake
        self._files = lake.files
        self._base = base
        self._listed = listed
        self._versions = versions
        self._progress = progress
        self._place = located(lake.root)
        #: Reads the files of tables.
        self.io: StorageFileIO = reading_io(lake)
        table_root = base.definition.table_root
        #: The URI of the lakehouse's table root; empty if it has none.
        self.table_root = normalize_root_uri(table_root) if table_root else ""
        #: The definitions that were read, by the hash of the location of their metadata.
        self.definitions: dict[int, TableDef] = {}
        #: The locations of the definitions that were read, by hash.
        self.locations: dict[int, str] = {}
        #: Tables whose name or definition in the summarized version changed.
        self.renamed: set[int] = set()
        #: The versions that exports are copies of, by the path of the export's root.
        self.exported_versions: dict[str, int] = {}

    def run(self, summary: Summary) -> None:
        """Update the summary in place.

        Raises:
            OutdatedSummaryError: The stored summary contradicts the lakehouse.
            CorruptFileError: A root or a node is damaged.
            FileMissingError: A node is missing.
            StorageError: The storage failed.
        """
        known_root = self._known_root(summary)
        walk = CatalogWalk(summary, self._files.nodes, self._place)
        walk.note_keys(self._pointers(self._base.root))
        self._add_versions(summary, walk, known_root)
        self._add_exports(summary, walk)
        walk.finish()
        self._measure_others(summary, walk)
        self._read_tables(summary, walk)
        self._name_tables(summary, known_root)
        summary.version, summary.version_id = self._base.version, base_id_of(self._base)
        self._note_successors(summary)
        summary.created_ms = {version: summary.created_ms[version] for version in self._versions}

    def _note_successors(self, summary: Summary) -> None:
        """Record when purged versions were created that ended the use of other versions."""
        existing = set(self._versions)
        successors = {version + 1 for version in existing} - existing - {self._base.version + 1}
        known = {**summary.successor_ms, **summary.created_ms}
        unread = sorted(version for version in successors - known.keys() if self._path(version) in self._listed)
        for version, data in read_roots(self._files.roots, unread, _ROOTS_AT_ONCE):
            if data is not None:
                known[version] = decode_node(data, self._path(version)).created_at_ms
        summary.successor_ms = {version: known[version] for version in sorted(successors & known.keys())}

    def _path(self, version: int) -> str:
        return self._files.roots.path(version)

    def _pointers(self, root: NodeFile) -> NodePointers:
        return NodePointers.of(root, self._place)

    def _known_root(self, summary: Summary) -> NodeFile | None:
        """Return the root of the summarized version; None if there is none, or if it was purged.

        Raises OutdatedSummaryError if another version has its number now.
        """
        if summary.version < 0:
            return None
        if summary.version == self._base.version:
            root = self._base.root
        else:
            ((_, data),) = read_roots(self._files.roots, [summary.version], 1)
            if data is None:
                raise OutdatedSummaryError
            root = decode_node(data, self._path(summary.version))
        if (root.system.get(COMMIT_ID) or root.system.get(LAKEHOUSE_DEF)) != summary.version_id:
            raise OutdatedSummaryError
        return None if root.is_sealed else root

    def _add_versions(self, summary: Summary, walk: CatalogWalk, known_root: NodeFile | None) -> None:
        new = [version for version in self._versions if version > summary.version]
        previous = summary.version
        previous_root = None if known_root is None else self._pointers(known_root)
        for start in range(0, len(new), _ROOTS_AT_ONCE):
            roots = list(self._read_roots(new[start : start + _ROOTS_AT_ONCE]))
            pointers = [(version, root.created_at_ms, self._pointers(root)) for version, root in roots]
            walk.prefetch(root for _, _, root in pointers)
            for version, created_at_ms, root in pointers:
                walk.note_keys(root)
                walk.advance(version, root, previous, previous_root)
                summary.created_ms[version] = created_at_ms
                previous, previous_root = version, root
            self._progress("versions", start + len(roots), len(new))

    def _read_roots(self, versions: Sequence[int]) -> Iterator[tuple[int, NodeFile]]:
        """Yield the roots of versions. Raises FileMissingError for a version that was purged since the listing."""
        older = [version for version in versions if version != self._base.version]
        for version, data in read_roots(self._files.roots, older, max(1, len(older))):
            path = self._path(version)
            root = None if data is None else decode_node(data, path)
            if root is None or root.is_sealed:
                raise FileMissingError(f"version {version} was deleted during the operation; run it again", path=path)
            yield version, root
        if self._base.version in versions:
            yield self._base.version, self._base.root

    def _add_exports(self, summary: Summary, walk: CatalogWalk) -> None:
        """Add exports whose trees are not those of versions, and find out which versions the others are copies of."""
        records = {record.root_location: record for record in self._base.definition.exports if record.root_location}
        paths = {self._path(version): version for version in self._versions}
        existing = frozenset(self._versions)
        kept: set[str] = set()
        for location in self._base.definition.exported_snapshots.values():
            path = to_location(self._lake.root, location)
            if is_uri(path):
                continue
            if path in paths:
                self.exported_versions[path] = paths[path]
                continue
            kept.add(path)
            copied_version = summary.copied_versions.get(path)
            if copied_version in existing and copied_version is not None:
                self.exported_versions[path] = copied_version
            elif path not in summary.exports or copied_version is not None:
                record = records.get(location)
                self._add_export(summary, walk, path, None if record is None else record.version)
        for path in [path for path in summary.exports if path not in kept]:
            del summary.exports[path]
            summary.copied_versions.pop(path, None)

    def _add_export(self, summary: Summary, walk: CatalogWalk, path: str, version: int | None) -> None:
        try:
            root = self._pointers(decode_node(self._lake.storage.read(path), path))
        except (FileMissingError, CorruptFileError) as error:  # verify reports it
            logger.warning("an export is not counted: %s", error.message)
            return
        summary.copied_versions.pop(path, None)
        if path not in summary.exports:
            summary.exports[path], summary.next_export = summary.next_export, summary.next_export + 1
        if version is not None and version in self._versions:
            ((_, original),) = self._read_roots([version])
            if self._pointers(original) == root:
                summary.copied_versions[path] = self.exported_versions[path] = version
                return
        walk.note_keys(root)
        walk.add_export(export_number(summary.exports[path]), root)

    def _measure_others(self, summary: Summary, walk: CatalogWalk) -> None:
        """Determine the sizes of new definitions of namespaces and of the lakehouse."""
        unlisted = []
        for number, location in walk.new_others.items():
            info = self._listed.get(location)
            if is_uri(location):
                summary.catalog[number].size_bytes = NOT_COUNTED
            elif info is not None:
                summary.catalog[number].size_bytes = info.size_bytes
            else:
                unlisted.append((number, location))
        contents = self._files.storage.read_available([location for _, location in unlisted])
        for (number, _), data in zip(unlisted, contents, strict=True):
            if isinstance(data, bytes):
                summary.catalog[number].size_bytes = len(data)
            elif not isinstance(data, FileMissingError | CorruptFileError):  # verify reports a missing or damaged one
                raise data

    def _read_tables(self, summary: Summary, walk: CatalogWalk) -> None:
        """Read new definitions of tables, and those that could not be read before."""
        unread = {
            number: file.unread_location
            for number, file in summary.catalog.items()
            if file.unread_location is not None and number not in walk.new_tables
        }
        new = [*walk.new_tables.items(), *unread.items()]
        results = read_definitions(self._files, self.io, [location for _, location in new])
        for done, ((number, location), result) in enumerate(zip(new, results, strict=True), 1):
            file = summary.catalog[number]
            if isinstance(result, TrinityLakeError):
                if file.unread_location != location:
                    file.unread_location = location
                    summary.changed_catalog.add(number)
                continue
            if number not in walk.new_tables and not file.table:
                raise OutdatedSummaryError  # it was restored, and its table has to get its name and its files
            definition = result.definition
            file.size_bytes, file.metadata, file.table = (
                result.size_bytes,
                result.metadata,
                location_hash(definition.id),
            )
            self.locations[number] = location
            if result.metadata:
                self.definitions[result.metadata] = definition
            if number in walk.new_tables:
                summary.changed_catalog.add(number)
            if number in walk.new_tables:
                table = summary.tables.setdefault(file.table, TableSums(definition.id, "", ""))
                table.namespace, table.name = self._name(walk.keys.get(location))
            if done % 256 == 0 or done == len(new):
                self._progress("definitions", done, len(new))

    def _name(self, key: str | None) -> tuple[str, str]:
        try:
            name = None if key is None else self._base.keys.decode(key)
        except CorruptFileError:  # verify reports it
            return "", str(key)
        return ("", "") if name is None else (name.namespace, name.table or "")

    def _name_tables(self, summary: Summary, known_root: NodeFile | None) -> None:
        """Record which definition each table has in the summarized version, and its name there."""
        if known_root is not None:
            changes = diff_trees(self._files.nodes, known_root, self._base.root)
            before = {change.before: change.key for change in changes if change.before is not None}
            after = {change.key: change.after for change in changes if change.after is not None}
        else:
            before = {}
            after = dict(scan(self._files.nodes, self._base.root))
            for number, table in summary.tables.items():
                if table.definition:
                    table.definition = 0
                    self.renamed.add(number)
        for location, key in before.items():
            self._set_definition(summary, key, location, is_dropped=True)
        for key, location in after.items():
            self._set_definition(summary, key, location, is_dropped=False)

    def _set_definition(self, summary: Summary, key: str, location: str, *, is_dropped: bool) -> None:
        place = self._place(location)
        file = summary.catalog.get(location_hash(place))
        table = None if file is None else summary.tables.get(file.table)
        if file is None or table is None or not key.startswith(TABLE_KEY_PREFIX):
            return
        number = location_hash(place)
        if is_dropped:
            if table.definition == number:
                table.definition = 0
                self.renamed.add(file.table)
            return
        table.definition = number
        table.namespace, table.name = self._name(key)
        self.renamed.add(file.table)
