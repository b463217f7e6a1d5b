"""A draft: the files that a commit would write on a base, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.keys import (
    CLOCK_RESET,
    COMMIT_ID,
    COMMIT_INFO,
    CREATED_AT_MILLIS,
    LAKEHOUSE_DEF,
    PREVIOUS_ROOT,
    ROLLBACK_FROM_ROOT,
    SYSTEM_KEYS,
)
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.tree.edit import EditedTree, apply_messages, carried_tree
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.versions.commit_info import CommitCost, CommitInfo
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.time_travel import VersionTime


@dataclass(frozen=True, slots=True)
class RootStamp:
    """The values that one attempt gives to the root that it would create."""

    time: VersionTime
    commit_id: str

    @property
    def created_at_ms(self) -> int:
        """The time of the version, in milliseconds since the epoch."""
        return self.time.created_at_ms

    def system(
        self,
        base: Snapshot,
        info: CommitInfo,
        *,
        lakehouse_def: str,
        is_rollback: bool = False,
    ) -> dict[str, str]:
        """Return the system rows of the root that follows ``base``, with room for its cost.

        Unknown rows of ``base`` are carried on.
        """
        previous = base.files.roots.path(base.version)
        unknown = {name: value for name, value in base.root.system.items() if name not in SYSTEM_KEYS}
        return {
            **unknown,
            LAKEHOUSE_DEF: lakehouse_def,
            PREVIOUS_ROOT: previous,
            **({ROLLBACK_FROM_ROOT: previous} if is_rollback else {}),
            **({} if self.time.clock_reset is None else {CLOCK_RESET: str(self.time.clock_reset)}),
            CREATED_AT_MILLIS: str(self.created_at_ms),
            COMMIT_ID: self.commit_id,
            COMMIT_INFO: info.largest(),
        }


@dataclass(frozen=True, slots=True)
class Draft:
    """The files that a commit on a base would write, before its root has a name.

    ``root_system`` holds the system rows that :meth:`RootStamp.system` made of ``info``. ``tree`` has the root's other
    rows and all new nodes. ``definition_files`` maps paths to new definitions, which rebases share. ``definition`` is
    that of the new version, and says how its root is encoded. ``checks`` are made while the files are written; what one
    raises keeps the root from being sent. ``on_write_error`` gets the error of a file that could not be written,
    before it is raised.
    """

    root_system: dict[str, str]
    info: CommitInfo
    tree: EditedTree
    definition_files: Mapping[str, bytes]
    definition: LakehouseDef
    checks: Sequence[Callable[[], None]] = ()
    on_write_error: Callable[[TrinityLakeError], None] | None = None

    def root(self, cost: CommitCost, path: str, version: int) -> KnownRoot:
        """Return the root of a version that will stand at ``path``.

        Raises InvalidDefinitionError for a ``node_compression`` that this program cannot write.
        """
        tree, system = self.tree.root, {**self.root_system, COMMIT_INFO: self.info.encode(cost, version)}
        node = NodeFile(tree.keys, tree.values, tree.children, tree.buffer, system)
        data = TreeLimits.of(self.definition).encoded(node, path)
        node.file_size_bytes = node.memory_bytes = len(data)
        return KnownRoot(version, path, data, node)


def draft_of_tree(
    base: Snapshot, stamp: RootStamp, root: NodeFile, info: CommitInfo, *, is_rollback: bool = False
) -> Draft:
    """Return the draft of a tree that is taken over with its pointers and buffer.

    The lakehouse definition is that of ``base``.


    Raises what :func:`carried_tree` raises.
    """
    system = stamp.system(base, info, lakehouse_def=base.definition_location, is_rollback=is_rollback)
    tree = carried_tree(base.files.nodes, root, base.limits, created_at_ms=stamp.created_at_ms, root_system=system)
    return Draft(system, info, tree, {}, base.definition)


@dataclass(frozen=True, slots=True)
class Writes:
    """The changes that transactions write on a base: messages by key, and new files by path.

    ``lakehouse_def`` and ``definition`` are those of a changed lakehouse definition, otherwise None.
    """

    messages: Mapping[str, str | None]
    files: Mapping[str, bytes]
    info: CommitInfo
    lakehouse_def: str | None = None
    definition: LakehouseDef | None = None

    def draft(
        self,
        base: Snapshot,
        stamp: RootStamp,
        checks: Sequence[Callable[[], None]] = (),
        on_write_error: Callable[[TrinityLakeError], None] | None = None,
    ) -> Draft:
        """Return the draft of a version that holds these changes.

        Args:
            base: The version before.
            stamp: What the attempt gives to the root.
            checks: See :class:`Draft`.
            on_write_error: See :class:`Draft`.
        """
        system = stamp.system(base, self.info, lakehouse_def=self.lakehouse_def or base.definition_location)
        definition = self.definition or base.definition
        tree = apply_messages(
            base.files.nodes,
            base.root,
            self.messages,
            TreeLimits.of(definition),
            created_at_ms=stamp.created_at_ms,
            root_system=system,
        )
        return Draft(system, self.info, tree, self.files, definition, checks, on_write_error)
