"""The Arrow IPC file around the rows of a node: its bytes, its seals, and the form that our own files have.

The seal is metadata of the schema, which such a file holds twice: in its first message and in its footer.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass
from typing import TypeAlias

import google_crc32c
import pyarrow as pa

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import SEAL_KEYS, check_seals
from trinitylake_ops.format.file_names import is_immutable_path, version_named
from trinitylake_ops.format.nodes.ipc_body import places_in_batch
from trinitylake_ops.format.nodes.text_column import built_texts

SCHEMA = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])

_KEY = SEAL_KEYS[0].encode()
_MAGIC_BYTES = 8
_DIGITS = 8
_NO_DIGITS = b"0" * _DIGITS
_COUNTS = struct.Struct("<" + "qq" * len(SCHEMA))  # of each column: rows, nulls
_BITMAPS = struct.Struct("<" + "q40x" * len(SCHEMA))  # of each column: where the first of its three buffers begins

#: Of key, pvalue and pnode, the rows that are not null, as the bits of a number.
Present: TypeAlias = tuple[int, int, int]


def write_file(batch: pa.RecordBatch, compression: str, path: str) -> bytes:
    """Return the file of one batch, sealed for the name of ``path``, or without a seal if that is empty."""
    name = _name_of(path)
    data = _file_of(batch, compression, len(name))
    return _own_form(len(name)).sealed(data, name) if name else bytes(data)


def surrounding_bytes(path: str) -> int:
    """Return the bytes that an uncompressed file of one batch takes beyond the batch."""
    return _surrounding_bytes(len(_name_of(path)))


def read_own_batch(data: bytes, path: str) -> tuple[pa.RecordBatch, Present] | None:
    """Return the rows of a file of exactly our form, with one uncompressed batch, as nearly all have.

    This costs little, as neither schema nor footer is parsed. Other files give None. Rows are validated, and seals are
    checked, if there are any. Raises CorruptFileError for a file that is damaged or not that of ``path``, and
    ArrowInvalid for rows that are not sound.
    """
    name = _name_of(path)
    form = _own_form(len(name))
    if not form.has(data):
        form = _own_form(0)
        if not form.has(data):
            return None
    else:
        head, tail = form.seals_of(data)
        if head != tail or head[_DIGITS + 1 :] != name or head[:_DIGITS] != b"%08x" % form.crc32c(data):
            _check(data, _text(head), _text(tail), path)
    batch = form.batch(data)
    batch.validate(full=True)
    return batch, form.present(data)


def check_file_seals(data: bytes, schema: pa.Schema, path: str) -> bool:
    """Check an IPC file of any form against its seals. ``schema`` is that of its footer. Returns whether it has any.

    Raises CorruptFileError.
    """
    return _check(data, _seal_in(_first_schema(data)), _seal_in(schema), path)


def check_is_no_copy(data: bytes, path: str) -> None:
    """Check a file that is whole: it must not be a copy of an older root. Raises CorruptFileError."""
    # The form leaves out some bytes of the footer.
    seal = _seal_in(footer_schema(data, path, ": its footer is damaged"))
    check_seals(data, (seal, seal), path)


def footer_schema(data: bytes, path: str, reason: str = "") -> pa.Schema:
    """Return the schema in the footer of a file. Raises CorruptFileError, whose message ends in ``reason``."""
    try:
        return pa.ipc.open_file(data).schema
    except (pa.ArrowException, OSError, ValueError) as error:
        raise CorruptFileError(f"{path!r} is no readable Arrow IPC file{reason}", path=path) from error


def _check(data: bytes, first: str | None, second: str | None, path: str) -> bool:
    name = (first or "")[_DIGITS + 1 :]
    return check_seals(data, (first, second), path, may_be_copy=_may_be_copied_to(path, name))


def _may_be_copied_to(path: str, name: str) -> bool:
    """Whether a program that knows only the published format may copy a root to a path, byte by byte.

    To roll back, it makes an old root a later one. Exports are roots at paths of their own.
    """
    copied, version = version_named(name), version_named(path)
    if copied is None:
        return False
    return copied < version if version is not None else not is_immutable_path(path)


def _first_schema(data: bytes) -> pa.Schema | None:
    """Return the schema at the beginning of a file, None if none can be read there, as in very old files."""
    try:
        message = pa.ipc.read_message(pa.py_buffer(data)[_MAGIC_BYTES:])
        # Arrow takes any message for a schema. If it is another one, Arrow ends the process.
        return pa.ipc.read_schema(message) if message.type == "schema" else None
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return None


def _seal_in(schema: pa.Schema | None) -> str | None:
    seal = None if schema is None or schema.metadata is None else schema.metadata.get(_KEY)
    return None if seal is None else _text(seal)


def _text(seal: bytes) -> str:
    return seal.decode("utf-8", errors="surrogateescape")


def _name_of(path: str) -> bytes:
    return path.rpartition("/")[2].encode("utf-8", errors="surrogateescape")


def _file_of(batch: pa.RecordBatch, compression: str, name_bytes: int = 0, character: str = "0") -> memoryview:
    """Return a file with seals whose name repeats one character, or without seals for a name of no bytes."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _schema(name_bytes, character), options=_write_options(compression)) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


@functools.lru_cache(maxsize=256)
def _schema(name_bytes: int, character: str) -> pa.Schema:
    """Return our schema with a seal of so many bytes of name. pyarrow takes far longer to write a new one."""
    return SCHEMA.with_metadata({_KEY: f"{character * _DIGITS} {character * name_bytes}"}) if name_bytes else SCHEMA


@functools.cache
def _write_options(compression: str) -> pa.ipc.IpcWriteOptions:
    return pa.ipc.IpcWriteOptions(compression=compression or None, use_threads=False)


@functools.lru_cache(maxsize=256)
def _surrounding_bytes(name_bytes: int) -> int:
    batch = pa.record_batch([built_texts([])] * len(SCHEMA), schema=SCHEMA)
    return len(_file_of(batch, "", name_bytes)) - int(pa.ipc.get_record_batch_size(batch))


@dataclass(frozen=True, slots=True)
class _OwnForm:
    """The beginning and the end of our uncompressed files.

    They hold all metadata except the seals and the numbers of rows and bytes.

    ``batch_start`` is where the message of the batch begins. ``counts`` and ``starts`` are where it says how many rows
    and nulls its columns have, and where their buffers begin. Head and tail are each one large number. A mask leaves
    out the bits that differ by file. ``head_seal`` is where the first seal begins. ``tail_seal`` is where the second
    begins, counted from the end. Both are 0 without seals.
    """

    batch_start: int
    counts: int
    starts: int
    head_bytes: int
    head_mask: int
    head: int
    tail_bytes: int
    tail_mask: int
    tail: int
    seal_bytes: int
    head_seal: int
    tail_seal: int

    def has(self, data: bytes) -> bool:
        """Whether a file has this form."""
        head = int.from_bytes(data[: self.head_bytes], "little") & self.head_mask
        tail = int.from_bytes(data[-self.tail_bytes :], "little") & self.tail_mask
        return head == self.head and tail == self.tail

    def seals_of(self, data: bytes) -> tuple[bytes, bytes]:
        """Return both seals of a file of this form."""
        start = len(data) + self.tail_seal
        return data[self.head_seal : self.head_seal + self.seal_bytes], data[start : start + self.seal_bytes]

    def crc32c(self, data: bytes) -> int:
        """Return the checksum of a file of this form, with zeros for the digits of its seals."""
        between = pa.py_buffer(data)[self.head_seal + _DIGITS : self.tail_seal]  # bytes would be copied
        crc = google_crc32c.value(data[: self.head_seal] + _NO_DIGITS)
        crc = google_crc32c.extend(crc, between)
        return int(google_crc32c.extend(crc, _NO_DIGITS + data[self.tail_seal + _DIGITS :]))

    def sealed(self, data: memoryview, name: bytes) -> bytes:
        """Return a file of this form, compressed or not, with both seals renamed to a name of the same size."""
        head, tail = bytes(data[: self.head_seal]), bytes(data[self.tail_seal + self.seal_bytes :])
        body = bytes(data[self.head_seal + self.seal_bytes : self.tail_seal])
        blank = _NO_DIGITS + b" " + name
        crc = google_crc32c.value(head + blank)
        crc = google_crc32c.extend(google_crc32c.extend(crc, body), blank + tail)
        seal = b"%08x %b" % (crc, name)
        return b"".join((head, seal, body, seal, tail))

    def batch(self, data: bytes) -> pa.RecordBatch:
        """Return the rows of a file of this form, which are views of its bytes."""
        return pa.ipc.read_record_batch(pa.py_buffer(data)[self.batch_start :], SCHEMA)

    def present(self, data: bytes) -> Present:
        """Return which rows of a validated batch are not null. To ask Arrow for them would take longer."""
        counts = _COUNTS.unpack_from(data, self.counts)
        starts = _BITMAPS.unpack_from(data, self.starts)
        every = (1 << counts[0]) - 1
        n_bytes = (counts[0] + 7) // 8
        key, pvalue, pnode = (
            int.from_bytes(data[first : first + n_bytes], "little") & every if n_nulls else every
            for n_nulls, first in zip(counts[1::2], (self.head_bytes + start for start in starts), strict=True)
        )
        return key, pvalue, pnode


@functools.lru_cache(maxsize=256)
def _own_form(name_bytes: int) -> _OwnForm:
    """Return the form of files whose names take so many bytes, 0 for files without seals.

    It is made of two files that differ in all else.
    """
    texts = {"0": ["", None], "1": [str(number) for number in range(20_000)] + [None] * 1_000}
    one, other = (
        bytes(_file_of(pa.record_batch([built_texts(rows)] * 3, schema=SCHEMA), "", name_bytes, character))
        for character, rows in texts.items()
    )
    batch = 16 + int.from_bytes(one[12:16], "little")  # after the magic and the schema's message
    head_bytes = batch + 8 + int.from_bytes(one[batch + 4 : batch + 8], "little")
    tail_bytes = int.from_bytes(one[-10:-6], "little") + 10
    head_mask = _equal_words(one[:head_bytes], other[:head_bytes])
    tail_mask = _equal_words(one[-tail_bytes:], other[-tail_bytes:])
    head, tail = (int.from_bytes(part, "little") for part in (one[:head_bytes], one[-tail_bytes:]))
    seal = f"{_NO_DIGITS.decode()} {'0' * name_bytes}".encode() if name_bytes else b""
    places = (one.find(seal), one.rfind(seal) - len(one)) if seal else (0, 0)
    of_batch = (batch, *places_in_batch(one, batch))
    form = (*of_batch, head_bytes, head_mask, head & head_mask, tail_bytes, tail_mask, tail & tail_mask)
    return _OwnForm(*form, len(seal), *places)


def _equal_words(one: bytes, other: bytes) -> int:
    """Return a mask of the words, of 8 bytes, that are the same in both."""
    places = range(0, len(one), 8)
    masks = (b"\xff" if one[place : place + 8] == other[place : place + 8] else b"\0" for place in places)
    return int.from_bytes(b"".join(mask * 8 for mask in masks)[: len(one)], "little")
