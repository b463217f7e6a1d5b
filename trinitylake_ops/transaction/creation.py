"""Create a lakehouse: its definition and version 0."""

from __future__ import annotations

import functools
import uuid

from trinitylake_ops.access.allowed_roots import FileAddress
from trinitylake_ops.access.table_owners import claim_table_root
from trinitylake_ops.errors import (
    CommitOutcomeUnknownError,
    FileExistsAlreadyError,
    InvalidDefinitionError,
    InvalidInputError,
    LakehouseExistsError,
    StorageError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import METADATA_LOCATION, LakehouseDef
from trinitylake_ops.format.file_names import ROOT_NAMING, ROOT_PREFIX, new_lakehouse_def_path, root_naming
from trinitylake_ops.format.keys import COMMIT_ID, COMMIT_INFO, CREATED_AT_MILLIS, LAKEHOUSE_DEF, TABLE_KEY_PREFIX
from trinitylake_ops.format.locations import normalize_root_uri
from trinitylake_ops.format.node_file import NodeFile
from trinitylake_ops.storage.conditional_create import create_fresh
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.transaction.commit import discard
from trinitylake_ops.transaction.publish import create_root
from trinitylake_ops.tree.node import TreeLimits
from trinitylake_ops.tree.search import prefix_end, scan
from trinitylake_ops.versions.commit_info import CommitCost, CommitInfo
from trinitylake_ops.versions.root_files import KnownRoot
from trinitylake_ops.versions.snapshot import LakehouseFiles, Snapshot
from trinitylake_ops.versions.time_travel import check_time


def create_lakehouse(files: LakehouseFiles, definition: LakehouseDef) -> None:
    """Create an empty version 0 with the default naming of roots.

    Args:
        files: The files of the lakehouse.
        definition: The lakehouse definition.

    Raises:
        LakehouseExistsError: There is a lakehouse at this root.
        InvalidDefinitionError: The node size exceeds the read limit of the storage.
        CommitOutcomeUnknownError: Version 0 may or may not have been created.
        StorageError: A request failed, or the storage overwrites files that should only be created if absent.
    """
    storage = files.storage
    if definition.node_file_max_size_bytes > storage.whole_file_limit_bytes:
        raise InvalidDefinitionError(
            f"node_file_max_size_bytes is {definition.node_file_max_size_bytes}, above the read limit of"
            f" {storage.whole_file_limit_bytes} bytes; choose a smaller size, or raise the storage option"
            " 'whole_file_limit_bytes' for all clients of the lakehouse"
        )
    if has_roots(storage):
        raise LakehouseExistsError(f"a lakehouse already exists at {storage.root}", path=storage.root)
    claim_named_root(files, definition)
    path = new_lakehouse_def_path()
    info = CommitInfo("init", "create the lakehouse")
    try:
        write_lakehouse_definition(storage, path, definition)
        root = first_root(storage, definition, path, str(uuid.uuid4()), info)
        is_ours = create_first_version(files, definition, root)
    except CommitOutcomeUnknownError:
        raise
    except TrinityLakeError:
        discard(storage, [path])
        raise
    if not is_ours:
        discard(storage, [path])
        raise LakehouseExistsError(f"another process has just created a lakehouse at {storage.root}", path=storage.root)


def claim_named_root(files: LakehouseFiles, definition: LakehouseDef) -> None:
    """Claim the configured table root, if any, for this lakehouse.

    Does nothing if the lakehouse is not allowed to access this root, because nothing is ever written there. Raises
    StorageError.
    """
    if not definition.table_root:
        return
    external_storages, root = files.nodes.external_storages, normalize_root_uri(definition.table_root)
    if external_storages.allowed_roots.may_be_named(root) or external_storages.allowed_roots.is_allowed(root):
        claim_table_root(external_storages.storage_of(FileAddress(root, "")), definition.id, files.storage.root)


def check_no_table_under(base: Snapshot, table_root: str) -> None:
    """Raise InvalidInputError if the current table root contains tables, which a change would make unreachable."""
    root = normalize_root_uri(table_root)
    for key, location in scan(base.files.nodes, base.root, TABLE_KEY_PREFIX, prefix_end(TABLE_KEY_PREFIX)):
        definition = base.table_at(location)
        if definition.is_managed and definition.format_properties.get(METADATA_LOCATION, "").startswith(root):
            name = base.keys.decode(key)
            raise InvalidInputError(
                f"the table root cannot be changed: table {name} is under the current one, {root}; move the files and"
                " run: trinitylake relocate --table-root",
                path=location,
            )


def has_roots(storage: Storage) -> bool:
    """Whether the root of any version exists. Raises StorageError."""
    return any(root_naming(info.path) for info in storage.list(ROOT_PREFIX))


def write_lakehouse_definition(storage: Storage, path: str, definition: LakehouseDef) -> None:
    """Write the definition of a new lakehouse, and check that the storage is suitable. Raises StorageError."""
    content = definition.to_bytes(path)
    create_fresh(storage, {path: content})
    _check_storage(storage, path, content)


def first_root(
    storage: Storage,
    definition: LakehouseDef,
    definition_path: str,
    commit_id: str,
    info: CommitInfo,
    cost: CommitCost | None = None,
) -> NodeFile:
    """Return the root of version 0, which only contains system rows.

    Args:
        storage: The storage, which provides the time.
        definition: The lakehouse definition.
        definition_path: The path of the definition.
        commit_id: The id of the commit, a UUID.
        info: The commit info.
        cost: The cost in the commit info. By default the cost of an empty lakehouse.

    Raises:
        StorageError: The clock of the storage is wrong.
    """
    created_at_ms = storage.now_ms()
    check_time(created_at_ms)
    system = {
        LAKEHOUSE_DEF: definition_path,
        CREATED_AT_MILLIS: str(created_at_ms),
        COMMIT_ID: commit_id,
        COMMIT_INFO: info.encode(cost or CommitCost(1, 3, len(definition.to_bytes(definition_path))), 0),
    }
    return NodeFile(system=system)


def create_first_version(files: LakehouseFiles, definition: LakehouseDef, root: NodeFile) -> bool:
    """Create version 0.

    Args:
        files: The files of the lakehouse.
        definition: The lakehouse definition.
        root: The root of version 0.

    Returns:
        False if another writer has created version 0.

    Raises:
        CommitOutcomeUnknownError: Version 0 may or may not have been created.
        StorageError: Version 0 was not created.
    """
    files.roots.known_naming = ROOT_NAMING
    path = files.roots.path(0)
    is_ours = create_root(KnownRoot(0, path, TreeLimits.of(definition).encoded(root, path), root), files.roots)
    if is_ours:
        files.hint.note(0)
    return is_ours


def _check_storage(storage: Storage, path: str, content: bytes) -> None:
    """Read back a file that was just created, and create it again.

    The read detects clients that have write but not read permission. The second create detects servers that overwrite
    existing files, on which commits would overwrite each other (S1).
    """
    if storage.read(path) != content:
        raise StorageError(
            f"the storage of {storage.root} does not return the bytes that were written; check its address",
            path=path,
        )
    try:
        storage.send_with_retries(functools.partial(storage.create, path, content))
    except FileExistsAlreadyError:
        return
    raise StorageError(
        f"no lakehouse was created: the storage of {storage.root} ignores create-if-absent (If-None-Match), so"
        " concurrent commits would be lost; use another storage",
        path=path,
    )
