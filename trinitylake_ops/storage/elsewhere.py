"""Reading files beyond a storage's root, by their URIs: what an export left in the lakehouse it came from."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from trinitylake_ops.errors import InvalidLocationError, StorageError
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.open import open_storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import in_one_round, run_parallel


class Elsewhere:
    """Reads files by URI, each through a storage for its disk or bucket, opened at its first use.

    Options are handed on to a storage of the same scheme; another one finds its own in the environment.
    Safe to use from several threads.
    """

    def __init__(self, root: str, storage_options: StorageOptions):
        self._scheme = root.partition("://")[0]
        self._options = storage_options
        self._storages: dict[str, Storage] = {}
        self._given: list[Storage] = []
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[object, ...]:
        return (_reopened, (self._scheme, self._options, tuple(self._given)))

    def give(self, storage: Storage) -> None:
        """Read what lies under the root of a storage through it, with the options that it has."""
        self._given.append(storage)

    def read(self, uri: str) -> bytes:
        """Return the bytes of a file. Raises FileMissingError, InvalidLocationError, StorageError."""
        storage, path = self._resolve(uri)
        return storage.read(path)

    def read_available(self, uris: Sequence[str]) -> list[bytes | StorageError]:
        """Read several files in parallel; a failure stands in its place instead of being raised."""

        def read_or_error(uri: str) -> bytes | StorageError:
            try:
                return self.read(uri)
            except InvalidLocationError as error:
                return StorageError(error.message, path=uri)
            except StorageError as error:
                return error

        return run_parallel(in_one_round(read_or_error), uris, Storage.concurrency)

    def _resolve(self, uri: str) -> tuple[Storage, str]:
        for given in self._given:
            if uri.startswith(given.root):
                return given, uri.removeprefix(given.root)
        scheme, _, rest = uri.partition("://")
        root = f"{scheme}://{rest.partition('/')[0]}/"  # a bucket; of files the disk
        with self._lock:
            storage = self._storages.get(root)
            if storage is None:
                options = self._options if scheme == self._scheme else None
                storage = self._storages[root] = open_storage(root, options)
        return storage, uri.removeprefix(root)


def _reopened(scheme: str, storage_options: StorageOptions, given: tuple[Storage, ...]) -> Elsewhere:
    elsewhere = Elsewhere(f"{scheme}://", storage_options)
    for storage in given:
        elsewhere.give(storage)
    return elsewhere
