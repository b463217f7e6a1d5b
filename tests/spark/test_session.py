"""Test the settings of Spark sessions, and ``session_scope`` with an existing session."""

import socket
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from trinitylake_ops.errors import InvalidInputError, JobFailedError
from trinitylake_ops.spark.runtime.addresses import check_master
from trinitylake_ops.spark.session import build_session, session_scope


def test_session_has_default_settings(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert spark.sparkContext.master == "local[2]"
    jvm = spark.sparkContext._jvm
    assert jvm is not None
    options = list(jvm.java.lang.management.ManagementFactory.getRuntimeMXBean().getInputArguments())
    assert "-XX:ReservedCodeCacheSize=256m" in options, "a process with many jobs would exhaust a smaller code cache"
    warehouse = spark.conf.get("spark.sql.warehouse.dir") or ""
    assert not Path(warehouse.removeprefix("file:")).is_relative_to(Path.cwd())


def test_session_scope_sets_options_of_running_session(spark: SparkSession) -> None:
    conf = {"spark.sql.session.timeZone": "Asia/Tokyo", "spark.sql.shuffle.partitions": "3"}
    before = spark.conf.get("spark.sql.shuffle.partitions")
    with session_scope("shared", "local[2]", **conf) as shared_session:
        assert shared_session.sparkContext is spark.sparkContext
        assert shared_session.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
        assert shared_session.conf.get("spark.sql.shuffle.partitions") == "3"
        assert shared_session.range(3).count() == 3
    assert spark.conf.get("spark.sql.shuffle.partitions") == before
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.range(4).count() == 4


def test_build_session_returns_running_session(spark: SparkSession) -> None:
    conf = {"spark.sql.shuffle.partitions": 3}
    session = build_session("again", "local[2]", **conf)
    assert session.sparkContext is spark.sparkContext
    assert session.conf.get("spark.sql.shuffle.partitions") == "3"
    session.conf.set("spark.sql.shuffle.partitions", 4)


def test_parquet_timestamps_are_microseconds_in_utc(sample: dict[str, DataFrame], tmp_path: Path) -> None:
    target = tmp_path / "weather"
    sample["weather"].limit(10).coalesce(1).write.parquet(str(target))
    (file,) = target.glob("*.parquet")
    column = pq.ParquetFile(file).schema.column(1)
    assert (column.name, column.physical_type) == ("time_hour", "INT64")
    assert pq.read_schema(file).field("time_hour").type == pa.timestamp("us", tz="UTC")


def test_unreachable_master_is_reported_before_java_starts() -> None:
    with socket.socket() as closed, socket.create_server(("127.0.0.1", 0)) as listening:
        closed.bind(("127.0.0.1", 0))
        unreachable, reachable = (
            f"127.0.0.1:{server_socket.getsockname()[1]}" for server_socket in (closed, listening)
        )
        with pytest.raises(JobFailedError):
            check_master(f"spark://{unreachable}")
        check_master(f"spark://{unreachable},{reachable}")
    for local in ("local[2]", "yarn", "k8s://https://host"):
        check_master(local)
    for invalid in ("spark://", "spark://host", "spark://host:x"):
        with pytest.raises(InvalidInputError):
            check_master(invalid)
