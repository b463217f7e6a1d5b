"""Reading definitions by their pointers."""

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
    """Decoded definitions of one lakehouse, cached up to about ``cache_bytes`` of memory.

    Definitions are immutable files, so cached ones never go stale. Bytes that do not decode are dropped from the
    storage's cache and read once more. Definitions that an export left in another lakehouse are read from
    ``external_storages``.
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
        """Return what reads by another storage of the same files, and shares the definitions that are decoded."""
        other = DefinitionStore(storage, external_storages=external_storages)
        other._cache = self._cache
        return other

    def lakehouse(self, location: str, version: int = -1) -> LakehouseDef:
        """Return the lakehouse definition of a version, at a location. Raises CorruptFileError, StorageError."""
        definition = self._load([location], LakehouseDef, _lakehouse_def)[0]
        self._external_storages.names.note(definition, version)
        return definition

    def unread_path(self, location: str) -> str | None:
        """Return the path of a definition of this lakehouse that has not been read; None for others, and for none."""
        if self._cache.get(location) is not None:
            return None
        try:
            path = self._path(location)
        except CorruptFileError:  # told by who reads it for its own sake
            return None
        return None if is_uri(path) else path

    def offer_lakehouse(self, location: str, path: str, data: bytes | StorageError) -> None:
        """Keep a lakehouse definition that was read with other files, unless it failed or does not decode."""
        if isinstance(data, bytes):
            with contextlib.suppress(CorruptFileError):  # told by who reads it for its own sake
                self._cache.put(location, _lakehouse_def(data, path), len(data) * _MEMORY_PER_FILE_BYTE)

    def namespace(self, location: str) -> NamespaceDef:
        """Return the namespace definition at a location. Raises CorruptFileError, StorageError."""
        return self.namespaces([location])[0]

    def namespaces(self, locations: Sequence[str]) -> list[NamespaceDef]:
        """Return namespace definitions in order, reading the uncached ones in parallel."""
        return self._load(locations, NamespaceDef, NamespaceDef.from_bytes)

    def table(self, location: str) -> TableDef:
        """Return the table definition at a location. Raises CorruptFileError, StorageError."""
        return self.tables([location])[0]

    def tables(self, locations: Sequence[str]) -> list[TableDef]:
        """Return table definitions in order, reading the uncached ones in parallel."""
        return self._load(locations, TableDef, TableDef.from_bytes, _distant_table)

    def _load(
        self,
        locations: Sequence[str],
        kind: type[T],
        decode: Callable[[bytes, str], T],
        decode_distant: Callable[[bytes, str], T] | None = None,
    ) -> list[T]:
        found: dict[str, T] = {}
        for location in locations:
            cached = self._cache.get(location)
            if isinstance(cached, kind):
                found[location] = cached
        missing = [location for location in dict.fromkeys(locations) if location not in found]
        if not missing:
            return [found[location] for location in locations]
        paths = {location: self._path(location) for location in missing}
        near = [location for location in missing if not is_uri(paths[location])]
        distant = [location for location in missing if is_uri(paths[location])]
        for location, data in zip(near, self._storage.read_many([paths[place] for place in near]), strict=True):
            found[location] = decoded(self._storage, paths[location], data, decode)
            self._cache.put(location, found[location], len(data) * _MEMORY_PER_FILE_BYTE)
        for uri, read in zip(distant, self._external_storages.read_available(distant), strict=True):
            if isinstance(read, StorageError):
                raise read
            found[uri] = (decode_distant or decode)(read, uri)
            self._cache.put(uri, found[uri], len(read) * _MEMORY_PER_FILE_BYTE)
        return [found[location] for location in locations]

    def _path(self, location: str) -> str:
        try:
            return to_location(self._storage.root, location)
        except InvalidLocationError as error:
            raise CorruptFileError(
                f"a root or node points to {location!r}, which is no location", path=location
            ) from error


def _lakehouse_def(data: bytes, path: str) -> LakehouseDef:
    return check_readable_sizes(LakehouseDef.from_bytes(data, path), path)


def _distant_table(data: bytes, uri: str) -> TableDef:
    """Return a definition of another lakehouse in the form in which this one has to read it."""
    definition, root = TableDef.from_bytes(data, uri), root_of(uri)
    return definition if root is None else definition.rebased(root)
