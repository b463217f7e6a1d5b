"""Error tables: map the responses of a storage to typed errors with advice."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.errors import TrinityLakeError

#: Messages that several tables share.
MISSING = "there is no file {path!r} under {root}"
EXISTS = "{path!r} already exists under {root}; choose another name"
FULL = "{what}; free space or raise the quota, then retry"
SLOWER = "{what}; retry at a slower pace"
RETRY = "{what}; retry"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of a table. The first row that applies determines the error.

    A row applies if the response has one of its codes or statuses, or if the row has neither codes nor statuses.
    ``operations`` and ``text`` restrict it further.
    """

    #: Class of the error. AmbiguousWriteError is replaced by TransientError for operations that change nothing.
    error: type[TrinityLakeError]
    #: Format string with the names ``failure`` (the failed request), ``what`` (the failed request and the response),
    #: ``path``, ``root``, and names that the storage adds.
    message: str
    #: Error codes of the service.
    codes: Collection[str] = ()
    #: HTTP statuses, or error numbers of the operating system.
    statuses: Collection[int] = ()
    #: Statuses of responses without a code, for example from a proxy.
    bare_statuses: Collection[int] = ()
    #: Operations to which the row applies. If empty, it applies to all operations.
    operations: Collection[Any] = ()
    #: Regular expression that must match a part of the response's message.
    text: re.Pattern[str] | None = None

    def applies(self, operation: object, status: int | None, code: str | None, message: str) -> bool:
        """Whether this row applies to a response.

        Args:
            operation: Operation of the request.
            status: HTTP status or error number, if there is one.
            code: The service's error code, if there is one.
            message: The service's message.
        """
        if self.codes or self.statuses or self.bare_statuses:
            has_status = status is not None and (
                status in self.statuses or (code is None and status in self.bare_statuses)
            )
            if code not in self.codes and not has_status:
                return False
        if self.operations and operation not in self.operations:
            return False
        return self.text is None or self.text.search(message) is not None


def find_row(
    table: Iterable[ErrorRow], operation: object, status: int | None, code: str | None, message: str = ""
) -> ErrorRow:
    """Return the first row of a table that applies to a response.

    Args:
        table: The rows. The last row applies to every response.
        operation: Operation of the request.
        status: HTTP status or error number, if there is one.
        code: The service's error code, if there is one.
        message: The service's message.
    """
    return next(row for row in table if row.applies(operation, status, code, message))
