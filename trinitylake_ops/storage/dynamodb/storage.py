"""Storage in a table of Amazon DynamoDB or a compatible server."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trinitylake_ops.errors import (
    AmbiguousWriteError,
    CorruptFileError,
    FileMissingError,
    StorageError,
    TransientError,
    TrinityLakeError,
)
from trinitylake_ops.storage import background, process_clock
from trinitylake_ops.storage.dynamodb import items
from trinitylake_ops.storage.dynamodb.client import TableRequests
from trinitylake_ops.storage.dynamodb.errors import throttled
from trinitylake_ops.storage.dynamodb.items import BATCH_ITEMS, Parts, StoredFile, Upload
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, DynamoDBLocation, dynamodb_of_environment
from trinitylake_ops.storage.error_table import MISSING
from trinitylake_ops.storage.http.requests import Request
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import check_range, is_hidden

#: Minimum time between two sweeps of orphaned parts in a process. Batch deletes start the sweeps.
SWEEP_SECONDS = 3600.0
#: Maximum number of attempts to read a file that is being overwritten.
_MAX_READS = 20


class DynamoDBStorage(Storage):
    """Files under ``dynamodb://table/`` or ``dynamodb://table/prefix/``. The sort key of an item is the path.

    A ``create`` is one PutItem with the condition that the item does not exist. For a file larger than about 400 KB,
    parts are written first, and the item refers to them. RetryStorage retries requests, except for parts and for the
    second and later pages of a listing, which this class retries. All reads are strongly consistent.

    Args:
        root: Normalized root URI. Opening sends no request.
        options: Options of ``DYNAMODB_OPTIONS`` (docs/storages/README.md).

    Attributes:
        next_sweep_s: Time on the process clock after which the next batch delete starts a sweep.

    Raises:
        InvalidLocationError: The root is invalid.
        InvalidInputError: An option is invalid.
    """

    concurrency = 16
    lists_by_prefix = True
    delete_batch_size = BATCH_ITEMS

    def __init__(self, root: str, options: Mapping[str, str] | None = None):
        self.root = root
        self.options = StorageOptions(options)
        self.whole_file_limit_bytes = WHOLE_FILE_LIMIT.value(self.options)
        self._location = DynamoDBLocation.of(root)
        self._requests = TableRequests(self._location, self.options)
        self._parts = Parts(self._location, self._requests, self.concurrency)
        self.next_sweep_s = -math.inf

    def __repr__(self) -> str:
        return f"DynamoDBStorage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[DynamoDBStorage], tuple[str, StorageOptions]]:
        return (DynamoDBStorage, (self.root, self.options.on_top_of(dynamodb_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        last_upload: str | None = None
        for _ in range(_MAX_READS):
            file = self._find(Request.READ, path)
            self._check_size(path, file.size_bytes - offset, length, limit_bytes)
            if file.upload is None:
                return file.body[offset : None if length is None else offset + length]
            if file.upload == last_upload:
                raise CorruptFileError(
                    f"cannot read {path!r} under {self.root}: a part is missing; restore the file", path=path
                )
            data = self._parts.read(file, offset, length)
            if data is not None:
                return data
            last_upload = file.upload
        raise TransientError(
            f"cannot read {path!r} under {self.root}: it was replaced {_MAX_READS} times during the read; retry",
            path=path,
        )

    def stat(self, path: str) -> FileInfo:
        return _info(self._find(Request.STAT, path, items.LISTED, items.LISTED_NAMES))

    def create(self, path: str, data: bytes) -> None:
        condition = {
            "ConditionExpression": "attribute_not_exists(#path)", "ExpressionAttributeNames": {"#path": PATH_KEY}
        }  # fmt: skip
        self._put(Request.CREATE, path, data, condition)

    def write(self, path: str, data: bytes) -> None:
        response = self._put(Request.WRITE, path, data, {"ReturnValues": "ALL_OLD"})
        self._parts.drop(self._old_upload(response))

    def delete(self, path: str) -> None:
        key = self._location.key(path)
        response = self._requests.send(Request.DELETE, path, "delete_item", Key=key, ReturnValues="ALL_OLD")
        self._parts.drop(self._old_upload(response))

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to 25 files: one BatchGetItem finds their parts, and one BatchWriteItem deletes the items.

        Files that the server does not process fail with a ThrottledError. Once an hour, a sweep of orphaned parts is
        started.
        """
        key_by_path = {path: self._location.key(path) for path in paths}
        if not key_by_path:
            return {}
        first = next(iter(key_by_path))
        uploads, unprocessed = self._uploads_of(first, key_by_path)
        keys = [key for path, key in key_by_path.items() if path not in unprocessed]
        if keys:
            unprocessed |= {key[PATH_KEY]["S"] for key in self._parts.delete_items(first, keys)}
        for path, upload in uploads.items():
            if path not in unprocessed:
                self._parts.drop(upload)
        self._sweep_periodically()
        return {path: throttled(self._requests.about(Request.DELETE, path)) for path in unprocessed}

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._files(self._location.listed(prefix))

    def now_ms(self) -> int:
        return self._requests.now_ms()

    def sweep_orphans(self) -> int:
        """Delete orphaned parts of writers that died. Return the number of deleted uploads."""
        return self._parts.sweep()

    def _sweep_periodically(self) -> None:
        if process_clock.now_s() >= self.next_sweep_s:
            self.next_sweep_s = process_clock.now_s() + SWEEP_SECONDS
            background.submit(self._sweep)

    def _sweep(self) -> None:
        self._parts.sweep()

    def _put(self, operation: Request, path: str, data: bytes, arguments: dict[str, Any]) -> Mapping[str, Any]:
        """Put the item of a file, after its parts, if any."""
        key, body = self._location.key(path), bytes(data)
        if items.fits(key, body):
            item = items.whole_file(key, body, self.now_ms())
            return self._requests.send(operation, path, "put_item", Item=item, **arguments)
        upload = self._parts.put(operation, path, body)
        try:
            item = items.file_of_parts(key, len(body), self.now_ms(), upload)
            return self._requests.send(operation, path, "put_item", Item=item, **arguments)
        except AmbiguousWriteError:
            raise  # the item may refer to the parts; if not, a sweep deletes them
        except TrinityLakeError:
            self._parts.drop(upload)
            raise

    def _find(
        self, operation: Request, path: str, attributes: str | None = None, names: Mapping[str, str] | None = None
    ) -> StoredFile:
        projection = {"ProjectionExpression": attributes, "ExpressionAttributeNames": names} if attributes else {}
        key = self._location.key(path)
        response = self._requests.send(operation, path, "get_item", Key=key, ConsistentRead=True, **projection)
        if "Item" not in response:
            raise FileMissingError(MISSING.format(path=path, root=self.root), path=path)
        return self._file(response["Item"])

    def _uploads_of(self, first: str, key_by_path: Mapping[str, items.Item]) -> tuple[dict[str, Upload], set[str]]:
        """Return the uploads by path, and the paths that the server did not process."""
        request = {
            "Keys": list(key_by_path.values()), "ConsistentRead": True, "ProjectionExpression": items.OWNED,
            "ExpressionAttributeNames": items.OWNED_NAMES,
        }  # fmt: skip
        table = self._location.table
        response = self._requests.send(Request.STAT, first, "batch_get_item", RequestItems={table: request})
        files = [self._file(item) for item in response.get("Responses", {}).get(table, ())]
        unprocessed = response.get("UnprocessedKeys", {}).get(table, {}).get("Keys", ())
        return (
            {file.path: upload for file in files if (upload := file.parts) is not None},
            {key[PATH_KEY]["S"] for key in unprocessed},
        )

    def _old_upload(self, response: Mapping[str, Any]) -> Upload | None:
        """Return the upload of the replaced item, if it had parts."""
        return self._file(response["Attributes"]).parts if response.get("Attributes") else None

    def _files(self, prefix: str) -> Iterator[FileInfo]:
        projection = {"ProjectionExpression": items.LISTED, "ExpressionAttributeNames": items.LISTED_NAMES}
        for item in self._parts.items_below(self._location.partition, prefix, **projection):
            file = self._file(item)
            if not is_hidden(file.path, prefix):
                yield _info(file)

    def _file(self, item: items.Item) -> StoredFile:
        try:
            return StoredFile.of_item(item)
        except (KeyError, ValueError):
            path = item.get(PATH_KEY, {}).get("S", "")
            raise StorageError(
                f"the item {path!r} under {self.root} is not a file of a lakehouse; check which program wrote it",
                path=path,
            ) from None


def _info(file: StoredFile) -> FileInfo:
    return FileInfo(file.path, file.size_bytes, file.modified_ms)
