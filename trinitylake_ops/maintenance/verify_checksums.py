"""What a deep verify could compare with a checksum that the file itself carries, and what it could not."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping

from trinitylake_ops.format.file_names import OPERATIONS_PREFIX, TABLES_PREFIX


class ChecksumTally:
    """Counts files that were read whole, each once, by whether they carry a checksum."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, bool]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Count nothing from now on: what is read again, or for something else than its own check, is not told."""
        self._is_closed = True

    def count(self, kind: str, path: str, has_checksum: bool) -> None:
        """Take a file that was read whole and found in order; ``kind`` is a word for it, in the singular."""
        if self._is_closed:
            return
        with self._lock:
            self._seen[path] = (kind, has_checksum)

    @property
    def checked_files(self) -> int:
        """How many files were compared with their checksums."""
        return sum(has_checksum for _, has_checksum in self._seen.values())

    @property
    def without_checksum(self) -> Mapping[str, int]:
        """How many files carry none, by their kind, in the order of these."""
        counts = Counter(kind for kind, has_checksum in self._seen.values() if not has_checksum)
        return dict(sorted(counts.items()))


def kind_of(path: str) -> str:
    """Return the word for a file of the catalog."""
    if path.startswith((OPERATIONS_PREFIX, TABLES_PREFIX)):
        return "operation file"
    return "definition" if path.endswith(".binpb") else "node"


def told(without_checksum: Mapping[str, int]) -> str:
    """Return the numbers of files by kind as text."""
    return ", ".join(f"{count} {kind if count == 1 else _plural(kind)}" for kind, count in without_checksum.items())


def _plural(kind: str) -> str:
    return f"{kind}s"
