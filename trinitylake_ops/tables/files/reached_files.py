"""The files that one version of a table reaches, kept as hashes to look up single files again and again."""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from hashlib import blake2b

from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.tables.files.reach import files_of
from trinitylake_ops.tables.io.file_io import StorageFileIO

#: Makes the hashes of this process unpredictable: no writer can name a file that has the hash of another.
_KEY = secrets.token_bytes(16)


class ReachedFiles:
    """The files that a table reaches at one version: its metadata, and all that its snapshots name.

    Args:
        definition: The definition of the table at that version.
        io: Reads the lakehouse's files.

    Raises:
        StorageError: If the metadata, a manifest list or a manifest cannot be read.
    """

    def __init__(self, definition: TableDef, io: StorageFileIO):
        uris = (to_uri(io.root, file.location) for file in files_of(definition, io, skips_missing=True))
        self._hashes = array("Q", sorted(map(_hash, uris)))

    @property
    def size_bytes(self) -> int:
        """The bytes that it takes in memory."""
        return len(self._hashes) * self._hashes.itemsize

    def __contains__(self, uri: object) -> bool:
        """Whether the version reaches a file, by its URI."""
        wanted = _hash(str(uri))
        at = bisect_left(self._hashes, wanted)
        return at < len(self._hashes) and self._hashes[at] == wanted


def _hash(uri: str) -> int:
    return int.from_bytes(blake2b(uri.encode(), digest_size=8, key=_KEY).digest(), "big")
