"""Compaction of the tree: a commit that changes tree nodes, but no object."""

from __future__ import annotations

from dataclasses import dataclass, field

from trinitylake_ops.operations.base import (
    Cost,
    MeteredLakehouse,
    Plan,
    PlannedOperation,
    base_id_of,
    digest_of,
    operation_span,
)
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.transaction.draft import Draft, RootStamp
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.tree.compact import compacted_tree
from trinitylake_ops.tree.shape import TreeShape
from trinitylake_ops.versions.commit_info import CommitInfo
from trinitylake_ops.versions.roots import check_no_gap
from trinitylake_ops.versions.snapshot import Snapshot

_OPERATION = "compact"


@dataclass(frozen=True, kw_only=True)
class CompactionReport(Document):
    """The tree before and after a compaction."""

    base_version: int
    #: The version with the compacted tree; ``base_version`` if nothing was committed.
    version: int
    nodes_written: int
    before: TreeShape
    after: TreeShape
    cost: Cost

    @property
    def has_changed(self) -> bool:
        """Whether there was something to do."""
        return self.version != self.base_version

    def table(self) -> Table:
        """Return one row for each tree metric before and after, or only a title if nothing changed."""
        before, after = self.before, self.after
        rows = [
            ("levels", len(before.levels), len(after.levels)),
            ("nodes", f"{before.nodes:,}", f"{after.nodes:,}"),
            ("fill of the leaves", f"{before.leaf_fill:.0%}", f"{after.leaf_fill:.0%}"),
            ("messages in buffers", f"{before.messages:,}", f"{after.messages:,}"),
            ("bytes", f"{before.file_bytes:,}", f"{after.file_bytes:,}"),
            ("nodes written, except the root", "", f"{self.nodes_written:,}"),
        ]
        title = (
            f"Compaction of version {self.base_version}, committed as version {self.version}"
            if self.has_changed
            else f"Compaction: nothing to do, version {self.version} needs no compaction"
        )
        title += f"; {self.cost.total_requests:,} requests, {self.cost.duration_ms / 1000:.1f} s"
        return new_table(title, "", "before", "after", rows=rows) if self.has_changed else new_table(title)


@dataclass(frozen=True, kw_only=True)
class CompactionPlan(Plan):
    """The current tree, and the count and bytes of nodes, except the root, that a compaction would write."""

    base_version: int
    nodes_written: int
    bytes_written: int
    before: TreeShape
    is_needed: bool
    operation: Compact = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the nodes to write, without bytes, which depend on node names."""
        return digest_of(self.base_version, self.base_id, _OPERATION, self.is_needed, self.nodes_written)

    @property
    def is_empty(self) -> bool:
        """Whether the tree needs no compaction."""
        return not self.is_needed

    def table(self) -> Table:
        """Return one row for each metric of the current tree, or only a title if there is nothing to do."""
        before = self.before
        rows = [
            ("levels", len(before.levels)),
            ("nodes", f"{before.nodes:,}"),
            ("fill of the leaves", f"{before.leaf_fill:.0%}"),
            ("messages in buffers", f"{before.messages:,}"),
            ("bytes", f"{before.file_bytes:,}"),
        ]
        effect = f"it writes {self.nodes_written:,} nodes with {self.bytes_written:,} bytes, except the root"
        title = f"Compaction of version {self.base_version}: {'not needed' if self.is_empty else effect}"
        return new_table(title) if self.is_empty else new_table(title, "", "now", rows=rows)

    def execute(self, approved_digest: str | None = None) -> CompactionReport:
        """Compact the tree. See :func:`compact`.

        Raises PlanChangedError if the new plan is not the approved one.
        """
        return self.operation.execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Compact(PlannedOperation[CompactionPlan, CompactionReport]):
    """Compacts the tree of the latest version."""

    telemetry_name = "compact"

    message: str | None = None

    def plan(self) -> CompactionPlan:
        """Make a plan based on the latest version. Raises CorruptFileError or StorageError."""
        base = self.lake.snapshot()
        check_no_gap(self.lake.files.roots, base.version)
        tree = compacted_tree(
            base.files.nodes, base.root, base.limits, created_at_ms=base.created_at_ms, root_system=base.root.system
        )
        written = {} if tree is None else tree.node_files
        return CompactionPlan(
            base_version=base.version,
            base_id=base_id_of(base),
            nodes_written=len(written),
            bytes_written=sum(map(len, written.values())),
            before=base.tree_shape(),
            is_needed=tree is not None,
            operation=self,
        )

    def run(self, plan: CompactionPlan, approved_digest: str | None) -> CompactionReport:
        """Compact."""
        self.checked(plan, approved_digest)
        return _compact(self.lake, self.message)


def plan_compact(lake: Lakehouse, message: str | None = None) -> CompactionPlan:
    """Plan a compaction of the tree. This reads all nodes, and writes nothing.

    Args:
        lake: The lakehouse.
        message: The message of the commit.

    Raises:
        CorruptFileError: A node is damaged.
        StorageError: A storage request failed.
    """
    return Compact(lake=lake, message=message).plan()


def compact(lake: Lakehouse, message: str | None = None) -> CompactionReport:
    """Flush all buffers and merge thin nodes, in a separate commit.

    No object changes, so the commit does not conflict with other commits: after a concurrent commit, the new tree is
    compacted instead. All nodes are read to compact the tree, and again before and after for the report unless they are
    cached.

    Args:
        lake: The lakehouse.
        message: The message of the commit.

    Raises:
        CommitAttemptsExhaustedError: All attempts conflicted with other commits.
        CommitOutcomeUnknownError: The outcome of the commit is unknown.
        TrinityLakeError: The lakehouse cannot be read, or the commit failed.
    """
    with operation_span(Compact.telemetry_name):
        return _compact(lake, message)


def _compact(lake: Lakehouse, message: str | None) -> CompactionReport:
    metered = MeteredLakehouse(lake)
    base = metered.lake.snapshot()
    check_no_gap(metered.lake.files.roots, base.version)
    change = _Compaction(CommitInfo(_OPERATION, message))
    version = metered.lake.commit(change, base)
    if version != base.version:
        base = metered.lake.snapshot(version - 1)
    before = base.tree_shape()
    return CompactionReport(
        base_version=base.version,
        version=version,
        nodes_written=change.n_nodes,
        before=before,
        after=before if version == base.version else metered.lake.snapshot(version).tree_shape(),
        cost=metered.cost(),
    )


class _Compaction:
    """The same objects in a compacted tree (implements transaction.commit.Committable)."""

    def __init__(self, info: CommitInfo):
        self._info = info
        self.n_nodes = 0

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        system = stamp.system(base, self._info, lakehouse_def=base.definition_location)
        tree = compacted_tree(
            base.files.nodes, base.root, base.limits, created_at_ms=stamp.created_at_ms, root_system=system
        )
        if tree is None:
            return None
        self.n_nodes = len(tree.node_files)
        return Draft(system, self._info, tree, {}, base.definition)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        """Do nothing, because this change contains no object that could conflict."""
