"""Read files with their checksums, and check who owns the folders of tables."""

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
    """Answers reads of nodes, definitions and roots that were read before, in this run or in one that is recorded.

    Of recorded files those count that the listing shows as they were, unless ``reads_all``. Of each file that is
    read whole the checksum is kept, and compared with the recorded one: ``changed`` are the paths of those that
    differ. ``unanswered`` are the paths of those that the storage refused or failed to give. The names in files of
    tables are kept by :meth:`add_names`.
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
        super().__init__(inner)
        self._is_deep = is_deep
        #: Which files that a deep run read carry checksums.
        self.tally = ChecksumTally()
        self._listing = listing
        self._recorded = recorded
        self._reads_all = reads_all
        self._lock = threading.Lock()
        self._sha256: dict[str, bytes] = {}
        #: Of catalog files that somebody else read, and that nobody has asked for yet: whether they carry checksums.
        self._is_sealed: dict[str, bool] = {}
        self._contents: dict[str, PackedBytes] = {}
        self._names: dict[str, list[TableFile]] = {}
        self.changed: set[str] = set()
        self.unanswered: set[str] = set()
        self.n_known = 0

    def recorded(self, path: str) -> VerifiedFile | None:
        """Return what is recorded of a file that the listing shows as it was; None where all are to be read."""
        row = None if self._reads_all else self._recorded.get(path)
        return row if row is not None and row.is_unchanged(self._listing.get(path)) else None

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        is_catalog = is_immutable_path(path) or root_naming(path) is not None
        if is_catalog and (known := self._known(path)) is not None:
            self.count_taken(path)
            return known[offset : None if length is None else offset + length]
        data = self._answered(path, offset, length, limit_bytes)
        if offset == 0 and (length is None or len(data) < length) and (is_catalog or _is_unique_name(path)):
            self._note(path, hashlib.sha256(data).digest())
            if self._is_deep and not path.startswith(TABLES_PREFIX):
                self.count_checksum(path, data)
            if is_catalog and path in self._listing:
                with self._lock:
                    self._contents[path] = PackedBytes.of(data)
        return data

    def stat(self, path: str) -> FileInfo:
        with self._noting(path):
            return self.inner.stat(path)

    def _answered(self, path: str, offset: int, length: int | None, limit_bytes: int | None = None) -> bytes:
        with self._noting(path):
            return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    @contextmanager
    def _noting(self, path: str) -> Iterator[None]:
        try:
            yield
        except StorageError as error:
            self.note_error(path, error)
            raise

    def note_error(self, path: str, error: TrinityLakeError) -> None:
        """Remember a file that the storage did not give, though it may be there and whole."""
        if isinstance(error, StorageError) and not isinstance(error, FileMissingError | CorruptFileError):
            self.unanswered.add(path)

    def drop_cached(self, path: str) -> bool:
        """Forget a file that cannot be decoded; it is not asked for again, as it came from the storage."""
        with self._lock:
            self._contents.pop(path, None)
        return False

    def discard_contents(self) -> None:
        """Let go of all bytes: whoever asks for them again asks the storage."""
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

    def _note(self, path: str, sha256: bytes) -> None:
        row = self._recorded.get(path)
        with self._lock:
            self._sha256[path] = sha256
            if row is not None and row.sha256 != sha256:
                self.changed.add(path)

    def read_data(self, path: str, take: Callable[[bytes], None]) -> bytes | None:
        """Read a file in pieces and keep its checksum; returns its bytes, None of a large one.

        ``take`` is given each piece. Raises StorageError.
        """
        hashed, offset = hashlib.sha256(), 0
        while True:
            piece = self._answered(path, offset, PIECE_BYTES)
            hashed.update(piece)
            take(piece)
            offset += len(piece)
            if len(piece) < PIECE_BYTES:
                break
        self._note(path, hashed.digest())
        return piece if offset == len(piece) else None

    def names(self, path: str) -> Sequence[TableFile] | None:
        """Return what a file of a table names, None where nobody has read it."""
        found = self._names.get(path)
        if found is None:
            row = self.recorded(path)
            if row is None or row.content is None or row.kept != RecordedPart.NAMES:
                return None
            try:
                found = self._names[path] = decode_names(row.content.unpacked())
            except CorruptFileError:
                return None  # then the file itself is read, and the record's word about it compared
            with self._lock:
                self._sha256[path] = row.sha256
                self.n_known += 1
        return found

    @property
    def checksums(self) -> Mapping[str, bytes]:
        """The SHA-256 of the files that were read whole, by path."""
        return self._sha256

    def count_checksum(self, path: str, data: bytes) -> None:
        """Count a file of the catalog that was read whole; one that its seals refuse is told by who decodes it."""
        with contextlib.suppress(CorruptFileError):
            self.tally.count(kind_of(path), path, check_file(data, path))

    def take(self, path: str, sha256: bytes, content: PackedBytes | None, is_sealed: bool | None = None) -> None:
        """Know a file that somebody else read whole, with its bytes where these are to be known, too.

        ``is_sealed`` says whether one of the catalog carries a checksum; it counts once it is asked for.
        """
        if self._is_deep and is_sealed is not None:
            self._is_sealed[path] = is_sealed
        if content is not None or path in self._recorded or not is_immutable_path(path):
            self._note(path, sha256)
        if content is not None:
            with self._lock:
                self._contents[path] = content

    def count_taken(self, path: str) -> None:
        """Count a file of the catalog that somebody else read, now that its turn has come.

        What is read ahead below something damaged may never have it.
        """
        with self._lock:
            is_sealed = self._is_sealed.pop(path, None)
        if is_sealed is not None:
            self.tally.count(kind_of(path), path, is_sealed)

    def take_content(self, path: str, sha256: bytes | None, error: TrinityLakeError | None) -> None:
        """Know what came of reading a file of data elsewhere."""
        if sha256 is not None:
            self._note(path, sha256)
        if error is not None:
            self.note_error(path, error)

    def add_names(self, path: str, files: Sequence[TableFile]) -> Sequence[TableFile]:
        """Keep what a file of a table names; returns that."""
        self._names[path] = list(files)
        return files

    def accept(self, path: str) -> None:
        """Take a file that changed for what it is now, such as a root that was sealed."""
        self.changed.discard(path)

    def verified(self, without: set[str]) -> dict[str, VerifiedFile]:
        """Return what to record: all that stands and that is known, by this run or a recorded one.

        Files in ``without`` have a fault. For these, and for missing files, the former record stays, so that they are
        recognized when they come back.
        """
        found: dict[str, VerifiedFile] = {}
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
            found[path] = VerifiedFile(kept, info.size_bytes, info.last_modified_ms, sha256, content)
        kept_on = without | self.changed | self._listing.keys()
        return {path: row for path, row in self._recorded.items() if path in kept_on} | found

    def _is_complete(self, path: str, known: dict[str, bool]) -> bool:
        """Whether all files are known that a file of a table leads to: of others, more than its names is needed."""
        if path not in known:
            named = self._names.get(path)
            leads = [file.location for file in named or () if file.kind in _LEADS]
            known[path] = named is not None and all(self._is_complete(location, known) for location in leads)
        return known[path]


_LEADS = (FileKind.MANIFEST_LIST, FileKind.MANIFEST)


def _is_unique_name(path: str) -> bool:
    """Whether a file that is none of the catalog bears a name that is never given again."""
    return path.startswith(TABLES_PREFIX) or (is_operation_path(path) and path.endswith((".json", ".arrow")))


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
