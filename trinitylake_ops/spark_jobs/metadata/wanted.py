"""The parts of a lakehouse that the conditions of a filter leave to read: names of objects, versions.

Conditions only decide what is read: the whole filter is evaluated on the rows that come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from trinitylake_ops.errors import InvalidNameError
from trinitylake_ops.format.nodes.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, KeyCodec
from trinitylake_ops.spark_jobs.metadata.columns import Condition
from trinitylake_ops.tree.key_ranges import KeyRange

_MOST_TABLE_KEYS = 1_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values of a column that conditions allow: some, or any if ``values`` is None, and whether NULL is allowed."""

    values: frozenset[object] | None = None
    has_null: bool = True

    @classmethod
    def of(cls, conditions: Iterable[Condition], column: str) -> Wanted:
        """Return the values of a column that all conditions together allow."""
        wanted = cls()
        for one in conditions:
            if one.column == column:
                wanted = wanted._and(one)
        return wanted

    def _and(self, one: Condition) -> Wanted:
        if one.operator == "is null":
            return Wanted(frozenset(), self.has_null)
        if one.operator == "in":
            return Wanted(one.values if self.values is None else one.values & self.values, False)
        return Wanted(self.values, False)

    def __contains__(self, value: object) -> bool:
        return self.has_null if value is None else self.values is None or value in self.values

    @property
    def has_values(self) -> bool:
        """Whether anything but NULL is wanted."""
        return self.values is None or bool(self.values)


@dataclass(frozen=True, slots=True)
class WantedNames:
    """The objects that conditions on ``namespace`` and ``table`` allow. For a namespace the table is NULL."""

    namespaces: Wanted = field(default_factory=Wanted)
    tables: Wanted = field(default_factory=Wanted)

    @classmethod
    def of(cls, conditions: Sequence[Condition]) -> WantedNames:
        """Return the objects that conditions allow."""
        return cls(Wanted.of(conditions, "namespace"), Wanted.of(conditions, "table"))

    def has(self, namespace: str, table: str | None) -> bool:
        """Whether a namespace, or a table in it, is wanted."""
        return namespace in self.namespaces and table in self.tables

    def key_ranges(self, keys: KeyCodec) -> list[KeyRange]:
        """Return ranges that hold the keys of all these objects, ascending and apart from each other."""
        found: list[KeyRange] = []
        if self.namespaces.values is None:
            namespaces, tables = KeyRange.prefixed(NAMESPACE_KEY_PREFIX), KeyRange.prefixed(TABLE_KEY_PREFIX)
            if self.tables.has_null and self.tables.has_values:
                return [KeyRange(namespaces.lower, tables.upper)]  # no key of ours lies between them
            return [namespaces] if self.tables.has_null else [tables] if self.tables.has_values else []
        for namespace in filter(None, map(str, self.namespaces.values)):
            found += self._of_namespace(namespace, keys)
        return sorted(found, key=lambda one: one.lower or "")

    def _of_namespace(self, namespace: str, keys: KeyCodec) -> list[KeyRange]:
        try:
            key, prefix = keys.namespace_key(namespace), keys.tables_prefix(namespace)
        except InvalidNameError:  # no object can have this name
            return []
        found = [KeyRange.only(key)] if self.tables.has_null else []
        tables = self.tables.values
        if tables is None or len(tables) > _MOST_TABLE_KEYS:
            return [*found, KeyRange.prefixed(prefix)]
        return [*found, *(one for table in tables for one in _of_table(namespace, str(table), keys))]


def _of_table(namespace: str, table: str, keys: KeyCodec) -> list[KeyRange]:
    try:
        return [KeyRange.only(keys.table_key(namespace, table))]
    except InvalidNameError:  # no table can have this name
        return []


def wanted_versions(conditions: Sequence[Condition], first: int, last: int) -> Sequence[int]:
    """Return the versions from ``first`` to ``last``, inclusive, that conditions on ``version`` allow."""
    for one in conditions:
        if one.column == "version" and one.operator in (">", ">="):
            first = max([first, *(value + (one.operator == ">") for value in one.values if isinstance(value, int))])
        elif one.column == "version" and one.operator in ("<", "<="):
            last = min([last, *(value - (one.operator == "<") for value in one.values if isinstance(value, int))])
    values = Wanted.of(conditions, "version").values
    if values is None:
        return range(first, last + 1)
    return sorted(value for value in values if isinstance(value, int) and first <= value <= last)
