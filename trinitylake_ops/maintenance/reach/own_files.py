"""The files of MANAGED tables in their own folders, of definitions that may go: what a plan can free of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from trinitylake_ops.errors import CorruptFileError, FileMissingError, StorageError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.maintenance.plans.executor import Executor, Weight
from trinitylake_ops.maintenance.reach.table_files import iceberg_metadata, table_id_at
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.tables.files.reach import DAMAGE, TableFile, files_of
from trinitylake_ops.tables.io.file_io import StorageFileIO, reading_io
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import LakehouseFiles


def freed_table_files(
    lake: Lakehouse, locations: Sequence[str], executor: Executor, table_root: str = ""
) -> dict[str, TableFile]:
    """Return what :func:`table_files` tells of the tables of definitions.

    Those that are gone or cannot be decoded are passed over. Raises other StorageErrors.
    """
    paths = [location for location in locations if not is_uri(location)]
    by_table: dict[str, list[TableDef]] = {}
    for definition in executor.map(DefinitionRead(lake.files), paths):
        if definition is not None and definition.is_managed and iceberg_metadata(definition):
            by_table.setdefault(definition.id, []).append(definition)
    found: dict[str, TableFile] = {}
    for files in executor.map(OwnFilesWalk(reading_io(lake), table_root), list(by_table.values())):
        found |= files
    return found


@dataclass(frozen=True, slots=True)
class DefinitionRead:
    """Work: reads definitions of tables, by their paths."""

    weight: ClassVar[Weight] = Weight.ANSWER

    files: LakehouseFiles

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.files.storage,)

    def __call__(self, paths: Sequence[str]) -> list[TableDef | None]:
        """Return definitions, None for one that is gone or cannot be decoded. Raises other StorageErrors."""
        return [
            _decoded(path, data) for path, data in zip(paths, self.files.storage.read_available(paths), strict=True)
        ]


def _decoded(path: str, data: bytes | StorageError) -> TableDef | None:
    try:
        if isinstance(data, StorageError):
            raise data
        return TableDef.from_bytes(data, path)
    except (FileMissingError, CorruptFileError):
        return None


@dataclass(frozen=True, slots=True)
class OwnFilesWalk:
    """Work: walks through the files of tables under their own prefixes; each thing is all definitions of one."""

    weight: ClassVar[Weight] = Weight.TABLE

    io: StorageFileIO
    table_root: str = ""

    @property
    def storages(self) -> Sequence[Storage]:
        """That of the lakehouse."""
        return (self.io.storage,)

    def __call__(self, tables: Sequence[Sequence[TableDef]]) -> list[dict[str, TableFile]]:
        """Return the files of each table by path, up to what is gone or cannot be decoded. Raises StorageError."""
        return run_parallel(
            lambda definitions: table_files(definitions, self.io, self.table_root), tables, self.io.storage.concurrency
        )


def table_files(definitions: Sequence[TableDef], io: StorageFileIO, table_root: str = "") -> dict[str, TableFile]:
    """Return the files that MANAGED Iceberg tables reach under their own prefixes, by location, live or not.

    Those are below the root, and below ``table_root`` where that is given.

    A table part of which cannot be decoded or is gone yields what was found until then: what it
    shares with nobody becomes an orphan.
    """
    known: dict[str, set[str]] = {}  # by table: one that has another's metadata yields none of the other's files
    found: dict[str, TableFile] = {}
    walked: set[tuple[str, str]] = set()
    for definition in definitions:
        metadata = iceberg_metadata(definition)
        if not definition.is_managed or not metadata or (definition.id, metadata) in walked:
            continue
        walked.add((definition.id, metadata))
        with contextlib.suppress(*DAMAGE):
            for file in files_of(definition, io, known.setdefault(definition.id, set()), failures=[]):
                if table_id_at(file.location, table_root) == definition.id:
                    found.setdefault(file.location, file)
    return found
