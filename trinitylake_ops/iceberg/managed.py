"""Managed tables: locations, and the lakehouse that owns each table.

A MANAGED table's location is ``<root>tables/<TableDef.id>``, with ``metadata/`` and ``data/`` below it. Its
``format_properties["metadata_location"]`` refers to its current metadata file by a path under the lakehouse's root or
by a URI. The lakehouse decides when files are deleted, so fixed table properties disable Iceberg's own deletions.

The creator of a managed table writes ``tables/<id>/_owner.json`` together with, or before, the first other file in that
folder. A writer may leave files of a table that was never published. The owner file identifies them as files of this
lakehouse, so that they can be removed as orphans. A folder that has no owner file and to which no version refers is
never modified.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import replace

from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.errors import CorruptFileError, FileExistsAlreadyError, FileMissingError, InvalidDefinitionError
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.definitions import METADATA_LOCATION, TABLE_UUID, LakehouseDef, TableDef
from trinitylake_ops.format.file_names import OWNER_NAME, TABLES_PREFIX, owner_path, table_prefix
from trinitylake_ops.format.locations import normalize_root_uri, to_location, to_uri
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.iceberg.properties import PATH_PROPERTIES, check_settable
from trinitylake_ops.iceberg.types import from_iceberg_schema
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_settled

ICEBERG = "ICEBERG"
MANAGED = "MANAGED"
EXTERNAL = "EXTERNAL"

#: Properties of every managed table: no engine may delete metadata, snapshots or data files.
MANAGED_PROPERTIES: Mapping[str, str] = {
    "gc.enabled": "false",
    "write.metadata.delete-after-commit.enabled": "false",
}
#: Iceberg format version of new tables. PyIceberg would drop metadata fields of later versions that it does not
#: support.
LATEST_WRITTEN_VERSION = 2


def new_table_location(root: str, definition: LakehouseDef) -> str:
    """Return a new location for a MANAGED table: a URI without a trailing ``/`` whose last segment is the table id."""
    table_root = normalize_root_uri(definition.table_root) if definition.table_root else root
    return table_root + table_prefix(str(uuid.uuid4())).rstrip("/")


def table_id_of(location: str) -> str | None:
    """Return the id in the location of a MANAGED table, or None for other locations."""
    parent, _, table_id = location.rstrip("/").rpartition("/")
    return table_id if table_id and f"{parent}/".endswith(f"/{TABLES_PREFIX}") else None


def managed_table_id(location: str, root: str) -> str | None:
    """Return the id of the MANAGED table that has this location under ``root``, or None for any other location."""
    table_id = table_id_of(location)
    try:
        is_managed = table_id is not None and location == f"{root}{table_prefix(table_id)}".rstrip("/")
    except InvalidDefinitionError:  # for example "..", which is not a valid id
        return None
    return table_id if is_managed else None


def managed_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties of a new managed table. Raises InvalidDefinitionError for forbidden properties."""
    check_managed_properties({**MANAGED_PROPERTIES, **properties})
    return {**properties, **MANAGED_PROPERTIES}


def check_format_version(metadata: TableMetadata) -> None:
    """Raise InvalidDefinitionError for a table that PyIceberg can read but not write."""
    if metadata.format_version > LATEST_WRITTEN_VERSION:
        raise InvalidDefinitionError(
            f"its Iceberg format version {metadata.format_version} cannot be written: the latest supported version is"
            f" {LATEST_WRITTEN_VERSION}; write it with another engine"
        )


def check_managed_properties(properties: Mapping[str, str]) -> None:
    """Raise InvalidDefinitionError for properties that delete files, move files or name a class to load."""
    check_settable(properties)
    for name, value in MANAGED_PROPERTIES.items():
        if properties.get(name, "").lower() != value:
            raise InvalidDefinitionError(
                f"property {name!r} of a managed table must be {value!r}: the lakehouse decides when files are deleted"
            )
    for name in PATH_PROPERTIES:
        if name in properties:
            raise InvalidDefinitionError(
                f"property {name!r} cannot be set: a managed table's files are below its location; leave it out"
            )


def metadata_uri(definition: TableDef, root: str) -> str:
    """Return the URI of a table's current metadata file. Raises InvalidDefinitionError if the definition has none."""
    location = definition.format_properties.get(METADATA_LOCATION)
    if not location:
        raise InvalidDefinitionError(
            f"table {definition.id!r} has no {METADATA_LOCATION!r} in its format properties; register its metadata file"
        )
    return to_uri(root, location)


def without_history(metadata: TableMetadata) -> TableMetadata:
    """Return a table's metadata without its snapshots, which suffices to read and write data files."""
    empty: dict[str, object] = {
        "snapshots": [],
        "snapshot_log": [],
        "metadata_log": [],
        "refs": {},
        "current_snapshot_id": None,
    }
    return metadata.model_copy(update={**empty, "statistics": [], "partition_statistics": []})


def table_definition(
    metadata: TableMetadata,
    uri: str,
    root: str,
    *,
    base: TableDef | None = None,
    table_id: str = "",
    table_type: str = MANAGED,
) -> TableDef:
    """Return the definition of a table with the given current metadata file.

    The schema, identifier fields (primary keys), sort order (sort keys) and partition sources (distribution keys) are
    taken from the metadata. Only top-level columns can be keys.

    Args:
        metadata: Contents of the metadata file.
        uri: URI of the metadata file.
        root: Root of the lakehouse.
        base: The previous definition, which provides values that the metadata lacks.
        table_id: Id of a new table.
        table_type: Type of a new table.

    Raises:
        UnsupportedTypeError: A definition cannot store the schema.
    """
    schema = from_iceberg_schema(metadata.schema())
    top_level = [column.id for column in schema.columns]
    sort_order = metadata.sort_order_by_id(metadata.default_sort_order_id)
    sort_ids = [field.source_id for field in sort_order.fields] if sort_order is not None else []
    before = base or TableDef(id=table_id, table_type=table_type, table_format=ICEBERG)
    return replace(
        before,
        schema=schema,
        primary_keys=_columns(metadata.schema().identifier_field_ids, top_level),
        sort_keys=_columns(sort_ids, top_level),
        distribution_keys=_columns([field.source_id for field in metadata.spec().fields], top_level),
        unique_columns=_columns(before.unique_columns, top_level),
        format_properties={
            **before.format_properties,
            METADATA_LOCATION: to_location(root, uri),
            **_identity(metadata),
        },
    )


def _identity(metadata: TableMetadata) -> dict[str, str]:
    """Return the format property that identifies the table. Metadata of format version 1 may lack a UUID."""
    return {TABLE_UUID: str(metadata.table_uuid)} if metadata.format_version > 1 else {}


def _columns(ids: list[int] | tuple[int, ...], top_level: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(column_id for column_id in ids if column_id in top_level))


_LAKEHOUSE_ID = "lakehouse_id"


def owner_file(definition: LakehouseDef) -> bytes:
    """Return the contents of the owner file of all managed tables of a lakehouse."""
    return _owner_file(definition.id)


def _owner_file(lakehouse_id: str) -> bytes:
    return encode_sealed_json({_LAKEHOUSE_ID: lakehouse_id}, OWNER_NAME)


def read_owner(data: bytes, path: str) -> str:
    """Return the lakehouse id in an owner file.

    Args:
        data: Contents of the file.
        path: Path of the file, for errors.

    Raises:
        CorruptFileError: The file is not a valid owner file.
    """
    try:
        owner = decode_sealed_json(data, path).get(_LAKEHOUSE_ID)
    except CorruptFileError as error:
        raise CorruptFileError(f"{path!r} is not a table's owner file: {error.message}", path=path) from error
    if not isinstance(owner, str) or not owner:
        raise CorruptFileError(f"{path!r} is not a table's owner file: it has no {_LAKEHOUSE_ID!r}", path=path)
    return owner


def is_owner(storage: Storage, table_id: str, definition: LakehouseDef) -> bool:
    """Whether the folder of a table has the owner file of a lakehouse.

    Args:
        storage: Storage of the lakehouse's root.
        table_id: Id of the table.
        definition: Definition of the lakehouse.

    Raises:
        StorageError: The owner file cannot be read.
    """
    path = owner_path(table_id)
    try:
        return read_owner(storage.read(path, limit_bytes=MAX_NOTE_BYTES), path) == definition.id
    except FileMissingError:
        return False


def claim_location(storage: Storage, location: str, definition: LakehouseDef) -> str | None:
    """Write the owner file at a new table's location.

    Args:
        storage: Storage of the lakehouse's root.
        location: The new location, a URI.
        definition: Definition of the lakehouse.

    Returns:
        The path of the owner file. None for a location outside the root, whose files are never deleted.

    Raises:
        FileExistsAlreadyError: The folder belongs to another lakehouse.
        StorageError: The file cannot be written.
    """
    table_id = managed_table_id(location, storage.root)
    return None if table_id is None else claim_folder(storage, table_id, definition.id)


def claim_folder(storage: Storage, table_id: str, lakehouse_id: str) -> str:
    """Write the owner file of a table's folder under the root, and return its path.

    Args:
        storage: Storage of the lakehouse's root.
        table_id: Id of the table.
        lakehouse_id: Id of the lakehouse.

    Raises:
        FileExistsAlreadyError: The folder belongs to another lakehouse.
        InvalidDefinitionError: The id is not valid.
        StorageError: The file cannot be written.
    """
    path, data = owner_path(table_id), _owner_file(lakehouse_id)
    if not create_settled(
        storage, path, data, is_ours=lambda existing: read_owner(existing, path) == lakehouse_id, trusts_refusals=True
    ):
        raise FileExistsAlreadyError(f"the new table folder of {path!r} belongs to another lakehouse", path=path)
    return path
