"""Delete manifests without the files that have no use any more: pyiceberg writes manifests of data files only."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pyiceberg.manifest import (
    DataFile,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table.update.snapshot import _OverwriteFiles

from trinitylake_ops.tables.files.reach import entries_in
from trinitylake_ops.tables.io.file_io import StorageFileIO


class DeleteManifestWriter(ManifestWriterV2):
    """Writes a manifest of delete files."""

    def content(self) -> ManifestContent:
        """Return what the manifest lists."""
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


def without_deletes(
    manifests: Sequence[ManifestFile], gone: Collection[DataFile], producer: _OverwriteFiles, io: StorageFileIO
) -> list[ManifestFile]:
    """Return the manifests of a new snapshot, those of delete files written anew where they list some that go.

    As Iceberg asks, a new manifest tells which files the snapshot deleted. Raises CorruptFileError, StorageError.
    """
    if not gone:
        return list(manifests)
    return [
        _without(manifest, gone, producer, io) if manifest.content == ManifestContent.DELETES else manifest
        for manifest in manifests
    ]


def _without(
    manifest: ManifestFile, gone: Collection[DataFile], producer: _OverwriteFiles, io: StorageFileIO
) -> ManifestFile:
    live = [entry for entry in entries_in(manifest, io) if entry.status != ManifestEntryStatus.DELETED]
    if not any(entry.data_file in gone for entry in live):
        return manifest
    with DeleteManifestWriter(
        producer.spec(manifest.partition_spec_id),
        producer.schema(),
        producer.new_manifest_output(),
        producer.snapshot_id,
        producer._compression,
    ) as writer:
        for entry in live:
            writer.add_entry(_kept_or_deleted(entry, producer.snapshot_id, is_gone=entry.data_file in gone))
    return writer.to_manifest_file()


def _kept_or_deleted(entry: ManifestEntry, snapshot_id: int, *, is_gone: bool) -> ManifestEntry:
    return ManifestEntry.from_args(
        status=ManifestEntryStatus.DELETED if is_gone else ManifestEntryStatus.EXISTING,
        snapshot_id=snapshot_id if is_gone else entry.snapshot_id,
        sequence_number=entry.sequence_number,
        file_sequence_number=entry.file_sequence_number,
        data_file=entry.data_file,
    )
