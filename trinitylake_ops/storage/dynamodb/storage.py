"""Storage in a table of Amazon DynamoDB or of a server that speaks its protocol."""

from __future__ import annotations

import time
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
from trinitylake_ops.storage import background
from trinitylake_ops.storage.dynamodb import items
from trinitylake_ops.storage.dynamodb.client import TableRequests
from trinitylake_ops.storage.dynamodb.errors import throttled
from trinitylake_ops.storage.dynamodb.items import BATCH_ITEMS, Parts, StoredFile, Upload
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, DynamoDBLocation, dynamodb_of_environment
from trinitylake_ops.storage.http.requests import Request
from trinitylake_ops.storage.interface import FileInfo, Storage
from trinitylake_ops.storage.options import WHOLE_FILE_LIMIT, StorageOptions
from trinitylake_ops.storage.paths import check_range, is_hidden

#: Batches of deletes start a sweep after orphans so often, in each process.
SWEEP_SECONDS = 3600.0
#: A file that is overwritten again and again while it is read.
_MAX_READS = 20


class DynamoDBStorage(Storage):
    """Files under ``dynamodb://table/`` or ``dynamodb://table/prefix/``, each an item with the path as sort key.

    A ``create`` is one PutItem under the condition that there is no item. A body above some 400 KB is written in parts
    before that, which the item names. RetryStorage makes the retries, except for the later pages of a list and for
    parts, which only this class can repeat. All reads are strongly consistent.

    Options: ``DYNAMODB_OPTIONS`` (docs/storages/README.md). Opening sends nothing. Raises InvalidLocationError and
    InvalidInputError for a root or option that is not valid.
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
        self._next_sweep_s = 0.0

    def __repr__(self) -> str:
        return f"DynamoDBStorage({self.root!r}, {self.options!r})"

    def __reduce__(self) -> tuple[type[DynamoDBStorage], tuple[str, StorageOptions]]:
        return (DynamoDBStorage, (self.root, self.options.on_top_of(dynamodb_of_environment(self.root, self.options))))

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        check_range(path, offset, length)
        gone: str | None = None
        for _ in range(_MAX_READS):
            file = self._find(Request.READ, path)
            self._check_size(path, file.size_bytes - offset, length, limit_bytes)
            if file.upload is None:
                return file.body[offset : None if length is None else offset + length]
            if file.upload == gone:
                raise CorruptFileError(f"{path!r} under {self.root} lacks a part; restore the file", path=path)
            data = self._parts.read(file, offset, length)
            if data is not None:
                return data
            gone = file.upload
        raise TransientError(f"{path!r} was replaced {_MAX_READS} times while it was read; retry", path=path)

    def stat(self, path: str) -> FileInfo:
        return _info(self._find(Request.STAT, path, items.LISTED, items.LISTED_NAMES))

    def create(self, path: str, data: bytes) -> None:
        condition = {
            "ConditionExpression": "attribute_not_exists(#path)", "ExpressionAttributeNames": {"#path": PATH_KEY}
        }  # fmt: skip
        self._put(Request.CREATE, path, data, condition)

    def write(self, path: str, data: bytes) -> None:
        response = self._put(Request.WRITE, path, data, {"ReturnValues": "ALL_OLD"})
        self._parts.drop(self._former(response))

    def delete(self, path: str) -> None:
        key = self._location.key(path)
        response = self._requests.send(Request.DELETE, path, "delete_item", Key=key, ReturnValues="ALL_OLD")
        self._parts.drop(self._former(response))

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        """Delete up to 25 files: one BatchGetItem tells which have parts, one BatchWriteItem deletes the items.

        Files that the server leaves for later are failures that are ThrottledErrors. Once an hour it starts a sweep.
        """
        key_by_path = {path: self._location.key(path) for path in paths}
        if not key_by_path:
            return {}
        first = next(iter(key_by_path))
        uploads, left = self._uploads_of(first, key_by_path)
        keys = [key for path, key in key_by_path.items() if path not in left]
        if keys:
            left |= {key[PATH_KEY]["S"] for key in self._parts.delete_items(first, keys)}
        for path, upload in uploads.items():
            if path not in left:
                self._parts.drop(upload)
        self._sweep_in_time()
        return {path: throttled(self._requests.about(Request.DELETE, path)) for path in left}

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        return self._files(self._location.listed(prefix))

    def now_ms(self) -> int:
        return self._requests.now_ms()

    def sweep_orphans(self) -> int:
        """Remove the parts that a dead writer left, and return how many uploads they were of. Raises StorageError."""
        return self._parts.sweep()

    def _sweep_in_time(self) -> None:
        if time.monotonic() >= self._next_sweep_s:
            self._next_sweep_s = time.monotonic() + SWEEP_SECONDS
            background.submit(self._sweep)

    def _sweep(self) -> None:
        self._parts.sweep()

    def _put(self, operation: Request, path: str, data: bytes, how: dict[str, Any]) -> Mapping[str, Any]:
        """Put the item of a file, after its parts if it has some."""
        key, body = self._location.key(path), bytes(data)
        if items.fits(key, body):
            item = items.whole_file(key, body, self.now_ms())
            return self._requests.send(operation, path, "put_item", Item=item, **how)
        upload = self._parts.put(operation, path, body)
        try:
            item = items.file_of_parts(key, len(body), self.now_ms(), upload)
            return self._requests.send(operation, path, "put_item", Item=item, **how)
        except AmbiguousWriteError:
            raise  # the item may name the parts; if not, a sweep removes them
        except TrinityLakeError:
            self._parts.drop(upload)
            raise

    def _find(
        self, operation: Request, path: str, shown: str | None = None, names: Mapping[str, str] | None = None
    ) -> StoredFile:
        projection = {"ProjectionExpression": shown, "ExpressionAttributeNames": names} if shown else {}
        key = self._location.key(path)
        response = self._requests.send(operation, path, "get_item", Key=key, ConsistentRead=True, **projection)
        if "Item" not in response:
            raise FileMissingError(f"there is no file {path!r} under {self.root}", path=path)
        return self._file(response["Item"])

    def _uploads_of(self, first: str, key_by_path: Mapping[str, items.Item]) -> tuple[dict[str, Upload], set[str]]:
        """Return the owners of parts by path, and the paths that the server left for later."""
        asked = {
            "Keys": list(key_by_path.values()), "ConsistentRead": True, "ProjectionExpression": items.OWNED,
            "ExpressionAttributeNames": items.OWNED_NAMES,
        }  # fmt: skip
        table = self._location.table
        response = self._requests.send(Request.STAT, first, "batch_get_item", RequestItems={table: asked})
        found = [self._file(item) for item in response.get("Responses", {}).get(table, ())]
        left = response.get("UnprocessedKeys", {}).get(table, {}).get("Keys", ())
        return (
            {file.path: upload for file in found if (upload := file.parts) is not None},
            {key[PATH_KEY]["S"] for key in left},
        )

    def _former(self, response: Mapping[str, Any]) -> Upload | None:
        """Return the owner of the parts that the item had before."""
        return self._file(response["Attributes"]).parts if response.get("Attributes") else None

    def _files(self, prefix: str) -> Iterator[FileInfo]:
        shown = {"ProjectionExpression": items.LISTED, "ExpressionAttributeNames": items.LISTED_NAMES}
        for item in self._parts.items_below(self._location.partition, prefix, **shown):
            file = self._file(item)
            if not is_hidden(file.path, prefix):
                yield _info(file)

    def _file(self, item: items.Item) -> StoredFile:
        try:
            return StoredFile.of_item(item)
        except (KeyError, ValueError):
            path = item.get(PATH_KEY, {}).get("S", "")
            raise StorageError(
                f"the item {path!r} under {self.root} is no file of a lakehouse: another program wrote it", path=path
            ) from None


def _info(file: StoredFile) -> FileInfo:
    return FileInfo(file.path, file.size_bytes, file.modified_ms)
