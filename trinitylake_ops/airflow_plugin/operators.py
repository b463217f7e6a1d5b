"""Operators for lakehouse operations, and for human approval of plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import BaseOperator, TaskGroup
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from trinitylake_ops.airflow_plugin.hook import DEFAULT_CONNECTION, TrinityLakeHook
from trinitylake_ops.airflow_plugin.task_run import OperationFailedError, carry_out
from trinitylake_ops.declarations.operation import Operation
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.declarations.planned import PlannedOptions
from trinitylake_ops.declarations.registry import BY_NAME
from trinitylake_ops.errors import InvalidInputError, StorageError, TrinityLakeError

__all__ = ["ApplyLimits", "TrinityLakeOperator"]


class TrinityLakeOperator(BaseOperator):
    """Runs an operation on a lakehouse, such as ``verify``, ``expire`` or ``export``.

    The task returns the metrics of the report. It is retried only after storage errors. ``pool`` should name a pool
    with one slot for operations that reclaim space.

    Args:
        operation: The operation name.
        options: The options of the operation, as for Dagster's job of the same name. An operation with a plan only
            plans, unless the options contain ``approval`` or ``unattended``.
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
        declared = _operation_named(operation)
        kwargs.setdefault("doc_md", declared.description)
        super().__init__(**kwargs)
        self.operation = operation
        self.options = dict(options or {})
        self.trinitylake_conn_id = trinitylake_conn_id
        self._declared = declared
        self._limits = limits
        unknown = sorted(self.options.keys() - (declared.options.model_fields if declared.options else {}).keys())
        if unknown:
            raise InvalidInputError(f"operation {operation} has no option {unknown[0]!r}")

    def execute(self, context: Any) -> dict[str, Any]:
        """Execute the operation, and return the metrics of its report."""
        return self.carry_out(context, self.options)

    def carry_out(self, context: Any, options: Mapping[str, Any]) -> dict[str, Any]:
        """Execute the operation with options.

        Raises AirflowFailException, which is not retried, for errors that a retry would not fix.
        """
        try:
            settings = TrinityLakeHook(self.trinitylake_conn_id).settings()
            return carry_out(self._declared, options, settings, run_name(context), self.log, self._limits)
        except StorageError:
            raise
        except (TrinityLakeError, OperationFailedError) as error:
            raise AirflowFailException(str(error)) from None  # so that the log shows the error once


def run_name(context: Any) -> str:
    """Return the run id that a task's commits record: the DAG and its run."""
    instance = context["ti"]
    return f"{instance.dag_id}/{instance.run_id}"


def _operation_named(name: str) -> Operation[Any]:
    """Return an operation by its name."""
    if name not in BY_NAME:
        raise InvalidInputError(f"{name!r} is not an operation; the operations are {', '.join(sorted(BY_NAME))}")
    return BY_NAME[name]


#: How long a task waits for human approval by default.
MAX_WAIT = timedelta(days=7)


class PlanApprovalOperator(ApprovalOperator):
    """Asks a person to approve a plan. If the plan is empty, this task and the task that would apply it are skipped.

    ``plan_task_id`` is the task that made the plan. Further settings are those of ApprovalOperator, such as
    ``assigned_users``. Without a response within ``response_timeout``, the task fails and nothing is done.
    """

    def __init__(self, *, plan_task_id: str, **kwargs: Any) -> None:
        kwargs.setdefault("subject", "Approve the plan?")
        kwargs.setdefault("response_timeout", MAX_WAIT)
        super().__init__(**kwargs)
        self.plan_task_id = plan_task_id

    def execute(self, context: Any) -> Any:
        """Request approval of the plan that the planning task returned."""
        plan = _result_of(context, self.plan_task_id)
        if plan["is_empty"]:
            raise AirflowSkipException(f"{plan['summary']}: nothing to approve")
        self.body = plan["page"]
        return super().execute(context)


class ApplyPlanOperator(TrinityLakeOperator):
    """Applies a plan that a person approved, with the options of the plan and its digest.

    If the effects have changed since, the task fails and nothing is done. The commit names the approver.
    """

    def __init__(self, *, plan_task_id: str, approval_task_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_task_id = plan_task_id
        self.approval_task_id = approval_task_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Execute the plan. Raises AirflowFailException without an approval."""
        answer = _result_of(context, self.approval_task_id)
        if list(answer["chosen_options"]) != [ApprovalOperator.APPROVE]:
            raise AirflowFailException("the plan was not approved; nothing was done")
        config = _result_of(context, self.plan_task_id)["configuration"]
        approval = {**config["approval"], "approved_by": _person(answer)}
        return self.carry_out(context, {**config, "approval": approval})


def build_approval(
    operation: str,
    *,
    options: Mapping[str, Any] | None = None,
    trinitylake_conn_id: str = DEFAULT_CONNECTION,
    group_id: str | None = None,
    apply: Mapping[str, Any] | None = None,
    approve: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> TaskGroup:
    """Build a group of three tasks that plans an operation, waits for approval, and applies the plan.

    Args:
        operation: The name of an operation with a plan, such as ``expire``, ``purge``, ``orphans``, ``rollback`` or
            ``repair``.
        options: The options of the plan.
        trinitylake_conn_id: The connection that names the lakehouse.
        group_id: The group id. Defaults to the operation name.
        apply: Settings of the task that applies the plan, such as ``pool``.
        approve: Settings of the task that waits for approval, such as ``assigned_users``.
        **kwargs: Settings of the group.

    Raises:
        InvalidInputError: There is no such operation, it has no plan, or it has no such option.
    """
    planned = sorted(
        name for name, declared in BY_NAME.items() if declared.options and issubclass(declared.options, PlannedOptions)
    )
    if operation not in planned:
        raise InvalidInputError(f"{operation!r} is not an operation with a plan; those are {', '.join(planned)}")
    connection: dict[str, Any] = {"trinitylake_conn_id": trinitylake_conn_id}
    with TaskGroup(group_id=group_id or operation, **kwargs) as group:
        plan = TrinityLakeOperator(task_id="plan", operation=operation, options=options, **connection)
        subject = f"Approve the plan of {operation}?"
        approval = PlanApprovalOperator(
            task_id="approve", plan_task_id=plan.task_id, **{"subject": subject, **(approve or {})}
        )
        execution = ApplyPlanOperator(
            task_id="apply",
            operation=operation,
            plan_task_id=plan.task_id,
            approval_task_id=approval.task_id,
            **{**connection, **(apply or {})},
        )
        plan >> approval >> execution
    return group


def _result_of(context: Any, task_id: str) -> Any:
    """Return the result of an earlier task. Raises AirflowFailException if there is none."""
    value = context["ti"].xcom_pull(task_ids=task_id)
    if value is None:
        raise AirflowFailException(f"task {task_id} returned nothing; run it again")
    return value


def _person(response: Mapping[str, Any]) -> str:
    """Return the sign-in name of the person who responded."""
    user = response.get("responded_by_user") or {}
    return str(user.get("name") or user.get("id") or "")
