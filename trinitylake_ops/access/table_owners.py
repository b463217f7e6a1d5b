"""The lakehouses that use a table root (FORMAT.md, "Users of a table root").

A ``table_root`` is content, and several lakehouses may name the same one, for example copies of the same lakehouse.
Each lakehouse therefore registers with a file under the table root before it writes any other file there. An operator
claims the table root for one lakehouse. Only this lakehouse may delete files there, and only while no copy of this
lakehouse uses the table root.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass
from itertools import islice

from trinitylake_ops.access.allowed_roots import cut
from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.file_names import TABLES_PREFIX, derived_uuid
from trinitylake_ops.format.sealed_files import decode_sealed_json, encode_sealed_json
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.storage.interface import Storage

#: Advice for the operator on how to claim a table root for a lakehouse.
CLAIM_REMEDY = "run 'trinitylake relocate --table-root' to claim it for this lakehouse"
_MAX_READ = 100
_LAKEHOUSE_ID, _ROOT, _FREES = "lakehouse_id", "root", "frees"


@dataclass(frozen=True, slots=True)
class TableUser:
    """The registration of a lakehouse that uses a table root."""

    #: The id of the lakehouse. Copies of a lakehouse have the same id.
    lakehouse_id: str
    #: The root of the lakehouse.
    root: str
    #: Whether the operator claimed the table root for this lakehouse, so that the lakehouse may delete files there.
    frees: bool = False

    @property
    def path(self) -> str:
        """The path of the registration under the table root."""
        return f"{_prefix(self.lakehouse_id)}{derived_uuid(uuid.NAMESPACE_URL, self.root)}.json"

    def to_bytes(self) -> bytes:
        """Encode the registration as a file."""
        content = {_LAKEHOUSE_ID: self.lakehouse_id, _ROOT: self.root, _FREES: self.frees}
        return encode_sealed_json(content, self.path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> TableUser:
        """Decode a registration.

        Args:
            data: The content of the file.
            path: The path of the file, for errors.

        Raises:
            CorruptFileError: The file is damaged or lacks a field.
        """
        content = decode_sealed_json(data, path)
        lakehouse_id, root, frees = (content.get(name) for name in (_LAKEHOUSE_ID, _ROOT, _FREES))
        if not isinstance(lakehouse_id, str) or not isinstance(root, str) or not isinstance(frees, bool):
            raise CorruptFileError(
                f"{path!r} is not a valid table root registration: a field is missing or has the wrong type",
                path=path,
            )
        return cls(lakehouse_id, root, frees)


def _prefix(lakehouse_id: str) -> str:
    # This folder is not a table's folder, so operations that delete files never mistake a registration for a table
    # file.
    return f"{TABLES_PREFIX}_lakehouse-{derived_uuid(uuid.NAMESPACE_URL, lakehouse_id)}-"


def users_of(storage: Storage, lakehouse_id: str) -> list[TableUser]:
    """Return up to 100 registrations with a lakehouse id under a table root: those of the lakehouse and its copies.

    Sends one listing request, and one read request for each registration.

    Args:
        storage: The storage of the table root.
        lakehouse_id: The id of the lakehouse.

    Raises:
        CorruptFileError: A registration is damaged.
        StorageError: A request failed.
    """
    users = []
    for info in list(islice(storage.list(_prefix(lakehouse_id)), _MAX_READ)):
        try:
            data = storage.read(info.path, limit_bytes=MAX_NOTE_BYTES)
        except FileMissingError:  # the file was deleted after the listing
            continue
        users.append(TableUser.from_bytes(data, info.path))
    return users


def add_user(storage: Storage, lakehouse_id: str, root: str) -> None:
    """Register a lakehouse as a user of a table root, unless it is already registered.

    Args:
        storage: The storage of the table root.
        lakehouse_id: The id of the lakehouse.
        root: The root of the lakehouse.

    Raises:
        StorageError: A request failed, or its outcome is unknown (AmbiguousWriteError).
    """
    user = TableUser(lakehouse_id, root)
    create_settled(storage, user.path, user.to_bytes(), is_ours=lambda _: True, trusts_refusals=True)


def claim_table_root(storage: Storage, lakehouse_id: str, root: str, *, replaces_others: bool = False) -> None:
    """Claim a table root for a lakehouse on behalf of the operator.

    Args:
        storage: The storage of the table root.
        lakehouse_id: The id of the lakehouse.
        root: The root of the lakehouse.
        replaces_others: Whether to delete the other registrations with the same id, because those lakehouses no
            longer exist or no longer use this table root.

    Raises:
        StorageError: A request failed.
    """
    user = TableUser(lakehouse_id, root, frees=True)
    if replaces_others:
        for info in list(storage.list(_prefix(lakehouse_id))):
            if info.path != user.path:
                storage.delete(info.path)
    storage.write(user.path, user.to_bytes())


def retention_reason(storage: Storage, lakehouse_id: str, root: str) -> str:
    """Return why a lakehouse may not delete files under a table root, or an empty string if it may.

    Args:
        storage: The storage of the table root.
        lakehouse_id: The id of the lakehouse.
        root: The root of the lakehouse.

    Raises:
        StorageError: A request failed.
    """
    try:
        users = users_of(storage, lakehouse_id)
    except CorruptFileError as error:
        return f"the lakehouses that use it are unknown: {error.message}"
    if others := [user.root for user in users if user.root != root]:
        return (
            f"the lakehouse at {cut(others[0])!r} with the same id also uses it; if that lakehouse was deleted,"
            f" {CLAIM_REMEDY}"
        )
    if not any(user.frees for user in users):
        return f"it is not claimed for the lakehouse at {root}; {CLAIM_REMEDY}"
    return ""
