"""The owner file, which tells the lakehouse that a table's folder belongs to (FORMAT.md, "Managed tables").

The creator of a managed table writes ``tables/<id>/_owner.json`` together with, or before, the first other file there.
A writer may leave files of a table that it never published. By the owner file they are known for this lakehouse's own,
and may be removed as orphans. A folder without that file, which no version defines either, is left alone.
"""

from __future__ import annotations

from trinitylake_ops.errors import CorruptFileError, FileExistsAlreadyError, FileMissingError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import OWNER_NAME, owner_path
from trinitylake_ops.format.file_sizes import MAX_NOTE_BYTES
from trinitylake_ops.format.sealed_json import decode_sealed_json, encode_sealed_json
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.tables.managed import managed_table_id

_LAKEHOUSE_ID = "lakehouse_id"


def owner_file(definition: LakehouseDef) -> bytes:
    """Return the owner file of every managed table of a lakehouse."""
    return _owner_file(definition.id)


def _owner_file(lakehouse_id: str) -> bytes:
    return encode_sealed_json({_LAKEHOUSE_ID: lakehouse_id}, OWNER_NAME)


def read_owner(data: bytes, path: str) -> str:
    """Return the id of the lakehouse that an owner file names. Raises CorruptFileError."""
    try:
        owner = decode_sealed_json(data, path).get(_LAKEHOUSE_ID)
    except CorruptFileError as error:
        raise CorruptFileError(f"this is no owner file of a table: {error.message}", path=path) from error
    if not isinstance(owner, str) or not owner:
        raise CorruptFileError(f"this is no owner file of a table: it has no {_LAKEHOUSE_ID!r}", path=path)
    return owner


def is_owner(storage: Storage, table_id: str, definition: LakehouseDef) -> bool:
    """Whether the folder of a table under the root has the owner file of a lakehouse. Raises StorageError."""
    path = owner_path(table_id)
    try:
        return read_owner(storage.read(path, limit_bytes=MAX_NOTE_BYTES), path) == definition.id
    except FileMissingError:
        return False


def claim_location(storage: Storage, location: str, definition: LakehouseDef) -> str | None:
    """Write the owner file of a new table's fresh location, a URI. Returns its path.

    For a location beyond the root nothing is written, and None is returned: its files are never deleted. Raises
    StorageError.
    """
    table_id = managed_table_id(location, storage.root)
    return None if table_id is None else claim_folder(storage, table_id, definition.id)


def claim_folder(storage: Storage, table_id: str, lakehouse_id: str) -> str:
    """Write the owner file of a table's folder under the root. Returns its path.

    Raises FileExistsAlreadyError if the folder is another lakehouse's, InvalidDefinitionError, StorageError.
    """
    path, data = owner_path(table_id), _owner_file(lakehouse_id)
    if not create_settled(
        storage, path, data, is_ours=lambda found: read_owner(found, path) == lakehouse_id, trusts_refusals=True
    ):
        raise FileExistsAlreadyError(f"another lakehouse has the fresh table folder of {path!r}", path=path)
    return path
