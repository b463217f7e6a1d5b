"""Airflow provider: a connection, operators, a sensor and a trigger for lakehouse pipelines and operations."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.airflow_plugin.commits import CommitSensor, CommitTrigger
    from trinitylake_ops.airflow_plugin.hook import TrinityLakeHook
    from trinitylake_ops.airflow_plugin.operators import (
        ApplyLimits,
        ApplyPlanOperator,
        PlanApprovalOperator,
        TrinityLakeOperator,
        build_approval,
    )
    from trinitylake_ops.airflow_plugin.publish import PublishOperator, stage

__all__ = [
    "ApplyLimits",
    "ApplyPlanOperator",
    "CommitSensor",
    "CommitTrigger",
    "PlanApprovalOperator",
    "PublishOperator",
    "TrinityLakeHook",
    "TrinityLakeOperator",
    "build_approval",
    "stage",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "commits": ("CommitSensor", "CommitTrigger"),
        "hook": ("TrinityLakeHook",),
        "operators": (
            "ApplyLimits",
            "ApplyPlanOperator",
            "PlanApprovalOperator",
            "TrinityLakeOperator",
            "build_approval",
        ),
        "publish": ("PublishOperator", "stage"),
    },
    extra="airflow",
)
