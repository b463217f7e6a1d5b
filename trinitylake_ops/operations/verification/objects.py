"""Checks the objects of keys: definitions, and through them the files of managed tables."""

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

_CHANGES_AT_ONCE = 8_192

#: The kind that a key gives a definition.
Kind = Literal["namespace", "table"]


def _kind_of(name: ObjectName) -> Kind:
    return "namespace" if name.table is None else "table"


def _in_batches(parts: Iterable[Iterable[KeyChange]]) -> Iterator[list[KeyChange]]:
    """Yield changes in batches large enough for parallel reads."""
    batch: list[KeyChange] = []
    for part in parts:
        batch += part
        if len(batch) >= _CHANGES_AT_ONCE:
            yield batch
            batch = []
    if batch:
        yield batch


def is_empty(definition: NamespaceDef | TableDef) -> bool:
    """Whether a definition is empty: a file of no bytes is one."""
    return definition in (NamespaceDef(id=""), TableDef(table_type="", table_format=""))


class WholeDefinitions:
    """The locations of definitions that were read ahead and are whole. ``tables`` are those of tables with files.

    ``views`` are the names of views by the locations of the definitions of their namespaces.

    There may be a million of them, so each has a digest and a few bits. ``note_seen`` is called for each that is seen,
    by its location.
    """

    _ASKED: Mapping[Kind, int] = MappingProxyType({"namespace": 1, "table": 2})
    _WHOLE: Mapping[Kind, int] = MappingProxyType({"namespace": 4, "table": 8})
    _SEEN = 16

    def __init__(self, note_seen: Callable[[str], None]) -> None:
        self._note_seen = note_seen
        self._bits: dict[bytes, int] = {}
        self.tables: dict[str, TableDef] = {}
        self.views: dict[str, frozenset[str]] = {}
        self.n_seen = 0

    def is_new(self, location: str, kind: Kind) -> bool:
        """Whether this is the first question about the definition of this kind at a location before."""
        digest = _digest(location)
        bits = self._bits.get(digest, 0)
        self._bits[digest] = bits | self._ASKED[kind]
        return not bits & self._ASKED[kind]

    def add(self, location: str, kind: Kind, table: TableDef | None, views: frozenset[str] = frozenset()) -> None:
        """Record that a definition is whole, with the table or the names of the views in it."""
        if views:
            self.views[location] = views
        digest = _digest(location)
        self._bits[digest] = self._bits.get(digest, 0) | self._WHOLE[kind]
        if table is not None:
            self.tables[location] = table

    def see(self, location: str, kind: Kind) -> bool:
        """Whether the definition of this kind at a location is known to be whole. If so, it counts as seen."""
        digest = _digest(location)
        bits = self._bits.get(digest, 0)
        if not bits & self._WHOLE[kind]:
            return False
        if not bits & self._SEEN:
            self._bits[digest] = bits | self._SEEN
            self.n_seen += 1
            self._note_seen(location)
        return True

    def is_seen(self, location: str) -> bool:
        """Whether it was asked for and is whole."""
        return bool(self._bits.get(_digest(location), 0) & self._SEEN)


def _digest(location: str) -> bytes:
    return hashlib.blake2b(location.encode(errors="surrogatepass"), digest_size=16).digest()


class ObjectVerifier:
    """Checks the objects of one version after the other. Only changes since the last one are checked.

    ``definitions`` counts the files seen. ``damaged`` are the keys of the last version with a fault in their
    definitions, or in files of their tables.
    """

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
        #: Names that a table and a view have.
        self._shared_names: set[ObjectName] = set()
        #: By location and kind: whether a definition is all right.
        self._is_whole: dict[tuple[str, Kind | Literal["lakehouse"]], bool] = {}
        #: Definitions that are known to be whole.
        self.ahead: WholeDefinitions | None = None
        self._n_seen_ahead = 0
        self.damaged: set[str] = set()

    @property
    def definitions(self) -> int:
        """Definitions seen, those of the lakehouse included."""
        return len({location for location, _ in self._is_whole}) + self._n_seen_ahead + self._n_ahead()

    def _n_ahead(self) -> int:
        """How many definitions that were read ahead were seen, without a check here."""
        if self.ahead is None:
            return 0
        return self.ahead.n_seen - sum(map(self.ahead.is_seen, {location for location, _ in self._is_whole}))

    def discard_read_ahead(self) -> None:
        """Free the definitions that were read ahead, once all is checked."""
        self._n_seen_ahead += self._n_ahead()
        self.ahead = None

    def count_lakehouse_def(self, location: str) -> None:
        """Note a lakehouse definition that was read."""
        self._is_whole[location, "lakehouse"] = True

    def damaged_names(self, snapshot: Snapshot) -> tuple[ObjectName, ...]:
        """Return the damaged objects of the version checked last. None where its settings cannot be read."""
        if not self.damaged:
            return ()
        try:
            keys = snapshot.keys
        except (CorruptFileError, FileMissingError):  # reported with the content; without them keys are no names
            return ()
        names = (keys.decode(key) for key in sorted(self.damaged))
        return tuple(name for name in names if name is not None)

    def check(self, snapshot: Snapshot) -> bool:
        """Check one version whose tree can be read. Returns whether all of its objects are whole.

        Raises CorruptFileError if it cannot after all, and errors of reading. Then the next version is checked as a
        whole.
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
        """Forget the objects of the versions up to now, as only a part of the last one was seen."""
        self._before = None
        self._namespaces, self._missing_namespaces, self._tables_of = set(), set(), Counter()
        self._views = {}
        self.damaged = set()

    def _check_changes(self, changes: Iterable[KeyChange], snapshot: Snapshot) -> set[str]:
        """Check the definitions of changed objects. Returns the namespaces of these."""
        named: list[tuple[ObjectName, KeyChange]] = []
        for change in changes:
            try:
                name = snapshot.keys.decode(change.key)
            except CorruptFileError as error:
                self._report("key-malformed", error.message, snapshot.location, snapshot.version)
                continue
            if name is not None:
                named.append((name, change))
        self._count_tables(named)
        self._check_definitions(named, snapshot)
        self._check_views(named, snapshot)
        for name, change in named:
            is_whole = change.after is None or self._is_known_whole(change.after, _kind_of(name))
            (self.damaged.discard if is_whole else self.damaged.add)(change.key)
        return {name.namespace for name, _ in named}

    def _is_known_whole(self, location: str, kind: Kind) -> bool:
        return self._is_whole[location, kind] if (location, kind) in self._is_whole else self._sees(location, kind)

    def _sees(self, location: str, kind: Kind) -> bool:
        """Whether a definition is known to be whole, and its table has no files."""
        if self.ahead is None or named_kind(location) not in (None, kind):
            return False
        return self.ahead.see(location, kind) and location not in self.ahead.tables

    def _changes(self, snapshot: Snapshot) -> Iterator[Iterable[KeyChange]]:
        """Yield the changes since the version before, in parts that are held one after the other."""
        nodes = snapshot.files.nodes
        if self._before is not None:
            yield from diff_in_parts(nodes, self._before.root, snapshot.root)
            return
        for lower, upper in pairwise([None, *snapshot.root.keys, None]):
            yield [KeyChange(key, None, location) for key, location in scan(nodes, snapshot.root, lower, upper)]

    def _count_tables(self, changes: list[tuple[ObjectName, KeyChange]]) -> None:
        """Note which namespaces there are now, and how many tables each has."""
        for name, change in changes:
            if name.table is None:
                (self._namespaces.discard if change.after is None else self._namespaces.add)(name.namespace)
            else:
                self._tables_of[name.namespace] += (change.after is not None) - (change.before is not None)

    def _check_namespaces(self, touched: set[str], snapshot: Snapshot) -> None:
        """Check that the namespaces of all tables exist, where they or their tables changed."""
        missing = {name for name in touched if self._tables_of[name] > 0 and name not in self._namespaces}
        for namespace in sorted(missing - self._missing_namespaces):
            message = f"namespace {namespace!r} has tables but no definition"
            self._report("namespace-missing", message, snapshot.location, snapshot.version)
        self._missing_namespaces = self._missing_namespaces - touched | missing

    def _check_views(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        """Check that no changed table or view has the name of the other."""
        for name, change in changes:
            if name.table is None:
                before = self._views.pop(name.namespace, frozenset())
                views = self._views_of(change.after) if change.after is not None else frozenset()
                if views:
                    self._views[name.namespace] = views
                for view in sorted(views - before):
                    with contextlib.suppress(InvalidNameError):  # no table can have the name
                        if snapshot.entry(snapshot.keys.table_key(name.namespace, view)) is not None:
                            self._report_shared(ObjectName(name.namespace, view), snapshot)
            elif change.after is not None and name.table in self._views.get(name.namespace, ()):
                self._report_shared(name, snapshot)

    def _views_of(self, location: str) -> frozenset[str]:
        views = self._views_at.get(location)
        if views is None and self.ahead is not None:
            views = self.ahead.views.get(location)
        return views or frozenset()

    def _report_shared(self, name: ObjectName, snapshot: Snapshot) -> None:
        if name not in self._shared_names:
            self._shared_names.add(name)
            message = f"{name} is the name of a table and of a view: engines use one of them"
            self._findings.warn("name-shared", message, snapshot.location, snapshot.version, None)

    def _check_definitions(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        fresh = {
            (change.after, _kind_of(name)): name
            for name, change in changes
            if change.after is not None
            and (change.after, _kind_of(name)) not in self._is_whole
            and not self._sees(change.after, _kind_of(name))
        }
        definitions = run_parallel(
            lambda item: self._read_definition(item[0][0], item[1], snapshot),
            list(fresh.items()),
            self._lake.storage.concurrency,
        )
        for (place, name), definition in zip(fresh.items(), definitions, strict=True):
            is_whole = definition is not None
            if isinstance(definition, NamespaceDef) and (views := views_in(definition.properties)):
                self._views_at[place[0]] = frozenset(views)
            if isinstance(definition, TableDef):
                is_whole = self._tables.check(name, definition, snapshot.version)
            self._is_whole[place] = is_whole

    def _read_definition(self, location: str, name: ObjectName, snapshot: Snapshot) -> NamespaceDef | TableDef | None:
        """Return a definition. Reports a finding and returns None if it cannot be read or is empty."""
        version = snapshot.version
        store, kind = self._lake.files.definitions, _kind_of(name)
        other = named_kind(location)
        if other not in (None, kind):
            message = f"the key of {kind} {name} points to the definition of a {other}"
            self._report("definition-unreadable", message, location, version)
            return None
        if kind == "table" and self.ahead is not None and self.ahead.see(location, kind):
            return self.ahead.tables[location]
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
        """Report the node whose pointer to a definition leads to a file that never was."""
        keys = snapshot.keys
        key = keys.namespace_key(name.namespace) if name.table is None else keys.table_key(name.namespace, name.table)
        holder = holder_of(snapshot.files.nodes, snapshot.root, snapshot.location, key)
        what = f"the definition of {_kind_of(name)} {name}"
        message = f"its pointer to {what}, {location!r}, is damaged: the prefix is not that of the name"
        self._report("pointer-damaged", message, holder, snapshot.version)
