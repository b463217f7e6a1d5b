"""Use a session of Spark Connect: ``python -m tests.spark_deployments.connect_program REMOTE FOLDER STEP``.

The last line of the output is a JSON document with the results.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql import SparkSession

from tests.clock import AgingStorage
from tests.lakes import listed
from tests.operations.aging import Aging, grow, keeping
from tests.operations.changes import append_rows, overwrite_rows
from trinitylake_ops import Lakehouse
from trinitylake_ops import operations as maintenance
from trinitylake_ops.errors import FileMissingError, TrinityLakeError
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.operations.executor import LOCAL
from trinitylake_ops.spark import executor as executor_module
from trinitylake_ops.spark.executor import SparkExecutor
from trinitylake_ops.spark.executor_tasks import DeletesDone, FencedDeletes, delete_parts
from trinitylake_ops.spark.runtime.task_jobs import PIECE_BYTES, run_in_tasks
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.spark.source.data_source import read_metadata
from trinitylake_ops.spark.sql import create_views, register_table_functions
from trinitylake_ops.spark.tables.pipeline_run import PipelineRun
from trinitylake_ops.spark.tables.reader import read_table
from trinitylake_ops.spark.tables.writer import write_groups_on
from trinitylake_ops.storage import open_storage

OPTIONS = {"fsync": "false"}
#: A value that is sent to tasks like credentials and must not appear anywhere else.
SECRET = b"a secret of a storage"


def operations(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Plan each operation with both engines, and execute it with Spark."""
    executor_module.FEW = 0
    aging = Aging.on(open_storage(f"file://{folder}/lake/", OPTIONS))
    grow(aging, 5)
    append_rows(aging.lake, "n0.rows")
    overwrite_rows(aging.lake, "n0.rows", "n1.rows")
    aging.lake.storage.create(new_node_path(), b"left behind")
    aging.later()
    lake, spark_tasks = aging.lake, SparkExecutor(spark, requests_per_second=5_000)
    reports = [maintenance.verify(lake, deep=True, executor=executor).to_dict() for executor in (LOCAL, spark_tasks)]
    for report in reports:
        report.pop("cost")
    results: dict[str, Any] = {
        "slots": spark_tasks.slots,
        "verify": [reports[0] == reports[1], reports[1]["orphan_files"]],
    }
    target = f"file://{folder}/copy/"
    exports = [
        maintenance.plan_export(lake, "e", "full", target=target, target_options=OPTIONS, executor=executor)
        for executor in (LOCAL, spark_tasks)
    ]
    copied = exports[1].execute(exports[0].digest).copied_files
    results["export"] = [copied, maintenance.verify(Lakehouse.open(target, OPTIONS), deep=True).is_clean]
    maintenance.plan_expiration(lake, keeping(2), executor=spark_tasks).execute()
    for name, plan in (("purge", maintenance.plan_purge), ("orphans", maintenance.plan_orphan_removal)):
        aging.later()
        local, remote = plan(lake), plan(lake, executor=spark_tasks)
        report = remote.execute(local.digest)
        planned = local.files if isinstance(local.files, int) else sum(local.files.values())
        results[name] = [planned, report.files, report.is_complete]
    results["findings"] = len(maintenance.verify(lake).findings)
    return results


def frames(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Run a pipeline, and read its table with each reader, with views and the data source, and after a compaction."""
    lake = Lakehouse.create(f"file://{folder}/frames/", OPTIONS)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    for number in range(2):
        run = PipelineRun(spark, lake, run_id=f"run {number}")
        rows = spark.range(100).selectExpr(f"id + {100 * number} AS id", "id % 2 AS half")
        run.write(rows, "ns", "t", mode="append", partition_by=("half",))
        run.publish()
    results: dict[str, Any] = {
        "Spark's reader": read_table(spark, lake, "ns.t").count(),
        "our reader": read_table(spark, lake, "ns.t", row_filter="id >= 150", columns=["id"]).count(),
        "at a version": read_table(spark, lake, "ns.t", 2, row_filter="id >= 0").count(),
        "metadata": read_metadata(spark, lake, "versions").count(),
        "source": spark.read.format("trinitylake").option("root", lake.root).load("ns.t").count(),
    }
    create_views(spark, lake, tables=["ns.t"])
    results["views"] = spark.sql(
        "SELECT (SELECT count(*) FROM ns_t), (SELECT count(*) FROM trinitylake_files WHERE kind = 'data')"
    ).collect()[0][0:2]
    plan = maintenance.plan_compact_tables(lake, min_input_files=2)
    results["compacted"] = [table.files_after for table in plan.execute(write_groups_on(spark)).tables]
    results["after"] = read_table(spark, lake, "ns.t").count()
    return results


def streams(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Use SQL functions, and writes and streams of the data source, which take longer on a server."""
    lake = Lakehouse.create(f"file://{folder}/streams/", OPTIONS)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    source = {"root": lake.root}
    spark.range(50).write.format("trinitylake").options(**source).mode("append").save("ns.t")
    register_table_functions(spark)
    count = spark.sql(f"SELECT count(*) FROM trinitylake_table('{lake.root}', 'ns.t')").collect()[0][0]
    rows = spark.readStream.format("trinitylake").options(**source).load("ns.t")
    stream = rows.writeStream.format("trinitylake").options(**source).option("stream_id", "copy")
    stream = stream.option("checkpointLocation", f"{folder}/checkpoint").trigger(availableNow=True)
    stream.start("ns.copy").awaitTermination(120)
    return {"function": count, "stream": read_table(spark, lake, "ns.copy").count()}


def jobs(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Run jobs with results of any size, with failing tasks and with repeated tasks."""
    lengths = [3 * PIECE_BYTES + 1, 0, PIECE_BYTES, 5]
    contents = run_in_tasks(
        spark, "return bytes", partial(_return_bytes, SECRET), [str(length).encode() for length in lengths], 4
    )
    results: dict[str, Any] = {"lengths": [len(content) for content in contents] == lengths, "errors": []}
    for task in (_raise_missing_file, _raise_lookup_error):
        try:
            run_in_tasks(spark, "read", task, [b"", b""], 2)
        except TrinityLakeError as error:
            results["errors"].append([type(error).__name__, str(error)])
    attempts = run_in_tasks(spark, "crash once", _return_attempts, [str(folder / "crashed").encode()], 1)
    results["attempts"] = [int(attempt) for attempt in attempts]
    storage = open_storage(f"file://{folder}/deletes/", OPTIONS)
    storage.create("a", b"")
    now_ms = storage.now_ms()
    deletes = pickle.dumps(FencedDeletes(AgingStorage(storage, now_ms), None, now_ms, now_ms + 60_000))
    element = pickle.dumps([str(folder / "crashed again"), deletes])
    (row,) = run_in_tasks(spark, "delete", _delete_after_crash, [element], 1)
    repeated: DeletesDone = pickle.loads(row)
    results["deletes"] = [repeated.is_repeated, list(repeated.held_back), sorted(listed(storage))]
    return results


def write_for_a_minute(spark: SparkSession, folder: Path) -> dict[str, Any]:
    """Write to a file in a task for one minute."""
    run_in_tasks(spark, "write slowly", _write_slowly, [str(folder / "written").encode()], 1)
    return {}


def _return_bytes(secret: bytes, elements: Iterator[bytes]) -> Iterator[bytes]:
    assert len(secret) > 20
    for element in elements:
        yield b"x" * int(element)


def _raise_missing_file(elements: Iterator[bytes]) -> Iterator[bytes]:
    for _ in elements:
        raise FileMissingError("it was deleted", path="a/b")
    yield b""


def _raise_lookup_error(elements: Iterator[bytes]) -> Iterator[bytes]:
    for _ in elements:
        raise LookupError("no such thing")
    yield b""


def _crash_once(marker: bytes | str) -> int:
    """Crash the worker in the first attempt, and return the number of the second one."""
    context = TaskContext.get()
    assert context is not None
    if not os.path.exists(marker):
        open(marker, "x").close()
        os._exit(1)
    return context.attemptNumber()


def _return_attempts(elements: Iterator[bytes]) -> Iterator[bytes]:
    for element in elements:
        yield str(_crash_once(element)).encode()


def _delete_after_crash(elements: Iterator[bytes]) -> Iterator[bytes]:
    for element in elements:
        marker, deletes = pickle.loads(element)
        _crash_once(marker)
        yield from delete_parts(deletes, iter([pickle.dumps(["a"])]))


def _write_slowly(elements: Iterator[bytes]) -> Iterator[bytes]:
    for element in elements:
        with open(element, "wb", buffering=0) as file:
            for _ in range(600):
                file.write(b"x")
                time.sleep(0.1)
        yield b""


STEPS = {step.__name__: step for step in (operations, frames, streams, jobs, write_for_a_minute)}


def main(remote: str, folder: str, *steps: str) -> None:
    results: dict[str, Any] = {}
    with session_scope(remote=remote) as spark:
        for step in steps:
            started_s = time.monotonic()
            results[step] = STEPS[step](spark, Path(folder))
            results[f"{step} seconds"] = round(time.monotonic() - started_s, 1)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
