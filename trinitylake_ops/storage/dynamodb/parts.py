"""Parts of files too large for one item: written before the item that names them, removed after it is gone.

A record of the upload stands from before the first part until after the last. Where a writer died, the record is still
there: the sweep finds it, and removes parts that no item names.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from trinitylake_ops.errors import AmbiguousWriteError, StorageError, TransientError
from trinitylake_ops.storage.dynamodb import items
from trinitylake_ops.storage.dynamodb.items import PART_BYTES, StoredFile, Upload
from trinitylake_ops.storage.dynamodb.requests import TableRequests
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, ROOT_KEY, DynamoDBLocation, Key
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.storage.remote.repeated import sent_again
from trinitylake_ops.storage.remote.requests import Request

logger = logging.getLogger(__name__)

#: Parts that nothing names are removed when their upload is so old, by the server's clock.
ORPHAN_AGE_MS = 2 * 60 * 60 * 1000
#: A writer gives up an upload that took so long. Until the age above, its last request has long lost its signature.
MAX_UPLOAD_MS = 30 * 60 * 1000
#: A request about parts is not repeated after that, for the retries around the storage repeat the whole operation.
LONGEST_REPEATED_SECONDS = 10.0
#: The most items of one BatchWriteItem.
BATCH_ITEMS = 25

_sent_again = functools.partial(sent_again, longest_s=LONGEST_REPEATED_SECONDS)


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
                self._prepared(operation, path, items.part(key, data))
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
            _sent_again(self._requests.send, operation, path, "put_item", Item=item)
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
            answer = _sent_again(self._requests.send, Request.READ, file.path, "get_item", Key=key, ConsistentRead=True)
            return items.part_body(answer["Item"]) if "Item" in answer else None

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
            _sent_again(self._delete_all, upload.path, keys)

        run_parallel(delete_parts, batches, self._concurrency)
        key = self._location.upload_key(upload.id)
        _sent_again(self._requests.send, Request.DELETE, upload.path, "delete_item", Key=key)

    def _delete_all(self, path: str, keys: list[Key]) -> None:
        if self.delete_items(path, keys):
            raise TransientError(f"some parts of {path!r} could not be deleted now; retry", path=path)

    def delete_items(self, path: str, keys: Sequence[Key]) -> list[Key]:
        """Delete up to 25 items in one request, and return the keys that the server left for later."""
        table = self._location.table
        deletes = [{"DeleteRequest": {"Key": dict(key)}} for key in keys]
        answer = self._requests.send(Request.DELETE, path, "batch_write_item", RequestItems={table: deletes})
        left = answer.get("UnprocessedItems", {}).get(table, ())
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
        answer = sent_again(
            self._requests.send, Request.STAT, upload.path, "get_item", Key=key, ConsistentRead=True,
            ProjectionExpression=items.OWNED, ExpressionAttributeNames=items.OWNED_NAMES,
        )  # fmt: skip
        is_named = "Item" in answer and StoredFile.of_item(answer["Item"]).upload == upload.id
        return None if is_named else upload

    def _uploads(self) -> Iterator[Upload]:
        for item in self.items_below(self._location.upload_partition(), ""):
            yield Upload.of_item(item)

    def items_below(self, partition: str, prefix: str, **shown: Any) -> Iterator[items.Item]:
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
        answer = self._requests.send(Request.LIST, prefix, "query", **arguments)
        yield from answer.get("Items", ())
        while last := answer.get("LastEvaluatedKey"):
            answer = sent_again(self._requests.send, Request.LIST, prefix, "query", ExclusiveStartKey=last, **arguments)
            if answer.get("LastEvaluatedKey") == last:
                raise StorageError(f"cannot list {prefix!r}: the server repeats itself", path=prefix)
            yield from answer.get("Items", ())
