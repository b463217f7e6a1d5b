"""Verify and decompress the Avro files of tables before a decoder reads them.

Decoders such as those of PyIceberg and fastavro trust the file: they inflate each block completely, and follow any
declared length or count. They therefore get a decompressed copy of the file, in which no block extends beyond the file,
the total size is bounded, and the schema has no items of zero bytes.

The compiled decoder follows lengths and counts beyond its buffer. A manifest of a kilobyte could crash the process, or
make the decoder return bytes behind the buffer, such as credentials, as a path. :func:`read_bounded_avro` replaces that
decoder in PyIceberg's module, for all Avro files that this process reads with PyIceberg (decision 11).
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
#: Maximum size of a file's header. The header contains schemas as JSON, which is parsed in one step while all other
#: threads wait. The schema of a table with 20,000 columns takes 1.3 MB.
MAX_HEADER_BYTES = 8 << 20
_SYNC_BYTES = 16
_MAX_VARINT_BYTES = 10


@dataclass(frozen=True, slots=True)
class AvroHeader:
    """The header of a file."""

    #: The metadata, in file order.
    metadata: dict[str, bytes]
    #: The marker between blocks.
    sync: bytes
    #: Size in bytes, which is also the offset of the first block.
    size_bytes: int

    @classmethod
    def parse(cls, data: bytes, errors: str = "strict") -> AvroHeader:
        """Return the header of a file.

        Args:
            data: The file.
            errors: How to decode names that are not UTF-8, as in ``bytes.decode``.

        Raises:
            ValueError: The file is not Avro.
            EOFError: The file ends within its header.
        """
        if not data.startswith(MAGIC):
            raise ValueError("it does not start with the Avro magic")
        reader = AvroReader(data, len(MAGIC))
        metadata: dict[str, bytes] = {}
        while count := reader.number():
            if count < 0:  # followed by the size of the entries
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
        """Return the header of a file, or None if it cannot be read. Names need not be UTF-8."""
        try:
            return cls.parse(data, "surrogateescape")
        except (ValueError, EOFError):
            return None

    def with_metadata(self, added: Mapping[str, bytes]) -> bytes:
        """Return the bytes of this header with more metadata in front, which replaces entries with the same names."""
        kept = {name: value for name, value in self.metadata.items() if name not in added}
        return header_bytes({**added, **kept}, self.sync)


class HeaderTooLargeError(ValueError):
    """The header of an Avro file exceeds :data:`MAX_HEADER_BYTES`."""


@dataclass(slots=True)
class AvroReader:
    """Reads Avro numbers and length-prefixed bytes sequentially."""

    data: bytes
    #: Offset of the next value.
    at: int

    def number(self) -> int:
        """Return the next number. Raises EOFError."""
        number = 0
        for index, byte in enumerate(self.data[self.at : self.at + _MAX_VARINT_BYTES]):
            number |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                self.at += index + 1
                return (number >> 1) ^ -(number & 1)
        raise EOFError("a number is not terminated")

    def counted(self, end: int | None = None) -> bytes:
        """Return the next length-prefixed bytes.

        Args:
            end: Maximum end offset; None for the end of ``data``.

        Raises:
            HeaderTooLargeError: The bytes exceed ``end``.
            EOFError: The bytes exceed ``data``.
        """
        size_bytes = self.number()
        if end is not None and self.at + size_bytes > end:
            raise HeaderTooLargeError(f"its header has more than {end} bytes")
        if not 0 <= size_bytes <= len(self.data) - self.at:
            raise EOFError("a length exceeds the file")
        self.at += size_bytes
        return self.data[self.at - size_bytes : self.at]


def header_bytes(metadata: Mapping[str, bytes], sync: bytes) -> bytes:
    """Return the bytes of a header with the given metadata, in this order, and a sync marker."""
    entries = [
        piece
        for name, value in metadata.items()
        for text in (name.encode(errors="surrogateescape"), value)
        for piece in (number_bytes(len(text)), text)
    ]
    return b"".join([MAGIC, number_bytes(len(metadata)), *entries, number_bytes(0), sync])


def number_bytes(number: int) -> bytes:
    """Return a count or length in Avro's encoding."""
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
#: Each record takes about a kilobyte in a decoder. In a file, it takes at least this many bytes, because it contains a
#: unique name.
_FILE_BYTES_PER_RECORD = 8
_ALWAYS_ALLOWED_RECORDS = 16_384
#: Size to which every file may inflate. A number or map entry takes two to four inflated bytes, and up to thirty times
#: as much in a decoder. Large manifests mostly contain metrics: numbers that compress to a half or a third.
ALWAYS_ALLOWED_BYTES = 8 << 20
_SMALL_FILE_BYTES = 1 << 20
#: Number of additional bytes to which a file may inflate, for each byte beyond ``_SMALL_FILE_BYTES``.
_MAX_RATIO = 16


@dataclass(frozen=True, slots=True)
class AvroContent:
    """A decompressed Avro file, and properties of the compressed file."""

    #: The decompressed file.
    data: bytes
    #: Metadata of the header.
    meta: dict[str, bytes]
    #: Codec of the compressed file.
    codec: str
    #: Size of the compressed file in bytes.
    file_bytes: int
    #: Number of records in the compressed file.
    n_records: int = 0
    #: Index of the first record in ``data``.
    first_record: int = 0
    #: Number of records in ``data``.
    n_kept: int = 0

    def meta_int(self, name: str) -> int | None:
        """Return a number in the header, or None if it is missing or not a number."""
        text = self.meta.get(name, b"").decode("ascii", "replace")
        return int(text) if text.removeprefix("-").isdecimal() and len(text) < 20 else None


def avro_limit_bytes(file_bytes: int) -> int:
    """Return the size in bytes to which an Avro file of a given size may inflate."""
    return min(MAX_INFLATED_BYTES, ALWAYS_ALLOWED_BYTES + _MAX_RATIO * max(0, file_bytes - _SMALL_FILE_BYTES))


def is_avro(location: str, head: bytes) -> bool:
    """Whether a file with this start is an Avro file, or has the name of an Avro file."""
    return head.startswith(MAGIC) or location.endswith(_SUFFIX)


def check_no_avro(location: str, data: bytes) -> None:
    """Raise CorruptFileError if a file that would be decoded as Avro lacks the Avro magic number.

    PyIceberg's decoder skips the magic number and searches for the schema.
    """
    if _SCHEMA.encode() in data:
        raise CorruptFileError(f"{location!r} has an Avro schema but no Avro magic; restore it", path=location)


def check_header_size(head: bytes, location: str) -> None:
    """Check the header of a large Avro file before the rest of the file is read.

    Args:
        head: The first bytes of the file.
        location: Location of the file, for errors.

    Raises:
        CorruptFileError: The header exceeds :data:`MAX_HEADER_BYTES`.
    """
    try:
        AvroHeader.parse(head, "surrogateescape")
    except HeaderTooLargeError as error:
        raise CorruptFileError(
            f"{location!r} is not a readable Avro file: {error}; restore it", path=location
        ) from error
    except (ValueError, EOFError):
        return  # raised when the whole file is decoded


def decompress(data: bytes, location: str, window: range | None = None) -> AvroContent:
    """Return a decompressed Avro file.

    Args:
        data: The file.
        location: Location of the file, for errors.
        window: Indices of the needed records. Blocks without any of them are omitted. None for all records.

    Raises:
        CorruptFileError: The file is not Avro, inflates beyond the limit for its size, or declares more than it
            contains.
    """
    try:
        return _decompress(data, window)
    except InflatedTooLargeError as error:
        raise too_large(location, len(data), avro_limit_bytes(len(data))) from error
    except Exception as error:  # decompressors raise arbitrary exceptions for corrupt input
        reason = str(error).partition("\n")[0][:100]
        raise CorruptFileError(
            f"{location!r} is not a readable Avro file: {type(error).__name__}: {reason}; restore it", path=location
        ) from error


def _decompress(data: bytes, window: range | None) -> AvroContent:
    header = AvroHeader.parse(data)
    meta, sync = header.metadata, header.sync
    codec = meta.get(_CODEC, b"null").decode("ascii", "replace")
    if codec not in AVRO_CODECS:
        raise ValueError("Iceberg does not use its codec")
    schema = meta[_SCHEMA]
    (_check_common_schema if len(schema) <= _COMMON_SCHEMA_BYTES else _check_schema)(schema)
    inflate = AVRO_CODECS[codec]
    left_bytes = avro_limit_bytes(len(data))
    left_records = _ALWAYS_ALLOWED_RECORDS + len(data) // _FILE_BYTES_PER_RECORD
    pieces = [header_bytes({**meta, _CODEC: b"null"}, sync)]
    index, first_record, n_kept = 0, 0, 0
    for n_records, block in _blocks(AvroReader(data, header.size_bytes), sync):
        index += n_records
        if window is not None and (index <= window.start or index - n_records >= window.stop):
            first_record = index if index <= window.start else first_record
            left_records -= n_records
            if left_records < 0:
                raise InflatedTooLargeError("it has more records than a file of its size may")
            continue
        n_kept += n_records
        content = inflate(block, left_bytes)
        left_bytes -= len(content)
        left_records -= n_records
        if left_records < 0 or n_records > len(content):
            raise InflatedTooLargeError("it has more records than a file of its size may")
        pieces += [number_bytes(n_records), number_bytes(len(content)), content, sync]
    return AvroContent(b"".join(pieces), meta, codec, len(data), index, first_record, n_kept)


def _blocks(reader: AvroReader, sync: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the number of records and the contents of each block."""
    while reader.at < len(reader.data):
        n_records, block = reader.number(), reader.counted()
        if n_records < 0 or not reader.data.startswith(sync, reader.at):
            raise ValueError("a block is not followed by the sync marker")
        reader.at += len(sync)
        yield n_records, block


def _check_schema(text: bytes) -> None:
    """Raise ValueError for a schema with items of zero bytes, because a list could declare any number of them.

    Also raises ValueError for a schema whose full names are too long in total.
    """
    schema = json.loads(text)
    if full_name_chars(schema) > MAX_NAME_CHARS:
        raise ValueError("the full names in its schema are too long")
    _min_bytes(schema)


#: Maximum size of schemas whose check is cached, such as the schemas of manifests and manifest lists.
_COMMON_SCHEMA_BYTES = 64 << 10
_check_common_schema = lru_cache(maxsize=64)(_check_schema)


def _min_bytes(schema: Any) -> int:
    """Return 1 if every value of a schema takes at least a byte, or 0 if some may take none. Raises ValueError."""
    if isinstance(schema, list):
        for branch in schema:
            _min_bytes(branch)
        return 1  # the index of the branch takes a byte
    kind = schema.get("type") if isinstance(schema, dict) else schema
    if kind == "array" and _min_bytes(schema["items"]) == 0:
        raise ValueError("its schema has a list whose items take no bytes")
    if kind == "map":
        _min_bytes(schema["values"])
    if kind in ("record", "error"):
        return max([_min_bytes(field["type"]) for field in schema["fields"]], default=0)
    if kind == "fixed":
        return min(int(schema["size"]), 1)
    if isinstance(kind, dict | list):
        return _min_bytes(kind)
    if kind == "null":
        return 0
    if isinstance(schema, str) and kind not in _PRIMITIVES:
        return 0  # a named type, perhaps a record without fields
    return 1


_PRIMITIVES = frozenset(("boolean", "int", "long", "float", "double", "bytes", "string"))


_CONTINUATION_BIT, _VALUE_BITS = 0x80, 0x7F
_MAX_NUMBER_BYTES = 10
_MAX_INT64 = (1 << 63) - 1


class BoundedDecoder(BinaryDecoder):
    """Decodes values sequentially. Raises EOFError for a length that exceeds the input."""

    __slots__ = ("_data", "_end", "_position")

    def __init__(self, data: bytes):
        self._data = data
        self._end = len(data)
        self._position = 0

    def tell(self) -> int:
        return self._position

    def read(self, n: int) -> bytes:
        start = self._position
        self.skip(n)
        return self._data[start : self._position]

    def skip(self, n: int) -> None:
        if not 0 <= n <= self._end - self._position:
            raise self._beyond(n)
        self._position += n

    def read_int(self) -> int:
        position = self._position
        if (
            position < self._end and (byte := self._data[position]) < _CONTINUATION_BIT
        ):  # fast path: most numbers take one byte
            self._position = position + 1
            return (byte >> 1) ^ -(byte & 1)
        return self._read_long_int()

    def _read_long_int(self) -> int:
        number = 0
        for index, byte in enumerate(self._data[self._position : self._position + _MAX_NUMBER_BYTES]):
            number |= (byte & _VALUE_BITS) << (7 * index)
            if byte < _CONTINUATION_BIT:
                self._position += index + 1
                return (number >> 1 & _MAX_INT64) ^ -(number & 1)
        raise EOFError("a number is not terminated")

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
        start = self._position
        end = start + size_bytes
        if not start <= end <= self._end:
            raise self._beyond(size_bytes)
        self._position = end
        return self._data[start:end]

    def skip_int(self) -> None:
        self.read_int()

    def _check_count(self, n: int) -> None:
        if n > self._end - self._position:  # each item takes at least a byte
            raise self._beyond(n)

    def _beyond(self, declared: int) -> EOFError:
        return EOFError(f"{declared} bytes or items are declared, but only {self._end - self._position} bytes are left")


def read_bounded_avro() -> None:
    """Make PyIceberg decode all Avro files in this process with :class:`BoundedDecoder`."""
    vars(avro_file)["new_decoder"] = BoundedDecoder
