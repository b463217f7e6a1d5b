"""Format versions as rows of a table, with the committer and the changes of each."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from trinitylake_ops import Lakehouse
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import Snapshot
from trinitylake_ops.versions.undone import find_undone

if TYPE_CHECKING:
    from trinitylake_ops.operations import VersionDiff

_MAX_SECONDS = 10.0
_MAX_TABLES = 3  # named per version

COLUMNS = (
    "version", "created (UTC)", "by", "operation", "run", "tables", "rows", "files", "bytes", "state",
)  # fmt: skip
#: The last column, if any: links to actions on a version.
ACTIONS = "what to do"

#: The changes of a version: the tables, and the rows, files and bytes added and removed.
Changes: TypeAlias = tuple[str, str, str, str]


class VersionRows:
    """Formats versions as rows. Orchestrators override it to add columns that only they can fill."""

    __slots__ = ()

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows."""
        return COLUMNS

    def rows(
        self,
        lake: Lakehouse,
        latest: Snapshot,
        infos: Sequence[VersionInfo],
        *,
        max_seconds: float = _MAX_SECONDS,
        is_wanted: Callable[[VersionDiff | None], bool] = lambda _diff: True,
    ) -> list[tuple[object, ...]]:
        """Return rows for versions, in order.

        Args:
            lake: The lakehouse.
            latest: The latest version.
            infos: The versions.
            max_seconds: The time limit for counting changes. Versions after that have no metrics.
            is_wanted: Whether to return a row for a version with these changes.
        """
        from trinitylake_ops.operations.diff.versions import diffs_of

        end_s = time.monotonic() + max_seconds
        versions = [info.version for info in infos]
        diffs = dict(diffs_of(lake, versions, latest, is_over=lambda: time.monotonic() > end_s))
        wanted = [info for info in infos if is_wanted(diffs[info.version])]
        undone = find_undone(latest.files, infos)
        marks = {info.version: undone.text(info.version) for info in infos}
        return self.rows_with(latest, wanted, {version: _changes(diff) for version, diff in diffs.items()}, marks)

    def rows_with(
        self,
        latest: Snapshot,
        infos: Sequence[VersionInfo],
        changes: Mapping[int, Changes],
        marks: Mapping[int, str],
        *,
        only: str | None = None,
    ) -> list[tuple[object, ...]]:
        """Return one row for each version, in order.

        Args:
            latest: The latest version.
            infos: The versions.
            changes: The changes of each version.
            marks: For each version, ``undone by 3`` if a later rollback undid it, otherwise an empty string.
            only: The table that links roll back; by default the whole lakehouse.
        """
        exports = _exports(latest)
        more = self.more(infos, latest.version, only, marks)
        return [
            (
                info.version,
                f"{info.created_at:%Y-%m-%d %H:%M:%S}",
                _person(info),
                info.operation or "",
                self.run_of(info.run_id),
                *changes[info.version],
                _state(info, latest.version, exports, marks),
                *cells,
            )
            for info, cells in zip(infos, more, strict=True)
        ]

    def run_of(self, run_id: str | None) -> object:
        """Return the cell for a run."""
        return run_id or ""

    def more(
        self, infos: Sequence[VersionInfo], latest: int, only: str | None, marks: Mapping[int, str]
    ) -> Sequence[tuple[object, ...]]:
        """Return the additional cells of versions, by default none.

        Args:
            infos: The versions.
            latest: The number of the latest version.
            only: The table that links roll back; None for the whole lakehouse.
            marks: The marks of versions, as for :meth:`rows_with`.
        """
        return [()] * len(infos)

    def last_passed(self, infos: Sequence[VersionInfo]) -> int | None:
        """Return the first of these versions whose checks passed, or None if none is known."""
        return None


def _person(info: VersionInfo) -> str:
    approved = f"approved by {info.approved_by}" if info.approved_by else ""
    return ", ".join(filter(None, (info.committer, approved)))


def _changes(diff: VersionDiff | None) -> Changes:
    """Return the tables that a version changed, and the rows, files and bytes added and removed."""
    from trinitylake_ops.operations.diff.versions import delta_texts

    if diff is None:
        return "?", "?", "?", "?"
    names = [one.name if one.kind == "changed" else f"{one.name} ({one.kind})" for one in diff.tables]
    more = len(names) - _MAX_TABLES
    listed = ", ".join(names[:_MAX_TABLES]) + (f" and {more:,} more" if more > 0 else "")
    return listed, *(delta_texts(diff.sums) if names else ("", "", ""))


def _exports(latest: Snapshot) -> Mapping[int, list[str]]:
    exports: dict[int, list[str]] = {}
    for record in latest.definition.exports:
        exports.setdefault(record.version, []).append(record.name)
    return exports


def _state(info: VersionInfo, latest: int, exports: Mapping[int, list[str]], marks: Mapping[int, str]) -> str:
    state = "latest" if info.version == latest else info.state
    names = exports.get(info.version, [])
    exported = f"export {', '.join(names[:_MAX_TABLES])}" if names else ""
    return ", ".join(filter(None, (state, marks[info.version], exported)))
