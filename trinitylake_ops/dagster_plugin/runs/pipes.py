"""Tables staged by an external program, for example with ``spark-submit``, and reported through Dagster Pipes.

The program needs ``dagster-pipes`` and this package, but not Dagster. It writes the files and reports a description of
the staged table to the run that started it. The publish asset of the run commits that table together with the other
tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.staged_table import StagedTable

_STAGED = "trinitylake/staged"


class Reporter(Protocol):
    """The part of ``dagster_pipes.PipesContext`` that the program needs."""

    def report_custom_message(self, payload: Any) -> None:
        """Send a message to the run."""


class Completed(Protocol):
    """The part of ``dagster.PipesClientCompletedInvocation`` that the run needs."""

    def get_custom_messages(self) -> Sequence[Any]:
        """Return all messages that the program sent."""


def report_staged(pipes: Reporter, staged: StagedTable) -> None:
    """Report a staged table to the run that started this program.

    Args:
        pipes: The Pipes context of the program.
        staged: The table that the program staged.
    """
    pipes.report_custom_message({_STAGED: staged.to_json()})


def staged_by_pipes(completed: Completed, table: str) -> StagedTable:
    """Return a table that a program staged, from its last report of that table.

    An asset returns the table as ``dagster.Output`` to be stored by TrinityLakeIOManager.

    Args:
        completed: The completed invocation of the program.
        table: The table as ``namespace.table``, for example ``"sales.orders"``.

    Raises:
        InvalidInputError: The program did not report the table, or a report is invalid.
    """
    tables: dict[str, StagedTable] = {}
    for message in completed.get_custom_messages():
        if isinstance(message, dict) and isinstance(message.get(_STAGED), str):
            staged = StagedTable.from_json(message[_STAGED])
            tables[f"{staged.namespace}.{staged.table}"] = staged
    if table not in tables:
        reported = ", ".join(sorted(tables)) or "none"
        raise InvalidInputError(f"the program did not report staged table {table!r}; it reported: {reported}")
    return tables[table]
