"""Which folders of tables may be written to, and the properties of catalogs that name the lakehouse."""

from __future__ import annotations

import re
from collections.abc import Mapping

from trinitylake_ops.access.allowed_roots import FileAddress, cut
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.access.table_owners import add_user
from trinitylake_ops.errors import (
    CorruptFileError,
    FileExistsAlreadyError,
    FileMissingError,
    LakehouseNotFoundError,
    LocationNotAllowedError,
)
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import OWNER_NAME, TABLES_PREFIX, table_prefix
from trinitylake_ops.format.locations import to_location
from trinitylake_ops.iceberg.managed import claim_folder, read_owner
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import ALLOWED_ROOTS, StorageOptions, is_secret
from trinitylake_ops.transaction.lakehouse import Lakehouse

_TABLE_FILE = re.compile(rf"{TABLES_PREFIX}([^/]+)/.+", re.DOTALL)


class FolderOwners:
    """Checks the owner of a table's folder before a file in it is written or deleted.

    ``storage`` is that of the lakehouse. ``external_storages`` reads and writes beyond its root, with ``options``.
    """

    def __init__(self, storage: Storage, options: StorageOptions, external_storages: ExternalStorages):
        self._storage = storage
        self._options = options
        self._external_storages = external_storages
        self._checked_roots: set[str] = set()

    def check(self, storage: Storage, path: str) -> None:
        """Check that the folder of a file to write or delete belongs to this lakehouse, if content names its root.

        Raises LocationNotAllowedError, FileExistsAlreadyError, StorageError.
        """
        if storage is self._storage:
            self.claim(path)
        elif storage.root in self._external_storages.names.table_roots:
            if not self._external_storages.allowed_roots.is_allowed(storage.root):
                self.check_is_of_no_copy(storage)
                self._claim(storage, path)
            self._register_writer(storage)

    def is_own_file(self, uri: str) -> bool:
        """Whether a file is one in a table's folder of this lakehouse, below its root or its table root.

        Below the table root the owner file tells, and an unreadable one counts as this lakehouse's. Raises
        StorageError.
        """
        if to_location(self._storage.root, uri).startswith(TABLES_PREFIX):
            return True
        for root in self._external_storages.table_roots():
            match = _TABLE_FILE.fullmatch(uri.removeprefix(root))
            if match is not None and uri.startswith(root):
                path = f"{TABLES_PREFIX}{match[1]}/{OWNER_NAME}"
                try:
                    data = self._external_storages.storage_of(FileAddress(root, path)).read(
                        path, limit_bytes=MAX_NOTE_BYTES
                    )
                    return read_owner(data, path) == self._external_storages.names.lakehouse_id
                except FileMissingError:
                    return False
                except CorruptFileError:
                    return True
        return False

    def claim(self, path: str) -> None:
        """In a copy, write the owner file of a table's folder, once, as the file to write may be the first one there.

        In other lakehouses the creator of a table does this. Raises FileExistsAlreadyError, StorageError.
        """
        if self._external_storages.names.is_copy:
            self._claim(self._storage, path)

    def check_is_of_no_copy(self, table_root: Storage) -> None:
        """Raise LocationNotAllowedError for a table root with another copy of this lakehouse. It is asked once.

        Both copies have one id. So each takes for its own, and removes, the files that the other writes there.
        """
        if table_root.root in self._checked_roots:
            return
        definition = latest_definition_at(table_root, self._options)
        if definition is not None and definition.id == self._external_storages.names.lakehouse_id:
            raise LocationNotAllowedError(
                f"the table root {cut(table_root.root)!r} is the root of another copy of this lakehouse, which would"
                " remove what is written there; 'trinitylake relocate' gives up that table root",
                path=cut(table_root.root),
            )
        self._checked_roots.add(table_root.root)

    def _register_writer(self, table_root: Storage) -> None:
        """Say, once, that this lakehouse writes under a table root, so that no copy of it frees these files."""
        names = self._external_storages.names
        if table_root.root not in names.claimed:
            add_user(table_root, names.lakehouse_id, self._external_storages.allowed_roots.root)
            names.note_claimed(table_root.root)

    def _claim(self, storage: Storage, path: str) -> None:
        names = self._external_storages.names
        match = _TABLE_FILE.fullmatch(path)
        if match is None or match[1] in names.claimed:
            return
        try:
            claim_folder(storage, match[1], names.lakehouse_id)
        except FileExistsAlreadyError as error:
            folder = f"{storage.root}{table_prefix(match[1])}"
            raise LocationNotAllowedError(
                f"{cut(folder)!r} belongs to another lakehouse, whose {OWNER_NAME} stands there: nothing is written"
                f" or deleted there; if it is yours, allow it by --allow-root or the option {ALLOWED_ROOTS!r}",
                path=cut(folder),
            ) from error
        names.note_claimed(match[1])


def latest_definition_at(storage: Storage, options: StorageOptions) -> LakehouseDef | None:
    """Return the latest definition of the lakehouse on a storage, None where there is none. Raises StorageError."""
    try:
        return Lakehouse(storage, options, cache="off").snapshot().definition
    except LakehouseNotFoundError:  # a folder of files, as in a program that only copies them
        return None


ROOT = "root"
STORAGE_OPTION_PREFIX = "storage."


def storage_options_of(properties: Mapping[str, str]) -> StorageOptions:
    """Return the storage options among the properties of a catalog or FileIO: those named ``storage.*``."""
    return StorageOptions(
        {
            name.removeprefix(STORAGE_OPTION_PREFIX): value
            for name, value in properties.items()
            if name.startswith(STORAGE_OPTION_PREFIX)
        }
    )


def public_properties(properties: Mapping[str, str], root: str, options: StorageOptions) -> dict[str, str]:
    """Return the properties of a catalog or FileIO that is open: with its root and options, without credentials.

    Anybody may print properties. Objects that open further storages keep their StorageOptions beside them.
    """
    kept = {name: value for name, value in properties.items() if not name.startswith(STORAGE_OPTION_PREFIX)}
    shown = {f"{STORAGE_OPTION_PREFIX}{name}": options[name] for name in options if not is_secret(name)}
    return {**kept, **shown, ROOT: root}
