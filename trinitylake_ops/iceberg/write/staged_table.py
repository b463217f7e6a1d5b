"""A table that has been written but not published, in a form that can be sent between processes.

Dagster definitions import this class, so this module imports nothing that reads or writes tables.
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
    """The data needed to publish or audit a staged table.

    Rewritten files count as both removed and added.
    """

    namespace: str
    table: str
    #: The staged definition.
    table_def: TableDef
    #: The version on which it was staged.
    base_version: int
    #: Start of staging by the storage's clock, in milliseconds since the epoch. No staged file is older.
    begun_at_ms: int
    #: Location of the table's metadata in the base version; None for a new table.
    base_metadata_location: str | None
    #: Id of the staged snapshot.
    snapshot_id: int | None
    #: Number of rows in the table, including the staged change.
    row_count: int
    #: Size of the table in bytes, including the staged change.
    total_bytes: int
    #: Number of added data files, with the number of their rows and their size in bytes.
    added_files: int
    added_rows: int
    added_bytes: int
    #: Number of removed data files, with the number of their rows and their size in bytes.
    removed_files: int
    removed_rows: int
    removed_bytes: int
    #: Partitions with added or removed files, such as ``year=2013/month=1``. Empty for an unpartitioned table.
    partitions: tuple[str, ...]
    #: What the new files replace: ``nothing``, ``partitions``, ``all``, or ``files`` (only the removed files, whose
    #: partitions must not change). None for a change of another kind, which conflicts with any other change.
    replaces: str | None = None
    #: Values of the replaced partitions, whether or not they contain files (see
    #: ``write.partition_key.encode_partitions``).
    replaced_partitions: tuple[EncodedPartition, ...] = ()

    @property
    def metadata_location(self) -> str:
        """Location of the staged metadata file: a path under the root, or a URI."""
        return self.table_def.format_properties[METADATA_LOCATION]

    def to_json(self) -> str:
        """Encode the table as a JSON object. Its definition is encoded as base64 of its protobuf file."""
        state = {name: value for name, value in asdict(self).items() if name != "table_def"}
        state["table_def"] = base64.b64encode(self.table_def.to_bytes()).decode("ascii")
        return json.dumps(state, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Decode a table that ``to_json`` encoded. Raises InvalidInputError."""
        try:
            state: dict[str, Any] = json.loads(text)
            data = base64.b64decode(state.pop("table_def"), validate=True)
            table_def = TableDef.from_bytes(data, "staged table definition")
            state["partitions"] = tuple(state["partitions"])
            state["replaced_partitions"] = tuple(tuple(values) for values in state.get("replaced_partitions", ()))
            return cls(table_def=table_def, **state)
        except (ValueError, KeyError, TypeError, AttributeError, TrinityLakeError) as error:
            raise InvalidInputError(f"not a valid staged table: {error}; stage the table again") from error
