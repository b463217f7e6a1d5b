"""Measure time, memory and scaling of operations on large lakehouses, with Spark and with threads.

Run from the project's root: ``.venv/bin/python -m benchmarks.spark_scale``. It writes
``benchmarks/results/spark_scale.md`` and ``spark_workers.md``. The operations walk and verify lakehouses on local disk,
and search them for orphans. All definitions of the first version have the same content, and there is one orphan for
every 100 of them. Each operation runs in a separate process, which records the peak memory of the driver and of its
JVM when it ends. The heap of the JVM is limited to 512 MB.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.lakes import REQUEST_SECONDS, change_tables, create_loaded_lake
from benchmarks.report import plot, table, write_result
from benchmarks.scale import run
from tests.spark.cluster import Cluster
from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.format.file_names import new_table_path
from trinitylake_ops.storage import FileInfo, LocalStorage, Storage, StorageWrapper
from trinitylake_ops.tree.search import scan

SIZES = (100_000, 1_000_000)
N_VERSIONS = 1_000
SLOW_SIZE = 100_000
#: Concurrent requests of each worker on slow storage: so few that the time depends on latency, not on the CPU.
SLOW_THREADS = 4
OPERATIONS = ("walk", "orphans", "verify")

_DEFINITION = TableDef(id="00000000-0000-4000-8000-000000000000").to_bytes()
_PAGE_FILES = 1_000
_YEAR_MS = 365 * 24 * 3_600_000

_RUN_JOB = """
import json, time
from benchmarks.spark_scale import run_job
print(json.dumps(run_job(root)))
"""


class LaterStorage(StorageWrapper):
    """A storage whose clock is one year ahead, so that unreachable files are old enough to be orphans.

    With ``is_slow``, each request and each page of a listing takes 20 ms, and only a few requests are concurrent.
    """

    def __init__(self, inner: Storage, *, is_slow: bool = False):
        super().__init__(inner)
        self.concurrency = SLOW_THREADS if is_slow else inner.concurrency
        self._is_slow = is_slow

    def __reduce__(self) -> tuple[Any, ...]:
        return (_later_storage, (self.inner, self._is_slow))

    def now_ms(self) -> int:
        return self.inner.now_ms() + _YEAR_MS

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self._delay()
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def stat(self, path: str) -> FileInfo:
        self._delay()
        return self.inner.stat(path)

    def list(self, prefix: str = "") -> Iterator[FileInfo]:
        for number, info in enumerate(self.inner.list(prefix)):
            if number % _PAGE_FILES == 0:
                self._delay()
            yield info

    def _delay(self) -> None:
        if self._is_slow:
            time.sleep(REQUEST_SECONDS)


def _later_storage(inner: Storage, is_slow: bool) -> LaterStorage:
    return LaterStorage(inner, is_slow=is_slow)


def generate(folder: Path, n_tables: int, n_versions: int) -> None:
    """Create a lakehouse with orphans, a commit of all tables, and commits of one to five random tables."""
    storage = LocalStorage(f"file://{folder}/lake/", fsync=False)
    lake = create_loaded_lake(storage, n_tables)
    snapshot = lake.snapshot()
    paths = [location for _, location in scan(snapshot.files.nodes, snapshot.root) if "-table-" in location]
    paths += [new_table_path("ns", f"orphan{number}", 1024) for number in range(n_tables // 100)]
    for parent in {path.rpartition("/")[0] for path in paths}:
        (folder / "lake" / parent).mkdir(parents=True, exist_ok=True)
    for path in paths:
        (folder / "lake" / path).write_bytes(_DEFINITION)
    generator = random.Random(0)
    while lake.latest_version() < n_versions - 1:
        change_tables(lake, {generator.randrange(n_tables) for _ in range(generator.randint(1, 5))})


def run_job(job_json: str) -> dict[str, Any]:
    """Run one operation in this process.

    Args:
        job_json: A JSON object with the folder, the operation, the Spark master and whether the storage is slow.
    """
    from trinitylake_ops import operations
    from trinitylake_ops.operations.base import uncached
    from trinitylake_ops.operations.executor import LOCAL
    from trinitylake_ops.operations.gc.mark import Mark
    from trinitylake_ops.operations.gc.survey import survey_versions
    from trinitylake_ops.spark.executor import SparkExecutor
    from trinitylake_ops.spark.runtime.task_jobs import run_in_tasks
    from trinitylake_ops.spark.session import session_scope

    job = json.loads(job_json)
    folder = job["folder"]
    inner = LocalStorage(f"file://{folder}/lake/", fsync=False)
    lake = Lakehouse(LaterStorage(inner, is_slow=job["is_slow"]))

    def run_with(executor: Any) -> dict[str, Any]:
        started = time.perf_counter()
        if job["operation"] == "walk":
            mark = Mark(survey_versions(uncached(lake), executor=executor))
            result: Any = len(mark.catalog.nodes) + len(mark.catalog.tables) + len(mark.catalog.others)
        elif job["operation"] == "orphans":
            plan = operations.plan_orphan_removal(lake, executor=executor)
            result = sum(plan.files.values())
        else:
            report = operations.verify(lake, executor=executor)
            result = [report.nodes, report.definitions, report.orphan_files, len(report.findings)]
        return {"seconds": time.perf_counter() - started, "result": result}

    if job["master"] is None:
        return run_with(LOCAL)
    conf = {
        "spark.driver.memory": "512m",
        "spark.executor.memory": "512m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
    }
    with session_scope("benchmark", job["master"], **conf) as spark:
        executor = SparkExecutor(spark)
        while executor.slots < job["slots"]:
            time.sleep(0.1)
        run_in_tasks(spark, "start Python", _start_worker, [b""] * 4 * job["slots"], 4 * job["slots"])
        return {**run_with(executor), "jvm_mb": _peak_mb(spark.sparkContext._gateway.proc.pid)}


def _peak_mb(pid: int) -> float:
    """Return the peak memory of a process in MB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1_024 / 1e6


def _start_worker(elements: Iterator[bytes]) -> Iterator[bytes]:
    time.sleep(0.2)
    return elements


def measure(
    folder: Path, operation: str, master: str | None, slots: int = 0, *, is_slow: bool = False
) -> dict[str, Any]:
    """Run one operation in a new process.

    Args:
        folder: The folder of the lakehouse.
        operation: The operation.
        master: The Spark master, or None for threads.
        slots: The number of Spark task slots to wait for.
        is_slow: Whether the storage is slow.

    Returns:
        The seconds, the peak memory in MB, and a summary of the result.
    """
    job = {"folder": str(folder), "operation": operation, "master": master, "slots": slots, "is_slow": is_slow}
    output, _, memory_mb = run(_RUN_JOB, json.dumps(job))
    result = {**json.loads(output.splitlines()[-1]), "memory_mb": memory_mb}
    print(operation, master, is_slow, result, flush=True)
    return result


def sizes(folder: Path, counts: Sequence[int]) -> list[str]:
    """Measure all operations with both engines on lakehouses of several sizes."""
    rows: list[list[str]] = []
    seconds: dict[tuple[str, int], tuple[float, float]] = {}
    for n_tables in counts:
        size_folder = folder / str(n_tables)
        size_folder.mkdir()
        started = time.perf_counter()
        generate(size_folder, n_tables, N_VERSIONS)
        print(f"{n_tables:,} created in {time.perf_counter() - started:.0f} s", flush=True)
        for operation in OPERATIONS:
            spark = measure(size_folder, operation, "local[2]", 2)
            local = measure(size_folder, operation, None)
            assert spark["result"] == local["result"], (spark, local)
            seconds[operation, n_tables] = (local["seconds"], spark["seconds"])
            cells = [f"{measurement['seconds']:.1f}" for measurement in (local, spark)]
            cells += [f"{measurement['memory_mb']:.0f}" for measurement in (local, spark)]
            cells += [f"{spark['jvm_mb']:.0f}"]
            rows.append([operation, f"{n_tables:,}", *cells])
    small, large = min(counts), max(counts)
    ratios = [
        (name, *(f"{seconds[name, large][engine] / seconds[name, small][engine]:.1f}" for engine in (0, 1)))
        for name in OPERATIONS
    ]

    def draw(axes: Sequence[Axes]) -> None:
        for axis, name in zip(axes, OPERATIONS, strict=True):
            for engine, label in enumerate(("threads", "Spark, 2 tasks")):
                axis.plot(counts, [seconds[name, count][engine] for count in counts], "o-", label=label)
            axis.set(title=name, xlabel="objects", ylabel="seconds", xscale="log", yscale="log")
            axis.legend()

    return [
        f"## {', '.join(f'{count:,}' for count in counts)} objects with {N_VERSIONS:,} versions, local disk",
        "",
        *table(
            [
                "operation",
                "objects",
                "threads, s",
                "Spark, s",
                "threads, peak MB",
                "Spark's driver, peak MB",
                "its JVM, peak MB",
            ],
            rows,
        ),
        "",
        f"Seconds for {large:,} objects as a multiple of those for {small:,}:",
        "",
        *table(["operation", "threads", "Spark"], ratios),
        "",
        plot("spark_scale", draw, len(OPERATIONS), 4.0),
    ]


def workers(folder: Path, numbers: Sequence[int]) -> list[str]:
    """Measure verify on slow storage with standalone workers that run one task each."""
    slow_folder = folder / "slow"
    slow_folder.mkdir()
    generate(slow_folder, SLOW_SIZE, N_VERSIONS)
    local = measure(slow_folder, "verify", None, is_slow=True)
    seconds = []
    for number in numbers:
        logs = folder / f"cluster-{number}"
        logs.mkdir()
        cluster = Cluster(logs)
        try:
            cluster.start(number)
            result = measure(slow_folder, "verify", cluster.url, number, is_slow=True)
        finally:
            cluster.stop()
        assert result["result"] == local["result"], (result, local)
        seconds.append(result["seconds"])
    rows = [("threads of one process", f"{local['seconds']:.1f}", "")]
    rows += [
        (f"Spark, {number} workers", f"{elapsed_s:.1f}", f"{seconds[0] / elapsed_s:.1f}")
        for number, elapsed_s in zip(numbers, seconds, strict=True)
    ]

    def draw(axes: Sequence[Axes]) -> None:
        axes[0].plot(numbers, [seconds[0] / elapsed_s for elapsed_s in seconds], "o-", label="measured")
        axes[0].plot(numbers, numbers, ":", label="ideal")
        axes[0].set(title="verify, 20 ms per request", xlabel="workers with one task", ylabel="speedup")
        axes[0].legend()

    return [
        f"## Verify of {SLOW_SIZE:,} objects with {N_VERSIONS:,} versions, 20 ms per request",
        "",
        f"A standalone master; each worker has one task with {SLOW_THREADS} threads, as has the local engine here.",
        "",
        *table(["engine", "seconds", "speedup over one worker"], rows),
        "",
        plot("spark_workers", draw),
    ]


def main() -> None:
    """Generate, measure, print and write the results."""
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=["sizes", "workers"], nargs="*", default=["sizes", "workers"])
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--workers", type=int, nargs="+", default=(1, 2, 4))
    options = parser.parse_args()
    parts = {"sizes": (sizes, options.sizes, "spark_scale"), "workers": (workers, options.workers, "spark_workers")}
    for part in options.part:
        measure_part, counts, name = parts[part]
        with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
            lines = ["# Operations with Spark", "", "Generated by `benchmarks/spark_scale.py` on 2 cores.", ""]
            write_result(name, [*lines, *measure_part(Path(folder), counts)])


if __name__ == "__main__":
    main()
