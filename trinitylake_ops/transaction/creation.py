"""Creating a lakehouse: its definition and version 0."""

from __future__ import annotations

import uuid

from trinitylake_ops.errors import (
    CommitOutcomeUnknownError,
    FileExistsAlreadyError,
    LakehouseExistsError,
    StorageError,
    TrinityLakeError,
)
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import ROOT_NAMING, ROOT_PREFIX, new_lakehouse_def_path, root_naming
from trinitylake_ops.format.node_file import (
    COMMIT_ID,
    COMMIT_INFO,
    CREATED_AT_MILLIS,
    LAKEHOUSE_DEF,
    NodeFile,
    encode_node,
)
from trinitylake_ops.storage.interface import Storage
from trinitylake_ops.storage.write_outcome import create_fresh
from trinitylake_ops.transaction.commit import check_time, create_root, discard
from trinitylake_ops.transaction.commit_info import CommitCost, CommitInfo
from trinitylake_ops.transaction.snapshot import LakehouseFiles


def create_lakehouse(files: LakehouseFiles, definition: LakehouseDef) -> None:
    """Create version 0, empty, under our naming of roots.

    Raises LakehouseExistsError, CommitOutcomeUnknownError, and StorageError, also for a storage that
    overwrites what it was asked to create.
    """
    storage = files.storage
    if any(root_naming(info.path) for info in storage.list(ROOT_PREFIX)):
        raise LakehouseExistsError(f"there is a lakehouse at {storage.root} already", path=storage.root)
    created_at_ms = storage.now_ms()
    check_time(created_at_ms)
    path = new_lakehouse_def_path()
    commit_id = str(uuid.uuid4())
    system = {
        LAKEHOUSE_DEF: path,
        CREATED_AT_MILLIS: str(created_at_ms),
        COMMIT_ID: commit_id,
        COMMIT_INFO: CommitInfo("init", "create the lakehouse").encode(CommitCost(1, 3, len(definition.to_bytes()))),
    }
    files.roots.known_naming = ROOT_NAMING
    content = definition.to_bytes()
    try:
        create_fresh(storage, {path: content})
        _check_storage(storage, path, content)
        data = encode_node(NodeFile(system=system), definition.order, definition.node_compression)
        is_ours = create_root(files.roots, 0, data, commit_id)
    except CommitOutcomeUnknownError:
        raise
    except TrinityLakeError:
        discard(storage, [path])
        raise
    if not is_ours:
        discard(storage, [path])
        raise LakehouseExistsError(f"another process has just created a lakehouse at {storage.root}", path=storage.root)
    files.hint.write(0)


def _check_storage(storage: Storage, path: str, content: bytes) -> None:
    """Read back a file that was just created, and create it again.

    Some users may write and not read. Some servers overwrite what is there, and would let commits
    overwrite each other (S1).
    """
    if storage.read(path) != content:
        raise StorageError(
            f"the storage of {storage.root} returns other bytes than were written; check that its address is right",
            path=path,
        )
    try:
        storage.create(path, content)
    except FileExistsAlreadyError:
        return
    raise StorageError(
        f"the storage of {storage.root} overwrites a file that was to be created only if absent (If-None-Match), so"
        " concurrent commits would be lost; nothing was created, keep the lakehouse elsewhere",
        path=path,
    )
