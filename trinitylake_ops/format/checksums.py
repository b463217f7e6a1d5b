"""Checksums within files, size limits for files that are read whole, and alternative names of a file.

Each file that this program writes contains its *seal* twice, in fields that its format ignores. A seal consists of
eight hex digits, which are the CRC-32C of the whole file with zeros in place of these digits, and of the file's name.
Every bit of the file is therefore covered, including those of the seal, and a file that replaced another file can be
distinguished from a damaged one. Another program may copy a seal into a file that it writes. Such a seal contains
another name and a wrong checksum, and is ignored.

A file system listing may return a name that differs from the written one. Nearly all our names are lower-case ASCII,
which no file system changes. Other files are identified by the UUID in their names.

Nodes, roots and all other files for which this module defines no limit have the storage's limit: 256 MiB by default.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import google_crc32c

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.file_names import is_unique_name
from trinitylake_ops.format.locations import is_uri

#: The names of the properties, keys or fields that contain the first and the second seal.
SEAL_KEYS = ("trinitylake.seal", "trinitylake.seal.2")

_DIGITS = 8
_SEAL = re.compile(r"([0-9a-f]{8}) (.+)", re.DOTALL)


def open_seal(path: str) -> str:
    """Return the seal for a file at ``path``, with zeros as its checksum. It is written into the file twice."""
    return f"{'0' * _DIGITS} {path.rpartition('/')[2]}"


def sealed(data: bytes, path: str) -> bytes:
    """Fill in the checksums of a file's seals. The size of the file does not change.

    Args:
        data: The content of the file, which contains the seal of :func:`open_seal` twice.
        path: The path where the file will be written.
    """
    blank = open_seal(path).encode()
    return data.replace(blank, f"{google_crc32c.value(data):0{_DIGITS}x}".encode() + blank[_DIGITS:])


def check_seals(
    data: bytes, seals: Sequence[str | None], path: str, *, crc: int | None = None, may_be_copy: bool = False
) -> bool:
    """Check a file against its two seals.

    An undamaged file whose seal contains another name is a copy if ``path`` is not a name that is unique to one file,
    or if ``may_be_copy`` is set. Otherwise, it replaced another file.

    Args:
        data: The content of the file, or only the end of the file if the end contains both seals and ``crc`` is passed.
        seals: The values of both ``SEAL_KEYS`` in the file; None for a missing one.
        path: The path of the file.
        crc: The CRC-32C of the whole file, if ``data`` is its end.
        may_be_copy: Whether a copy of another file is valid at this path.

    Returns:
        Whether the file has a valid checksum. False for a file without a seal, or with a seal that another program
        copied from another file.

    Raises:
        CorruptFileError: The file is damaged, or replaced another file.
    """
    first, second = seals
    if first is None and second is None:
        return False
    match = None if first is None or first != second else _SEAL.fullmatch(first)
    if match is None or first is None:
        raise CorruptFileError(f"{path!r} is damaged: its two checksums differ", path=path)
    blank = data.replace(first.encode(errors="surrogateescape"), open_seal(match[2]).encode(errors="surrogateescape"))
    checksum = google_crc32c.value(blank)
    if crc is not None:  # CRCs are linear and both files start alike, so their CRCs differ like the CRCs of their ends
        checksum ^= google_crc32c.value(data) ^ crc
    is_whole: bool = checksum == int(match[1], 16)
    if match[2] == path.rpartition("/")[2]:
        if not is_whole:
            raise CorruptFileError(f"{path!r} is damaged: its checksum does not match", path=path)
        return True
    if is_whole and not may_be_copy and is_unique_name(path):
        raise CorruptFileError(f"{path!r} was replaced by a copy of the file {match[2][:200]!r}", path=path)
    return is_whole


_UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
#: Names of nodes, definitions and export roots, whose UUID is unique to one file. Files of a table may share a UUID.
_CATALOG_NAME = re.compile(rf"({_UUID.pattern})\.(?:arrow|ipc|binpb)", re.IGNORECASE)


def folded(text: str) -> str:
    """Return the part of a text that case and normalization do not affect: its ASCII characters in lower case."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFD", text.casefold())
    return "".join(char for char in decomposed if char.isascii())


def name_identity(location: str) -> str:
    """Return the part of a location's file name that identifies the file.

    For a catalog file, this is only the UUID, because a file system may have replaced other characters.
    """
    name = location.rpartition("/")[2]
    match = _CATALOG_NAME.search(name)
    return match[1].lower() if match else folded(name)


class OtherNames:
    """The names under which required files may appear in a listing, in addition to their paths.

    Locations are paths or URIs. A URI may refer to a file under the same root by another name of the root, for example
    a link. Only hashes are stored; a collision only causes one additional file to be kept. Lower-case ASCII paths are
    not stored, because ``folded`` of a listed path is the path itself.
    """

    def __init__(self, locations: Iterable[str] = ()) -> None:
        self._hashes: set[int] = set()
        self.update(locations)

    def update(self, locations: Iterable[str]) -> None:
        """Add the alternative names of locations."""
        for location in locations:
            is_elsewhere = is_uri(location) if "://" in location else False
            if is_elsewhere or not (location.isascii() and location.islower()):
                has_uuid = is_elsewhere or _UUID.search(location.rpartition("/")[2]) is not None
                self._hashes.add(hash(name_identity(location) if has_uuid else folded(location)))

    def __contains__(self, path: object) -> bool:
        if not self._hashes or not isinstance(path, str):
            return False
        return hash(name_identity(path)) in self._hashes or hash(folded(path)) in self._hashes


class CompactUuidSet:
    """A set of strings that also supports lookups that ignore case and normalization."""

    def __init__(self) -> None:
        self._members: set[str] = set()
        self._folded: set[str] = set()

    def update(self, texts: Iterable[str]) -> None:
        """Add members."""
        for text in texts:
            self._members.add(text)
            self._folded.add(folded(text))

    def __contains__(self, text: object) -> bool:
        return text in self._members

    def has_like(self, text: str) -> bool:
        """Whether a member differs from a text only in case or normalization."""
        return folded(text) in self._folded


#: Maximum size of a small file with a few values: a lease, an owner file, the orphan barrier.
MAX_NOTE_BYTES = 1 << 20
#: Maximum size of a definition. A decoded definition can take a hundred times as much memory.
MAX_DEFINITION_BYTES = 64 << 20
#: Maximum size of a plan, an export manifest or a record of verified files, which contain one line per file.
MAX_FILE_LIST_BYTES = 1 << 30

#: Number of values that any JSON file may contain, and the file size required for each additional value.
_ALWAYS_ALLOWED_VALUES = 1_000_000
_BYTES_PER_VALUE = 16


def check_definition_size(size_bytes: int, path: str) -> None:
    """Raise CorruptFileError if a file exceeds the maximum size of a definition."""
    if size_bytes > MAX_DEFINITION_BYTES:
        raise CorruptFileError(
            f"{path!r} is damaged: it has {size_bytes} bytes, more than the limit of a definition,"
            f" {MAX_DEFINITION_BYTES}; restore it",
            path=path,
        )


def check_json_values(data: bytes, path: str) -> None:
    """Raise CorruptFileError if a JSON file has too many values for its size, because decoding would exhaust memory."""
    # Counting separators, including those in strings, is cheap.
    n_values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    limit = _ALWAYS_ALLOWED_VALUES + len(data) // _BYTES_PER_VALUE
    if n_values > limit:
        raise CorruptFileError(
            f"{path!r} is damaged: it has {n_values} values, more than the limit of {limit} for a file of {len(data)}"
            " bytes; restore it",
            path=path,
        )
