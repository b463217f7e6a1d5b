"""Finds the place of a table. A managed table is always below its own lakehouse's root.

An export of nodes or definitions, and a lakehouse whose files were copied or moved, have metadata with the former
place. Only the owner of that root may write there. So the table's own place replaces the location as the table is
loaded. New files go there, and existing files are read where they are.
"""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.file_names import table_prefix
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import metadata_uri, table_id_of


def in_own_place(metadata: TableMetadata, definition: TableDef, io: StorageFileIO) -> TableMetadata:
    """Return metadata with the place of a MANAGED table as its location, if it names that of another lakehouse."""
    if not definition.is_managed or is_in_own_place(metadata.location, definition, io):
        return metadata
    if table_id_of(metadata.location) != definition.id:
        return metadata
    home = io.home_of(definition.id)
    read_at = to_uri(io.root, io.location(metadata_uri(definition, io.root)))
    if read_at.startswith(home):  # otherwise the source of this copy was moved
        io.note_place_of(metadata.location)
    return metadata.model_copy(update={"location": own_location(definition, home)})


def is_in_own_place(location: str, definition: TableDef, io: StorageFileIO) -> bool:
    """Whether a location, a URI, is a MANAGED table's place: under the root, or under a table root of its lakehouse."""
    try:
        if location == own_location(definition, io.root):
            return True
        is_under_table_root = any(location == own_location(definition, root) for root in io.table_roots)
        return is_under_table_root and not io.note_place_of(location)
    except InvalidDefinitionError:  # such an id names no folder
        return False


def own_location(definition: TableDef, root: str) -> str:
    """Return a MANAGED table's place under a root. Raises InvalidDefinitionError for an id that names no folder."""
    return f"{root}{table_prefix(definition.id)}".rstrip("/")
