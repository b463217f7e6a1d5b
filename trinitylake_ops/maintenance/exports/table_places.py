"""The folders that copies of tables go to: below the root of a lakehouse, or below its table root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import owner_path, table_prefix
from trinitylake_ops.maintenance.exports.content import TableCopy
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import in_one_round, run_parallel
from trinitylake_ops.tables.io.file_io import StorageFileIO
from trinitylake_ops.tables.ownership import claim_folder


def claim_places(io: StorageFileIO, tables: Sequence[TableCopy], definition: LakehouseDef) -> dict[str, Storage]:
    """Write the owner files of the folders that copies go to. Returns the storages beyond the own root, by their roots.

    ``io`` writes files of the lakehouse that has the copies, with ``definition``. Raises LocationNotAllowedError for a
    folder of another lakehouse or a table root that is that of a copy of this one, StorageError.
    """
    places = {table.places.table_id: table.places for table in tables}
    roots = sorted({one.target_root for one in places.values()})
    storages = {root: io.storage_at(root) for root in roots if root != io.root}

    def claim(table_id: str) -> None:
        root = places[table_id].target_root
        if root == io.root:
            claim_folder(io.storage, table_id, definition.id)
        else:
            io.folders.check(storages[root], owner_path(table_id))

    run_parallel(in_one_round(claim), sorted(places), io.storage.concurrency)
    return storages


def standing_in(storages: Mapping[str, Storage], tables: Sequence[TableCopy]) -> dict[str, int]:
    """Return the sizes in bytes of the files that stand in folders of tables beyond the own root, by their paths.

    Raises StorageError.
    """
    found: dict[str, int] = {}
    for root, storage in storages.items():
        for table_id in sorted({one.places.table_id for one in tables if one.places.target_root == root}):
            found |= {info.path: info.size_bytes for info in storage.list(table_prefix(table_id))}
    return found
