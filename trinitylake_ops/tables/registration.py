"""Bringing existing Iceberg tables into a lakehouse by their metadata files."""

from __future__ import annotations

from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import FileMissingError, InvalidInputError
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.locations import as_uri, to_uri
from trinitylake_ops.tables.file_io import StorageFileIO
from trinitylake_ops.tables.managed import EXTERNAL, MANAGED, managed_table_id, read_metadata, table_definition
from trinitylake_ops.tables.ownership import owner_path, read_owner

FEDERATED = "FEDERATED"


def registered_uri(root: str, metadata_location: str) -> str:
    """Return the URI of a metadata file given as a URI, an absolute path or a path under the root.

    Raises InvalidLocationError.
    """
    return to_uri(root, as_uri(metadata_location))


def registered_table(
    io: StorageFileIO, uri: str, lakehouse: LakehouseDef, table_type: str = EXTERNAL
) -> tuple[TableMetadata, TableDef]:
    """Read a table's metadata file, a URI, and return it with the definition that it is registered by.

    The definition is of ``table_type``, EXTERNAL or FEDERATED, so no file of the table is ever deleted, and
    its id is empty. A managed table of this lakehouse, such as one that was dropped, is MANAGED again, under
    the id in its location. Raises InvalidInputError for another type; CorruptFileError for what is no Iceberg
    metadata, FileMissingError and other StorageErrors, UnsupportedTypeError.
    """
    if table_type not in (EXTERNAL, FEDERATED):
        raise InvalidInputError(f"a table is registered as {EXTERNAL} or {FEDERATED}, not as {table_type!r}")
    metadata = read_metadata(io, uri)
    table_id = managed_table_id(metadata.location, io.root)
    is_in_place = table_id is not None and uri.startswith(f"{metadata.location}/")
    if table_id is not None and is_in_place and _is_owner(io, table_id, lakehouse):
        return metadata, table_definition(metadata, uri, io.root, table_id=table_id, table_type=MANAGED)
    return metadata, table_definition(metadata, uri, io.root, table_type=table_type)


def _is_owner(io: StorageFileIO, table_id: str, lakehouse: LakehouseDef) -> bool:
    path = owner_path(table_id)
    try:
        return read_owner(io.storage.read(path), path) == lakehouse.id
    except FileMissingError:
        return False
