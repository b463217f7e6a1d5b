"""Encode, decode and check sealed JSON files, and check the seals of other catalog files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from trinitylake_ops.errors import CorruptFileError, InvalidInputError
from trinitylake_ops.format.arrow_ipc import check_file_seals, footer_schema
from trinitylake_ops.format.checksums import (
    MAX_FILE_LIST_BYTES,
    SEAL_KEYS,
    check_json_values,
    check_seals,
    open_seal,
    sealed,
)
from trinitylake_ops.format.definitions import check_definition_file

_OBJECT_START = re.compile(rb"(?:\xef\xbb\xbf)?[ \t\r\n]*\{")


def encode_sealed_json(content: Mapping[str, Any], path: str, *, indent: int | None = None) -> bytes:
    """Encode a JSON file with one seal before its entries and one seal after them.

    Args:
        content: The entries of the JSON object.
        path: The path where the file will be written.
        indent: Number of spaces of indentation; None for a compact file.

    Raises:
        InvalidInputError: The file would exceed the size limit of readers.
    """
    first, second = SEAL_KEYS
    seal = open_seal(path)
    separators = (",", ":") if indent is None else None
    text = json.dumps({first: seal, **content, second: seal}, indent=indent, separators=separators)
    data = text.encode("ascii")
    if len(data) > MAX_FILE_LIST_BYTES:
        raise InvalidInputError(
            f"{path!r} is too large: it would list too many files and have {len(data)} bytes, more than the limit of"
            f" {MAX_FILE_LIST_BYTES}; run the operation in parts, with fewer versions or namespaces"
        )
    return sealed(data, path)


def decode_sealed_json(data: bytes, path: str) -> dict[str, Any]:
    """Decode a JSON file and check its seals, if any. Files of older releases have no seals.

    Args:
        data: The content of the file.
        path: The path of the file.

    Returns:
        The entries without the seals.

    Raises:
        CorruptFileError: The file is not a JSON object, is damaged, or replaced another file.
    """
    content = _object_in(data, path)
    check_seals(data, _seals_in(content, path), path)
    return {name: value for name, value in content.items() if name not in SEAL_KEYS}


def check_json_file(data: bytes, path: str) -> bool:
    """Check a JSON file against its seals. Return whether it has any. Raise CorruptFileError if the check fails."""
    return check_seals(data, _seals_in(_object_in(data, path), path), path)


def _object_in(data: bytes, path: str) -> dict[str, Any]:
    if _OBJECT_START.match(data) is None:  # checked before the whole file is decoded
        raise CorruptFileError(f"{path!r} is not a JSON object", path=path)
    check_json_values(data, path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path!r} is not valid JSON", path=path) from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path!r} is not a JSON object", path=path)
    return content


def _seals_in(content: Mapping[str, Any], path: str) -> tuple[str | None, str | None]:
    first, second = (content.get(name) for name in SEAL_KEYS)
    if not isinstance(first, str | None) or not isinstance(second, str | None):
        raise CorruptFileError(f"{path!r} is damaged: a checksum is not a string", path=path)
    return first, second


def check_file(data: bytes, path: str) -> bool:
    """Check a node, definition or JSON file against its seals.

    Args:
        data: The content of the file.
        path: The path of the file.

    Returns:
        Whether the file has a valid seal; False for other kinds of files.

    Raises:
        CorruptFileError: The file is damaged, or replaced another file.
    """
    if path.endswith((".arrow", ".ipc")):
        return check_file_seals(data, footer_schema(data, path), path)
    if path.endswith(".binpb"):
        return check_definition_file(data, path)
    return path.endswith(".json") and check_json_file(data, path)
