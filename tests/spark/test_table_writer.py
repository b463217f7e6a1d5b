"""Test staging DataFrames: the written files, replaced data, and the state after failures."""

import datetime as dt
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from tests.clock import ClockStorage
from tests.faults import Fault, FaultyStorage, fail, kill
from tests.lakes import check_lake
from trinitylake_ops import Lakehouse, TableDef, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    InvalidDefinitionError,
    InvalidInputError,
    JobFailedError,
    StorageFullError,
    TrinityLakeError,
    UnsupportedTypeError,
)
from trinitylake_ops.format.file_names import OWNER_NAME
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write import staging
from trinitylake_ops.iceberg.write.partition_key import PartitionValue
from trinitylake_ops.iceberg.write.publication import publication_id, publish_once
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import load_staged, publish, stage_data_files
from trinitylake_ops.spark.tables.reader import read_staged, read_table
from trinitylake_ops.spark.tables.writer import stage_dataframe
from trinitylake_ops.storage import LocalStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

NO_FSYNC = {"fsync": "false"}


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lakehouse]:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", NO_FSYNC)
    yield lake
    check_lake(lake)


def rows_of(spark: SparkSession, count: int, text: str = "first") -> DataFrame:
    """Return rows of three months of 2013 in two partitions."""
    columns = ("id", "2013 as year", "cast(1 + id % 3 as int) as month", f"concat('{text} ', id) as text")
    return spark.range(0, count, 1, 2).selectExpr(*columns)


def rows_of_month(spark: SparkSession, month: int, count: int, text: str) -> DataFrame:
    return spark.range(count).selectExpr("id", "2013 as year", f"{month} as month", f"concat('{text} ', id) as text")


def publish_staged(lake: Lakehouse, *staged: StagedTable) -> None:
    with lake.transaction(message="publish") as txn:
        publish(txn, staged)


def files_of(lake: Lakehouse) -> dict[str, int]:
    return {file.path: file.size_bytes for file in lake.storage.list() if file.path != "_latest_hint.txt"}


def data_files_of(lake: Lakehouse, staged: StagedTable) -> dict[str, int]:
    """Return the sizes of the data files of a staged table by path."""
    tasks = load_staged(lake, staged).scan().plan_files()
    return {task.file.file_path.removeprefix(lake.root): task.file.file_size_in_bytes for task in tasks}


def content(frame: DataFrame) -> set[tuple[Any, ...]]:
    return {tuple(row) for row in frame.collect()}


def test_staged_table_describes_written_files(spark: SparkSession, lake: Lakehouse) -> None:
    before = files_of(lake)
    staged = stage_dataframe(
        lake,
        rows_of(spark, 30),
        "facts",
        "numbers",
        partition_by=("year", "month"),
        primary_key=("id",),
        mode="replace_partitions",
    )
    assert lake.latest_version() == 0
    assert content(read_staged(spark, lake, staged)) == content(rows_of(spark, 30))
    assert staged.partitions == ("year=2013/month=1", "year=2013/month=2", "year=2013/month=3")
    assert staged.table_def.primary_keys == (1,)

    # All files are on the storage of the lakehouse, and the staged table describes them.
    written = {path: size for path, size in files_of(lake).items() if path not in before}
    data = {path: size for path, size in written.items() if path.endswith(".parquet")}
    assert data == data_files_of(lake, staged)
    assert all(path.startswith(f"tables/{staged.table_def.id}/") for path in written)
    assert (staged.added_files, staged.added_bytes, staged.added_rows) == (3, sum(data.values()), 30)
    assert staged.row_count == 30


def test_duckdb_reads_published_table(spark: SparkSession, lake: Lakehouse) -> None:
    frame = rows_of(spark, 30)
    staged = stage_dataframe(lake, frame, "facts", "numbers", partition_by=("year", "month"), mode="append")
    publish_staged(lake, staged)
    database = duckdb.connect()
    load_staged(lake, staged).scan().to_duckdb("numbers", connection=database)
    assert set(database.sql("select id, year, month, text from numbers").fetchall()) == content(frame)
    paths = [f"{lake.root.removeprefix('file://')}{path}" for path in data_files_of(lake, staged)]
    result = database.execute("select id, year, month, text from read_parquet(?, hive_partitioning=false)", [paths])
    assert set(result.fetchall()) == content(frame)


def test_replacing_partition_keeps_files_of_other_partitions(spark: SparkSession, lake: Lakehouse) -> None:
    first = stage_dataframe(
        lake, rows_of(spark, 30), "facts", "numbers", partition_by=("year", "month"), mode="replace_partitions"
    )
    publish_staged(lake, first)

    def replace_february(text: str) -> StagedTable:
        return stage_dataframe(
            lake,
            rows_of_month(spark, 2, 5, text),
            "facts",
            "numbers",
            mode="replace_partitions",
            partitions=[{"year": 2013, "month": 2}],
        )

    second = replace_february("second")
    assert (second.added_files, second.removed_files, second.added_rows, second.removed_rows) == (1, 1, 5, 10)
    assert second.partitions == ("year=2013/month=2",)
    old, new = data_files_of(lake, first), data_files_of(lake, second)
    assert {path for path in old if "month=2" not in path} == {path for path in new if "month=2" not in path}
    assert not {path for path in old if "month=2" in path} & set(new)
    expected = {row for row in content(rows_of(spark, 30)) if row[2] != 2} | content(
        rows_of_month(spark, 2, 5, "second")
    )
    assert content(read_staged(spark, lake, second)) == expected
    assert len(load_staged(lake, second).metadata.snapshots) == len(load_staged(lake, first).metadata.snapshots) + 1

    publish_staged(lake, second)
    repeated = replace_february("second")
    assert content(read_staged(spark, lake, repeated)) == expected
    assert (repeated.row_count, repeated.added_rows, repeated.removed_rows) == (25, 5, 5)
    assert content(read_table(spark, lake, "facts.numbers")) == expected


def test_table_with_dropped_partition_column_is_replaced(spark: SparkSession, lake: Lakehouse) -> None:
    publish_staged(lake, stage_dataframe(lake, rows_of(spark, 9), "facts", "t", partition_by=("month",), mode="append"))
    with catalog_at(lake).load_table("facts.t").update_spec() as spec_update:
        spec_update.remove_field("month")
    with catalog_at(lake).load_table("facts.t").update_schema() as schema_update:
        schema_update.delete_column("month")
    rows = spark.range(4).selectExpr("id", "2013 as year", "'new' as text")
    publish_staged(lake, stage_dataframe(lake, rows, "facts", "t", mode="replace_table"))
    assert content(read_table(spark, lake, "facts.t")) == content(rows)


def test_partitions_by_dates_strings_and_nulls_are_replaced(spark: SparkSession, lake: Lakehouse) -> None:
    frame = spark.sql(
        "select * from values (1, date'2013-01-31', \"O'Hare \\\\ 東京\"), (2, date'2013-02-01', null), (3, null, 'x')"
        " as rows(id, day, place)"
    )
    staged = stage_dataframe(lake, frame, "facts", "days", partition_by=("day", "place"), mode="append")
    assert staged.added_files == 3
    publish_staged(lake, staged)
    key: dict[str, PartitionValue] = {"day": dt.date(2013, 1, 31), "place": "O'Hare \\ 東京"}
    staged = stage_dataframe(
        lake,
        frame.where("id = 1").withColumn("id", F.lit(10)),
        "facts",
        "days",
        mode="replace_partitions",
        partitions=[key, {"day": dt.date(2013, 2, 1), "place": None}],
    )
    assert (staged.added_files, staged.removed_files) == (1, 2)
    assert {row[0] for row in content(read_staged(spark, lake, staged))} == {10, 3}


def test_empty_frames_are_staged(spark: SparkSession, lake: Lakehouse) -> None:
    no_rows = rows_of(spark, 30).where("id < 0")
    empty = stage_dataframe(lake, no_rows, "facts", "numbers", partition_by=("year", "month"), mode="append")
    assert (empty.row_count, empty.added_files) == (0, 0)
    assert content(read_staged(spark, lake, empty)) == set()
    publish_staged(lake, empty)
    full = stage_dataframe(lake, rows_of(spark, 30), "facts", "numbers", mode="replace_table")
    publish_staged(lake, full)

    without_partitions = stage_dataframe(lake, no_rows, "facts", "numbers", mode="replace_partitions")
    assert data_files_of(lake, without_partitions) == data_files_of(lake, full), "no partition is replaced"
    with_partitions = stage_dataframe(
        lake,
        no_rows,
        "facts",
        "numbers",
        mode="replace_partitions",
        partitions=[{"year": 2013, "month": 2}, {"year": 2014, "month": 1}],
    )
    assert (with_partitions.removed_files, with_partitions.added_files, with_partitions.row_count) == (1, 0, 20)
    assert {row[2] for row in content(read_staged(spark, lake, with_partitions))} == {1, 3}
    emptied = stage_dataframe(lake, no_rows, "facts", "numbers", mode="replace_table")
    assert (emptied.row_count, emptied.removed_rows) == (0, 30)


def test_unpartitioned_table_supports_append_and_replace_table(spark: SparkSession, lake: Lakehouse) -> None:
    first_rows, second_rows = rows_of_month(spark, 1, 3, "one"), rows_of_month(spark, 2, 4, "two")
    # In a thread without a session, Spark does not find Python data sources.
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stage_dataframe, lake, first_rows, "facts", "plain", mode="replace_table").result()
    publish_staged(lake, first)
    appended = stage_dataframe(lake, second_rows, "facts", "plain", mode="append")
    assert content(read_staged(spark, lake, appended)) == content(first_rows) | content(second_rows)
    replaced = stage_dataframe(lake, second_rows, "facts", "plain", mode="replace_table")
    assert content(read_staged(spark, lake, replaced)) == content(second_rows)
    with pytest.raises(InvalidInputError):
        stage_dataframe(lake, second_rows, "facts", "plain", mode="replace_partitions")


def test_columns_are_added_and_keep_their_ids(spark: SparkSession, lake: Lakehouse) -> None:
    first = stage_dataframe(lake, rows_of_month(spark, 1, 3, "x"), "facts", "plain", primary_key=("id",), mode="append")
    publish_staged(lake, first)
    rows_with_flag = rows_of_month(spark, 2, 2, "y").selectExpr("true as flag", "text", "id", "month", "year")
    second = stage_dataframe(lake, rows_with_flag, "facts", "plain", mode="append")
    ids = {column.name: column.id for column in second.table_def.schema.columns}
    assert ids == {**{column.name: column.id for column in first.table_def.schema.columns}, "flag": 5}
    required = [column.name for column in second.table_def.schema.columns if not column.nullable]
    assert required == ["id", "year", "month", "text"], "as Spark inferred at first; new columns are optional"
    rows = read_staged(spark, lake, second).orderBy("month", "id").collect()
    old, new = [("x 0", None), ("x 1", None), ("x 2", None)], [("y 0", True), ("y 1", True)]
    assert [(row["text"], row["flag"]) for row in rows] == [*old, *new]


def test_task_starts_new_file_at_target_size(spark: SparkSession, lake: Lakehouse) -> None:
    frame = spark.range(0, 220_000, 1, 1).selectExpr("id", "repeat(uuid(), 10) as text")  # 80 MB
    staged = stage_dataframe(lake, frame, "facts", "texts", mode="append", target_file_size_bytes=1 << 20)
    assert (staged.added_files, staged.added_rows) == (2, 220_000)


UNSUPPORTED = [
    ("cast(1 as smallint)", "smallint", "cast it to int"),
    ("cast(1 as tinyint)", "tinyint", "cast it to int"),
    ("null", "void", "cast it to the type"),
    ("interval 1 day", "interval day", "bigint of microseconds"),
    ("interval 1 month", "interval month", "int of months"),
    ("make_interval(1, 2)", "interval", "int columns"),
    ("parse_json('1')", "variant", "to_json"),
    ("'a' collate unicode", "string collate UNICODE", "without a collation"),
]


@pytest.mark.parametrize(("expression", "type_name", "advice"), UNSUPPORTED, ids=[row[1] for row in UNSUPPORTED])
def test_unsupported_types_are_rejected(
    spark: SparkSession, lake: Lakehouse, expression: str, type_name: str, advice: str
) -> None:
    before = files_of(lake)
    frame = spark.range(1).selectExpr("id", f"{expression} as odd", f"array(struct({expression} as odd)) as deep")
    spark.sparkContext.setJobGroup(f"unsupported {type_name}", "")
    for columns, path in ((("id", "odd"), "odd"), (("id", "deep"), "deep.element.odd")):
        with pytest.raises(UnsupportedTypeError) as raised:
            stage_dataframe(lake, frame.select(*columns), "facts", "odd", mode="append")
        assert str(raised.value).startswith(f"column {path!r} has type {type_name}")
        assert advice in str(raised.value)
        assert "\n" not in str(raised.value)
    assert spark.sparkContext.statusTracker().getJobIdsForGroup(f"unsupported {type_name}") == []
    assert files_of(lake) == before


def test_invalid_arguments_run_no_task(spark: SparkSession, lake: Lakehouse) -> None:
    frame = rows_of(spark, 9)
    publish_staged(
        lake,
        stage_dataframe(
            lake, frame, "facts", "numbers", partition_by=("year", "month"), primary_key=("id",), mode="append"
        ),
    )
    with lake.transaction() as txn:
        txn.create_table("facts", "other", TableDef(table_type="EXTERNAL", table_format="LANCE"))
    before = files_of(lake)
    spark.sparkContext.setJobGroup("invalid", "")
    february = {"year": 2013, "month": 2}
    cases: list[tuple[type[TrinityLakeError], str, dict[str, Any]]] = [
        (InvalidInputError, "LANCE", {"table": "other"}),
        (InvalidInputError, "mode 'overwrite'", {"mode": "overwrite"}),
        (
            InvalidInputError,
            "partitions",
            {"mode": "replace_table", "partitions": [february]},
        ),
        (InvalidInputError, "partitions", {"mode": "append", "partitions": []}),
        (InvalidInputError, "year, month", {"partitions": [{"month": 2}]}),
        (InvalidInputError, "'may'", {"partitions": [{"year": 1, "month": "may"}]}),
        (InvalidDefinitionError, r"\['year', 'month'\]", {"partition_by": ("year",)}),
        (InvalidDefinitionError, r"\(id\).*\(text\)", {"primary_key": ("text",)}),
        (InvalidDefinitionError, "'key'", {"primary_key": ("key",)}),
        (InvalidInputError, "'id'", {"frame": frame.drop("id")}),
        (InvalidDefinitionError, "'id'", {"frame": frame.select("id", "*")}),
        (InvalidDefinitionError, "facts.numbers", {"frame": frame.withColumn("id", F.col("id").cast("string"))}),
        (
            InvalidDefinitionError,
            "'TEXT' .*'text'",
            {"frame": frame.withColumnRenamed("text", "TEXT")},
        ),
    ]
    for error, message, invalid in cases:
        arguments = {"frame": frame, "table": "numbers", "mode": "replace_partitions", **invalid}
        with pytest.raises(error, match=message) as raised:
            stage_dataframe(lake, arguments.pop("frame"), "facts", arguments.pop("table"), **arguments)
        assert "\n" not in str(raised.value)
    assert spark.sparkContext.statusTracker().getJobIdsForGroup("invalid") == []
    assert files_of(lake) == before


def test_memory_lakehouse_is_rejected(spark: SparkSession) -> None:
    with pytest.raises(InvalidInputError):
        stage_dataframe(Lakehouse.create("memory://writer/"), rows_of(spark, 3), "a", "b", mode="append")


def with_faults(lake: Lakehouse, *faults: Fault) -> Lakehouse:
    """Return the lakehouse with faults in every process that uses it. Each process counts its requests separately."""
    storage = FaultyStorage(LocalStorage(lake.root, fsync=False), faults)
    return Lakehouse.open(lake.root, NO_FSYNC, storage=storage)


def write_to_full_disk(lake: Lakehouse, spark: SparkSession) -> None:
    faulty = with_faults(lake, fail(2, StorageFullError, path_part="/data/"))
    frame = spark.range(0, 10, 1, 1).selectExpr("id", "cast(id % 3 as int) as third")
    stage_dataframe(faulty, frame, "facts", "numbers", partition_by=("third",), mode="append")


def kill_task(lake: Lakehouse, spark: SparkSession) -> None:
    faulty = with_faults(lake, kill(1, "before", path_part="/data/"))
    stage_dataframe(faulty, rows_of(spark, 10), "facts", "numbers", mode="append")


def fail_at_row(lake: Lakehouse, spark: SparkSession) -> None:
    frame = spark.range(0, 10, 1, 1).selectExpr("id", "if(id = 9, raise_error('row 9 is bad'), 'good') as text")
    stage_dataframe(lake, frame, "facts", "numbers", mode="append")


def fail_after_other_task(lake: Lakehouse, spark: SparkSession) -> None:
    """Make the second task fail after the first task has written its file and ended."""
    folder = lake.root.removeprefix("file://")

    def text_of(number: int) -> str:
        # Import here, because the function is pickled by value and runs in Spark's Python workers.
        import time
        from pathlib import Path

        deadline = time.monotonic() + 60
        while number == 19:
            if list(Path(folder).glob("tables/*/data/*.parquet")) or time.monotonic() > deadline:
                time.sleep(1)
                raise ValueError("row 19 is bad")
            time.sleep(0.05)
        return "good"

    texts = F.udf(text_of, useArrow=False)
    frame = spark.range(0, 20, 1, 2).select("id", texts("id").alias("text"))
    stage_dataframe(lake, frame, "facts", "numbers", mode="append")


def write_null_in_key(lake: Lakehouse, spark: SparkSession) -> None:
    frame = spark.range(0, 10, 1, 1).selectExpr("if(id = 5, null, id) as id")
    stage_dataframe(lake, frame, "facts", "numbers", primary_key=("id",), mode="append")


def write_unexpected_partition(lake: Lakehouse, spark: SparkSession) -> None:
    stage_dataframe(
        lake,
        rows_of(spark, 30),
        "facts",
        "numbers",
        partition_by=("year", "month"),
        mode="replace_partitions",
        partitions=[{"year": 2013, "month": 2}],
    )


FAILURES: list[tuple[Callable[[Lakehouse, SparkSession], None], type[TrinityLakeError], str]] = [
    (write_to_full_disk, StorageFullError, "injected before the effect at .*/data/"),
    (kill_task, JobFailedError, "cannot write table facts.numbers: .*(crash|exited)"),
    (fail_at_row, JobFailedError, "cannot write table facts.numbers: .*row 9 is bad"),
    (fail_after_other_task, JobFailedError, "cannot write table facts.numbers: ValueError: row 19 is bad"),
    (write_null_in_key, InvalidInputError, "column 'id' .*1 rows"),
    (write_unexpected_partition, InvalidInputError, r"partition \{'year': 2013, 'month': [13]\}"),
]


@pytest.mark.parametrize(("write", "error", "message"), FAILURES, ids=[failure[0].__name__ for failure in FAILURES])
def test_failure_leaves_only_owner_file(
    spark: SparkSession,
    lake: Lakehouse,
    write: Callable[[Lakehouse, SparkSession], None],
    error: type[TrinityLakeError],
    message: str,
) -> None:
    before = files_of(lake)
    with pytest.raises(error, match=message) as raised:
        write(lake, spark)
    assert type(raised.value) is error
    assert "\n" not in str(raised.value)
    assert "Traceback" not in str(raised.value)
    # Spark may still run tasks. The owner file marks the files that they write later as orphans of this lakehouse.
    remaining = files_of(lake).keys() - before.keys()
    assert all(path.startswith("tables/") and path.endswith(f"/{OWNER_NAME}") for path in remaining)
    assert len(remaining) <= 1
    assert lake.latest_version() == 0


def test_unreadable_source_file_is_reported(spark: SparkSession, lake: Lakehouse, tmp_path: Path) -> None:
    source = tmp_path / "a source.csv"
    source.write_text("id\n1\nmany\n")
    frame = spark.read.schema("id int").option("header", True).option("mode", "FAILFAST").csv(str(source))
    with pytest.raises(CorruptFileError) as raised:
        stage_dataframe(lake, frame, "facts", "numbers", mode="append")
    assert raised.value.path == str(source)
    assert "\n" not in str(raised.value)


def test_append_includes_rows_published_while_tasks_write(
    spark: SparkSession, lake: Lakehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = stage_dataframe(lake, rows_of(spark, 3), "facts", "numbers", mode="append")

    def publish_and_stage(*arguments: Any, **options: Any) -> StagedTable:
        publish_staged(lake, first)
        return stage_data_files(*arguments, **options)

    monkeypatch.setattr(staging, "stage_data_files", publish_and_stage)
    second = stage_dataframe(lake, rows_of(spark, 3), "facts", "numbers", mode="append")
    assert content(read_table(spark, lake, "facts.numbers")) == content(rows_of(spark, 3))
    publish_once(lake, [second], publication_id("second"))
    assert content(read_table(spark, lake, "facts.numbers")) == content(rows_of(spark, 3).union(rows_of(spark, 3)))


def test_plans_show_no_storage_options(spark: SparkSession, tmp_path: Path) -> None:
    secret = "s3cr3t-of-the-test"
    storage = FaultyStorage(
        LocalStorage(f"file://{tmp_path}/lake/", fsync=False), [fail(10**9, StorageFullError, path_part=secret)]
    )
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", storage=storage)
    frame = spark.range(3).selectExpr("id", "'marker-of-the-test' as text")
    staged = stage_dataframe(lake, frame, "facts", "numbers", mode="append")
    assert read_staged(spark, lake, staged).count() == 3
    executions = spark._jsparkSession.sharedState().statusStore().executionsList()
    plans = [
        f"{execution.description()} {execution.details()} {execution.physicalPlanDescription()}"
        for execution in (executions.apply(index) for index in range(executions.size()))
    ]
    assert any("marker-of-the-test" in text for text in plans), "the plan of the write is included"
    assert any("trinitylake_table_scan" in text for text in plans), "the plan of the read is included"
    assert not any(secret in text for text in plans)
    assert not any(secret in value for _, value in spark.sparkContext.getConf().getAll())


def test_unpublished_files_become_orphans(spark: SparkSession, lake: Lakehouse) -> None:
    """This applies to the files of a task that was killed after writing and of a table that is never published."""
    before = files_of(lake).keys()
    faulty = with_faults(lake, kill(1, "after", path_part="/data/"))
    with pytest.raises(JobFailedError):
        stage_dataframe(faulty, rows_of(spark, 10), "facts", "numbers", mode="append")
    stage_dataframe(lake, rows_of(spark, 10), "facts", "forgotten", mode="append")
    remaining = files_of(lake).keys() - before
    assert any("/data/" in path for path in remaining)
    assert operations.plan_orphan_removal(lake).is_empty, "the files may still be published"
    later = Lakehouse(ClockStorage(lake.storage, lake.storage.now_ms() + 2 * lake.snapshot().definition.txn_ttl_millis))
    report = operations.plan_orphan_removal(later).execute()
    assert report.files == len(remaining)
    assert not remaining & files_of(lake).keys()
    assert not list(lake.storage.list("tables/"))
