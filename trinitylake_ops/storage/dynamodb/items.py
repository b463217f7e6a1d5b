"""Files as items of a table: one item, or several parts.

A record of the upload stands from before the first part until after the last. Where a writer died, the record is still
there: the sweep finds it, and removes parts that no item names.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.errors import AmbiguousWriteError, InvalidLocationError, StorageError, TransientError
from trinitylake_ops.storage.dynamodb.client import TableRequests
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, ROOT_KEY, DynamoDBLocation, Key
from trinitylake_ops.storage.http.requests import Request
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.storage.retry import retry_listing

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


logger = logging.getLogger(__name__)

#: Parts that nothing names are removed when their upload is so old, by the server's clock.
ORPHAN_AGE_MS = 2 * 60 * 60 * 1000
#: A writer gives up an upload that took so long. Until the age above, its last request has long lost its signature.
MAX_UPLOAD_MS = 30 * 60 * 1000
#: A request about parts is not repeated after that, for the retries around the storage repeat the whole operation.
LONGEST_REPEATED_SECONDS = 10.0
#: The most items of one BatchWriteItem.
BATCH_ITEMS = 25

_retry_listing = functools.partial(retry_listing, longest_s=LONGEST_REPEATED_SECONDS)


class Parts:
    """The parts of the files of one root."""

    def __init__(self, location: DynamoDBLocation, requests: TableRequests, concurrency: int):
        self._location = location
        self._requests = requests
        self._concurrency = concurrency

    # --- write ---------------------------------------------------------------------------------

    def put(self, operation: Request, path: str, body: bytes) -> Upload:
        """Write all parts of a file under a fresh id, and return their owner.

        The file itself is untouched. Raises StorageError, after the parts that were written are removed again, and
        TransientError where nothing but time or another try helps.
        """
        upload = Upload.fresh(path, len(body), self._requests.now_ms())
        record = upload.record(self._location.upload_key(upload.id))
        self._prepared(operation, path, record)

        has_failed = threading.Event()

        def put_part(number: int) -> None:
            if has_failed.is_set():
                return
            key = self._location.part_key(upload.id, number)
            data = body[number * PART_BYTES : (number + 1) * PART_BYTES]
            try:
                self._prepared(operation, path, part(key, data))
            except BaseException:
                has_failed.set()
                raise

        try:
            run_parallel(put_part, range(upload.n_parts), self._concurrency)
            self.check_age(upload)
        except BaseException:
            self.drop(upload)
            raise
        return upload

    def check_age(self, upload: Upload) -> None:
        """Raise TransientError for an upload that took so long that a sweep may soon take it for left over."""
        if self._requests.now_ms() - upload.began_ms > MAX_UPLOAD_MS:
            raise TransientError(
                f"writing the parts of {upload.path!r} took more than {MAX_UPLOAD_MS // 60_000} minutes; give the "
                "table more capacity, or write smaller files",
                path=upload.path,
            )

    def _prepared(self, operation: Request, path: str, item: dict[str, Any]) -> None:
        """Write an item that nothing names yet. A lost answer loses nothing but time."""
        try:
            _retry_listing(self._requests.send, operation, path, "put_item", Item=item)
        except AmbiguousWriteError as error:
            lost = TransientError(error.message, path=path)
        else:
            return
        raise lost

    # --- read ----------------------------------------------------------------------------------

    def read(self, file: StoredFile, offset: int, length: int | None) -> bytes | None:
        """Return the bytes of a range, from the parts that it touches; None when a part is gone. Raises StorageError.

        That is so after the file was overwritten or deleted.
        """
        end = file.size_bytes if length is None else min(offset + length, file.size_bytes)
        if offset >= end:
            return b""
        size = file.part_bytes
        first, last = offset // size, (end - 1) // size

        def get_part(number: int) -> bytes | None:
            key = self._location.part_key(file.upload or "", number)
            response = _retry_listing(
                self._requests.send, Request.READ, file.path, "get_item", Key=key, ConsistentRead=True
            )
            return part_body(response["Item"]) if "Item" in response else None

        found = run_parallel(get_part, range(first, last + 1), self._concurrency)
        pieces = [piece for piece in found if piece is not None]
        if len(pieces) < len(found):
            return None
        data = b"".join(pieces)
        return data[offset - first * size : end - first * size]

    # --- remove --------------------------------------------------------------------------------

    def drop(self, upload: Upload | None) -> None:
        """Remove parts that no item names any more. What cannot be removed now is left to a sweep."""
        if upload is None:
            return
        try:
            self._remove(upload)
        except StorageError as error:
            logger.warning("parts of %r stay until a sweep removes them: %s", upload.path, error)

    def _remove(self, upload: Upload) -> None:
        numbers = range(upload.n_parts)
        batches = [numbers[start : start + BATCH_ITEMS] for start in range(0, len(numbers), BATCH_ITEMS)]

        def delete_parts(batch: Sequence[int]) -> None:
            keys = [self._location.part_key(upload.id, number) for number in batch]
            _retry_listing(self._delete_all, upload.path, keys)

        run_parallel(delete_parts, batches, self._concurrency)
        key = self._location.upload_key(upload.id)
        _retry_listing(self._requests.send, Request.DELETE, upload.path, "delete_item", Key=key)

    def _delete_all(self, path: str, keys: list[Key]) -> None:
        if self.delete_items(path, keys):
            raise TransientError(f"some parts of {path!r} could not be deleted now; retry", path=path)

    def delete_items(self, path: str, keys: Sequence[Key]) -> list[Key]:
        """Delete up to 25 items in one request, and return the keys that the server left for later."""
        table = self._location.table
        deletes = [{"DeleteRequest": {"Key": dict(key)}} for key in keys]
        response = self._requests.send(Request.DELETE, path, "batch_write_item", RequestItems={table: deletes})
        left = response.get("UnprocessedItems", {}).get(table, ())
        return [request["DeleteRequest"]["Key"] for request in left]

    # --- sweep ---------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Remove the parts of dead writers, and of deletes that were cut off. Returns how many uploads they were.

        Only uploads count that began two hours ago by the server's clock, and that the item of their file does not
        name. Raises StorageError.
        """
        latest_ms = self._requests.now_ms() - ORPHAN_AGE_MS
        old = [upload for upload in self._uploads() if upload.began_ms < latest_ms]
        left = [upload for upload in run_parallel(self._unnamed, old, self._concurrency) if upload is not None]
        for upload in left:
            self._remove(upload)
        return len(left)

    def _unnamed(self, upload: Upload) -> Upload | None:
        key = self._location.key(upload.path)
        response = retry_listing(
            self._requests.send, Request.STAT, upload.path, "get_item", Key=key, ConsistentRead=True,
            ProjectionExpression=OWNED, ExpressionAttributeNames=OWNED_NAMES,
        )  # fmt: skip
        is_named = "Item" in response and StoredFile.of_item(response["Item"]).upload == upload.id
        return None if is_named else upload

    def _uploads(self) -> Iterator[Upload]:
        for item in self.items_below(self._location.upload_partition(), ""):
            yield Upload.of_item(item)

    def items_below(self, partition: str, prefix: str, **shown: Any) -> Iterator[Item]:
        """Yield all items of a partition key whose sort key starts with a string, in pages.

        The first page is asked for once, later ones again where they fail in passing. ``shown`` are further arguments
        of Query, with names of attributes.
        """
        names = {"#root": ROOT_KEY, **shown.pop("ExpressionAttributeNames", {})}
        values = {":root": {"S": partition}}
        condition = "#root = :root"
        if prefix:
            names["#path"] = PATH_KEY
            values[":start"] = {"S": prefix}
            condition += " AND begins_with(#path, :start)"
        arguments = {
            "KeyConditionExpression": condition, "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": values, "ConsistentRead": True, **shown,
        }  # fmt: skip
        response = self._requests.send(Request.LIST, prefix, "query", **arguments)
        yield from response.get("Items", ())
        while last := response.get("LastEvaluatedKey"):
            response = retry_listing(
                self._requests.send, Request.LIST, prefix, "query", ExclusiveStartKey=last, **arguments
            )
            if response.get("LastEvaluatedKey") == last:
                raise StorageError(f"cannot list {prefix!r}: the server repeats itself", path=prefix)
            yield from response.get("Items", ())
