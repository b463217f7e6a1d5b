"""One name, one object: no namespace has a table and a view of the same name (docs/decisions/0107).

A view is a property of its namespace. So a commit that creates tables, or that writes the definition of a namespace, is
checked on each version that it is based on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

from trinitylake_ops.cached_attribute import cached_attribute
from trinitylake_ops.errors import InvalidNameError, ObjectExistsError
from trinitylake_ops.format.definitions import NamespaceDef
from trinitylake_ops.format.nodes.keys import NAMESPACE_KEY_PREFIX
from trinitylake_ops.versions.snapshot import Entry, Snapshot

#: The beginning of the name of a property that is a view. The rest is the name of the view.
VIEW_PREFIX = "trinitylake.view."
_LISTED_NAMES = 3


def views_in(properties: Iterable[str]) -> list[str]:
    """Return the names of the views among the properties of a namespace, in order."""
    return sorted(name.removeprefix(VIEW_PREFIX) for name in properties if name.startswith(VIEW_PREFIX))


class NewNames:
    """The tables and views that a change creates.

    Names that the base version already has do not count: an object of a name that was taken before the change can
    still be altered.

    Args:
        base: The version that the change was made on.
        writes: Each changed key with its new entry, None for a deletion.
    """

    def __init__(self, base: Snapshot, writes: Mapping[str, Entry | None]):
        self._base = base
        self._writes = writes
        self._checked_version: int | None = None

    @property
    def has_any(self) -> bool:
        """Whether a name has to be checked: the change creates a table, or a namespace may get a view."""
        return bool(self._tables or self._namespaces)

    def check(self, version: Snapshot) -> None:
        """Check the new names on a version. Definitions of namespaces are read where the change needs them.

        Raises:
            ObjectExistsError: A new table has the name of a view, or a new view the name of a table.
            StorageError: The definition of a namespace cannot be read.
        """
        if self._checked_version == version.version:
            return
        taken = [*self._tables_with_views(version), *self._views_with_tables(version)]
        if taken:
            shown = "; ".join(taken[:_LISTED_NAMES]) + ("; ..." if len(taken) > _LISTED_NAMES else "")
            raise ObjectExistsError(
                f"{shown}; use another name, or drop or rename the existing object first", version=version.version
            )
        self._checked_version = version.version

    def _tables_with_views(self, version: Snapshot) -> list[str]:
        entries = {namespace: self._entry(version, version.keys.namespace_key(namespace)) for namespace in self._tables}
        existing = {namespace: entry for namespace, entry in entries.items() if entry is not None}
        return [
            f"table {namespace}.{table} cannot be created: a view has its name"
            for namespace, views in _views(version, existing).items()
            for table in sorted(self._tables[namespace] & views)
        ]

    def _views_with_tables(self, version: Snapshot) -> list[str]:
        return [
            f"view {version.object_name(key)} cannot be created: a table has its name"
            for key in self.view_keys
            if self._entry(version, key) is not None
        ]

    def _entry(self, version: Snapshot, key: str) -> Entry | None:
        return self._writes[key] if key in self._writes else version.entry(key)

    @cached_attribute
    def _tables(self) -> dict[str, set[str]]:
        """The names of new tables, by namespace."""
        tables: dict[str, set[str]] = {}
        for key, entry in self._writes.items():
            name = None if entry is None else self._base.keys.decode(key)
            if name is not None and name.table is not None and self._base.entry(key) is None:
                tables.setdefault(name.namespace, set()).add(name.table)
        return tables

    @cached_attribute
    def view_keys(self) -> list[str]:
        """The keys that tables with the names of new views would have."""
        keys: list[str] = []
        for namespace, views in self._views.items():
            for view in views:
                with contextlib.suppress(InvalidNameError):  # no table can have the name, which another program wrote
                    keys.append(self._base.keys.table_key(namespace, view))
        return keys

    @cached_attribute
    def _views(self) -> dict[str, list[str]]:
        """The names of new views, by namespace."""
        after = _views(self._base, self._namespaces)
        entries = {namespace: self._base.entry(self._base.keys.namespace_key(namespace)) for namespace in after}
        before = _views(self._base, {namespace: entry for namespace, entry in entries.items() if entry is not None})
        return {namespace: sorted(views - before.get(namespace, set())) for namespace, views in after.items()}

    @cached_attribute
    def _namespaces(self) -> dict[str, Entry]:
        """The new entries of namespaces that may have views, by name."""
        return {
            self._base.object_name(key).namespace: entry
            for key, entry in self._writes.items()
            if entry is not None and key.startswith(NAMESPACE_KEY_PREFIX) and _may_have_views(entry)
        }


def _may_have_views(entry: Entry | None) -> bool:
    return isinstance(entry, str) or (isinstance(entry, NamespaceDef) and bool(views_in(entry.properties)))


def _views(version: Snapshot, entries: Mapping[str, Entry]) -> dict[str, set[str]]:
    """Return the names of views by namespace, of those namespaces that have views."""
    definitions = _definitions(version, entries)
    names = {namespace: set(views_in(definition.properties)) for namespace, definition in definitions.items()}
    return {namespace: views for namespace, views in names.items() if views}


def _definitions(version: Snapshot, entries: Mapping[str, Entry]) -> dict[str, NamespaceDef]:
    """Return definitions of namespaces by name. Those that are not in memory are read in parallel."""
    locations = [entry for entry in entries.values() if isinstance(entry, str)]
    with version.reading():
        read = dict(zip(locations, version.files.definitions.namespaces(locations), strict=True))
    definitions: dict[str, NamespaceDef] = {}
    for namespace, entry in entries.items():
        definition = read[entry] if isinstance(entry, str) else entry
        if isinstance(definition, NamespaceDef):
            definitions[namespace] = definition
    return definitions
