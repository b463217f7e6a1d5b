"""A look at a lakehouse: whether there is something new in it, or in one of its tables."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops import Lakehouse
from trinitylake_ops.declarations.options import split_name
from trinitylake_ops.errors import VersionExpiredError, VersionNotFoundError
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class TableObservation:
    """A version, and the state of a table in it, None if it is not there, empty if nobody asked for one."""

    version: int
    state: str | None

    def is_new(self, before: TableObservation | None) -> bool:
        """Whether something came since another look: a version, or a change of the table."""
        if self.state is None:
            return False
        if before is None:
            return True
        return self.version > before.version if self.state == "" else self.state != before.state


def inspect_table(lake: Lakehouse, table: str | None, version: int | None = None) -> TableObservation:
    """Look at the latest version or at an earlier one. In one that is gone, a table counts as another one.

    Raises InvalidInputError, StorageError.
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
