"""Checking what keys point to: definitions, and through them the files of managed tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Literal

from trinitylake_ops.errors import CorruptFileError, TrinityLakeError
from trinitylake_ops.format.definitions import NamespaceDef, TableDef
from trinitylake_ops.format.file_names import named_kind
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.maintenance.verify_report import Report
from trinitylake_ops.maintenance.verify_tables import TableVerifier
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.snapshot import Snapshot
from trinitylake_ops.tree.diff import KeyChange, diff_trees
from trinitylake_ops.tree.search import scan

#: What a key takes a definition for.
Kind = Literal["namespace", "table"]


def _kind_of(name: ObjectName) -> Kind:
    return "namespace" if name.table is None else "table"


def is_empty(definition: NamespaceDef | TableDef) -> bool:
    """Whether a definition says nothing: a file of no bytes is one."""
    return definition in (NamespaceDef(id=""), TableDef(table_type="", table_format=""))


class ObjectVerifier:
    """Checks the objects of one version after the other; only what changed since the last one is looked at.

    ``definitions`` counts the files seen. ``damaged`` are the keys of the last version with something wrong: their
    definitions, or files of their tables.
    """

    def __init__(self, lake: Lakehouse, tables: TableVerifier, report: Report):
        self._lake = lake
        self._tables = tables
        self._report = report
        self._before: Snapshot | None = None
        self._namespaces: set[str] = set()
        self._missing_namespaces: set[str] = set()
        self._tables_of: Counter[str] = Counter()
        #: By location and what a key takes it for: whether all is well with a definition.
        self._is_whole: dict[tuple[str, Kind | Literal["lakehouse"]], bool] = {}
        #: Definitions that are known to be whole, with those of tables that have files.
        self.ahead: Mapping[tuple[str, Kind], TableDef | None] = {}
        self.damaged: set[str] = set()

    @property
    def definitions(self) -> int:
        """Definitions seen, those of the lakehouse included."""
        return len({location for location, _ in self._is_whole})

    def count_lakehouse_def(self, location: str) -> None:
        """Note a lakehouse definition that was read."""
        self._is_whole[location, "lakehouse"] = True

    def damaged_names(self, snapshot: Snapshot) -> tuple[ObjectName, ...]:
        """Return the damaged objects of the version checked last."""
        names = (snapshot.keys.decode(key) for key in sorted(self.damaged))
        return tuple(name for name in names if name is not None)

    def check(self, snapshot: Snapshot) -> bool:
        """Check one version whose tree can be read; whether all of its objects are whole."""
        named: list[tuple[ObjectName, KeyChange]] = []
        for change in self._changes(snapshot):
            try:
                name = snapshot.keys.decode(change.key)
            except CorruptFileError as error:
                self._report("key-malformed", error.message, snapshot.location, snapshot.version)
                continue
            if name is not None:
                named.append((name, change))
        has_namespaces = self._check_namespaces(named, snapshot)
        self._check_definitions(named, snapshot)
        for name, change in named:
            is_whole = change.after is None or self._is_whole[change.after, _kind_of(name)]
            (self.damaged.discard if is_whole else self.damaged.add)(change.key)
        self._before = snapshot
        return has_namespaces and not self.damaged

    def _changes(self, snapshot: Snapshot) -> list[KeyChange]:
        nodes = snapshot.files.nodes
        if self._before is None:
            return [KeyChange(key, None, location) for key, location in scan(nodes, snapshot.root)]
        return diff_trees(nodes, self._before.root, snapshot.root)

    def _check_namespaces(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> bool:
        """Whether all namespaces of tables are there."""
        touched = {name.namespace for name, _ in changes}
        for name, change in changes:
            if name.table is None:
                (self._namespaces.discard if change.after is None else self._namespaces.add)(name.namespace)
            else:
                self._tables_of[name.namespace] += (change.after is not None) - (change.before is not None)
        missing = {name for name in touched if self._tables_of[name] > 0 and name not in self._namespaces}
        for namespace in sorted(missing - self._missing_namespaces):
            message = f"namespace {namespace!r} has tables but no definition"
            self._report("namespace-missing", message, snapshot.location, snapshot.version)
        self._missing_namespaces = self._missing_namespaces - touched | missing
        return not self._missing_namespaces

    def _check_definitions(self, changes: list[tuple[ObjectName, KeyChange]], snapshot: Snapshot) -> None:
        fresh = {
            (change.after, _kind_of(name)): name
            for name, change in changes
            if change.after is not None and (change.after, _kind_of(name)) not in self._is_whole
        }
        ahead = {place for place in fresh if place in self.ahead and named_kind(place[0]) in (None, place[1])}
        unread = {place: name for place, name in fresh.items() if place not in ahead}
        read = run_parallel(
            lambda item: self._read_definition(item[0][0], item[1], snapshot.version),
            list(unread.items()),
            self._lake.storage.concurrency,
        )
        definitions = dict(zip(unread, read, strict=True))
        for place, name in fresh.items():
            definition = self.ahead[place] if place in ahead else definitions[place]
            is_whole = place in ahead or definition is not None
            if isinstance(definition, TableDef):
                is_whole = self._tables.check(name, definition, snapshot.version)
            self._is_whole[place] = is_whole

    def _read_definition(self, location: str, name: ObjectName, version: int) -> NamespaceDef | TableDef | None:
        """Return a definition; None, and a finding, where it cannot be read or is empty."""
        store, kind = self._lake.files.definitions, _kind_of(name)
        other = named_kind(location)
        if other not in (None, kind):
            message = f"the key of {kind} {name} points to the definition of a {other}"
            self._report("definition-unreadable", message, location, version)
            return None
        definition: NamespaceDef | TableDef
        try:
            definition = store.namespace(location) if name.table is None else store.table(location)
        except TrinityLakeError as error:
            message = f"the definition of {kind} {name} cannot be read: {error.message}"
            self._report("definition-unreadable", message, error.path or location, version)
            return None
        if is_empty(definition):
            self._report("definition-unreadable", f"the definition of {kind} {name} is empty", location, version)
            return None
        return definition
