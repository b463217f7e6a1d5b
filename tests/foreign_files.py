"""Write snapshots that refer to files of other tables, as a client without checks would."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pyiceberg.manifest import (
    DataFile,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    write_manifest,
    write_manifest_list,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.table.update import AddSnapshotUpdate, SetSnapshotRefUpdate, update_table_metadata

from trinitylake_ops import Lakehouse
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO, writing_io


def manifests_of(lake: Lakehouse, name: str) -> list[ManifestFile]:
    """Return the manifests of a table."""
    table = catalog_at(lake).load_table(name)
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return snapshot.manifests(table.io)


def data_files_of(lake: Lakehouse, name: str) -> list[DataFile]:
    """Return the data files of a table."""
    return [task.file for task in catalog_at(lake).load_table(name).scan().plan_files()]


def write_manifest_of(
    lake: Lakehouse, table: Table, files: Sequence[DataFile], status: ManifestEntryStatus, snapshot_id: int
) -> ManifestFile:
    """Write a manifest to the folder of a table, with entries of one status, and return the manifest."""
    output = writing_io(lake).new_output(f"{table.location()}/metadata/{uuid.uuid4()}-m0.avro")
    with write_manifest(2, table.spec(), table.schema(), output, snapshot_id, "null") as writer:
        for file in files:
            entry = ManifestEntry.from_args(
                status=status, snapshot_id=snapshot_id, sequence_number=1, file_sequence_number=1, data_file=file
            )
            if status == ManifestEntryStatus.ADDED:
                writer.add(entry)
            elif status == ManifestEntryStatus.EXISTING:
                writer.existing(entry)
            else:
                writer.delete(entry)
    manifest = writer.to_manifest_file()
    manifest.sequence_number = manifest.min_sequence_number = 1
    return manifest


def write_list_file(
    io: StorageFileIO, table: Table, manifests: Sequence[ManifestFile], snapshot_id: int, *, at: str | None = None
) -> str:
    """Write a manifest list, by default to the folder of a table, and return its URI."""
    uri = at or f"{table.location()}/metadata/snap-{snapshot_id}-{uuid.uuid4()}.avro"
    number = table.metadata.last_sequence_number + 1
    with write_manifest_list(2, io.new_output(uri), snapshot_id, None, number, "null") as writer:
        writer.add_manifests(list(manifests))
    return uri


def snapshot_of(table: Table, snapshot_id: int, manifest_list: str, parent_id: int | None = None) -> dict[str, Any]:
    """Return a snapshot as clients send it."""
    fields = {
        "snapshot-id": snapshot_id,
        "sequence-number": table.metadata.last_sequence_number + 1,
        "timestamp-ms": int(time.time() * 1000) + 1000,
        "manifest-list": manifest_list,
        "summary": {"operation": "append"},
        "schema-id": 0,
    }
    return fields if parent_id is None else {**fields, "parent-snapshot-id": parent_id}


def updates_of(snapshot: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the updates of a commit that sets the current snapshot."""
    ref = {"action": "set-snapshot-ref", "ref-name": "main", "type": "branch", "snapshot-id": snapshot["snapshot-id"]}
    return [{"action": "add-snapshot", "snapshot": snapshot}, ref]


def commit_unchecked(lake: Lakehouse, name: str, manifests: Sequence[ManifestFile], snapshot_id: int) -> None:
    """Set manifests as the current snapshot of a table without checks."""
    table, io = catalog_at(lake).load_table(name), writing_io(lake)
    uri = write_list_file(io, table, manifests, snapshot_id)
    point_to(lake, name, Snapshot.model_validate(snapshot_of(table, snapshot_id, uri)))


def point_to(lake: Lakehouse, name: str, snapshot: Snapshot) -> None:
    """Set the current snapshot of a table without checks."""
    namespace, _, table_name = name.partition(".")
    table, io = catalog_at(lake).load_table(name), writing_io(lake)
    ref = SetSnapshotRefUpdate(ref_name="main", type="branch", snapshot_id=snapshot.snapshot_id)
    changed = update_table_metadata(table.metadata, (AddSnapshotUpdate(snapshot=snapshot), ref))
    metadata = f"{table.location()}/metadata/00099-{uuid.uuid4()}.metadata.json"
    with io.new_output(metadata).create() as stream:
        stream.write(changed.model_dump_json(exclude_none=True).encode())
    with lake.transaction() as txn:
        before = txn.table(namespace, table_name)
        properties = {**before.format_properties, METADATA_LOCATION: metadata.removeprefix(lake.root)}
        txn.alter_table(namespace, table_name, replace(before, format_properties=properties))
