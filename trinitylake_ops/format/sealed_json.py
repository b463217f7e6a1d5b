"""JSON files of operations, between their two seals (FORMAT.md, "Checksums")."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import SEAL_KEYS, check_seals, open_seal, sealed


def encode_sealed_json(content: Mapping[str, Any], path: str, *, indent: int | None = None) -> bytes:
    """Return the JSON file of an object that will stand at ``path``, with a seal before and one after its entries."""
    first, second = SEAL_KEYS
    seal = open_seal(path)
    separators = (",", ":") if indent is None else None
    text = json.dumps({first: seal, **content, second: seal}, indent=indent, separators=separators)
    return sealed(text.encode("ascii"), path)


def decode_sealed_json(data: bytes, path: str) -> dict[str, Any]:
    """Return the object of a JSON file, without its seals; older files have none.

    Raises CorruptFileError for a file that holds no JSON object, is damaged, or stands in the place of another.
    """
    content = _object_in(data, path)
    check_seals(data, _seals_in(content, path), path)
    return {name: value for name, value in content.items() if name not in SEAL_KEYS}


def check_json_file(data: bytes, path: str) -> bool:
    """Check a JSON file against its seals; whether it has any. Raises CorruptFileError."""
    return check_seals(data, _seals_in(_object_in(data, path), path), path)


def _object_in(data: bytes, path: str) -> dict[str, Any]:
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
