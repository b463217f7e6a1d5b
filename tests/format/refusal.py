"""Decoding bytes that may be damaged."""

from __future__ import annotations

from collections.abc import Callable

from trinitylake_ops.errors import CorruptFileError


def refusal(decode: Callable[[bytes, str], object], data: bytes, path: str) -> CorruptFileError | None:
    """Return the error by which ``decode`` refuses the bytes, or None; any other exception goes on."""
    try:
        decode(data, path)
    except CorruptFileError as error:
        return error
    return None
