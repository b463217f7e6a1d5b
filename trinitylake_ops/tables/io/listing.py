"""Lists files of tables, wherever a lakehouse may have them."""

from __future__ import annotations

from collections.abc import Iterator

from trinitylake_ops.storage.interface import FileInfo
from trinitylake_ops.tables.io.file_io import StorageFileIO


def files_below(io: StorageFileIO, folder: str) -> Iterator[FileInfo]:
    """Yield the files below a folder, a URI that ends with ``/``. Their paths are those of its storage.

    Raises InvalidLocationError, LocationNotAllowedError, StorageError.
    """
    storage, path = io.resolve(f"{folder}any")
    yield from storage.list(path.removesuffix("any"))
