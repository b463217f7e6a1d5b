"""What asset checks found in versions of a lakehouse, by Dagster's records of their evaluations.

An evaluation is about the version that its metadata names, if it is a check of the lakehouse itself. Else it is about
what its run staged, so about the version that this run committed, or one that was re-executed from it. Where nothing
of that was committed, it is about no version. Of a run that staged nothing it is about the materialization that it
looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from trinitylake_ops.dagster_plugin.head_metadata import VERSION
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.runs.records import known_run, planned_events, run_chain
from trinitylake_ops.versions.history import VersionInfo

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
        said = [f"{', '.join(names)} {what}" for names, what in bad if names]
        return "; ".join([*said, *([f"{len(self.passed)} passed"] if self.passed else [])])

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
        return any(key in self._makes(of_chain) for of_chain in self._chain(run_id))

    def later_version(self, run_id: str, key: dg.AssetKey) -> int | None:
        """Return the version that a re-execution of a run committed with the asset as that run had it."""
        for committed, version in self.by_run.items():
            chain = self._chain(committed)
            if run_id in chain and not any(key in self._makes(newer) for newer in chain[: chain.index(run_id)]):
                return version
        return None

    def _chain(self, run_id: str) -> list[str]:
        if run_id not in self._chains:
            run = known_run(self.instance, run_id)
            self._chains[run_id] = [] if run is None else [one.run_id for one in run_chain(self.instance, run)]
        return self._chains[run_id]

    def _makes(self, run_id: str) -> set[dg.AssetKey | None]:
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
        if info.state == "live" and (said := found.get(info.version)) is not None and said.is_good
    )
    return next(good, None)
