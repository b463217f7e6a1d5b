"""Write the root of an export: within the lakehouse, or as a version of another lakehouse.

Nodes are rebuilt from the entries. Their names are derived from the export id, so that a resumed or concurrent run of
the same export writes the same files.
"""

from __future__ import annotations

import hashlib
import itertools
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from trinitylake_ops.access.allowed_roots import sources_of_copy
from trinitylake_ops.errors import InvalidInputError, MaintenanceBlockedError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, LakehouseDef, SourceRecord
from trinitylake_ops.format.file_names import derived_uuid, new_lakehouse_def_path, new_node_path
from trinitylake_ops.format.keys import LAKEHOUSE_DEF
from trinitylake_ops.format.locations import to_uri
from trinitylake_ops.format.node_file import NodeFile, decode_node
from trinitylake_ops.format.sealed_files import check_file
from trinitylake_ops.operations.export_records import CLONE, EXPORT
from trinitylake_ops.operations.gc.listing import without_acknowledged
from trinitylake_ops.operations.transfer.selection import Choice
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.transaction.creation import create_first_version, first_root, has_roots, write_lakehouse_definition
from trinitylake_ops.transaction.draft import Draft, RootStamp, draft_of_tree
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.transaction import Transaction
from trinitylake_ops.tree.bulk import bulk_load
from trinitylake_ops.tree.diff import diff_trees
from trinitylake_ops.tree.edit import carried_tree
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import scan
from trinitylake_ops.versions.commit_info import CommitCost, CommitInfo
from trinitylake_ops.versions.history import VersionInfo, history
from trinitylake_ops.versions.snapshot import Snapshot

Write = Callable[[Mapping[str, bytes]], None]

#: Operations that do not change namespaces and tables, so that a lakehouse remains a valid target after them.
_PRESERVING_OPERATIONS = frozenset(
    {"compact", "expire", "undelete", "purge", "orphans", "reconcile", "alter-definition", EXPORT, "drop-export"}
    | {CLONE, "drop-clone", "refresh"}  # they record versions kept for clones
)
_SOURCE_ID = "source_id"
_MAX_NAMESPACES_BYTES = 1000


def export_id(record: ExportRecord) -> uuid.UUID:
    """Return the id of an export, taken from the name of its manifest."""
    return uuid.UUID(record.manifest_path.removeprefix("_ops/export-").removesuffix(".json"))


def build_root(
    entries: Sequence[tuple[str, str]], limits: TreeLimits, identifier: uuid.UUID, created_at_ms: int, write: Write
) -> NodeFile:
    """Build a tree from entries and return its root, without system rows.

    Args:
        entries: The entries, as (key, location).
        limits: The limits of the tree.
        identifier: The id of the export, from which the node names are derived.
        created_at_ms: The creation time of the nodes, in milliseconds since the epoch.
        write: Receives the files of the other nodes, by path.

    Raises:
        InvalidInputError: A node is too large because it refers to files of the source by URI.
        StorageError: A storage request failed.
    """
    numbers = itertools.count()

    def write_checked(files: Mapping[str, bytes]) -> None:
        largest_bytes = max(map(len, files.values()))
        if largest_bytes > limits.node_file_max_size_bytes:
            raise InvalidInputError(
                f"a node of the export would have {largest_bytes} bytes, more than node_file_max_size_bytes"
                f" ({limits.node_file_max_size_bytes}), because it refers to files of the source by URI; make a full"
                " export, or a partial one with definitions"
            )
        write(files)

    return bulk_load(
        entries,
        limits,
        created_at_ms=created_at_ms,
        write=write_checked,
        new_path=lambda: new_node_path(derived_uuid(identifier, f"node {next(numbers)}")),
    )


def root_in_same_lakehouse(source: Snapshot, tree: NodeFile, definition_path: str, path: str) -> bytes:
    """Return the bytes of the root of an export within the lakehouse.

    Args:
        source: The exported version, whose system rows are copied to the root.
        tree: The root of the exported tree, without system rows.
        definition_path: The path of the lakehouse definition.
        path: The path of the new root.
    """
    system = {**source.root.system, LAKEHOUSE_DEF: definition_path}
    return source.limits.encoded(replace(tree, system=system), path)


def copied_root(source: Snapshot, path: str) -> bytes:
    """Return the bytes of a copy of a version's root. A root without checksums is copied byte for byte.

    Args:
        source: The version.
        path: The path of the copy.

    Raises:
        StorageError: A storage request failed.
    """
    data = source.files.storage.read(source.location)
    return (
        source.limits.encoded(decode_node(data, source.location), path) if check_file(data, source.location) else data
    )


def lakehouse_def_copy(identifier: uuid.UUID) -> str:
    """Return the path of the copy of the lakehouse definition."""
    return new_lakehouse_def_path(derived_uuid(identifier, "lakehouse definition"))


@dataclass(frozen=True)
class TargetLakehouse:
    """A lakehouse at another root, the target of an export."""

    #: The lakehouse at the target.
    lake: Lakehouse
    #: The latest version at the target; None if there is no lakehouse yet.
    base: Snapshot | None

    @classmethod
    def open(cls, lake: Lakehouse, source: Snapshot, choice: Choice) -> TargetLakehouse:
        """Open a target.

        Args:
            lake: The lakehouse at the target, which need not exist yet.
            source: The version to export.
            choice: The selected content.

        Raises:
            InvalidInputError: The lakehouse at the target is not an export of the source with the same selection.
            StorageError: A storage request failed.
        """
        if not has_roots(lake.storage):
            return cls(lake, None)
        target = cls(lake, lake.snapshot())
        target._check_exported(source, choice)
        return target

    def _check_exported(self, source: Snapshot, choice: Choice) -> None:
        """Raise InvalidInputError unless the target contains an export with the same selection and no other changes."""
        for info in self.lake.history():
            if info.operation == EXPORT and _SOURCE_ID in info.properties:
                expected = _source_properties(source, choice)
                different = sorted(
                    name
                    for name in (_SOURCE_ID, "level", "namespaces", "definitions")
                    if info.properties.get(name) != expected.get(name)
                )
                if different:
                    raise InvalidInputError(
                        f"the lakehouse at {self.lake.root} is an export with a different"
                        f" {' and '.join(different)}; export to another target",
                        path=self.lake.root,
                    )
                return
            if info.operation not in _PRESERVING_OPERATIONS:
                raise InvalidInputError(
                    f"the lakehouse at {self.lake.root} cannot take the export: its version {info.version}"
                    f" ({info.operation or 'no operation'}) is not an export, and its changes would be lost; export to"
                    " another target",
                    path=self.lake.root,
                    version=info.version,
                )
        raise InvalidInputError(
            f"the lakehouse at {self.lake.root} is not an export; export to another target", path=self.lake.root
        )

    def entries(self) -> dict[str, str]:
        """Return the location of each key of the target; empty if there is no lakehouse yet."""
        return {} if self.base is None else dict(scan(self.base.files.nodes, self.base.root))


def leaves_objects(info: VersionInfo) -> bool:
    """Whether a version has the same objects as the previous version, according to its operation."""
    is_export_of_another = info.operation == EXPORT and _SOURCE_ID in info.properties
    return info.operation in _PRESERVING_OPERATIONS and not is_export_of_another


def check_is_export_of(exported: Snapshot, source: Snapshot, name: str) -> None:
    """Check that a version at another root contains an export of this lakehouse.

    Args:
        exported: The version at the other root.
        source: The latest version of this lakehouse.
        name: The name of the export.

    Raises:
        InvalidInputError: Another lakehouse now uses that root.
    """
    for info in history(exported.files, latest=exported):
        if info.operation == EXPORT and _SOURCE_ID in info.properties:
            if info.properties[_SOURCE_ID] == source.definition.id:
                return
            break
    root = exported.files.storage.root
    raise InvalidInputError(
        f"version {exported.version} of the lakehouse at {root} is not export {name!r} of this lakehouse: another"
        " lakehouse replaced it; drop the export",
        path=exported.location,
        version=exported.version,
    )


@dataclass(frozen=True)
class TargetExport:
    """Write one export to another root."""

    #: The lakehouse at the target.
    target: TargetLakehouse
    #: The version to export.
    source: Snapshot
    #: The root of the source.
    source_root: str
    #: The record of the export.
    record: ExportRecord
    #: The selected content.
    choice: Choice

    @property
    def definition(self) -> LakehouseDef:
        """The definition of a new lakehouse: the settings of the source without its operation state.

        All exports from this source to this root have the same id, so that the table folders of an interrupted export
        also belong to the export that is finished later.
        """
        name = f"{self.source.definition.id}/lakehouse at {self.record.target_uri}"
        return replace(
            without_acknowledged(self.source.definition),
            id=str(uuid.uuid5(uuid.NAMESPACE_URL, name)),
            exports=(),
            exported_snapshots={},
            expirations=(),
            maximum_version_age_millis_overrides={},
            orphans_removed_before_millis=0,
            table_root="",
            sources=self._sources,
            parent=None,
        )

    @property
    def _sources(self) -> tuple[SourceRecord, ...]:
        """The source lakehouses that the target may read; empty for a full export."""
        if self.choice.level == ExportLevel.FULL:
            return ()
        return sources_of_copy(self.source_root, self.source.definition, self.source.version)

    @property
    def target_definition(self) -> LakehouseDef:
        """The definition of the existing or new lakehouse at the target."""
        return self.definition if self.target.base is None else self.target.base.definition

    def begin(self) -> Transaction | None:
        """Prepare the target before any file is copied, so that an unsuitable target is rejected early.

        Returns:
            The transaction for the changes. None for a new lakehouse, whose definition is written, and for a minimal
            export, whose whole tree is replaced. Committing fails after the time to live of the transaction, because
            the copied files may have been removed as orphans by then.
        """
        lake = self.target.lake
        if self.target.base is None:
            write_lakehouse_definition(lake.storage, self._definition_path, self.definition)
            return None
        self._record_sources()
        if self.choice.level == ExportLevel.MINIMAL:
            return None
        txn = lake.transaction(message=self._message, properties=self._own_properties, operation=EXPORT)
        txn.require(self.check_unchanged)
        return txn

    def _record_sources(self) -> None:
        """Record sources that are missing at the target because an earlier version of this library created it."""
        assert self.target.base is not None
        recorded = self.target.base.definition.sources
        recorded_roots = {source.root for source in recorded}
        missing = tuple(source for source in self._sources if source.root not in recorded_roots)
        if missing:
            self.target.lake.alter_definition(self._message, sources=(*recorded, *missing))

    def check_unchanged(self, latest: Snapshot) -> None:
        """Raise MaintenanceBlockedError if objects changed at the target since it was opened."""
        base = self.target.base
        if base is not None and diff_trees(base.files.nodes, base.root, latest.root):
            raise MaintenanceBlockedError(
                f"the export failed: the lakehouse at {self.target.lake.root} was changed during the export; retry",
                path=self.target.lake.root,
                version=latest.version,
            )

    def whole_tree(self, entries: Sequence[tuple[str, str]], write: Write) -> NodeFile:
        """Write the nodes of the exported tree and return its root, without system rows.

        The root of a minimal export is a copy of the source's root with full URIs for all locations.

        Args:
            entries: The entries, as (key, location).
            write: Receives the files of the other nodes, by path.
        """
        if self.choice.level == ExportLevel.MINIMAL:
            return self.source.root.rebased(lambda location: to_uri(self.source_root, location))
        limits, created_at_ms = TreeLimits.of(self.definition), self.record.created_at_millis
        return build_root(entries, limits, export_id(self.record), created_at_ms, write)

    def put(self, tree: NodeFile) -> int:
        """Commit a complete tree at the target, and return the version.

        Raises:
            MaintenanceBlockedError: The target was changed or created by another process.
            CommitConflictError: All attempts conflicted with other commits.
            StorageError: A storage request failed.
        """
        if self.target.base is None:
            return self._create(tree)
        lake = self.target.lake
        base = lake.snapshot()
        self.check_unchanged(base)
        info = CommitInfo(EXPORT, self._message, properties=self._own_properties)
        return lake.commit(_SourceTree(tree, info, self.check_unchanged), base)

    def _create(self, tree: NodeFile) -> int:
        lake, limits = self.target.lake, TreeLimits.of(self.definition)
        info = CommitInfo(EXPORT, self._message, properties=self._own_properties)
        commit_id = str(uuid.uuid5(export_id(self.record), "commit"))
        root = first_root(lake.storage, self.definition, self._definition_path, commit_id, info, CommitCost(1, 1, 0))
        tree_edit = carried_tree(
            lake.files.nodes, tree, limits, created_at_ms=root.created_at_ms, root_system=root.system
        )
        create_fresh(lake.storage, tree_edit.node_files)
        if not create_first_version(lake.files, self.definition, replace(tree_edit.root, system=root.system)):
            raise MaintenanceBlockedError(
                f"the export failed: another process created a lakehouse at {lake.root}; retry",
                path=lake.root,
            )
        return 0

    def commit(self, txn: Transaction, entries: Sequence[tuple[str, str]]) -> int:
        """Commit the differences between the target and the exported entries, and return the version.

        Args:
            txn: The transaction that :meth:`begin` returned.
            entries: The exported entries, as (key, location), each namespace before its tables.

        Raises:
            CommitConflictError: Another commit conflicts.
            MaintenanceBlockedError: The target was changed by another process.
        """
        current, wanted = self.target.entries(), dict(entries)
        for key in current.keys() - wanted.keys():
            txn.restore_entry(key, None)
        for key, location in entries:
            if current.get(key) != location:
                txn.restore_entry(key, location, mirrors=True)
        return txn.commit()

    @property
    def _own_properties(self) -> dict[str, str]:
        return {**_source_properties(self.source, self.choice), "source": self.source_root}

    @property
    def _definition_path(self) -> str:
        return lakehouse_def_copy(export_id(self.record))

    @property
    def _message(self) -> str:
        return f"version {self.record.version} of {self.source_root}"[:500]


@dataclass(frozen=True)
class _SourceTree:
    """Commit the tree of the source under the definition of the target.

    This replaces the whole tree at the target, because nodes of an earlier export may be deleted at the source after
    that export is dropped. Only the version that is currently exported is guaranteed to keep its nodes.
    """

    tree: NodeFile
    info: CommitInfo
    check_unchanged: Callable[[Snapshot], None]

    def draft(self, base: Snapshot, stamp: RootStamp) -> Draft | None:
        if _without_system(base.root) == _without_system(self.tree):
            return None
        return draft_of_tree(base, stamp, self.tree, self.info)

    def rebase(self, base: Snapshot, latest: Snapshot) -> None:
        self.check_unchanged(latest)


def _without_system(root: NodeFile) -> NodeFile:
    return replace(root.rebased(lambda location: location), system={})


def _source_properties(source: Snapshot, choice: Choice) -> dict[str, str]:
    """Return the commit properties of a version at the target that describe its source."""
    properties = {
        _SOURCE_ID: source.definition.id,
        "source_version": str(source.version),
        "level": choice.level.name.lower(),
        "namespaces": _namespaces_property(choice.namespaces),
        "definitions": "copied" if choice.copies_definitions else "",
    }
    return {name: value for name, value in properties.items() if value}


def _namespaces_property(namespaces: Sequence[str]) -> str:
    """Return a text that identifies a selection of namespaces; a digest if the names are too long for a commit."""
    text = " ".join(sorted(namespaces))  # names contain no spaces
    if len(text.encode()) <= _MAX_NAMESPACES_BYTES:
        return text
    return f"{len(namespaces)} with sha256 {hashlib.sha256(text.encode()).hexdigest()}"
