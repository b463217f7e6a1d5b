"""Types of values in a policy: durations, sizes and times of day, as texts that people write."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainSerializer

_DAY_MS = 86_400_000
#: The longest duration, except for the age of versions, which the lakehouse stores in milliseconds.
MAX_MS = 1_000_000 * _DAY_MS
_UINT64 = 2**64 - 1
_UINT32 = 2**32 - 1

_UNIT_MS = {"d": _DAY_MS, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION = re.compile(r"(\d{1,20})(d|h|m|s|ms)", re.ASCII)
_UNIT_BYTES = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
_SIZE = re.compile(r"(\d{1,19})(TiB|GiB|MiB|KiB|B)", re.ASCII)
_MAX_BYTES = 2**63 - 1
_CLOCK = re.compile(r"([01]\d|2[0-3]):([0-5]\d)", re.ASCII)
_MINUTES_PER_HOUR = 60


def parse_duration_ms(text: Any) -> int:
    """Parse a duration such as 30d, 12h, 90m, 45s or 250ms. Raises ValueError."""
    match = _DURATION.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError("use a duration such as 30d, 12h, 90m or 45s")
    return int(match[1]) * _UNIT_MS[match[2]]


def duration_text(duration_ms: int) -> str:
    """Format a duration in the largest unit that needs no fraction."""
    unit = next(unit for unit, size_ms in _UNIT_MS.items() if duration_ms % size_ms == 0)
    return f"{duration_ms // _UNIT_MS[unit]}{unit}"


def parse_size_bytes(value: Any) -> Any:
    """Parse a size such as 512MiB. A number is a number of bytes. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = _SIZE.fullmatch(value)
    if match is None:
        raise ValueError("use a number of bytes, or a size such as 512MiB, 64GiB or 1TiB")
    return int(match[1]) * _UNIT_BYTES[match[2]]


def size_text(size_bytes: int) -> str:
    """Format a size in the largest binary unit that needs no fraction."""
    unit = next(unit for unit, unit_bytes in _UNIT_BYTES.items() if size_bytes % unit_bytes == 0)
    return f"{size_bytes // _UNIT_BYTES[unit]}{unit}" if size_bytes else "0B"


def parse_clock_minutes(text: Any) -> int:
    """Parse a time of day such as 22:30 as minutes since midnight. Raises ValueError."""
    match = _CLOCK.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise ValueError("use a time of day from 00:00 to 23:59, in UTC")
    return int(match[1]) * _MINUTES_PER_HOUR + int(match[2])


def clock_text(minutes: int) -> str:
    """Format minutes since midnight as a time of day."""
    return "{:02}:{:02}".format(*divmod(minutes, _MINUTES_PER_HOUR))


_duration = (BeforeValidator(parse_duration_ms), PlainSerializer(duration_text))
#: A duration in milliseconds.
Duration = Annotated[int, Field(ge=0, le=MAX_MS), *_duration]
#: A duration in milliseconds, longer than 0.
PositiveDuration = Annotated[int, Field(ge=1, le=MAX_MS), *_duration]
#: An age that the lakehouse stores as an unsigned number of milliseconds.
StoredAge = Annotated[int, Field(ge=0, le=_UINT64), *_duration]
#: A size in bytes.
Size = Annotated[int, Field(ge=0, le=_MAX_BYTES), BeforeValidator(parse_size_bytes), PlainSerializer(size_text)]
#: A size in bytes of at least 1.
PositiveSize = Annotated[int, Field(ge=1, le=_MAX_BYTES), BeforeValidator(parse_size_bytes), PlainSerializer(size_text)]
#: A time of day in UTC, in minutes since midnight.
ClockTime = Annotated[int, BeforeValidator(parse_clock_minutes), PlainSerializer(clock_text)]
#: A number of versions, exports or snapshots.
Count = Annotated[int, Field(ge=0, le=_UINT32)]
#: A number of files or requests.
LargeCount = Annotated[int, Field(ge=0, le=_MAX_BYTES)]
