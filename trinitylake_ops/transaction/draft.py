"""Drafts: the files that a commit would write on a base version."""

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
    """The time and the id that one attempt assigns to its root."""

    #: The time of the version.
    time: VersionTime
    #: The id of the attempt, a UUID.
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
        """Return the system rows of the next root, with room for the cost of the commit. Keeps unknown rows.

        Args:
            base: The previous version.
            info: The commit info.
            lakehouse_def: The path of the lakehouse definition.
            is_rollback: Whether the version is the result of a rollback.
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
    """The files that a commit would write on a base version."""

    #: The system rows of the root, with room for the cost of the commit.
    root_system: dict[str, str]
    #: The commit info.
    info: CommitInfo
    #: The other rows of the root, and all new nodes.
    tree: EditedTree
    #: New definition files by path. Attempts after a rebase share them.
    definition_files: Mapping[str, bytes]
    #: The lakehouse definition of the new version, which determines the encoding of its root.
    definition: LakehouseDef
    #: Run while the files are written. If a check raises an error, the root is not sent.
    checks: Sequence[Callable[[], None]] = ()
    #: Called with the error for a file that could not be written, before the error is raised.
    on_write_error: Callable[[TrinityLakeError], None] | None = None

    def root(self, cost: CommitCost, path: str, version: int) -> KnownRoot:
        """Encode the root.

        Args:
            cost: The cost of the commit.
            path: The path of the root.
            version: The version.

        Raises:
            InvalidDefinitionError: This program does not support the ``node_compression`` of the lakehouse.
        """
        tree, system = self.tree.root, {**self.root_system, COMMIT_INFO: self.info.encode(cost, version)}
        node = NodeFile(tree.keys, tree.values, tree.children, tree.buffer, system)
        data = TreeLimits.of(self.definition).encoded(node, path)
        node.file_size_bytes = node.memory_bytes = len(data)
        return KnownRoot(version, path, data, node)


def draft_of_tree(
    base: Snapshot, stamp: RootStamp, root: NodeFile, info: CommitInfo, *, is_rollback: bool = False
) -> Draft:
    """Return the draft of a version with the tree of an existing root and the lakehouse definition of ``base``.

    Args:
        base: The previous version.
        stamp: The time and the id of the attempt.
        root: The root whose tree is reused.
        info: The commit info.
        is_rollback: Whether the version is the result of a rollback.

    Raises:
        StorageError: A node cannot be read.
        CorruptFileError: A node cannot be decoded.
    """
    system = stamp.system(base, info, lakehouse_def=base.definition_location, is_rollback=is_rollback)
    tree = carried_tree(base.files.nodes, root, base.limits, created_at_ms=stamp.created_at_ms, root_system=system)
    return Draft(system, info, tree, {}, base.definition)


@dataclass(frozen=True, slots=True)
class Writes:
    """The changes that transactions write on a base version."""

    #: The location of the new definition by key, or None for a deletion.
    messages: Mapping[str, str | None]
    #: New files by path.
    files: Mapping[str, bytes]
    #: The commit info.
    info: CommitInfo
    #: The path of the lakehouse definition, if it changes.
    lakehouse_def: str | None = None
    #: The lakehouse definition, if it changes.
    definition: LakehouseDef | None = None

    def draft(
        self,
        base: Snapshot,
        stamp: RootStamp,
        checks: Sequence[Callable[[], None]] = (),
        on_write_error: Callable[[TrinityLakeError], None] | None = None,
    ) -> Draft:
        """Return the draft of a version with these changes.

        Args:
            base: The previous version.
            stamp: The time and the id of the attempt.
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
