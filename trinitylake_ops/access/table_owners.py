"""The lakehouses that use a table root (FORMAT.md, "Users of a table root").

A ``table_root`` is content, and several lakehouses may name one, copies of the same lakehouse too. So each leaves a
file there that says where it is, before its first other file. An operator makes the
table root that of one lakehouse. Only this one frees files there, while no copy of it uses the table root.
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

#: The command that makes a table root a lakehouse's own.
CLAIM_REMEDY = "'trinitylake relocate --table-root' makes it the table root of this one"
_MOST_READ = 100
_LAKEHOUSE_ID, _ROOT, _FREES = "lakehouse_id", "root", "frees"


@dataclass(frozen=True, slots=True)
class TableUser:
    """A lakehouse that uses a table root, by its id and its own root.

    With ``frees`` an operator made the table root its own: it frees what it does not need there.
    """

    lakehouse_id: str
    root: str
    frees: bool = False

    @property
    def path(self) -> str:
        """The path of its file, under the table root."""
        return f"{_prefix(self.lakehouse_id)}{derived_uuid(uuid.NAMESPACE_URL, self.root)}.json"

    def to_bytes(self) -> bytes:
        """Return its file."""
        content = {_LAKEHOUSE_ID: self.lakehouse_id, _ROOT: self.root, _FREES: self.frees}
        return encode_sealed_json(content, self.path)

    @classmethod
    def from_bytes(cls, data: bytes, path: str) -> TableUser:
        """Read a file. Raises CorruptFileError."""
        content = decode_sealed_json(data, path)
        lakehouse_id, root, frees = (content.get(name) for name in (_LAKEHOUSE_ID, _ROOT, _FREES))
        if not isinstance(lakehouse_id, str) or not isinstance(root, str) or not isinstance(frees, bool):
            raise CorruptFileError(f"{path!r} does not say which lakehouse uses the table root", path=path)
        return cls(lakehouse_id, root, frees)


def _prefix(lakehouse_id: str) -> str:
    # No table's folder: operations that delete never take it for a file of a table.
    return f"{TABLES_PREFIX}_lakehouse-{derived_uuid(uuid.NAMESPACE_URL, lakehouse_id)}-"


def users_of(storage: Storage, lakehouse_id: str) -> list[TableUser]:
    """Return the users of a table root that have this id, up to 100: the lakehouse and its copies.

    It takes a listing, and a request for each. Raises CorruptFileError, StorageError.
    """
    users = []
    for info in list(islice(storage.list(_prefix(lakehouse_id)), _MOST_READ)):
        try:
            data = storage.read(info.path, limit_bytes=MAX_NOTE_BYTES)
        except FileMissingError:  # taken away since the listing
            continue
        users.append(TableUser.from_bytes(data, info.path))
    return users


def add_user(storage: Storage, lakehouse_id: str, root: str) -> None:
    """Say that the lakehouse at ``root`` writes under a table root, unless its file says so already.

    Raises AmbiguousWriteError and other StorageErrors.
    """
    user = TableUser(lakehouse_id, root)
    create_settled(storage, user.path, user.to_bytes(), is_ours=lambda _: True, trusts_refusals=True)


def claim_table_root(storage: Storage, lakehouse_id: str, root: str, *, instead_of_others: bool = False) -> None:
    """Make a table root that of the lakehouse at ``root``, as the operator says.

    With ``instead_of_others`` the other users of the same id are forgotten: they are no more, or leave this table root.
    Raises StorageError.
    """
    user = TableUser(lakehouse_id, root, frees=True)
    if instead_of_others:
        for info in list(storage.list(_prefix(lakehouse_id))):
            if info.path != user.path:
                storage.delete(info.path)
    storage.write(user.path, user.to_bytes())


def retention_reason(storage: Storage, lakehouse_id: str, root: str) -> str:
    """Return why the lakehouse at ``root`` may free nothing under a table root, an empty text if it may.

    Raises StorageError.
    """
    try:
        users = users_of(storage, lakehouse_id)
    except CorruptFileError as error:
        return f"it cannot be told which lakehouses use it: {error.message}"
    if others := [user.root for user in users if user.root != root]:
        return f"the lakehouse at {cut(others[0])!r}, of the same id, uses it, too; if that one is gone, {CLAIM_REMEDY}"
    if not any(user.frees for user in users):
        return f"nobody made it the table root of the lakehouse at {root}; {CLAIM_REMEDY}"
    return ""
