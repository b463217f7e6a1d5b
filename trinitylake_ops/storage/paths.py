"""Checks which paths, prefixes and roots every storage accepts (FORMAT.md, L1 and L2).

Names are literal: nothing is decoded, expanded or normalized. A name that could be read as another place than it spells
is refused.
"""

from __future__ import annotations

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError

#: The folder for temporary files of storages that need them. Listings leave it out unless asked for it.
TEMPORARY_PREFIX = "_ops/tmp/"

_NEVER_A_SEGMENT = frozenset({"", ".", ".."})


def check_path(path: str) -> None:
    """Refuse a path that is absolute, has an empty, ``.`` or ``..`` segment, or is no storable text.

    Raises InvalidLocationError.
    """
    if not _NEVER_A_SEGMENT.isdisjoint(path.split("/")):
        raise InvalidLocationError(
            f"{path!r} is no path below a root: give a relative path without empty, '.' or '..' segments", path=path
        )
    _check_text(path)


def check_prefix(prefix: str) -> None:
    """Refuse a prefix that no accepted path starts with, or that can be read as a way out of the root.

    The empty prefix and one that ends with ``/`` are fine. Raises InvalidLocationError.
    """
    if prefix == "":
        return
    check_path(prefix[:-1] if prefix.endswith("/") else prefix)


def check_range(path: str, offset: int, length: int | None) -> None:
    """Refuse a negative offset or length (bytes). Raises InvalidInputError."""
    if offset < 0 or (length is not None and length < 0):
        raise InvalidInputError(
            f"cannot read {path!r} at offset {offset} with length {length}: neither may be negative", path=path
        )


def is_hidden(path: str, prefix: str) -> bool:
    """Whether a listing of ``prefix`` leaves the file out because it is a temporary one."""
    return path.startswith(TEMPORARY_PREFIX) and not prefix.startswith(TEMPORARY_PREFIX)


def split_root(root_uri: str, scheme: str) -> tuple[str, str]:
    """Split a normalized root URI ``scheme://authority/path/`` into authority and path.

    The path begins and ends with ``/``, and may be only ``/``. Raises InvalidLocationError when the URI has another
    scheme, no final ``/``, or an empty, ``.`` or ``..`` segment.
    """
    start = f"{scheme}://"
    authority, slash, rest = root_uri.removeprefix(start).partition("/")
    if not root_uri.startswith(start) or not slash or not (rest == "" or rest.endswith("/")):
        raise InvalidLocationError(f"root {root_uri!r} must have the form {start}.../ with a final '/'")
    if rest:
        check_path(rest[:-1])
    _check_text(authority)
    return authority, f"/{rest}"


def _check_text(text: str) -> None:
    if "\0" in text:
        raise InvalidLocationError(f"{text!r} holds a NUL character: remove it", path=text)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidLocationError(f"{text!r} is no valid Unicode: remove the lone surrogate", path=text) from None
