"""The partitions in which two states of a table have other files."""

from __future__ import annotations

from pyiceberg.manifest import DataFile, ManifestEntryStatus, ManifestFile
from pyiceberg.table.metadata import TableMetadata

from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO


def changed_partitions(
    before: TableMetadata | None, after: TableMetadata | None, io: StorageFileIO
) -> set[tuple[tuple[str, ...], str]]:
    """Return the partitions, such as ``year=2013/month=1``, that have other data or delete files, with their columns.

    None stands for no table. Manifests that both states share are not read. An unpartitioned table has the partition
    ``""``. Raises CorruptFileError, StorageError.
    """
    old, new = _manifests(before, io), _manifests(after, io)
    files_before = _files([manifest for path, manifest in old.items() if path not in new], io)
    files_after = _files([manifest for path, manifest in new.items() if path not in old], io)
    specs = {**(before.specs() if before else {}), **(after.specs() if after else {})}
    schemas = [state.schema() for state in (after, before) if state is not None]
    found: set[tuple[tuple[str, ...], str]] = set()
    for path in files_before.keys() ^ files_after.keys():
        file = files_before.get(path) or files_after[path]
        spec = specs[file.spec_id]
        names = tuple(field.name for field in spec.fields)
        found.add((names, spec.partition_to_path(file.partition, schemas[0]) if names else ""))
    return found


def _manifests(metadata: TableMetadata | None, io: StorageFileIO) -> dict[str, ManifestFile]:
    snapshot = None if metadata is None else metadata.current_snapshot()
    return {} if snapshot is None else {one.manifest_path: one for one in manifests_in(snapshot, io)}


def _files(manifests: list[ManifestFile], io: StorageFileIO) -> dict[str, DataFile]:
    return {
        entry.data_file.file_path: entry.data_file
        for manifest in manifests
        for entry in entries_in(manifest, io)
        if entry.status != ManifestEntryStatus.DELETED
    }
