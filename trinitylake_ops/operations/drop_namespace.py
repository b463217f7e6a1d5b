"""Plan and execute the drop of a namespace with its tables."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from trinitylake_ops.errors import NamespaceNotEmptyError, PlanChangedError
from trinitylake_ops.operations.base import (
    CommitReport,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
)
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.roots import check_no_gap

_OPERATION = "drop-namespace"
_MAX_MESSAGE_CHARS = 500


@dataclass(frozen=True, kw_only=True)
class DropNamespacePlan(Plan):
    """The namespace and the tables to drop. They remain readable in older versions."""

    base_version: int
    namespace: str
    tables: tuple[str, ...]
    operation: DropNamespace = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the namespace and its tables."""
        return digest_of(self.base_version, self.base_id, _OPERATION, self.namespace, list(self.tables))

    @property
    def is_empty(self) -> bool:
        """False, because the namespace itself is always dropped."""
        return False

    def table(self) -> Table:
        """Return one row for the namespace and each table."""
        rows = [("drop", f"namespace {self.namespace}"), *(("drop", f"{self.namespace}.{t}") for t in self.tables)]
        return new_table(f"Drop of namespace {self.namespace}", "change", "object", rows=rows)

    def execute(self, approved_digest: str | None = None) -> CommitReport:
        """Drop the namespace and its tables in one commit.

        Args:
            approved_digest: The digest of the approved plan, if any.

        Raises:
            PlanChangedError: The new plan is not the approved one, or the tables of the namespace have changed.
            CommitConflictError: A concurrent commit changed the namespace.
            NamespaceNotFoundError: The namespace was dropped.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class DropNamespace(PlannedOperation[DropNamespacePlan, CommitReport]):
    """Drops a namespace. A namespace that contains tables requires ``cascade``."""

    telemetry_name = "drop-namespace"

    namespace: str
    cascade: bool

    def plan(self) -> DropNamespacePlan:
        """Make a plan based on the latest version. Raises the errors of :func:`plan_drop_namespace`."""
        latest = self.lake.snapshot()
        check_no_gap(self.lake.files.roots, latest.version)
        tables = tuple(latest.tables(self.namespace))
        if tables and not self.cascade:
            raise NamespaceNotEmptyError(
                f"namespace {self.namespace!r} contains {len(tables)} tables; drop them first, or use cascade"
            )
        return DropNamespacePlan(
            base_version=latest.version,
            base_id=base_id_of(latest),
            namespace=self.namespace,
            tables=tables,
            operation=self,
        )

    def run(self, plan: DropNamespacePlan, approved_digest: str | None) -> CommitReport:
        """Drop the namespace and its tables in one commit."""
        metered = MeteredLakehouse(self.lake, keeps_cache=True)
        replace(self, lake=metered.lake, cascade=True).checked(plan, approved_digest)
        with metered.lake.transaction(message=self.namespace[:_MAX_MESSAGE_CHARS], operation=_OPERATION) as txn:
            if tuple(txn.tables(self.namespace)) != plan.tables:
                raise PlanChangedError(f"the tables of namespace {self.namespace!r} have changed; review the new plan")
            txn.drop_namespace(self.namespace, cascade=True)
        assert txn.committed_version is not None
        return CommitReport(
            operation=_OPERATION,
            base_version=plan.base_version,
            version=txn.committed_version,
            changed=1 + len(plan.tables),
            cost=metered.cost(),
        )


def plan_drop_namespace(lake: Lakehouse, namespace: str, cascade: bool = False) -> DropNamespacePlan:
    """Plan to drop a namespace, without writing.

    Args:
        lake: The lakehouse.
        namespace: The name of the namespace.
        cascade: Whether to drop its tables as well.

    Raises:
        NamespaceNotFoundError: The namespace does not exist.
        NamespaceNotEmptyError: The namespace contains tables, and ``cascade`` is not set.
        InvalidNameError: The name is invalid.
    """
    return DropNamespace(lake=lake, namespace=namespace, cascade=cascade).plan()
