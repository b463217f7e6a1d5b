"""Decoding of bytes that may be damaged."""

from __future__ import annotations

from collections.abc import Callable

from trinitylake_ops.errors import CorruptFileError


def corruption_error(decode: Callable[[bytes, str], object], data: bytes, path: str) -> CorruptFileError | None:
    """Return the CorruptFileError that ``decode`` raises, or None. Other exceptions are not caught."""
    try:
        decode(data, path)
    except CorruptFileError as error:
        return error
    return None
