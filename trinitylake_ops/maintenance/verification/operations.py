"""Checks the files of operations, which no version names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from trinitylake_ops.errors import FileMissingError, StorageError
from trinitylake_ops.format.definitions import SavedTransaction
from trinitylake_ops.format.file_names import OPERATIONS_PREFIX, ORPHAN_BARRIER_PATH, parse_lease_path
from trinitylake_ops.format.file_sizes import MAX_FILE_LIST_BYTES, MAX_NOTE_BYTES
from trinitylake_ops.format.sealed_json import decode_sealed_json
from trinitylake_ops.maintenance.state.plan_file import PlanFile
from trinitylake_ops.maintenance.verification.report import Findings
from trinitylake_ops.maintenance.verification.storage import KnownFilesStorage
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo
from trinitylake_ops.storage.parallel import run_parallel

_BATCH = 256


def check_operation_files(known: KnownFilesStorage, listing: Mapping[str, FileInfo], findings: Findings) -> None:
    """Read all such files, and report those that are damaged or in the place of another one."""
    paths = sorted(path for path in listing if _decoder_of(path) is not None)
    for start in range(0, len(paths), _BATCH):
        batch = paths[start : start + _BATCH]
        errors = run_parallel(lambda path: _error_in(known, path), batch, known.concurrency)
        for path, error in zip(batch, errors, strict=True):
            if error is not None:
                findings.error("operation-file-damaged", error.message, path, None)


def _error_in(known: KnownFilesStorage, path: str) -> StorageError | None:
    decode = _decoder_of(path)
    assert decode is not None
    try:
        data = known.read(path, limit_bytes=_limit_bytes(path))
        decode(data, path)
    except FileMissingError:  # its operation has ended since the listing
        return None
    except StorageError as error:
        return error
    known.count_checksum(path, data)
    return None


def _limit_bytes(path: str) -> int:
    is_note = path == ORPHAN_BARRIER_PATH or parse_lease_path(path) is not None
    return MAX_NOTE_BYTES if is_note else MAX_FILE_LIST_BYTES


def _decoder_of(path: str) -> Callable[[bytes, str], object] | None:
    """Return the reader of such a file. None for other files, and for records of verify, which it reads anyway."""
    if not path.startswith(OPERATIONS_PREFIX) or path.startswith(TEMPORARY_PREFIX):
        return None
    if path.endswith(".binpb"):
        return SavedTransaction.from_bytes
    if path.startswith(f"{OPERATIONS_PREFIX}plan-"):
        return PlanFile.from_bytes
    return decode_sealed_json if path.endswith(".json") else None
