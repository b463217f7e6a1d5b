"""The tables that a publication read besides its writes. A serializable one commits only if they are unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRead:
    """A table as it was read. ``location`` is that of its definition in ``version`` of the lakehouse at ``root``."""

    root: str
    namespace: str
    table: str
    version: int
    location: str

    @classmethod
    def of(cls, snapshot: Snapshot, namespace: str, table: str) -> Self:
        """Return the read of a table at a version. Raises InvalidInputError if the version has none of that name."""
        location = snapshot.entry(snapshot.keys.table_key(namespace, table))
        if not isinstance(location, str):
            raise InvalidInputError(f"version {snapshot.version} has no table {namespace}.{table}, so none was read")
        root = snapshot.files.storage.root
        return cls(root=root, namespace=namespace, table=table, version=snapshot.version, location=location)

    def to_json(self) -> str:
        """Return one JSON object."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            return cls(**state)
        except (ValueError, TypeError) as error:
            raise InvalidInputError(f"this is no read of a table: {error}") from error


def check_unchanged(
    latest: Snapshot,
    reads: Sequence[TableRead],
    own: Sequence[StagedTable],
    is_there: Callable[[Snapshot, StagedTable], bool],
) -> None:
    """Raise CommitConflictError if a table is not as it was read. Reads of other lakehouses do not count.

    A table that is there as one of ``own`` was staged was published by the reader itself, after its read.
    """
    ours = [read for read in reads if read.root == latest.files.storage.root]
    by_name = {(table.namespace, table.table): table for table in own}
    changed: dict[str, int] = {}
    for read in ours:
        name = (read.namespace, read.table)
        if latest.entry(latest.keys.table_key(*name)) == read.location:
            continue
        if name in by_name and is_there(latest, by_name[name]):
            continue
        changed.setdefault(f"table {read.namespace}.{read.table}", read.version)
    if changed:
        conflicts = tuple(
            f"{table}: we read it at version {version}, a concurrent commit changed it"
            for table, version in sorted(changed.items())
        )
        raise CommitConflictError(
            f"version {latest.version} is not what this publication read: {'; '.join(conflicts)}; run it again from"
            " the beginning",
            conflicts=conflicts,
            base_version=min(changed.values()),
            latest_version=latest.version,
        )
