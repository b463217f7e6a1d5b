"""What asset checks found in versions of a lakehouse, by Dagster's records of their evaluations.

An evaluation is about the version that its metadata names, if it is a check of the lakehouse itself. Else it is about
the version that its own run committed, or the one of the materialization that it looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import dagster as dg

from trinitylake_ops.dagster_plugin.head_metadata import VERSION
from trinitylake_ops.dagster_plugin.names import LakehouseNames
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
    by_run = {info.run_id: info.version for info in infos if info.run_id}
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
            version = _version_of(instance, evaluation, run_id, names, by_run)
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


def _version_of(
    instance: dg.DagsterInstance,
    evaluation: dg.AssetCheckEvaluation,
    run_id: str,
    names: LakehouseNames,
    by_run: Mapping[str, int],
) -> int | None:
    if evaluation.asset_key == names.lakehouse_key:
        return _number(evaluation.metadata.get(VERSION))
    target = evaluation.target_materialization_data
    if run_id in by_run or target is None:
        return by_run.get(run_id)
    return (
        by_run.get(target.run_id) if target.run_id else _version_at(instance, evaluation.asset_key, target.storage_id)
    )


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
