"""The versions page of a lakehouse: changes, results of asset checks, and rollback links of the latest versions.

An evaluation of an asset check is attributed to a version as follows. A check of the lakehouse asset names the version
in its metadata. A check in a run that staged the asset belongs to the version that this run, or a re-execution of it,
committed, and to no version if nothing was committed. A check in any other run belongs to the version of the
materialization that it evaluated.
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

_MAX_CHECKS = 100
_MAX_EVALUATIONS = 30  # per check


@dataclass(frozen=True, slots=True)
class Findings:
    """The names of a version's checks, by the result of their newest evaluation."""

    passed: list[str] = field(default_factory=list)
    warned: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        problems = [(self.failed, "failed"), (self.warned, "warned")]
        notes = [f"{', '.join(names)} {result}" for names, result in problems if names]
        return "; ".join([*notes, *([f"{len(self.passed)} passed"] if self.passed else [])])

    @property
    def is_good(self) -> bool:
        """Whether at least one check passed and none failed. Warnings are ignored."""
        return bool(self.passed) and not self.failed


def findings_by_version(
    instance: dg.DagsterInstance,
    repository: dg.RepositoryDefinition | None,
    names: LakehouseNames,
    infos: Sequence[VersionInfo],
    *,
    max_evaluations: int = _MAX_EVALUATIONS,
) -> dict[int, Findings]:
    """Return the results of a code location's checks by version.

    Args:
        instance: The Dagster instance.
        repository: The code location. Without it there are no results.
        names: The names of the lakehouse's definitions.
        infos: The versions.
        max_evaluations: Maximum number of evaluations to read for each check. At most 100 checks are read.
    """
    if repository is None:
        return {}
    runs = _Runs(instance, {info.run_id: info.version for info in infos if info.run_id})
    versions = {info.version for info in infos}
    by_version: dict[int, Findings] = {}

    def priority(key: dg.AssetCheckKey) -> tuple[bool, bool, str, str]:
        """Return the rank of a check: first the lakehouse asset's checks, then those with its prefix, then others."""
        is_ours = not names.name or key.asset_key.path[0] == names.name
        return key.asset_key != names.lakehouse_key, not is_ours, key.asset_key.to_string(), key.name

    keys = sorted(repository.asset_graph.asset_check_keys, key=priority)
    for key in keys[:_MAX_CHECKS]:
        evaluated: set[int] = set()
        for evaluation, run_id in _evaluations(instance, key, max_evaluations):
            version = _version_of(evaluation, run_id, names, runs)
            if version in versions and version not in evaluated:
                evaluated.add(version)
                _same_result(by_version.setdefault(version, Findings()), evaluation).append(key.name)
    return by_version


def _same_result(findings: Findings, evaluation: dg.AssetCheckEvaluation) -> list[str]:
    if evaluation.passed:
        return findings.passed
    return findings.failed if evaluation.severity == dg.AssetCheckSeverity.ERROR else findings.warned


def _evaluations(
    instance: dg.DagsterInstance, key: dg.AssetCheckKey, limit: int
) -> Iterator[tuple[dg.AssetCheckEvaluation, str]]:
    """Yield the evaluations of a check, newest first, with the run of each."""
    for record in instance.event_log_storage.get_asset_check_execution_history(key, limit=limit):
        evaluation: object = record.evaluation  # for a planned evaluation, this is another event type
        if isinstance(evaluation, dg.AssetCheckEvaluation):
            yield evaluation, record.run_id


class _Runs:
    """Cached lookups of the tables that an instance's runs staged and of the versions that they committed."""

    def __init__(self, instance: dg.DagsterInstance, by_run: Mapping[str, int]):
        self.instance = instance
        self.by_run = by_run
        self._chains: dict[str, list[str]] = {}
        self._planned: dict[str, set[dg.AssetKey | None]] = {}

    def staged(self, run_id: str, key: dg.AssetKey) -> bool:
        """Whether a run, or a run that it re-executes, planned to materialize an asset."""
        return any(key in self._materializes(of_chain) for of_chain in self._chain(run_id))

    def later_version(self, run_id: str, key: dg.AssetKey) -> int | None:
        """Return the version that a re-execution of a run committed with the asset that the run staged."""
        for committed, version in self.by_run.items():
            chain = self._chain(committed)
            if run_id in chain and not any(key in self._materializes(newer) for newer in chain[: chain.index(run_id)]):
                return version
        return None

    def _chain(self, run_id: str) -> list[str]:
        if run_id not in self._chains:
            run = known_run(self.instance, run_id)
            self._chains[run_id] = [] if run is None else [related.run_id for related in run_chain(self.instance, run)]
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
    """Return the version in the metadata of a materialization without a run, which reports an external commit."""
    records = instance.fetch_materializations(dg.AssetRecordsFilter(key, storage_ids=[storage_id]), limit=1).records
    event = records[0].asset_materialization if records else None
    return None if event is None else _number(event.metadata.get(VERSION))


def _number(value: dg.MetadataValue | None) -> int | None:
    number = None if value is None else value.value
    return number if type(number) is int else None


def last_passed(infos: Sequence[VersionInfo], findings: Mapping[int, Findings]) -> int | None:
    """Return the newest readable version whose checks passed, or None.

    Args:
        infos: The versions, newest first.
        findings: The results of the checks by version.
    """
    candidates = (
        info.version
        for info in infos
        if info.state == "live" and (outcome := findings.get(info.version)) is not None and outcome.is_good
    )
    return next(candidates, None)


#: Metadata key of the lists of versions.
LAST_VERSIONS = "last_versions"

#: Description of observations that contain metrics.
METRICS = "Metrics of the lakehouse and of the operation."

#: Text of the link that plans a rollback to the last version whose checks passed. It fits on one line of the page.
GO_BACK = "roll back to the last version that passed"

#: Number of versions on the page.
MAX_VERSIONS = 10
_MAX_NAME_CHARS, _MAX_CHANGES_CHARS = 40, 80
_MINUTES = slice(len("2026-"), len("2026-01-31 12:00"))
#: The job of each maintenance task that can be due.
_JOBS = {"expiry": "expire", "purge": "purge", "orphans": "orphans", "verify": "verify", "exports": "export"}
_MAX_INSPECTED = 200  # evaluations of each check, to find a version that passed


@dataclass(frozen=True, slots=True)
class VersionsPage(VersionRows):
    """The versions page of a lakehouse in Dagster."""

    instance: dg.DagsterInstance
    repository: dg.RepositoryDefinition | None
    names: LakehouseNames
    links: Links

    @classmethod
    def of(cls, context: Any, names: LakehouseNames, webserver_url: str) -> VersionsPage:
        """Create the page in a run.

        Args:
            context: The context of the op, asset or check.
            names: The names of the lakehouse's definitions.
            webserver_url: The URL of Dagster's webserver, or an empty string.
        """
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
        """Yield the events of the lakehouse asset after a commit: a materialization and an observation.

        The materialization contains the page. The observation contains the metrics, so that they are plotted without
        cluttering the page. If the page cannot be read, the step does not fail, because the commit has already
        succeeded; an entry states the reason instead.

        Args:
            lake: The lakehouse.
            operation: The operation that committed.
            version: The committed version. Defaults to the latest version.
            shown: Further entries of the page.
            metrics: Further metrics, for example from :func:`operation_metrics`.
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
            # Without the tag, the data version would become unknown to Dagster.
            tags={} if number is None else {DATA_VERSION_TAG: str(number)},
        )

    def screen(self, lake: Lakehouse, latest: Snapshot, status: Status | None) -> dict[str, Any]:
        """Return the first entries of the page: health, due maintenance, and the latest versions with actions."""
        rollback = self.links.launchpad("rollback", {"to": {"last_passed": True}}, GO_BACK)
        return {
            "health": "the latest version cannot be read; run verify" if status is None else _health(status),
            **({} if status is None else self._next(status)),
            **({} if rollback is None else {"go_back": link_metadata(rollback)}),
            **self.lists(lake, latest),
        }

    def lists(self, lake: Lakehouse, latest: Snapshot, limit: int = MAX_VERSIONS) -> dict[str, Any]:
        """Return the latest versions, newest first, as lists that are short enough to be rendered inline."""
        infos = list(lake.history(limit, latest))
        rows = self.rows(lake, latest, infos)
        return inline_lists(LAST_VERSIONS, (self._item(dict(zip(self.columns, row, strict=True))) for row in rows))

    def _item(self, row: Mapping[str, Any]) -> str:
        """Return a version as one compact line of Markdown. Its number links to its run."""
        run, action = row["run"], row[ACTIONS]
        version = Link(str(row["version"]), run.url).markdown if isinstance(run, Link) else str(row["version"])
        person = row["by"].rpartition("approved by ")[2] if "approved by " in row["by"] or not run else ""
        by = ", ".join(filter(None, (row["operation"], person[:_MAX_NAME_CHARS])))
        changes = " ".join(filter(None, (row["tables"][:_MAX_CHANGES_CHARS], row["rows"])))
        created = str(row["created (UTC)"])[_MINUTES]
        state = ", ".join(part for part in row["state"].split(", ") if part != "live")
        text = "; ".join(filter(None, (f"{created} {by}", changes, state, str(row["checks"]))))
        return " ".join(
            [f"**{version}**", plain_markdown(text), *([action.markdown] if isinstance(action, Link) else [])]
        )

    def _next(self, status: Status) -> dict[str, Any]:
        """Return the due maintenance tasks, or else the next one, each with a link to its job or with its command.

        Returns no entry if there are no tasks.
        """
        due = status.is_due or tuple(task for task in status.due if task.state == DueState.LATER)[:1]
        lines = []
        for task in due:
            job = _JOBS.get(task.what, "")
            link = self.links.launchpad(job, {}, f"open {self.names.of(job)}")
            command = f"`trinitylake {task.command}`" if task.command else ""
            action = command if link is None else link.markdown
            lines.append(f"- {plain_markdown(f'{task.what}, {task.state}: {task.why}')} {action}")
        return {"next": dg.MetadataValue.md("\n".join(lines))} if lines else {}

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the rows."""
        return (*COLUMNS, "checks", ACTIONS)

    def run_of(self, run_id: str | None) -> object:
        """Return a link to a run of this instance, or the id of any other run."""
        if not run_id:
            return ""
        return run_id if known_run(self.instance, run_id) is None else self.links.run(run_id)

    def more(
        self, infos: Sequence[VersionInfo], latest: int, only: str | None, marks: Mapping[int, str]
    ) -> Sequence[tuple[object, ...]]:
        """Return the check results of each version, and a link to the action that fits its state.

        Args:
            infos: The versions.
            latest: The latest version.
            only: The only table that rollback links apply to, or None for the whole lakehouse.
            marks: Remarks by version, which rollback links repeat.
        """
        by_version = findings_by_version(self.instance, self.repository, self.names, infos)
        cells: list[tuple[object, ...]] = []
        for info in infos:
            findings = by_version.get(info.version, Findings())
            warnings = [marks[info.version], "checks failed" if findings.failed else ""]
            cells.append((findings, self._action(info, latest, only, warnings) or ""))
        return cells

    def last_passed(self, infos: Sequence[VersionInfo]) -> int | None:
        """Return the newest readable version whose checks passed, or None. Versions are ordered newest first."""
        by_version = findings_by_version(
            self.instance, self.repository, self.names, infos, max_evaluations=_MAX_INSPECTED
        )
        return last_passed(infos, by_version)

    def _action(self, info: VersionInfo, latest: int, only: str | None, warnings: Sequence[str]) -> Link | None:
        if info.state == "expired":
            return self.links.launchpad("undelete", {"versions": str(info.version)}, "undelete")
        if info.version == latest:
            return self.links.launchpad("export", {"name": None, "version": info.version}, "export")
        if info.state != "live":
            return None
        return self.links.roll_back(info.version, rollback_link_text(info.version, warnings), only)


def _health(status: Status) -> str:
    """Return the status and the findings, without the age of the version, which would become outdated."""
    return "; ".join(
        [
            f"{status.tone}: {status.headline.partition(': ')[2]}",
            *(f"{finding.severity}: {finding.message}" for finding in status.findings),
        ]
    )


def operation_metrics(operation: str, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of an operation as metadata of the lakehouse asset.

    The names of numbers are prefixed with the operation, so that a plot never mixes numbers with different meanings.

    Args:
        operation: The operation name.
        metrics: Its metrics and tables.
    """
    prefix = operation.replace("-", "_")
    return {f"{prefix}_{name}" if _is_number(value) else name: value for name, value in metrics.items()}


def _is_number(value: object) -> bool:
    number = getattr(value, "value", value)
    return isinstance(number, int | float) and not isinstance(number, bool)
