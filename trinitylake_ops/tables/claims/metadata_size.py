"""Bounds of the Iceberg metadata of one table: what a commit may write, and what a server parses in a request.

A parser occupies the interpreter, so that all requests of a server wait for it. Maintenance reads larger files.
"""

from __future__ import annotations

from trinitylake_ops.errors import MetadataTooLargeError

#: The largest metadata that a server reads, as JSON. 10,000 snapshots take up to 10 MB, and a schema of 5,000 columns
#: 0.5 MB.
MAX_METADATA_BYTES = 32 << 20
#: The most JSON objects in it. A snapshot is two, and a column is one. Each takes some 10 microseconds to parse.
MAX_METADATA_OBJECTS = 250_000
_OBJECT = b"{"
#: What the seals of a file and later changes of its form may add to the JSON of a commit.
_ROOM_BYTES = 4_096


def metadata_too_large(uri: str, n_bytes: int, limit_bytes: int) -> MetadataTooLargeError:
    """Return the error for a metadata file of which a server reads no more than ``limit_bytes``.

    Args:
        uri: The metadata file.
        n_bytes: Its size, or that of the JSON in it.
        limit_bytes: The largest size that is read.
    """
    return MetadataTooLargeError(
        f"{uri!r} is not read by the server: the metadata has {n_bytes} bytes, more than {limit_bytes}; its operator"
        " drops snapshots with 'trinitylake trim', or rolls the table back to an older version",
        path=uri,
    )


def check_served_size(text: bytes, uri: str, limit_bytes: int) -> None:
    """Check that a server may parse the JSON of metadata.

    Args:
        text: The JSON.
        uri: The metadata file.
        limit_bytes: The largest size that is read.

    Raises:
        MetadataTooLargeError: If it has more bytes, or more than :data:`MAX_METADATA_OBJECTS`.
    """
    if len(text) > limit_bytes:
        raise metadata_too_large(uri, len(text), limit_bytes)
    n_objects = text.count(_OBJECT)
    if n_objects > MAX_METADATA_OBJECTS:
        raise MetadataTooLargeError(
            f"{uri!r} is not read by the server: the metadata has {n_objects} JSON objects, more than"
            f" {MAX_METADATA_OBJECTS}; its operator drops snapshots with 'trinitylake trim', or rolls the table back to"
            " an older version",
            path=uri,
        )


def excess_of(text: bytes) -> str | None:
    """Return by what the JSON of metadata exceeds what a commit may write, None if it does not."""
    if len(text) > MAX_METADATA_BYTES - _ROOM_BYTES:
        return f"{len(text)} bytes, more than {MAX_METADATA_BYTES - _ROOM_BYTES}"
    n_objects = text.count(_OBJECT)
    return f"{n_objects} JSON objects, more than {MAX_METADATA_OBJECTS}" if n_objects > MAX_METADATA_OBJECTS else None


def is_smaller(text: bytes, before: bytes) -> bool:
    """Whether metadata has become smaller, so that a commit may write it although it is too large.

    Args:
        text: The JSON of the new metadata.
        before: The JSON of the metadata so far.
    """
    return len(text) < len(before) and text.count(_OBJECT) <= before.count(_OBJECT)
