"""Avro files of tables, checked and decompressed before any decoder reads them.

Decoders such as pyiceberg and fastavro believe what a file claims. They inflate each block whole, and count on as far
as a length or a count in it says. They are given the same file without compression. Its blocks are within it, its sum
is bounded, and each record and item takes bytes.

The compiled decoder follows lengths and counts out of its memory. So a manifest of a kilobyte ends the process. Or it
takes any bytes behind it, credentials too, for a path. A module of pyiceberg provides the decoder.
:func:`read_bounded_avro` replaces it there, for all Avro that this process reads by pyiceberg (decision 11).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pyiceberg.avro import file as avro_file
from pyiceberg.avro.decoder import BinaryDecoder

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.iceberg.validation.inflate import AVRO_CODECS, MAX_INFLATED_BYTES, InflatedTooLargeError, too_large
from trinitylake_ops.iceberg.validation.thrift import MAX_NAME_CHARS, full_name_chars

MAGIC = b"Obj\x01"
#: The largest header of a file. It contains schemas as JSON, which is parsed whole while all other threads wait. The
#: schema of a table with 20,000 columns takes 1.3 MB.
MAX_HEADER_BYTES = 8 << 20
_SYNC_BYTES = 16
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class AvroHeader:
    """The beginning of a file: its metadata, and the marker between blocks. The first block is at ``size_bytes``."""

    metadata: dict[str, bytes]
    sync: bytes
    size_bytes: int

    @classmethod
    def parse(cls, data: bytes, errors: str = "strict") -> AvroHeader:
        """Return the header of a file. ``errors`` is for names that are no UTF-8, as in ``bytes.decode``.

        Raises ValueError, EOFError.
        """
        if not data.startswith(MAGIC):
            raise ValueError("it does not begin as one")
        reader = AvroReader(data, len(MAGIC))
        metadata: dict[str, bytes] = {}
        while count := reader.number():
            if count < 0:  # the size of the entries follows, to skip them
                reader.number()
            for _ in range(abs(count)):
                name, value = reader.counted(MAX_HEADER_BYTES), reader.counted(MAX_HEADER_BYTES)
                metadata[name.decode(errors=errors)] = value
        sync = data[reader.at : reader.at + _SYNC_BYTES]
        if len(sync) < _SYNC_BYTES:
            raise EOFError("it ends in its header")
        return cls(metadata, sync, reader.at + _SYNC_BYTES)

    @classmethod
    def of(cls, data: bytes) -> AvroHeader | None:
        """Return the header of a file, None if it has none that can be read. Names need not be UTF-8."""
        try:
            return cls.parse(data, "surrogateescape")
        except (ValueError, EOFError):
            return None

    def with_metadata(self, more: Mapping[str, bytes]) -> bytes:
        """Return the bytes of this header with more metadata in front, which replaces entries of the same names."""
        kept = {name: value for name, value in self.metadata.items() if name not in more}
        return header_bytes({**more, **kept}, self.sync)


class HeaderTooLargeError(ValueError):
    """The header of an Avro file has more than :data:`MAX_HEADER_BYTES`."""


@dataclass(slots=True)
class AvroReader:
    """Reads numbers and counted bytes of ``data``, one after the other. The next one begins at ``at``."""

    data: bytes
    at: int

    def number(self) -> int:
        """Return a number. Raises EOFError."""
        number = 0
        for place, byte in enumerate(self.data[self.at : self.at + _MAX_VARINT_BYTES]):
            number |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                self.at += place + 1
                return (number >> 1) ^ -(number & 1)
        raise EOFError("a number in it does not end")

    def counted(self, end: int | None = None) -> bytes:
        """Return the bytes that follow their length.

        Args:
            end: The position that they may not pass, None for the end of ``data``.

        Raises:
            HeaderTooLargeError: They pass ``end``.
            EOFError: They pass the end of ``data``.
        """
        size_bytes = self.number()
        if end is not None and self.at + size_bytes > end:
            raise HeaderTooLargeError(f"its header has more than {end} bytes")
        if not 0 <= size_bytes <= len(self.data) - self.at:
            raise EOFError("a length in it is beyond its end")
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]


def header_bytes(metadata: Mapping[str, bytes], sync: bytes) -> bytes:
    """Return the bytes of a header with metadata in this order."""
    entries = [
        piece
        for name, value in metadata.items()
        for text in (name.encode(errors="surrogateescape"), value)
        for piece in (number_bytes(len(text)), text)
    ]
    return b"".join([MAGIC, number_bytes(len(metadata)), *entries, number_bytes(0), sync])


def number_bytes(number: int) -> bytes:
    """Return a count or length as Avro writes it."""
    rest = number << 1
    written = bytearray()
    while rest > 0x7F:
        written.append(rest & 0x7F | 0x80)
        rest >>= 7
    written.append(rest)
    return bytes(written)


SNAPSHOT_ID = "snapshot-id"
_CODEC, _SCHEMA = "avro.codec", "avro.schema"
_SUFFIX = ".avro"
#: Each record takes a decoder about a kilobyte. It takes a writer more bytes than these, as it has a name of its own.
_FILE_BYTES_PER_RECORD = 8
_ALWAYS_ALLOWED_RECORDS = 16_384
#: The bytes that every file may inflate to. A number or an entry of a map takes two to four bytes there, and up to
#: thirty times as much in a decoder. Metrics, most of what large manifests hold, are numbers that shrink to a half or a
#: third.
ALWAYS_ALLOWED_BYTES = 8 << 20
_SMALL_FILE_BYTES = 1 << 20
#: How many bytes a file may inflate to for each byte that it has beyond a small one.
_MAX_RATIO = 16


@dataclass(frozen=True, slots=True)
class AvroContent:
    """An Avro file without compression: its ``data``, the ``meta`` of its header, and facts about the compressed file.

    These facts are its ``codec``, its size in bytes and how many records it has. ``data`` has ``n_kept`` of them,
    from the record of number ``first_record`` on.
    """

    data: bytes
    meta: dict[str, bytes]
    codec: str
    file_bytes: int
    n_records: int = 0
    first_record: int = 0
    n_kept: int = 0

    def meta_int(self, name: str) -> int | None:
        """Return a number in the header, None where there is none."""
        text = self.meta.get(name, b"").decode("ascii", "replace")
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def avro_limit_bytes(file_bytes: int) -> int:
    """Return how many bytes an Avro file of a size may inflate to."""
    return min(MAX_INFLATED_BYTES, ALWAYS_ALLOWED_BYTES + _MAX_RATIO * max(0, file_bytes - _SMALL_FILE_BYTES))


def is_avro(location: str, head: bytes) -> bool:
    """Whether a file that begins with some bytes is an Avro file, or has the name of one."""
    return head.startswith(MAGIC) or location.endswith(_SUFFIX)


def check_no_avro(location: str, data: bytes) -> None:
    """Raise CorruptFileError for a file that does not begin as Avro, but would be taken for it.

    The decoder of pyiceberg passes over the first bytes and looks for the schema.
    """
    if _SCHEMA.encode() in data:
        raise CorruptFileError(f"{location!r} is no Avro file, but says so further on; restore it", path=location)


def check_header_size(head: bytes, location: str) -> None:
    """Check the header of a large Avro file before the rest of the file is read.

    Args:
        head: The first bytes of the file.
        location: The location of the file, for errors.

    Raises:
        CorruptFileError: The header has more than :data:`MAX_HEADER_BYTES`.
    """
    try:
        AvroHeader.parse(head, "surrogateescape")
    except HeaderTooLargeError as error:
        raise CorruptFileError(f"{location!r} is no readable Avro file: {error}; restore it", path=location) from error
    except (ValueError, EOFError):
        return  # the decoder raises the error when the file is read whole


def uncompressed(data: bytes, location: str, window: range | None = None) -> AvroContent:
    """Return an Avro file without compression.

    Args:
        data: The file.
        location: The location of the file, for errors.
        window: The numbers of the records that are needed. Blocks without any of them are left out. None for all.

    Raises:
        CorruptFileError: The file is not Avro, holds more than a file of its size may, or claims more than it has.
    """
    try:
        return _uncompressed(data, window)
    except InflatedTooLargeError as error:
        raise too_large(location, len(data), avro_limit_bytes(len(data))) from error
    except Exception as error:  # for broken bytes decompressors raise any exception
        reason = str(error).partition("\n")[0][:100]
        raise CorruptFileError(
            f"{location!r} is no readable Avro file: {type(error).__name__}: {reason}; restore it", path=location
        ) from error


def _uncompressed(data: bytes, window: range | None) -> AvroContent:
    header = AvroHeader.parse(data)
    meta, sync = header.metadata, header.sync
    codec = meta.get(_CODEC, b"null").decode("ascii", "replace")
    if codec not in AVRO_CODECS:
        raise ValueError("its codec is none of those of Iceberg")
    schema = meta[_SCHEMA]
    (_check_common_schema if len(schema) <= _COMMON_SCHEMA_BYTES else _check_schema)(schema)
    inflate = AVRO_CODECS[codec]
    left_bytes = avro_limit_bytes(len(data))
    left_records = _ALWAYS_ALLOWED_RECORDS + len(data) // _FILE_BYTES_PER_RECORD
    pieces = [header_bytes({**meta, _CODEC: b"null"}, sync)]
    at, first, n_kept = 0, 0, 0
    for n_records, block in _blocks(AvroReader(data, header.size_bytes), sync):
        at += n_records
        if window is not None and (at <= window.start or at - n_records >= window.stop):
            first = at if at <= window.start else first
            left_records -= n_records
            if left_records < 0:
                raise InflatedTooLargeError("it holds more records than its file may")
            continue
        n_kept += n_records
        content = inflate(block, left_bytes)
        left_bytes -= len(content)
        left_records -= n_records
        if left_records < 0 or n_records > len(content):
            raise InflatedTooLargeError("it holds more records than its file may")
        pieces += [number_bytes(n_records), number_bytes(len(content)), content, sync]
    return AvroContent(b"".join(pieces), meta, codec, len(data), at, first, n_kept)


def _blocks(reader: AvroReader, sync: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the count of records and the bytes of each block."""
    while reader.at < len(reader.data):
        n_records, block = reader.number(), reader.counted()
        if n_records < 0 or not reader.data.startswith(sync, reader.at):
            raise ValueError("its blocks do not follow each other")
        reader.at += len(sync)
        yield n_records, block


def _check_schema(text: bytes) -> None:
    """Raise ValueError for a schema with items that take no bytes, as a list could count any number of them.

    Raises it also for a schema whose full names are too long together.
    """
    schema = json.loads(text)
    if full_name_chars(schema) > MAX_NAME_CHARS:
        raise ValueError("its schema has names that are too long, within each other")
    _least_bytes(schema)


#: Schemas up to this size are checked once, and kept in memory: those of manifests and manifest lists.
_COMMON_SCHEMA_BYTES = 64 << 10
_check_common_schema = lru_cache(maxsize=64)(_check_schema)


def _least_bytes(schema: Any) -> int:
    """Return whether values of a schema take bytes, 1, or may take none, 0. Raises ValueError."""
    if isinstance(schema, list):
        for branch in schema:
            _least_bytes(branch)
        return 1  # the byte of the branch's number
    kind = schema.get("type") if isinstance(schema, dict) else schema
    if kind == "array" and _least_bytes(schema["items"]) == 0:
        raise ValueError("its schema has a list of items that take no bytes")
    if kind == "map":
        _least_bytes(schema["values"])
    if kind in ("record", "error"):
        return max([_least_bytes(field["type"]) for field in schema["fields"]], default=0)
    if kind == "fixed":
        return min(int(schema["size"]), 1)
    if isinstance(kind, dict | list):
        return _least_bytes(kind)
    if kind == "null":
        return 0
    if isinstance(schema, str) and kind not in _PRIMITIVES:
        return 0  # a name, perhaps that of a record without fields
    return 1


_PRIMITIVES = frozenset(("boolean", "int", "long", "float", "double", "bytes", "string"))


_MORE, _BITS = 0x80, 0x7F
_MOST_BYTES = 10
_POSITIVE = (1 << 63) - 1


class BoundedDecoder(BinaryDecoder):
    """Decodes values one after the other. Raises EOFError for a length that leads out of the bytes."""

    __slots__ = ("_data", "_end", "_place")

    def __init__(self, data: bytes):
        self._data = data
        self._end = len(data)
        self._place = 0

    def tell(self) -> int:
        return self._place

    def read(self, n: int) -> bytes:
        start = self._place
        self.skip(n)
        return self._data[start : self._place]

    def skip(self, n: int) -> None:
        if not 0 <= n <= self._end - self._place:
            raise self._beyond(n)
        self._place += n

    def read_int(self) -> int:
        place = self._place
        if place < self._end and (byte := self._data[place]) < _MORE:  # most numbers take one byte
            self._place = place + 1
            return (byte >> 1) ^ -(byte & 1)
        return self._read_long_int()

    def _read_long_int(self) -> int:
        number = 0
        for index, byte in enumerate(self._data[self._place : self._place + _MOST_BYTES]):
            number |= (byte & _BITS) << (7 * index)
            if byte < _MORE:
                self._place += index + 1
                return (number >> 1 & _POSITIVE) ^ -(number & 1)
        raise EOFError("a number does not end")

    def read_ints(self, n: int) -> tuple[int, ...]:
        self._check_count(n)
        return super().read_ints(n)

    def read_int_bytes_dict(self, n: int, dest: dict[int, bytes]) -> None:
        self._check_count(n)
        read_int, read_bytes = self.read_int, self.read_bytes
        for _ in range(n):
            key = read_int()
            dest[key] = read_bytes()

    def read_bytes(self) -> bytes:
        size_bytes = self.read_int()
        start = self._place
        end = start + size_bytes
        if not start <= end <= self._end:
            raise self._beyond(size_bytes)
        self._place = end
        return self._data[start:end]

    def skip_int(self) -> None:
        self.read_int()

    def _check_count(self, n: int) -> None:
        if n > self._end - self._place:  # each item takes a byte, or more
            raise self._beyond(n)

    def _beyond(self, wanted: int) -> EOFError:
        return EOFError(f"{wanted} bytes or items are wanted where {self._end - self._place} bytes are left")


def read_bounded_avro() -> None:
    """Let pyiceberg read all Avro by :class:`BoundedDecoder`, in this process."""
    vars(avro_file)["new_decoder"] = BoundedDecoder
