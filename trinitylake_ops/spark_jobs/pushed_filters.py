"""Filters that Spark hands to the source, as what need not be read because of them.

They only decide what is read. Spark evaluates all of them again on the rows that come, so that its rules of
comparison (of NaN, of texts, of NULL) hold without being stated twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from pyspark.sql import datasource as spark

from trinitylake_ops.errors import InvalidNameError
from trinitylake_ops.format.keys import NAMESPACE_KEY_PREFIX, TABLE_KEY_PREFIX, KeyCodec
from trinitylake_ops.spark_jobs.key_ranges import KeyRange

_MOST_TABLE_KEYS = 1_000


@dataclass(frozen=True, slots=True)
class Wanted:
    """The values of a column that filters leave: some, or any where ``values`` is None; and whether NULL is."""

    values: frozenset[object] | None = None
    has_null: bool = True

    @classmethod
    def of(cls, filters: Iterable[spark.Filter], column: str) -> Wanted:
        """Return what all filters together leave of a column."""
        wanted = cls()
        for one in filters:
            if getattr(one, "attribute", None) == (column,):
                wanted = wanted._and(one)
        return wanted

    def _and(self, one: spark.Filter) -> Wanted:
        if isinstance(one, spark.IsNull) or (isinstance(one, spark.EqualNullSafe) and one.value is None):
            return Wanted(frozenset(), self.has_null)
        if isinstance(one, spark.EqualTo | spark.EqualNullSafe):
            return Wanted(self._common([one.value]), False)
        if isinstance(one, spark.In):
            return Wanted(self._common(one.value), False)
        return Wanted(self.values, self.has_null and not isinstance(one, spark.IsNotNull))

    def _common(self, values: Iterable[object]) -> frozenset[object]:
        found = frozenset(value for value in values if value is not None)
        return found if self.values is None else found & self.values

    def __contains__(self, value: object) -> bool:
        return self.has_null if value is None else self.values is None or value in self.values

    @property
    def has_values(self) -> bool:
        """Whether anything but NULL is wanted."""
        return self.values is None or bool(self.values)


@dataclass(frozen=True, slots=True)
class WantedNames:
    """The objects that filters on the columns ``namespace`` and ``table`` leave; that of a namespace has no table."""

    namespaces: Wanted = field(default_factory=Wanted)
    tables: Wanted = field(default_factory=Wanted)

    @classmethod
    def of(cls, filters: Sequence[spark.Filter]) -> WantedNames:
        """Return what filters leave."""
        return cls(Wanted.of(filters, "namespace"), Wanted.of(filters, "table"))

    def has(self, namespace: str, table: str | None) -> bool:
        """Whether a namespace, or a table in it, is wanted."""
        return namespace in self.namespaces and table in self.tables

    def key_ranges(self, keys: KeyCodec) -> list[KeyRange]:
        """Return ranges that hold the keys of all these objects, ascending and apart from each other."""
        found: list[KeyRange] = []
        if self.namespaces.values is None:
            namespaces, tables = KeyRange.prefixed(NAMESPACE_KEY_PREFIX), KeyRange.prefixed(TABLE_KEY_PREFIX)
            if self.tables.has_null and self.tables.has_values:
                return [KeyRange(namespaces.lower, tables.upper)]  # nothing of ours stands between them
            return [namespaces] if self.tables.has_null else [tables] if self.tables.has_values else []
        for namespace in filter(None, map(str, self.namespaces.values)):
            found += self._of_namespace(namespace, keys)
        return sorted(found, key=lambda one: one.lower or "")

    def _of_namespace(self, namespace: str, keys: KeyCodec) -> list[KeyRange]:
        try:
            key, prefix = keys.namespace_key(namespace), keys.tables_prefix(namespace)
        except InvalidNameError:  # no object can have it
            return []
        found = [KeyRange.only(key)] if self.tables.has_null else []
        tables = self.tables.values
        if tables is None or len(tables) > _MOST_TABLE_KEYS:
            return [*found, KeyRange.prefixed(prefix)]
        return [*found, *(one for table in tables for one in _of_table(namespace, str(table), keys))]


def _of_table(namespace: str, table: str, keys: KeyCodec) -> list[KeyRange]:
    try:
        return [KeyRange.only(keys.table_key(namespace, table))]
    except InvalidNameError:  # no table can have it
        return []


def wanted_versions(filters: Sequence[spark.Filter], first: int, last: int) -> Sequence[int]:
    """Return the versions from ``first`` to ``last``, inclusive, that filters on the column ``version`` leave."""
    for one in filters:
        if getattr(one, "attribute", None) != ("version",) or not isinstance(getattr(one, "value", None), int):
            continue
        if isinstance(one, spark.GreaterThan | spark.GreaterThanOrEqual):
            first = max(first, one.value + isinstance(one, spark.GreaterThan))
        elif isinstance(one, spark.LessThan | spark.LessThanOrEqual):
            last = min(last, one.value - isinstance(one, spark.LessThan))
    values = Wanted.of(filters, "version").values
    if values is None:
        return range(first, last + 1)
    return sorted(value for value in values if isinstance(value, int) and first <= value <= last)
