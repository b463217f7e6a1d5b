"""The facts that the root of each version records: time, operation, message, commit and rollback."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from trinitylake_ops.format.keys import COMMIT_ID, CREATED_AT_MILLIS, SEALED_AT_MILLIS, decode_commit_info
from trinitylake_ops.versions.history import rollback_from
from trinitylake_ops.versions.undone import rolled_back_to

_MAX_TEXT_CHARS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionRecord:
    """A version, as described by its root. Fields that its writer did not record are None. Long texts are truncated."""

    version: int
    #: In milliseconds since the epoch; None if the root was not read.
    created_at_ms: int | None = None
    operation: str | None = None
    message: str | None = None
    commit_id: str | None = None
    #: For a rollback, the version before it.
    rollback_from: int | None = None
    #: For a rollback, the version whose content was restored.
    rollback_to: int | None = None
    is_sealed: bool = False
    is_readable: bool = True

    @classmethod
    def of(cls, version: int, system: Mapping[str, str]) -> VersionRecord:
        """Read the record from the system rows of a root.

        Args:
            version: The number of the version.
            system: The system rows.
        """
        info = decode_commit_info(system)
        operation, message = (_text(info.get(name)) for name in ("operation", "message"))
        record = cls(
            version=version,
            created_at_ms=int(system[CREATED_AT_MILLIS]),
            operation=operation,
            message=message,
            commit_id=system.get(COMMIT_ID),
            is_sealed=SEALED_AT_MILLIS in system,
        )
        return record.with_rollback(rollback_from(version, system), info.get("properties"))

    def with_rollback(self, rollback_from: int | None, properties: object) -> VersionRecord:
        """Return the record with the versions of a rollback.

        Args:
            rollback_from: The version before the rollback; None if the version is not a rollback.
            properties: The properties of the commit, as its writer recorded them.
        """
        if rollback_from is None:
            return self
        to = rolled_back_to(self.version, self.message, properties)
        return replace(self, rollback_from=rollback_from, rollback_to=to)


def _text(value: object) -> str | None:
    """Return a text from ``commit_info``, truncated; None if its writer recorded another type."""
    return value[:_MAX_TEXT_CHARS] if isinstance(value, str) and value else None
