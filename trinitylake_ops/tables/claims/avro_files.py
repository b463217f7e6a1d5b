"""Avro files of tables, checked and inflated before any decoder sees them.

Decoders such as pyiceberg and fastavro believe what a file claims. They inflate each block whole, and count on as far
as a length or a count in it says. They are given the same file without compression. Its blocks are within it, its sum
is bounded, and each record and item takes bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.tables.claims.avro_header import MAGIC, AvroHeader, AvroReader, header_bytes, number_bytes
from trinitylake_ops.tables.claims.inflate import AVRO_CODECS, MAX_INFLATED_BYTES, InflatedTooLargeError, too_large
from trinitylake_ops.tables.claims.names import MAX_NAME_CHARS, full_name_chars

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
