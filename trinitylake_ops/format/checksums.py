"""Checksums within files, size bounds of files that are read whole, and names that may mean the same file.

A file that we write holds its *seal* twice, at places that its format leaves free. A seal is eight hex digits, the
CRC-32C of the whole file with zeros in the place of these digits, and the file's own name. So every bit counts, the
seal's own too. A file that took the place of another one can be told from a damaged one. Other programs may carry a
seal on into a file that they write. It then names another file and its digits are wrong, so it means nothing there.

A listing of such a file system may show another name than was written. Nearly all our names are in ASCII and in lower
case, which no file system changes. The others are identified by the uuid that each of our names holds.

Nodes, roots and all files without a bound here have the storage's bound: 256 MiB unless its options say more.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

import google_crc32c

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.file_names import is_unique_name
from trinitylake_ops.format.locations import is_uri

#: The name of the property, key or field that holds a seal. The second one's name ends with ``.2``.
SEAL_KEYS = ("trinitylake.seal", "trinitylake.seal.2")

_DIGITS = 8
_SEAL = re.compile(r"([0-9a-f]{8}) (.+)", re.DOTALL)


def open_seal(path: str) -> str:
    """Return the seal to write, twice, into a file that will be at ``path``. Its digits are not yet filled in."""
    return f"{'0' * _DIGITS} {path.rpartition('/')[2]}"


def sealed(data: bytes, path: str) -> bytes:
    """Return the bytes of a file with the digits of its seals filled in, of the same size."""
    blank = open_seal(path).encode()
    return data.replace(blank, f"{google_crc32c.value(data):0{_DIGITS}x}".encode() + blank[_DIGITS:])


def check_seals(
    data: bytes, seals: Sequence[str | None], path: str, *, crc: int | None = None, may_be_copy: bool = False
) -> bool:
    """Check a file against the two seals that were found in it. Returns whether it has a checksum.

    ``seals`` are the values of both ``SEAL_KEYS``, None where there is none. Returns False for a file without a seal,
    or with one that another program carried on. A whole file of another name is a copy if ``path`` is no name that we
    give, or if it ``may_be_copy``. A copy has a checksum. ``data`` may be the end of a file, if that holds both seals
    and ``crc`` is the CRC-32C of the whole file. Raises CorruptFileError for a file that was damaged, and for one that
    took the place of another.
    """
    first, second = seals
    if first is None and second is None:
        return False
    match = None if first is None or first != second else _SEAL.fullmatch(first)
    if match is None or first is None:
        raise CorruptFileError(f"{path!r} is damaged: its two checksums differ", path=path)
    blank = data.replace(first.encode(errors="surrogateescape"), open_seal(match[2]).encode(errors="surrogateescape"))
    found = google_crc32c.value(blank)
    if crc is not None:  # CRCs are linear. Both files begin alike, so their CRCs differ as those of their ends do.
        found ^= google_crc32c.value(data) ^ crc
    is_whole: bool = found == int(match[1], 16)
    if match[2] == path.rpartition("/")[2]:
        if not is_whole:
            raise CorruptFileError(f"{path!r} is damaged: its bytes are not those of its checksum", path=path)
        return True
    if is_whole and not may_be_copy and is_unique_name(path):
        raise CorruptFileError(f"{path!r} is the file {match[2][:200]!r}, which took its place", path=path)
    return is_whole


_UUID = re.compile("[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.IGNORECASE)
#: One uuid, one file: nodes, definitions, roots of exports. Several of a table's files may share one.
_CATALOG_NAME = re.compile(rf"({_UUID.pattern})\.(?:arrow|ipc|binpb)", re.IGNORECASE)


def folded(text: str) -> str:
    """Return the part of a text that no case or normalization changes: ASCII, in lower case, without marks."""
    if text.isascii():
        return text.lower()
    decomposed = unicodedata.normalize("NFD", text.casefold())
    return "".join(char for char in decomposed if char.isascii())


def name_identity(location: str) -> str:
    """Return the part of a location's last name that tells its file from all others.

    For a file of the catalog this is the uuid alone, even if a file system replaced characters.
    """
    name = location.rpartition("/")[2]
    match = _CATALOG_NAME.search(name)
    return match[1].lower() if match else folded(name)


class OtherNames:
    """The names that needed files may have in a listing, beside their own paths.

    Locations are paths or URIs. A URI may lead under the same root by another name of it, such as a link. Only a hash
    of each is kept: two names that share one only spare a file too many. Nothing is kept of a path in ASCII and in
    lower case, as ``folded`` of a listed path is such a path.
    """

    def __init__(self, locations: Iterable[str] = ()) -> None:
        self._hashes: set[int] = set()
        self.update(locations)

    def update(self, locations: Iterable[str]) -> None:
        """Add the other names of locations."""
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
    """A set of texts, which also tells whether a text resembles a member."""

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
        """Whether a member differs in nothing but case and normalization."""
        return folded(text) in self._folded


#: A lease, an owner file, the orphan barrier: a few texts and numbers.
MAX_NOTE_BYTES = 1 << 20
#: A definition: decoded, each of its parts takes a hundred times as much memory.
MAX_DEFINITION_BYTES = 64 << 20
#: A plan, the manifest of an export or a record of verified files: a line for each of millions of files.
MAX_FILE_LIST_BYTES = 1 << 30

#: Values that any JSON file of an operation may hold, and bytes for each one more.
_ALWAYS_ALLOWED_VALUES = 1_000_000
_BYTES_PER_VALUE = 16


def check_definition_size(size_bytes: int, path: str) -> None:
    """Raise CorruptFileError for a definition that is too large to be one."""
    if size_bytes > MAX_DEFINITION_BYTES:
        raise CorruptFileError(
            f"{path!r} has {size_bytes} bytes, and no definition more than {MAX_DEFINITION_BYTES}; restore it",
            path=path,
        )


def check_json_values(data: bytes, path: str) -> None:
    """Raise CorruptFileError for JSON with more values than a file of its size has. Each value takes tens of bytes."""
    # A count of the separators of values, also of those in strings, costs next to nothing.
    n_values = sum(data.count(mark) for mark in (b",", b"[", b"{"))
    limit = _ALWAYS_ALLOWED_VALUES + len(data) // _BYTES_PER_VALUE
    if n_values > limit:
        raise CorruptFileError(
            f"{path!r} holds {n_values} values, and no file of {len(data)} bytes more than {limit}; restore it",
            path=path,
        )
