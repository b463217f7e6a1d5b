"""The page of versions: the last ones, what each changed, what checks found in it, and links that go back to it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.head_metadata import head_figures
from trinitylake_ops.dagster_plugin.metadata import Link, markdown_table
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.runs.beyond_public import RunContext, repository_of
from trinitylake_ops.dagster_plugin.runs.records import known_run
from trinitylake_ops.dagster_plugin.versions.findings import Findings, findings_by_version
from trinitylake_ops.dagster_plugin.versions.links import Links
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.maintenance import VersionDiff
from trinitylake_ops.maintenance.differences.versions import delta_texts, diffs_of
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import Snapshot

#: The metadata entry of the lakehouse that is the page.
LAST_VERSIONS = "last_versions"

#: How many versions a page has, and how long their changes may be counted.
MOST_VERSIONS = 12
_MOST_SECONDS = 10.0
_MOST_TABLES = 3  # named of one version

COLUMNS = (
    "version", "created (UTC)", "by", "operation", "run", "tables", "rows", "files", "bytes", "state", "checks",
    "what to do",
)  # fmt: skip


#: What a version changed: the tables, and rows, files and bytes that came and went.
Changes: TypeAlias = tuple[str, str, str, str]


@dataclass(frozen=True, slots=True)
class VersionsPage:
    """What a page of versions needs of Dagster: its records, a code location, and links."""

    instance: dg.DagsterInstance
    repository: dg.RepositoryDefinition | None
    names: LakehouseNames
    links: Links

    @classmethod
    def of(cls, context: Any, names: LakehouseNames, webserver_url: str) -> VersionsPage:
        """Return it of a run."""
        run_context: RunContext = context
        return cls(context.instance, repository_of(run_context), names, Links.of(run_context, names, webserver_url))

    def metadata(self, lake: Lakehouse) -> dict[str, Any]:
        """Return the entries of a materialization of the lakehouse: figures of the latest version, and the versions.

        What has been committed is not made to fail by a page that cannot be drawn: then an entry says why.
        """
        try:
            latest = lake.snapshot()
            return {LAST_VERSIONS: self.table(lake, latest), **head_figures(lake, latest)}
        except TrinityLakeError as error:
            return {LAST_VERSIONS: f"not shown: {error}"}

    def table(self, lake: Lakehouse, latest: Snapshot, limit: int = MOST_VERSIONS) -> dg.MarkdownMetadataValue:
        """Return the last versions as a table, newest first, below a link to the plan that undoes the last ones."""
        infos = list(lake.history(limit, latest))
        shown = markdown_table(COLUMNS, self.rows(lake, latest, infos))
        text = "go back to the last version whose checks passed"
        link = self.links.launchpad("rollback_plan", {"last_passed": True}, text)
        return shown if link is None else dg.MetadataValue.md(f"{link.markdown}\n\n{shown.md_str}")

    def rows(
        self,
        lake: Lakehouse,
        latest: Snapshot,
        infos: Sequence[VersionInfo],
        *,
        most_seconds: float = _MOST_SECONDS,
        is_wanted: Callable[[VersionDiff | None], bool] = lambda _diff: True,
    ) -> list[tuple[object, ...]]:
        """Return one row for each version whose changes are wanted, in order, with what it changed.

        Counting ends after a time; then the rest has no numbers.
        """
        end_s = time.monotonic() + most_seconds
        versions = [info.version for info in infos]
        diffs = dict(diffs_of(lake, versions, latest, is_over=lambda: time.monotonic() > end_s))
        shown = [info for info in infos if is_wanted(diffs[info.version])]
        return self.rows_with(latest, shown, {version: _changes(diff) for version, diff in diffs.items()})

    def rows_with(
        self, latest: Snapshot, infos: Sequence[VersionInfo], changes: Mapping[int, Changes], *, only: str | None = None
    ) -> list[tuple[object, ...]]:
        """Return one row for each version, in order, with known changes. Links go back to all of it, or one table."""
        found = findings_by_version(self.instance, self.repository, self.names, infos)
        exports = _exports(latest)
        return [
            (
                info.version,
                f"{info.created_at:%Y-%m-%d %H:%M:%S}",
                _person(info),
                info.operation or "",
                self._run(info.run_id),
                *changes[info.version],
                _state(info, latest.version, exports),
                found.get(info.version, Findings()),
                self._action(info, latest.version, only) or "",
            )
            for info in infos
        ]

    def _run(self, run_id: str | None) -> Link | str:
        """Return a link to a run of this instance; the id of another one as it is."""
        if not run_id:
            return ""
        return run_id if known_run(self.instance, run_id) is None else self.links.run(run_id)

    def _action(self, info: VersionInfo, latest: int, only: str | None) -> Link | None:
        if info.state == "expired":
            return self.links.launchpad("undelete", {"versions": str(info.version)}, "undelete")
        if info.version == latest:
            return self.links.launchpad("export_full", {"name": None, "version": str(info.version)}, "export")
        if info.state != "live":
            return None
        return self.links.roll_back(info.version, "go back", only)


def _person(info: VersionInfo) -> str:
    approved = f"approved by {info.approved_by}" if info.approved_by else ""
    return ", ".join(filter(None, (f"{info.user}@{info.host}" if info.user else "", approved)))


def _changes(diff: VersionDiff | None) -> Changes:
    """Return the tables that a version changed, with rows, files and bytes that came and went."""
    if diff is None:
        return "?", "?", "?", "?"
    names = [one.name if one.kind == "changed" else f"{one.name} ({one.kind})" for one in diff.tables]
    more = len(names) - _MOST_TABLES
    listed = ", ".join(names[:_MOST_TABLES]) + (f" and {more:,} more" if more > 0 else "")
    return listed, *(delta_texts(diff.sums) if names else ("", "", ""))


def _exports(latest: Snapshot) -> Mapping[int, list[str]]:
    exports: dict[int, list[str]] = {}
    for record in latest.definition.exports:
        exports.setdefault(record.version, []).append(record.name)
    return exports


def _state(info: VersionInfo, latest: int, exports: Mapping[int, list[str]]) -> str:
    state = "latest" if info.version == latest else info.state
    names = exports.get(info.version, [])
    return state + (f", export {', '.join(names[:_MOST_TABLES])}" if names else "")
