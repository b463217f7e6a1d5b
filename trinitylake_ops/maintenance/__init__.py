"""Operations on a whole lakehouse. Each that destroys or rolls back is a plan first: look, then execute."""

from trinitylake_ops.maintenance.compact import CompactionReport, compact
from trinitylake_ops.maintenance.drop_namespace import DropNamespacePlan, plan_drop_namespace
from trinitylake_ops.maintenance.export import (
    ExportInfo,
    ExportPlan,
    ExportReport,
    drop_export,
    list_exports,
    plan_export,
)
from trinitylake_ops.maintenance.hint import HintReport, HintState, inspect_hint, repair_hint
from trinitylake_ops.maintenance.rollback import RollbackPlan, plan_rollback, rollback
from trinitylake_ops.maintenance.verify import Finding, VerifyReport, verify

__all__ = [
    "CompactionReport",
    "DropNamespacePlan",
    "ExportInfo",
    "ExportPlan",
    "ExportReport",
    "Finding",
    "HintReport",
    "HintState",
    "RollbackPlan",
    "VerifyReport",
    "compact",
    "drop_export",
    "inspect_hint",
    "list_exports",
    "plan_drop_namespace",
    "plan_export",
    "plan_rollback",
    "repair_hint",
    "rollback",
    "verify",
]
