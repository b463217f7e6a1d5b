"""One project of tables, stored in four ways, each in two code locations: of most tables, and of those made of them."""

from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.compute as pc

from tests.e2e.gestures_store import IO, Store, count_rows, day_of, folder_of

DAYS = dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-01-03")
REGIONS = dg.StaticPartitionsDefinition(["north", "south"])
DAYS_AND_REGIONS = dg.MultiPartitionsDefinition({"day": DAYS, "region": REGIONS})
PREVIOUS_DAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=-1)
WITH_PREVIOUS_DAY = dg.TimeWindowPartitionMapping(start_offset=-1, end_offset=0)
EAGER = dg.AutomationCondition.eager()


def shops_of(store: str) -> dg.DynamicPartitionsDefinition:
    """Return the dynamic partitions of a store's project."""
    return dg.DynamicPartitionsDefinition(name=f"{store}_shops")


def _plain(store: Store) -> list[dg.AssetsDefinition]:
    """Tables without partitions."""

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
        context.add_output_metadata({"seen": sorted(totals["value"].to_pylist())})

    return [*store.publishing("publish_plain", orders, totals, group_name="plain"), report]


def _interrupted(store: Store) -> list[dg.AssetsDefinition]:
    """Tables whose runs fail, wait or are retried. One gets its rows by appends."""

    @store.table(group_name="interrupted", is_appended=True)
    def events(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table("events", group_name="interrupted")
    def latest(context, events):  # type: ignore[no-untyped-def]
        assert not (folder_of(store.name) / "broken").exists(), "the file says so"
        store.wait()
        own = events.filter(pc.equal(events["value"], store.value()))
        return store.rows(count_rows(own))

    @store.table(group_name="retried", retry_policy=dg.RetryPolicy(max_retries=1))
    def flaky(context):  # type: ignore[no-untyped-def]
        assert context.retry_number > 0, "the first attempt fails"
        return store.rows(2)

    return [
        *store.publishing("publish_interrupted", events, latest, group_name="interrupted"),
        *store.publishing("publish_flaky", flaky, group_name="retried"),
    ]


def _days(store: Store) -> list[dg.AssetsDefinition]:
    """Tables with partitions, and all mappings between them."""
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

    @store.table("day_orders", group_name="days")
    def summary(context, day_orders):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(day_orders))

    @store.table("running", mappings={"running": PREVIOUS_DAY}, **daily)
    def running(context, running):  # type: ignore[no-untyped-def]
        return store.rows(count_rows(running) + 1, day=day_of(context))

    tables = store.publishing("publish_days", day_orders, day_totals, two_days, summary, group_name="days",
                              partitions_def=DAYS)  # fmt: skip
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
    """Tables and publish assets with ``AutomationCondition.eager()``, made of what a person materializes."""

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
    """Tables for each other way in which automation concerns a table and its publish asset."""

    @store.table(deps=[raw], group_name="automated", automation_condition=EAGER)
    def eager_by_key(context):  # type: ignore[no-untyped-def]
        return store.rows(2)

    @store.table(deps=[raw], group_name="automated")
    def of_eager(context):  # type: ignore[no-untyped-def]
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
        for table in (of_eager, both_eager)
    ]
    by_key = store.publish("publish_eager_by_key", eager_by_key.key)
    return [eager_by_key, by_key, of_eager, both_eager, *eager_publishers, remote]


def definitions_of(store: str) -> dg.Definitions:
    """Return the first code location of a store's project."""
    made = Store(store)
    return made.definitions(*_plain(made), *_interrupted(made), *_days(made), *_automated(made))


def second_definitions_of(store: str) -> dg.Definitions:
    """Return the second code location, with what is made of tables of the first one, or would publish them."""
    made = Store(store)

    @made.table("eager_table", group_name="second", automation_condition=EAGER)
    def elsewhere(context, eager_table):  # type: ignore[no-untyped-def]
        return made.rows(count_rows(eager_table))

    tables = made.publishing("publish_elsewhere", elsewhere, group_name="second")
    specs = [dg.AssetSpec(made.key("eager_table"))]
    if store == "publisher":
        specs.append(dg.AssetSpec(made.key("remote")).with_io_manager_key(IO))
        tables.append(made.publish("publish_remote", specs[-1].key, group_name="second"))
    return made.definitions(*specs, *tables)


def own() -> dg.Definitions:
    return definitions_of("own")


def own_second() -> dg.Definitions:
    return second_definitions_of("own")


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
