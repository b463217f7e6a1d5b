"""Check the objects of versions: definitions, and the files of managed tables that definitions refer to."""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Literal

from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidNameError, TrinityLakeError
from trinitylake_ops.format.definitions import NamespaceDef, TableDef
from trinitylake_ops.format.file_names import named_kind
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.operations.verification.report import Findings
from trinitylake_ops.operations.verification.tables import TableVerifier
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.change_set import views_in
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.diff import KeyChange, diff_in_parts
from trinitylake_ops.tree.search import scan
from trinitylake_ops.tree.shape import holder_of, is_damaged_pointer
from trinitylake_ops.versions.snapshot import Snapshot

#: The number of changes to read before their definitions are checked in parallel.
BATCH_CHANGES = 8_192

#: The kind of a definition, according to its key.
Kind = Literal["namespace", "table"]


def _kind_of(name: ObjectName) -> Kind:
    return "namespace" if name.table is None else "table"


def _in_batches(parts: Iterable[Iterable[KeyChange]]) -> Iterator[list[KeyChange]]:
    """Yield changes in batches large enough for parallel reads."""
    batch: list[KeyChange] = []
    for part in parts:
        batch += part
        if len(batch) >= BATCH_CHANGES:
            yield batch
            batch = []
    if batch:
        yield batch


def is_empty(definition: NamespaceDef | TableDef) -> bool:
    """Whether a definition has no content, like a definition decoded from an empty file."""
    return definition in (NamespaceDef(id=""), TableDef(table_type="", table_format=""))


class PrefetchedDefinitions:
    """The intact definitions that were read ahead.

    There can be a million definitions, so only a digest and a few bits are stored for each.
    """

    _REQUESTED: Mapping[Kind, int] = MappingProxyType({"namespace": 1, "table": 2})
    _INTACT: Mapping[Kind, int] = MappingProxyType({"namespace": 4, "table": 8})
    _COUNTED = 16

    def __init__(self, on_seen: Callable[[str], None]) -> None:
        """Create an empty collection. ``on_seen`` is called once with the location of each definition that is seen."""
        self._on_seen = on_seen
        self._bits: dict[bytes, int] = {}
        #: The definitions of tables with files, by location.
        self.tables: dict[str, TableDef] = {}
        #: The names of views, by the locations of the definitions of their namespaces.
        self.views: dict[str, frozenset[str]] = {}
        self.n_seen = 0

    def is_new(self, location: str, kind: Kind) -> bool:
        """Whether this is the first call for the definition of this kind at a location.

        Args:
            location: The location.
            kind: The kind of the definition, according to its key.
        """
        digest = _digest(location)
        bits = self._bits.get(digest, 0)
        self._bits[digest] = bits | self._REQUESTED[kind]
        return not bits & self._REQUESTED[kind]

    def add(self, location: str, kind: Kind, table: TableDef | None, views: frozenset[str] = frozenset()) -> None:
        """Add an intact definition.

        Args:
            location: The location.
            kind: The kind of the definition.
            table: The definition of a table with files; otherwise, None.
            views: The names of the views of a namespace.
        """
        if views:
            self.views[location] = views
        digest = _digest(location)
        self._bits[digest] = self._bits.get(digest, 0) | self._INTACT[kind]
        if table is not None:
            self.tables[location] = table

    def see(self, location: str, kind: Kind) -> bool:
        """Mark a definition as seen if it is intact, and return whether it is intact.

        Args:
            location: The location.
            kind: The kind of the definition, according to its key.
        """
        digest = _digest(location)
        bits = self._bits.get(digest, 0)
        if not bits & self._INTACT[kind]:
            return False
        if not bits & self._COUNTED:
            self._bits[digest] = bits | self._COUNTED
            self.n_seen += 1
            self._on_seen(location)
        return True

    def is_seen(self, location: str) -> bool:
        """Whether an intact definition was marked as seen."""
        return bool(self._bits.get(_digest(location), 0) & self._COUNTED)


def _digest(location: str) -> bytes:
    return hashlib.blake2b(location.encode(errors="surrogatepass"), digest_size=16).digest()


class ObjectVerifier:
    """Check the objects of one version after another. Only changes since the previous version are checked."""

    def __init__(self, lake: Lakehouse, tables: TableVerifier, findings: Findings):
        self._lake = lake
        self._tables = tables
        self._report = findings.error
        self._findings = findings
        self._before: Snapshot | None = None
        self._namespaces: set[str] = set()
        self._missing_namespaces: set[str] = set()
        self._tables_of: Counter[str] = Counter()
        #: The names of views, by the locations of the definitions of their namespaces, and by namespace.
        self._views_at: dict[str, frozenset[str]] = {}
        self._views: dict[str, frozenset[str]] = {}
        #: Names that a table and a view share.
        self._shared_names: set[ObjectName] = set()
        #: Whether a definition is intact, by location and kind.
        self._is_intact: dict[tuple[str, Kind | Literal["lakehouse"]], bool] = {}
        #: Intact definitions that were read ahead.
        self.prefetched: PrefetchedDefinitions | None = None
        self._n_seen_prefetched = 0
        #: The keys in the last version whose definitions or table files are damaged.
        self.damaged: set[str] = set()

    @property
    def definitions(self) -> int:
        """The number of definitions seen, including lakehouse definitions."""
        return len({location for location, _ in self._is_intact}) + self._n_seen_prefetched + self._n_prefetched()

    def _n_prefetched(self) -> int:
        """The number of prefetched definitions that were counted and need no further check."""
        if self.prefetched is None:
            return 0
        checked = {location for location, _ in self._is_intact}
        return self.prefetched.n_seen - sum(map(self.prefetched.is_seen, checked))

    def discard_prefetched(self) -> None:
        """Free the definitions that were read ahead, after all versions were checked."""
        self._n_seen_prefetched += self._n_prefetched()
        self.prefetched = None

    def count_lakehouse_def(self, location: str) -> None:
        """Count a lakehouse definition that was read."""
        self._is_intact[location, "lakehouse"] = True

    def damaged_names(self, snapshot: Snapshot) -> tuple[ObjectName, ...]:
        """Return the damaged objects of the last checked version; empty if its definition cannot be read."""
        if not self.damaged:
            return ()
        try:
            keys = snapshot.keys
        except (CorruptFileError, FileMissingError):  # reported with the content
            return ()
        names = (keys.decode(key) for key in sorted(self.damaged))
        return tuple(name for name in names if name is not None)

    def check(self, snapshot: Snapshot) -> bool:
        """Check one version whose tree can be read. Return whether all of its objects are intact.

        Raises:
            CorruptFileError: The tree turns out to be damaged. The next version is then checked in full.
            StorageError: A storage request failed, with the same consequence.
        """
        touched: set[str] = set()
        try:
            for changes in _in_batches(self._changes(snapshot)):
                touched |= self._check_changes(changes, snapshot)
        except TrinityLakeError:
            self._discard_objects()
            raise
        self._check_namespaces(touched, snapshot)
        self._before = snapshot
        return not self._missing_namespaces and not self.damaged

    def _discard_objects(self) -> None:
        """Discard the objects of earlier versions after only a part of the last version was seen."""
        self._before = None
        self._namespaces, self._missing_namespaces, self._tables_of = set(), set(), Counter()
        self._views = {}
        self.damaged = set()

    def _check_changes(self, changes: Iterable[KeyChange], snapshot: Snapshot) -> set[str]:
        """Check the definitions of changed objects. Return their namespaces."""
        named_changes: list[tuple[ObjectName, KeyChange]] = []
        for change in changes:
            try:
                name = snapshot.keys.decode(change.key)
            except CorruptFileError as error:
                self._report("key-malformed", error.message, snapshot.location, snapshot.version)
                continue
            if name is not None:
                named_changes.append((name, change))
        self._count_tables(named_changes)
        self._check_definitions(named_changes, snapshot)
        self._check_views(named_changes, snapshot)
        for name, change in named_changes:
            is_intact = change.after is None or self._is_known_intact(change.after, _kind_of(name))
            (self.damaged.discard if is_intact else self.damaged.add)(change.key)
        return {name.namespace for name, _ in named_changes}

    def _is_known_intact(self, location: str, kind: Kind) -> bool:
        return self._is_intact[location, kind] if (location, kind) in self._is_intact else self._sees(location, kind)

    def _sees(self, location: str, kind: Kind) -> bool:
        """Whether a definition was prefetched, is intact, and does not belong to a table with files."""
        if self.prefetched is None or named_kind(location) not in (None, kind):
            return False
        return self.prefetched.see(location, kind) and location not in self.prefetched.tables

    def _changes(self, snapshot: Snapshot) -> Iterator[Iterable[KeyChange]]:
        """Yield the changes since the previous version, in parts that fit into memory."""
        nodes = snapshot.files.nodes
        if self._before is not None:
            yield from diff_in_parts(nodes, self._before.root, snapshot.root)
            return
        for lower, upper in pairwise([None, *snapshot.root.keys, None]):
            yield [KeyChange(key, None, location) for key, location in scan(nodes, snapshot.root, lower, upper)]

    def _count_tables(self, changes: list[tuple[ObjectName, KeyChange]]) -> None:
        """Update the existing namespaces and the number of tables in each."""
        for name, change in changes:
            if name.table is None:
                (self._namespaces.discard if change.after is None else self._namespaces.add)(name.namespace)
            else:
                self._tables_of[name.namespace] += (change.after is not None) - (change.before is not None)

    def _check_namespaces(self, touched: set[str], snapshot: Snapshot) -> None:
        """Check that the namespaces of all changed tables exist."""
        missing = {name for name in touched if self._tables_of[name] > 0 and name not in self._namespaces}
        for namespace in sorted(missing - self._missing_namespaces):
            message = f"namespace {namespace!r} has tables but no definition"
            self._report("namespace-missing", message, snapshot.location, snapshot.version)
        self._missing_namespaces = self._missing_namespaces - touched | missing

    def _check_views(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        """Check that no changed table has the name of a view, and vice versa."""
        for name, change in changes:
            if name.table is None:
                before = self._views.pop(name.namespace, frozenset())
                views = self._views_of(change.after) if change.after is not None else frozenset()
                if views:
                    self._views[name.namespace] = views
                for view in sorted(views - before):
                    with contextlib.suppress(InvalidNameError):  # no table can have this name
                        if snapshot.entry(snapshot.keys.table_key(name.namespace, view)) is not None:
                            self._report_shared(ObjectName(name.namespace, view), snapshot)
            elif change.after is not None and name.table in self._views.get(name.namespace, ()):
                self._report_shared(name, snapshot)

    def _views_of(self, location: str) -> frozenset[str]:
        views = self._views_at.get(location)
        if views is None and self.prefetched is not None:
            views = self.prefetched.views.get(location)
        return views or frozenset()

    def _report_shared(self, name: ObjectName, snapshot: Snapshot) -> None:
        if name not in self._shared_names:
            self._shared_names.add(name)
            message = f"{name} is the name of both a table and a view; engines use only one of them"
            self._findings.warn("name-shared", message, snapshot.location, snapshot.version, None)

    def _check_definitions(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        unchecked = {
            (change.after, _kind_of(name)): name
            for name, change in changes
            if change.after is not None
            and (change.after, _kind_of(name)) not in self._is_intact
            and not self._sees(change.after, _kind_of(name))
        }
        definitions = run_parallel(
            lambda item: self._read_definition(item[0][0], item[1], snapshot),
            list(unchecked.items()),
            self._lake.storage.concurrency,
        )
        for (location_and_kind, name), definition in zip(unchecked.items(), definitions, strict=True):
            is_intact = definition is not None
            if isinstance(definition, NamespaceDef) and (views := views_in(definition.properties)):
                self._views_at[location_and_kind[0]] = frozenset(views)
            if isinstance(definition, TableDef):
                is_intact = self._tables.check(name, definition, snapshot.version)
            self._is_intact[location_and_kind] = is_intact

    def _read_definition(self, location: str, name: ObjectName, snapshot: Snapshot) -> NamespaceDef | TableDef | None:
        """Return a definition. If it cannot be read or is empty, report a finding and return None."""
        version = snapshot.version
        store, kind = self._lake.files.definitions, _kind_of(name)
        other = named_kind(location)
        if other not in (None, kind):
            message = f"the key of {kind} {name} refers to the definition of a {other}"
            self._report("definition-unreadable", message, location, version)
            return None
        if kind == "table" and self.prefetched is not None and self.prefetched.see(location, kind):
            return self.prefetched.tables[location]
        definition: NamespaceDef | TableDef
        try:
            definition = store.namespace(location) if name.table is None else store.table(location)
        except TrinityLakeError as error:
            if is_damaged_pointer(error):
                self._report_pointer(location, name, snapshot)
                return None
            message = f"the definition of {kind} {name} cannot be read: {error.message}"
            self._report("definition-unreadable", message, error.path or location, version)
            return None
        if is_empty(definition):
            self._report("definition-unreadable", f"the definition of {kind} {name} is empty", location, version)
            return None
        return definition

    def _report_pointer(self, location: str, name: ObjectName, snapshot: Snapshot) -> None:
        """Report the node whose pointer to a definition contains an impossible file name."""
        keys = snapshot.keys
        key = keys.namespace_key(name.namespace) if name.table is None else keys.table_key(name.namespace, name.table)
        holder = holder_of(snapshot.files.nodes, snapshot.root, snapshot.location, key)
        message = (
            f"its pointer to the definition of {_kind_of(name)} {name}, {location!r}, is damaged: the prefix does not"
            " match the name"
        )
        self._report("pointer-damaged", message, holder, snapshot.version)
