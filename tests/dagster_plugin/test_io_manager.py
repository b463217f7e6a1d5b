"""Test that asset outputs become staged tables, and that all inputs of a run are read from one version."""

import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, date, datetime
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyspark.sql import DataFrame, SparkSession

from tests.dagster_plugin.run_config import QUIET
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import SparkResource, TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_settings import arrow_of, stored_as
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.storage import LocalStorage
from trinitylake_ops.transaction.saved import pinned_version

UPSTREAM = dg.AssetKey(["ref", "rates"])


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lakehouse = lakes.local()
    publish_rates(lakehouse, 1)
    return lakehouse


def publish_rates(lake: Lakehouse, rate: int) -> None:
    """Replace the upstream table, like another writer."""
    staged = stage_arrow(lake, pa.table({"rate": [rate]}), "ref", "rates", mode="replace_table")
    publish_once(lake, [staged], publication_id("rates", str(rate)))


def run(
    lake: Lakehouse,
    instance: dg.DagsterInstance,
    assets: list[Any],
    *,
    version: str = "",
    partition_key: str | None = None,
    spark: SparkResource | None = None,
) -> dg.ExecuteInProcessResult:
    lakehouse = TrinityLakeResource(root=lake.root)
    spark_resource = {} if spark is None else {"spark": spark}
    io_manager = TrinityLakeIOManager(lakehouse=lakehouse, version=version, **spark_resource)
    keys_by_name = {key.path[-1]: key for asset in assets for key in asset.keys}
    publish = build_publish_asset(
        key=["publish", "all"], tables=keys_by_name, description="All.", partitions_def=assets[0].partitions_def
    )
    definitions = dg.Definitions(
        assets=[*assets, publish, *([] if UPSTREAM in keys_by_name.values() else [dg.AssetSpec(UPSTREAM)])],
        resources={"lakehouse": lakehouse, "io_manager": io_manager},
        jobs=[dg.define_asset_job("everything")],
        executor=dg.in_process_executor,
    )
    return definitions.resolve_job_def("everything").execute_in_process(
        instance=instance, run_config=QUIET, partition_key=partition_key
    )


def rows(lake: Lakehouse, namespace: str, table: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = catalog_at(lake).load_table((namespace, table)).scan().to_arrow().to_pylist()
    return rows


def test_all_steps_read_one_version_despite_external_commits(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["marts", "first"], ins={"rates": dg.AssetIn(UPSTREAM)})
    def first(rates: pa.Table) -> pa.Table:
        publish_rates(lake, rates["rate"][0].as_py() + 1)
        return rates

    @dg.asset(key=["marts", "second"], ins={"rates": dg.AssetIn(UPSTREAM)}, deps=[first])
    def second(rates: pd.DataFrame) -> pd.DataFrame:
        return rates

    run(lake, instance, [first, second])
    assert rows(lake, "marts", "first") == rows(lake, "marts", "second") == [{"rate": 1}]
    assert rows(lake, "ref", "rates") == [{"rate": 2}]
    run(lake, instance, [first, second])
    assert rows(lake, "marts", "first") == rows(lake, "marts", "second") == [{"rate": 2}]
    run(lake, instance, [first, second], version="1")
    assert rows(lake, "marts", "first") == rows(lake, "marts", "second") == [{"rate": 1}]


def test_first_read_pins_version_for_all_processes(lake: Lakehouse) -> None:
    for number in range(20):
        pin_id = publication_id("pin", str(number))

        def read_first(rate: int, pin_id: str = pin_id) -> int:
            second_lakehouse = Lakehouse(LocalStorage(lake.root))
            with second_lakehouse.transaction() as txn:
                txn.create_namespace(f"{pin_id[:8]}-{rate}")
            return pinned_version(second_lakehouse.snapshot(), pin_id)

        with ThreadPoolExecutor(4) as pool:
            assert len(set(pool.map(read_first, range(4)))) == 1
    assert pinned_version(lake.snapshot(), pin_id) < lake.latest_version()


@pytest.mark.parametrize(
    "input_type", [pa.Table, pa.RecordBatchReader, pd.DataFrame, Table], ids=["table", "reader", "pandas", "iceberg"]
)
def test_inputs_have_annotated_type(lake: Lakehouse, instance: dg.DagsterInstance, input_type: type) -> None:
    inputs: list[Any] = []

    def compute(rates: Any) -> pd.DataFrame:
        inputs.append(rates)
        return pd.DataFrame({"day": [date(2030, 1, 2)], "at": pd.to_datetime(["2030-01-02T03:04:05Z"]), "n": [1.5]})

    compute.__annotations__["rates"] = input_type
    asset = dg.asset(key=["marts", "result"], ins={"rates": dg.AssetIn(UPSTREAM)})(compute)
    run(lake, instance, [asset])
    assert isinstance(inputs[0], input_type)
    (row,) = rows(lake, "marts", "result")
    assert (row["day"], row["n"], row["at"].isoformat()) == (date(2030, 1, 2), 1.5, "2030-01-02T03:04:05+00:00")


def test_unsupported_types_are_rejected(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["marts", "number"])
    def number() -> int:
        return 3

    with pytest.raises(InvalidInputError, match="marts/number"):
        run(lake, instance, [number])

    @dg.asset(key=["marts", "untyped"], ins={"rates": dg.AssetIn(UPSTREAM)})
    def untyped(rates) -> pa.Table:  # type: ignore[no-untyped-def]
        return pa.table({"n": [1]})

    with pytest.raises(InvalidInputError):
        run(lake, instance, [untyped])

    @dg.asset(key=["orders"])
    def asset_without_namespace() -> pa.Table:
        return pa.table({"n": [1]})

    with pytest.raises(InvalidInputError):
        run(lake, instance, [asset_without_namespace])


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"mode": "merge"}, "'merge'"),
        ({"mode": "overwrite_partition"}, "partition_by"),
        ({"table": "orders"}, "NAMESPACE.TABLE"),
        ({"partition_by": ["a"], "partition_format": {"b": "%Y"}}, "partition_format"),
    ],
    ids=["mode", "columns", "table", "format"],
)
def test_invalid_metadata_is_rejected_when_definitions_load(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        stored_as(**metadata)


MONTHS = dg.MonthlyPartitionsDefinition(start_date="2020-01-01", end_date="2020-04-01")
BY_MONTH = stored_as(
    mode="overwrite_partition", partition_by=["year", "month"], partition_format={"year": "%Y", "month": "%m"}
)


def test_run_replaces_and_reads_only_its_partition(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    amount, n_rows_read = 1, []

    @dg.asset(key=["facts", "sales"], partitions_def=MONTHS, metadata=BY_MONTH)
    def sales(context: dg.AssetExecutionContext) -> pa.Table:
        month = int(context.partition_key[5:7])
        return pa.table({"year": [2020], "month": [month], "amount": [amount]})

    @dg.asset(
        key=["facts", "total"], partitions_def=MONTHS, metadata=BY_MONTH, ins={"sales": dg.AssetIn(["facts", "sales"])}
    )
    def total(sales: pa.Table) -> pa.Table:
        n_rows_read.append(sales.num_rows)
        return sales

    for key in ("2020-01-01", "2020-02-01"):
        run(lake, instance, [sales, total], partition_key=key)
    amount = 5
    run(lake, instance, [sales, total], partition_key="2020-01-01")
    assert n_rows_read == [1, 1, 1]
    for table in ("sales", "total"):
        amounts = sorted((row["month"], row["amount"]) for row in rows(lake, "facts", table))
        assert amounts == [(1, 5), (2, 1)]
    (latest,) = lake.history(1)
    assert (latest.message, latest.properties["partition"]) == ("publish all 2020-01-01", "2020-01-01")


COUNTRIES = dg.StaticPartitionsDefinition(["eu", "us"])


def country_orders(**options: Any) -> dg.AssetsDefinition:
    @dg.asset(key=["facts", "orders"], partitions_def=COUNTRIES, metadata=stored_as(**options))
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        return pa.table({"country": [context.partition_key], "n": [1]})

    return orders


def test_partitioned_asset_replaces_only_its_partition(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    for key in ("eu", "us", "us"):
        run(lake, instance, [country_orders(partition_by=["country"])], partition_key=key)
    assert sorted(row["country"] for row in rows(lake, "facts", "orders")) == ["eu", "us"]
    overwriting = country_orders(mode="overwrite", partition_by=["country"])
    run(lake, instance, [overwriting], partition_key="eu")
    assert rows(lake, "facts", "orders") == [{"country": "eu", "n": 1}]


def test_partition_dimensions_are_columns_by_default(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    dimensions = dg.MultiPartitionsDefinition({"country": COUNTRIES, "kind": dg.StaticPartitionsDefinition(["a", "b"])})

    @dg.asset(key=["facts", "orders"], partitions_def=dimensions)
    def orders(context: dg.AssetExecutionContext) -> pa.Table:
        key = context.partition_key
        assert isinstance(key, dg.MultiPartitionKey)
        return pa.table({name: [value] for name, value in key.keys_by_dimension.items()})

    for country, kind in [("eu", "a"), ("us", "a"), ("eu", "a"), ("eu", "b")]:
        key = dg.MultiPartitionKey({"country": country, "kind": kind})
        run(lake, instance, [orders], partition_key=key)
    pairs = sorted((row["country"], row["kind"]) for row in rows(lake, "facts", "orders"))
    assert pairs == [("eu", "a"), ("eu", "b"), ("us", "a")]


def test_partitions_of_unknown_column_are_rejected(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    """Each partition would replace the whole table, so the definitions do not load and runs fail."""
    orders = country_orders()
    message = r"facts\.orders .*stored_as\(partition_by="
    with pytest.raises(InvalidInputError, match=message):
        build_publish_asset(key=["publish"], tables={"orders": orders}, description="All.", partitions_def=COUNTRIES)
    version = lake.latest_version()
    with pytest.raises(InvalidInputError, match=message):
        run(lake, instance, [orders], partition_key="eu")
    assert lake.latest_version() == version
    by_two_columns = country_orders(mode="overwrite_partition", partition_by=["country", "kind"])
    with pytest.raises(InvalidInputError):
        build_publish_asset(
            key=["publish"], tables={"orders": by_two_columns}, description="All.", partitions_def=COUNTRIES
        )


def test_table_changed_since_staging_fails_with_clear_message(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    @dg.asset(key=["ref", "rates"])
    def rates() -> pa.Table:
        return pa.table({"rate": [9]})

    @dg.asset(key=["marts", "late_reader"], deps=[rates])
    def late_reader() -> pa.Table:
        publish_rates(lake, 7)
        return pa.table({"n": [1]})

    version = lake.latest_version()
    with pytest.raises(dg.Failure, match=r"ref\.rates was staged") as raised:
        run(lake, instance, [rates, late_reader])
    assert isinstance(raised.value.__cause__, CommitConflictError)
    assert raised.value.allow_retries is False
    assert lake.latest_version() == version + 1


def test_spark_frames_are_stored_and_loaded(lake: Lakehouse, instance: dg.DagsterInstance, spark: SparkSession) -> None:
    @dg.asset(key=["marts", "doubled"], ins={"rates": dg.AssetIn(UPSTREAM)})
    def doubled(rates: DataFrame) -> DataFrame:
        return rates.selectExpr("rate * 2 AS rate")

    @dg.asset(key=["marts", "again"], ins={"doubled": dg.AssetIn(["marts", "doubled"])})
    def doubled_again(doubled: DataFrame) -> DataFrame:
        return doubled.selectExpr("rate * 2 AS rate")

    run(lake, instance, [doubled, doubled_again])
    assert rows(lake, "marts", "doubled") == [{"rate": 2}]
    assert rows(lake, "marts", "again") == [{"rate": 4}]

    @dg.asset(key=["marts", "again"])
    def retyped_frame() -> DataFrame:
        return spark.sql("SELECT 'four' AS rate, 1 AS more")

    run(lake, instance, [retyped_frame])
    assert rows(lake, "marts", "again") == [{"rate": "four", "more": 1}]


def store_and_read(lake: Lakehouse, instance: dg.DagsterInstance, frame: pd.DataFrame) -> list[dict[str, Any]]:
    @dg.asset(key=["marts", "frames"])
    def frame_asset() -> pd.DataFrame:
        return frame

    run(lake, instance, [frame_asset])
    return rows(lake, "marts", "frames")


def store_frame(lake: Lakehouse, instance: dg.DagsterInstance, frame: Any, **metadata: Any) -> None:
    @dg.asset(key=["marts", "frames"], metadata=stored_as(**metadata))
    def frame_asset() -> Any:
        return frame

    run(lake, instance, [frame_asset])


def schema_of(lake: Lakehouse) -> Schema:
    return catalog_at(lake).load_table(("marts", "frames")).schema()


def test_named_pandas_index_becomes_column(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    sales = pd.DataFrame({"country": ["NZ", "AU", "NZ"], "year": [2030, 2030, 2031], "n": [1, 2, 3]})
    totals = sales.groupby(["country", "year"]).sum()
    assert store_and_read(lake, instance, totals)[0] == {"country": "AU", "year": 2030, "n": 2}
    filtered = sales[sales.n > 1].set_index("n", drop=False)
    assert store_and_read(lake, instance, filtered)[0] == {"country": "AU", "year": 2030, "n": 2}


def test_lossy_pandas_frame_is_rejected(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    for frame, message in [
        (pd.DataFrame({"n": [1]}, index=["NZ"]), "has no name"),
        (pd.DataFrame({"n": [1, "a"]}), "the pandas DataFrame cannot be stored"),
    ]:
        with pytest.raises(InvalidInputError, match=message):
            store_and_read(lake, instance, frame)


@pytest.mark.parametrize(
    "columns", [["n", "n"], pd.MultiIndex.from_tuples([("n", "min"), ("n", "max")])], ids=["duplicates", "levels"]
)
def test_invalid_pandas_column_names_are_rejected(columns: Any) -> None:
    with pytest.raises(InvalidInputError) as raised:
        arrow_of(pd.DataFrame([[1, 2]], columns=columns))
    assert "df." in str(raised.value), "the message must name a fix in pandas"
    assert len(str(raised.value).splitlines()) == 1


def test_overwrite_replaces_columns(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    """Columns can change their type or be removed. A column keeps its type if that type can store the new numbers."""
    for frame in (
        pa.table({"n": pa.array([1, None]), "note": ["a", "b"]}),
        pd.DataFrame({"n": [1.0, None], "note": ["a", "b"]}),
    ):
        store_frame(lake, instance, frame)
        assert [str(field.field_type) for field in schema_of(lake).fields] == ["long", "string"]
    first = lake.latest_version()
    store_frame(lake, instance, pa.table({"n": ["one"], "more": [True]}))
    assert [(field.name, str(field.field_type)) for field in schema_of(lake).fields] == [
        ("n", "string"),
        ("more", "boolean"),
    ]
    assert rows(lake, "marts", "frames") == [{"n": "one", "more": True}]
    before = catalog_at(lake, first).load_table(("marts", "frames")).scan().to_arrow().to_pylist()
    assert before == [{"n": 1, "note": "a"}, {"n": None, "note": "b"}]
    sizes = [(pa.array([1], pa.int32()), "int"), (pa.array([1]), "long"), (pa.array([1.5]), "double")]
    for size, name in (*sizes, (pa.array([1]), "double")):
        store_frame(lake, instance, pa.table({"size": size}))
        assert [str(field.field_type) for field in schema_of(lake).fields] == [name]


def test_append_widens_integer_columns_and_rejects_other_types(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    store_frame(lake, instance, pa.table({"n": pa.array([1], pa.int32())}), mode="append")
    store_frame(lake, instance, pa.table({"n": [2]}), mode="append")
    assert str(schema_of(lake).find_type("n")) == "int"
    store_frame(lake, instance, pa.table({"n": [1 << 40]}), mode="append")
    assert str(schema_of(lake).find_type("n")) == "long"
    with pytest.raises(InvalidInputError, match=r"marts\.frames"):
        store_frame(lake, instance, pa.table({"n": ["three"]}), mode="append")
    assert sorted(row["n"] for row in rows(lake, "marts", "frames")) == [1, 2, 1 << 40]


@pytest.mark.parametrize("mode", ["append", "overwrite_partition"])
def test_integer_columns_stay_integers_when_pandas_converts_to_floats(
    lake: Lakehouse, instance: dg.DagsterInstance, mode: str
) -> None:
    options: dict[str, Any] = {"mode": mode, **({} if mode == "append" else {"partition_by": ["day"]})}
    expected: list[Any] = []

    def store_numbers(numbers: list[Any], dtype: str | None = None) -> None:
        frame = pd.DataFrame({"day": ["mon"] * len(numbers), "n": pd.array(numbers, dtype) if dtype else numbers})
        store_frame(lake, instance, frame, **options)
        expected[:] = [*(expected if mode == "append" else []), *numbers]
        assert str(schema_of(lake).find_type("n")) == "long"
        numbers_read = [row["n"] for row in rows(lake, "marts", "frames")]
        assert sorted(numbers_read, key=repr) == sorted(expected, key=repr)

    store_numbers([1, 2])
    assert str(pd.DataFrame({"n": [3, None]}).n.dtype) == "float64", "pandas itself converts to floats"
    store_numbers([3, None])
    if mode == "append":
        store_numbers([None, 4], "Int64")
    before = lake.latest_version()
    with pytest.raises(InvalidInputError, match=r"marts\.frames"):
        store_numbers([1.5, None])
    assert lake.latest_version() == before


def test_timestamps_with_time_zone_are_stored_in_utc(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    timestamp = datetime(2030, 1, 1, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    berlin_rows = pa.table({"at": pa.array([timestamp], pa.timestamp("us", "Europe/Berlin"))})
    for _ in range(2):
        store_frame(lake, instance, berlin_rows)
        assert [row["at"].isoformat() for row in rows(lake, "marts", "frames")] == ["2030-01-01T00:00:00+00:00"]


def test_polars_frames_are_stored_and_loaded(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    def eager(rates):  # type: ignore[no-untyped-def]
        assert type(rates) is pl.DataFrame
        return rates.with_columns(name=pl.lit("a"))

    def lazy(eager):  # type: ignore[no-untyped-def]
        assert type(eager) is pl.LazyFrame
        return eager.select(pl.col("rate") * 2, "name")

    eager.__annotations__["rates"] = pl.DataFrame
    lazy.__annotations__["eager"] = pl.LazyFrame
    first = dg.asset(key=["marts", "eager"], ins={"rates": dg.AssetIn(UPSTREAM)})(eager)
    second = dg.asset(key=["marts", "lazy"], ins={"eager": dg.AssetIn(["marts", "eager"])})(lazy)
    run(lake, instance, [first, second])
    assert rows(lake, "marts", "lazy") == [{"rate": 2, "name": "a"}]


def test_unsigned_integers_are_stored_as_wider_signed_integers(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    frame = pl.DataFrame(
        {"a": [2**8 - 1], "b": [2**16 - 1], "c": [2**32 - 1], "d": [[2**32 - 1]], "e": [{"f": 2**32 - 1}]},
        schema={
            "a": pl.UInt8,
            "b": pl.UInt16,
            "c": pl.UInt32,
            "d": pl.List(pl.UInt32),
            "e": pl.Struct({"f": pl.UInt32}),
        },
    )
    for _ in range(2):
        store_frame(lake, instance, frame.select("a", "c"), mode="upsert", keys=["a"])
    for mode in ("overwrite", "append"):
        store_frame(lake, instance, frame, mode=mode)
    types = {field.name: re.sub(r"\d+: ", "", str(field.field_type)) for field in schema_of(lake).fields}
    assert types == {"a": "int", "b": "int", "c": "long", "d": "list<long>", "e": "struct<f: optional long>"}
    assert rows(lake, "marts", "frames")[0] == {column: frame[column].to_list()[0] for column in frame.columns}
    with pytest.raises(InvalidInputError, match=r"marts\.frames"):
        store_frame(lake, instance, pl.DataFrame({"g": [1]}, schema={"g": pl.UInt64}), mode="append")


def test_timestamp_partitions_and_outputs_of_inner_ops_are_rejected(
    lake: Lakehouse, instance: dg.DagsterInstance
) -> None:
    days = dg.DailyPartitionsDefinition("2020-01-01", end_date="2020-01-03")

    @dg.asset(key=["facts", "events"], partitions_def=days, metadata=stored_as(partition_by=["at"]))
    def events() -> pa.Table:
        return pa.table({"at": [datetime(2020, 1, 1, 5, tzinfo=UTC)]})

    with pytest.raises(InvalidInputError, match="'at'"):
        run(lake, instance, [events], partition_key="2020-01-01")

    @dg.op
    def inner() -> pa.Table:
        return pa.table({"n": [1]})

    @dg.op
    def outer(rows: pa.Table) -> pa.Table:
        return rows

    @dg.graph_asset(key=["marts", "result"])
    def result() -> pa.Table:
        return outer(inner())

    with pytest.raises(InvalidInputError, match=r"marts__result\.inner"):
        run(lake, instance, [result])


def test_upsert_updates_rows_with_equal_keys(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    frames: list[pa.Table] = []

    @dg.asset(key=["shop", "prices"], metadata=stored_as(mode="upsert", keys=["sku"]))
    def prices() -> pa.Table:
        return frames.pop()

    def store_prices(*new_prices: tuple[str, float]) -> list[tuple[str, float]]:
        frames.append(pa.table({"sku": [sku for sku, _ in new_prices], "euros": [euros for _, euros in new_prices]}))
        assert run(lake, instance, [prices]).success
        return sorted((row["sku"], row["euros"]) for row in rows(lake, "shop", "prices"))

    assert store_prices(("a", 1.0), ("b", 2.0)) == [("a", 1.0), ("b", 2.0)]
    assert store_prices(("b", 2.5), ("c", 3.0)) == [("a", 1.0), ("b", 2.5), ("c", 3.0)]
    assert store_prices(("b", 2.5)) == [("a", 1.0), ("b", 2.5), ("c", 3.0)], "storing an equal row changes nothing"
    with pytest.raises(InvalidInputError, match=r"shop\.prices"):
        store_prices(("d", 1.0), ("d", 2.0))
    frames.append(pa.table({"sku": ["a"], "euros": ["many"]}))
    with pytest.raises(InvalidInputError, match=r"shop\.prices"):
        run(lake, instance, [prices])
    frames.append(pa.table({"n": [1]}))
    with pytest.raises(InvalidInputError, match="'sku'"):
        run(lake, instance, [prices])
    with pytest.raises(InvalidInputError):
        stored_as(mode="upsert")


def test_long_names_are_shortened_in_commit_message(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    partition = "\N{GRINNING FACE}" * 200  # four bytes each

    @dg.asset(
        key=["marts", "numbers"],
        code_version='"' * 900,
        partitions_def=dg.StaticPartitionsDefinition([partition]),
        metadata=stored_as(mode="overwrite"),
    )
    def numbers() -> pa.Table:
        return pa.table({"n": [1]})

    run(lake, instance, [numbers], partition_key=partition)
    (latest,) = lake.history(1)
    assert partition.startswith(latest.properties["partition"])
    assert len(latest.properties["partition"]) == 95
    assert latest.properties["assets"] == "1"
