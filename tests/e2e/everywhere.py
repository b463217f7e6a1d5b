"""The storages beside local folders and S3, each as its users set it up: options that are seen, variables that are not.

``python -m tests.e2e.everywhere BEFORE|AFTER EVENT_LOG_FOLDER`` uses Spark on all places that come as JSON on standard
input. In BEFORE their variables are set when Spark starts, in AFTER in the driver's process alone, but for HDFS.
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
#: And S3 and Valkey, for what has no need of an environment of its own.
ALL_KINDS = (*KINDS, "valkey_server", "radosgw")
ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})
MORE = pa.table({"id": pa.array([4], pa.int64())})
DONE = "all was tried"


@dataclass(frozen=True)
class Place:
    """A root on a server.

    ``shown`` are the options that anybody may see, ``variables`` what the environment says. ``wrong`` are variables
    with which nobody gets in, with a part of the error, and ``missing`` is a root in something that is not there.
    """

    root: str
    shown: dict[str, str]
    variables: dict[str, str]
    hidden: dict[str, str]
    wrong: dict[str, str]
    refusal: str
    missing: str

    @property
    def scheme(self) -> str:
        return self.root.partition("://")[0]

    @property
    def named(self) -> dict[str, str]:
        """All options, credentials among them, by their names with the scheme."""
        return {f"{self.scheme}.{name}": value for name, value in {**self.shown, **self.hidden}.items()}

    @property
    def environment(self) -> dict[str, str]:
        """The whole environment of a command."""
        options = ",".join(f"{name}={value}" for name, value in self.shown.items())
        return {"TRINITYLAKE_ROOT": self.root, "TRINITYLAKE_STORAGE_OPTIONS": options, **self.variables}


def place_on(server: Server, name: str = "lake") -> Place:
    """Return a fresh root on a server, as its users set it up."""
    root = server.fresh_root(name)
    if isinstance(server, AzureServer):
        shown = {"endpoint": server.endpoint, "account_name": server.account_name}
        key = "AZURE_STORAGE_ACCOUNT_KEY"
        hidden = {"account_key": server.account_key}
        return Place(root, shown, {key: server.account_key}, hidden, {key: "AAAA"}, "not allowed", "az://nosuch/x/")
    if isinstance(server, GcsServer):
        variables = {"STORAGE_EMULATOR_HOST": server.endpoint}
        wrong = {"STORAGE_EMULATOR_HOST": "", "GOOGLE_APPLICATION_CREDENTIALS": "/nobody"}
        hidden = {"credentials": "anonymous"}
        shown = {"endpoint": server.endpoint}
        return Place(root, {}, variables, {**shown, **hidden}, wrong, "no token", "gs://nosuch/x/")
    if isinstance(server, DynamoDBServer):
        shown = {"endpoint": server.endpoint}
        variables = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID, "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY, "AWS_REGION": REGION,
        }  # fmt: skip
        hidden = {"access_key_id": ACCESS_KEY_ID, "secret_access_key": SECRET_ACCESS_KEY, "region": REGION}
        wrong = {"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true"}
        return Place(root, shown, variables, hidden, wrong, "Unable to locate credentials", "dynamodb://nosuch/x/")
    if isinstance(server, HdfsServer):
        user = "HADOOP_USER_NAME"
        return Place(root, {}, {user: SUPERUSER}, {}, {user: "stranger"}, "denied", "hdfs://127.0.0.1:9/x/")
    if isinstance(server, S3Server):
        shown = {"endpoint": server.endpoint, "region": server.region}
        hidden = {"access_key_id": server.access_key_id, "secret_access_key": server.secret_access_key}
        return Place(root, shown, {}, hidden, {}, "not allowed", "s3://nosuch/x/")
    shown, wrong = {"durability": "always"}, {"REDIS_USERNAME": "nobody", "REDIS_PASSWORD": "nobody"}
    missing = root.replace("/0/", "/99/")
    return Place(root, shown, {}, {}, wrong, "the user or the password is wrong", missing)


@contextmanager
def with_variables(*places: Place) -> Iterator[pytest.MonkeyPatch]:
    """Set the variables of places while the block runs."""
    with pytest.MonkeyPatch.context() as patch:
        for place in places:
            for name, value in place.variables.items():
                patch.setenv(name, value)
        yield patch


def rows(lake: Lakehouse, version: int | str | None = None) -> list[int]:
    """Return what the table ``ns.t`` holds."""
    with catalog_at(lake, version) as catalog:
        return sorted(catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist())


def use_tables(lake: Lakehouse) -> None:
    """Create a table, append to it, write it anew and read it; rows 1, 2, 3 and 4 stay."""
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        catalog.create_table("ns.t", ROWS.schema).append(MORE)
        assert rows(lake) == [4]
        catalog.load_table("ns.t").overwrite(ROWS)
        assert rows(lake) == [1, 2, 3]
        catalog.load_table("ns.t").append(MORE)
    assert rows(lake) == [1, 2, 3, 4]
    assert operations.verify(lake, deep=True).findings == ()


def _use_executor(spark: Any, place: Place, target: Place) -> None:
    """Stage, read, and let operations work in tasks; no option names a credential."""
    from tests.operations.changes import overwrite_rows
    from trinitylake_ops.iceberg.write.staging import publish
    from trinitylake_ops.spark import read_metadata, read_table, stage_dataframe, write_groups_on
    from trinitylake_ops.spark.executor import SparkExecutor

    options = {**place.shown, **{f"{target.scheme}.{name}": value for name, value in target.shown.items()}}
    lake = Lakehouse.create(place.root, options, table_root="" if target == place else target.root)
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
    assert not executor.delete(lake.storage, ["nobody", "needs", "these"], None).failures


def _use_source(spark: Any, place: Place) -> None:
    """Read, write and stream by the data source, whose helpers have the environment that Spark had when it started."""

    def configured(on: Any) -> Any:
        on = on.format("trinitylake").option("root", place.root)
        for name, value in place.shown.items():
            on = on.option(f"storage.{name}", value)
        return on

    for table in ("versions", "objects", "files", "changes", "exports"):
        configured(spark.read).load(table).collect()
    assert configured(spark.read).option("row_filter", "id < 10").load("ns.t").count() == 10
    configured(spark.range(5).write).mode("append").save("ns.w")
    stream = configured(configured(spark.readStream).load("ns.w").writeStream).option("stream_id", "copy")
    with tempfile.TemporaryDirectory() as folder:
        query = stream.option("checkpointLocation", folder).trigger(availableNow=True).start("ns.c")
        query.awaitTermination()
    frame = configured(spark.read).load("ns.c")
    frame.explain("extended")
    assert frame.count() == 5


def main(when: str, event_logs: str) -> None:
    from trinitylake_ops.spark import executor as executor_module
    from trinitylake_ops.spark.session import session_scope

    executor_module.FEW = 0  # tasks do everything, however little it is
    given: list[Mapping[str, Any]] = json.load(sys.stdin)
    places = [Place(**one) for one in given]
    # no option holds a user of HDFS, so nothing sends it to tasks
    early = [place for place in places if when == "BEFORE" or place.scheme == "hdfs"]
    os.environ.update({name: value for place in early for name, value in place.variables.items()})
    conf = {
        "spark.eventLog.enabled": True, "spark.eventLog.compress": False,
        "spark.eventLog.dir": Path(event_logs).as_uri(),
    }  # fmt: skip
    with session_scope("everywhere", "local[1]", **conf) as spark:
        spark.sparkContext.setLogLevel("INFO")
        spark.range(1).collect()
        os.environ.update({name: value for place in places for name, value in place.variables.items()})
        for number, place in enumerate(places):
            # After the start each catalog has its tables on the storage of the next one.
            target = place if when == "BEFORE" else places[(number + 1) % len(places)]
            _use_executor(spark, place, target)
            if when == "BEFORE":
                _use_source(spark, place)
            print(place.scheme, "done")
        print(DONE)


def as_json(places: list[Place]) -> str:
    """Return places as the program takes them."""
    return json.dumps([asdict(place) for place in places])


if __name__ == "__main__":
    main(*sys.argv[1:])
