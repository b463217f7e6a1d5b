"""Validation of paths, prefixes and roots for all storages (FORMAT.md, L1 and L2).

Paths are literal: nothing is decoded, expanded or normalized. A path that could be interpreted as another path is
rejected.
"""

from __future__ import annotations

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError

#: Folder of temporary files. Listings omit it unless their prefix starts with it.
TEMPORARY_PREFIX = "_ops/tmp/"

_INVALID_SEGMENTS = frozenset({"", ".", ".."})


def check_path(path: str) -> None:
    """Raise InvalidLocationError if a path is absolute, or has an empty, ``.`` or ``..`` segment or invalid text."""
    if not _INVALID_SEGMENTS.isdisjoint(path.split("/")):
        raise InvalidLocationError(
            f"{path!r} is not a valid path: use a relative path without empty, '.' and '..' segments", path=path
        )
    _check_text(path)


def check_prefix(prefix: str) -> None:
    """Raise InvalidLocationError if no valid path starts with a prefix. The prefix may be empty, or end with ``/``."""
    if prefix == "":
        return
    check_path(prefix[:-1] if prefix.endswith("/") else prefix)


def check_range(path: str, offset: int, length: int | None) -> None:
    """Raise InvalidInputError if the offset or the length of a range is negative.

    Args:
        path: Path of the file, for the message.
        offset: First byte of the range.
        length: Length of the range, if it is limited.
    """
    if offset < 0 or (length is not None and length < 0):
        raise InvalidInputError(
            f"cannot read {path!r} at offset {offset} with length {length}: they must not be negative", path=path
        )


def is_hidden(path: str, prefix: str) -> bool:
    """Whether a listing of ``prefix`` omits ``path`` because it is a temporary file."""
    return path.startswith(TEMPORARY_PREFIX) and not prefix.startswith(TEMPORARY_PREFIX)


def split_root(root_uri: str, scheme: str) -> tuple[str, str]:
    """Split a normalized root URI ``scheme://authority/path/`` into authority and path.

    Args:
        root_uri: The root URI.
        scheme: Required scheme.

    Returns:
        The authority, and the path, which begins and ends with ``/`` and may be only ``/``.

    Raises:
        InvalidLocationError: The URI has another scheme, no trailing ``/``, or an empty, ``.`` or ``..`` segment.
    """
    start = f"{scheme}://"
    authority, slash, rest = root_uri.removeprefix(start).partition("/")
    if not root_uri.startswith(start) or not slash or not (rest == "" or rest.endswith("/")):
        raise InvalidLocationError(f"invalid root {root_uri!r}: it must have the form {start}.../")
    if rest:
        check_path(rest[:-1])
    _check_text(authority)
    return authority, f"/{rest}"


def _check_text(text: str) -> None:
    if "\0" in text:
        raise InvalidLocationError(f"{text!r} contains a NUL character; remove it", path=text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidLocationError(f"{text!r} is not valid Unicode; remove the lone surrogate", path=text) from None
