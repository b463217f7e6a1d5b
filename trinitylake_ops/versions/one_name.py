"""A table has one name at each version: changes that would give its id a second one are rejected (decision 102)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping

from trinitylake_ops.errors import TableHasAnotherNameError
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.table_names import TableNames, table_ids

#: Returns the keys of tables at a version by an id.
KeysOf = Callable[[Snapshot, str], Collection[str]]


class OneName:
    """A condition of a commit: no table that the change writes has another name then.

    Args:
        ids: The ids of the tables that the change writes, by their keys; None for tables that it drops. Tables that
            keep their id may be left out.
        keys_of: Finds the names that an id has; by default all definitions of the version are read.
    """

    def __init__(self, ids: Mapping[str, str | None], keys_of: KeysOf | None = None):
        self._ids = ids
        self._keys_of = keys_of or TableNames().keys_of

    def __call__(self, latest: Snapshot) -> None:
        """Raise TableHasAnotherNameError if the change would give a table of a version a second name."""
        wanted = {key: table_id for key, table_id in self._ids.items() if table_id}
        if not wanted:
            return
        before = table_ids(latest, {key: latest.entry(key) for key in self._ids})
        gained = {key: table_id for key, table_id in wanted.items() if before.get(key) != table_id}
        twice = Counter(wanted.values())
        for key, table_id in gained.items():
            if twice[table_id] > 1:
                raise _error(latest, key, next(one for one in wanted if one != key and wanted[one] == table_id))
        freed = {table_id for key, table_id in before.items() if self._ids[key] != table_id}
        for key, table_id in gained.items():
            others = () if table_id in freed else sorted(set(self._keys_of(latest, table_id)) - self._ids.keys())
            if others:
                raise _error(latest, key, others[0])


def keys_changed_since(base: Snapshot) -> KeysOf:
    """Return a function that finds names of tables among those that a version has changed since ``base``."""
    changed: dict[int, dict[str, str]] = {}

    def keys_of(latest: Snapshot, table_id: str) -> list[str]:
        if latest.version not in changed:
            changes = {change.key: change.after for change in diff_trees(base.files.nodes, base.root, latest.root)}
            tables = {key: after for key, after in changes.items() if _is_table(latest, key)}
            changed[latest.version] = table_ids(latest, tables)
        return [key for key, known_id in changed[latest.version].items() if known_id == table_id]

    return keys_of


def _is_table(snapshot: Snapshot, key: str) -> bool:
    name = snapshot.keys.decode(key)
    return name is not None and name.table is not None


def _error(latest: Snapshot, key: str, other: str) -> TableHasAnotherNameError:
    name, known = latest.object_name(key), latest.object_name(other)
    return TableHasAnotherNameError(
        f"table {name} would be a second name of table {known}: both would share one id and one folder of files; rename"
        f" {known} to {name}, drop {known} first, or choose both names for this change"
    )
