"""What the root of each version records about it: time, operation, message, commit and rollback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trinitylake_ops.format.keys import COMMIT_ID, CREATED_AT_MILLIS, SEALED_AT_MILLIS, decode_commit_info
from trinitylake_ops.versions.history import rollback_from
from trinitylake_ops.versions.undone import rolled_back_to

_LONGEST_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """One version by its root. Values that its writer did not record are None, and so is the time of an unread root.

    ``rollback_from`` is the version before a rollback. ``rollback_to`` is the one, ``rollback_to`` the one whose
    content came back. Long texts are cut.
    """

    version: int
    created_at_ms: int | None = None
    operation: str | None = None
    message: str | None = None
    commit_id: str | None = None
    rollback_from: int | None = None
    rollback_to: int | None = None
    is_sealed: bool = False
    is_readable: bool = True

    @classmethod
    def of(cls, version: int, system: Mapping[str, str]) -> VersionRecord:
        """Return the record in the system rows of a root."""
        info = decode_commit_info(system)
        operation, message = (_text(info.get(name)) for name in ("operation", "message"))
        made = cls(
            version=version,
            created_at_ms=int(system[CREATED_AT_MILLIS]),
            operation=operation,
            message=message,
            commit_id=system.get(COMMIT_ID),
            is_sealed=SEALED_AT_MILLIS in system,
        )
        return made.with_rollback(rollback_from(version, system), info.get("properties"))

    def with_rollback(self, rollback_from: int | None, properties: object) -> VersionRecord:
        """Return the record of a rollback, where ``rollback_from`` is the version before."""
        if rollback_from is None:
            return self
        to = rolled_back_to(self.version, self.message, properties)
        return replace(self, rollback_from=rollback_from, rollback_to=to)


def _text(value: object) -> str | None:
    """Return a text of ``commit_info``, cut. None if another program wrote another type."""
    return value[:_LONGEST_TEXT_CHARS] if isinstance(value, str) and value else None
