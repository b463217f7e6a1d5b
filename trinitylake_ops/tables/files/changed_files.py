"""The partitions in which two states of a table have other files."""

from __future__ import annotations

from urllib.parse import quote_plus
from uuid import UUID

from pyiceberg.manifest import DataFile, ManifestEntryStatus, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.typedef import Record

from trinitylake_ops.tables.files.reach import entries_in, manifests_in
from trinitylake_ops.tables.io.file_io import StorageFileIO


def changed_partitions(
    before: TableMetadata | None, after: TableMetadata | None, io: StorageFileIO
) -> dict[tuple[tuple[str, ...], Record], str]:
    """Return the partitions that have other data or delete files: their columns and values, and both as text.

    None is a state without the table. Manifests that both states share are not read. The text of an unpartitioned table
    is empty. Raises CorruptFileError, StorageError.
    """
    old, new = _manifests(before, io), _manifests(after, io)
    files_before = _files([manifest for path, manifest in old.items() if path not in new], io)
    files_after = _files([manifest for path, manifest in new.items() if path not in old], io)
    specs = {**(before.specs() if before else {}), **(after.specs() if after else {})}
    schemas = [state.schema() for state in (after, before) if state is not None]
    changed: dict[tuple[tuple[str, ...], Record], str] = {}
    for path in files_before.keys() ^ files_after.keys():
        file = files_before.get(path) or files_after[path]
        spec = specs[file.spec_id]
        names = tuple(field.name for field in spec.fields)
        changed[names, _comparable(file.partition)] = partition_text(file.partition, spec, schemas[0])
    return changed


def _comparable(partition: Record) -> Record:
    """Return a partition in one form: pyiceberg reads a UUID from a manifest, and has its bytes elsewhere."""
    values = [partition[at] for at in range(len(partition))]
    return Record(*(value.bytes if isinstance(value, UUID) else value for value in values))


def partition_text(partition: Record, spec: PartitionSpec, schema: Schema) -> str:
    """Return a partition as people read it, such as ``year=2013/region is null``.

    Values are escaped as in a path, so NULL differs from every text.
    """
    kinds = [field.field_type for field in spec.partition_type(schema).fields]
    parts = []
    for at, field in enumerate(spec.fields):
        name, value = quote_plus(field.name, safe=""), partition[at]
        text = field.transform.to_human_string(kinds[at], value=value)
        parts.append(f"{name} is null" if value is None else f"{name}={quote_plus(text, safe='')}")
    return "/".join(parts)


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
