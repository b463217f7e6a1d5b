"""A Dagster component (``dg``) that configures a lakehouse in YAML, with the settings of :mod:`code_location`."""

# No `from __future__ import annotations` here: Dagster derives the YAML schema from the evaluated annotations.

import re
from datetime import time, timedelta
from importlib.resources import files
from string import Template
from typing import Any, Literal

import dagster as dg
from pydantic import Field, ValidationError, field_validator

from trinitylake_ops.dagster_plugin.assets import RECLAIMABLE_SECONDS
from trinitylake_ops.dagster_plugin.checks import DEFAULT_CHECKS, CheckLimits
from trinitylake_ops.dagster_plugin.code_location import LakehouseSettings, build_trinitylake_definitions
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.schedules import WEEKDAYS, BlackoutWindow
from trinitylake_ops.dagster_plugin.storage_settings import SecretVariables, StorageSettings
from trinitylake_ops.declarations.options import ApplyLimits
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.operations import Budget

_CLOCK = re.compile(r"([01]\d|2[0-3]):[0-5]\d")


class LimitsModel(dg.Model, dg.Resolvable):
    """Limits for scheduled operations that reclaim space without approval."""

    max_files: int = Field(description="A run whose plan deletes more files fails without deleting anything.")
    max_bytes: int = Field(description="A run whose plan deletes more bytes fails without deleting anything.")
    min_age_days: float = Field(description="Plans exclude anything younger than this.")

    def limits(self) -> ApplyLimits:
        """Convert to ``ApplyLimits``. Raises InvalidInputError."""
        return ApplyLimits(
            max_files=self.max_files, max_bytes=self.max_bytes, min_age=_days("min_age_days", self.min_age_days)
        )


class BlackoutModel(dg.Model, dg.Resolvable):
    """A daily window, in the schedules' time zone, in which no schedule starts a run."""

    start: str = Field(description="Start as HH:MM, in quotes.")
    end: str = Field(description="End as HH:MM, in quotes. If it is before start, the window ends on the next day.")
    reason: str = Field(description="Reason shown for skipped ticks.")
    days: list[str] = Field(
        default=list(WEEKDAYS), description="Weekdays on which the window starts: monday, tuesday, ..."
    )

    def window(self) -> BlackoutWindow:
        """Convert to ``BlackoutWindow``. Raises InvalidInputError."""
        return BlackoutWindow(start=_clock(self.start), end=_clock(self.end), reason=self.reason, days=tuple(self.days))


class ChecksModel(dg.Model, dg.Resolvable):
    """Thresholds beyond which the checks of the lakehouse fail."""

    overdue_days: float = Field(default=3, description="Maximum delay of expiration and purge, in days.")
    verify_seconds: float = Field(default=600, description="Maximum duration of verify, in seconds.")
    verify_incremental: bool = Field(
        default=False, description="Record the progress of verify, so that the next check continues from there."
    )
    export_pattern: str = Field(default="*", description="Glob pattern of the names of the exports to check.")
    export_max_age_days: float = Field(
        default=8, description="Maximum age of the newest full export, in days; 0 requires no export."
    )
    verified_exports: int = Field(default=3, description="Number of newest exports to compare with their manifests.")
    deep: bool = Field(default=False, description="Also compare the checksums of these exports.")
    orphan_files: int = Field(default=1000, description="Maximum number of orphan files.")
    orphan_bytes: int = Field(default=1 << 30, description="Maximum total size of orphan files, in bytes.")
    orphan_age_days: float = Field(default=1, description="Minimum age of an orphan file to be counted, in days.")
    min_leaf_fill: float = Field(default=0.25, description="Minimum average fill of leaves, from 0 to 1.")
    max_buffer_fill: float = Field(
        default=1, description="Maximum fill of the buffers of a tree level, relative to their target size."
    )
    small_files: int = Field(default=100, description="Ignore tables with fewer data files than this.")
    small_file_bytes: int = Field(
        default=8 << 20, description="Minimum average size of a table's data files, in bytes."
    )
    data_files_seconds: float = Field(
        default=60, description="Maximum time for reading table metadata to count data files, in seconds."
    )

    def limits(self) -> CheckLimits:
        """Convert to ``CheckLimits``. Raises InvalidInputError."""
        return CheckLimits(
            overdue=_days("overdue_days", self.overdue_days),
            verify_budget=Budget(max_seconds=self.verify_seconds),
            verify_incremental=self.verify_incremental,
            export_pattern=self.export_pattern,
            export_max_age=_days("export_max_age_days", self.export_max_age_days) or None,
            verified_exports=self.verified_exports,
            deep=self.deep,
            orphan_files=self.orphan_files,
            orphan_bytes=self.orphan_bytes,
            orphan_age=_days("orphan_age_days", self.orphan_age_days),
            min_leaf_fill=self.min_leaf_fill,
            max_buffer_fill=self.max_buffer_fill,
            small_files=self.small_files,
            small_file_bytes=self.small_file_bytes,
            data_files_seconds=self.data_files_seconds,
        )


class BudgetModel(dg.Model, dg.Resolvable):
    """Bounds of one scheduled purge or orphan removal. The next run continues where it stopped."""

    max_requests: int | None = Field(default=None, description="Stop after this many delete requests.")
    max_seconds: float | None = Field(default=None, description="Stop after this many seconds.")
    requests_per_second: float | None = Field(default=None, description="Maximum rate of delete requests.")

    def budget(self) -> Budget:
        """Convert to ``Budget``. Raises InvalidInputError."""
        return Budget(
            max_requests=self.max_requests,
            max_seconds=self.max_seconds,
            requests_per_second=self.requests_per_second,
        )


class _ExampleScaffolder(dg.Scaffolder):
    """Writes an example ``defs.yaml`` that lists all settings."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        if request.scaffold_format != "yaml":
            raise InvalidInputError(
                "cannot scaffold this component: only the yaml format is supported; in Python, call"
                " build_trinitylake_definitions"
            )
        example = Template(files("trinitylake_ops.dagster_plugin").joinpath("component_example.yaml").read_text())
        name = LakehouseNames(request.target_path.name).name  # raises InvalidInputError for an invalid name
        text = example.substitute(type=request.type_name, name=name)
        path = request.target_path if request.append else request.target_path / "defs.yaml"
        with path.open("a" if request.append else "w") as file:
            file.write(f"---\n{text}" if request.append else text)


@dg.scaffold_with(_ExampleScaffolder)
class TrinityLakeMaintenanceComponent(dg.Component, dg.Model, dg.Resolvable):
    """All definitions to monitor, maintain and change a TrinityLake lakehouse.

    Includes assets, checks, operations as jobs, schedules, and a sensor for commits made outside of this code location.
    """

    root: str = Field(description="Root URI of the lakehouse, or an absolute directory path.")
    name: str | None = Field(
        default=None,
        description="Required. Prefix of the names of all definitions. May be empty if there is only one lakehouse.",
    )
    storage_options: dict[str, str] = Field(default={}, description="Storage options, without credentials.")
    secret_options_from_env: dict[str, str] = Field(
        default={}, description="Names of the environment variables that hold credentials, by storage option."
    )
    allowed_roots: list[str] = Field(
        default=[], description="Further roots that may be read and written, for example those of registered tables."
    )
    isolation: Literal["lakehouse", "snapshot", "serializable"] = Field(
        default="lakehouse",
        description="Isolation level of transactions that publish tables; 'lakehouse' uses the lakehouse's default.",
    )
    webserver_url: str = Field(
        default="", description="URL of Dagster's webserver, for links. Needed if the webserver has a path prefix."
    )
    engine: Literal["local", "spark"] = Field(
        default="local", description="Where operations execute: in the process of the run ('local') or as Spark tasks."
    )
    tables: list[str] = Field(default=[], description="Tables to show as observable assets, as namespace.table.")
    published_by: list[str] = Field(
        default=[], description="Assets that publish into the lakehouse, for example publish/sales."
    )
    operations: list[str] = Field(
        default=[],
        description="Jobs to add to the default ones: operations, the groups clones, tables and admin, or all.",
    )
    checks: list[str] = Field(default=list(DEFAULT_CHECKS), description="Names of the checks, or all.")
    check_limits: ChecksModel | None = Field(default=None, description="Thresholds beyond which the checks fail.")
    limits: LimitsModel | None = Field(
        default=None,
        description="Limits for operations that reclaim space without approval. Without limits, trim, expire, purge and"
        " orphans cannot be scheduled.",
    )
    timezone: str = Field(
        default="UTC", description="IANA time zone of schedules and blackouts, for example Europe/Berlin."
    )
    crons: dict[str, str] = Field(default={}, description="Cron expressions of the operations to schedule, by name.")
    observe_cron: str | None = Field(
        default="*/30 * * * *", description="Cron expression for observing the assets; null disables it."
    )
    blackouts: list[BlackoutModel] = Field(default=[], description="Windows in which no schedule starts a run.")
    export_target: str = Field(
        default="", description="Root URI of scheduled exports. If empty, they are stored in the lakehouse."
    )
    export_retain_days: float = Field(
        default=35, description="Retention of scheduled exports in days; 0 keeps them until they are dropped."
    )
    budget: BudgetModel | None = Field(default=None, description="Bounds of each scheduled purge or orphan removal.")
    location_name: str | None = Field(
        default=None, description="Name of this code location, for links from checks to jobs."
    )
    reclaimable_seconds: float = Field(
        default=RECLAIMABLE_SECONDS,
        description="Maximum time that an observation spends on counting reclaimable bytes, in seconds; 0 disables it.",
    )
    on_commit: str | None = Field(
        default=None, description="Job to run after commits made outside of this code location; null for none."
    )
    is_on: bool = Field(default=False, description="Whether schedules and the sensor are initially on.")

    @field_validator("storage_options", mode="before")
    @classmethod
    def _as_strings(cls, options: Any) -> Any:
        """Convert option values to strings, because Dagster parses ``"1"`` and ``"true"`` in YAML as int and bool."""
        if not isinstance(options, dict):
            return options
        return {name: _plain_text(value) for name, value in options.items()}

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Build the definitions. Raises DagsterInvalidDefinitionError with a message of one line."""
        try:
            return build_trinitylake_definitions(self.settings())
        except ValidationError as error:
            problem = "; ".join(
                f"{_field_path(item['loc'])}: {item['msg']}" for item in error.errors(include_input=False)
            )
        except (InvalidInputError, dg.DagsterInvalidDefinitionError) as error:
            problem = str(error)
        raise dg.DagsterInvalidDefinitionError(f"{context.path}: {problem}")

    def settings(self) -> LakehouseSettings:
        """Convert the YAML to ``LakehouseSettings``. Raises InvalidInputError or pydantic.ValidationError."""
        return LakehouseSettings(
            lakehouse=TrinityLakeResource(
                root=self.root,
                storage_options=StorageSettings(**self.storage_options),
                secret_options_from_env=SecretVariables(**self.secret_options_from_env),
                allowed_roots=self.allowed_roots,
                isolation=self.isolation,
                webserver_url=self.webserver_url,
                engine=self.engine,
            ),
            name=self.name,
            tables=self.tables,
            published_by=[dg.AssetKey.from_user_string(key) for key in self.published_by],
            limits=None if self.limits is None else self.limits.limits(),
            timezone=self.timezone,
            crons=self.crons,
            observe_cron=self.observe_cron,
            blackouts=[blackout.window() for blackout in self.blackouts],
            export_target=self.export_target,
            export_retain=_days("export_retain_days", self.export_retain_days),
            budget=None if self.budget is None else self.budget.budget(),
            location_name=self.location_name,
            operations=self.operations,
            checks=self.checks,
            check_limits=None if self.check_limits is None else self.check_limits.limits(),
            reclaimable_seconds=self.reclaimable_seconds,
            on_commit=self.on_commit,
            is_on=self.is_on,
        )


def _plain_text(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int | float) else value


def _field_path(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _days(name: str, days: float) -> timedelta:
    if not 0 <= days <= 1_000_000:
        raise InvalidInputError(f"{name} is {days:g}; it must be between 0 and 1,000,000")
    return timedelta(days=days)


def _clock(text: str) -> time:
    if not _CLOCK.fullmatch(text):
        raise InvalidInputError(f"{text!r} is not a time of day; write HH:MM in quotes")
    return time.fromisoformat(text)
