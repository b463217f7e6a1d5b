"""Check which table folders may be written, and handle catalog properties with storage options."""

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

    Args:
        storage: Storage of the lakehouse's root.
        options: Options for storage outside the root.
        external_storages: Storages outside the root.
    """

    def __init__(self, storage: Storage, options: StorageOptions, external_storages: ExternalStorages):
        self._storage = storage
        self._options = options
        self._external_storages = external_storages
        self._checked_roots: set[str] = set()

    def check(self, storage: Storage, path: str) -> None:
        """Check that the folder of a file to write or delete belongs to this lakehouse, if definitions name its root.

        Args:
            storage: Storage of the file.
            path: Path of the file.

        Raises:
            LocationNotAllowedError: The folder belongs to another lakehouse or to another copy of this one.
            StorageError: An owner file cannot be read or written.
        """
        if storage is self._storage:
            self.claim(path)
        elif storage.root in self._external_storages.names.table_roots:
            if not self._external_storages.allowed_roots.is_allowed(storage.root):
                self.check_is_of_no_copy(storage)
                self._claim(storage, path)
            self._register_writer(storage)

    def is_own_file(self, uri: str) -> bool:
        """Whether a file is in a table folder of this lakehouse, below its root or its table root.

        Below the table root, this depends on the owner file. A corrupt owner file counts as owned by this lakehouse.
        Raises StorageError.
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
        """In a copy, write the owner file of a table's folder once, because the next file may be the first one there.

        In other lakehouses, the creator of a table writes the owner file. Raises LocationNotAllowedError, StorageError.
        """
        if self._external_storages.names.is_copy:
            self._claim(self._storage, path)

    def check_is_of_no_copy(self, table_root: Storage) -> None:
        """Raise LocationNotAllowedError if another copy of this lakehouse uses a table root. The result is cached.

        Both copies have the same id, so each copy would treat the files of the other copy as its own and remove them.
        """
        if table_root.root in self._checked_roots:
            return
        definition = latest_definition_at(table_root, self._options)
        if definition is not None and definition.id == self._external_storages.names.lakehouse_id:
            raise LocationNotAllowedError(
                f"table root {cut(table_root.root)!r} is the root of another copy of this lakehouse, which would remove"
                " files written there; run 'trinitylake relocate' to release that table root",
                path=cut(table_root.root),
            )
        self._checked_roots.add(table_root.root)

    def _register_writer(self, table_root: Storage) -> None:
        """Register, once, that this lakehouse writes under a table root, so that no copy of it deletes its files."""
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
                f"{cut(folder)!r} belongs to another lakehouse, by its {OWNER_NAME}, and cannot be written; if it is"
                f" yours, allow it with --allow-root or the option {ALLOWED_ROOTS!r}",
                path=cut(folder),
            ) from error
        names.note_claimed(match[1])


def latest_definition_at(storage: Storage, options: StorageOptions) -> LakehouseDef | None:
    """Return the latest definition of the lakehouse on a storage, or None if there is no lakehouse.

    Args:
        storage: The storage.
        options: The options of the storage.

    Raises:
        StorageError: The definition cannot be read.
    """
    try:
        return Lakehouse(storage, options, cache="off").snapshot().definition
    except LakehouseNotFoundError:  # for example in a program that only copies files
        return None


ROOT = "root"
STORAGE_OPTION_PREFIX = "storage."


def storage_options_of(properties: Mapping[str, str]) -> StorageOptions:
    """Return the storage options in the properties of a catalog or FileIO, named ``storage.*``."""
    return StorageOptions(
        {
            name.removeprefix(STORAGE_OPTION_PREFIX): value
            for name, value in properties.items()
            if name.startswith(STORAGE_OPTION_PREFIX)
        }
    )


def public_properties(properties: Mapping[str, str], root: str, options: StorageOptions) -> dict[str, str]:
    """Return the properties of an open catalog or FileIO, with its root and options and without credentials.

    Properties may be printed. Objects that open more storages keep their StorageOptions separately.

    Args:
        properties: The properties to complete.
        root: Root of the lakehouse.
        options: Its storage options.
    """
    kept = {name: value for name, value in properties.items() if not name.startswith(STORAGE_OPTION_PREFIX)}
    public_options = {f"{STORAGE_OPTION_PREFIX}{name}": options[name] for name in options if not is_secret(name)}
    return {**kept, **public_options, ROOT: root}
