"""Copy files to the target of a transfer: data, Iceberg metadata, definitions, then what the caller creates of bytes.

A file that others point to is copied before these. Each copy is read back and compared with its source, unless all
names are new. A copy that the target already has is compared and not sent again, so that a transfer that was cut off
continues when it is repeated.
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
from trinitylake_ops.format.definitions import LakehouseDef, resealed
from trinitylake_ops.format.file_names import owner_path, table_prefix
from trinitylake_ops.iceberg.copy import REWRITTEN, SIZED_IN, FileCopy, TableCopy, TableFileMap, rewritten
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

_MOST_BYTES_IN_FLIGHT = 512 * 1024 * 1024
_MOST_BYTES_IN_TASK = 128 * 1024 * 1024


def claim_table_folders(io: StorageFileIO, tables: Sequence[TableCopy], definition: LakehouseDef) -> dict[str, Storage]:
    """Write the owner files of the folders of copied tables.

    Args:
        io: Writes files of the lakehouse that has the copies.
        tables: The tables.
        definition: The definition of that lakehouse.

    Returns:
        The storages of the folders beyond the root of that lakehouse, by their roots.

    Raises:
        LocationNotAllowedError: A folder belongs to another lakehouse, or a table root to a copy of this one.
        StorageError: The storage fails.
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

    run_parallel(in_one_round_trip(claim), sorted(places), io.storage.concurrency)
    return storages


def existing_table_files(storages: Mapping[str, Storage], tables: Sequence[TableCopy]) -> dict[str, int]:
    """Return the sizes in bytes of the files in folders of tables, by their paths.

    Args:
        storages: The storages of the folders, by their roots. Tables below other roots are passed over.
        tables: The tables.

    Raises:
        StorageError: The storage fails.
    """
    existing: dict[str, int] = {}
    for root, storage in storages.items():
        for table_id in sorted({one.places.table_id for one in tables if one.places.target_root == root}):
            existing |= {info.path: info.size_bytes for info in storage.list(table_prefix(table_id))}
    return existing


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A file to copy to ``target``."""

    #: The location of the source, None for a file that is new.
    source: str | None
    target: str
    #: The bytes of the copy if they are known before.
    data: bytes | None = None
    #: The approximate size of the source.
    size_bytes: int = 0
    #: The size of the file that the target has under this name, None if it has none.
    existing_bytes: int | None = None
    #: The file of a table, with the locations of its copies, if it contains paths and is rewritten.
    file: FileCopy | None = None
    places: TableFileMap | None = None
    #: The sizes in bytes of the copies whose sizes the file records, by their paths.
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)
    #: Whether the file is a definition, whose checksums are bound to its name.
    is_definition: bool = False
    #: Whether a file of another size at the target is overwritten.
    replaces: bool = False

    @property
    def _data_bytes(self) -> int:
        """The size of a file of data or deletes, which may be large, as its table records it."""
        is_metadata = self.file is not None and self.file.kind != FileKind.POSITION_DELETES
        return 0 if is_metadata else self.size_bytes

    def content(self, io: StorageFileIO) -> bytes:
        """Return the bytes of the copy. Raises CorruptFileError, StorageError."""
        if self.data is not None:
            return self.data
        assert self.source is not None
        data = io.read_whole(self.source, self._data_bytes)
        if self.is_definition:
            return resealed(data, self.source, self.target)
        check_whole(data, self.source)
        if self.file is None or self.places is None:
            return data
        return rewritten(self.file, data, io, self.places, self.sizes_bytes)


@dataclass(frozen=True, slots=True)
class Copied:
    """A copy that was compared with its source, and whether the target already had it."""

    file: CopiedFile
    existed: bool


@dataclass(frozen=True, slots=True)
class Uncopied:
    """A copy that was not made, because its source is damaged or missing."""

    target: str
    error: TrinityLakeError


class CopyWork:
    """Work: copies files. In this process ``on_copied`` receives each copy at once, and only failures are returned."""

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
        self._budget = _ByteBudget(_MOST_BYTES_IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return (_copy_in_task, (self._io, self._target, self._reads_back))

    @property
    def storages(self) -> Sequence[Storage]:
        """Source and target."""
        return (self._target,) if self._io.storage is self._target else (self._io.storage, self._target)

    def __call__(self, jobs: Sequence[CopyJob]) -> list[Copied | Uncopied | None]:
        """Copy files that do not depend on each other.

        Raises CorruptFileError if the target has another file under the name of a copy, StorageError.
        """
        # Small files under new names count as one round trip; other copies may be large, and each request counts.
        copy = self._copy_or_error if self._reads_back else in_one_round_trip(self._copy_or_error)
        # Each copy waits for its source as well; a storage that serves one request at a time still gets one.
        return run_parallel(copy, jobs, 2 * self._target.concurrency - 1)

    def _copy_or_error(self, job: CopyJob) -> Copied | Uncopied | None:
        copied = self._copy(job)
        if self._on_copied is None or isinstance(copied, Uncopied):
            return copied
        self._on_copied(copied)
        return None

    def _copy(self, job: CopyJob) -> Copied | Uncopied:
        with self._budget.taken(job.size_bytes):
            try:
                data = job.content(self._io)
            except DAMAGE as error:
                return Uncopied(job.target, error)
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
                    f"a file under {self._target.root} has the name of a copy and other content; drop the export, and"
                    " if it goes to another root remove that file, or export to another target",
                    path=job.target,
                )
        return Copied(CopiedFile.of(job.source, job.target, data), existed)


def _copy_in_task(io: StorageFileIO, target: Storage, reads_back: bool) -> CopyWork:
    work = CopyWork(io, target, reads_back=reads_back)
    work._budget = _ByteBudget(_MOST_BYTES_IN_TASK)
    return work


@dataclass
class Transfer:
    """Copies files into one storage, by an executor."""

    target: Storage
    #: Reads the sources.
    io: StorageFileIO
    progress: Progress = no_progress
    #: The number of files that the progress counts to.
    n_expected: int = 0
    executor: Executor = LOCAL
    #: Leave out tables of which a file is damaged or missing, instead of raising the error.
    skips_damaged: bool = False
    #: Read each copy back and compare it with its source. Without it, all names at the target must be new.
    reads_back: bool = True
    #: The sizes in bytes of the files at the target before the transfer, by path.
    existing: dict[str, int] = field(default_factory=dict)
    #: Existing files that were compared before, with the version that the target has. They are passed over.
    known: frozenset[str] = frozenset()
    #: Existing files that the version needs with another size. They are overwritten.
    replaced: frozenset[str] = frozenset()
    #: The storages of tables whose files go below another root, by these roots.
    table_storages: Mapping[str, Storage] = field(default_factory=dict)
    #: All copies, and the number and bytes of those that were sent.
    files: list[CopiedFile] = field(default_factory=list)
    copied_files: int = 0
    copied_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes_bytes: dict[str, int] = {}

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """The sizes of the files at the target, with the copies made so far, by path."""
        return ChainMap(self._sizes_bytes, self.existing)

    def copy(self, selection: Selection) -> None:
        """Copy all selected files: what others point to comes first.

        With ``skips_damaged``, damaged tables are left out of the selection.

        Raises:
            CorruptFileError: The target has another file under the name of a copy, or a source is damaged.
            FileMissingError: A source is missing.
            LocationNotAllowedError: A source may not be read.
            StorageError: The storage fails.
        """
        unchanged = [kind for kind in FileKind if kind not in REWRITTEN]
        roots = sorted({table.places.target_root for table in selection.tables})
        for kinds in (unchanged, *((kind,) for kind in REWRITTEN)):
            for root in roots:
                tables = [table for table in selection.tables if table.places.target_root == root]
                jobs = list(self._table_jobs(tables, kinds))
                uncopied = self._run(jobs, target=self.table_storages.get(root), raises=not self.skips_damaged)
                if uncopied:
                    selection.leave_out(_damaged(tables, uncopied))
        self._run([self._definition_job(copy) for copy in selection.definitions])

    def create(self, files: Mapping[str, bytes]) -> None:
        """Create files with these bytes, such as nodes. This process sends them."""
        jobs = [CopyJob(None, path, data, len(data), self.existing.get(path)) for path, data in files.items()]
        self._run(jobs, executor=LOCAL)

    def _table_jobs(self, tables: Iterable[TableCopy], kinds: Collection[FileKind]) -> Iterator[CopyJob]:
        sizes_bytes = self.sizes_bytes
        for table in tables:
            files = [file for file in table.files if file.kind in kinds and file.target not in self.known]
            sized = {SIZED_IN[kind] for kind in kinds if kind in SIZED_IN} if files else set()
            named = [file.target for file in table.files if file.kind in sized]
            of_named = {target: sizes_bytes[target] for target in named if target in sizes_bytes}
            for file in files:
                existing_bytes = self.existing.get(file.target)
                job = CopyJob(file.source, file.target, None, file.size_bytes or 0, existing_bytes)
                job = replace(job, replaces=file.target in self.replaced)
                if file.kind in REWRITTEN:
                    job = replace(job, file=file, places=table.places, sizes_bytes=of_named)
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
        """Make copies. Returns errors of damaged sources by the targets of their copies, or raises the first one."""
        note = partial(self._note, root="" if target is None else target.root)
        uncopied: dict[str, TrinityLakeError] = {}
        work = CopyWork(self.io, target or self.target, note, reads_back=self.reads_back)
        for copied in (executor or self.executor).map(work, jobs):
            if isinstance(copied, Uncopied):
                if raises:
                    raise copied.error
                uncopied[copied.target] = copied.error
            elif copied is not None:
                note(copied)
        return uncopied

    def _note(self, copied: Copied, root: str) -> None:
        file = copied.file
        with self._lock:
            self.files.append(replace(file, target=f"{root}{file.target}"))
            self._sizes_bytes[file.target] = file.size_bytes
            self.copied_files += not copied.existed
            self.copied_bytes += 0 if copied.existed else file.size_bytes
            done = len(self.files)
        self.progress("copied", done, max(done, self.n_expected))


def _damaged(tables: Iterable[TableCopy], uncopied: Mapping[str, TrinityLakeError]) -> dict[str, TrinityLakeError]:
    """Return the ids of tables that lack a copy, each with the first reason."""
    damaged: dict[str, TrinityLakeError] = {}
    for table in tables if uncopied else ():
        for file in table.files:
            if file.target in uncopied:
                damaged.setdefault(table.places.table_id, uncopied[file.target])
    return damaged


class _ByteBudget:
    """Limits the bytes in flight. A file that is larger than the limit waits until it is alone."""

    def __init__(self, size_bytes: int):
        self._free_bytes = self._size_bytes = size_bytes
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size_bytes: int) -> Iterator[None]:
        wanted = min(size_bytes, self._size_bytes)
        with self._changed:
            self._changed.wait_for(lambda: self._free_bytes >= wanted)
            self._free_bytes -= wanted
        try:
            yield
        finally:
            with self._changed:
                self._free_bytes += wanted
                self._changed.notify_all()
