"""Asset checks of a lakehouse and of its server."""

import time
from collections.abc import Mapping, Sequence
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit

import dagster as dg

from trinitylake_ops.dagster_plugin.check_catalog import CHECKS, CheckLimits, DeclaredCheck
from trinitylake_ops.dagster_plugin.lakehouse_metadata import VERSION
from trinitylake_ops.dagster_plugin.links import Links
from trinitylake_ops.dagster_plugin.metadata import metadata_entries
from trinitylake_ops.dagster_plugin.names import ONLY, LakehouseNames
from trinitylake_ops.dagster_plugin.options import NO_OPTIONS
from trinitylake_ops.dagster_plugin.resources import lakehouse_of
from trinitylake_ops.declarations.registry import EVERYTHING
from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidInputError, TrinityLakeError
from trinitylake_ops.versions.commit_info import acting_for_run

__all__ = [
    "CHECK_JOB",
    "DEFAULT_CHECKS",
    "CheckLimits",
    "build_checks_job",
    "build_lakehouse_checks",
    "chosen_checks",
    "repairing_jobs",
]

#: The name of the job of the checks, for a lakehouse that is alone.
CHECK_JOB = "check"

#: The checks of a lakehouse, unless others are chosen.
DEFAULT_CHECKS = ("verify_clean", "retention_kept")


def chosen_checks(chosen: str | Sequence[str] = DEFAULT_CHECKS) -> tuple[str, ...]:
    """Return the names of checks that are chosen, in the order of their declaration.

    Args:
        chosen: Names of checks, or ``"all"``; one of them, or several.

    Raises:
        InvalidInputError: There is no check of a name.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    if unknown := sorted(names - {EVERYTHING, *CHECKS}):
        raise InvalidInputError(
            f"checks: there is no check {unknown[0]!r}; choose among {EVERYTHING}, {', '.join(CHECKS)}"
        )
    return tuple(name for name in CHECKS if EVERYTHING in names or name in names)


def repairing_jobs(checks: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the operations that repair what some checks find."""
    return tuple({job: None for name in checks for job in CHECKS[name].repaired_by})


def build_lakehouse_checks(
    names: LakehouseNames = ONLY,
    *,
    checks: str | Sequence[str] = DEFAULT_CHECKS,
    limits: CheckLimits | None = None,
    location_name: str | None = None,
) -> list[dg.AssetChecksDefinition]:
    """Return checks of the lakehouse. A danger of loss is an error, and a cost of time or space is a warning.

    Args:
        names: The names of the lakehouse.
        checks: Names of checks, or ``"all"``. The default ones read the integrity and the retention of the lakehouse;
            an observation of the lakehouse reports the state of everything else.
        limits: The limits beyond which the checks fail.
        location_name: The code location of the jobs. The metadata ``repaired_by`` of a failed check, which names the
            job that repairs it, is a link then.

    Raises:
        InvalidInputError: There is no such check.
    """
    return [
        _asset_check(name, CHECKS[name], limits or CheckLimits(), names, location_name)
        for name in chosen_checks(checks)
    ]


def build_checks_job(checks: Sequence[dg.AssetChecksDefinition], names: LakehouseNames = ONLY) -> Any:
    """Return a job, of the type of ``dagster.define_asset_job``, which runs checks."""
    return dg.define_asset_job(
        names.of(CHECK_JOB),
        selection=dg.AssetSelection.checks(*checks),
        description="Runs the checks of the lakehouse.",
        config=NO_OPTIONS,
    )


def _asset_check(
    name: str,
    declared: DeclaredCheck,
    limits: CheckLimits,
    names: LakehouseNames,
    location_name: str | None,
) -> dg.AssetChecksDefinition:
    def repaired_by(links: Links, job: str, config: Mapping[str, Any]) -> dict[str, Any]:
        named = names.of(job)
        shown = named if location_name is None else dg.MetadataValue.job(named, location_name)
        return {"repaired_by": shown, **links.entry(job, config)}

    @dg.asset_check(
        asset=names.lakehouse_key,
        name=name,
        description=declared.description,
        required_resource_keys={names.resource_key},
    )
    def run(context: dg.AssetCheckExecutionContext) -> dg.AssetCheckResult:
        resource = lakehouse_of(context.resources, names)
        links = Links.of(context, names, resource.webserver_url)
        try:
            with acting_for_run(context.run.run_id):
                lake = resource.open()
                version = lake.latest_version()
                found = declared.check(lake, limits)
        # the check cannot read what it needs, or that is not settled, as the text says
        except TrinityLakeError as error:
            is_damage = isinstance(error, CorruptFileError | FileMissingError)
            metadata = {
                "error_code": error.code,
                **(repaired_by(links, "repair", {}) if is_damage else {}),
            }
            return dg.AssetCheckResult(passed=False, description=str(error), metadata=metadata)
        return dg.AssetCheckResult(
            passed=not found.wrong,
            severity=dg.AssetCheckSeverity.ERROR if found.is_error else dg.AssetCheckSeverity.WARN,
            description="; ".join(found.wrong) or found.fine,
            metadata={
                VERSION: version,
                **metadata_entries(found.metadata),
                **(repaired_by(links, found.repaired_by, found.repair_config) if found.wrong else {}),
            },
        )

    return run


_READY = "/readyz"
_LONGEST_RESPONSE_BYTES = 10_000


def build_server_check(
    url: str, names: LakehouseNames = ONLY, *, name: str = "server_ready", seconds: float = 10.0
) -> dg.AssetChecksDefinition:
    """Return a check of the lakehouse's asset that asks a server whether it is ready (``trinitylake serve``).

    ``url`` is its address without a path, such as ``https://lake.example.com``. Of several replicas each has a check
    with a name of its own, or the proxy before them has one. Within ``seconds`` the answer must be there. No token is
    sent, and none is needed. Raises InvalidInputError for an address that is none, or that holds a user or a path.
    """
    split = urlsplit(url)
    is_plain = split.path in ("", "/") and not split.query and not split.fragment and "@" not in split.netloc
    if split.scheme not in ("http", "https") or not split.hostname or not is_plain:
        raise InvalidInputError("a server's address is http:// or https:// with a host, and perhaps a port")
    if not seconds > 0:
        raise InvalidInputError(f"the seconds to wait must be above 0, not {seconds}")

    @dg.asset_check(
        asset=names.lakehouse_key,
        name=name,
        description=f"The server for engines at {split.netloc} answers, and so do the lakehouses that it serves.",
    )
    def run() -> dg.AssetCheckResult:
        begun_s = time.monotonic()
        kind = HTTPSConnection if split.scheme == "https" else HTTPConnection
        connection = kind(split.hostname or "", split.port, timeout=seconds)
        try:
            connection.request("GET", _READY)
            response = connection.getresponse()
            response.read(_LONGEST_RESPONSE_BYTES)
            summary, passed = f"status {response.status}", response.status == 200
        except (OSError, HTTPException) as error:
            summary, passed = f"no answer: {type(error).__name__}", False
        finally:
            connection.close()
        took = dg.MetadataValue.float(round(1_000 * (time.monotonic() - begun_s), 1))
        return dg.AssetCheckResult(passed=passed, metadata={"answer": summary, "milliseconds": took, "server": url})

    return run
