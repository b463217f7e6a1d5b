"""Observe a lakehouse: detect new versions, or changes of one table."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.options import split_name
from trinitylake_ops.errors import VersionExpiredError, VersionNotFoundError
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class TableObservation:
    """A version and the state of a table in it: None if the table does not exist, empty if no table was requested."""

    version: int
    state: str | None

    def is_new(self, before: TableObservation | None) -> bool:
        """Whether there is a new version, or a change of the table, since an earlier observation."""
        if self.state is None:
            return False
        if before is None:
            return True
        return self.version > before.version if self.state == "" else self.state != before.state


def inspect_table(lake: Lakehouse, table: str | None, version: int | None = None) -> TableObservation:
    """Observe the latest version or an earlier one. If that version has expired, its table counts as changed.

    Raises InvalidInputError or StorageError.
    """
    if table is None:
        return TableObservation(lake.latest_version() if version is None else version, "")
    if version is not None and version < 0:  # before the first one
        return TableObservation(version, None)
    try:
        snapshot = lake.snapshot(version)
    except (VersionExpiredError, VersionNotFoundError):
        if version is None:
            raise
        return TableObservation(version, None)
    return TableObservation(snapshot.version, _state(snapshot, *split_name(table)))


def _state(snapshot: Snapshot, namespace: str, table: str) -> str | None:
    if not (snapshot.has_namespace(namespace) and snapshot.has_table(namespace, table)):
        return None
    definition = snapshot.table(namespace, table)
    return f"{definition.id} {sorted(definition.format_properties.items())}"
