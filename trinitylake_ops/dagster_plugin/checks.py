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

#: The unprefixed name of the job that runs the checks.
CHECK_JOB = "check"

#: The default checks of a lakehouse.
DEFAULT_CHECKS = ("verify_clean", "retention_kept")


def chosen_checks(chosen: str | Sequence[str] = DEFAULT_CHECKS) -> tuple[str, ...]:
    """Return the names of the selected checks, in declaration order.

    Args:
        chosen: The name of a check, ``"all"``, or a sequence of these.

    Raises:
        InvalidInputError: A name is unknown.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    if unknown := sorted(names - {EVERYTHING, *CHECKS}):
        raise InvalidInputError(f"checks: unknown check {unknown[0]!r}; choose from {EVERYTHING}, {', '.join(CHECKS)}")
    return tuple(name for name in CHECKS if EVERYTHING in names or name in names)


def repairing_jobs(checks: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the operations that repair the findings of the checks."""
    return tuple({job: None for name in checks for job in CHECKS[name].repaired_by})


def build_lakehouse_checks(
    names: LakehouseNames = ONLY,
    *,
    checks: str | Sequence[str] = DEFAULT_CHECKS,
    limits: CheckLimits | None = None,
    location_name: str | None = None,
) -> list[dg.AssetChecksDefinition]:
    """Build the asset checks of a lakehouse.

    Problems that risk data loss are errors. Problems that cost time or space are warnings.

    Args:
        names: The names of the lakehouse's definitions.
        checks: Names of checks, or ``"all"``. The default checks cover the integrity and the retention of the
            lakehouse; an observation of the lakehouse reports everything else.
        limits: Thresholds beyond which the checks fail.
        location_name: The code location of the jobs. If provided, the metadata ``repaired_by`` of a failed check links
            to the job that repairs it.

    Raises:
        InvalidInputError: A name is unknown.
    """
    return [
        _asset_check(name, CHECKS[name], limits or CheckLimits(), names, location_name)
        for name in chosen_checks(checks)
    ]


def build_checks_job(checks: Sequence[dg.AssetChecksDefinition], names: LakehouseNames = ONLY) -> Any:
    """Build a job that runs checks. Returns the same type as ``dagster.define_asset_job``."""
    return dg.define_asset_job(
        names.of(CHECK_JOB),
        selection=dg.AssetSelection.checks(*checks),
        description="Run the checks of the lakehouse.",
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
        job_name = names.of(job)
        value = job_name if location_name is None else dg.MetadataValue.job(job_name, location_name)
        return {"repaired_by": value, **links.entry(job, config)}

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
                result = declared.check(lake, limits)
        except TrinityLakeError as error:  # a read failed or was inconclusive; the message states which
            is_damage = isinstance(error, CorruptFileError | FileMissingError)
            metadata = {
                "error_code": error.code,
                **(repaired_by(links, "repair", {}) if is_damage else {}),
            }
            return dg.AssetCheckResult(passed=False, description=str(error), metadata=metadata)
        return dg.AssetCheckResult(
            passed=not result.wrong,
            severity=dg.AssetCheckSeverity.ERROR if result.is_error else dg.AssetCheckSeverity.WARN,
            description="; ".join(result.wrong) or result.fine,
            metadata={
                VERSION: version,
                **metadata_entries(result.metadata),
                **(repaired_by(links, result.repaired_by, result.repair_config) if result.wrong else {}),
            },
        )

    return run


_READY = "/readyz"
_MAX_RESPONSE_BYTES = 10_000


def build_server_check(
    url: str, names: LakehouseNames = ONLY, *, name: str = "server_ready", seconds: float = 10.0
) -> dg.AssetChecksDefinition:
    """Build a check of the lakehouse asset that probes the readiness of a server (``trinitylake serve``).

    The probe neither needs nor sends a token.

    Args:
        url: The server's URL without a path, for example ``https://lake.example.com``.
        names: The names of the lakehouse's definitions.
        name: The name of the check. To check several replicas, build one check with a distinct name for each of them,
            or one check of their proxy.
        seconds: The timeout of each network operation.

    Raises:
        InvalidInputError: The URL is invalid or contains credentials or a path, or ``seconds`` is not positive.
    """
    split = urlsplit(url)
    is_plain = split.path in ("", "/") and not split.query and not split.fragment and "@" not in split.netloc
    if split.scheme not in ("http", "https") or not split.hostname or not is_plain:
        raise InvalidInputError(
            "the server URL is invalid; use http:// or https:// with a host and an optional port, without credentials"
            " and without a path"
        )
    if not seconds > 0:
        raise InvalidInputError(f"seconds is {seconds}; it must be greater than 0")

    @dg.asset_check(
        asset=names.lakehouse_key,
        name=name,
        description=f"The REST server at {split.netloc} is ready, and so are the lakehouses that it serves.",
    )
    def run() -> dg.AssetCheckResult:
        started_s = time.monotonic()
        kind = HTTPSConnection if split.scheme == "https" else HTTPConnection
        connection = kind(split.hostname or "", split.port, timeout=seconds)
        try:
            connection.request("GET", _READY)
            response = connection.getresponse()
            response.read(_MAX_RESPONSE_BYTES)
            summary, passed = f"status {response.status}", response.status == 200
        except (OSError, HTTPException) as error:
            summary, passed = f"no response: {type(error).__name__}", False
        finally:
            connection.close()
        took = dg.MetadataValue.float(round(1_000 * (time.monotonic() - started_s), 1))
        return dg.AssetCheckResult(passed=passed, metadata={"answer": summary, "milliseconds": took, "server": url})

    return run
