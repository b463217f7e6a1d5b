"""Requests to the table of one root, with typed errors and a look at the server's clock."""

from __future__ import annotations

import time
from typing import Any

from trinitylake_ops.errors import AmbiguousWriteError, TransientError
from trinitylake_ops.storage.dynamodb.client import Answer, DynamoDBClient
from trinitylake_ops.storage.dynamodb.failures import CLIENT_ERRORS, MISSING_TABLE, answer_of, code_of, typed_error
from trinitylake_ops.storage.dynamodb.settings import PATH_KEY, ROOT_KEY, DynamoDBLocation, DynamoDBSettings
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.remote.clock import ServerClock, monotonic_ms
from trinitylake_ops.storage.remote.requests import Request, StorageRequest

#: So long a storage waits for a table that it makes. DynamoDB takes some seconds.
TABLE_TIMEOUT_SECONDS = 120.0
_POLL_SECONDS = 0.5


class TableRequests:
    """Sends requests to the table of a root, each once."""

    def __init__(self, location: DynamoDBLocation, options: StorageOptions):
        self.options = options
        self._location = location
        self._settings = DynamoDBSettings.of(options)
        self._endpoint = self._settings.endpoint or "the endpoint of AWS's environment"
        self._client = DynamoDBClient(self._settings, options)
        self._clock = ServerClock()

    def send(self, operation: Request, path: str, method: str, **arguments: Any) -> Answer:
        """Send a request and return the answer. Raises typed errors.

        With ``create_table`` a missing table counts as an empty one, and the first create or write makes it.
        """
        if not method.startswith("batch_"):
            arguments = {"TableName": self._location.table, **arguments}
        try:
            return self._call(method, arguments)
        except CLIENT_ERRORS as error:
            is_to_be_made = self._settings.create_table and code_of(error) in MISSING_TABLE
            failure = None if is_to_be_made else self._typed(operation, path, error)
        # This is raised outside the handler: messages of client libraries may hold parts of the request and its
        # credentials.
        if failure is not None:
            raise failure
        if operation not in (Request.CREATE, Request.WRITE):
            return {}
        self._make_table(operation, path)
        return self._once(operation, path, method, arguments)

    def now_ms(self) -> int:
        """Return milliseconds since the epoch on the server's clock. Raises StorageError."""
        return self._clock.now_ms(self._ask_for_time)

    def about(self, operation: Request, path: str) -> StorageRequest:
        """Return the request that an error's message is about."""
        return StorageRequest(operation, path, self._location.root, self.options)

    def _ask_for_time(self) -> None:
        self.send(Request.CLOCK, "", "get_item", Key=self._location.clock_key(), ProjectionExpression=ROOT_KEY)

    def _once(self, operation: Request, path: str, method: str, arguments: dict[str, Any]) -> Answer:
        try:
            return self._call(method, arguments)
        except CLIENT_ERRORS as error:
            failure = self._typed(operation, path, error)
        raise failure

    def _typed(self, operation: Request, path: str, error: BaseException) -> Exception:
        return typed_error(self.about(operation, path), error, self._location.table, self._endpoint)

    def _call(self, method: str, arguments: dict[str, Any]) -> Answer:
        """Send one request, and look at the server's clock."""
        self._client.open()  # which is not the server's time
        sent_at_ms = monotonic_ms()
        answer: Answer | None = None
        try:
            answer = self._client.call(method, arguments)
            return answer
        except CLIENT_ERRORS as error:
            answer = answer_of(error)
            raise
        finally:
            headers = (answer or {}).get("ResponseMetadata", {}).get("HTTPHeaders", {})
            self._clock.observe(headers.get("date"), sent_at_ms, monotonic_ms())

    def _make_table(self, operation: Request, path: str) -> None:
        """Make the table, or wait for the one that somebody makes."""
        names = (ROOT_KEY, PATH_KEY)
        arguments = {
            "TableName": self._location.table,
            "AttributeDefinitions": [{"AttributeName": name, "AttributeType": "S"} for name in names],
            "KeySchema": [
                {"AttributeName": name, "KeyType": kind} for name, kind in zip(names, ("HASH", "RANGE"), strict=True)
            ],
            "BillingMode": "PAY_PER_REQUEST",
        }
        failure: Exception | None = None
        try:
            self._call("create_table", arguments)
        except CLIENT_ERRORS as error:
            # Where the answer was lost, the table tells what came of it.
            if code_of(error) != "ResourceInUseException":
                failure = self._typed(operation, path, error)
        if failure is not None and not isinstance(failure, AmbiguousWriteError):
            raise failure
        self._wait_for_table(operation, path)

    def _wait_for_table(self, operation: Request, path: str) -> None:
        deadline = time.monotonic() + TABLE_TIMEOUT_SECONDS
        while True:
            failure: Exception | None = None
            try:
                answer = self._call("describe_table", {"TableName": self._location.table})
                if answer["Table"]["TableStatus"] in ("ACTIVE", "UPDATING"):
                    return
            except CLIENT_ERRORS as error:
                # Nothing was written yet, so a lost answer is no lost write. A new table may be unknown for a moment.
                failure = None if code_of(error) in MISSING_TABLE else self._typed(Request.LIST, path, error)
            if failure is not None:
                raise failure
            if time.monotonic() > deadline:
                raise TransientError(
                    f"{self.about(operation, path).failure}: the table {self._location.table!r} is not ready "
                    f"{TABLE_TIMEOUT_SECONDS:.0f} s after it was made; retry",
                    path=path,
                )
            time.sleep(_POLL_SECONDS)
