"""Test the options of streams and writes: their effects, and rejected values."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.spark.runtime import errors
from trinitylake_ops.spark.source.data_source import TrinityLakeSource
from trinitylake_ops.spark.source.options import StreamOptions, WriteOptions
from trinitylake_ops.spark.source.writer import WriteTarget, batch_writer, stream_writer


def test_options_are_parsed() -> None:
    assert StreamOptions.parse({}) == StreamOptions()
    option_texts = {"starting_version": "5", "max_versions": "2", "on_gap": "skip", "on_overwrite": "skip"}
    assert StreamOptions.parse(option_texts) == StreamOptions(
        starting_version=5, max_versions=2, on_gap="skip", on_overwrite="skip"
    )
    assert StreamOptions.parse({"starting_version": "latest"}).starting_version == "latest"
    assert WriteOptions.parse({"partition_by": "a, b", "primary_key": "id", "replace": "partitions"}) == WriteOptions(
        partition_by=("a", "b"), primary_key=("id",), replaces_partitions=True
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starting_version": "newest"}, "'newest' of option 'starting_version'"),
        ({"max_versions": "0"}, "option 'max_versions'; use a number of at least 1"),
        ({"on_gap": "go"}, "option 'on_gap'; use 'fail' or 'skip'"),
        ({"on_overwrite": ""}, "option 'on_overwrite'; use 'fail' or 'skip'"),
    ],
    ids=["starting_version", "max_versions", "on_gap", "on_overwrite"],
)
def test_invalid_stream_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        StreamOptions.parse(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"replace": "all"}, "option 'replace'; use 'table' or 'partitions'"),
        ({"partition": "month=2"}, "option 'partition'; use JSON"),
        ({"partition": '{"month": [2]}'}, "option 'partition'; use JSON"),
        ({"partition": "[" * 5000}, "option 'partition'; use JSON"),
        ({"partition": '{"month": 2}', "replace": "partitions"}, "options replace and partition"),
        ({"create": "yes"}, "option 'create'; use 'true' or 'false'"),
        ({"reads": "ns.t"}, "option 'reads'; use JSON"),
        ({"reads": '{"ns.t": "12"}'}, "option 'reads'; use JSON"),
        ({"reads": '{"ns.t": -1}'}, "option 'reads'; use JSON"),
        ({"stream_id": ""}, "'stream_id' must have 1 to 200 characters"),
        ({"partition_by": "a,,b"}, "option 'partition_by'; use comma-separated names"),
        ({"row_filter": "a = 1"}, "'row_filter' is for reads"),
        ({"max_versions": "1"}, "unknown option 'max_versions'"),
        ({"path": "t"}, "invalid table name 't'"),
        ({"storage.secret_access_key": "x"}, "'storage.secret_access_key'"),
    ],
    ids=str,
)
def test_invalid_write_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message):
        WriteTarget.parse({"root": "/nowhere", "path": "ns.t", **options})


def test_incompatible_options_are_rejected() -> None:
    def target(**options: str) -> WriteTarget:
        return WriteTarget.parse({"root": "/nowhere", "path": "ns.t", "checkpointLocation": "/c", **options})

    with pytest.raises(InvalidInputError, match="'stream_id'"):
        batch_writer(target(stream_id="s"), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="'replace'"):
        batch_writer(target(replace="partitions"), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="'partition'"):
        batch_writer(target(partition='{"month": 2}'), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError):
        stream_writer(target(stream_id="s", partition='{"month": 2}'), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError):
        stream_writer(target(stream_id="s", run_id="r"), StructType(), overwrite=False)
    with pytest.raises(InvalidInputError, match="'on_gap'"):
        TrinityLakeSource({"root": "/nowhere", "path": "versions", "on_gap": "skip"}).reader(StructType())


def test_streams_require_newer_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    source = TrinityLakeSource({"root": "memory://none", "path": "versions"})
    monkeypatch.setattr(errors.pyspark, "__version__", "4.1.3.dev0")
    with pytest.raises(InvalidInputError, match=r"4\.1\.3\.dev0"):
        source.streamReader(StructType()).initialOffset()
    monkeypatch.setattr(errors.pyspark, "__version__", "4.0.0")
    with pytest.raises(InvalidInputError, match=r"4\.0\.0"):
        source.streamWriter(StructType(), overwrite=False)


def write(lake: Lakehouse, table: str, ids: Sequence[int], *, overwrite: bool = False, **options: str) -> None:
    """Write a table as the processes of Spark do."""
    target = WriteTarget.parse({"root": lake.root, "path": table, **options})
    writer = batch_writer(target, StructType([StructField("id", LongType())]), overwrite=overwrite)
    batch = pa.RecordBatch.from_pydict({"id": pa.array(ids, pa.int64())})
    writer.commit([writer.write(iter([batch]))])


def ids_of(lake: Lakehouse, table: str | tuple[str, str]) -> list[int]:
    return sorted(catalog_at(lake).load_table(table).scan().to_arrow()["id"].to_pylist())


def test_overwrite_of_serializable_lakehouse_requires_reads(lakes: Lakes) -> None:
    lake = lakes.local(isolation_level=IsolationLevel.SERIALIZABLE)
    write(lake, "ns.a", [1])
    write(lake, "ns.b", [2], overwrite=True)
    read_at = lake.latest_version()
    reads = json.dumps({"ns.a": read_at})
    for options in ({}, {"replace": "partitions"}):
        with pytest.raises(InvalidInputError):
            write(lake, "ns.b", [1], overwrite=True, **options)
    write(lake, "ns.b", [1], overwrite=True, reads=reads)
    write(lake, "ns.a", [3])  # an append does not require the option 'reads'
    for table, overwrite in (("ns.b", True), ("ns.a", True), ("ns.b", False), ("ns.new", False)):
        with pytest.raises(CommitConflictError):
            write(lake, table, [1], overwrite=overwrite, reads=reads)
    assert (ids_of(lake, "ns.a"), ids_of(lake, "ns.b")) == ([1, 3], [1])
    write(lake, "ns.a", [7], overwrite=True, reads=json.dumps({"ns.a": lake.latest_version()}))
    write(lake, "ns.b", [8], overwrite=True, reads="{}")
    assert (ids_of(lake, "ns.a"), ids_of(lake, "ns.b")) == ([7], [8])


def test_reads_are_ignored_with_snapshot_isolation(lakes: Lakes) -> None:
    lake = lakes.local()
    write(lake, "ns.a", [1])
    write(lake, "ns.b", [2])
    write(lake, "ns.a", [3])
    write(lake, "ns.b", [1], overwrite=True, reads='{"ns.a": 1}')
    write(lake, "ns.b", [4], overwrite=True)
    assert ids_of(lake, "ns.b") == [4]


def test_table_names_with_dots_are_passed_as_json(lakes: Lakes) -> None:
    lake = lakes.local()
    names = [("a", "b.c"), ("a.b", "c"), ("n", "t.x.y")]
    for number, name in enumerate(names):
        write(lake, json.dumps(name), [number])
    source_options = {"root": lake.root, "path": json.dumps(["a.b", "c"])}
    assert TrinityLakeSource(source_options).schema().names == ["id"]
    assert [ids_of(lake, name) for name in names] == [[0], [1], [2]]
    with pytest.raises(InvalidInputError):
        TrinityLakeSource({"root": lake.root, "path": "a.b.c"}).schema()
    for invalid_name in ('["a.b"]', '["a.b", 1]', '["", "c.d"]'):
        with pytest.raises(InvalidInputError):
            write(lake, invalid_name, [1])
