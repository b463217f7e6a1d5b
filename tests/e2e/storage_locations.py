"""Lakehouse roots on storages other than local folders and S3, with public options and secret environment variables.

``python -m tests.e2e.storage_locations BEFORE|AFTER EVENT_LOG_FOLDER`` uses Spark on all locations in the JSON on
standard input. With BEFORE, their variables are set before Spark starts. With AFTER, they are set later and only in the
driver process, except the variable of HDFS.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.servers.aws import REGION, SECRET_ACCESS_KEY
from tests.servers.azurite import AzureServer
from tests.servers.dynalite import ACCESS_KEY_ID, DynamoDBServer
from tests.servers.gcs import GcsServer
from tests.servers.hdfs import SUPERUSER, HdfsServer
from tests.servers.kinds import Server
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at

KINDS = ("redis_server", "azurite", "fake_gcs", "dynalite", "hdfs")
#: Including S3 and Valkey, for tests that need no separate environment.
ALL_KINDS = (*KINDS, "valkey_server", "radosgw")
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
MORE_ROWS = pa.table({"id": pa.array([4], pa.int64())})
DONE = "all locations were used"


@dataclass(frozen=True)
class StorageLocation:
    """A root on a server.

    Attributes:
        root: The root of the lakehouse.
        public_options: Storage options without secrets.
        variables: Environment variables with the remaining settings.
        secret_options: Storage options with secrets, as an alternative to the variables.
        invalid_variables: Variables that the server rejects.
        expected_error: Part of the error with ``invalid_variables``.
        missing_root: A root in a container that does not exist.
    """

    root: str
    public_options: dict[str, str]
    variables: dict[str, str]
    secret_options: dict[str, str]
    invalid_variables: dict[str, str]
    expected_error: str
    missing_root: str

    @property
    def scheme(self) -> str:
        return self.root.partition("://")[0]

    @property
    def named_options(self) -> dict[str, str]:
        """All options, including credentials, with the scheme as prefix."""
        return {
            f"{self.scheme}.{name}": value for name, value in {**self.public_options, **self.secret_options}.items()
        }

    @property
    def environment(self) -> dict[str, str]:
        """All environment variables for a command."""
        options = ",".join(f"{name}={value}" for name, value in self.public_options.items())
        return {"TRINITYLAKE_ROOT": self.root, "TRINITYLAKE_STORAGE_OPTIONS": options, **self.variables}


def location_on(server: Server, name: str = "lake") -> StorageLocation:
    """Return an unused root on a server, with the options and variables that a user would set."""
    root = server.fresh_root(name)
    if isinstance(server, AzureServer):
        public_options = {"endpoint": server.endpoint, "account_name": server.account_name}
        key = "AZURE_STORAGE_ACCOUNT_KEY"
        secret_options = {"account_key": server.account_key}
        return StorageLocation(
            root,
            public_options,
            {key: server.account_key},
            secret_options,
            {key: "AAAA"},
            "not allowed",
            "az://nosuch/x/",
        )
    if isinstance(server, GcsServer):
        variables = {"STORAGE_EMULATOR_HOST": server.endpoint}
        invalid_variables = {"STORAGE_EMULATOR_HOST": "", "GOOGLE_APPLICATION_CREDENTIALS": "/missing.json"}
        secret_options = {"credentials": "anonymous"}
        public_options = {"endpoint": server.endpoint}
        return StorageLocation(
            root, {}, variables, {**public_options, **secret_options}, invalid_variables, "no token", "gs://nosuch/x/"
        )
    if isinstance(server, DynamoDBServer):
        public_options = {"endpoint": server.endpoint}
        variables = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY, "AWS_REGION": REGION,
        }  # fmt: skip
        secret_options = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, "region": REGION}
        invalid_variables = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
        return StorageLocation(
            root,
            public_options,
            variables,
            secret_options,
            invalid_variables,
            "Unable to locate credentials",
            "dynamodb://nosuch/x/",
        )
    if isinstance(server, HdfsServer):
        user = "HADOOP_USER_NAME"
        return StorageLocation(root, {}, {user: SUPERUSER}, {}, {user: "other"}, "denied", "hdfs://127.0.0.1:9/x/")
    if isinstance(server, S3Server):
        public_options = {"endpoint": server.endpoint, "region": server.region}
        secret_options = {"access_key_id": server.access_key_id, "secret_access_key": server.secret_access_key}
        return StorageLocation(root, public_options, {}, secret_options, {}, "not allowed", "s3://nosuch/x/")
    public_options, invalid_variables = (
        {"durability": "always"},
        {"REDIS_USERNAME": "unknown", "REDIS_PASSWORD": "wrong"},
    )
    missing_root = root.replace("/0/", "/99/")
    return StorageLocation(
        root, public_options, {}, {}, invalid_variables, "the user or the password is wrong", missing_root
    )


@contextmanager
def with_variables(*locations: StorageLocation) -> Iterator[pytest.MonkeyPatch]:
    """Set the variables of the locations during the block."""
    with pytest.MonkeyPatch.context() as patch:
        for location in locations:
            for name, value in location.variables.items():
                patch.setenv(name, value)
        yield patch


def rows(lake: Lakehouse, version: int | str | None = None) -> list[int]:
    """Return the ids in the table ``ns.t``."""
    with catalog_at(lake, version) as catalog:
        return sorted(catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist())


def use_tables(lake: Lakehouse) -> None:
    """Create, append to, overwrite and read a table. At the end it contains rows 1, 2, 3 and 4."""
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        catalog.create_table("ns.t", ROWS.schema).append(MORE_ROWS)
        assert rows(lake) == [4]
        catalog.load_table("ns.t").overwrite(ROWS)
        assert rows(lake) == [1, 2, 3]
        catalog.load_table("ns.t").append(MORE_ROWS)
    assert rows(lake) == [1, 2, 3, 4]
    assert operations.verify(lake, deep=True).findings == ()


def _use_spark_executor(spark: Any, location: StorageLocation, target: StorageLocation) -> None:
    """Stage, read and run operations in tasks. No option contains a credential."""
    from tests.operations.changes import overwrite_rows
    from trinitylake_ops.iceberg.write.staging import publish
    from trinitylake_ops.spark import read_metadata, read_table, stage_dataframe, write_groups_on
    from trinitylake_ops.spark.executor import SparkExecutor

    options = {
        **location.public_options,
        **{f"{target.scheme}.{name}": value for name, value in target.public_options.items()},
    }
    lake = Lakehouse.create(location.root, options, table_root="" if target == location else target.root)
    staged = stage_dataframe(lake, spark.range(100), "ns", "t", mode="append")
    with lake.transaction() as txn:
        publish(txn, [staged])
    assert read_table(spark, lake, "ns.t").count() == 100
    assert read_metadata(spark, lake, "files").where("kind = 'data'").count() >= 1
    overwrite_rows(lake, "ns.o")
    executor = SparkExecutor(spark)
    assert operations.verify(lake, deep=True, executor=executor).findings == ()
    copy = target.root.rstrip("/") + "-copy/"
    operations.plan_export(lake, "x", "full", target=copy, executor=executor).execute()
    assert read_table(spark, lake, "ns.t", "x").count() == 100
    operations.plan_compact_tables(lake).execute(write_groups_on(spark), run_id="once")
    assert operations.plan_orphan_removal(lake, executor=executor).is_empty
    assert not executor.delete(lake.storage, ["unused-1", "unused-2", "unused-3"], None).failures


def _use_data_source(spark: Any, location: StorageLocation) -> None:
    """Read, write and stream with the data source, whose workers have the environment in which Spark was started."""

    def with_options(builder: Any) -> Any:
        builder = builder.format("trinitylake").option("root", location.root)
        for name, value in location.public_options.items():
            builder = builder.option(f"storage.{name}", value)
        return builder

    for table in ("versions", "objects", "files", "changes", "exports"):
        with_options(spark.read).load(table).collect()
    assert with_options(spark.read).option("row_filter", "id < 10").load("ns.t").count() == 10
    with_options(spark.range(5).write).mode("append").save("ns.w")
    stream = with_options(with_options(spark.readStream).load("ns.w").writeStream).option("stream_id", "copy")
    with tempfile.TemporaryDirectory() as folder:
        query = stream.option("checkpointLocation", folder).trigger(availableNow=True).start("ns.c")
        query.awaitTermination()
    frame = with_options(spark.read).load("ns.c")
    frame.explain("extended")
    assert frame.count() == 5


def main(timing: str, event_logs: str) -> None:
    from trinitylake_ops.spark import executor as executor_module
    from trinitylake_ops.spark.session import session_scope

    executor_module.FEW = 0  # run all work in tasks, even for few elements
    location_fields: list[Mapping[str, Any]] = json.load(sys.stdin)
    locations = [StorageLocation(**fields) for fields in location_fields]
    # no storage option sets the HDFS user, so it is not sent to tasks
    configured_before_start = [location for location in locations if timing == "BEFORE" or location.scheme == "hdfs"]
    os.environ.update(
        {name: value for location in configured_before_start for name, value in location.variables.items()}
    )
    conf = {
        "spark.eventLog.enabled": True, "spark.eventLog.compress": False,
        "spark.eventLog.dir": Path(event_logs).as_uri(),
    }  # fmt: skip
    with session_scope("storage locations", "local[1]", **conf) as spark:
        spark.sparkContext.setLogLevel("INFO")
        spark.range(1).collect()
        os.environ.update({name: value for location in locations for name, value in location.variables.items()})
        for number, location in enumerate(locations):
            # With AFTER, the tables of each lakehouse are on the storage of the next one.
            target = location if timing == "BEFORE" else locations[(number + 1) % len(locations)]
            _use_spark_executor(spark, location, target)
            if timing == "BEFORE":
                _use_data_source(spark, location)
            print(location.scheme, "done")
        print(DONE)


def as_json(locations: list[StorageLocation]) -> str:
    """Return the locations as input of this program."""
    return json.dumps([asdict(location) for location in locations])


if __name__ == "__main__":
    main(*sys.argv[1:])
