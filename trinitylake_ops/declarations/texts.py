"""Parse times, durations and ``NAME=VALUE`` pairs of options. This module does not load pydantic."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta

from trinitylake_ops.errors import InvalidInputError

MAX_DAYS = 1_000_000

_UNIT_SECONDS: Mapping[str, int] = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_DURATION = re.compile(r"(\d{1,9})([dhms])", re.ASCII)
_MILLIS = re.compile(r"\d{1,15}", re.ASCII)


def time_of(text: str) -> datetime | int:
    """Parse a time: ISO 8601, in UTC unless it has an offset, or milliseconds since 1970.

    Raises InvalidInputError.
    """
    if _MILLIS.fullmatch(text):
        return int(text)
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInputError(
            f"{text!r} is not a time; use ISO 8601, such as 2026-01-31T12:00, or milliseconds since 1970"
        ) from None
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def duration_of(text: str) -> timedelta:
    """Parse a duration such as 30d, 12h, 90m or 45s. Raises InvalidInputError."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise InvalidInputError(f"{text!r} is not a duration; use a form such as 30d, 12h, 90m or 45s")
    seconds = int(match[1]) * _UNIT_SECONDS[match[2]]
    if seconds > MAX_DAYS * _UNIT_SECONDS["d"]:
        raise InvalidInputError(f"{text!r} is longer than {MAX_DAYS:,} days")
    return timedelta(seconds=seconds)


def parse_properties(texts: Iterable[str], option: str) -> dict[str, str]:
    """Parse ``NAME=VALUE`` strings.

    Messages do not repeat the strings, because a value may be a credential.

    Args:
        texts: The strings.
        option: The option's name, for messages.

    Raises:
        InvalidInputError: A string has no name or no equals sign, or two strings have the same name.
    """
    properties: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise InvalidInputError(f"{option} takes NAME=VALUE; a name or the equals sign is missing")
        if name in properties:
            raise InvalidInputError(f"{option} has two values for one name; pass each name once")
        properties[name] = value
    return properties


def duration_text(duration: timedelta) -> str:
    """Format a duration in the largest unit that needs no fraction. Fractions of a second are dropped."""
    seconds = duration // timedelta(seconds=1)
    unit = next(unit for unit, size in _UNIT_SECONDS.items() if seconds % size == 0)
    return f"{seconds // _UNIT_SECONDS[unit]}{unit}"
