"""Tables that another program staged, such as one of ``spark-submit``, reported to its run by Dagster Pipes.

The program needs ``dagster-pipes`` and this package, and no Dagster. It writes the files. The run that started it gets
a description of the staged table, and its publish asset commits it with the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.write.staged_table import StagedTable

_STAGED = "trinitylake/staged"


class Reporter(Protocol):
    """What is needed of ``dagster_pipes.PipesContext``, in the program."""

    def report_custom_message(self, payload: Any) -> None:
        """Send a message to the run."""


class Completed(Protocol):
    """What is needed of ``dagster.PipesClientCompletedInvocation``, in the run."""

    def get_custom_messages(self) -> Sequence[Any]:
        """Return all messages that the program sent."""


def report_staged(pipes: Reporter, staged: StagedTable) -> None:
    """Tell the run that started this program of a table that the program staged."""
    pipes.report_custom_message({_STAGED: staged.to_json()})


def staged_by_pipes(completed: Completed, table: str) -> StagedTable:
    """Return a table, such as ``"sales.orders"``, as a program staged it. Of several reports the last one counts.

    An asset returns it as ``dagster.Output``, and TrinityLakeIOManager takes it. Raises InvalidInputError if the
    program reported no such table, or something else in its place.
    """
    found: dict[str, StagedTable] = {}
    for message in completed.get_custom_messages():
        if isinstance(message, dict) and isinstance(message.get(_STAGED), str):
            staged = StagedTable.from_json(message[_STAGED])
            found[f"{staged.namespace}.{staged.table}"] = staged
    if table not in found:
        reported = ", ".join(sorted(found)) or "none"
        raise InvalidInputError(f"the program reported no staged table {table!r}; it reported {reported}")
    return found[table]
