"""Options of streams and writes: what they mean, and which are refused."""

from __future__ import annotations

import pytest
from pyspark.sql.types import StructType

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark_jobs.runtime import spark_version
from trinitylake_ops.spark_jobs.source.data_source import TrinityLakeSource
from trinitylake_ops.spark_jobs.source.stream_options import StreamOptions, WriteOptions
from trinitylake_ops.spark_jobs.source.stream_writer import stream_writer
from trinitylake_ops.spark_jobs.source.writer import WriteTarget, batch_writer


def test_what_options_mean() -> None:
    assert StreamOptions.parse({}) == StreamOptions()
    given = {"starting_version": "5", "max_versions": "2", "on_gap": "skip", "on_overwrite": "skip"}
    assert StreamOptions.parse(given) == StreamOptions(
        starting_version=5, max_versions=2, on_gap="skip", on_overwrite="skip"
    )
    assert StreamOptions.parse({"starting_version": "latest"}).starting_version == "latest"
    assert WriteOptions.parse({"partition_by": "a, b", "primary_key": "id", "replace": "partitions"}) == WriteOptions(
        partition_by=("a", "b"), primary_key=("id",), replaces_partitions=True
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"starting_version": "newest"}, "'starting_version' takes a number from 0 on, not 'newest'"),
        ({"max_versions": "0"}, "'max_versions' takes a number from 1 on"),
        ({"on_gap": "go"}, "'on_gap' takes 'fail' or 'skip'"),
        ({"on_overwrite": ""}, "'on_overwrite' takes 'fail' or 'skip'"),
    ],
    ids=["start", "most", "gap", "overwrite"],
)
def test_wrong_options_of_streams(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        StreamOptions.parse(options)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"replace": "all"}, "'replace' takes 'table' or 'partitions'"),
        ({"partition": "month=2"}, "'partition' takes JSON"),
        ({"partition": '{"month": [2]}'}, "'partition' takes JSON"),
        ({"partition": "[" * 5000}, "'partition' takes JSON"),
        ({"partition": '{"month": 2}', "replace": "partitions"}, "one of the options replace and partition"),
        ({"create": "yes"}, "'create' takes 'true' or 'false'"),
        ({"stream_id": ""}, "'stream_id' takes 1 to 200 characters"),
        ({"partition_by": "a,,b"}, "'partition_by' takes names with commas"),
        ({"row_filter": "a = 1"}, "'row_filter' is of reads"),
        ({"max_versions": "1"}, "there is no option 'max_versions'"),
        ({"path": "t"}, "'t' names no table"),
        ({"storage.secret_access_key": "x"}, "would be seen in Spark's plans"),
    ],
    ids=str,
)
def test_wrong_options_of_writes(options: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        WriteTarget.parse({"root": "/nowhere", "path": "ns.t", **options})


def test_options_that_do_not_go_together() -> None:
    def target(**options: str) -> WriteTarget:
        return WriteTarget.parse({"root": "/nowhere", "path": "ns.t", "checkpointLocation": "/c", **options})

    with pytest.raises(InvalidInputError, match="'stream_id' is of streams"):
        batch_writer(target(stream_id="s"), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="'replace' goes with the mode overwrite"):
        batch_writer(target(replace="partitions"), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="'partition' goes with the mode overwrite"):
        batch_writer(target(partition='{"month": 2}'), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="are of batch writes"):
        stream_writer(target(stream_id="s", partition='{"month": 2}'), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="are of batch writes"):
        stream_writer(target(stream_id="s", run_id="r"), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="'on_gap' is of streams"):
        TrinityLakeSource({"root": "/nowhere", "path": "versions", "on_gap": "skip"}).reader(StructType())


def test_streams_need_a_newer_spark_than_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TrinityLakeSource({"root": "memory://none", "path": "versions"})
    monkeypatch.setattr(spark_version.pyspark, "__version__", "4.1.3.dev0")
    with pytest.raises(InvalidInputError, match=r"streams that are read .* need Spark 4\.2, and this is 4\.1\.3\.dev0"):
        source.streamReader(StructType()).initialOffset()
    monkeypatch.setattr(spark_version.pyspark, "__version__", "4.0.0")
    with pytest.raises(InvalidInputError, match=r"streams that are written .* need Spark 4\.1, and this is 4\.0\.0"):
        source.streamWriter(StructType(), overwrite=False)
