"""A table that was written and not published, as it travels between processes.

Definitions of Dagster name its class, so this module imports nothing that reads or writes tables.
"""

from __future__ import annotations

import base64
import json
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

from trinitylake_ops.errors import InvalidInputError, TrinityLakeError
from trinitylake_ops.format.definitions import METADATA_LOCATION, TableDef

#: The values of one partition as hexadecimal digits of Iceberg's binary form, None for NULL.
EncodedPartition: TypeAlias = tuple[str | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTable:
    """The data for publishing a table, and for an audit of it.

    ``base_metadata_location`` is the location in the lakehouse when it was staged, None for a new table.
    ``base_version`` is the version then. ``begun_at_ms`` is when staging began, in milliseconds since the epoch by the
    storage's clock. No file that was written for it is older. Rows and bytes are totals of the table with the staged
    change. ``added_*`` and ``removed_*`` count data files, their rows and their bytes. Rewritten files count on both
    sides. ``partitions`` are those with added or removed files, such as ``year=2013/month=1``. They are empty for an
    unpartitioned table. ``replaces`` says what the new files replace: ``nothing``, ``partitions``, ``all``, or
    ``files``: those that were removed, in partitions that must not change. It is None for a change of another kind,
    which conflicts with any other. ``replaced_partitions`` are the values of these partitions, whether or not they have
    files (:func:`partition_key.encode_partitions`).
    """

    namespace: str
    table: str
    table_def: TableDef
    base_version: int
    begun_at_ms: int
    base_metadata_location: str | None
    snapshot_id: int | None
    row_count: int
    total_bytes: int
    added_files: int
    added_rows: int
    added_bytes: int
    removed_files: int
    removed_rows: int
    removed_bytes: int
    partitions: tuple[str, ...]
    replaces: str | None = None
    replaced_partitions: tuple[EncodedPartition, ...] = ()

    @property
    def metadata_location(self) -> str:
        """Location of the staged metadata file: a path under the root, or a URI."""
        return self.table_def.format_properties[METADATA_LOCATION]

    def to_json(self) -> str:
        """Return one JSON object. The definition is in it as base64 of its protobuf file."""
        state = {name: value for name, value in asdict(self).items() if name != "table_def"}
        state["table_def"] = base64.b64encode(self.table_def.to_bytes()).decode("ascii")
        return json.dumps(state, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read what ``to_json`` wrote. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            data = base64.b64decode(state.pop("table_def"), validate=True)
            table_def = TableDef.from_bytes(data, "staged table definition")
            state["partitions"] = tuple(state["partitions"])
            state["replaced_partitions"] = tuple(tuple(values) for values in state.get("replaced_partitions", ()))
            return cls(table_def=table_def, **state)
        except (ValueError, KeyError, TypeError, AttributeError, TrinityLakeError) as error:
            raise InvalidInputError(f"this is no staged table: {error}") from error
