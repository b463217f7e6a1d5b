"""A lakehouse in Dagster by YAML: the settings of :mod:`code_location` as a component of Dagster's ``dg``."""

# Annotations here are no text: Dagster makes the schema of the YAML from them.

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
    """The limits within which schedules free something without approval."""

    max_files: int = Field(description="A plan of more files fails its run, and nothing is done.")
    max_bytes: int = Field(description="The same for bytes.")
    min_age_days: float = Field(description="What is younger is no part of a plan.")

    def limits(self) -> ApplyLimits:
        """Return the settings in the form for code. Raises InvalidInputError."""
        return ApplyLimits(
            max_files=self.max_files, max_bytes=self.max_bytes, min_age=_days("min_age_days", self.min_age_days)
        )


class BlackoutModel(dg.Model, dg.Resolvable):
    """A time of the day in which no schedule begins anything, in the schedules' time zone."""

    start: str = Field(description="HH:MM, in quotes.")
    end: str = Field(description="HH:MM, in quotes; before start: of the next day.")
    reason: str = Field(description="What skipped ticks say.")
    days: list[str] = Field(default=list(WEEKDAYS), description="The days on which it begins: monday, tuesday, ...")

    def window(self) -> BlackoutWindow:
        """Return the setting in the form for code. Raises InvalidInputError."""
        return BlackoutWindow(start=_clock(self.start), end=_clock(self.end), reason=self.reason, days=tuple(self.days))


class ChecksModel(dg.Model, dg.Resolvable):
    """The limits beyond which the checks of the lakehouse fail."""

    overdue_days: float = Field(default=3, description="How long expiry and purge may be late.")
    verify_seconds: float = Field(default=600, description="How long verify may read.")
    verify_incremental: bool = Field(default=False, description="Keep a record, and go on where verify stopped.")
    export_pattern: str = Field(default="*", description="Exports of such names are looked at.")
    export_max_age_days: float = Field(default=8, description="Age of the newest full one; 0: there need be none.")
    verified_exports: int = Field(default=3, description="How many of the newest exports are compared.")
    deep: bool = Field(default=False, description="Compare their checksums, too.")
    orphan_files: int = Field(default=1000, description="How many orphans there may be.")
    orphan_bytes: int = Field(default=1 << 30, description="How large they may be together.")
    orphan_age_days: float = Field(default=1, description="From what age they count.")
    min_leaf_fill: float = Field(default=0.25, description="How full leaves must be on average, 0 to 1.")
    max_buffer_fill: float = Field(default=1, description="How full the buffers of a level may be; 1: all may gather.")
    small_files: int = Field(default=100, description="Tables of fewer data files may have small ones.")
    small_file_bytes: int = Field(default=8 << 20, description="From what size on average data files are not small.")
    data_files_seconds: float = Field(default=60, description="How long metadata of tables may be read for that.")

    def limits(self) -> CheckLimits:
        """Return the settings in the form for code. Raises InvalidInputError."""
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
    """The bounds of a scheduled purge or removal of orphans. The next run goes on."""

    max_requests: int | None = Field(default=None, description="Stop after so many requests that delete.")
    max_seconds: float | None = Field(default=None, description="Stop after so many seconds.")
    requests_per_second: float | None = Field(default=None, description="Send no more requests that delete.")

    def budget(self) -> Budget:
        """Return the setting in the form for code. Raises InvalidInputError."""
        return Budget(
            max_requests=self.max_requests,
            max_seconds=self.max_seconds,
            requests_per_second=self.requests_per_second,
        )


class _ExampleScaffolder(dg.Scaffolder):
    """Writes an example with all settings."""

    def scaffold(self, request: dg.ScaffoldRequest) -> None:
        if request.scaffold_format != "yaml":
            raise InvalidInputError("this component is for YAML; in Python, call build_trinitylake_definitions")
        example = Template(files("trinitylake_ops.dagster_plugin").joinpath("component_example.yaml").read_text())
        name = LakehouseNames(request.target_path.name).name  # raises InvalidInputError for an impossible one
        text = example.substitute(type=request.type_name, name=name)
        path = request.target_path if request.append else request.target_path / "defs.yaml"
        with path.open("a" if request.append else "w") as file:
            file.write(f"---\n{text}" if request.append else text)


@dg.scaffold_with(_ExampleScaffolder)
class TrinityLakeMaintenanceComponent(dg.Component, dg.Model, dg.Resolvable):
    """All definitions that show a TrinityLake lakehouse, keep it in order and change it.

    Assets, checks, operations as jobs, schedules and a sensor for commits of others.
    """

    root: str = Field(description="Root URI of the lakehouse, or the absolute path of a folder.")
    name: str | None = Field(
        default=None,
        description="Required: begins the names of all its definitions; empty only where there is one lakehouse.",
    )
    storage_options: dict[str, str] = Field(default={}, description="Options of the storage, no credentials.")
    secret_options_from_env: dict[str, str] = Field(
        default={}, description="Names of environment variables that hold credentials, by option."
    )
    allowed_roots: list[str] = Field(
        default=[], description="Further roots that may be read and written, such as those of registered tables."
    )
    isolation: Literal["lakehouse", "snapshot", "serializable"] = Field(
        default="lakehouse",
        description="Isolation of the transactions that publish tables; 'lakehouse' is the lakehouse's own level.",
    )
    webserver_url: str = Field(
        default="", description="Address of Dagster's webserver, for links; needed where it has a path prefix."
    )
    engine: Literal["local", "spark"] = Field(
        default="local", description="What carries out operations: the process of the run, or Spark's tasks."
    )
    tables: list[str] = Field(default=[], description="Tables that become assets, each as namespace.table.")
    published_by: list[str] = Field(default=[], description="Assets that publish into it, such as publish/sales.")
    operations: list[str] = Field(
        default=[], description="Jobs beyond the common ones: operations, clones, tables, admin, or all."
    )
    checks: list[str] = Field(default=list(DEFAULT_CHECKS), description="Names of the checks, or all.")
    check_limits: ChecksModel | None = Field(default=None, description="The limits beyond which the checks fail.")
    limits: LimitsModel | None = Field(
        default=None, description="Without them, no schedule frees anything: no trim, expire, purge, orphans."
    )
    timezone: str = Field(default="UTC", description="Time zone of schedules and blackouts, such as Europe/Berlin.")
    crons: dict[str, str] = Field(default={}, description="Times of operations to schedule, by name.")
    observe_cron: str | None = Field(default="*/30 * * * *", description="When the assets are observed; null: never.")
    blackouts: list[BlackoutModel] = Field(default=[], description="When no schedule begins anything.")
    export_target: str = Field(default="", description="Root of scheduled exports; empty: the lakehouse's own.")
    export_retain_days: float = Field(default=35, description="How long scheduled exports are kept; 0: until dropped.")
    budget: BudgetModel | None = Field(default=None, description="What scheduled deletions may ask of the storage.")
    location_name: str | None = Field(default=None, description="This code location, for links of checks to jobs.")
    reclaimable_seconds: float = Field(
        default=RECLAIMABLE_SECONDS, description="How long an observation may count what can be freed; 0: not at all."
    )
    on_commit: str | None = Field(default=None, description="The job after commits of others; null: none.")
    is_on: bool = Field(default=False, description="Whether schedules and the sensor are on from the beginning.")

    @field_validator("storage_options", mode="before")
    @classmethod
    def _as_texts(cls, given: Any) -> Any:
        """Return options as texts: Dagster reads ``"1"`` of a YAML file as a number, and ``"true"`` as a truth."""
        if not isinstance(given, dict):
            return given
        return {name: _plain_text(value) for name, value in given.items()}

    def build_defs(self, context: dg.ComponentLoadContext) -> dg.Definitions:
        """Return the definitions. Raises DagsterInvalidDefinitionError that says what is wrong, in one line."""
        try:
            return build_trinitylake_definitions(self.settings())
        except ValidationError as error:
            problem = "; ".join(f"{_place(one['loc'])}: {one['msg']}" for one in error.errors(include_input=False))
        except (InvalidInputError, dg.DagsterInvalidDefinitionError) as error:
            problem = str(error)
        raise dg.DagsterInvalidDefinitionError(f"{context.path}: {problem}")

    def settings(self) -> LakehouseSettings:
        """Return the settings in the YAML. Raises InvalidInputError, pydantic.ValidationError."""
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


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(map(str, location))


def _days(name: str, days: float) -> timedelta:
    if not 0 <= days <= 1_000_000:
        raise InvalidInputError(f"{name} is {days:g}, it must be from 0 to 1,000,000")
    return timedelta(days=days)


def _clock(text: str) -> time:
    if not _CLOCK.fullmatch(text):
        raise InvalidInputError(f"{text!r} is no time of the day; write HH:MM, in quotes")
    return time.fromisoformat(text)
