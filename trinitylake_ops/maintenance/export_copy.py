"""Making copies: each is compared with what it was made of, and what stands already is not sent again."""

from __future__ import annotations

import functools
import threading
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.maintenance.export_content import Content, DefinitionCopy, TableCopy
from trinitylake_ops.maintenance.export_manifest import CopiedFile
from trinitylake_ops.maintenance.survey import Progress, no_progress
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.write_outcome import create_settled
from trinitylake_ops.tables.copying import REWRITTEN, FileCopy, rewritten
from trinitylake_ops.tables.file_io import StorageFileIO

_MOST_BYTES_IN_FLIGHT = 512 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Job:
    source: str | None
    target: str
    read: Callable[[], bytes]
    size_bytes: int = 0


@dataclass
class Copier:
    """Copies into one storage. ``there`` are the sizes of files that stand at the target, by path.

    ``known`` are those among them that were compared before, with the version that the target has; they are
    passed over. ``files`` gathers all copies, ``copied_files`` and ``copied_bytes`` count those that were sent.
    """

    target: Storage
    there: dict[str, int] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    progress: Progress = no_progress
    n_expected: int = 0
    files: list[CopiedFile] = field(default_factory=list)
    copied_files: int = 0
    copied_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._sizes_bytes: dict[str, int] = {}
        self._room = _Room(_MOST_BYTES_IN_FLIGHT)

    def copy_content(self, content: Content, io: StorageFileIO) -> None:
        """Copy all files of an export but nodes and root: what others point to comes first. ``io`` reads the source.

        Raises CorruptFileError where a copy is not what it was made of, FileMissingError, StorageError.
        """
        tables = [(table, file) for table in content.tables for file in table.files if file.target not in self.known]
        self._run([self._table_job(table, file, io) for table, file in tables if file.kind not in REWRITTEN])
        for kind in REWRITTEN:
            self._run([self._table_job(table, file, io) for table, file in tables if file.kind == kind])
        self._run([_definition_job(copy, io) for copy in content.definitions])

    def place(self, files: Mapping[str, bytes], sources: Mapping[str, str] | None = None) -> None:
        """Create files with these bytes, such as new nodes."""
        self._run([_Job((sources or {}).get(path), path, _constant(data), len(data)) for path, data in files.items()])

    def _table_job(self, table: TableCopy, file: FileCopy, io: StorageFileIO) -> _Job:
        def read() -> bytes:
            data = io.read_whole(file.source)
            if file.kind not in REWRITTEN:
                return data
            return rewritten(file, data, io, table.places, ChainMap(self._sizes_bytes, self.there))

        return _Job(file.source, file.target, read, file.size_bytes or 0)

    def _run(self, jobs: Sequence[_Job]) -> None:
        # Each copy waits for its source, too; what goes one by one stays so.
        run_parallel(self._copy, jobs, 2 * self.target.concurrency - 1)

    def _copy(self, job: _Job) -> None:
        with self._room.taken(job.size_bytes):
            data = job.read()
            is_there = self.there.get(job.target) == len(data)
            if not is_there:
                create_settled(self.target, job.target, data, is_ours=lambda found: found == data)
            if self.target.read(job.target) != data:
                raise CorruptFileError(
                    f"the file that stands under {self.target.root} is not what is to be copied there; drop the export,"
                    " and where it goes to another root remove that file, or export to another target",
                    path=job.target,
                )
        copied = CopiedFile.of(job.source, job.target, data)
        with self._lock:
            self.files.append(copied)
            self._sizes_bytes[copied.target] = copied.size_bytes
            self.copied_files += not is_there
            self.copied_bytes += 0 if is_there else len(data)
            done = len(self.files)
        self.progress("copied", done, max(done, self.n_expected))


def _definition_job(copy: DefinitionCopy, io: StorageFileIO) -> _Job:
    read = functools.partial(io.read_whole, copy.source) if copy.data is None else _constant(copy.data)
    return _Job(copy.source, copy.target, read)


def _constant(data: bytes) -> Callable[[], bytes]:
    return lambda: data


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
