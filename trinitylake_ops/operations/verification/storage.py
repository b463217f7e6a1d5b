"""Read files with their checksums, and check the owners of table folders."""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager

from trinitylake_ops.errors import CorruptFileError, FileMissingError, StorageError, TrinityLakeError
from trinitylake_ops.format.checksums import MAX_NOTE_BYTES
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import (
    TABLES_PREFIX,
    is_immutable_path,
    is_operation_path,
    owner_path,
    root_naming,
)
from trinitylake_ops.format.sealed_files import check_file
from trinitylake_ops.iceberg.managed import owner_file, read_owner
from trinitylake_ops.iceberg.reach import FileKind, TableFile
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.operations.gc.tables import table_root_of
from trinitylake_ops.operations.verification.report import ChecksumTally, Findings, kind_of
from trinitylake_ops.operations.verified_files import (
    PackedBytes,
    RecordedPart,
    VerifiedFile,
    decode_names,
    encode_names,
)
from trinitylake_ops.storage import FileInfo, Storage, StorageWrapper
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse

PIECE_BYTES = 8 << 20


class KnownFilesStorage(StorageWrapper):
    """Serve reads of nodes, definitions and roots that have already been read, in this run or in a recorded run.

    Recorded files are used only if the listing shows them unchanged. The checksum of each file that is read in full is
    kept and compared with the recorded checksum.
    """

    def __init__(
        self,
        inner: Storage,
        listing: Mapping[str, FileInfo],
        recorded: Mapping[str, VerifiedFile],
        *,
        reads_all: bool,
        is_deep: bool = False,
    ):
        """Wrap a storage.

        Args:
            inner: The storage of the lakehouse.
            listing: The listed files by path.
            recorded: The recorded files by path.
            reads_all: Whether to read recorded files again.
            is_deep: Whether to count files with checksums.
        """
        super().__init__(inner)
        self._is_deep = is_deep
        #: Counts the files that a deep run reads, by whether they have checksums.
        self.tally = ChecksumTally()
        self._listing = listing
        self._recorded = recorded
        self._reads_all = reads_all
        self._lock = threading.Lock()
        self._sha256: dict[str, bytes] = {}
        #: Whether prefetched catalog files that were not requested yet have checksums.
        self._is_sealed: dict[str, bool] = {}
        self._contents: dict[str, PackedBytes] = {}
        self._names: dict[str, list[TableFile]] = {}
        #: The paths of files that differ from the record.
        self.changed: set[str] = set()
        #: The paths of files that the storage failed to return.
        self.unanswered: set[str] = set()
        self.n_known = 0

    def recorded(self, path: str) -> VerifiedFile | None:
        """Return the record of a file that is unchanged according to the listing, or None if the file must be read."""
        row = None if self._reads_all else self._recorded.get(path)
        return row if row is not None and row.is_unchanged(self._listing.get(path)) else None

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        is_catalog = is_immutable_path(path) or root_naming(path) is not None
        if is_catalog and (content := self._known(path)) is not None:
            self.count_taken(path)
            return content[offset : None if length is None else offset + length]
        data = self._read_inner(path, offset, length, limit_bytes)
        if offset == 0 and (length is None or len(data) < length) and (is_catalog or _is_unique_name(path)):
            self._add_checksum(path, hashlib.sha256(data).digest())
            if self._is_deep and not path.startswith(TABLES_PREFIX):
                self.count_checksum(path, data)
            if is_catalog and path in self._listing:
                with self._lock:
                    self._contents[path] = PackedBytes.of(data)
        return data

    def stat(self, path: str) -> FileInfo:
        with self._noting_errors(path):
            return self.inner.stat(path)

    def _read_inner(self, path: str, offset: int, length: int | None, limit_bytes: int | None = None) -> bytes:
        with self._noting_errors(path):
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    @contextmanager
    def _noting_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self.note_error(path, error)
            raise

    def note_error(self, path: str, error: TrinityLakeError) -> None:
        """Remember a file that the storage failed to return, although it may be intact.

        Args:
            path: The path of the file.
            error: The error.
        """
        if isinstance(error, StorageError) and not isinstance(error, FileMissingError | CorruptFileError):
            self.unanswered.add(path)

    def drop_cached(self, path: str) -> bool:
        """Discard a file that cannot be decoded. It is not requested again, because it was not served from a cache."""
        with self._lock:
            self._contents.pop(path, None)
        return False

    def discard_contents(self) -> None:
        """Discard all bytes; later reads go to the storage."""
        with self._lock:
            self._contents.clear()

    def _known(self, path: str) -> bytes | None:
        content = self._contents.get(path)
        if content is None:
            row = self.recorded(path)
            if row is None or row.content is None or row.kept != RecordedPart.FILE:
                return None
            content = row.content
            with self._lock:
                self._contents[path] = content
                self._sha256[path] = row.sha256
                self.n_known += 1
        return content.unpacked()

    def _add_checksum(self, path: str, sha256: bytes) -> None:
        row = self._recorded.get(path)
        with self._lock:
            self._sha256[path] = sha256
            if row is not None and row.sha256 != sha256:
                self.changed.add(path)

    def read_data(self, path: str, take: Callable[[bytes], None]) -> bytes | None:
        """Read a file in pieces and keep its checksum.

        Args:
            path: The path of the file.
            take: Receives each piece.

        Returns:
            The bytes of the file, or None for a large file.

        Raises:
            StorageError: A storage request failed.
        """
        sha256, offset = hashlib.sha256(), 0
        while True:
            piece = self._read_inner(path, offset, PIECE_BYTES)
            sha256.update(piece)
            take(piece)
            offset += len(piece)
            if len(piece) < PIECE_BYTES:
                break
        self._add_checksum(path, sha256.digest())
        return piece if offset == len(piece) else None

    def names(self, path: str) -> Sequence[TableFile] | None:
        """Return the files that a table file refers to, or None if the table file has not been read yet."""
        names = self._names.get(path)
        if names is None:
            row = self.recorded(path)
            if row is None or row.content is None or row.kept != RecordedPart.NAMES:
                return None
            try:
                names = self._names[path] = decode_names(row.content.unpacked())
            except CorruptFileError:
                return None  # the file itself is read and compared with the record
            with self._lock:
                self._sha256[path] = row.sha256
                self.n_known += 1
        return names

    @property
    def checksums(self) -> Mapping[str, bytes]:
        """The SHA-256 of the files that were read in full, by path."""
        return self._sha256

    def count_checksum(self, path: str, data: bytes) -> None:
        """Count a catalog file that was read in full. A checksum mismatch is reported when the file is decoded.

        Args:
            path: The path of the file.
            data: The bytes of the file.
        """
        with contextlib.suppress(CorruptFileError):
            self.tally.count(kind_of(path), path, check_file(data, path))

    def take(self, path: str, sha256: bytes, content: PackedBytes | None, is_sealed: bool | None = None) -> None:
        """Add a prefetched file that was read in full.

        Args:
            path: The path of the file.
            sha256: The SHA-256 of the file.
            content: The bytes of the file, if they are used to serve later reads.
            is_sealed: Whether a catalog file has a checksum. The file is counted when it is requested.
        """
        if self._is_deep and is_sealed is not None:
            self._is_sealed[path] = is_sealed
        if content is not None or path in self._recorded or not is_immutable_path(path):
            self._add_checksum(path, sha256)
        if content is not None:
            with self._lock:
                self._contents[path] = content

    def count_taken(self, path: str) -> None:
        """Count a prefetched catalog file when it is requested.

        Prefetched files below a damaged file may never be requested.
        """
        with self._lock:
            is_sealed = self._is_sealed.pop(path, None)
        if is_sealed is not None:
            self.tally.count(kind_of(path), path, is_sealed)

    def take_content(self, path: str, sha256: bytes | None, error: TrinityLakeError | None) -> None:
        """Add the result of reading a data file in another process.

        Args:
            path: The path of the file.
            sha256: The SHA-256 of the file, if it was read in full.
            error: The error, if it could not be read.
        """
        if sha256 is not None:
            self._add_checksum(path, sha256)
        if error is not None:
            self.note_error(path, error)

    def add_names(self, path: str, files: Sequence[TableFile]) -> Sequence[TableFile]:
        """Store the files that a table file refers to, and return them.

        Args:
            path: The path of the table file.
            files: The files that it refers to.
        """
        self._names[path] = list(files)
        return files

    def accept(self, path: str) -> None:
        """Accept the current content of a changed file, for example a root that was sealed."""
        self.changed.discard(path)

    def verified(self, without: set[str]) -> dict[str, VerifiedFile]:
        """Return the files to record: all existing files that this run or a recorded run verified.

        Damaged, changed and missing files keep their former records, so that they are recognized when they are
        restored.

        Args:
            without: The paths of damaged files.
        """
        verified: dict[str, VerifiedFile] = {}
        complete: dict[str, bool] = {}
        for path, sha256 in self._sha256.items():
            info = self._listing.get(path)
            if info is None or path in without or path in self.changed:
                continue
            kept, content = RecordedPart.CHECKSUM, None
            if path in self._contents:
                kept, content = RecordedPart.FILE, self._contents[path]
            elif self._is_complete(path, complete):
                kept, content = RecordedPart.NAMES, PackedBytes.of(encode_names(self._names[path]))
            verified[path] = VerifiedFile(kept, info.size_bytes, info.last_modified_ms, sha256, content)
        kept_paths = without | self.changed | self._listing.keys()
        return {path: row for path, row in self._recorded.items() if path in kept_paths} | verified

    def _is_complete(self, path: str, results: dict[str, bool]) -> bool:
        """Whether a table file and all files reachable from it are known, so that its file names can be recorded."""
        if path not in results:
            named = self._names.get(path)
            leads = [file.location for file in named or () if file.kind in _NAMING_KINDS]
            results[path] = named is not None and all(self._is_complete(location, results) for location in leads)
        return results[path]


#: The kinds of table files that refer to other files, apart from metadata files.
_NAMING_KINDS = (FileKind.MANIFEST_LIST, FileKind.MANIFEST)


def _is_unique_name(path: str) -> bool:
    """Whether a file that is not a catalog file has a name that is never used again."""
    return path.startswith(TABLES_PREFIX) or (is_operation_path(path) and path.endswith((".json", ".arrow")))


_BATCH_TABLES = 256
_MAX_ID_CHARS = 100


def check_owners(
    known_files: KnownFilesStorage,
    listing: Mapping[str, FileInfo],
    defined_ids: Container[str],
    definition: LakehouseDef | None,
    findings: Findings,
    *,
    is_deep: bool,
    root: str = "",
) -> tuple[str, ...]:
    """Report faults in owner files, and return the tables whose folders have no owner file.

    A listing shows which owner files exist. Only owner files with an unexpected size are read, but a deep run reads all
    of them.

    Args:
        known_files: Reads the files.
        listing: The listed files by path.
        defined_ids: The ids of the tables to check.
        definition: The definition of the lakehouse. None skips the comparison of owners.
        findings: Receives the errors.
        is_deep: Whether to read all owner files.
        root: The root of ``known_files`` if it differs from the lakehouse root.

    Returns:
        The ids of ``defined_ids`` whose folders have files but no owner file, in ascending order.
    """
    table_ids = sorted({table_id for path in listing if (table_id := table_id_in(path)) not in (None, ".", "..")})
    owners = {table_id: owner_path(table_id) for table_id in table_ids}
    expected_bytes = None if definition is None else len(owner_file(definition))
    to_read = [
        table_id
        for table_id, path in owners.items()
        if path in listing and (is_deep or listing[path].size_bytes != expected_bytes)
    ]
    for start in range(0, len(to_read), _BATCH_TABLES):
        batch = to_read[start : start + _BATCH_TABLES]
        results = run_parallel(
            lambda table_id: _owner(known_files, owners[table_id], is_deep), batch, known_files.concurrency
        )
        for table_id, owner in zip(batch, results, strict=True):
            path = owners[table_id]
            if isinstance(owner, StorageError):
                message = f"the owner of the folder is unknown, so no file there is ever deleted: {owner.message}"
                findings.error("owner-damaged", message, f"{root}{path}", None)
            elif owner is not None and definition is not None and owner != definition.id and table_id in defined_ids:
                message = (
                    f"the folder of table {table_id!r} belongs to lakehouse {owner[:_MAX_ID_CHARS]!r} according to its"
                    " owner file; this lakehouse never deletes a file there, but the other one may delete all"
                )
                findings.error("owner-other", message, f"{root}{path}", None)
    return tuple(table_id for table_id, path in owners.items() if table_id in defined_ids and path not in listing)


class TableRootVerifier:
    """Check the table root of a lakehouse, if the definition specifies a table root."""

    def __init__(self, lake: Lakehouse, definition: LakehouseDef):
        """List the table files under the table root.

        Args:
            lake: The lakehouse.
            definition: The latest definition of the lakehouse.

        Raises:
            StorageError: A storage request failed.
        """
        self._definition = definition
        self._table_root = table_root_of(lake, definition)
        self._infos: dict[str, FileInfo] = {}
        if self._table_root is not None:
            self._infos = {info.path: info for info in self._table_root.storage.list(TABLES_PREFIX)}
        self._root = "" if self._table_root is None else self._table_root.root
        #: The table files under the table root, by URI.
        self.listing = {f"{self._root}{path}": info for path, info in self._infos.items()}
        self.table_ids = {table_id for path in self._infos if (table_id := table_id_in(path)) is not None}

    def check(self, defined_ids: Collection[str], findings: Findings, *, is_deep: bool) -> None:
        """Report faults in owner files, and whether this lakehouse never deletes files under the table root.

        Folders of other lakehouses are not checked.

        Args:
            defined_ids: The ids of the tables to check.
            findings: Receives errors and warnings.
            is_deep: Whether to read all owner files.
        """
        if self._table_root is None:
            return
        ours = {path: info for path, info in self._infos.items() if table_id_in(path) in defined_ids}
        if self._table_root.refusal and ours:
            message = f"this lakehouse never deletes files under its table root: {self._table_root.refusal}"
            findings.warn("table-root-kept", message, self._root, None, "relocate")
        known_files = KnownFilesStorage(self._table_root.storage, ours, {}, reads_all=True)
        missing = check_owners(
            known_files, ours, defined_ids, self._definition, findings, is_deep=is_deep, root=self._root
        )
        if missing:
            message = (
                f"{len(missing)} tables, for example {missing[0]!r}, have no owner file under the table root: none of"
                " their files are deleted; the next write to each table creates it"
            )
            findings.warn("owner-missing-there", message, f"{self._root}{owner_path(missing[0])}", None, None)


def warn_of_missing(missing: Sequence[str], findings: Findings) -> None:
    """Warn once about tables without owner files, which older lakehouses and other programs create.

    Args:
        missing: The ids of the tables.
        findings: Receives the warning.
    """
    if missing:
        path = owner_path(missing[0])
        message = (
            f"{len(missing)} tables, for example {missing[0]!r}, have no owner file in their folders; when no version"
            " defines such a table any more, the owner of its remaining files is unknown"
        )
        findings.warn("owner-missing", message, path, None, "repair")


def _owner(known_files: KnownFilesStorage, path: str, is_deep: bool) -> str | StorageError | None:
    """Return the lakehouse named in an owner file, the error if it cannot be read, or None if it was deleted."""
    try:
        data = known_files.read(path, limit_bytes=MAX_NOTE_BYTES)
        owner = read_owner(data, path)
    except FileMissingError:  # an orphan that was deleted since the listing
        return None
    except StorageError as error:
        return error
    if is_deep:
        known_files.count_checksum(path, data)
    return owner
