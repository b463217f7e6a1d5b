"""A project of tables for four stores, each in two code locations: most tables, and downstream tables.

``direct``: the lakehouse's IO manager, where each table is published by its step. ``publisher``: the same with publish
assets. ``iceberg``: dagster-iceberg with a catalog in SQLite. ``files``: Dagster's filesystem IO manager. ``iceberg``
is loaded in an environment without this package, so other packages are imported where they are needed.

The folder ``PUBLISHING_PROJECT`` contains a folder for each store, with a file ``value`` for the value of all rows, and
files that make steps fail (``broken``) or wait (``slow``).
"""

import os
import time
from collections.abc import Callable, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

STORES = ("direct", "publisher", "iceberg", "files")
DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
REGIONS = dg.StaticPartitionsDefinition(["north", "south"])
DAYS_AND_REGIONS = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})
PREVIOUS_DAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
WITH_PREVIOUS_DAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=0)
LAST_DAY = dg.SpecificPartitionsPartitionMapping(["2026-01-02"])
EAGER = dg.AutomationCondition.eager()

IO = "tables"
SENSOR = "automation"
_PRELOADED_MODULES = ["dagster", "pyarrow"]


def folder_of(store: str) -> Path:
    """Return the folder with the files that control a store's project."""
    return Path(os.environ["PUBLISHING_PROJECT"]) / store


def lakehouse_root() -> str:
    """Return the root of the lakehouse of ``direct`` and ``publisher``."""
    return str(Path(os.environ["PUBLISHING_PROJECT"]) / "lakehouse")


def catalog_properties() -> dict[str, str]:
    """Return the catalog properties of ``iceberg``."""
    folder = Path(os.environ["PUBLISHING_PROJECT"])
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}


class Store:
    """A store for the tables of a project, with its asset metadata and resources."""

    def __init__(self, name: str):
        self.name = name
        #: Type of an input table. With ``files``, several partitions are a dictionary.
        self.input_type: Any = Any if name == "files" else pa.Table

    @property
    def is_lakehouse(self) -> bool:
        return self.name in {"direct", "publisher"}

    def key(self, table: str) -> list[str]:
        return [self.name, table]

    def table(
        self, *inputs: str, columns: tuple[str, ...] = (), is_appended: bool = False, **options: Any
    ) -> Callable[[Callable[..., Any]], dg.AssetsDefinition]:
        """Return a decorator that builds a table asset from a function of the context and its input tables.

        Args:
            inputs: Names of the input tables.
            columns: Partition columns.
            is_appended: Whether each run appends rows.
            options: Options of the asset. ``mappings`` maps the partitions of inputs.
        """
        mappings: Mapping[str, dg.PartitionMapping] = options.pop("mappings", {})
        ins = {
            name: dg.AssetIn(self.key(name), input_manager_key=IO, partition_mapping=mappings.get(name))
            for name in inputs
        }

        def decorate(compute: Callable[..., Any]) -> dg.AssetsDefinition:
            compute.__annotations__.update(dict.fromkeys(inputs, self.input_type), context=dg.AssetExecutionContext)
            compute.__annotations__["return"] = pa.Table
            return dg.asset(
                key=self.key(compute.__name__),
                ins=ins,
                io_manager_key=IO,
                metadata=self._metadata(columns, is_appended),
                **options,
            )(compute)

        return decorate

    def _metadata(self, columns: tuple[str, ...], is_appended: bool) -> Mapping[str, Any]:
        if self.is_lakehouse:
            from trinitylake_ops.dagster_plugin import stored_as

            partition_by = list(columns) if len(columns) == 1 else None
            return stored_as(
                **({"mode": "append"} if is_appended else {}),
                **({"partition_by": partition_by} if partition_by else {}),
            )
        if self.name == "iceberg":
            expression = {name: name for name in columns} if len(columns) > 1 else next(iter(columns), None)
            return {
                **({"partition_expr": expression} if expression else {}),
                **({"write_mode": "append"} if is_appended else {}),
            }
        return {}

    def publishing(self, name: str, *tables: dg.AssetsDefinition, **options: Any) -> list[dg.AssetsDefinition]:
        """Return the tables, with a publish asset if the store uses publish assets."""
        return [*tables, self.publish(name, *tables, **options)] if self.name == "publisher" else list(tables)

    def publish(self, name: str, *tables: dg.AssetsDefinition | dg.AssetKey, **options: Any) -> dg.AssetsDefinition:
        """Return a publish asset for tables, each a definition or a key."""
        from trinitylake_ops.dagster_plugin import LakehouseNames, build_publish_asset

        tables_by_name = {(table if isinstance(table, dg.AssetKey) else table.key).path[-1]: table for table in tables}
        return build_publish_asset(key=self.key(name), tables=tables_by_name, names=LakehouseNames("lake"), **options)

    def resources(self) -> dict[str, Any]:
        if self.is_lakehouse:
            from trinitylake_ops.dagster_plugin import LakehouseNames, TrinityLakeIOManager, TrinityLakeResource

            lakehouse = TrinityLakeResource(root=lakehouse_root())
            return {LakehouseNames("lake").resource_key: lakehouse, IO: TrinityLakeIOManager(lakehouse=lakehouse)}
        if self.name == "iceberg":
            from dagster_iceberg.config import IcebergCatalogConfig
            from dagster_iceberg.io_manager.arrow import PyArrowIcebergIOManager

            config = IcebergCatalogConfig(properties=catalog_properties())
            return {IO: PyArrowIcebergIOManager(name="tables", config=config)}
        return {IO: dg.FilesystemIOManager(base_dir=str(folder_of("files") / "stored"))}

    def definitions(self, *assets: dg.AssetsDefinition | dg.AssetSpec) -> dg.Definitions:
        executor = dg.multiprocess_executor.configured(
            {"max_concurrent": 2, "start_method": {"forkserver": {"preload_modules": _PRELOADED_MODULES}}}
        )
        automation = dg.AutomationConditionSensorDefinition(
            SENSOR, target=dg.AssetSelection.all(), minimum_interval_seconds=5
        )
        return dg.Definitions(assets=assets, resources=self.resources(), executor=executor, sensors=[automation])

    # Rows

    def value(self) -> int:
        return int((folder_of(self.name) / "value").read_text())

    def rows(self, count: int, /, **columns: Any) -> pa.Table:
        """Return rows with distinct values of ``n``."""
        constants = {name: [value] * count for name, value in columns.items()}
        return pa.table({**constants, "n": list(range(1, count + 1)), "value": [self.value()] * count})

    def wait(self) -> None:
        """Wait while the file ``slow`` exists, for at most two minutes."""
        deadline = time.monotonic() + 120
        (folder_of(self.name) / "waiting").touch()
        while (folder_of(self.name) / "slow").exists() and time.monotonic() < deadline:
            time.sleep(0.1)


def count_rows(rows: Any) -> int:
    """Return the number of rows of an input, which is a dictionary for several partitions of ``files``."""
    if rows is None:
        return 0
    return sum(map(count_rows, rows.values())) if isinstance(rows, dict) else len(rows)


def day_of(context: dg.AssetExecutionContext) -> date:
    key = context.partition_key
    return date.fromisoformat(key.keys_by_dimension["day"] if isinstance(key, dg.MultiPartitionKey) else key)


def shops_of(store: str) -> dg.DynamicPartitionsDefinition:
    """Return the dynamic partitions of a store's project."""
    return dg.DynamicPartitionsDefinition(name=f"{store}_shops")


def _plain(store: Store) -> list[dg.AssetsDefinition]:
    """Return tables without partitions."""

    @store.table(group_name="plain")
    def orders(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table("orders", group_name="plain")
    def totals(context, orders):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(orders))

    @dg.asset(
        key=store.key("report"),
        group_name="plain",
        ins={"totals": dg.AssetIn(store.key("totals"), input_manager_key=IO)},
    )
    def report(context: dg.AssetExecutionContext, totals: pa.Table) -> None:
        context.add_output_metadata({"values": sorted(totals["value"].to_pylist())})

    return [*store.publishing("publish_plain", orders, totals, group_name="plain"), report]


def _interrupted(store: Store) -> list[dg.AssetsDefinition]:
    """Return tables whose steps fail, wait or are retried. One table is appended to."""

    @store.table(group_name="interrupted", is_appended=True)
    def events(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table("events", group_name="interrupted")
    def latest(context, events):  # type: ignore[no-untyped-def]
        assert not (folder_of(store.name) / "broken").exists(), "the file makes this step fail"
        store.wait()
        current = events.filter(pc.equal(events["value"], store.value()))
        return store.rows(count_rows(current))

    @store.table(group_name="retried", retry_policy=dg.RetryPolicy(max_retries=1))
    def flaky(context):  # type: ignore[no-untyped-def]
        assert context.retry_number > 0, "the first attempt fails"
        return store.rows(2)

    return [
        *store.publishing("publish_interrupted", events, latest, group_name="interrupted"),
        *store.publishing("publish_flaky", flaky, group_name="retried"),
    ]


def _days(store: Store) -> list[dg.AssetsDefinition]:
    """Return tables with partitions, with different partition mappings between them."""
    daily: dict[str, Any] = {"group_name": "days", "partitions_def": DAYS, "columns": ("day",)}

    @store.table(**daily)
    def day_orders(context):  # type: ignore[no-untyped-def]
        return store.rows(2, day=day_of(context))

    @store.table("day_orders", **daily)
    def day_totals(context, day_orders):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(day_orders), day=day_of(context))

    @store.table("day_orders", mappings={"day_orders": WITH_PREVIOUS_DAY}, **daily)
    def two_days(context, day_orders):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(day_orders), day=day_of(context))

    @store.table("day_orders", mappings={"day_orders": LAST_DAY}, **daily)
    def last_day_orders(context, day_orders):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(day_orders), day=day_of(context))

    @store.table("day_orders", group_name="days")
    def summary(context, day_orders):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(day_orders))

    @store.table("running", mappings={"running": PREVIOUS_DAY}, **daily)
    def running(context, running):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(running) + 1, day=day_of(context))

    published_together = (day_orders, day_totals, two_days, last_day_orders, summary)
    tables = store.publishing("publish_days", *published_together, group_name="days", partitions_def=DAYS)
    published = [tables[-1].key] if store.name == "publisher" else []
    by_day = dg.MultiToSingleDimensionPartitionMapping("day")

    @store.table(
        "day_orders",
        mappings={"day_orders": by_day},
        columns=("day", "region"),
        group_name="days",
        partitions_def=DAYS_AND_REGIONS,
        deps=[dg.AssetDep(key, partition_mapping=by_day) for key in published],
    )
    def regions(context, day_orders):  # type: ignore[no-untyped-def]
        region = context.partition_key.keys_by_dimension["region"]
        return store.rows(count_rows(day_orders), day=day_of(context), region=region)

    shops_def = shops_of(store.name)

    @store.table(columns=("shop",), group_name="days", partitions_def=shops_def)
    def shops(context):  # type: ignore[no-untyped-def]
        return store.rows(2, shop=context.partition_key)

    return [
        *tables,
        *store.publishing("publish_running", running, group_name="days", partitions_def=DAYS),
        *store.publishing("publish_regions", regions, group_name="days", partitions_def=DAYS_AND_REGIONS),
        *store.publishing("publish_shops", shops, group_name="days", partitions_def=shops_def),
    ]


def _automated(store: Store) -> list[dg.AssetsDefinition]:
    """Return tables and publish assets with ``AutomationCondition.eager()``, downstream of a manual asset."""

    @dg.asset(key=store.key("raw"), group_name="automated")
    def raw() -> None: ...

    @dg.asset(key=store.key("raw_day"), group_name="automated", partitions_def=DAYS)
    def raw_day() -> None: ...

    @store.table(deps=[raw], group_name="automated", automation_condition=EAGER)
    def eager_table(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table(
        deps=[raw_day], group_name="automated", automation_condition=EAGER, partitions_def=DAYS, columns=("day",)
    )
    def eager_day(context):  # type: ignore[no-untyped-def]
        return store.rows(2, day=day_of(context))

    tables = [
        *store.publishing("publish_eager_table", eager_table),
        *store.publishing("publish_eager_day", eager_day, partitions_def=DAYS),
    ]
    return [raw, raw_day, *tables, *(_automated_publishers(store, raw) if store.name == "publisher" else [])]


def _automated_publishers(store: Store, raw: dg.AssetsDefinition) -> list[dg.AssetsDefinition]:
    """Return tables for the other combinations of automation conditions on a table and its publish asset."""

    @store.table(deps=[raw], group_name="automated", automation_condition=EAGER)
    def eager_by_key(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table(deps=[raw], group_name="automated")
    def eager_publisher(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table(deps=[raw], group_name="automated", automation_condition=EAGER)
    def both_eager(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table(group_name="automated")
    def remote(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    eager_publishers = [
        store.publish(f"publish_{table.key.path[-1]}", table).map_asset_specs(
            lambda spec: spec.replace_attributes(automation_condition=EAGER)
        )
        for table in (eager_publisher, both_eager)
    ]
    by_key = store.publish("publish_eager_by_key", eager_by_key.key)
    return [eager_by_key, by_key, eager_publisher, both_eager, *eager_publishers, remote]


def definitions_of(store: str) -> dg.Definitions:
    """Return the first code location of a store's project."""
    project = Store(store)
    return project.definitions(*_plain(project), *_interrupted(project), *_days(project), *_automated(project))


def second_definitions_of(store: str) -> dg.Definitions:
    """Return the second code location, with tables and publish assets that depend on tables of the first one."""
    project = Store(store)

    @project.table("eager_table", group_name="second", automation_condition=EAGER)
    def downstream(context, eager_table):  # type: ignore[no-untyped-def]
        return project.rows(count_rows(eager_table))

    tables = project.publishing("publish_downstream", downstream, group_name="second")
    specs = [dg.AssetSpec(project.key("eager_table"))]
    if store == "publisher":
        specs.append(dg.AssetSpec(project.key("remote")).with_io_manager_key(IO))
        tables.append(project.publish("publish_remote", specs[-1].key, group_name="second"))
    return project.definitions(*specs, *tables)


def direct() -> dg.Definitions:
    return definitions_of("direct")


def direct_second() -> dg.Definitions:
    return second_definitions_of("direct")


def publisher() -> dg.Definitions:
    return definitions_of("publisher")


def publisher_second() -> dg.Definitions:
    return second_definitions_of("publisher")


def iceberg() -> dg.Definitions:
    return definitions_of("iceberg")


def iceberg_second() -> dg.Definitions:
    return second_definitions_of("iceberg")


def files() -> dg.Definitions:
    return definitions_of("files")


def files_second() -> dg.Definitions:
    return second_definitions_of("files")
