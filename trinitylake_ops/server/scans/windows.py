"""Manifests of which a scan decodes some entries only, so that the work of a request is bounded (decision 141)."""

from __future__ import annotations

import threading

from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestEntry, ManifestEntryStatus, ManifestFile

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.tables.files.reach import entries_within
from trinitylake_ops.tables.io.file_io import StorageFileIO


class TooManyEntriesError(TrinityLakeError):
    """Manifests have more entries than one request decodes."""


class EntryBudget:
    """How many entries a request may decode. Threads share it.

    Args:
        n_entries: The number of entries.
    """

    def __init__(self, n_entries: int):
        self._most = n_entries
        self.n_taken = 0
        self._lock = threading.Lock()

    def take(self, n_entries: int) -> None:
        """Use some of the budget. Raises TooManyEntriesError."""
        with self._lock:
            self.n_taken += n_entries
            if self.n_taken > self._most:
                raise TooManyEntriesError("the manifests have too many entries for one request; plan in parts")


class WindowedManifest(ManifestFile):
    """A manifest of which pyiceberg sees the entries in ``window``. It is read from the storage once.

    Entries count by their numbers in the file, with those of deleted files. ``n_entries`` is the number of all of them,
    None before the first read: pyiceberg reads no manifest whose summary excludes the filter.
    """

    window: range
    budget: EntryBudget
    n_entries: int | None
    #: The locations of files that the entries of the window add.
    added: set[str]
    _stored: bytes | None
    _decoded: tuple[range, list[ManifestEntry]] | None

    @classmethod
    def of(cls, manifest: ManifestFile, window: range, budget: EntryBudget) -> WindowedManifest:
        """Return a manifest with a window.

        Args:
            manifest: The entry of the manifest list.
            window: The numbers of the entries to decode.
            budget: What the entries count for.
        """
        windowed = cls(*manifest._data)
        windowed.window, windowed.budget = window, budget
        windowed.n_entries = windowed._stored = windowed._decoded = None
        windowed.added = set()
        return windowed

    def fetch_manifest_entry(self, io: FileIO, discard_deleted: bool = True) -> list[ManifestEntry]:
        """Return the entries in the window.

        Args:
            io: Reads the manifest.
            discard_deleted: Whether entries of deleted files are left out.

        Raises:
            TooManyEntriesError: The entries exceed the budget.
            CorruptFileError: The manifest is not Avro, or claims more than it has.
        """
        assert isinstance(io, StorageFileIO)
        if self._decoded is None or self._decoded[0] != self.window:
            if self._stored is None:
                self._stored = io.new_input(self.manifest_path).read_whole()
            entries, self.n_entries = entries_within(
                ManifestFile(*self._data), self._stored, self.window, self.budget.take
            )
            self._decoded = (self.window, entries)
            self.added = {one.data_file.file_path for one in entries if one.status == ManifestEntryStatus.ADDED}
        entries = self._decoded[1]
        return [one for one in entries if not discard_deleted or one.status != ManifestEntryStatus.DELETED]
