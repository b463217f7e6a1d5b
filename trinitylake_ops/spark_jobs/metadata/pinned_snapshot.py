"""One version of a lakehouse, for other processes. It is small to pickle, and the same wherever it is opened."""

from __future__ import annotations

from dataclasses import dataclass

from trinitylake_ops.errors import VersionExpiredError
from trinitylake_ops.format.file_names import RootNaming
from trinitylake_ops.format.nodes.node_file import decode_node
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.schemes import with_environment
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import Snapshot


@dataclass(frozen=True, slots=True)
class PinnedSnapshot:
    """A version, or an export, with the storage that it is read from. It contains credentials and never shows them.

    ``export_elsewhere`` is the name of an export that stands in another lakehouse.
    """

    storage: Storage
    storage_options: StorageOptions
    naming: RootNaming
    version: int
    location: str
    export_elsewhere: str | None = None

    @classmethod
    def of(cls, lake: Lakehouse, snapshot: Snapshot, export: str | None = None) -> PinnedSnapshot:
        """Pin a snapshot of ``lake``. ``export`` is the name by which it was asked for, if it was."""
        is_elsewhere = snapshot.files.storage.root != lake.root
        return cls(
            lake.storage,
            with_environment(lake.root, lake.storage_options),
            lake.files.roots.naming,
            snapshot.version,
            snapshot.location,
            export if is_elsewhere else None,
        )

    def lakehouse(self) -> Lakehouse:
        """Return the lakehouse, with the cache of this process."""
        lake = Lakehouse(self.storage, self.storage_options, cache="shared")
        lake.files.roots.known_naming = self.naming
        return lake

    def open(self) -> Snapshot:
        """Read the version's root again. Raises VersionExpiredError when it was purged since, StorageError."""
        lake = self.lakehouse()
        if self.export_elsewhere is not None:
            return lake.exported(self.export_elsewhere)
        root = decode_node(lake.storage.read(self.location), self.location)
        if root.is_sealed:
            raise VersionExpiredError("the version was expired and purged", path=self.location, version=self.version)
        return Snapshot(lake.files, self.version, self.location, root)
