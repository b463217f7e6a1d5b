"""The form of numbers, times and names on pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.filesize import decimal

from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.maintenance.plans.document import visible
from trinitylake_ops.versions.snapshot import utc_of

_MOST_RANGES = 8


def utc(time_ms: int) -> str:
    """Return a time as people read it, in UTC."""
    return f"{utc_of(time_ms):%Y-%m-%d %H:%M:%S} UTC"


def size(size_bytes: int) -> str:
    """Return a size with its unit."""
    return str(decimal(size_bytes))


def counted(number: int, one: str, many: str | None = None) -> str:
    """Return a number of things: 1 version, 2 versions."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def clipped(text: str, most_chars: int) -> str:
    """Return foreign text on one line, control characters as escapes, cut where it is too long."""
    shown = visible(text[:most_chars])
    return shown if len(shown) <= most_chars and len(text) <= most_chars else shown[: most_chars - 1] + "…"


def listed(parts: Sequence[str]) -> str:
    """Return parts as a sentence lists them: a, b and c."""
    return " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))


def ago(duration_ms: int) -> str:
    """Return how long ago something was, in one unit."""
    seconds = duration_ms // 1000
    for name, length in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * length:
            return f"{counted(seconds // length, name)} ago"
    return "just now" if seconds < 60 else "1 minute ago"


def ranges(versions: Iterable[int]) -> str:
    """Return versions as ranges, the newest first, as many as can be read."""
    found = VersionRanges.of(versions).ranges
    shown = [f"{first:,}" if first == last else f"{first:,}–{last:,}" for first, last in reversed(found)]
    more = len(shown) - _MOST_RANGES
    return ", ".join(shown[:_MOST_RANGES]) + (f" and {counted(more, 'range')} more" if more > 0 else "")


def span(versions: range) -> str:
    """Return versions that follow each other: version 3, versions 3 to 5."""
    return f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]:,} to {versions[-1]:,}"
