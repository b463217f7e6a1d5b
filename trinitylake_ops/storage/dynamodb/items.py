"""Files as items of a table, with or without parts.

An upload record exists from before the first part is written until after the last part is deleted. If a writer dies,
the sweep finds the record and deletes the parts, unless the item of the file refers to them.
"""

from __future__ import annotations

import logging
import math
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from trinitylake_ops.errors import AmbiguousWriteError, InvalidLocationError, StorageError, TransientError
from trinitylake_ops.storage.dynamodb.client import TableRequests
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, ROOT_KEY, DynamoDBLocation, Key
from trinitylake_ops.storage.http.requests import Request
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.paths import check_path
from trinitylake_ops.storage.retry import retry_listing

T = TypeVar("T")
Item = Mapping[str, Mapping[str, Any]]

#: Maximum size of an item, including attribute names. DynamoDB allows 409,600 bytes; emulators allow less.
MAX_ITEM_BYTES = 400_000
#: Size of a part. With a key of up to 2 KiB, its item is far below the limit.
PART_BYTES = 384 * 1024

# DynamoDB reserves many words, including "path" and "size", so expressions use placeholders.
_BODY, _SIZE, _MODIFIED, _UPLOAD, _PART_BYTES = "body", "size_bytes", "modified_ms", "upload", "part_bytes"
_FILE, _N_PARTS = "file", "n_parts"
_LARGEST_NUMBER_BYTES = 21

#: Attributes that a listing reads, and their placeholders.
LISTED = "#path, #size, #modified"
LISTED_NAMES = {"#path": PATH_KEY, "#size": _SIZE, "#modified": _MODIFIED}
#: Attributes that identify the parts of a file.
OWNED = "#path, #size, #upload, #part_bytes, #modified"
OWNED_NAMES = {**LISTED_NAMES, "#upload": _UPLOAD, "#part_bytes": _PART_BYTES}


@dataclass(frozen=True, slots=True)
class Upload:
    """The parts of one write of a file. Its record is written before the parts and deleted after them."""

    id: str
    #: Path of the file.
    path: str
    n_parts: int
    #: Time on the storage's clock when the record was written, in milliseconds since the epoch.
    began_ms: int

    @classmethod
    def fresh(cls, path: str, size_bytes: int, began_ms: int) -> Upload:
        """Return a new upload.

        Args:
            path: Path of the file.
            size_bytes: Size of the file.
            began_ms: Current time on the storage's clock, in milliseconds since the epoch.
        """
        return cls(uuid.uuid4().hex, path, n_parts(size_bytes, PART_BYTES), began_ms)

    @classmethod
    def of_item(cls, item: Item) -> Upload:
        """Parse a record. Raise KeyError or ValueError if it is invalid."""
        began_ms = int(item[_MODIFIED]["N"])
        return cls(item[PATH_KEY]["S"], item[_FILE]["S"], int(item[_N_PARTS]["N"]), began_ms)

    def record(self, key: Key) -> dict[str, Any]:
        """Return the record as an item."""
        return {**key, _FILE: {"S": self.path}, _N_PARTS: _number(self.n_parts), _MODIFIED: _number(self.began_ms)}


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file as stored in its item."""

    path: str
    size_bytes: int
    #: Time of the last write on the storage's clock, in milliseconds since the epoch.
    modified_ms: int
    #: ID of the upload of the file's parts. None if the content is in the item.
    upload: str | None = None
    #: Size of each part except the last.
    part_bytes: int = PART_BYTES
    body: bytes = b""

    @classmethod
    def of_item(cls, item: Item) -> StoredFile:
        """Parse an item, or the attributes that a listing reads. Raise KeyError or ValueError if it is not a file."""
        upload = item[_UPLOAD]["S"] if _UPLOAD in item else None
        part_bytes = int(item[_PART_BYTES]["N"]) if upload else PART_BYTES
        size_bytes, modified_ms = int(item[_SIZE]["N"]), int(item[_MODIFIED]["N"])
        body = item[_BODY]["B"] if _BODY in item else b""
        path = item[PATH_KEY]["S"]
        try:
            check_path(path)
        except InvalidLocationError:
            raise ValueError("invalid path") from None
        if size_bytes < 0 or part_bytes <= 0:
            raise ValueError("invalid size")
        return cls(path, size_bytes, modified_ms, upload, part_bytes, body)

    @property
    def parts(self) -> Upload | None:
        """The upload of the parts, if there are any."""
        if self.upload is None:
            return None
        return Upload(self.upload, self.path, n_parts(self.size_bytes, self.part_bytes), self.modified_ms)


def whole_file(key: Key, body: bytes, modified_ms: int) -> dict[str, Any]:
    """Return the item of a file without parts. An empty file has no body, because some servers reject empty values.

    Args:
        key: Key of the item.
        body: Content of the file.
        modified_ms: Current time on the storage's clock, in milliseconds since the epoch.
    """
    item = {**key, _SIZE: _number(len(body)), _MODIFIED: _number(modified_ms)}
    return {**item, _BODY: {"B": body}} if body else item


def file_of_parts(key: Key, size_bytes: int, modified_ms: int, upload: Upload) -> dict[str, Any]:
    """Return the item of a file with parts.

    Args:
        key: Key of the item.
        size_bytes: Size of the file.
        modified_ms: Current time on the storage's clock, in milliseconds since the epoch.
        upload: The upload of the parts.
    """
    reference = {_UPLOAD: {"S": upload.id}, _PART_BYTES: _number(PART_BYTES)}
    return {**key, _SIZE: _number(size_bytes), _MODIFIED: _number(modified_ms), **reference}


def part(key: Key, body: bytes) -> dict[str, Any]:
    """Return the item of a part with this key and content."""
    return {**key, _BODY: {"B": body}}


def part_body(item: Item) -> bytes:
    """Return the content of a part. Raise KeyError if the item is not a part."""
    body: bytes = item[_BODY]["B"]
    return body


def fits(key: Key, body: bytes) -> bool:
    """Whether a file with this key and content fits into one item."""
    names = sum(len(name) for name in (*key, _SIZE, _MODIFIED, _BODY))
    keys = sum(len(value["S"].encode()) for value in key.values())
    return names + keys + 2 * _LARGEST_NUMBER_BYTES + len(body) <= MAX_ITEM_BYTES


def n_parts(size_bytes: int, part_bytes: int) -> int:
    """Return the number of parts of a file of ``size_bytes`` with parts of ``part_bytes``."""
    return math.ceil(size_bytes / part_bytes)


def _number(value: int) -> dict[str, str]:
    return {"N": str(value)}


logger = logging.getLogger(__name__)

#: Minimum age of an upload whose parts a sweep deletes, on the server's clock.
ORPHAN_AGE_MS = 2 * 60 * 60 * 1000
#: Maximum duration of an upload. The signature of its last request expires long before ``ORPHAN_AGE_MS``.
MAX_UPLOAD_MS = 30 * 60 * 1000
#: No retry of a part request starts after this time, because RetryStorage repeats the whole operation.
MAX_REPEATED_SECONDS = 10.0
#: Maximum number of items in a BatchWriteItem request.
BATCH_ITEMS = 25


def _retry_part(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    return retry_listing(call, *arguments, max_s=MAX_REPEATED_SECONDS, **options)


class Parts:
    """The parts of the files of one root."""

    def __init__(self, location: DynamoDBLocation, requests: TableRequests, concurrency: int):
        self._location = location
        self._requests = requests
        self._concurrency = concurrency

    # --- write ---------------------------------------------------------------------------------

    def put(self, operation: Request, path: str, body: bytes) -> Upload:
        """Write all parts of a file for a new upload. The item of the file is not changed.

        Args:
            operation: Operation of the storage, for error messages.
            path: Path of the file.
            body: Content of the file.

        Raises:
            TransientError: The write failed temporarily, or took too long.
            StorageError: The write failed. The parts that were written are deleted.
        """
        upload = Upload.fresh(path, len(body), self._requests.now_ms())
        record = upload.record(self._location.upload_key(upload.id))
        self._put_unreferenced(operation, path, record)

        has_failed = threading.Event()

        def put_part(number: int) -> None:
            if has_failed.is_set():
                return
            key = self._location.part_key(upload.id, number)
            data = body[number * PART_BYTES : (number + 1) * PART_BYTES]
            try:
                self._put_unreferenced(operation, path, part(key, data))
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
        """Raise TransientError if an upload took so long that a sweep might soon delete it."""
        if self._requests.now_ms() - upload.began_ms > MAX_UPLOAD_MS:
            raise TransientError(
                f"cannot write {upload.path!r}: its parts took more than {MAX_UPLOAD_MS // 60_000} minutes; increase"
                " the capacity of the table, or write smaller files",
                path=upload.path,
            )

    def _put_unreferenced(self, operation: Request, path: str, item: dict[str, Any]) -> None:
        """Write an item to which nothing refers yet, so that a lost response is only a transient error."""
        try:
            _retry_part(self._requests.send, operation, path, "put_item", Item=item)
        except AmbiguousWriteError as error:
            transient = TransientError(error.message, path=path)
        else:
            return
        raise transient

    # --- read ----------------------------------------------------------------------------------

    def read(self, file: StoredFile, offset: int, length: int | None) -> bytes | None:
        """Read a range from the parts that it overlaps.

        Args:
            file: A file with parts.
            offset: First byte of the range.
            length: Length of the range. None reads to the end of the file.

        Returns:
            The bytes, or None if a part is missing because the file was overwritten or deleted.

        Raises:
            StorageError: A request failed.
        """
        end = file.size_bytes if length is None else min(offset + length, file.size_bytes)
        if offset >= end:
            return b""
        size = file.part_bytes
        first, last = offset // size, (end - 1) // size

        def get_part(number: int) -> bytes | None:
            key = self._location.part_key(file.upload or "", number)
            response = _retry_part(
                self._requests.send, Request.READ, file.path, "get_item", Key=key, ConsistentRead=True
            )
            return part_body(response["Item"]) if "Item" in response else None

        bodies = run_parallel(get_part, range(first, last + 1), self._concurrency)
        existing = [body for body in bodies if body is not None]
        if len(existing) < len(bodies):
            return None
        data = b"".join(existing)
        return data[offset - first * size : end - first * size]

    # --- delete --------------------------------------------------------------------------------

    def drop(self, upload: Upload | None) -> None:
        """Delete parts to which no item refers anymore. If a deletion fails, a sweep deletes the parts later."""
        if upload is None:
            return
        try:
            self._remove(upload)
        except StorageError as error:
            logger.warning("cannot delete the parts of %r; a sweep will delete them: %s", upload.path, error)

    def _remove(self, upload: Upload) -> None:
        numbers = range(upload.n_parts)
        batches = [numbers[start : start + BATCH_ITEMS] for start in range(0, len(numbers), BATCH_ITEMS)]

        def delete_parts(batch: Sequence[int]) -> None:
            keys = [self._location.part_key(upload.id, number) for number in batch]
            _retry_part(self._delete_all, upload.path, keys)

        run_parallel(delete_parts, batches, self._concurrency)
        key = self._location.upload_key(upload.id)
        _retry_part(self._requests.send, Request.DELETE, upload.path, "delete_item", Key=key)

    def _delete_all(self, path: str, keys: list[Key]) -> None:
        if self.delete_items(path, keys):
            raise TransientError(f"cannot delete all parts of {path!r}: the server is busy; retry", path=path)

    def delete_items(self, path: str, keys: Sequence[Key]) -> list[Key]:
        """Delete up to 25 items in one request, and return the keys that the server did not process.

        Args:
            path: Path of the file, for error messages.
            keys: Keys of the items.
        """
        table = self._location.table
        deletes = [{"DeleteRequest": {"Key": dict(key)}} for key in keys]
        response = self._requests.send(Request.DELETE, path, "batch_write_item", RequestItems={table: deletes})
        unprocessed = response.get("UnprocessedItems", {}).get(table, ())
        return [request["DeleteRequest"]["Key"] for request in unprocessed]

    # --- sweep ---------------------------------------------------------------------------------

    def sweep(self) -> int:
        """Delete orphaned parts, which interrupted writes and deletes leave behind.

        An upload is orphaned if it began more than two hours ago on the server's clock, and the item of its file does
        not refer to it.

        Returns:
            The number of deleted uploads.

        Raises:
            StorageError: A request failed.
        """
        latest_ms = self._requests.now_ms() - ORPHAN_AGE_MS
        old = [upload for upload in self._uploads() if upload.began_ms < latest_ms]
        checked = run_parallel(self._if_orphaned, old, self._concurrency)
        orphaned = [upload for upload in checked if upload is not None]
        for upload in orphaned:
            self._remove(upload)
        return len(orphaned)

    def _if_orphaned(self, upload: Upload) -> Upload | None:
        """Return an upload if the item of its file does not refer to it, otherwise None."""
        key = self._location.key(upload.path)
        response = retry_listing(
            self._requests.send, Request.STAT, upload.path, "get_item", Key=key, ConsistentRead=True,
            ProjectionExpression=OWNED, ExpressionAttributeNames=OWNED_NAMES,
        )  # fmt: skip
        is_referenced = "Item" in response and StoredFile.of_item(response["Item"]).upload == upload.id
        return None if is_referenced else upload

    def _uploads(self) -> Iterator[Upload]:
        for item in self.items_below(self._location.upload_partition(), ""):
            yield Upload.of_item(item)

    def items_below(self, partition: str, prefix: str, **projection: Any) -> Iterator[Item]:
        """Yield the items of a partition whose sort keys start with a prefix, page by page.

        The second and later pages are retried.

        Args:
            partition: Partition key.
            prefix: Prefix of the sort keys.
            projection: Additional arguments of Query, which select attributes.
        """
        names = {"#root": ROOT_KEY, **projection.pop("ExpressionAttributeNames", {})}
        values = {":root": {"S": partition}}
        condition = "#root = :root"
        if prefix:
            names["#path"] = PATH_KEY
            values[":start"] = {"S": prefix}
            condition += " AND begins_with(#path, :start)"
        arguments = {
            "KeyConditionExpression": condition, "ExpressionAttributeNames": names,
            "ExpressionAttributeValues": values, "ConsistentRead": True, **projection,
        }  # fmt: skip
        response = self._requests.send(Request.LIST, prefix, "query", **arguments)
        yield from response.get("Items", ())
        while last := response.get("LastEvaluatedKey"):
            response = retry_listing(
                self._requests.send, Request.LIST, prefix, "query", ExclusiveStartKey=last, **arguments
            )
            if response.get("LastEvaluatedKey") == last:
                raise StorageError(
                    f"cannot list {prefix!r}: the server repeated a page; check the server and any proxy", path=prefix
                )
            yield from response.get("Items", ())
