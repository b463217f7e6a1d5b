"""Operations on a whole lakehouse. Before content is deleted or rolled back, a plan is made."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinitylake_ops._lazy import lazy_face

if TYPE_CHECKING:
    from trinitylake_ops.iceberg.totals import TableTotals
    from trinitylake_ops.operations.base import CommitReport
    from trinitylake_ops.operations.budget import Budget
    from trinitylake_ops.operations.clones.clone import ClonePlan, CloneReport, plan_clone
    from trinitylake_ops.operations.clones.clone_records import CloneInfo, CloneState, list_clones
    from trinitylake_ops.operations.clones.compare import ChangedOn, ComparedObject, Comparison, compare
    from trinitylake_ops.operations.clones.drop import DropClonePlan, DropCloneReport, drop_clone, plan_drop_clone
    from trinitylake_ops.operations.clones.merge import Conflict
    from trinitylake_ops.operations.clones.promote import PromotionPlan, PromotionReport, plan_promotion
    from trinitylake_ops.operations.clones.refresh import RefreshPlan, plan_refresh
    from trinitylake_ops.operations.compaction.data_files import CompactTablesReport
    from trinitylake_ops.operations.compaction.tables import CompactTablesPlan, plan_compact_tables
    from trinitylake_ops.operations.compaction.tree import CompactionPlan, CompactionReport, compact, plan_compact
    from trinitylake_ops.operations.diff.versions import ChangedObject, TableDelta, VersionDiff, diff_versions
    from trinitylake_ops.operations.drop_namespace import DropNamespacePlan, plan_drop_namespace
    from trinitylake_ops.operations.executor import LOCAL, Executor
    from trinitylake_ops.operations.export_records import ExportInfo, list_exports
    from trinitylake_ops.operations.exports.check import ExportCheck, verify_export
    from trinitylake_ops.operations.exports.drop import (
        DropExportPlan,
        PrunePlan,
        drop_export,
        plan_drop_export,
        plan_prune_exports,
    )
    from trinitylake_ops.operations.exports.export import ExportPlan, plan_export
    from trinitylake_ops.operations.exports.outcome import ExportReport
    from trinitylake_ops.operations.exports.restore import RestorePlan, plan_restore, restore_export
    from trinitylake_ops.operations.gc.batches import PurgeBatch
    from trinitylake_ops.operations.gc.expire import ExpirationPlan, ExpirationReport, plan_expiration, undelete
    from trinitylake_ops.operations.gc.orphans import OrphanPlan, OrphanReport, plan_orphan_removal
    from trinitylake_ops.operations.gc.purge import PurgePlan, PurgeReport, plan_purge
    from trinitylake_ops.operations.gc.reconcile import ReconcilePlan, ReconcileReport, plan_reconcile, reconcile
    from trinitylake_ops.operations.gc.trim import TrimPlan, TrimReport, plan_trim_tables
    from trinitylake_ops.operations.hint import HintReport, HintState, inspect_hint, repair_hint
    from trinitylake_ops.operations.maintenance.decisions import MaintenanceReport
    from trinitylake_ops.operations.maintenance.maintain import maintain
    from trinitylake_ops.operations.policy.document import MaintenancePolicy
    from trinitylake_ops.operations.policy.stored import StoredPolicy, read_policy, set_policy
    from trinitylake_ops.operations.register import RegistrationReport, register_catalog, register_table
    from trinitylake_ops.operations.relocate import RelocationPlan, RelocationReport, plan_relocation
    from trinitylake_ops.operations.repairs import (
        RepairPlan,
        RepairReport,
        RepairStep,
        UnrepairedFinding,
        plan_repair,
        repair,
    )
    from trinitylake_ops.operations.retention import RetentionPolicy, Verdict
    from trinitylake_ops.operations.rollbacks import RollbackPlan, plan_rollback, rollback
    from trinitylake_ops.operations.space.measure import emit_space_metrics, measure_space
    from trinitylake_ops.operations.space.report import SpaceReport
    from trinitylake_ops.operations.status.due import DueAges
    from trinitylake_ops.operations.status.state import Status, lakehouse_status
    from trinitylake_ops.operations.verification.verify import Finding, VerifyReport, verify

__all__ = [
    "LOCAL",
    "Budget",
    "ChangedObject",
    "ChangedOn",
    "CloneInfo",
    "ClonePlan",
    "CloneReport",
    "CloneState",
    "CommitReport",
    "CompactTablesPlan",
    "CompactTablesReport",
    "CompactionPlan",
    "CompactionReport",
    "ComparedObject",
    "Comparison",
    "Conflict",
    "DropClonePlan",
    "DropCloneReport",
    "DropExportPlan",
    "DropNamespacePlan",
    "DueAges",
    "Executor",
    "ExpirationPlan",
    "ExpirationReport",
    "ExportCheck",
    "ExportInfo",
    "ExportPlan",
    "ExportReport",
    "Finding",
    "HintReport",
    "HintState",
    "MaintenancePolicy",
    "MaintenanceReport",
    "OrphanPlan",
    "OrphanReport",
    "PromotionPlan",
    "PromotionReport",
    "PrunePlan",
    "PurgeBatch",
    "PurgePlan",
    "PurgeReport",
    "ReconcilePlan",
    "ReconcileReport",
    "RefreshPlan",
    "RegistrationReport",
    "RelocationPlan",
    "RelocationReport",
    "RepairPlan",
    "RepairReport",
    "RepairStep",
    "RestorePlan",
    "RetentionPolicy",
    "RollbackPlan",
    "SpaceReport",
    "Status",
    "StoredPolicy",
    "TableDelta",
    "TableTotals",
    "TrimPlan",
    "TrimReport",
    "UnrepairedFinding",
    "Verdict",
    "VerifyReport",
    "VersionDiff",
    "compact",
    "compare",
    "diff_versions",
    "drop_clone",
    "drop_export",
    "emit_space_metrics",
    "inspect_hint",
    "lakehouse_status",
    "list_clones",
    "list_exports",
    "maintain",
    "measure_space",
    "plan_clone",
    "plan_compact",
    "plan_compact_tables",
    "plan_drop_clone",
    "plan_drop_export",
    "plan_drop_namespace",
    "plan_expiration",
    "plan_export",
    "plan_orphan_removal",
    "plan_promotion",
    "plan_prune_exports",
    "plan_purge",
    "plan_reconcile",
    "plan_refresh",
    "plan_relocation",
    "plan_repair",
    "plan_restore",
    "plan_rollback",
    "plan_trim_tables",
    "read_policy",
    "reconcile",
    "register_catalog",
    "register_table",
    "repair",
    "repair_hint",
    "restore_export",
    "rollback",
    "set_policy",
    "undelete",
    "verify",
    "verify_export",
]

__getattr__, __dir__ = lazy_face(
    __name__,
    {
        "base": ("CommitReport",),
        "budget": ("Budget",),
        "clones.clone": ("ClonePlan", "CloneReport", "plan_clone"),
        "clones.compare": ("ChangedOn", "ComparedObject", "Comparison", "compare"),
        "clones.drop": ("DropClonePlan", "DropCloneReport", "drop_clone", "plan_drop_clone"),
        "clones.merge": ("Conflict",),
        "clones.promote": ("PromotionPlan", "PromotionReport", "plan_promotion"),
        "clones.clone_records": ("CloneInfo", "CloneState", "list_clones"),
        "clones.refresh": ("RefreshPlan", "plan_refresh"),
        "compaction.data_files": ("CompactTablesReport",),
        "compaction.tables": ("CompactTablesPlan", "plan_compact_tables"),
        "compaction.tree": ("CompactionPlan", "CompactionReport", "compact", "plan_compact"),
        "diff.versions": ("ChangedObject", "TableDelta", "TableTotals", "VersionDiff", "diff_versions"),
        "drop_namespace": ("DropNamespacePlan", "plan_drop_namespace"),
        "executor": ("Executor", "LOCAL"),
        "export_records": ("ExportInfo", "list_exports"),
        "exports.check": ("ExportCheck", "verify_export"),
        "exports.drop": ("DropExportPlan", "PrunePlan", "drop_export", "plan_drop_export", "plan_prune_exports"),
        "exports.export": ("ExportPlan", "plan_export"),
        "exports.outcome": ("ExportReport",),
        "exports.restore": ("RestorePlan", "plan_restore", "restore_export"),
        "gc.batches": ("PurgeBatch",),
        "gc.expire": ("ExpirationPlan", "ExpirationReport", "plan_expiration", "undelete"),
        "gc.orphans": ("OrphanPlan", "OrphanReport", "plan_orphan_removal"),
        "gc.purge": ("PurgePlan", "PurgeReport", "plan_purge"),
        "gc.reconcile": ("ReconcilePlan", "ReconcileReport", "plan_reconcile", "reconcile"),
        "gc.trim": ("TrimPlan", "TrimReport", "plan_trim_tables"),
        "hint": ("HintReport", "HintState", "inspect_hint", "repair_hint"),
        "maintenance.decisions": ("MaintenanceReport",),
        "maintenance.maintain": ("maintain",),
        "policy.document": ("MaintenancePolicy",),
        "policy.stored": ("StoredPolicy", "read_policy", "set_policy"),
        "register": ("RegistrationReport", "register_catalog", "register_table"),
        "relocate": ("RelocationPlan", "RelocationReport", "plan_relocation"),
        "repairs": ("RepairPlan", "RepairReport", "RepairStep", "UnrepairedFinding", "plan_repair", "repair"),
        "retention": ("RetentionPolicy", "Verdict"),
        "rollbacks": ("RollbackPlan", "plan_rollback", "rollback"),
        "space.measure": ("emit_space_metrics", "measure_space"),
        "space.report": ("SpaceReport",),
        "status.due": ("DueAges",),
        "status.state": ("Status", "lakehouse_status"),
        "verification.verify": ("Finding", "VerifyReport", "verify"),
    },
)
