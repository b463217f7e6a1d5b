"""The table root of a lakehouse, as operations that delete see it (docs/protocol.md, "Table roots").

A ``table_root`` is content. Files there are deleted if an operator made it that of this lakehouse, and no copy of the
lakehouse uses it. The owner file of the table's folder must name the lakehouse, too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from trinitylake_ops.errors import CorruptFileError, MaintenanceBlockedError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import TABLES_PREFIX
from trinitylake_ops.format.locations import is_uri, normalize_root_uri
from trinitylake_ops.format.places import Place, cut
from trinitylake_ops.maintenance.plans.budget import counted_with
from trinitylake_ops.maintenance.plans.executor import Executor
from trinitylake_ops.maintenance.reach.listing import list_folders, list_named
from trinitylake_ops.maintenance.reach.table_files import table_id_in
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.tables.io.folder_owners import latest_definition_at
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.nodes.table_users import why_not_freed


@dataclass(frozen=True, slots=True)
class TableRoot:
    """A table root beyond the lakehouse's own root. ``refusal`` says why nothing is deleted there, empty if it may be.

    ``lake_root`` is the root of the lakehouse.
    """

    storage: Storage
    lakehouse_id: str
    lake_root: str
    refusal: str

    @property
    def root(self) -> str:
        """Its URI, with the final ``/``."""
        return self.storage.root

    def within(self, locations: Iterable[str]) -> list[str]:
        """Return the URIs among locations that lie under it."""
        return [location for location in locations if location.startswith(self.root)]

    def check(self) -> None:
        """Raise MaintenanceBlockedError where nothing may be deleted any more. Raises StorageError."""
        if refusal := self.refusal or why_not_freed(self.storage, self.lakehouse_id, self.lake_root):
            raise MaintenanceBlockedError(f"nothing under the table root {cut(self.root)} is deleted: {refusal}")


def named_standing(
    storage: Storage, executor: Executor, locations: Collection[str], table_root: TableRoot | None
) -> Iterator[FileInfo]:
    """Yield those of some files that stand, under the root and the table root, the latter's by their URIs.

    Raises StorageError.
    """
    if any(not is_uri(location) for location in locations):
        own = {location for location in locations if not is_uri(location)}
        yield from (info for info in list_named(storage, executor, own) if info.path in own)
    if table_root is None or not (uris := set(table_root.within(locations))):
        return
    ids = {table_id_in(uri.removeprefix(table_root.root)) for uri in uris} - {None}
    folders = [f"{TABLES_PREFIX}{table_id}/" for table_id in sorted(map(str, ids))]
    for info in list_folders(table_root.storage, executor, folders):
        if (uri := f"{table_root.root}{info.path}") in uris:
            yield replace(info, path=uri)


def table_root_of(lake: Lakehouse, definition: LakehouseDef) -> TableRoot | None:
    """Return the table root that a definition names, None if that is below the own root or may not be used.

    It takes a few requests there. Raises StorageError.
    """
    root = normalize_root_uri(definition.table_root) if definition.table_root else lake.root
    places = lake.elsewhere.places
    if root.startswith(lake.root) or not (places.may_be_named(root) or places.is_allowed(root)):
        return None
    storage = counted_with(lake.storage, lake.elsewhere.storage_of(Place(root, "")))
    return TableRoot(storage, definition.id, lake.root, _refusal(lake, storage, definition.id))


def _refusal(lake: Lakehouse, storage: Storage, lakehouse_id: str) -> str:
    try:
        standing = latest_definition_at(storage, lake.storage_options)
    except CorruptFileError as error:
        return f"it cannot be told whose root it is: {error.message}"
    if standing is not None and standing.id == lakehouse_id:
        return "it is the root of another copy of this lakehouse; 'trinitylake relocate' gives it up"
    return why_not_freed(storage, lakehouse_id, lake.root)
