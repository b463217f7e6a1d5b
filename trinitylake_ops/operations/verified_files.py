"""Records of the files that verify has read, and that later runs need not read again (FORMAT.md, "Verified files").

A record is a file of its own name. A run that writes one deletes those that it read. Runs that overlap leave two, which
the next one takes together.
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
_MOST_PROBES = 3
_CONTENT_PER_BATCH_BYTES = 32 << 20
#: The bytes that a record may decompress to in all, one batch after the other. Metadata files of a table are much
#: alike.
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
    """The part of a file that a record keeps: its bytes, the names in it, or only its checksum."""

    FILE = "file"
    NAMES = "names"
    CHECKSUM = "checksum"


@dataclass(frozen=True, slots=True)
class VerifiedFile:
    """A verified file: its size, time and SHA-256, and the content for the checks above it.

    ``content`` is zstd of the whole file, or of the names in it, as JSON. It is None if only the checksum is kept.
    """

    kept: RecordedPart
    size_bytes: int
    modified_ms: int
    sha256: bytes
    content: PackedBytes | None = None

    def is_unchanged(self, info: FileInfo | None) -> bool:
        """Whether a listing shows the file as it was."""
        return info is not None and (info.size_bytes, info.last_modified_ms) == (self.size_bytes, self.modified_ms)


@dataclass(frozen=True, slots=True)
class PackedBytes:
    """Compressed bytes in memory."""

    packed: bytes
    size_bytes: int

    @classmethod
    def of(cls, data: bytes) -> PackedBytes:
        return cls(pa.compress(data, codec="zstd", asbytes=True), len(data))

    def unpacked(self) -> bytes:
        """Return the bytes."""
        data: bytes = pa.decompress(self.packed, self.size_bytes, codec="zstd", asbytes=True)
        return data


def encode_names(files: Iterable[TableFile]) -> bytes:
    """Return the files that a file of a table names, as JSON."""
    names = [[file.kind.value, file.location, file.size_bytes] for file in files]
    return json.dumps(names, ensure_ascii=False, separators=(",", ":")).encode()


def decode_names(data: bytes) -> list[TableFile]:
    """Return the files that :func:`encode_names` was given.

    Raises CorruptFileError for bytes that it cannot have made.
    """
    try:
        return [_named(*row) for row in json.loads(data)]
    except (ValueError, TypeError, RecursionError) as error:
        raise CorruptFileError("a record of verified files names no files where it should") from error


def _named(kind: str, location: object, size_bytes: object) -> TableFile:
    if not isinstance(location, str) or not isinstance(size_bytes, int | None):
        raise TypeError("a location is text and a size a number")
    return TableFile(FileKind(kind), location, size_bytes)


@dataclass(frozen=True)
class Records:
    """The existing records: their files together, their paths, and faults of some of them by path."""

    files: Mapping[str, VerifiedFile]
    paths: tuple[str, ...] = ()
    damaged: Mapping[str, str] = field(default_factory=dict)


def read_records(storage: Storage, listed: Iterable[FileInfo]) -> Records:
    """Read all records among listed files. If two differ about a file, the older one is believed.

    Raises StorageError.
    """
    for _ in range(_MOST_PROBES):
        try:
            return _read(storage, [info for info in listed if is_verified_path(info.path)])
        except FileMissingError:  # superseded just now by a record that holds the same
            listed = list(storage.list(VERIFIED_PREFIX))
    return Records({})


def _read(storage: Storage, found: list[FileInfo]) -> Records:
    files: dict[str, VerifiedFile] = {}
    damaged: dict[str, str] = {}
    newest_first = sorted(found, key=lambda info: (info.last_modified_ms, info.path), reverse=True)
    for info in newest_first:
        try:
            rows = dict(_decoded(storage.read(info.path, limit_bytes=MAX_FILE_LIST_BYTES), info.path))
        except CorruptFileError as error:
            damaged[info.path] = error.message
            continue
        for path, row in rows.items():
            other = files.get(path)
            if other is None or other.sha256 != row.sha256 or row.kept != RecordedPart.CHECKSUM:
                files[path] = row
    return Records(files, tuple(info.path for info in newest_first), damaged)


def write_record(storage: Storage, files: Mapping[str, VerifiedFile]) -> str:
    """Write a record under a fresh name, and return its path. Raises StorageError.

    The caller deletes superseded records. One that stays is an orphan once it is old, and harmless before.
    """
    path = new_verified_path()
    create_fresh(storage, {path: _encoded(files)})
    return path


def _encoded(files: Mapping[str, VerifiedFile]) -> bytes:
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
    held_bytes = 0
    for path, row in rows:
        size_bytes = 0 if row.content is None else row.content.size_bytes
        if batch and (len(batch) == _ROWS_PER_BATCH or held_bytes + size_bytes > _CONTENT_PER_BATCH_BYTES):
            yield batch
            batch, held_bytes = [], 0
        batch.append((path, row))
        held_bytes += size_bytes
    if batch:
        yield batch


def _decoded(data: bytes, path: str) -> Iterator[tuple[str, VerifiedFile]]:
    """Yield the rows of a record. Raises CorruptFileError for a record that is damaged or of another form."""
    if hashlib.sha256(memoryview(data)[:-_CHECKSUM_BYTES]).digest() != data[-_CHECKSUM_BYTES:]:
        raise CorruptFileError("the record of verified files is damaged", path=path)
    body = data[:-_CHECKSUM_BYTES]
    try:
        check_stream(body, _record_limit_bytes(len(body)))
        yield from _rows(body, path)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError("the record of verified files cannot be read", path=path) from error


def _record_limit_bytes(file_bytes: int) -> int:
    """Return the most bytes to which a record of a size may decompress."""
    return _ALWAYS_ALLOWED_BYTES + _MAX_RATIO * file_bytes


def _rows(body: bytes, path: str) -> Iterator[tuple[str, VerifiedFile]]:
    with pa.ipc.open_stream(body) as reader:
        if not reader.schema.equals(_SCHEMA, check_metadata=True):
            raise CorruptFileError("the record of verified files is one of another release", path=path)
        for batch in reader:
            batch.validate(full=True)
            if any(batch.column(field.name).null_count for field in _SCHEMA if not field.nullable):
                raise CorruptFileError("the record of verified files lacks values", path=path)
            for row in batch.to_pylist():
                if row["size_bytes"] < 0 or row["modified_millis"] < 0:
                    raise CorruptFileError("the record of verified files has a negative size or time", path=path)
                content = None if row["content"] is None else PackedBytes.of(row["content"])
                found = VerifiedFile(
                    RecordedPart(row["kind"]), row["size_bytes"], row["modified_millis"], row["sha256"], content
                )
                yield row["path"], found
