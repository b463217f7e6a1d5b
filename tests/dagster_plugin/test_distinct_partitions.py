"""Test that runs never change rows of another partition, and that definitions that could do so are rejected."""

import datetime as dt
import random
from collections.abc import Iterator, Mapping
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.dagster_plugin.run_config import QUIET
from trinitylake_ops import Lakehouse
from trinitylake_ops.dagster_plugin.io_manager import TrinityLakeIOManager
from trinitylake_ops.dagster_plugin.partition_checks import check_formats
from trinitylake_ops.dagster_plugin.publish import build_publish_asset
from trinitylake_ops.dagster_plugin.resources import TrinityLakeResource
from trinitylake_ops.dagster_plugin.table_settings import Stored, StoreMode, check_stored, stored_as
from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.upsert import stage_upsert

TABLE = ("sales", "orders")


@pytest.fixture(scope="module")
def instance() -> Iterator[dg.DagsterInstance]:
    with dg.instance_for_test() as instance:
        yield instance


class Orders:
    """A partitioned asset whose rows contain the key of the run that wrote them."""

    def __init__(
        self,
        lake: Lakehouse,
        instance: dg.DagsterInstance,
        partitions: dg.PartitionsDefinition[str],
        types: Mapping[str, pa.DataType] | None = None,
        **table_options: Any,
    ):
        self.lake, self.instance = lake, instance
        self.types = types or {}
        self.partition_value: str | None = None
        formats = table_options.get("partition_format") or {}

        def compute(context: dg.AssetExecutionContext) -> pa.Table:
            key = context.partition_key
            columns = dict.fromkeys(table_options.get("partition_by", ()), key)
            if formats:
                start = context.partition_time_window.start
                columns = {column: start.strftime(text) for column, text in formats.items()}
            if isinstance(key, dg.MultiPartitionKey):
                columns = dict(key.keys_by_dimension)
            if self.partition_value is not None:
                columns[next(iter(columns))] = self.partition_value
            arrays = {
                name: pa.array([value]).cast(self.types.get(name, pa.string())) for name, value in columns.items()
            }
            return pa.table({**arrays, "run_key": [str(key)]})

        self.asset = dg.asset(key=list(TABLE), partitions_def=partitions, metadata=stored_as(**table_options))(compute)
        self.partitions = partitions

    def run(self, key: str) -> None:
        lakehouse = TrinityLakeResource(root=self.lake.root)
        publish = build_publish_asset(
            key=["publish", "all"],
            tables={"orders": self.asset.key},
            description="All.",
            partitions_def=self.partitions,
        )
        definitions = dg.Definitions(
            assets=[self.asset, publish],
            jobs=[dg.define_asset_job("everything")],
            resources={"lakehouse": lakehouse, "io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
            executor=dg.in_process_executor,
        )
        job = definitions.resolve_job_def("everything")
        assert job.execute_in_process(instance=self.instance, run_config=QUIET, partition_key=key).success

    def keys(self) -> list[str]:
        """Return the keys of the runs whose rows are in the table."""
        rows = catalog_at(self.lake).load_table(TABLE).scan().to_arrow()["run_key"].to_pylist()
        return sorted(rows)


DAYS = dg.DailyPartitionsDefinition("2026-01-01")
AMBIGUOUS: list[tuple[dg.TimeWindowPartitionsDefinition, dict[str, str]]] = [
    (DAYS, {"month": "%Y-%m"}),
    (DAYS, {"year": "%Y", "week": "%W"}),
    (DAYS, {"day": "%m-%d"}),
    (DAYS, {"day": "%d"}),
    (DAYS, {"day": "%y-%m-%d"}),
    (DAYS, {"day": "%-m%-d", "year": "%Y"}),
    (dg.HourlyPartitionsDefinition("2026-01-01-00:00"), {"day": "%Y-%m-%d", "hour": "%I"}),
    (dg.HourlyPartitionsDefinition("2026-01-01-00:00"), {"hour": "%H"}),
    (dg.HourlyPartitionsDefinition("2026-10-25-00:00", timezone="Europe/Berlin"), {"hour": "%Y-%m-%d %H"}),
    (dg.WeeklyPartitionsDefinition("2026-01-04"), {"year": "%Y", "month": "%m"}),
    (dg.WeeklyPartitionsDefinition("2018-12-31", day_offset=1), {"year": "%Y", "week": "%V"}),
    (dg.WeeklyPartitionsDefinition("2018-12-31", day_offset=1), {"year": "%G", "week": "%W"}),
    (dg.MonthlyPartitionsDefinition("2026-01-01"), {"month": "%m"}),
    (dg.MonthlyPartitionsDefinition("2026-01-01"), {"month": "a month"}),
    (
        dg.TimeWindowPartitionsDefinition("2026-01-01-00:00", "%Y-%m-%d-%H:%M", cron_schedule="*/15 * * * *"),
        {"hour": "%Y-%m-%d %H"},
    ),
    (
        dg.TimeWindowPartitionsDefinition("2026-01-01-00:00", "%Y-%m-%d-%H:%M", cron_schedule="0 0,12 * * *"),
        {"day": "%Y-%m-%d"},
    ),
    (dg.TimeWindowPartitionsDefinition("2026-01-01", "%Y-%m-%d", cron_schedule="0 0 1,15 * *"), {"m": "%Y-%m"}),
]


@pytest.mark.parametrize(("partitions", "formats"), AMBIGUOUS, ids=lambda value: str(value)[:60])
def test_ambiguous_partition_formats_are_rejected(
    partitions: dg.TimeWindowPartitionsDefinition, formats: dict[str, str]
) -> None:
    @dg.asset(
        key=list(TABLE),
        partitions_def=partitions,
        metadata=stored_as(partition_by=list(formats), partition_format=formats),
    )
    def orders() -> None: ...

    with pytest.raises(InvalidInputError, match="partition_format") as raised:
        check_stored(orders)
    assert "\n" not in str(raised.value)


DISTINCT: list[tuple[dg.TimeWindowPartitionsDefinition, dict[str, str]]] = [
    (DAYS, {"day": "%Y-%m-%d"}),
    (DAYS, {"day": "%F"}),
    (DAYS, {"year": "%Y", "month": "%-m", "day": "%-d"}),
    (DAYS, {"day": "%d %b %Y"}),
    (DAYS, {"year": "%Y", "day": "%j"}),
    (DAYS, {"week": "%G-W%V", "weekday": "%u"}),
    (dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-02-01"), {"day": "%d"}),
    (dg.DailyPartitionsDefinition("2026-01-01", end_date="2026-02-01", timezone="Europe/Berlin"), {"day": "%y%m%d"}),
    (dg.HourlyPartitionsDefinition("2026-01-01-00:00"), {"day": "%Y-%m-%d", "hour": "%I %p"}),
    (dg.HourlyPartitionsDefinition("2026-01-01-00:00", timezone="Asia/Tokyo"), {"day": "%Y-%m-%d", "hour": "%H"}),
    (dg.HourlyPartitionsDefinition("2026-10-25-00:00", timezone="Europe/Berlin"), {"hour": "%Y-%m-%d %H%z"}),
    (
        dg.HourlyPartitionsDefinition("2026-06-01-00:00", timezone="Europe/Berlin", end_date="2026-07-01-00:00"),
        {"hour": "%Y-%m-%d %H"},
    ),
    (dg.WeeklyPartitionsDefinition("2026-01-04"), {"year": "%Y", "week": "%U"}),
    (dg.WeeklyPartitionsDefinition("2018-12-31", day_offset=1), {"week": "%G-W%V"}),
    (dg.MonthlyPartitionsDefinition("2026-01-01", day_offset=15), {"year": "%Y", "month": "%B"}),
    (dg.TimeWindowPartitionsDefinition("2026", "%Y", cron_schedule="0 0 1 1 *"), {"year": "%Y"}),
    (
        dg.TimeWindowPartitionsDefinition(
            "2026-01-01-00:00", "%Y-%m-%d-%H:%M", timezone="Europe/Berlin", cron_schedule="0 */6 * * *"
        ),
        {"hour": "%Y-%m-%d %H"},
    ),
]


@pytest.mark.parametrize(("partitions", "formats"), DISTINCT, ids=lambda value: str(value)[:60])
def test_distinct_partition_formats_are_accepted(
    partitions: dg.TimeWindowPartitionsDefinition, formats: dict[str, str]
) -> None:
    check_formats("sales/orders", partitions, formats)
    days = 1400 if partitions.cron_schedule.split()[1].isdigit() else 40
    window = dg.TimeWindow(partitions.start, partitions.start + dt.timedelta(days=days))
    keys = partitions.get_partition_keys_in_time_window(window)
    starts = [partitions.time_window_for_partition_key(key).start for key in keys]
    if partitions.end is not None:
        starts = [start for start in starts if start < partitions.end]
    assert len({tuple(start.strftime(text) for text in formats.values()) for start in starts}) == len(starts)


FORMAT_PARTS = [
    "%Y",
    "%m",
    "%d",
    "%H",
    "%M",
    "%I",
    "%p",
    "%j",
    "%W",
    "%U",
    "%V",
    "%G",
    "%u",
    "%z",
    "%b",
    "%-d",
    "%y",
    "-",
]
CRONS = ["*/30 * * * *", "0 * * * *", "0 0,12 * * *", "0 0 * * *", "30 1 * * *", "0 0 * * 0", "0 0 * * MON"]
CRONS += ["0 0 1 * *"]
ZONES = ["UTC", "Europe/Berlin", "America/New_York", "Asia/Tokyo"]


@settings(max_examples=20, deadline=None)
@given(
    cron=st.sampled_from(CRONS),
    zone=st.sampled_from(ZONES),
    texts=st.lists(
        st.lists(st.sampled_from(FORMAT_PARTS), min_size=1, max_size=4).map("".join), min_size=1, max_size=3
    ),
    has_end=st.booleans(),
)
def test_accepted_formats_are_distinct_for_all_partitions(
    cron: str, zone: str, texts: list[str], has_end: bool
) -> None:
    """Compare all partitions of the weeks around clock changes and around New Year of several years."""
    partitions = dg.TimeWindowPartitionsDefinition(
        start="2024-10-20-00:00",
        end="2024-11-20-00:00" if has_end else None,
        fmt="%Y-%m-%d-%H:%M",
        cron_schedule=cron,
        timezone=zone,
    )
    formats = {f"c{index}": text for index, text in enumerate(texts)}
    try:
        check_formats("a", partitions, formats)
    except InvalidInputError:
        return
    years = [2024] if has_end else [2024, 2025, 2026, 2031]
    windows = [(year, month) for year in years for month in ((10,) if has_end else (10, 12))]
    starts_by_values: dict[tuple[str, ...], dt.datetime] = {}
    for year, month in windows:
        begin = partitions.start.replace(year=year, month=month)
        end = begin + dt.timedelta(days=20)
        for key in partitions.get_partition_keys_in_time_window(dg.TimeWindow(begin, end)):
            start = partitions.time_window_for_partition_key(key).start
            values = tuple(start.strftime(text) for text in formats.values())
            assert starts_by_values.setdefault(values, start) == start, (values, formats)


def test_ambiguous_formats_of_multiple_dimensions_are_rejected() -> None:
    dimensions = dg.MultiPartitionsDefinition({"day": DAYS, "kind": dg.StaticPartitionsDefinition(["a"])})

    @dg.asset(
        key=list(TABLE),
        partitions_def=dimensions,
        metadata=stored_as(partition_by=["day", "kind"], partition_format={"day": "%Y", "kind": "%m"}),
    )
    def orders() -> None: ...

    with pytest.raises(InvalidInputError):
        check_stored(orders)


def test_repeated_hour_is_stored_when_clocks_go_back(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    hours = dg.HourlyPartitionsDefinition("2026-10-25-00:00", timezone="Europe/Berlin", end_date="2026-10-26-00:00")
    keys = [key for key in hours.get_partition_keys(dt.datetime(2026, 11, 1, tzinfo=dt.UTC)) if "-25-02:" in key]
    assert len(keys) == 2
    formats = {"hour": "%Y-%m-%d %H%z"}
    orders = Orders(lake, instance, hours, partition_by=["hour"], partition_format=formats)
    for key in [*keys, *keys]:
        hours.get_partition_keys_in_range(dg.PartitionKeyRange(keys[0], keys[1]))  # Dagster caches the result
        orders.run(key)
    assert orders.keys() == sorted(keys)
    stored_hours = catalog_at(lake).load_table(TABLE).scan().to_arrow()["hour"].to_pylist()
    assert sorted(stored_hours) == ["2026-10-25 02+0100", "2026-10-25 02+0200"]


@pytest.mark.parametrize("is_multi", [False, True])
@pytest.mark.parametrize(("first", "last", "cached"), [(2, 4, (3, 4)), (3, 4, (2, 4))])
def test_range_with_one_of_two_repeated_hours_stores_its_partitions(
    lake: Lakehouse, instance: dg.DagsterInstance, is_multi: bool, first: int, last: int, cached: tuple[int, int]
) -> None:
    """Dagster has cached the keys of another range with the same local times."""
    start, end, zone = "2026-10-25-00:00", "2026-10-25-06:00", "Europe/Berlin"
    hours = dg.HourlyPartitionsDefinition(start, timezone=zone, end_date=end)
    hour_keys = dg.HourlyPartitionsDefinition(start, timezone=zone, end_date=end).get_partition_keys()
    hours.get_partition_keys_in_range(dg.PartitionKeyRange(hour_keys[cached[0]], hour_keys[cached[1]]))
    shops = dg.StaticPartitionsDefinition(["x", "y"])
    partitions = dg.MultiPartitionsDefinition({"hour": hours, "shop": shops}) if is_multi else hours
    expected = [(hour, shop) for hour in hour_keys[first : last + 1] for shop in (("x", "y") if is_multi else ("",))]

    @dg.asset(
        key=list(TABLE), partitions_def=partitions, metadata=stored_as(partition_by=["hour", "shop"][: 1 + is_multi])
    )
    def orders() -> pa.Table:
        columns = {"hour": [hour for hour, _ in expected], "shop": [shop for _, shop in expected]}
        return pa.table(columns if is_multi else {"hour": columns["hour"]})

    def key(index: int, shop: str) -> str:
        return f"{hour_keys[index]}|{shop}" if is_multi else hour_keys[index]

    lakehouse = TrinityLakeResource(root=lake.root)
    definitions = dg.Definitions(
        assets=[orders],
        resources={"io_manager": TrinityLakeIOManager(lakehouse=lakehouse)},
        executor=dg.in_process_executor,
    )
    result = definitions.resolve_implicit_global_asset_job_def().execute_in_process(
        instance=instance,
        run_config=QUIET,
        tags={
            "dagster/asset_partition_range_start": key(first, "x"),
            "dagster/asset_partition_range_end": key(last, "y"),
        },
    )
    assert result.success
    events = result.get_asset_materialization_events()
    materialized_keys = [str(event.partition) for event in events if event.asset_key == orders.key]
    assert sorted(materialized_keys) == sorted(f"{hour}|{shop}" if is_multi else hour for hour, shop in expected)


@pytest.mark.parametrize("mode", ["overwrite", "overwrite_partition", "append", "upsert"])
@pytest.mark.parametrize("partitions", [None, dg.StaticPartitionsDefinition(["a"])])
def test_rows_without_partition_column_are_rejected(
    lake: Lakehouse, instance: dg.DagsterInstance, mode: StoreMode, partitions: Any
) -> None:
    """Only a frame with the partition columns can empty a partition."""
    frames = [
        pa.table({"k": ["a"], "n": [1]}),
        pa.table({"n": [2]}),
        pa.table({"n": pa.array([], pa.int64())}),
        pa.table({}),
        pa.table({"k": pa.array([], pa.string()), "n": pa.array([], pa.int64())}),
    ]
    keys = {"keys": ["n"]} if mode == "upsert" else {}

    @dg.asset(key=list(TABLE), partitions_def=partitions, metadata=stored_as(mode=mode, partition_by=["k"], **keys))
    def orders() -> pa.Table:
        return frames.pop(0)

    definitions = dg.Definitions(
        assets=[orders],
        resources={"io_manager": TrinityLakeIOManager(lakehouse=TrinityLakeResource(root=lake.root))},
        executor=dg.in_process_executor,
    ).resolve_implicit_global_asset_job_def()

    def run() -> bool:
        options = {} if partitions is None else {"partition_key": "a"}
        return definitions.execute_in_process(
            instance=instance, run_config=QUIET, raise_on_error=False, **options
        ).success

    def stored_numbers() -> list[int]:
        return catalog_at(lake).load_table(TABLE).scan().to_arrow()["n"].to_pylist()

    assert [run() for _ in range(4)] == [True, False, False, False]
    assert stored_numbers() == [1]
    assert run()
    is_emptied = mode == "overwrite" or (mode == "overwrite_partition" and partitions is not None)
    assert stored_numbers() == ([] if is_emptied else [1])


UNUSUAL_KEYS = [
    "a/b",
    "a%2Fb",
    "a=b",
    " x",
    "x ",
    "null",
    "None",
    "__HIVE_DEFAULT_PARTITION__",
    "it's",
    "1",
    "01",
    "..",
]
UNUSUAL_KEYS += ["A", "a", "e\u0301", "\u00e9", "\U0001f642", "a|b", "#?&+"]


@pytest.mark.soak
def test_unusual_text_keys_are_separate_partitions(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    orders = Orders(lake, instance, dg.StaticPartitionsDefinition(UNUSUAL_KEYS), partition_by=["k"])
    for key in UNUSUAL_KEYS * 2:
        orders.run(key)
    assert orders.keys() == sorted(UNUSUAL_KEYS)


def test_keys_with_special_characters_are_separate_partitions(lake: Lakehouse, instance: dg.DagsterInstance) -> None:
    keys = ["a/b", "a%2Fb", "null", "..", "é", "ü" * 120, "x" * 1_000, "x" * 999 + "y"]
    orders = Orders(lake, instance, dg.StaticPartitionsDefinition(keys), partition_by=["k"])
    for key in [*keys, "null", "a/b"]:
        orders.run(key)
    assert orders.keys() == sorted(keys)


@pytest.mark.parametrize(
    ("keys", "data_type", "is_dynamic"),
    [
        (["1", "01"], pa.int32(), True),
        (["+1", "1"], pa.int64(), False),
        (["true", "TRUE"], pa.bool_(), False),
        (["2026-01-01", "20260101"], pa.date32(), False),
        (["1.5", "1.50"], pa.decimal128(10, 2), False),
    ],
    ids=["leading zero of dynamic keys", "sign", "boolean", "date", "decimal"],
)
def test_keys_with_equal_column_value_are_rejected(
    lake: Lakehouse, keys: list[str], data_type: pa.DataType, *, is_dynamic: bool
) -> None:
    with dg.instance_for_test() as instance:
        partitions: dg.PartitionsDefinition[str] = dg.StaticPartitionsDefinition(keys)
        if is_dynamic:
            partitions = dg.DynamicPartitionsDefinition(name="shops")
            instance.add_dynamic_partitions("shops", keys)
        orders = Orders(lake, instance, partitions, {"k": data_type}, partition_by=["k"])
        version = lake.latest_version()
        for key in keys[:1] if data_type in (pa.bool_(), pa.date32()) else keys:
            orders.partition_value = keys[0].lstrip("+")
            with pytest.raises(InvalidInputError, match="'k'"):
                orders.run(key)
        assert lake.latest_version() == version


@pytest.mark.parametrize("key", ["1.0", "1_0", "99999999999"])
def test_keys_that_do_not_match_column_type_are_rejected(
    lake: Lakehouse, instance: dg.DagsterInstance, key: str
) -> None:
    orders = Orders(lake, instance, dg.StaticPartitionsDefinition(["1", key]), {"k": pa.int32()}, partition_by=["k"])
    orders.run("1")
    orders.partition_value = "1"
    with pytest.raises(InvalidInputError, match="'k'"):
        orders.run(key)
    assert orders.keys() == ["1"]


@pytest.mark.parametrize("mode", ["overwrite_partition", "append", "upsert"])
def test_rows_of_other_partitions_are_rejected(lake: Lakehouse, instance: dg.DagsterInstance, mode: StoreMode) -> None:
    table_options: dict[str, Any] = {
        "mode": mode,
        "partition_by": ["k"],
        **({"keys": ["run_key"]} if mode == "upsert" else {}),
    }
    orders = Orders(lake, instance, dg.StaticPartitionsDefinition(["a", "b"]), **table_options)
    orders.run("a")
    orders.partition_value = "a"
    with pytest.raises(InvalidInputError):
        orders.run("b")
    orders.partition_value = None
    orders.run("b")
    assert orders.keys() == ["a", "b"]


WEEKS = dg.WeeklyPartitionsDefinition("2025-12-21")
BERLIN = dg.HourlyPartitionsDefinition("2026-10-25-00:00", timezone="Europe/Berlin")
SHOPS = dg.StaticPartitionsDefinition(["1", "2", "null", "a/b", "é"])
DEFINITIONS: list[tuple[dg.PartitionsDefinition[str], dict[str, str] | None, list[str]]] = [
    (DAYS, None, ["day"]),
    (DAYS, {"year": "%Y", "month": "%m", "day": "%d"}, []),
    (WEEKS, {"year": "%Y", "week": "%U"}, []),
    (BERLIN, None, ["hour"]),
    (BERLIN, {"hour": "%Y-%m-%d %H%z"}, []),
    (SHOPS, None, ["shop"]),
    (dg.MultiPartitionsDefinition({"day": DAYS, "shop": SHOPS}), None, ["day", "shop"]),
    *((definition, formats, []) for definition, formats in AMBIGUOUS[::3]),
]
NUMBERS = {"year": pa.int32(), "month": pa.int32(), "week": pa.int64()}


MODES: tuple[StoreMode, ...] = ("overwrite_partition", "append", "upsert")
#: Each definition runs with one of the modes in the normal suite, and with all of them in soak tests.
CASES = [
    pytest.param(mode, seed, marks=() if index == seed % len(MODES) else pytest.mark.soak)
    for seed in range(len(DEFINITIONS))
    for index, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("mode", "seed"), CASES)
def test_run_never_changes_rows_of_another_partition(lake: Lakehouse, mode: StoreMode, seed: int) -> None:
    """Each run writes one row or is rejected. Rows without a value in a partition column are never changed."""
    definition, formats, columns = DEFINITIONS[seed]
    columns, rng = columns or list(formats or {}), random.Random(seed)
    keys = list(definition.get_partition_keys(current_time=dt.datetime(2026, 11, 1, tzinfo=dt.UTC)))
    if isinstance(definition, dg.TimeWindowPartitionsDefinition):
        first = max(0, len(keys) - 170) if definition is BERLIN else 0
        keys = rng.sample(keys[first : first + 40], 5) + [key for key in keys if "-25-02:" in key][:2]
    keys = rng.sample(keys, min(6, len(keys)))
    metadata = stored_as(
        mode=mode,
        partition_by=columns,
        partition_format=formats,
        keys=["n"] if mode == "upsert" else (),
    )
    asset_key = dg.AssetKey(list(TABLE))
    table_settings = Stored.of(asset_key, metadata, definition)
    try:
        table_settings.check_partitions(asset_key, definition)
    except InvalidInputError:
        return
    expected: dict[str, list[int]] = {"none": [0]}
    types = {column: NUMBERS.get(column, pa.string()) for column in columns}
    null_row = pa.table(
        {**{name: pa.nulls(1, data_type) for name, data_type in types.items()}, "n": [0], "run_key": ["none"]}
    )
    publish(lake, stage_arrow(lake, null_row, *TABLE, mode="append", partition_by=columns))
    for number in range(1, 11):
        key = rng.choice(keys)
        (values,) = table_settings.values([key], definition)
        arrays = {column: pa.array([value]).cast(types[column]) for column, value in values.items()}
        rows = pa.table({**arrays, "n": [number % 3], "run_key": [str(key)]})
        if table_settings.keys:
            options: dict[str, Any] = {"keys": table_settings.keys}
            publish(lake, stage_upsert(lake, rows, *TABLE, partition_by=columns, partitions=[values], **options))
        else:
            publish(
                lake,
                stage_arrow(lake, rows, *TABLE, mode=table_settings.mode, partition_by=columns, partitions=[values]),
            )
        rows_of_key = expected.setdefault(str(key), [])
        rows_of_key[:] = {"append": [*rows_of_key, number % 3], "upsert": sorted({*rows_of_key, number % 3})}.get(
            mode, [number % 3]
        )
        actual: dict[str, list[int]] = {}
        for row in catalog_at(lake).load_table(TABLE).scan().to_arrow().to_pylist():
            actual.setdefault(row["run_key"], []).append(row["n"])
        assert {key: sorted(numbers) for key, numbers in actual.items()} == {
            key: sorted(numbers) for key, numbers in expected.items()
        }


def publish(lake: Lakehouse, staged: StagedTable) -> None:
    publish_once(lake, [staged], publication_id(staged.metadata_location))
