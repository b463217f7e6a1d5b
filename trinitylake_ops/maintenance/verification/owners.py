"""Checks the owners of managed tables' folders. No file is deleted from a folder that is not known to be our own."""

from __future__ import annotations

from collections.abc import Collection, Container, Mapping, Sequence

from trinitylake_ops.errors import FileMissingError, StorageError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import TABLES_PREFIX, owner_path
from trinitylake_ops.format.file_sizes import MAX_NOTE_BYTES
from trinitylake_ops.maintenance.reach.table_files import table_id_in
from trinitylake_ops.maintenance.reach.table_root import table_root_of
from trinitylake_ops.maintenance.verification.report import Findings
from trinitylake_ops.maintenance.verification.storage import KnownFilesStorage
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.ownership import owner_file, read_owner
from trinitylake_ops.transaction.lakehouse import Lakehouse

_BATCH = 256
_SHOWN_CHARS = 100


def check_owners(
    known: KnownFilesStorage,
    listing: Mapping[str, FileInfo],
    defined_ids: Container[str],
    definition: LakehouseDef | None,
    findings: Findings,
    *,
    is_deep: bool,
    root: str = "",
) -> tuple[str, ...]:
    """Report faults of owner files. Returns the tables of ``defined_ids`` whose folders have none, ascending.

    A listing shows which owner files exist. Only those of another size than ours are read, and in a deep run all.
    Without the definition of the lakehouse the owners are unknown. ``root`` is that of ``known``, if it is another one.
    """
    table_ids = sorted({table_id for path in listing if (table_id := table_id_in(path)) not in (None, ".", "..")})
    owners = {table_id: owner_path(table_id) for table_id in table_ids}
    own_bytes = None if definition is None else len(owner_file(definition))
    asked = [
        table_id
        for table_id, path in owners.items()
        if path in listing and (is_deep or listing[path].size_bytes != own_bytes)
    ]
    for start in range(0, len(asked), _BATCH):
        batch = asked[start : start + _BATCH]
        read = run_parallel(lambda table_id: _owner(known, owners[table_id], is_deep), batch, known.concurrency)
        for table_id, owner in zip(batch, read, strict=True):
            path = owners[table_id]
            if isinstance(owner, StorageError):
                message = f"nobody can tell whose the folder is, so no file there is ever removed: {owner.message}"
                findings.error("owner-damaged", message, f"{root}{path}", None)
            elif owner is not None and definition is not None and owner != definition.id and table_id in defined_ids:
                message = (
                    f"it says that the folder of table {table_id!r} of this lakehouse is that of lakehouse"
                    f" {owner[:_SHOWN_CHARS]!r}; no file there is ever removed from here, and that one may remove all"
                )
                findings.error("owner-other", message, f"{root}{path}", None)
    return tuple(table_id for table_id, path in owners.items() if table_id in defined_ids and path not in listing)


class TableRootVerifier:
    """Checks the table root of a lakehouse, if its definition names one.

    ``listing`` has the files of tables there, by their URIs. Raises StorageError.
    """

    def __init__(self, lake: Lakehouse, definition: LakehouseDef):
        self._definition = definition
        self._table_root = table_root_of(lake, definition)
        self._infos: dict[str, FileInfo] = {}
        if self._table_root is not None:
            self._infos = {info.path: info for info in self._table_root.storage.list(TABLES_PREFIX)}
        self._root = "" if self._table_root is None else self._table_root.root
        self.listing = {f"{self._root}{path}": info for path, info in self._infos.items()}
        self.table_ids = {table_id for path in self._infos if (table_id := table_id_in(path)) is not None}

    def check(self, defined_ids: Collection[str], findings: Findings, *, is_deep: bool) -> None:
        """Report faults of the owner files of ``defined_ids``, and if nothing there is ever deleted from here.

        Folders of others there are none of this lakehouse's business.
        """
        if self._table_root is None:
            return
        ours = {path: info for path, info in self._infos.items() if table_id_in(path) in defined_ids}
        if self._table_root.refusal and ours:
            message = f"nothing under the table root is ever deleted from here: {self._table_root.refusal}"
            findings.warn("table-root-kept", message, self._root, None, "relocate")
        known = KnownFilesStorage(self._table_root.storage, ours, {}, reads_all=True)
        missing = check_owners(known, ours, defined_ids, self._definition, findings, is_deep=is_deep, root=self._root)
        if missing:
            message = (
                f"{len(missing)} tables, such as {missing[0]!r}, have no owner file under the table root: no file of"
                " theirs is deleted; the next write to each makes it"
            )
            findings.warn("owner-missing-there", message, f"{self._root}{owner_path(missing[0])}", None, None)


def warn_of_missing(missing: Sequence[str], findings: Findings) -> None:
    """Warn once of tables whose folders have no owner file, as older lakehouses have, and tables of other programs."""
    if missing:
        path = owner_path(missing[0])
        message = (
            f"{len(missing)} tables, such as {missing[0]!r}, have no owner file in their folders; once no version"
            " defines such a table, nobody knows whose the files are that are left there"
        )
        findings.warn("owner-missing", message, path, None, "repair")


def _owner(known: KnownFilesStorage, path: str, is_deep: bool) -> str | StorageError | None:
    """Return the lakehouse that an owner file names, the error if it cannot be read, None if it is gone now."""
    try:
        data = known.read(path, limit_bytes=MAX_NOTE_BYTES)
        owner = read_owner(data, path)
    except FileMissingError:  # an orphan that was removed since the listing
        return None
    except StorageError as error:
        return error
    if is_deep:
        known.count_checksum(path, data)
    return owner
