"""The page of versions: what each changed, what asset checks found in it, and links to roll back.

An evaluation is about the version that its metadata names, if it is a check of the lakehouse itself. Else it is about
what its run staged, so about the version that this run committed, or one that was re-executed from it. Where nothing
of that was committed, it is about no version. Of a run that staged nothing it is about the materialization that it
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import dagster as dg

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin._dagster_internals import RunContext, repository_of
from trinitylake_ops.dagster_plugin.lakehouse_metadata import LAST_OF_A_RUN, VERSION, commit_metrics, lake_status
from trinitylake_ops.dagster_plugin.links import Links, rollback_link_text
from trinitylake_ops.dagster_plugin.metadata import DATA_VERSION_TAG, inline_lists, link_metadata
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.runs.records import known_run, planned_events, run_chain
from trinitylake_ops.declarations.rendering import Link, plain_markdown
from trinitylake_ops.declarations.version_rows import ACTIONS, COLUMNS, VersionRows
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.operations.status.due import DueState
from trinitylake_ops.operations.status.state import Status
from trinitylake_ops.versions.history import VersionInfo
from trinitylake_ops.versions.snapshot import Snapshot

_MOST_CHECKS = 100
_MOST_EVALUATIONS = 30  # of each check


@dataclass(frozen=True, slots=True)
class Findings:
    """The checks that looked at a version, each by its newest evaluation there: whether it passed, or only warned."""

    passed: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        bad = [(self.failed, "failed"), (self.warned, "warned")]
        notes = [f"{', '.join(names)} {what}" for names, what in bad if names]
        return "; ".join([*notes, *([f"{len(self.passed)} passed"] if self.passed else [])])

    @property
    def is_good(self) -> bool:
        """Whether some check passed, and none failed. Warnings do not count."""
        return bool(self.passed) and not self.failed


def findings_by_version(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition | None,
    names: LakehouseNames,
    infos: Sequence[VersionInfo],
    *,
    most_evaluations: int = _MOST_EVALUATIONS,
) -> dict[int, Findings]:
    """Return what checks of a code location found in versions. Of many checks only the first are asked."""
    if repository is None:
        return {}
    runs = _Runs(instance, {info.run_id: info.version for info in infos if info.run_id})
    versions = {info.version for info in infos}
    found: dict[int, Findings] = {}

    def near(key: dg.AssetCheckKey) -> tuple[bool, bool, str, str]:
        """Order checks: those of the lakehouse, those of assets with its name, all others."""
        is_ours = not names.name or key.asset_key.path[0] == names.name
        return key.asset_key != names.lakehouse_key, not is_ours, key.asset_key.to_string(), key.name

    keys = sorted(repository.asset_graph.asset_check_keys, key=near)
    for key in keys[:_MOST_CHECKS]:
        seen: set[int] = set()
        for evaluation, run_id in _evaluations(instance, key, most_evaluations):
            version = _version_of(evaluation, run_id, names, runs)
            if version in versions and version not in seen:
                seen.add(version)
                _place(found.setdefault(version, Findings()), evaluation).append(key.name)
    return found


def _place(findings: Findings, evaluation: dg.AssetCheckEvaluation) -> list[str]:
    if evaluation.passed:
        return findings.passed
    return findings.failed if evaluation.severity == dg.AssetCheckSeverity.ERROR else findings.warned


def _evaluations(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey, limit: int
) -> Iterator[tuple[dg.AssetCheckEvaluation, str]]:
    """Yield the evaluations of a check, newest first, with the run of each."""
    for record in instance.event_log_storage.get_asset_check_execution_history(key, limit=limit):
        evaluation: object = record.evaluation  # of one that is only planned it is another event
        if isinstance(evaluation, dg.AssetCheckEvaluation):
            yield evaluation, record.run_id


class _Runs:
    """What runs of an instance staged and committed. Each is asked for at most once."""

    def __init__(self, instance: dg.DagsterInstance, by_run: Mapping[str, int]):
        self.instance = instance
        self.by_run = by_run
        self._chains: dict[str, list[str]] = {}
        self._planned: dict[str, set[dg.AssetKey | None]] = {}

    def staged(self, run_id: str, key: dg.AssetKey) -> bool:
        """Return whether a run, or one that it goes on from, was to make an asset anew."""
        return any(key in self._materializes(of_chain) for of_chain in self._chain(run_id))

    def later_version(self, run_id: str, key: dg.AssetKey) -> int | None:
        """Return the version that a re-execution of a run committed with the asset as that run had it."""
        for committed, version in self.by_run.items():
            chain = self._chain(committed)
            if run_id in chain and not any(key in self._materializes(newer) for newer in chain[: chain.index(run_id)]):
                return version
        return None

    def _chain(self, run_id: str) -> list[str]:
        if run_id not in self._chains:
            run = known_run(self.instance, run_id)
            self._chains[run_id] = [] if run is None else [one.run_id for one in run_chain(self.instance, run)]
        return self._chains[run_id]

    def _materializes(self, run_id: str) -> set[dg.AssetKey | None]:
        if run_id not in self._planned:
            planned = planned_events(self.instance, run_id)
            self._planned[run_id] = {record.asset_key for record in planned}
        return self._planned[run_id]


def _version_of(evaluation: dg.AssetCheckEvaluation, run_id: str, names: LakehouseNames, runs: _Runs) -> int | None:
    key, by_run = evaluation.asset_key, runs.by_run
    if key == names.lakehouse_key:
        return _number(evaluation.metadata.get(VERSION))
    if run_id in by_run:
        return by_run[run_id]
    if (later := runs.later_version(run_id, key)) is not None:
        return later
    target = evaluation.target_materialization_data
    if target is None or (target.run_id and target.run_id not in by_run) or runs.staged(run_id, key):
        return None
    return by_run[target.run_id] if target.run_id else _version_at(runs.instance, key, target.storage_id)


def _version_at(instance: dg.DagsterInstance, key: dg.AssetKey, storage_id: int) -> int | None:
    """Return the version that a materialization without a run names: the commit of another program."""
    records = instance.fetch_materializations(dg.AssetRecordsFilter(key, storage_ids=[storage_id]), limit=1).records
    event = records[0].asset_materialization if records else None
    return None if event is None else _number(event.metadata.get(VERSION))


def _number(value: dg.MetadataValue | None) -> int | None:
    number = None if value is None else value.value
    return number if type(number) is int else None


def last_passed(infos: Sequence[VersionInfo], found: Mapping[int, Findings]) -> int | None:
    """Return the newest of some versions, newest first, that can be read and whose checks passed. None without one."""
    good = (
        info.version
        for info in infos
        if info.state == "live" and (outcome := found.get(info.version)) is not None and outcome.is_good
    )
    return next(good, None)


#: The metadata entry of the lakehouse that is the page.
LAST_VERSIONS = "last_versions"

#: The description of the observations that hold metrics.
METRICS = "Metrics of the lakehouse, and what an operation counted."

#: The text of the link to the plan that undoes the last versions, which fits on one line of the page.
GO_BACK = "go back to the last version that passed"

#: How many versions a page has.
MOST_VERSIONS = 10
_LONGEST_NAME_CHARS, _LONGEST_CHANGES_CHARS = 40, 80
_MINUTES = slice(len("2026-"), len("2026-01-31 12:00"))
#: The job that does what is due.
_JOBS = {"expiry": "expire", "purge": "purge", "orphans": "orphans", "verify": "verify", "exports": "export"}
_MOST_INSPECTED = 200  # evaluations of each check, to find a version that passed


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

    def events(
        self,
        lake: Lakehouse,
        operation: str,
        *,
        version: int | None = None,
        shown: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        description: str | None = None,
    ) -> Iterator[dg.AssetMaterialization | dg.AssetObservation]:
        """Yield the events of the lakehouse after a commit: its page as a materialization, and metrics apart from it.

        The metrics are an observation, so that they plot but never fill the page. A page that cannot be read does not
        make a commit fail that has happened: then an entry states the reason.

        Args:
            lake: The lakehouse.
            operation: The operation that committed.
            version: The version that was committed, by default the latest one.
            shown: Further entries of the page.
            metrics: Further metrics, such as those of :func:`operation_metrics`.
            description: The description of the materialization.
        """
        try:
            latest = lake.snapshot()
            number: int | None = latest.version if version is None else version
            status = lake_status(lake, last=LAST_OF_A_RUN)
            page, tree = self.screen(lake, latest, status), commit_metrics(latest, status)
        except TrinityLakeError as error:
            number, page, tree = version, {LAST_VERSIONS: f"not shown: {error}"}, {}
        head = {} if number is None else {VERSION: number}
        yield dg.AssetMaterialization(
            self.names.lakehouse_key,
            description=description,
            metadata={**head, **page, "operation": operation, **(shown or {})},
        )
        yield dg.AssetObservation(
            self.names.lakehouse_key,
            description=METRICS,
            metadata={"operation": operation, **tree, **(metrics or {})},
            # Without a data version Dagster would take the lakehouse for unknown from here on.
            tags={} if number is None else {DATA_VERSION_TAG: str(number)},
        )

    def screen(self, lake: Lakehouse, latest: Snapshot, status: Status | None) -> dict[str, Any]:
        """Return the beginning of the lakehouse's page: health, what is due, and the last versions with actions."""
        back = self.links.launchpad("rollback", {"to": {"last_passed": True}}, GO_BACK)
        return {
            "health": "the latest version cannot be read; run verify" if status is None else _health(status),
            **({} if status is None else self._next(status)),
            **({} if back is None else {"go_back": link_metadata(back)}),
            **self.lists(lake, latest),
        }

    def lists(self, lake: Lakehouse, latest: Snapshot, limit: int = MOST_VERSIONS) -> dict[str, Any]:
        """Return the last versions, newest first, as lists that are short enough to be shown without a click."""
        infos = list(lake.history(limit, latest))
        rows = self.rows(lake, latest, infos)
        return inline_lists(LAST_VERSIONS, (self._item(dict(zip(self.columns, row, strict=True))) for row in rows))

    def _item(self, row: Mapping[str, Any]) -> str:
        """Return a version as Markdown, on few lines of the narrow page: its number links to its run."""
        run, action = row["run"], row[ACTIONS]
        version = Link(str(row["version"]), run.url).markdown if isinstance(run, Link) else str(row["version"])
        person = row["by"].rpartition("approved by ")[2] if "approved by " in row["by"] or not run else ""
        by = ", ".join(filter(None, (row["operation"], person[:_LONGEST_NAME_CHARS])))
        changes = " ".join(filter(None, (row["tables"][:_LONGEST_CHANGES_CHARS], row["rows"])))
        created = str(row["created (UTC)"])[_MINUTES]
        state = ", ".join(part for part in row["state"].split(", ") if part != "live")
        text = "; ".join(filter(None, (f"{created} {by}", changes, state, str(row["checks"]))))
        return " ".join(
            [f"**{version}**", plain_markdown(text), *([action.markdown] if isinstance(action, Link) else [])]
        )

    def _next(self, status: Status) -> dict[str, Any]:
        """Return what is due, or the first thing that will be, with a link to its job, or else its command.

        There is no entry if there is nothing to do, which the health says.
        """
        due = status.is_due or tuple(one for one in status.due if one.state == DueState.LATER)[:1]
        lines = []
        for one in due:
            job = _JOBS.get(one.what, "")
            link = self.links.launchpad(job, {}, f"open {self.names.of(job)}")
            command = f"`trinitylake {one.command}`" if one.command else ""
            action = command if link is None else link.markdown
            lines.append(f"- {plain_markdown(f'{one.what}, {one.state}: {one.why}')} {action}")
        return {"next": dg.MetadataValue.md("\n".join(lines))} if lines else {}

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
        found = findings_by_version(self.instance, self.repository, self.names, infos, most_evaluations=_MOST_INSPECTED)
        return last_passed(infos, found)

    def _action(self, info: VersionInfo, latest: int, only: str | None, doubts: Sequence[str]) -> Link | None:
        if info.state == "expired":
            return self.links.launchpad("undelete", {"versions": str(info.version)}, "undelete")
        if info.version == latest:
            return self.links.launchpad("export", {"name": None, "version": info.version}, "export")
        if info.state != "live":
            return None
        return self.links.roll_back(info.version, rollback_link_text(info.version, doubts), only)


def _health(status: Status) -> str:
    """Return the state without the age of the version, which the page would freeze, and what was found wrong."""
    return "; ".join(
        [
            f"{status.tone}: {status.headline.partition(': ')[2]}",
            *(f"{one.severity}: {one.message}" for one in status.findings),
        ]
    )


def operation_metrics(operation: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an operation counted and lists, as metrics of the lakehouse.

    The names of numbers begin with the operation, so that a plot never mixes them with numbers of another meaning.
    """
    prefix = operation.replace("-", "_")
    return {f"{prefix}_{name}" if _is_number(value) else name: value for name, value in metrics.items()}


def _is_number(value: object) -> bool:
    number = getattr(value, "value", value)
    return isinstance(number, int | float) and not isinstance(number, bool)
