"""Copy files to the target of a transfer: data, Iceberg metadata, definitions, and files created from bytes.

A file is copied before the files that refer to it. Each copy is read back and compared with its source, unless all
names are new. A copy that already exists at the target is compared but not sent again, so that repeating an interrupted
transfer resumes it.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from trinitylake_ops.errors import CorruptFileError, TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef, reseal
from trinitylake_ops.format.file_names import owner_path, table_prefix
from trinitylake_ops.iceberg.copy import REWRITTEN, SIZED_IN, FileCopy, TableCopy, TableFileMap, rewrite_file
from trinitylake_ops.iceberg.io.checked_files import check_whole
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.managed import claim_folder
from trinitylake_ops.iceberg.reach import DAMAGE, FileKind
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.export_records import CopiedFile
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.transfer.selection import DefinitionCopy, Selection
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_fresh, create_settled
from trinitylake_ops.storage.parallel import in_one_round_trip, run_parallel

_MAX_BYTES_IN_FLIGHT = 512 * 1024 * 1024
_MAX_BYTES_IN_TASK = 128 * 1024 * 1024


def claim_table_folders(io: StorageFileIO, tables: Sequence[TableCopy], definition: LakehouseDef) -> dict[str, Storage]:
    """Write the owner files in the folders of copied tables.

    Args:
        io: Writes files of the lakehouse that receives the copies.
        tables: The tables.
        definition: The definition of the lakehouse that receives the copies.

    Returns:
        The storages of folders outside the root of the receiving lakehouse, by their roots.

    Raises:
        LocationNotAllowedError: A folder belongs to another lakehouse, or a table root belongs to a copy of this
            lakehouse.
        StorageError: A storage request failed.
    """
    file_maps = {table.places.table_id: table.places for table in tables}
    roots = sorted({file_map.target_root for file_map in file_maps.values()})
    storages = {root: io.storage_at(root) for root in roots if root != io.root}

    def claim(table_id: str) -> None:
        root = file_maps[table_id].target_root
        if root == io.root:
            claim_folder(io.storage, table_id, definition.id)
        else:
            io.folders.check(storages[root], owner_path(table_id))

    run_parallel(in_one_round_trip(claim), sorted(file_maps), io.storage.concurrency)
    return storages


def existing_table_files(storages: Mapping[str, Storage], tables: Sequence[TableCopy]) -> dict[str, int]:
    """Return the sizes in bytes of the files in table folders, by path.

    Args:
        storages: The storages of the folders, by their roots. Tables below other roots are skipped.
        tables: The tables.

    Raises:
        StorageError: A storage request failed.
    """
    existing: dict[str, int] = {}
    for root, storage in storages.items():
        for table_id in sorted({table.places.table_id for table in tables if table.places.target_root == root}):
            existing |= {info.path: info.size_bytes for info in storage.list(table_prefix(table_id))}
    return existing


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A file to copy to ``target``."""

    #: The location of the source; None for a new file.
    source: str | None
    target: str
    #: The bytes of the copy, if they are known in advance.
    data: bytes | None = None
    #: The approximate size of the source.
    size_bytes: int = 0
    #: The size of the target's file with this name; None if there is no such file.
    existing_bytes: int | None = None
    #: The table file, if it contains paths and is rewritten.
    file: FileCopy | None = None
    #: The locations of the copies of the table's files.
    places: TableFileMap | None = None
    #: The sizes in bytes of the copies whose sizes the file records, by path.
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Whether the file is a definition, whose checksums depend on its path.
    is_definition: bool = False
    #: Whether to overwrite a file of another size at the target.
    replaces: bool = False

    @property
    def _data_bytes(self) -> int:
        """The recorded size of a data or delete file, which can be large; 0 for other files."""
        is_metadata = self.file is not None and self.file.kind != FileKind.POSITION_DELETES
        return 0 if is_metadata else self.size_bytes

    def content(self, io: StorageFileIO) -> bytes:
        """Return the bytes of the copy. Raises CorruptFileError or StorageError."""
        if self.data is not None:
            return self.data
        assert self.source is not None
        data = io.read_whole(self.source, self._data_bytes)
        if self.is_definition:
            return reseal(data, self.source, self.target)
        check_whole(data, self.source)
        if self.file is None or self.places is None:
            return data
        return rewrite_file(self.file, data, io, self.places, self.sizes_bytes)


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was compared with its source."""

    #: The record of the copy.
    file: CopiedFile
    #: Whether the copy already existed at the target.
    existed: bool


@dataclass(frozen=True, slots=True)
class FailedCopy:
    """A copy that was not made because its source is damaged or missing."""

    #: The location of the copy.
    target: str
    #: The error of the source.
    error: TrinityLakeError


class CopyWork:
    """Work that copies files. In this process, ``on_copied`` receives each copy, and only failures are returned."""

    weight: ClassVar[Weight] = Weight.FILE

    def __init__(
        self,
        io: StorageFileIO,
        target: Storage,
        on_copied: Callable[[Copied], None] | None = None,
        *,
        reads_back: bool = True,
    ):
        self._io = io
        self._target = target
        self._on_copied = on_copied
        self._reads_back = reads_back
        self._budget = _ByteBudget(_MAX_BYTES_IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return (_copy_in_task, (self._io, self._target, self._reads_back))

    @property
    def storages(self) -> Sequence[Storage]:
        """The source and the target."""
        return (self._target,) if self._io.storage is self._target else (self._io.storage, self._target)

    def __call__(self, jobs: Sequence[CopyJob]) -> list[Copied | FailedCopy | None]:
        """Copy files that do not depend on one another.

        Args:
            jobs: The files.

        Returns:
            A result for each file; None if ``on_copied`` received it.

        Raises:
            CorruptFileError: The target has a different file under the name of a copy.
            StorageError: A storage request failed.
        """
        # Small files under new names count as one round trip. Other copies can be large, so each request counts.
        copy = self._copy_or_error if self._reads_back else in_one_round_trip(self._copy_or_error)
        # A copy spends half of its time waiting for its source. A storage with a concurrency of 1 still gets one
        # request.
        return run_parallel(copy, jobs, 2 * self._target.concurrency - 1)

    def _copy_or_error(self, job: CopyJob) -> Copied | FailedCopy | None:
        copied = self._copy(job)
        if self._on_copied is None or isinstance(copied, FailedCopy):
            return copied
        self._on_copied(copied)
        return None

    def _copy(self, job: CopyJob) -> Copied | FailedCopy:
        with self._budget.reserve(job.size_bytes):
            try:
                data = job.content(self._io)
            except DAMAGE as error:
                return FailedCopy(job.target, error)
            if not self._reads_back:
                create_fresh(self._target, {job.target: data})
                return Copied(CopiedFile.of(job.source, job.target, data), existed=False)
            existed = job.existing_bytes == len(data)
            if job.replaces and not existed and job.existing_bytes is not None:
                self._target.write(job.target, data)
            elif not existed:
                create_settled(self._target, job.target, data, is_ours=lambda existing: existing == data)
            limit_bytes = max(len(data), self._target.whole_file_limit_bytes)
            if self._target.read(job.target, limit_bytes=limit_bytes) != data:
                raise CorruptFileError(
                    f"the copy failed: a file under {self._target.root} has the name of a copy but different content;"
                    " drop the export, and for a target at another root remove that file or use another target",
                    path=job.target,
                )
        return Copied(CopiedFile.of(job.source, job.target, data), existed)


def _copy_in_task(io: StorageFileIO, target: Storage, reads_back: bool) -> CopyWork:
    work = CopyWork(io, target, reads_back=reads_back)
    work._budget = _ByteBudget(_MAX_BYTES_IN_TASK)
    return work


@dataclass
class Transfer:
    """Copy files into one storage, using an executor."""

    target: Storage
    #: Reads the sources.
    io: StorageFileIO
    progress: Progress = no_progress
    #: The total that is passed to ``progress``.
    n_expected: int = 0
    executor: Executor = LOCAL
    #: Leave out tables with a damaged or missing file instead of raising the error.
    skips_damaged: bool = False
    #: Read each copy back and compare it with its source. Otherwise, all names at the target must be new.
    reads_back: bool = True
    #: The sizes in bytes of the files at the target before the transfer, by path.
    existing: dict[str, int] = field(default_factory=dict)
    #: Existing files that were already compared with the target's version. They are skipped.
    known: frozenset[str] = frozenset()
    #: Existing files with a wrong size. They are overwritten.
    replaced: frozenset[str] = frozenset()
    #: The storages of tables whose files are copied below other roots, by root.
    table_storages: Mapping[str, Storage] = field(default_factory=dict)
    #: All copies.
    files: list[CopiedFile] = field(default_factory=list)
    #: The number of copies that were sent.
    copied_files: int = 0
    #: The total size of these files.
    copied_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes_bytes: dict[str, int] = {}

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """The sizes of the files at the target, including the copies made so far, by path."""
        return ChainMap(self._sizes_bytes, self.existing)

    def copy(self, selection: Selection) -> None:
        """Copy all selected files, each file before the files that refer to it.

        With ``skips_damaged``, damaged tables are removed from the selection.

        Raises:
            CorruptFileError: The target has a different file under the name of a copy, or a source is damaged.
            FileMissingError: A source is missing.
            LocationNotAllowedError: A source is outside the allowed roots.
            StorageError: A storage request failed.
        """
        unchanged = [kind for kind in FileKind if kind not in REWRITTEN]
        roots = sorted({table.places.target_root for table in selection.tables})
        for kinds in (unchanged, *((kind,) for kind in REWRITTEN)):
            for root in roots:
                tables = [table for table in selection.tables if table.places.target_root == root]
                jobs = list(self._table_jobs(tables, kinds))
                errors = self._run(jobs, target=self.table_storages.get(root), raises=not self.skips_damaged)
                if errors:
                    selection.leave_out(_damaged(tables, errors))
        self._run([self._definition_job(copy) for copy in selection.definitions])

    def create(self, files: Mapping[str, bytes]) -> None:
        """Create files, for example nodes, from bytes in this process."""
        jobs = [CopyJob(None, path, data, len(data), self.existing.get(path)) for path, data in files.items()]
        self._run(jobs, executor=LOCAL)

    def _table_jobs(self, tables: Iterable[TableCopy], kinds: Collection[FileKind]) -> Iterator[CopyJob]:
        sizes_bytes = self.sizes_bytes
        for table in tables:
            files = [file for file in table.files if file.kind in kinds and file.target not in self.known]
            sized_kinds = {SIZED_IN[kind] for kind in kinds if kind in SIZED_IN} if files else set()
            targets_with_size = [file.target for file in table.files if file.kind in sized_kinds]
            recorded_sizes = {target: sizes_bytes[target] for target in targets_with_size if target in sizes_bytes}
            for file in files:
                existing_bytes = self.existing.get(file.target)
                job = CopyJob(file.source, file.target, None, file.size_bytes or 0, existing_bytes)
                job = replace(job, replaces=file.target in self.replaced)
                if file.kind in REWRITTEN:
                    job = replace(job, file=file, places=table.places, sizes_bytes=recorded_sizes)
                yield job

    def _definition_job(self, copy: DefinitionCopy) -> CopyJob:
        existing_bytes = self.existing.get(copy.target)
        return CopyJob(copy.source, copy.target, copy.data, existing_bytes=existing_bytes, is_definition=True)

    def _run(
        self,
        jobs: Sequence[CopyJob],
        *,
        executor: Executor | None = None,
        target: Storage | None = None,
        raises: bool = True,
    ) -> dict[str, TrinityLakeError]:
        """Make copies. Return the errors of damaged sources by the target of the copy, or raise the first error."""
        record = partial(self._record, root="" if target is None else target.root)
        errors: dict[str, TrinityLakeError] = {}
        work = CopyWork(self.io, target or self.target, record, reads_back=self.reads_back)
        for result in (executor or self.executor).map(work, jobs):
            if isinstance(result, FailedCopy):
                if raises:
                    raise result.error
                errors[result.target] = result.error
            elif result is not None:
                record(result)
        return errors

    def _record(self, copied: Copied, root: str) -> None:
        file = copied.file
        with self._lock:
            self.files.append(replace(file, target=f"{root}{file.target}"))
            self._sizes_bytes[file.target] = file.size_bytes
            self.copied_files += not copied.existed
            self.copied_bytes += 0 if copied.existed else file.size_bytes
            done = len(self.files)
        self.progress("copied", done, max(done, self.n_expected))


def _damaged(tables: Iterable[TableCopy], errors: Mapping[str, TrinityLakeError]) -> dict[str, TrinityLakeError]:
    """Return the first error of each table that lacks a copy, by table id."""
    damaged: dict[str, TrinityLakeError] = {}
    for table in tables if errors else ():
        for file in table.files:
            if file.target in errors:
                damaged.setdefault(table.places.table_id, errors[file.target])
    return damaged


class _ByteBudget:
    """Limit the bytes in flight. A file that is larger than the limit waits until no other file is in flight."""

    def __init__(self, size_bytes: int):
        self._free_bytes = self._size_bytes = size_bytes
        self._changed = threading.Condition()

    @contextmanager
    def reserve(self, size_bytes: int) -> Iterator[None]:
        reserved_bytes = min(size_bytes, self._size_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free_bytes >= reserved_bytes)
            self._free_bytes -= reserved_bytes
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += reserved_bytes
                self._changed.notify_all()
