"""Records of files that verify has read, so that later runs need not read them again (FORMAT.md, "Verified files").

Each record is a file with its own name. A run that writes a record deletes the records that it read. Concurrent runs
leave two records, which the next run combines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import pyarrow as pa

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.arrow_ipc import check_stream
from trinitylake_ops.format.checksums import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.file_names import VERIFIED_PREFIX, is_verified_path, new_verified_path
from trinitylake_ops.iceberg.reach import FileKind, TableFile
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.storage.conditional_create import create_fresh

_VERSION = b"1"
_CHECKSUM_BYTES = 32
_ROWS_PER_BATCH = 1024
_MAX_READ_ATTEMPTS = 3
_CONTENT_PER_BATCH_BYTES = 32 << 20
#: The decompressed size of a record is limited to this size plus a multiple of its file size. Metadata files of a table
#: compress well because they are similar.
_ALWAYS_ALLOWED_BYTES = 64 << 20
_MAX_RATIO = 256
_SCHEMA = pa.schema(
    [
        pa.field("path", pa.utf8(), nullable=False),
        pa.field("kind", pa.utf8(), nullable=False),
        pa.field("size_bytes", pa.int64(), nullable=False),
        pa.field("modified_millis", pa.int64(), nullable=False),
        pa.field("sha256", pa.binary(_CHECKSUM_BYTES), nullable=False),
        pa.field("content", pa.binary()),
    ],
    metadata={b"version": _VERSION},
)


class RecordedPart(StrEnum):
    """The part of a file that a record contains: its bytes, the names in it, or only its checksum."""

    FILE = "file"
    NAMES = "names"
    CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """A verified file."""

    #: The part of the file that the record contains.
    kept: RecordedPart
    #: The file size.
    size_bytes: int
    #: The time of its last modification, in milliseconds since the epoch.
    modified_ms: int
    #: The SHA-256 of the file.
    sha256: bytes
    #: The whole file, or the names in it as JSON; None if only the checksum is recorded.
    content: PackedBytes | None = None

    def is_unchanged(self, info: FileInfo | None) -> bool:
        """Whether a listing shows the file with the same size and modification time."""
        return info is not None and (info.size_bytes, info.last_modified_ms) == (self.size_bytes, self.modified_ms)


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """Compressed bytes in memory."""

    packed: bytes
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> PackedBytes:
        """Compress bytes."""
        return cls(pa.compress(data, codec="zstd", asbytes=True), len(data))

    def unpacked(self) -> bytes:
        """Return the decompressed bytes."""
        data: bytes = pa.decompress(self.packed, self.size_bytes, codec="zstd", asbytes=True)
        return data


def encode_names(files: Iterable[TableFile]) -> bytes:
    """Encode the names of the files that a table file refers to, as JSON."""
    names = [[file.kind.value, file.location, file.size_bytes] for file in files]
    return json.dumps(names, ensure_ascii=False, separators=(",", ":")).encode()


def decode_names(data: bytes) -> list[TableFile]:
    """Decode the result of :func:`encode_names`.

    Raises:
        CorruptFileError: The bytes have an unexpected format.
    """
    try:
        return [_table_file(*row) for row in json.loads(data)]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptFileError("a record of verified files has an invalid list of files") from error


def _table_file(kind: str, location: object, size_bytes: object) -> TableFile:
    if not isinstance(location, str) or not isinstance(size_bytes, int | None):
        raise TypeError("a location must be text, and a size a number")
    return TableFile(FileKind(kind), location, size_bytes)


@dataclass(frozen=True)
class Records:
    """The existing records."""

    #: The recorded files by path.
    files: Mapping[str, VerifiedFile]
    #: The paths of the records.
    paths: tuple[str, ...] = ()
    #: The faults found in damaged records, by path.
    damaged: Mapping[str, str] = field(default_factory=dict)


def read_records(storage: Storage, listed: Iterable[FileInfo]) -> Records:
    """Read all records among listed files. If two records differ about a file, the older one is used.

    Args:
        storage: The storage.
        listed: The files of the lakehouse.

    Raises:
        StorageError: A storage request failed.
    """
    for _ in range(_MAX_READ_ATTEMPTS):
        try:
            return _read(storage, [info for info in listed if is_verified_path(info.path)])
        except FileMissingError:  # superseded by a newer record with the same content
            listed = list(storage.list(VERIFIED_PREFIX))
    return Records({})


def _read(storage: Storage, records: list[FileInfo]) -> Records:
    files: dict[str, VerifiedFile] = {}
    damaged: dict[str, str] = {}
    newest_first = sorted(records, key=lambda info: (info.last_modified_ms, info.path), reverse=True)
    for info in newest_first:
        try:
            files_in_record = dict(_decode(storage.read(info.path, limit_bytes=MAX_FILE_LIST_BYTES), info.path))
        except CorruptFileError as error:
            damaged[info.path] = error.message
            continue
        for path, row in files_in_record.items():
            other = files.get(path)
            if other is None or other.sha256 != row.sha256 or row.kept != RecordedPart.CHECKSUM:
                files[path] = row
    return Records(files, tuple(info.path for info in newest_first), damaged)


def write_record(storage: Storage, files: Mapping[str, VerifiedFile]) -> str:
    """Write a record under a new name, and return its path.

    The caller deletes superseded records. A record that is not deleted is harmless, and is removed as an orphan later.

    Args:
        storage: The storage.
        files: The verified files by path.

    Raises:
        StorageError: A storage request failed.
    """
    path = new_verified_path()
    create_fresh(storage, {path: _encode(files)})
    return path


def _encode(files: Mapping[str, VerifiedFile]) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, _SCHEMA, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        for batch in _batches(sorted(files.items())):
            columns: list[list[object]] = [
                [path for path, _ in batch],
                [row.kept.value for _, row in batch],
                [row.size_bytes for _, row in batch],
                [row.modified_ms for _, row in batch],
                [row.sha256 for _, row in batch],
                [None if row.content is None else row.content.unpacked() for _, row in batch],
            ]
            arrays = [pa.array(column, field.type) for column, field in zip(columns, _SCHEMA, strict=True)]
            writer.write_batch(pa.record_batch(arrays, schema=_SCHEMA))
    data = bytes(sink.getvalue())
    return data + hashlib.sha256(data).digest()


def _batches(rows: list[tuple[str, VerifiedFile]]) -> Iterator[list[tuple[str, VerifiedFile]]]:
    batch: list[tuple[str, VerifiedFile]] = []
    batch_bytes = 0
    for path, row in rows:
        size_bytes = 0 if row.content is None else row.content.size_bytes
        if batch and (len(batch) == _ROWS_PER_BATCH or batch_bytes + size_bytes > _CONTENT_PER_BATCH_BYTES):
            yield batch
            batch, batch_bytes = [], 0
        batch.append((path, row))
        batch_bytes += size_bytes
    if batch:
        yield batch


def _decode(data: bytes, path: str) -> Iterator[tuple[str, VerifiedFile]]:
    """Yield the rows of a record. Raises CorruptFileError if the record is damaged or has an unexpected format."""
    if hashlib.sha256(memoryview(data)[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
        raise CorruptFileError("the record of verified files is damaged", path=path)
    body = data[:-_CHECKSUM_BYTES]
    try:
        check_stream(body, _record_limit_bytes(len(body)))
        yield from _rows(body, path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError("the record of verified files cannot be read", path=path) from error


def _record_limit_bytes(file_bytes: int) -> int:
    """Return the maximum decompressed size of a record."""
    return _ALWAYS_ALLOWED_BYTES + _MAX_RATIO * file_bytes


def _rows(body: bytes, path: str) -> Iterator[tuple[str, VerifiedFile]]:
    with pa.ipc.open_stream(body) as reader:
        if not reader.schema.equals(_SCHEMA, check_metadata=True):
            raise CorruptFileError("the record of verified files was written by another release", path=path)
        for batch in reader:
            batch.validate(full=True)
            if any(batch.column(field.name).null_count for field in _SCHEMA if not field.nullable):
                raise CorruptFileError("the record of verified files lacks values", path=path)
            for row in batch.to_pylist():
                if row["size_bytes"] < 0 or row["modified_millis"] < 0:
                    raise CorruptFileError("the record of verified files has a negative size or time", path=path)
                content = None if row["content"] is None else PackedBytes.of(row["content"])
                file = VerifiedFile(
                    RecordedPart(row["kind"]), row["size_bytes"], row["modified_millis"], row["sha256"], content
                )
                yield row["path"], file
