"""Read definitions by their locations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import TypeVar

from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import CorruptFileError, InvalidLocationError, StorageError
from trinitylake_ops.format.definitions import LakehouseDef, NamespaceDef, TableDef
from trinitylake_ops.format.file_names import root_of
from trinitylake_ops.format.limits import check_readable_sizes
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.storage.cache.memory import ByteLru
from trinitylake_ops.storage.cache.storage import decoded
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import StorageOptions

DEFAULT_CACHE_BYTES = 32 * 1024 * 1024
_MEMORY_PER_FILE_BYTE = 2

T = TypeVar("T", LakehouseDef, NamespaceDef, TableDef)


class DefinitionStore:
    """Reads and caches the definitions of one lakehouse.

    Definition files are immutable, so cached definitions are never stale. Bytes that cannot be decoded are dropped from
    the storage's cache and read again.

    Args:
        storage: The storage of the lakehouse.
        cache_bytes: The approximate memory limit of the cache.
        external_storages: The storages of definitions in other lakehouses, for example of exports.
    """

    def __init__(
        self,
        storage: Storage,
        cache_bytes: int = DEFAULT_CACHE_BYTES,
        external_storages: ExternalStorages | None = None,
    ):
        self._storage = storage
        self._external_storages = external_storages or ExternalStorages(storage.root, StorageOptions())
        self._cache: ByteLru[str, LakehouseDef | NamespaceDef | TableDef] = ByteLru(cache_bytes)

    def on(self, storage: Storage, external_storages: ExternalStorages) -> DefinitionStore:
        """Return a store that reads the same files through other storages and shares the cache.

        Args:
            storage: The storage of the lakehouse.
            external_storages: The storages of definitions in other lakehouses.
        """
        other = DefinitionStore(storage, external_storages=external_storages)
        other._cache = self._cache
        return other

    def lakehouse(self, location: str, version: int = -1) -> LakehouseDef:
        """Return the lakehouse definition at a location.

        Args:
            location: The location.
            version: The version with this definition. Only the latest version determines the table root.

        Raises:
            CorruptFileError: The definition cannot be decoded.
            StorageError: The definition cannot be read.
        """
        definition = self._load([location], LakehouseDef, _lakehouse_def)[0]
        self._external_storages.names.note(definition, version)
        return definition

    def unread_path(self, location: str) -> str | None:
        """Return the path of a definition that is not cached; None if it is cached or not in this lakehouse."""
        if self._cache.get(location) is not None:
            return None
        try:
            path = self._path(location)
        except CorruptFileError:  # raised again when the definition is needed
            return None
        return None if is_uri(path) else path

    def offer_lakehouse(self, location: str, path: str, data: bytes | StorageError) -> None:
        """Cache a lakehouse definition that was read ahead. Ignores errors.

        Args:
            location: The location of the definition.
            path: The path of the definition.
            data: Its bytes, or the error of the read.
        """
        if isinstance(data, bytes):
            with contextlib.suppress(CorruptFileError):  # raised again when the definition is needed
                self._cache.put(location, _lakehouse_def(data, path), len(data) * _MEMORY_PER_FILE_BYTE)

    def namespace(self, location: str) -> NamespaceDef:
        """Return the namespace definition at a location. Raises CorruptFileError, StorageError."""
        return self.namespaces([location])[0]

    def namespaces(self, locations: Sequence[str]) -> list[NamespaceDef]:
        """Return namespace definitions in order. Reads those that are not cached in parallel."""
        return self._load(locations, NamespaceDef, NamespaceDef.from_bytes)

    def table(self, location: str) -> TableDef:
        """Return the table definition at a location. Raises CorruptFileError, StorageError."""
        return self.tables([location])[0]

    def tables(self, locations: Sequence[str]) -> list[TableDef]:
        """Return table definitions in order. Reads those that are not cached in parallel."""
        return self._load(locations, TableDef, TableDef.from_bytes, _external_table)

    def _load(
        self,
        locations: Sequence[str],
        kind: type[T],
        decode: Callable[[bytes, str], T],
        decode_external: Callable[[bytes, str], T] | None = None,
    ) -> list[T]:
        definitions: dict[str, T] = {}
        for location in locations:
            cached = self._cache.get(location)
            if isinstance(cached, kind):
                definitions[location] = cached
        missing = [location for location in dict.fromkeys(locations) if location not in definitions]
        if not missing:
            return [definitions[location] for location in locations]
        paths = {location: self._path(location) for location in missing}
        own = [location for location in missing if not is_uri(paths[location])]
        external = [location for location in missing if is_uri(paths[location])]
        for location, data in zip(own, self._storage.read_many([paths[location] for location in own]), strict=True):
            definitions[location] = decoded(self._storage, paths[location], data, decode)
            self._cache.put(location, definitions[location], len(data) * _MEMORY_PER_FILE_BYTE)
        for uri, content in zip(external, self._external_storages.read_available(external), strict=True):
            if isinstance(content, StorageError):
                raise content
            definitions[uri] = (decode_external or decode)(content, uri)
            self._cache.put(uri, definitions[uri], len(content) * _MEMORY_PER_FILE_BYTE)
        return [definitions[location] for location in locations]

    def _path(self, location: str) -> str:
        try:
            return to_location(self._storage.root, location)
        except InvalidLocationError as error:
            raise CorruptFileError(
                f"a root or node points to {location!r}, which is not a valid location", path=location
            ) from error


def _lakehouse_def(data: bytes, path: str) -> LakehouseDef:
    return check_readable_sizes(LakehouseDef.from_bytes(data, path), path)


def _external_table(data: bytes, uri: str) -> TableDef:
    """Decode a table definition of another lakehouse, and make its locations absolute."""
    definition, root = TableDef.from_bytes(data, uri), root_of(uri)
    return definition if root is None else definition.rebased(root)
