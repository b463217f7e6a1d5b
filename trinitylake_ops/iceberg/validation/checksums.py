"""Checksums within the files of tables that this package writes (FORMAT.md, "Checksums", "Files of tables").

Each file contains its checksum twice, where its format leaves room: a metadata file as its first and last JSON member,
a gzipped one in the extra field of gzip's header, a manifest or manifest list in the metadata of Avro's header, and a
Parquet file in the key-value pairs of its footer. Other readers ignore these checksums.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from enum import Enum, auto

import google_crc32c

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import SEAL_KEYS, check_seals, open_seal, sealed
from trinitylake_ops.iceberg.validation.avro import AvroHeader
from trinitylake_ops.iceberg.validation.files import end_with_claims, footer_bytes, read_footer

_Seals = tuple[str | None, str | None]
#: Number of bytes kept from the end of a file that is checked piece by piece. Nearly all footers are smaller.
_KEPT_END_BYTES = 16 << 20

_JSON_FIRST = re.compile(rb'\{"trinitylake\.seal":"([^"\\]*)",')
_JSON_LAST = re.compile(rb',"trinitylake\.seal\.2":"([^"\\]*)"\}\Z')
_MAX_MEMBER_BYTES = 1024
_DIGITS = re.compile(rb"[0-9a-f]{8}")

_GZIP_HEADER = struct.Struct("<3sB6s")
_GZIP_MAGIC = b"\x1f\x8b\x08"
_GZIP_HAS_EXTRA = 4
#: Subfields of gzip's extra field that contain the checksums.
_GZIP_SUBFIELDS = (b"T1", b"T2")


class SealedKind(Enum):
    """The kinds of files that can contain checksums."""

    METADATA = auto()
    GZIP_METADATA = auto()
    AVRO = auto()
    PARQUET = auto()

    @classmethod
    def of(cls, path: str) -> SealedKind | None:
        """Return the kind of a file by its suffix, or None for a file that has no room for checksums."""
        return next((kind for ending, kind in _SUFFIXES.items() if path.endswith(ending)), None)


_SUFFIXES = {
    ".gz.metadata.json": SealedKind.GZIP_METADATA,
    ".metadata.json.gz": SealedKind.GZIP_METADATA,
    ".metadata.json": SealedKind.METADATA,
    ".avro": SealedKind.AVRO,
    ".parquet": SealedKind.PARQUET,
}


def seal_pairs(path: str) -> dict[str, str]:
    """Return the key-value pairs for the footer of a Parquet file, with placeholders for the checksums."""
    return dict.fromkeys(SEAL_KEYS, open_seal(path))


def sealed_table_file(data: bytes, path: str) -> bytes:
    """Return a metadata file, manifest or manifest list with new checksums, which replace existing checksums.

    Contents of another kind, or with a name that the file cannot contain, are returned unchanged. A Parquet file keeps
    its size, because its writer puts placeholders into the footer.

    Args:
        data: Contents of the file.
        path: Path of the file, whose name is part of the checksums.
    """
    seal = open_seal(path)
    match SealedKind.of(path):
        case SealedKind.METADATA if data[:1] == b"{" and data[-1:] == b"}" and _is_plain(seal):
            text = seal.encode()
            rest = _without_seals(data)
            opened = b'{"%b":"%b",%b,"%b":"%b"}' % (SEAL_KEYS[0].encode(), text, rest, SEAL_KEYS[1].encode(), text)
        case SealedKind.GZIP_METADATA if data[:4] == _GZIP_MAGIC + b"\0":
            extra = b"".join(key + struct.pack("<H", len(seal.encode())) + seal.encode() for key in _GZIP_SUBFIELDS)
            start = _GZIP_HEADER.size
            flags = bytes([_GZIP_HAS_EXTRA])
            opened = data[:3] + flags + data[4:start] + struct.pack("<H", len(extra)) + extra + data[start:]
        case SealedKind.AVRO if (header := AvroHeader.of(data)) is not None:
            opened = header.with_metadata(dict.fromkeys(SEAL_KEYS, seal.encode())) + data[header.size_bytes :]
        case SealedKind.PARQUET:
            opened = data
        case _:
            return data
    return sealed(opened, path)


def sealed_footer(data: bytes, path: str, crc: int) -> bytes | None:
    """Return the end of a Parquet file with the digits of its checksums filled in.

    Args:
        data: The footer of the file.
        path: Path of the file.
        crc: CRC-32C of the whole file as it was written, with placeholders.

    Returns:
        The footer, or None if it has no placeholders.
    """
    blank = open_seal(path).encode()
    if data.count(blank) != len(SEAL_KEYS):
        return None
    return data.replace(blank, f"{crc:08x}".encode() + blank[8:])


def check_table_file(data: bytes, path: str) -> bool:
    """Verify a table file against its checksums.

    Args:
        data: Contents of the file.
        path: Path of the file.

    Returns:
        Whether it has a checksum.

    Raises:
        CorruptFileError: The file was damaged, or replaced by another file.
    """
    kind = SealedKind.of(path)
    if kind is None:
        return False
    seals = _FIND[kind](data)
    if seals == (None, None):
        _check_unsealed(data, path)
        return False
    return check_seals(data, seals, path)


class PieceCheck:
    """Verifies a Parquet file piece by piece. Files of other kinds are not verified."""

    def __init__(self, path: str):
        self._path = path
        self._is_parquet = SealedKind.of(path) is SealedKind.PARQUET
        self._crc = 0
        self._size_bytes = 0
        self._end = b""

    def add(self, piece: bytes) -> None:
        """Add the next bytes of the file."""
        if self._is_parquet:
            self._crc = google_crc32c.extend(self._crc, piece)
            self._size_bytes += len(piece)
            self._end = (self._end + piece)[-_KEPT_END_BYTES:]

    def finish(self, read_end: Callable[[int], bytes]) -> bool:
        """Verify the file, and return whether it has a checksum.

        Args:
            read_end: Returns a given number of the file's last bytes. Called for large footers.

        Raises:
            CorruptFileError: The file was damaged, or replaced by another file.
        """
        if not self._is_parquet:
            return False
        end = self._end
        if footer_bytes(end) > len(end) and self._size_bytes > len(end):
            end = end_with_claims(end, self._size_bytes, read_end, self._path)
        seals = _in_parquet(end)
        if seals == (None, None):
            _check_unsealed(end, self._path)
            return False
        return check_seals(end, seals, self._path, crc=self._crc)


def _check_unsealed(data: bytes, path: str) -> None:
    """Raise CorruptFileError if the file's checksum is in the file, but not at the expected offset."""
    name = b" " + path.rpartition("/")[2].encode(errors="surrogatepass")
    at = data.find(name)  # a regular expression could block the interpreter for a second
    while at >= 0 and not _DIGITS.fullmatch(data, max(0, at - 8), at):
        at = data.find(name, at + 1)
    if at >= 0:
        raise CorruptFileError(f"{path!r} is damaged: its checksums are misplaced; restore it", path=path)


def _is_plain(text: str) -> bool:
    return json.dumps(text, ensure_ascii=False) == f'"{text}"' and text.isprintable()


def unsealed_json(text: bytes) -> bytes:
    """Return the JSON object of a metadata file without its checksums."""
    return b"{%b}" % _without_seals(text)


def _without_seals(data: bytes) -> bytes:
    """Return the text between the braces of a JSON object, without the checksums at its start and end."""
    first = _JSON_FIRST.match(data)
    last = _JSON_LAST.search(data, max(0, len(data) - _MAX_MEMBER_BYTES))
    return data[1 if first is None else first.end() : len(data) - 1 if last is None else last.start()]


def _decoded(value: bytes | None) -> str | None:
    # A checksum that is not UTF-8 will differ from the other one, so the file counts as damaged.
    return None if value is None else value.decode(errors="surrogateescape")


def _in_json(data: bytes) -> _Seals:
    first = _JSON_FIRST.match(data)
    last = _JSON_LAST.search(data, max(0, len(data) - _MAX_MEMBER_BYTES))
    return _decoded(first and first[1]), _decoded(last and last[1])


def _in_gzip(data: bytes) -> _Seals:
    start = _GZIP_HEADER.size
    if len(data) < start + 2 or data[:3] != _GZIP_MAGIC or not data[3] & _GZIP_HAS_EXTRA:
        return None, None
    extra = data[start + 2 : start + 2 + int.from_bytes(data[start : start + 2], "little")]
    subfields: dict[bytes, bytes] = {}
    offset = 0
    while offset + 4 <= len(extra):
        length = int.from_bytes(extra[offset + 2 : offset + 4], "little")
        subfields[extra[offset : offset + 2]] = extra[offset + 4 : offset + 4 + length]
        offset += 4 + length
    return _decoded(subfields.get(_GZIP_SUBFIELDS[0])), _decoded(subfields.get(_GZIP_SUBFIELDS[1]))


def _in_avro(data: bytes) -> _Seals:
    header = AvroHeader.of(data)
    metadata = {} if header is None else header.metadata
    return _decoded(metadata.get(SEAL_KEYS[0])), _decoded(metadata.get(SEAL_KEYS[1]))


def _in_parquet(data: bytes) -> _Seals:
    try:
        pairs = read_footer(data, "").metadata or {}
    except CorruptFileError:  # reported by the reader of the file
        pairs = {}
    return _decoded(pairs.get(SEAL_KEYS[0].encode())), _decoded(pairs.get(SEAL_KEYS[1].encode()))


_FIND: dict[SealedKind, Callable[[bytes], _Seals]] = {
    SealedKind.METADATA: _in_json,
    SealedKind.GZIP_METADATA: _in_gzip,
    SealedKind.AVRO: _in_avro,
    SealedKind.PARQUET: _in_parquet,
}
