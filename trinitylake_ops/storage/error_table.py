"""Tables of errors: which typed error, with which advice, a response of a storage stands for."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from trinitylake_ops.errors import TrinityLakeError

#: Messages that several tables have.
MISSING = "there is no file {path!r} under {root}"
EXISTS = "{path!r} already exists under {root}; choose another name"
FULL = "{what}; free space or raise the quota, then retry"
SLOWER = "{what}; retry at a slower pace"
RETRY = "{what}; retry"


@dataclass(frozen=True, slots=True)
class ErrorRow:
    """One row of a table. Rows are tried in order.

    A row applies if the response has one of its codes or statuses, or if the row has none of either. ``operations`` and
    ``text`` restrict it further.
    """

    #: AmbiguousWriteError stands for a request whose outcome is unknown: without an effect it is only transient.
    error: type[TrinityLakeError]
    #: A format string with the names ``failure`` (the failed request), ``what`` (the same and the response), ``path``,
    #: ``root``, and those that the storage adds.
    message: str
    #: The service's names of a failure.
    codes: Collection[str] = ()
    #: Numbers of responses, or of errors of the operating system.
    statuses: Collection[int] = ()
    #: Statuses of responses without a code, as from a proxy.
    bare_statuses: Collection[int] = ()
    #: The operations for which the row applies. Empty: all.
    operations: Collection[Any] = ()
    #: An expression that the message of the response contains.
    text: re.Pattern[str] | None = None

    def applies(self, operation: object, status: int | None, code: str | None, message: str) -> bool:
        """Whether this row is for a response to an operation.

        Args:
            operation: what was requested.
            status: the number of the response, if it has one.
            code: the service's name of the failure, if it gave one.
            message: the service's own text.
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
        table: the rows. The last one applies to every response.
        operation: as in ``ErrorRow.applies``, like the following parameters.
        status: the number of the response.
        code: the service's name of the failure.
        message: the service's own text.
    """
    return next(row for row in table if row.applies(operation, status, code, message))
