"""Items of the table: files, and uploads, which own the parts of large files."""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, Key
from trinitylake_ops.storage.paths import check_path

Item = Mapping[str, Mapping[str, Any]]

#: The most bytes of an item, its names included. DynamoDB takes 409,600, emulators take less.
MAX_ITEM_BYTES = 400_000
#: Bytes of a part. Its key is at most 2 KiB, so its item stays far below the limit.
PART_BYTES = 384 * 1024

# DynamoDB reserves many words, "path" and "size" too, so expressions use the names in NAMES.
_BODY, _SIZE, _MODIFIED, _UPLOAD, _PART_BYTES = "body", "size_bytes", "modified_ms", "upload", "part_bytes"
_FILE, _N_PARTS = "file", "n_parts"
_LARGEST_NUMBER_BYTES = 21

#: What a list asks for, and the names in it.
LISTED = "#path, #size, #modified"
LISTED_NAMES = {"#path": PATH_KEY, "#size": _SIZE, "#modified": _MODIFIED}
#: What tells which parts a file has.
OWNED = "#path, #size, #upload, #part_bytes, #modified"
OWNED_NAMES = {**LISTED_NAMES, "#upload": _UPLOAD, "#part_bytes": _PART_BYTES}


@dataclass(frozen=True, slots=True)
class Upload:
    """The owner of parts: written before them, deleted after them.

    ``path`` is the file that they are for. ``began_ms`` is the storage's clock when it was written.
    """

    id: str
    path: str
    n_parts: int
    began_ms: int

    @classmethod
    def fresh(cls, path: str, size_bytes: int, began_ms: int) -> Upload:
        """Return an upload that nobody else has."""
        return cls(uuid.uuid4().hex, path, n_parts(size_bytes, PART_BYTES), began_ms)

    @classmethod
    def of_item(cls, item: Item) -> Upload:
        """Return the upload of its record. Raises KeyError and ValueError where it is none."""
        began_ms = int(item[_MODIFIED]["N"])
        return cls(item[PATH_KEY]["S"], item[_FILE]["S"], int(item[_N_PARTS]["N"]), began_ms)

    def record(self, key: Key) -> dict[str, Any]:
        """Return the item that records it."""
        return {**key, _FILE: {"S": self.path}, _N_PARTS: _number(self.n_parts), _MODIFIED: _number(self.began_ms)}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as its item has it: with its body, or with the upload that owns its parts."""

    path: str
    size_bytes: int
    modified_ms: int
    upload: str | None = None
    part_bytes: int = PART_BYTES
    body: bytes = b""

    @classmethod
    def of_item(cls, item: Item) -> StoredFile:
        """Return the file of an item, or of what a list shows of it. Raises KeyError and ValueError for no file."""
        upload = item[_UPLOAD]["S"] if _UPLOAD in item else None
        part_bytes = int(item[_PART_BYTES]["N"]) if upload else PART_BYTES
        size_bytes, modified_ms = int(item[_SIZE]["N"]), int(item[_MODIFIED]["N"])
        body = item[_BODY]["B"] if _BODY in item else b""
        path = item[PATH_KEY]["S"]
        try:
            check_path(path)
        except InvalidLocationError:
            raise ValueError("no file has such a path") from None
        if size_bytes < 0 or part_bytes <= 0:
            raise ValueError("no file has such a size")
        return cls(path, size_bytes, modified_ms, upload, part_bytes, body)

    @property
    def parts(self) -> Upload | None:
        """What owns the parts, if there are any."""
        if self.upload is None:
            return None
        return Upload(self.upload, self.path, n_parts(self.size_bytes, self.part_bytes), self.modified_ms)


def whole_file(key: Key, body: bytes, modified_ms: int) -> dict[str, Any]:
    """Return the item of a file with its body. An empty one has none, which not every server stores."""
    item = {**key, _SIZE: _number(len(body)), _MODIFIED: _number(modified_ms)}
    return {**item, _BODY: {"B": body}} if body else item


def file_of_parts(key: Key, size_bytes: int, modified_ms: int, upload: Upload) -> dict[str, Any]:
    """Return the item of a file that names its parts."""
    named = {_UPLOAD: {"S": upload.id}, _PART_BYTES: _number(PART_BYTES)}
    return {**key, _SIZE: _number(size_bytes), _MODIFIED: _number(modified_ms), **named}


def part(key: Key, body: bytes) -> dict[str, Any]:
    """Return the item of a part."""
    return {**key, _BODY: {"B": body}}


def part_body(item: Item) -> bytes:
    """Return the bytes of a part. Raises KeyError for another item."""
    body: bytes = item[_BODY]["B"]
    return body


def fits(key: Key, body: bytes) -> bool:
    """Whether a file with this body fits into one item."""
    names = sum(len(name) for name in (*key, _SIZE, _MODIFIED, _BODY))
    keys = sum(len(value["S"].encode()) for value in key.values())
    return names + keys + 2 * _LARGEST_NUMBER_BYTES + len(body) <= MAX_ITEM_BYTES


def n_parts(size_bytes: int, part_bytes: int) -> int:
    """Return how many parts so many bytes have."""
    return math.ceil(size_bytes / part_bytes)


def _number(value: int) -> dict[str, str]:
    return {"N": str(value)}
