"""The pipeline, a full export and a purge on a cluster; says what it does, so that workers can be killed meanwhile.

``python -m tests.spark.cluster_program MASTER ROOT TARGET``, storage options as JSON on standard input. The
figures of the local engine's plans, and what was done, come as JSON in the last line.
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


def say(what: str) -> None:
    print(what, flush=True)


def told(kind: str) -> Any:
    return lambda what, done, total: say(f"{kind} {done} of {total}") if what == kind else None


def main(master: str, root: str, target: str) -> None:
    options: dict[str, str] = json.load(sys.stdin)
    executor_module.ROUND_MS, executor_module.SETTLE_MS, executor_module.FEW = 6_000, 1_000, 0
    storage = SlowStorage(open_storage(root, options))
    lake = Lakehouse.create(root, options, storage=storage)
    conf = {
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Workers of one address would read each other's folders, which are hidden from them as on other machines.
        "spark.shuffle.readHostLocalDisk": "false",
    }
    figures: dict[str, Any] = {}
    with session_scope("cluster", master, **conf) as spark:
        executor = SparkExecutor(spark)
        while executor.slots < 2:
            time.sleep(0.1)
        for number in range(ROUNDS):
            frame = spark.range(0, ROWS, 1, 4).selectExpr("id", f"{number} as round")
            staged = stage_dataframe(lake, frame, "ns", "t", mode="append")
            with lake.transaction(message=f"round {number}") as txn:
                publish(txn, [staged])
            say(f"published {number}")
        figures["rows"] = read_table(spark, lake, "ns.t").count()
        say("export begins")
        local = operations.plan_export(lake, "e", "full", target=target, target_options=options)
        plan = operations.plan_export(lake, "e", "full", target=target, target_options=options, executor=executor)
        report = plan.execute(local.digest, progress=told("copied"))
        figures["export"] = [local.digest == plan.digest, local.files, report.copied_files]
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
        say("purge begins")
        done = purge.execute(local_purge.digest, progress=told("deleted"))
        left = {info.path for info in storage.list()} & purge.sizes_bytes.keys()
        figures["purge"] = [local_purge.files, done.files, len(left), done.is_complete, done.stopped]
        figures["findings"] = [finding.code for finding in operations.verify(lake, executor=executor).findings]
    say(json.dumps(figures))


if __name__ == "__main__":
    main(*sys.argv[1:])
