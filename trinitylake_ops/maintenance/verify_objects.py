"""Checking what keys point to: definitions, and the files of managed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from trinitylake_ops.errors import CorruptFileError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION, NamespaceDef, TableDef
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.maintenance.verify_tree import Report
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.file_io import StorageFileIO
from trinitylake_ops.tables.reach import files_of
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.snapshot import Snapshot
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.tree.search import scan


class ObjectVerifier:
    """Checks the objects of one version after the other; only what changed since the last one is looked at.

    ``listing`` maps each path under the root to its size in bytes. ``definitions`` and
    ``table_files`` count the files seen.
    """

    def __init__(self, lake: Lakehouse, listing: Mapping[str, int], report: Report):
        self._lake = lake
        self._listing = listing
        self._report = report
        self._io = StorageFileIO.on(lake.storage, lake.storage_options, read_only=True)
        self._before: Snapshot | None = None
        self._namespaces: set[str] = set()
        self._tables_of: Counter[str] = Counter()
        self._checked_definitions: set[str] = set()
        self._checked_metadata: set[str] = set()
        self._checked_files: set[str] = set()
        self._known_table_files: set[str] = set()

    @property
    def definitions(self) -> int:
        """Definitions seen, those of the lakehouse included."""
        return len(self._checked_definitions)

    @property
    def table_files(self) -> int:
        """Files of managed tables seen."""
        return len(self._checked_files)

    def count_lakehouse_def(self, location: str) -> None:
        """Note a lakehouse definition that was read."""
        self._checked_definitions.add(location)

    def check(self, snapshot: Snapshot) -> None:
        """Check one version whose tree can be read."""
        named: list[tuple[ObjectName, KeyChange]] = []
        for change in self._changes(snapshot):
            try:
                name = snapshot.keys.decode(change.key)
            except CorruptFileError as error:
                self._report("key-malformed", error.message, snapshot.location, snapshot.version)
                continue
            if name is not None:
                named.append((name, change))
        self._check_namespaces(named, snapshot)
        self._check_definitions(named, snapshot)
        self._before = snapshot

    def _changes(self, snapshot: Snapshot) -> list[KeyChange]:
        nodes = snapshot.files.nodes
        if self._before is None:
            return [KeyChange(key, None, location) for key, location in scan(nodes, snapshot.root)]
        return diff_trees(nodes, self._before.root, snapshot.root)

    def _check_namespaces(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        touched = {name.namespace for name, _ in changes}
        for name, change in changes:
            if name.table is None:
                (self._namespaces.discard if change.after is None else self._namespaces.add)(name.namespace)
            else:
                self._tables_of[name.namespace] += (change.after is not None) - (change.before is not None)
        for namespace in sorted(touched):
            if self._tables_of[namespace] > 0 and namespace not in self._namespaces:
                message = f"namespace {namespace!r} has tables but no definition"
                self._report("namespace-missing", message, snapshot.location, snapshot.version)

    def _check_definitions(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        fresh = {
            change.after: name
            for name, change in changes
            if change.after is not None and change.after not in self._checked_definitions
        }
        self._checked_definitions |= fresh.keys()
        definitions = run_parallel(
            lambda item: self._read_definition(*item, snapshot.version),
            list(fresh.items()),
            self._lake.storage.concurrency,
        )
        for name, definition in zip(fresh.values(), definitions, strict=True):
            if definition is not None:
                self._check_table(name, definition, snapshot)

    def _read_definition(self, location: str, name: ObjectName, version: int) -> TableDef | None:
        store = self._lake.files.definitions
        try:
            if name.table is not None:
                return store.table(location)
            if store.namespace(location) == NamespaceDef(id=""):
                self._report("definition-unreadable", f"the definition of namespace {name} is empty", location, version)
        except TrinityLakeError as error:
            kind = "namespace" if name.table is None else "table"
            message = f"the definition of {kind} {name} cannot be read: {error.message}"
            self._report("definition-unreadable", message, error.path or location, version)
        return None

    def _check_table(self, name: ObjectName, definition: TableDef, snapshot: Snapshot) -> None:
        """Check that all files which a managed Iceberg table reaches are there, with their sizes."""
        version = snapshot.version
        if definition == TableDef(table_type="", table_format=""):
            path = snapshot.entry(snapshot.keys.table_key(name.namespace, name.table or ""))
            self._report("definition-unreadable", f"the definition of table {name} is empty", path, version)
        metadata = definition.format_properties.get(METADATA_LOCATION)
        is_ours = definition.is_managed and definition.is_iceberg
        if not is_ours or metadata is None or metadata in self._checked_metadata:
            return
        self._checked_metadata.add(metadata)
        try:
            for file in files_of(definition, self._io, self._known_table_files):
                if file.live:
                    self._check_file(name, file.kind, file.location, file.size_bytes, version)
        except TrinityLakeError as error:
            message = f"the files of table {name} cannot be followed: {error.message}"
            path = (error.path or metadata).removeprefix(self._lake.root)
            self._report("table-unreadable", message, path, version)

    def _size_bytes(self, path: str) -> int | None:
        """Return the size of a file, or None; one beyond the root or newer than the listing is looked up."""
        return self._listing[path] if path in self._listing else self._io.size_bytes(path)

    def _check_file(self, name: ObjectName, kind: str, path: str, size_bytes: int | None, version: int) -> None:
        if path in self._checked_files:
            return
        self._checked_files.add(path)
        found_bytes = self._size_bytes(path)
        if found_bytes is None:
            self._report("table-file-missing", f"{kind} file of table {name} is missing", path, version)
        elif size_bytes is not None and size_bytes != found_bytes:
            message = f"{kind} file of table {name} has {found_bytes} bytes, its table says {size_bytes}"
            self._report("table-file-size", message, path, version)
