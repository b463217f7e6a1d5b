"""Ranges of HTTP: what a read asks for, and whether the answer is that."""

from __future__ import annotations

import re

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


def range_header(offset: int, length: int | None, name: str = "Range") -> dict[str, str]:
    """Return the header that asks for a range, if it is not the whole file. Lengths are positive."""
    if offset == 0 and length is None:
        return {}
    last = "" if length is None else str(offset + length - 1)
    return {name: f"bytes={offset}-{last}"}


def part_asked_for(
    data: bytes, content_range: str | None, size_bytes: int | None, offset: int, length: int | None
) -> bytes | None:
    """Return the bytes of the range, or None when the answer does not hold what its headers and the request say.

    ``size_bytes`` is the length that the answer gives, None if it gives none.
    """
    match = _CONTENT_RANGE.fullmatch(content_range or "")
    if match is None:  # the whole file, also if a server ignores ranges
        end = None if length is None else offset + length
        return data[offset:end] if size_bytes in (None, len(data)) else None
    first, last, total = (int(number) for number in match.groups())
    end = total if length is None else min(offset + length, total)
    return data if (first, last + 1, len(data)) == (offset, end, end - offset) else None
