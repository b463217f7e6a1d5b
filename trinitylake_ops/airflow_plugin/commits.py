"""Detect new commits to a lakehouse: a trigger for deferred tasks and asset watchers, and a sensor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseSensorOperator, PokeReturnValue
from airflow.triggers.base import BaseEventTrigger, TriggerEvent

from trinitylake_ops import Lakehouse
from trinitylake_ops.airflow_plugin.hook import DEFAULT_CONNECTION, TrinityLakeHook
from trinitylake_ops.airflow_plugin.snapshots import TableObservation, inspect_table
from trinitylake_ops.declarations.options import split_name
from trinitylake_ops.errors import InvalidInputError, ThrottledError, TransientError

_POLL_SECONDS = 30.0


class CommitTrigger(BaseEventTrigger):
    """Fires for new versions of a lakehouse, or only for those that change ``table`` (``namespace.table``).

    With ``after``, it fires for versions after that version. Without ``after``, as an asset watcher does, it first
    reports the latest version, and again whenever a triggerer starts, so that no commit is missed while no triggerer
    runs. If there are several commits between two polls, it reports only the last one. The payload has ``version``,
    ``table`` and ``root``.
    """

    def __init__(
        self,
        trinitylake_conn_id: str = DEFAULT_CONNECTION,
        table: str | None = None,
        after: int | None = None,
        poll_seconds: float = _POLL_SECONDS,
    ) -> None:
        super().__init__()
        if table is not None:
            split_name(table)
        if not poll_seconds > 0:
            raise InvalidInputError(f"poll_seconds is {poll_seconds}; it must be greater than 0")
        self.trinitylake_conn_id = trinitylake_conn_id
        self.table = table
        self.after = after
        self.poll_seconds = poll_seconds

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class and the arguments that recreate this trigger in another process."""
        arguments = {
            "trinitylake_conn_id": self.trinitylake_conn_id,
            "table": self.table,
            "after": self.after,
            "poll_seconds": self.poll_seconds,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Poll the lakehouse, and yield an event for each change."""
        lake = await TrinityLakeHook(self.trinitylake_conn_id).aget_conn()
        last = None if self.after is None else await asyncio.to_thread(inspect_table, lake, self.table, self.after)
        while True:
            observation = await self._observe(lake)
            if observation is not None and observation.is_new(last):
                last = observation
                yield TriggerEvent({"version": observation.version, "table": self.table, "root": lake.root})
            await asyncio.sleep(self.poll_seconds)

    async def _observe(self, lake: Lakehouse) -> TableObservation | None:
        """Return the current observation, or None if the storage fails temporarily."""
        try:
            return await asyncio.to_thread(inspect_table, lake, self.table)
        except (ThrottledError, TransientError) as error:
            self.log.warning("cannot read the lakehouse, next attempt in %s s: %s", self.poll_seconds, error)
            return None


class CommitSensor(BaseSensorOperator):
    """Waits for a version after ``after``, or only for such a version that changes ``table``, and returns it.

    By default ``after`` is the version that was the latest when the DAG run was due. With ``deferrable``, it occupies
    no worker while it waits.
    """

    template_fields: Sequence[str] = ("after", "table")
    ui_color = "#e6f1f2"

    def __init__(
        self,
        *,
        table: str | None = None,
        after: int | str | None = None,
        trinitylake_conn_id: str = DEFAULT_CONNECTION,
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.table = table
        self.after = after
        self.trinitylake_conn_id = trinitylake_conn_id
        self.deferrable = deferrable

    def execute(self, context: Any) -> Any:
        """Wait for a version, in a trigger if the sensor is deferrable."""
        if not self.deferrable:
            return super().execute(context)
        lake = TrinityLakeHook(self.trinitylake_conn_id).get_conn()
        trigger = CommitTrigger(
            self.trinitylake_conn_id, self.table, self._after(lake, context), poll_seconds=self.poke_interval
        )
        self.defer(trigger=trigger, method_name="execute_complete", timeout=timedelta(seconds=self.timeout))
        return None

    def poke(self, context: Any) -> PokeReturnValue:
        """Check once whether there is such a version."""
        lake = TrinityLakeHook(self.trinitylake_conn_id).get_conn()
        current = inspect_table(lake, self.table)
        earlier = inspect_table(lake, self.table, self._after(lake, context))
        return PokeReturnValue(current.is_new(earlier), current.version)

    def execute_complete(self, context: Any, event: dict[str, Any]) -> int:
        """Return the version that the trigger reported."""
        return int(event["version"])

    def _after(self, lake: Lakehouse, context: Any) -> int:
        if self.after in (None, ""):
            # Not imported at the top: a triggerer's event loop is blocked while it imports this module.
            from trinitylake_ops.iceberg.write.publication import version_before

            return version_before(lake, context["dag_run"].run_after)
        text = str(self.after)
        if not (text.isascii() and text.isdecimal()):
            raise InvalidInputError(f"after: {text!r} is not a version number")
        return int(text)
