"""Plan, approval by a person, and execution, as tasks. The person sees the plan where Airflow shows what waits."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import TaskGroup
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from trinitylake_ops.airflow_plugin.hook import DEFAULT_CONNECTION
from trinitylake_ops.airflow_plugin.operators import TrinityLakeOperator
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations.declared.all import BY_NAME
from trinitylake_ops.operations.planned import PlannedOptions

#: How long a task waits for a person by default.
LONGEST_WAIT = timedelta(days=7)


class PlanApprovalOperator(ApprovalOperator):
    """The approval of a plan by a person. An empty plan is skipped, and so is what would execute it.

    ``plan_task_id`` is the task that made the plan. Further settings are those of ApprovalOperator, such as
    ``assigned_users``. Without an answer within ``response_timeout`` the task fails, and nothing is done.
    """

    def __init__(self, *, plan_task_id: str, **kwargs: Any) -> None:
        kwargs.setdefault("subject", "Approve the plan?")
        kwargs.setdefault("response_timeout", LONGEST_WAIT)
        super().__init__(**kwargs)
        self.plan_task_id = plan_task_id

    def execute(self, context: Any) -> Any:
        """Ask for the approval of what the plan's task returned."""
        plan = _returned(context, self.plan_task_id)
        if plan["is_empty"]:
            raise AirflowSkipException(f"{plan['said']}: nothing to approve")
        self.body = plan["page"]
        return super().execute(context)


class ApplyPlanOperator(TrinityLakeOperator):
    """The execution of a plan that a person approved, with the options of the plan and its digest.

    Where something else would happen by now, the task fails and nothing is done. The commit names who approved.
    """

    def __init__(self, *, plan_task_id: str, approval_task_id: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan_task_id = plan_task_id
        self.approval_task_id = approval_task_id

    def execute(self, context: Any) -> dict[str, Any]:
        """Execute the plan. Raises AirflowFailException without an approval."""
        answer = _returned(context, self.approval_task_id)
        if list(answer["chosen_options"]) != [ApprovalOperator.APPROVE]:
            raise AirflowFailException("the plan was not approved, nothing was done")
        config = _returned(context, self.plan_task_id)["configuration"]
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
    """Return a group of three tasks that plans an operation, waits for a person, and executes the plan.

    ``operation`` is one that is planned, such as ``expire``, ``purge``, ``orphans``, ``rollback`` or ``repair``.
    ``options`` are those of its plan. ``approve`` are settings of the task that waits, such as ``assigned_users``, and
    ``apply`` those of the last task, such as ``pool``. Further ones are those of the group. Raises InvalidInputError.
    """
    planned = sorted(name for name, one in BY_NAME.items() if one.options and issubclass(one.options, PlannedOptions))
    if operation not in planned:
        raise InvalidInputError(f"{operation!r} is no operation with a plan; there are {', '.join(planned)}")
    connection: dict[str, Any] = {"trinitylake_conn_id": trinitylake_conn_id}
    with TaskGroup(group_id=group_id or operation, **kwargs) as group:
        plan = TrinityLakeOperator(task_id="plan", operation=operation, options=options, **connection)
        subject = f"Approve the plan of {operation}?"
        wait = PlanApprovalOperator(
            task_id="approve", plan_task_id=plan.task_id, **{"subject": subject, **(approve or {})}
        )
        execution = ApplyPlanOperator(
            task_id="apply",
            operation=operation,
            plan_task_id=plan.task_id,
            approval_task_id=wait.task_id,
            **{**connection, **(apply or {})},
        )
        plan >> wait >> execution
    return group


def _returned(context: Any, task_id: str) -> Any:
    """Return what a task before this one returned. Raises AirflowFailException if there is nothing."""
    value = context["ti"].xcom_pull(task_ids=task_id)
    if value is None:
        raise AirflowFailException(f"task {task_id} returned nothing: run it again")
    return value


def _person(answer: Mapping[str, Any]) -> str:
    """Return who answered, by the name with which this person signed in."""
    user = answer.get("responded_by_user") or {}
    return str(user.get("name") or user.get("id") or "")
