"""The operator for operations of a lakehouse: what Dagster has as jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from trinitylake_ops.airflow_plugin.hook import DEFAULT_CONNECTION, TrinityLakeHook
from trinitylake_ops.airflow_plugin.running import OperationFailedError, carry_out
from trinitylake_ops.errors import InvalidInputError, StorageError, TrinityLakeError
from trinitylake_ops.maintenance import Budget
from trinitylake_ops.operations.declared.all import BY_NAME
from trinitylake_ops.operations.declared.overdue import drop_overdue
from trinitylake_ops.operations.declared.scheduled import ApplyLimits, scheduled_operations
from trinitylake_ops.operations.operation import Operation

__all__ = ["ApplyLimits", "TrinityLakeOperator"]


class TrinityLakeOperator(BaseOperator):
    """An operation on a lakehouse, by its name, such as ``verify``, ``expire_plan`` or ``export_full``.

    ``options`` are those of Dagster's job of the same name. With ``limits``, the operations ``trim_scheduled``,
    ``expire_scheduled``, ``purge_scheduled``, ``orphans_scheduled`` and ``drop_clones_scheduled`` plan and apply in one
    task without approval, within ``budget``. The task returns the figures of the report. It is retried only after
    errors of the storage. ``pool`` should name a pool of one slot for operations that free something. Raises
    InvalidInputError for a name that no operation has, and for options that it does not have.
    """

    template_fields: Sequence[str] = ("options",)
    template_fields_renderers: ClassVar[Mapping[str, str]] = {"options": "json"}
    ui_color = "#e0f0f4"

    def __init__(
        self,
        *,
        operation: str,
        options: Mapping[str, Any] | None = None,
        trinitylake_conn_id: str = DEFAULT_CONNECTION,
        limits: ApplyLimits | None = None,
        budget: Budget | None = None,
        **kwargs: Any,
    ) -> None:
        declared = _declared(operation, limits, budget)
        kwargs.setdefault("doc_md", declared.description)
        super().__init__(**kwargs)
        self.operation = operation
        self.options = dict(options or {})
        self.trinitylake_conn_id = trinitylake_conn_id
        self._declared = declared
        others = sorted(self.options.keys() - (declared.options.model_fields if declared.options else {}).keys())
        if others:
            raise InvalidInputError(f"operation {operation} has no option {others[0]!r}")

    def execute(self, context: Any) -> dict[str, Any]:
        """Carry the operation out, and return the figures of its report."""
        return self.carry_out(context, self.options)

    def carry_out(self, context: Any, given: Mapping[str, Any]) -> dict[str, Any]:
        """Carry the operation out with options.

        Raises AirflowFailException, which is not retried, for all that a repetition does not mend.
        """
        try:
            settings = TrinityLakeHook(self.trinitylake_conn_id).settings()
            return carry_out(self._declared, given, settings, run_name(context), self.log)
        except StorageError:
            raise
        except (TrinityLakeError, OperationFailedError) as error:
            raise AirflowFailException(str(error)) from None  # the log shows one line, and not twice


def run_name(context: Any) -> str:
    """Return what commits of a task name as their run: the DAG and its run."""
    instance = context["ti"]
    return f"{instance.dag_id}/{instance.run_id}"


def _declared(name: str, limits: ApplyLimits | None, budget: Budget | None) -> Operation[Any]:
    """Return the operation of a name. Those that need no approval are there with limits alone."""
    known = dict(BY_NAME)
    if limits is not None:
        within = [*scheduled_operations(limits, budget or Budget()).values(), drop_overdue(limits)]
        known = {operation.job: operation for operation in within}
    if name not in known:
        raise InvalidInputError(f"{name!r} is no operation; there are {', '.join(sorted(known))}")
    return known[name]
