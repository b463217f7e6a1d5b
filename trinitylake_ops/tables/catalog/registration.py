"""Brings existing Iceberg tables into a lakehouse by their metadata files."""

from __future__ import annotations

from collections.abc import Iterable

from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import LakehouseDef, TableDef
from trinitylake_ops.format.locations import as_uri, normalize_root_uri, to_uri
from trinitylake_ops.format.places import Places, root_of_table_file
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.schemes import roots_nest
from trinitylake_ops.tables.files.metadata import read_table_metadata
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.managed import EXTERNAL, MANAGED, managed_table_id, metadata_uri, table_definition
from trinitylake_ops.tables.ownership import is_owner
from trinitylake_ops.tables.schema_rules import check_case

FEDERATED = "FEDERATED"


def registered_uri(root: str, metadata_location: str) -> str:
    """Return the URI of a metadata file given as a URI, an absolute path or a path under the root.

    Raises InvalidLocationError.
    """
    return to_uri(root, as_uri(metadata_location))


def registering_io(io: StorageFileIO, uris: Iterable[str]) -> StorageFileIO:
    """Return a FileIO for metadata files that a caller named by URIs, wherever they are.

    Those under no root that is known are read by their folder. Where a storage does not show them there, the root is
    that of the lakehouse, which the file's path tells. Raises InvalidLocationError, LocationNotAllowedError where it
    does not.
    """
    roots = {_root_of(uri, io.places) for uri in uris if io.places.known(uri) is None}
    opened = [open_storage(root, io.storage_options.beyond(io.root, root)) for root in sorted(roots)]
    names = io.places.names
    opening = StorageFileIO.on(io.storage, io.storage_options, read_only=True, others=opened, names=names)
    opening.metadata_limit_bytes = io.metadata_limit_bytes
    return opening.strict()


def root_to_allow(definition: TableDef, io: StorageFileIO) -> str | None:
    """Return the root that must be allowed so that a registered table can be read later. None if it can be read now.

    ``io`` may read its metadata file. Raises CorruptFileError, StorageError.
    """
    uri = metadata_uri(definition, io.root)
    location = f"{as_uri(read_table_metadata(io, uri).location).rstrip('/')}/"
    needed = [location, *([] if uri.startswith(location) else [_folder_of(uri)])]
    plain = Places(io.root, io.places.names, io.places.allowed)
    far = [root for root in needed if plain.known(f"{root}metadata/file") is None]
    whole = [root if roots_nest(root) else root_of_table_file(f"{root}metadata/file") or root for root in far]
    return " ".join(dict.fromkeys(whole)) or None


def _root_of(uri: str, places: Places) -> str:
    """Return the root through which a metadata file under no known root is read."""
    if roots_nest(uri):
        return normalize_root_uri(_folder_of(uri))
    return root_of_table_file(uri) or places.strict().find(uri).root  # which says what to allow


def _folder_of(uri: str) -> str:
    return uri[: uri.rindex("/") + 1]


def registered_table(
    io: StorageFileIO, uri: str, lakehouse: LakehouseDef, table_type: str = EXTERNAL
) -> tuple[TableMetadata, TableDef]:
    """Read a table's metadata file, a URI, and return it with the definition that it is registered by.

    The definition is of ``table_type``, EXTERNAL or FEDERATED, so no file of the table is ever deleted. Its id is
    empty. A managed table of this lakehouse, for example a dropped one, is MANAGED again, under the id in its location.
    Raises InvalidInputError for another type, CorruptFileError for a file that is no Iceberg metadata, FileMissingError
    and other StorageErrors, UnsupportedTypeError, InvalidDefinitionError for columns that differ by case only.
    """
    if table_type not in (EXTERNAL, FEDERATED):
        raise InvalidInputError(f"a table is registered as {EXTERNAL} or {FEDERATED}, not as {table_type!r}")
    metadata = read_table_metadata(io, uri)
    table_id = managed_table_id(metadata.location, io.root)
    is_in_place = table_id is not None and uri.startswith(f"{metadata.location}/")
    if table_id is not None and is_in_place and is_owner(io.storage, table_id, lakehouse):
        return metadata, table_definition(metadata, uri, io.root, table_id=table_id, table_type=MANAGED)
    check_case([metadata.schema()], metadata.properties)
    return metadata, table_definition(metadata, uri, io.root, table_type=table_type)
