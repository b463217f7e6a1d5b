"""Checksums that a file carries within itself (FORMAT.md, "Checksums").

A file that we write holds its *seal* twice, at places that its format leaves free. A seal is eight hex digits, the
CRC-32C of the whole file with zeros in the place of these digits, and the file's own name. So every bit counts, the
seal's own too. A file that took the place of another one can be told from a damaged one. Other programs may carry a
seal on into a file that they write. It then names another file and its digits are wrong, so it means nothing there.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import google_crc32c

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.file_names import names_one_file

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
    if is_whole and not may_be_copy and names_one_file(path):
        raise CorruptFileError(f"{path!r} is the file {match[2][:200]!r}, which took its place", path=path)
    return is_whole
