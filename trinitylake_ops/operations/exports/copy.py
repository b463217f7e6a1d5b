"""Copy files to the target of an export, and the targets that are possible.

A copy below such a root would be the original file itself, and would be lost together with it.
"""

from __future__ import annotations

import threading
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import ClassVar

from trinitylake_ops.errors import CorruptFileError, InvalidInputError, InvalidLocationError, TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef, resealed
from trinitylake_ops.format.locations import normalize_root_uri, to_uri
from trinitylake_ops.iceberg.copy import REWRITTEN, SIZED_IN, FileCopy, TableFileMap, rewritten
from trinitylake_ops.iceberg.io.checked_files import check_whole
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import DAMAGE, FileKind
from trinitylake_ops.operations.executor import LOCAL, Executor, Weight
from trinitylake_ops.operations.export_records import CopiedFile
from trinitylake_ops.operations.exports.content import Content, DefinitionCopy, TableCopy
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.conditional_create import create_settled
from trinitylake_ops.storage.local.posix_files import check_can_hold, lies_within
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse

_MOST_BYTES_IN_FLIGHT = 512 * 1024 * 1024
_MOST_BYTES_IN_TASK = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class CopyJob:
    """A file to copy: from ``source``, or of ``data`` where that is given, to ``target``.

    ``places`` are those of its table where ``file``, one of Iceberg's that holds paths, is to be rewritten.
    ``sizes_bytes`` are those of copies that it gives sizes of. ``size_bytes`` is about its size, ``there_bytes`` that
    of the file that stands at the target. The seals of a copied definition are those of its new name.
    """

    source: str | None
    target: str
    data: bytes | None = None
    size_bytes: int = 0
    there_bytes: int | None = None
    file: FileCopy | None = None
    places: TableFileMap | None = None
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)
    is_definition: bool = False
    replaces: bool = False

    @property
    def _data_bytes(self) -> int:
        """The size of a file of data or deletes, which may be large, as its table gives it."""
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
    """A copy that was compared with what it was made of, and whether it stood there before."""

    file: CopiedFile
    was_there: bool


@dataclass(frozen=True, slots=True)
class Uncopied:
    """A copy that was not made, because its source is damaged or missing."""

    target: str
    error: TrinityLakeError


class CopyWork:
    """Work: copies files. In this process ``on_copied`` receives each copy at once, and only failures are returned."""

    weight: ClassVar[Weight] = Weight.FILE

    def __init__(self, io: StorageFileIO, target: Storage, on_copied: Callable[[Copied], None] | None = None):
        self._io = io
        self._target = target
        self._on_copied = on_copied
        self._room = _Room(_MOST_BYTES_IN_FLIGHT)

    def __reduce__(self) -> tuple[object, ...]:
        return (_copy_in_task, (self._io, self._target))

    @property
    def storages(self) -> Sequence[Storage]:
        """Source and target."""
        return (self._target,) if self._io.storage is self._target else (self._io.storage, self._target)

    def __call__(self, jobs: Sequence[CopyJob]) -> list[Copied | Uncopied | None]:
        """Copy files that do not wait for each other.

        Raises CorruptFileError where a copy is not what it was made of, StorageError.
        """
        # Each copy waits for its source, too; what goes one by one stays so.
        return run_parallel(self._copy_or_error, jobs, 2 * self._target.concurrency - 1)

    def _copy_or_error(self, job: CopyJob) -> Copied | Uncopied | None:
        copied = self._copy(job)
        if self._on_copied is None or isinstance(copied, Uncopied):
            return copied
        self._on_copied(copied)
        return None

    def _copy(self, job: CopyJob) -> Copied | Uncopied:
        with self._room.taken(job.size_bytes):
            try:
                data = job.content(self._io)
            except DAMAGE as error:
                return Uncopied(job.target, error)
            was_there = job.there_bytes == len(data)
            if job.replaces and not was_there and job.there_bytes is not None:
                self._target.write(job.target, data)
            elif not was_there:
                create_settled(self._target, job.target, data, is_ours=lambda found: found == data)
            limit_bytes = max(len(data), self._target.whole_file_limit_bytes)
            if self._target.read(job.target, limit_bytes=limit_bytes) != data:
                raise CorruptFileError(
                    f"the file that stands under {self._target.root} is not what is to be copied there; drop the"
                    " export, and where it goes to another root remove that file, or export to another target",
                    path=job.target,
                )
        return Copied(CopiedFile.of(job.source, job.target, data), was_there)


def _copy_in_task(io: StorageFileIO, target: Storage) -> CopyWork:
    work = CopyWork(io, target)
    work._room = _Room(_MOST_BYTES_IN_TASK)
    return work


@dataclass
class Copier:
    """Copies into one storage, by an executor. ``there`` are the sizes of files that stand at the target, by path.

    Files of tables that go below a table root go to the one of ``table_storages`` with that root.

    With ``skips_damaged``, tables of which a file is damaged or missing are left out of the content.

    ``known`` are those among them that were compared before, with the version that the target has; they are passed
    over. ``replaced`` are files that this version needs and that have another size than it says. ``files`` gathers all
    copies, ``copied_files`` and ``copied_bytes`` count those that were sent.
    """

    target: Storage
    there: dict[str, int] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    replaced: frozenset[str] = frozenset()
    progress: Progress = no_progress
    n_expected: int = 0
    executor: Executor = LOCAL
    table_storages: Mapping[str, Storage] = field(default_factory=dict)
    skips_damaged: bool = False
    files: list[CopiedFile] = field(default_factory=list)
    copied_files: int = 0
    copied_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes_bytes: dict[str, int] = {}

    @property
    def sizes_bytes(self) -> Mapping[str, int]:
        """The sizes of the files at the target, with the copies made so far, by path."""
        return ChainMap(self._sizes_bytes, self.there)

    def copy_content(self, content: Content, io: StorageFileIO) -> None:
        """Copy all files of an export but nodes and root: what others point to comes first. ``io`` reads the source.

        Raises CorruptFileError where a copy is not what it was made of, StorageError. Raises also FileMissingError and
        LocationNotAllowedError, unless damaged tables are skipped.
        """
        own = [kind for kind in FileKind if kind not in REWRITTEN]
        roots = sorted({table.places.target_root for table in content.tables})
        for kinds in (own, *((kind,) for kind in REWRITTEN)):
            for root in roots:
                tables = [table for table in content.tables if table.places.target_root == root]
                jobs = list(self._table_jobs(tables, kinds))
                uncopied = self._run(jobs, io, target=self.table_storages.get(root), raises=not self.skips_damaged)
                if uncopied:
                    content.leave_out(_damaged(tables, uncopied))
        self._run([self._definition_job(copy) for copy in content.definitions], io)

    def place(self, files: Mapping[str, bytes], sources: Mapping[str, str] | None = None) -> None:
        """Create files with these bytes, such as new nodes; whoever has the bytes sends them."""
        named = sources or {}
        jobs = [CopyJob(named.get(path), path, data, len(data), self.there.get(path)) for path, data in files.items()]
        self._run(jobs, StorageFileIO.on(self.target, StorageOptions(), read_only=True), LOCAL)

    def _table_jobs(self, tables: Iterable[TableCopy], kinds: Collection[FileKind]) -> Iterator[CopyJob]:
        sizes_bytes = self.sizes_bytes
        for table in tables:
            files = [file for file in table.files if file.kind in kinds and file.target not in self.known]
            sized = {SIZED_IN[kind] for kind in kinds if kind in SIZED_IN} if files else set()
            named = [file.target for file in table.files if file.kind in sized]
            of_named = {target: sizes_bytes[target] for target in named if target in sizes_bytes}
            for file in files:
                there_bytes = self.there.get(file.target)
                job = CopyJob(file.source, file.target, None, file.size_bytes or 0, there_bytes)
                job = replace(job, replaces=file.target in self.replaced)
                if file.kind in REWRITTEN:
                    job = replace(job, file=file, places=table.places, sizes_bytes=of_named)
                yield job

    def _definition_job(self, copy: DefinitionCopy) -> CopyJob:
        return CopyJob(copy.source, copy.target, copy.data, there_bytes=self.there.get(copy.target), is_definition=True)

    def _run(
        self,
        jobs: Sequence[CopyJob],
        io: StorageFileIO,
        executor: Executor | None = None,
        target: Storage | None = None,
        *,
        raises: bool = True,
    ) -> dict[str, TrinityLakeError]:
        """Make copies. Returns errors of damaged sources by the targets of their copies, or raises the first one."""
        note = partial(self._note, root="" if target is None else target.root)
        uncopied: dict[str, TrinityLakeError] = {}
        for copied in (executor or self.executor).map(CopyWork(io, target or self.target, note), jobs):
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
            self.copied_files += not copied.was_there
            self.copied_bytes += 0 if copied.was_there else file.size_bytes
            done = len(self.files)
        self.progress("copied", done, max(done, self.n_expected))


def _damaged(tables: Iterable[TableCopy], uncopied: Mapping[str, TrinityLakeError]) -> dict[str, TrinityLakeError]:
    """Return the ids of tables that lack a copy, each with the first reason."""
    found: dict[str, TrinityLakeError] = {}
    for table in tables if uncopied else ():
        for file in table.files:
            if file.target in uncopied:
                found.setdefault(table.places.table_id, uncopied[file.target])
    return found


class _Room:
    """So many bytes at once; a larger file waits until it is alone."""

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


#: Schemes that name the same storage.
_SAME_SCHEMES = {"s3a": "s3", "s3n": "s3", "abfs": "abfss", "gcs": "gs"}


def target_root(lake: Lakehouse, target: str | None, *definitions: LakehouseDef) -> str:
    """Return the normalized root of a target, empty for none.

    What is recorded before the first write to the target would stay where that write fails.

    Args:
        lake: The lakehouse that is exported or cloned.
        target: The target as the caller names it.
        definitions: The settings of the lakehouse in the versions concerned; they name its table roots and others.

    Raises:
        InvalidInputError: The target is, lies in, or contains a root that the lakehouse reads or writes.
        InvalidLocationError: The target is no root.
        StoragePermissionError: The target can contain no lakehouse.
    """
    if target is None:
        return ""
    root = normalize_root_uri(target)
    for used, what in _used_roots(lake, definitions):
        if _overlap(root, used):
            raise InvalidInputError(
                f"target {root!r} cannot be used: it is, lies in, or contains {what} {used!r}; choose another one"
            )
    for definition in definitions:
        for record in definition.exports:
            other = _normalized(record.target_uri)
            if other and _spelled(other) != _spelled(root) and _overlap(root, other):
                raise InvalidInputError(
                    f"target {root!r} cannot be used: it lies in, or contains the target {other!r} of"
                    f" {record.name!r}; choose another one"
                )
    check_can_hold(root)
    return root


def check_contains_no_source(root: str, content: Content, lake_root: str) -> None:
    """Raise InvalidInputError if a file to copy is already below the target, such as below a former table root.

    Args:
        root: The target.
        content: The files to copy.
        lake_root: The root of the lakehouse, which their paths are relative to.
    """
    for table in content.tables:
        for file in table.files:
            source = to_uri(lake_root, file.source)
            if _spelled(source).startswith(_spelled(root)):
                raise InvalidInputError(
                    f"target {root!r} cannot be used: it contains {source!r}, a file that the export needs; choose"
                    " another one"
                )


def _used_roots(lake: Lakehouse, definitions: Sequence[LakehouseDef]) -> Iterator[tuple[str, str]]:
    """Yield the roots that a lakehouse reads or writes, and what each is."""
    yield lake.root, "the lakehouse itself"
    names = lake.external_storages.names
    roots = [(root, "its table root") for root in names.table_roots]
    roots += [(root, "a lakehouse whose files it reads") for root in names.sources]
    for definition in definitions:
        roots.append((definition.table_root, "its table root"))
        roots += [(source.root, "a lakehouse whose files it reads") for source in definition.sources]
        if definition.parent is not None:
            roots.append((definition.parent.root, "its parent"))
    for named, what in roots:
        if root := _normalized(named):
            yield root, what


def _overlap(root: str, other: str) -> bool:
    """Whether one root lies in the other, or both are the same, by their text or by the folders they lead to."""
    if lies_within(root, other) or lies_within(other, root):
        return True
    first, second = _spelled(root), _spelled(other)
    return first.startswith(second) or second.startswith(first)


def _spelled(uri: str) -> str:
    """Return a URI in the one spelling of its scheme and host; S3 and Azure have several for the same place."""
    scheme, separator, rest = uri.partition("://")
    host, slash, path = rest.partition("/")
    scheme = _SAME_SCHEMES.get(scheme.lower(), scheme.lower())
    return f"{scheme}{separator}{host.lower()}{slash}{path}"


def _normalized(root: str) -> str:
    """Return a root that content names, empty for none and for a text that is no root."""
    try:
        return normalize_root_uri(root) if root else ""
    except InvalidLocationError:
        return ""
