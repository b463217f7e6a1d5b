"""Which transactions may have lost files to a removal of orphans, and so may not commit (docs/protocol.md, "Orphans").

The lakehouse definition says before when those began, and so does a file: another program that goes back to an
older definition forgets the one, and knows nothing of the other.
"""

from __future__ import annotations

from trinitylake_ops.errors import CorruptFileError, FileMissingError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.format.file_names import ORPHAN_BARRIER_PATH
from trinitylake_ops.format.file_sizes import MAX_NOTE_BYTES
from trinitylake_ops.format.sealed_json import decode_sealed_json, encode_sealed_json
from trinitylake_ops.storage.interface import Storage

#: Orphans are older than any time to live and a margin of minutes: who is younger than that has lost nothing.
YOUNG_MS = 60_000
_FIELD = "orphans_removed_before_millis"


def removed_before_ms(storage: Storage, definition: LakehouseDef, begun_at_ms: int) -> int:
    """Return the begin before which a transaction may have lost files, in milliseconds since the epoch.

    The file is read for those that began longer than a minute ago. Raises CorruptFileError, StorageError.
    """
    known_ms = definition.orphans_removed_before_millis
    return known_ms if storage.now_ms() - begun_at_ms <= YOUNG_MS else max(known_ms, _read(storage))


def raise_barrier(storage: Storage, before_ms: int) -> None:
    """Let no transaction commit that began before; under the lease. One that is higher stays. Raises StorageError."""
    try:
        standing_ms = _read(storage)
    except CorruptFileError:
        standing_ms = 0
    if before_ms > standing_ms:
        storage.write(ORPHAN_BARRIER_PATH, encode_sealed_json({_FIELD: before_ms}, ORPHAN_BARRIER_PATH))


def _read(storage: Storage) -> int:
    try:
        data = storage.read(ORPHAN_BARRIER_PATH, limit_bytes=MAX_NOTE_BYTES)
        found = decode_sealed_json(data, ORPHAN_BARRIER_PATH)[_FIELD]
        if type(found) is not int or not 0 <= found <= storage.now_ms():  # none was ever raised beyond its own time
            raise TypeError(f"{_FIELD} is no time that has passed")
    except FileMissingError:
        return 0
    except (CorruptFileError, KeyError, TypeError) as error:
        raise CorruptFileError(
            "no number can be read that bars transactions from before orphans were removed; remove orphans once more,"
            " which writes it anew, and begin new transactions",
            path=ORPHAN_BARRIER_PATH,
        ) from error
    return found
