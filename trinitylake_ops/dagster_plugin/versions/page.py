"""The page of versions: the last ones, what each changed, what checks found in it, and links that go back to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.head_metadata import head_figures
from trinitylake_ops.dagster_plugin.metadata import markdown_table
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.runs.beyond_public import RunContext, repository_of
from trinitylake_ops.dagster_plugin.runs.records import known_run
from trinitylake_ops.dagster_plugin.versions.findings import Findings, findings_by_version, last_passed
from trinitylake_ops.dagster_plugin.versions.links import Links, go_back_text
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.operations.shown import Link
from trinitylake_ops.operations.versions import ACTIONS, COLUMNS, VersionRows
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import Snapshot

#: The metadata entry of the lakehouse that is the page.
LAST_VERSIONS = "last_versions"

#: How many versions a page has.
MOST_VERSIONS = 12
_MOST_LOOKED_AT = 200  # evaluations of each check, to find a version that passed


@dataclass(frozen=True, slots=True)
class VersionsPage(VersionRows):
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
        shown = markdown_table(self.columns, self.rows(lake, latest, infos))
        text = "go back to the last version whose checks passed"
        link = self.links.launchpad("rollback", {"to": {"last_passed": True}}, text)
        return shown if link is None else dg.MetadataValue.md(f"{link.markdown}\n\n{shown.md_str}")

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows."""
        return (*COLUMNS, "checks", ACTIONS)

    def run_of(self, run_id: str | None) -> object:
        """Return a link to a run of this instance; the id of another one as it is."""
        if not run_id:
            return ""
        return run_id if known_run(self.instance, run_id) is None else self.links.run(run_id)

    def more(
        self, infos: Sequence[VersionInfo], latest: int, only: str | None, marks: Mapping[int, str]
    ) -> Sequence[tuple[object, ...]]:
        """Return what checks found in versions, and a link that acts on each."""
        found = findings_by_version(self.instance, self.repository, self.names, infos)
        cells: list[tuple[object, ...]] = []
        for info in infos:
            findings = found.get(info.version, Findings())
            doubts = [marks[info.version], "checks failed" if findings.failed else ""]
            cells.append((findings, self._action(info, latest, only, doubts) or ""))
        return cells

    def last_passed(self, infos: Sequence[VersionInfo]) -> int | None:
        """Return the newest of some versions, newest first, that can be read and whose checks passed."""
        found = findings_by_version(self.instance, self.repository, self.names, infos, most_evaluations=_MOST_LOOKED_AT)
        return last_passed(infos, found)

    def _action(self, info: VersionInfo, latest: int, only: str | None, doubts: Sequence[str]) -> Link | None:
        if info.state == "expired":
            return self.links.launchpad("undelete", {"versions": str(info.version)}, "undelete")
        if info.version == latest:
            return self.links.launchpad("export", {"name": None, "version": info.version}, "export")
        if info.state != "live":
            return None
        return self.links.roll_back(info.version, go_back_text(doubts), only)
