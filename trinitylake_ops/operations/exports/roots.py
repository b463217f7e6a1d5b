"""Writes the root of an export: a root under the same root, or a version of a lakehouse of its own.

Nodes are built anew from the entries. Their names are made of the export's id. So an export that was cut off, or is
made twice at a time, writes the same files again.
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

#: Operations that leave the objects of a lakehouse as they are: exports go on after them.
_LEAVE_OBJECTS = frozenset(
    {"compact", "expire", "undelete", "purge", "orphans", "reconcile", "alter-definition", EXPORT, "drop-export"}
    | {CLONE, "drop-clone", "refresh"}  # what keeps versions for clones of it
)
_SOURCE_ID = "source_id"
_LONGEST_NAMESPACES_BYTES = 1000


def export_id(record: ExportRecord) -> uuid.UUID:
    """Return the id of an export, which its manifest's name holds."""
    return uuid.UUID(record.manifest_path.removeprefix("_ops/export-").removesuffix(".json"))


def built_root(
    entries: Sequence[tuple[str, str]], limits: TreeLimits, identifier: uuid.UUID, created_at_ms: int, write: Write
) -> NodeFile:
    """Return the root, without system rows, of a tree of these entries. The other nodes are passed to ``write``.

    Raises InvalidInputError if URIs of files that are not copied make a node too large.
    """
    numbers = itertools.count()

    def checked(files: Mapping[str, bytes]) -> None:
        largest_bytes = max(map(len, files.values()))
        if largest_bytes > limits.node_file_max_size_bytes:
            raise InvalidInputError(
                f"a node of the export would have {largest_bytes} bytes, more than node_file_max_size_bytes"
                f" ({limits.node_file_max_size_bytes}), as it names files of the source by their URIs; export with"
                " definitions, or full"
            )
        write(files)

    return bulk_load(
        entries,
        limits,
        created_at_ms=created_at_ms,
        write=checked,
        new_path=lambda: new_node_path(derived_uuid(identifier, f"node {next(numbers)}")),
    )


def root_in_same_lakehouse(source: Snapshot, tree: NodeFile, definition_path: str, path: str) -> bytes:
    """Return the root of an export at ``path`` under its source's root.

    It has the source's system rows and another tree.
    """
    system = {**source.root.system, LAKEHOUSE_DEF: definition_path}
    return source.limits.encoded(replace(tree, system=system), path)


def copied_root(source: Snapshot, path: str) -> bytes:
    """Return the copy at ``path`` of a version's root.

    A root without seals is copied byte for byte. Raises StorageError.
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
    """Another root, the target of an export. ``base`` is its latest version, None if there is no lakehouse yet."""

    lake: Lakehouse
    base: Snapshot | None

    @classmethod
    def open(cls, lake: Lakehouse, source: Snapshot, choice: Choice) -> TargetLakehouse:
        """Look at a target. Raises InvalidInputError if a lakehouse is there that is not an export like this one."""
        if not has_roots(lake.storage):
            return cls(lake, None)
        target = cls(lake, lake.snapshot())
        target._check_exported(source, choice)
        return target

    def _check_exported(self, source: Snapshot, choice: Choice) -> None:
        """Raise InvalidInputError unless the target has the objects of an export with the same choice."""
        for info in self.lake.history():
            if info.operation == EXPORT and _SOURCE_ID in info.properties:
                expected = _properties(source, choice)
                different = sorted(
                    name
                    for name in (_SOURCE_ID, "level", "namespaces", "definitions")
                    if info.properties.get(name) != expected.get(name)
                )
                if different:
                    raise InvalidInputError(
                        f"the lakehouse at {self.lake.root} is an export with another {' and '.join(different)};"
                        " export to another target",
                        path=self.lake.root,
                    )
                return
            if info.operation not in _LEAVE_OBJECTS:
                raise InvalidInputError(
                    f"version {info.version} of the lakehouse at {self.lake.root} ({info.operation or 'no operation'})"
                    " is no export; exporting into it would undo what was changed there, so export to another target",
                    path=self.lake.root,
                    version=info.version,
                )
        raise InvalidInputError(
            f"the lakehouse at {self.lake.root} is no export; export to another target", path=self.lake.root
        )

    def entries(self) -> dict[str, str]:
        """Return the target's entries: key -> location."""
        return {} if self.base is None else dict(scan(self.base.files.nodes, self.base.root))


def leaves_objects(info: VersionInfo) -> bool:
    """Whether a version has the same objects as the one before, as its operation says."""
    is_from_elsewhere = info.operation == EXPORT and _SOURCE_ID in info.properties
    return info.operation in _LEAVE_OBJECTS and not is_from_elsewhere


def check_is_export_of(exported: Snapshot, source: Snapshot, name: str) -> None:
    """Raise InvalidInputError if a version at another root does not hold an export of this lakehouse."""
    for info in history(exported.files, latest=exported):
        if info.operation == EXPORT and _SOURCE_ID in info.properties:
            if info.properties[_SOURCE_ID] == source.definition.id:
                return
            break
    root = exported.files.storage.root
    raise InvalidInputError(
        f"version {exported.version} of the lakehouse at {root} was not made of this one: another lakehouse has taken"
        f" the place of export {name!r}; drop the export",
        path=exported.location,
        version=exported.version,
    )


@dataclass(frozen=True)
class TargetExport:
    """Writes one export into another root."""

    target: TargetLakehouse
    source: Snapshot
    source_root: str
    record: ExportRecord
    choice: Choice

    @property
    def definition(self) -> LakehouseDef:
        """The definition of the new lakehouse: settings of the source, without the state of its operations.

        Its id is the same for all exports from this source to this root. So table folders of a cut-off export belong to
        the finished one.
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
        """The sources of the lakehouse at the target: none if everything is copied."""
        if self.choice.level == ExportLevel.FULL:
            return ()
        return sources_of_copy(self.source_root, self.source.definition, self.source.version)

    @property
    def target_definition(self) -> LakehouseDef:
        """The definition that the lakehouse at the target has, or will have."""
        return self.definition if self.target.base is None else self.target.base.definition

    def begin(self) -> Transaction | None:
        """Prepare the target before anything is copied. A new target gets its definition, another one a transaction.

        So a target that cannot hold a lakehouse is refused early. Files that are older than the transaction's time to
        live at its commit may be gone as orphans. They are not committed. A minimal export copies no such files, and
        takes none.
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
        """Update the sources of a target that lacks some, as an earlier version of this program made it."""
        assert self.target.base is not None
        known = self.target.base.definition.sources
        missing = tuple(one for one in self._sources if one.root not in {record.root for record in known})
        if missing:
            self.target.lake.alter_definition(self._message, sources=(*known, *missing))

    def check_unchanged(self, latest: Snapshot) -> None:
        """Raise MaintenanceBlockedError if objects changed at the target.

        Only all differences together make a version.
        """
        base = self.target.base
        if base is not None and diff_trees(base.files.nodes, base.root, latest.root):
            raise MaintenanceBlockedError(
                f"the lakehouse at {self.target.lake.root} was changed meanwhile; export once more",
                path=self.target.lake.root,
                version=latest.version,
            )

    def whole_tree(self, entries: Sequence[tuple[str, str]], write: Write) -> NodeFile:
        """Write the nodes of a tree of these entries. Returns its root, without system rows.

        The root of a minimal export is the source's, with full URIs for all that it points to.
        """
        if self.choice.level == ExportLevel.MINIMAL:
            return self.source.root.rebased(lambda location: to_uri(self.source_root, location))
        limits, created_at_ms = TreeLimits.of(self.definition), self.record.created_at_millis
        return built_root(entries, limits, export_id(self.record), created_at_ms, write)

    def put(self, tree: NodeFile) -> int:
        """Commit a given tree at the target, and return the version.

        Raises MaintenanceBlockedError, CommitConflictError, StorageError.
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
        edited = carried_tree(lake.files.nodes, tree, limits, created_at_ms=root.created_at_ms, root_system=root.system)
        create_fresh(lake.storage, edited.node_files)
        if not create_first_version(lake.files, self.definition, replace(edited.root, system=root.system)):
            raise MaintenanceBlockedError(
                f"somebody else created a lakehouse at {lake.root} meanwhile; export once more, which says whether it"
                " can take this export",
                path=lake.root,
            )
        return 0

    def commit(self, txn: Transaction, entries: Sequence[tuple[str, str]]) -> int:
        """Commit the differences from the target's version, and return the version. Raises CommitConflictError."""
        there, wanted = self.target.entries(), dict(entries)
        for key in there.keys() - wanted.keys():
            txn.restore_entry(key, None)
        for key, location in entries:  # namespaces before their tables
            if there.get(key) != location:
                txn.restore_entry(key, location, mirrors=True)
        return txn.commit()

    @property
    def _own_properties(self) -> dict[str, str]:
        return {**_properties(self.source, self.choice), "source": self.source_root}

    @property
    def _definition_path(self) -> str:
        return lakehouse_def_copy(export_id(self.record))

    @property
    def _message(self) -> str:
        return f"version {self.record.version} of {self.source_root}"[:500]


@dataclass(frozen=True)
class _SourceTree:
    """The source's tree under the definition of the target.

    It replaces the whole tree there. Nodes that an earlier export points to may be gone from the source once that
    export is dropped. Only the version that is exported now is sure to keep its own.
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


def _properties(source: Snapshot, choice: Choice) -> dict[str, str]:
    """Return the entries of a target's version about its source."""
    named = {
        _SOURCE_ID: source.definition.id,
        "source_version": str(source.version),
        "level": choice.level.name.lower(),
        "namespaces": _shown(choice.namespaces),
        "definitions": "copied" if choice.copies_definitions else "",
    }
    return {name: value for name, value in named.items() if value}


def _shown(namespaces: Sequence[str]) -> str:
    """Return a text that identifies a choice of namespaces. If a commit cannot name so many, it is a digest."""
    text = " ".join(sorted(namespaces))  # no name holds a space
    if len(text.encode()) <= _LONGEST_NAMESPACES_BYTES:
        return text
    return f"{len(namespaces)} with sha256 {hashlib.sha256(text.encode()).hexdigest()}"
