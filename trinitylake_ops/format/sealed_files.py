"""Sealed JSON files, and the checksum at the end of other files."""

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
    """Return the JSON file of an object for ``path``, with a seal before its entries and one after them.

    Raises InvalidInputError if the file would be larger than any that is read.
    """
    first, second = SEAL_KEYS
    seal = open_seal(path)
    separators = (",", ":") if indent is None else None
    text = json.dumps({first: seal, **content, second: seal}, indent=indent, separators=separators)
    data = text.encode("ascii")
    if len(data) > MAX_FILE_LIST_BYTES:
        raise InvalidInputError(
            f"{path!r} would have {len(data)} bytes, and nobody reads more than {MAX_FILE_LIST_BYTES}: it names"
            " too many files; do it in parts, of fewer versions or namespaces"
        )
    return sealed(data, path)


def decode_sealed_json(data: bytes, path: str) -> dict[str, Any]:
    """Return the object of a JSON file, without its seals; older files have none.

    Raises CorruptFileError for a file that holds no JSON object, is damaged, or took the place of another.
    """
    content = _object_in(data, path)
    check_seals(data, _seals_in(content, path), path)
    return {name: value for name, value in content.items() if name not in SEAL_KEYS}


def check_json_file(data: bytes, path: str) -> bool:
    """Check a JSON file against its seals. Returns whether it has any. Raises CorruptFileError."""
    return check_seals(data, _seals_in(_object_in(data, path), path), path)


def _object_in(data: bytes, path: str) -> dict[str, Any]:
    if _OBJECT_START.match(data) is None:  # before all of it becomes text
        raise CorruptFileError(f"{path!r} holds no JSON object", path=path)
    check_json_values(data, path)
    try:
        content = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise CorruptFileError(f"{path!r} holds no JSON", path=path) from error
    if not isinstance(content, dict):
        raise CorruptFileError(f"{path!r} holds no JSON object", path=path)
    return content


def _seals_in(content: Mapping[str, Any], path: str) -> tuple[str | None, str | None]:
    first, second = (content.get(name) for name in SEAL_KEYS)
    if not isinstance(first, str | None) or not isinstance(second, str | None):
        raise CorruptFileError(f"{path!r} is damaged: a checksum of it is no text", path=path)
    return first, second


def check_file(data: bytes, path: str) -> bool:
    """Check a node, definition or JSON file against its seals. Returns whether it has any.

    Returns False for files of other kinds. Raises CorruptFileError for a damaged file, or one in the place of another.
    """
    if path.endswith((".arrow", ".ipc")):
        return check_file_seals(data, footer_schema(data, path), path)
    if path.endswith(".binpb"):
        return check_definition_file(data, path)
    return path.endswith(".json") and check_json_file(data, path)
