"""Run a pipeline, a full export and a purge on a cluster.

``python -m tests.spark.cluster_program MASTER ROOT TARGET``, with storage options as JSON on standard input. The
program prints its progress, so that a test can kill workers at certain steps. The last line of the output is a JSON
document with the results, including the results of planning with the local engine.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from tests.operations.aging import LONG_MS, keeping
from tests.spark.slow_storage import SlowStorage
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.spark import executor as executor_module
from trinitylake_ops.spark.executor import SparkExecutor
from trinitylake_ops.spark.session import session_scope
from trinitylake_ops.spark.tables.reader import read_table
from trinitylake_ops.spark.tables.writer import stage_dataframe
from trinitylake_ops.storage import open_storage

ROUNDS = 12
ROWS = 1_000


def report_line(line: str) -> None:
    print(line, flush=True)


def progress_printer(kind: str) -> Any:
    return lambda step, done, total: report_line(f"{kind} {done} of {total}") if step == kind else None


def main(master: str, root: str, target: str) -> None:
    options: dict[str, str] = json.load(sys.stdin)
    executor_module.ROUND_MS, executor_module.SETTLE_MS, executor_module.FEW = 6_000, 1_000, 0
    storage = SlowStorage(open_storage(root, options))
    lake = Lakehouse.create(root, options, storage=storage)
    conf = {
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # All workers have the same address, but they cannot read each other's folders, as on separate machines.
        "spark.shuffle.readHostLocalDisk": "false",
    }
    results: dict[str, Any] = {}
    with session_scope("cluster", master, **conf) as spark:
        executor = SparkExecutor(spark)
        while executor.slots < 2:
            time.sleep(0.1)
        for number in range(ROUNDS):
            frame = spark.range(0, ROWS, 1, 4).selectExpr("id", f"{number} as round")
            staged = stage_dataframe(lake, frame, "ns", "t", mode="append")
            with lake.transaction(message=f"round {number}") as txn:
                publish(txn, [staged])
            report_line(f"published {number}")
        results["rows"] = read_table(spark, lake, "ns.t").count()
        report_line("export begins")
        local = operations.plan_export(lake, "e", "full", target=target, target_options=options)
        plan = operations.plan_export(lake, "e", "full", target=target, target_options=options, executor=executor)
        report = plan.execute(local.digest, progress=progress_printer("copied"))
        results["export"] = [local.digest == plan.digest, local.files, report.copied_files]
        operations.drop_export(lake, "e")
        frame = spark.range(1).selectExpr("id", "0 as round")
        staged = stage_dataframe(lake, frame, "ns", "t", mode="replace_table")
        with lake.transaction() as txn:
            publish(txn, [staged])
        operations.plan_trim_tables(lake, keeping(1)).execute()
        storage.ahead_ms = LONG_MS
        operations.plan_expiration(lake, keeping(1), executor=executor).execute()
        storage.ahead_ms = 2 * LONG_MS
        local_purge = operations.plan_purge(lake)
        purge = operations.plan_purge(lake, executor=executor)
        while local_purge.digest != purge.digest and purge.now_ms - local_purge.now_ms < 60_000:
            local_purge = local_purge.operation.plan_at(lake.snapshot(), purge.now_ms)
        report_line("purge begins")
        report = purge.execute(local_purge.digest, progress=progress_printer("deleted"))
        remaining = {info.path for info in storage.list()} & purge.sizes_bytes.keys()
        results["purge"] = [local_purge.files, report.files, len(remaining), report.is_complete, report.stopped]
        results["findings"] = [finding.code for finding in operations.verify(lake, executor=executor).findings]
    report_line(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
