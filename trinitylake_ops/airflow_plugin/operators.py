"""The operator for operations of a lakehouse: what Dagster has as jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from trinitylake_ops.airflow_plugin.hook import DEFAULT_CONNECTION, TrinityLakeHook
from trinitylake_ops.airflow_plugin.running import OperationFailedError, carry_out
from trinitylake_ops.errors import InvalidInputError, StorageError, TrinityLakeError
from trinitylake_ops.operations.declared.all import BY_NAME
from trinitylake_ops.operations.limits import ApplyLimits
from trinitylake_ops.operations.operation import Operation

__all__ = ["ApplyLimits", "TrinityLakeOperator"]


class TrinityLakeOperator(BaseOperator):
    """An operation on a lakehouse, by its name, such as ``verify``, ``expire`` or ``export``.

    The task returns the figures of the report. It is retried only after errors of the storage. ``pool`` should name a
    pool of one slot for operations that free something.

    Args:
        operation: The name of the operation.
        options: Those of Dagster's job of the same name. An operation with a plan only plans, unless they have an
            ``approval``, or ``unattended``.
        trinitylake_conn_id: The connection that names the lakehouse.
        limits: The limits of ``unattended`` runs, which plan and apply in one task without approval.
        **kwargs: Settings of the task.

    Raises:
        InvalidInputError: There is no such operation, or it has no such option.
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
        **kwargs: Any,
    ) -> None:
        declared = _declared(operation)
        kwargs.setdefault("doc_md", declared.description)
        super().__init__(**kwargs)
        self.operation = operation
        self.options = dict(options or {})
        self.trinitylake_conn_id = trinitylake_conn_id
        self._declared = declared
        self._limits = limits
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
            return carry_out(self._declared, given, settings, run_name(context), self.log, self._limits)
        except StorageError:
            raise
        except (TrinityLakeError, OperationFailedError) as error:
            raise AirflowFailException(str(error)) from None  # the log shows one line, and not twice


def run_name(context: Any) -> str:
    """Return what commits of a task name as their run: the DAG and its run."""
    instance = context["ti"]
    return f"{instance.dag_id}/{instance.run_id}"


def _declared(name: str) -> Operation[Any]:
    """Return the operation of a name."""
    if name not in BY_NAME:
        raise InvalidInputError(f"{name!r} is no operation; there are {', '.join(sorted(BY_NAME))}")
    return BY_NAME[name]
