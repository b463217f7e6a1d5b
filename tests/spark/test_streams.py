"""Test streams and streaming writes in Spark: they are exactly-once, even after restarts and kills."""

from __future__ import annotations

import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.types import LongType, StructField, StructType

from tests.faults import FaultyStorage, kill
from tests.lakes import check_lake
from tests.operations.changes import expire
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import ConflictError, InvalidInputError, JobFailedError, VersionExpiredError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.arrow import stage_arrow
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.spark.runtime.errors import spark_failures
from trinitylake_ops.spark.source.data_source import TrinityLakeSource
from trinitylake_ops.spark.source.writer import WriteTarget, stream_writer

pytestmark = [
    pytest.mark.local_only("the Spark tasks of these tests read a folder"),
    pytest.mark.usefixtures("fixed_requests"),
]

Rows = list[tuple[Any, ...]]


@pytest.fixture
def lake(tmp_path: Path) -> Iterator[Lakehouse]:
    lake = Lakehouse.create(f"file://{tmp_path}/lake/", {"fsync": "false"})
    yield lake
    check_lake(lake)


@pytest.fixture
def target_lake(tmp_path: Path) -> Iterator[Lakehouse]:
    """The target lakehouse of streams."""
    lake = Lakehouse.create(f"file://{tmp_path}/other/", {"fsync": "false"})
    yield lake
    check_lake(lake)


def append(lake: Lakehouse, name: str, *ids: int) -> None:
    rows = pa.table({"id": pa.array(ids, pa.int64()), "part": pa.array([number % 2 for number in ids], pa.int64())})
    namespace, table = name.split(".")
    with lake.transaction() as txn:
        publish(txn, [stage_arrow(lake, rows, namespace, table, mode="append")])


def ids_of(lake: Lakehouse, name: str) -> list[int]:
    stored_ids: list[int] = catalog_at(lake).load_table(name).scan().to_arrow()["id"].to_pylist()
    return sorted(stored_ids)


@dataclass
class Batches:
    """The rows of each batch by its number. A repeated batch must have the same rows."""

    rows: dict[int, Rows] = field(default_factory=dict)

    def collect(self, frame: DataFrame, number: int) -> None:
        rows = sorted(tuple(row) for row in frame.collect())
        assert self.rows.setdefault(number, rows) == rows

    def all(self) -> Rows:
        return [row for rows in self.rows.values() for row in rows]


def stream_of(spark: SparkSession, lake: Lakehouse, table: str, **options: object) -> DataFrame:
    return spark.readStream.format("trinitylake").option("root", lake.root).options(**options).load(table)


def start_query(frame: DataFrame, batches: Batches, folder: Path, *, is_endless: bool = False) -> StreamingQuery:
    writer = frame.writeStream.foreachBatch(batches.collect).option("checkpointLocation", str(folder))
    trigger = {"processingTime": "0 seconds"} if is_endless else {"availableNow": True}
    return writer.trigger(**trigger).start()  # type: ignore[arg-type]


def await_end(query: StreamingQuery) -> None:
    with spark_failures("stream"):
        query.awaitTermination()


@pytest.mark.soak
def test_restarted_stream_reads_200_concurrent_commits_once(
    spark: SparkSession, lake: Lakehouse, tmp_path: Path
) -> None:
    def commit() -> None:
        for number in range(200):
            with lake.transaction() as txn:
                txn.create_namespace(f"n{number}")
                if number >= 2:
                    txn.alter_namespace(f"n{number - 1}", {"seen": str(number)})
                    txn.drop_namespace(f"n{number - 2}")

    batches = Batches()
    frame = stream_of(spark, lake, "changes", columns="version,kind,namespace", max_versions=40)
    committing = threading.Thread(target=commit)
    committing.start()
    while committing.is_alive():
        query = start_query(frame, batches, tmp_path / "checkpoint", is_endless=True)
        n_batches = len(batches.rows)
        while committing.is_alive() and len(batches.rows) < n_batches + 2 and query.isActive:
            committing.join(0.05)
        query.stop()
    committing.join()
    await_end(start_query(frame, batches, tmp_path / "checkpoint"))
    expected = [
        (version, change.kind, change.namespace)
        for version in range(1, 201)
        for change in lake.diff(version - 1, version)
    ]
    assert lake.latest_version() == 200
    assert len(batches.rows) >= 5
    assert sorted(batches.all()) == sorted(expected)


@pytest.mark.soak
def test_restarted_stream_reads_appended_rows_once(spark: SparkSession, lake: Lakehouse, tmp_path: Path) -> None:
    for number in range(3):
        append(lake, "ns.t", number, number + 10)
    batches = Batches()

    def run() -> None:
        frame = stream_of(spark, lake, "ns.t", max_versions=2, columns="id", row_filter="id != 11")
        await_end(start_query(frame, batches, tmp_path / "checkpoint"))

    run()
    assert (sorted(batches.all()), len(batches.rows)) == ([(0,), (1,), (2,), (10,), (12,)], 2)
    append(lake, "ns.t", 20, 21)
    run()
    assert sorted(batches.all()) == [(0,), (1,), (2,), (10,), (12,), (20,), (21,)]


def test_stream_fails_at_expired_versions(spark: SparkSession, lake: Lakehouse, tmp_path: Path) -> None:
    for number in range(4):
        append(lake, "ns.t", number)
    expire(lake, "2-3")
    frame = stream_of(spark, lake, "changes", starting_version=2)
    with pytest.raises(VersionExpiredError, match="on_gap"):
        await_end(start_query(frame, Batches(), tmp_path / "checkpoint"))


def test_writes_are_atomic(spark: SparkSession, lake: Lakehouse) -> None:
    def write(first: int, last: int, mode: str, name: str = "ns.t", **options: str) -> None:
        frame = spark.range(first, last, 1, 2).selectExpr("id", "id % 2 as part")
        with spark_failures("write"):
            frame.write.format("trinitylake").option("root", lake.root).options(**options).mode(mode).save(name)

    write(0, 10, "append", partition_by="part", message="first")
    assert (lake.latest_version(), ids_of(lake, "ns.t")) == (1, list(range(10)))
    info = next(iter(lake.history(limit=1)))
    assert (info.operation, info.message) == ("write", "first")
    for _ in range(2):
        write(10, 12, "append", run_id="once")
    assert (lake.latest_version(), ids_of(lake, "ns.t")) == (2, list(range(12)))
    assert next(iter(lake.history(limit=1))).run_id == "once"
    write(20, 21, "overwrite", replace="partitions")
    assert ids_of(lake, "ns.t") == [1, 3, 5, 7, 9, 11, 20]
    write(30, 32, "overwrite")
    assert ids_of(lake, "ns.t") == [30, 31]


def stream_into(frame: DataFrame, lake: Lakehouse, folder: Path, source: str = "trinitylake", **options: Any) -> None:
    writer = frame.writeStream.format(source).option("root", lake.root).option("checkpointLocation", str(folder))
    with spark_failures("stream"):
        writer.options(**options).trigger(availableNow=True).start("ns.copy").awaitTermination()


def commit_epoch(lake: Lakehouse, number: int, *tasks: list[int], mode: str = "append") -> None:
    """Write and commit an epoch as the processes of Spark do."""
    target = WriteTarget.parse({"root": lake.root, "path": "ns.copy", "stream_id": "s"})
    schema = StructType([StructField("id", LongType())])
    writer = stream_writer(target, schema, overwrite=mode == "complete")
    task_writer = pickle.loads(pickle.dumps(writer))
    batches = [pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64())}) for ids in tasks]
    writer.commit([task_writer.write(iter([batch])) for batch in batches], number)


@pytest.mark.parametrize("mode", ["append", "complete"])
def test_epoch_is_identified_by_its_rows(target_lake: Lakehouse, mode: str) -> None:
    commit_epoch(target_lake, 0, [1], [2, 3], mode=mode)
    commit_epoch(target_lake, 0, [3, 1, 2], [], mode=mode)
    for tasks in ([[1], [2]], [[1, 2, 4]], [[1, 2, 3, 4]]):
        with pytest.raises(ConflictError):
            commit_epoch(target_lake, 0, *tasks, mode=mode)
    assert (ids_of(target_lake, "ns.copy"), target_lake.latest_version()) == ([1, 2, 3], 1)
    commit_epoch(target_lake, 1, [1, 2, 3], mode=mode)
    assert target_lake.latest_version() == 2, "the next epoch may have the same rows"


@pytest.mark.soak
def test_stream_continues_from_checkpoint_one_epoch_behind(
    spark: SparkSession, lake: Lakehouse, target_lake: Lakehouse, tmp_path: Path
) -> None:
    """Rows that were already committed are skipped. Different rows for a committed epoch are rejected."""
    append(lake, "ns.t", 1)
    frame = stream_of(spark, lake, "ns.t")
    stream_into(frame, target_lake, tmp_path / "c", stream_id="s")
    for copy in ("same", "grown"):
        shutil.copytree(tmp_path / "c", tmp_path / copy)
    append(lake, "ns.t", 2)
    stream_into(frame, target_lake, tmp_path / "c", stream_id="s")
    stream_into(frame, target_lake, tmp_path / "same", stream_id="s")
    assert (ids_of(target_lake, "ns.copy"), target_lake.latest_version()) == ([1, 2], 2)
    append(lake, "ns.t", 3)
    for _ in range(2):
        with pytest.raises(ConflictError):
            stream_into(frame, target_lake, tmp_path / "grown", stream_id="s")
    assert (ids_of(target_lake, "ns.copy"), target_lake.latest_version()) == ([1, 2], 2)


class KilledTarget(WriteTarget):
    """A target whose processes are killed at the storage request that the option ``message`` describes.

    "5 before" means before the fifth request, and "3 root" means after the root of version 3 was created.
    """

    def open(self) -> Lakehouse:
        lake = super().open()
        number, moment = (self.options.message or "1 before").split()
        fault = kill(int(number), "before" if moment == "before" else "after")
        if moment == "root":
            fault = kill(1, "after", kind="create", path_part=root_path(int(number)))
        return Lakehouse(FaultyStorage(lake.storage, [fault]), lake.storage_options)


class KilledSource(TrinityLakeSource):
    """The data source with a :class:`KilledTarget`."""

    @classmethod
    def name(cls) -> str:
        return "trinitylake_killed"

    def _target(self) -> WriteTarget:
        target = super()._target()
        return KilledTarget(target.source, target.options, target.name)


@pytest.mark.soak
@pytest.mark.parametrize("kills", [pytest.param(1, id="short"), pytest.param(20, id="full")])
def test_randomly_killed_streaming_write_commits_each_epoch_once(
    spark: SparkSession, lake: Lakehouse, target_lake: Lakehouse, tmp_path: Path, kills: int
) -> None:
    """SIGKILL hits the processes that plan and commit epochs and those of tasks. Each kill ends the query."""
    spark.dataSource.register(KilledSource)
    rng = random.Random(17)
    killed, rows = 0, 0
    append(lake, "ns.t", 0)
    frame = stream_of(spark, lake, "ns.t", max_versions=1)
    while killed < kills:
        rows += 1
        append(lake, "ns.t", rows)
        kill_point = f"{rng.randint(1, 30)} {rng.choice(['before', 'after'])}" if killed else "1 root"
        try:
            stream_into(frame, target_lake, tmp_path / "c", KilledSource.name(), stream_id="s", message=kill_point)
        except JobFailedError as error:
            assert "exited unexpectedly (crashed)" in str(error), error
            killed += 1
    stream_into(frame, target_lake, tmp_path / "c", stream_id="s", message="the last")
    assert ids_of(target_lake, "ns.copy") == list(range(rows + 1))
    check_epochs(target_lake)
    with pytest.raises(ConflictError):
        stream_into(frame, target_lake, tmp_path / "lost", stream_id="s")
    with pytest.raises(InvalidInputError, match="'stream_id'"):
        stream_into(frame, target_lake, tmp_path / "none")
    assert ids_of(target_lake, "ns.copy") == list(range(rows + 1))


def check_epochs(lake: Lakehouse) -> None:
    """Assert that each epoch was committed once, and that all commits have the query id of the checkpoint."""
    infos = [info for info in lake.history() if info.operation == "stream"]
    assert {info.properties["stream_id"] for info in infos} <= {"s", "copy"}
    assert max(Counter(info.properties["epoch"] for info in infos).values()) == 1
    assert len({info.properties["query_id"] for info in infos}) == 1


@pytest.mark.soak
@pytest.mark.timeout(2400)
def test_streaming_write_with_killed_driver_commits_each_epoch_once(
    lake: Lakehouse, target_lake: Lakehouse, tmp_path: Path
) -> None:
    """The whole program, with its JVM and tasks, is killed with SIGKILL twenty times while it writes epochs."""
    rng = random.Random(17)
    killed, rows = 0, 0

    def start() -> subprocess.Popen[bytes]:
        program = [sys.executable, "-m", "tests.spark.stream_program", lake.root, target_lake.root, str(tmp_path / "c")]
        return subprocess.Popen(program, start_new_session=True, cwd=Path(__file__).parents[2])

    while killed < 20:
        for _ in range(3):
            append(lake, "ns.t", rows)
            rows += 1
        process = start()
        try:
            process.wait(rng.uniform(4, 25))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            killed += 1
        else:
            assert process.returncode == 0
    assert start().wait() == 0
    assert ids_of(target_lake, "ns.copy") == list(range(rows))
    check_epochs(target_lake)
