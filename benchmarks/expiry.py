"""Measure storage requests and times of reclaiming space: planning an expiration, and deleting files.

Run from the project's root: ``.venv/bin/python -m benchmarks.expiry``. It starts a radosgw (packages in
``deploy/debian-packages.txt``) and writes ``benchmarks/results/expiry.md``. The number of requests does not depend on
the machine. Of the times, only the ratios within one run are meaningful.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

from benchmarks.lakes import LaterStorage, change_tables, filled
from benchmarks.report import table, write_result
from benchmarks.s3 import radosgw
from benchmarks.scale import N_TABLES, N_VERSIONS, generate, run
from tests.servers.s3_server import S3Server
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import StorageError
from trinitylake_ops.format.file_names import new_node_path
from trinitylake_ops.operations.gc.delete import delete_files
from trinitylake_ops.storage import LocalStorage, Storage, StorageWrapper, open_storage
from trinitylake_ops.storage.retry import RetryStorage

N_FILES = 20_000
N_TURNS = 5
N_ORPHANS = 5_000
N_SMALL, N_RECLAIMED, N_RECLAIM_TURNS = 10_000, 1_000, 3

#: A program that plans an expiration a year after the last commit, and prints its results and requests.
_PLAN = """
import json
from benchmarks.lakes import LaterStorage
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.operations.gc.mark import CatalogReach
from trinitylake_ops.operations.gc.survey import survey_versions
from trinitylake_ops.storage import LocalStorage, MeteredStorage
meter = MeteredStorage(LaterStorage(LocalStorage(root)))
lake = Lakehouse(meter, cache="off")
policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
plan = operations.plan_expiration(lake, policy)
counts = meter.snapshot()
kept = CatalogReach(Lakehouse(LocalStorage(root)).files)
survey = survey_versions(Lakehouse(LocalStorage(root)))
kept.add([survey.roots[survey.base.version]])
print(json.dumps({
    "versions": len([verdict for verdict in plan.verdicts if verdict.expires]), "kept_nodes": len(kept.nodes) + 1,
    "reads": counts.requests["read"], "requests": counts.total, "rounds": counts.rounds, "files": dict(plan.files),
    "bytes_read": counts.bytes_read,
}))
"""


def measure_planning(folder: str) -> list[str]:
    """Measure the plan that expires all versions except the latest."""
    root = f"file://{folder}/lake/"
    generate(root)
    output, seconds, peak_mb = run(_PLAN, root)
    result = json.loads(output)
    other_reads = (result["reads"] - result["kept_nodes"]) / result["versions"]
    return [
        f"## Planning the expiration of {result['versions']:,} versions among {N_TABLES:,} tables",
        "",
        *table(
            ["metric", "value"],
            [
                ("reads", f"{result['reads']:,}"),
                ("of these, for nodes of the kept version", f"{result['kept_nodes']:,}"),
                ("other reads per expiring version", f"{other_reads:.2f}"),
                ("requests of all kinds", f"{result['requests']:,}"),
                ("round trips", f"{result['rounds']:,}"),
                ("MB read", f"{result['bytes_read'] / 1e6:.1f}"),
                ("peak memory of the process, MB", f"{peak_mb:.0f}"),
                ("seconds", f"{seconds:.1f}"),
                *((f"files to delete: {kind}", f"{number:,}") for kind, number in result["files"].items()),
            ],
        ),
    ]


def _create_files(storage: Storage) -> dict[str, int]:
    sizes_bytes = {new_node_path(): 1_000 for _ in range(N_FILES)}
    for path, size in sizes_bytes.items():
        storage.create(path, b"x" * size)
    return sizes_bytes


def _delete_by_rm(folder: Path, sizes_bytes: Mapping[str, int]) -> float:
    names = "\0".join(str(folder / path) for path in sizes_bytes).encode()
    started = time.perf_counter()
    subprocess.run(["xargs", "-0", "rm"], input=names, check=True)
    return time.perf_counter() - started


def _delete_by_us(folder: Path, sizes_bytes: Mapping[str, int]) -> float:
    storage = RetryStorage(LocalStorage(f"file://{folder}/", fsync=False))
    started = time.perf_counter()
    deletion = delete_files(storage, sizes_bytes)
    assert deletion.files == N_FILES
    return time.perf_counter() - started


def _ratios(folder: Path, *, is_synced: bool) -> Iterator[float]:
    """Yield ratios of our seconds to those of ``rm``, for files with the same names and sizes, in alternating order."""
    removals: list[Callable[[Path, Mapping[str, int]], float]] = [_delete_by_rm, _delete_by_us]
    for turn in range(N_TURNS):
        seconds = {}
        for number, remove in enumerate(removals if turn % 2 else reversed(removals)):
            turn_folder = folder / f"{is_synced}-{turn}-{number}"
            sizes_bytes = _create_files(LocalStorage(f"file://{turn_folder}/", fsync=False))
            if is_synced:
                os.sync()
            seconds[remove] = remove(turn_folder, dict(sorted(sizes_bytes.items())))
        yield seconds[_delete_by_us] / seconds[_delete_by_rm]


def measure_local_deletion(folder: str) -> list[str]:
    """Compare deletion with ``rm``, for files that are on the disk and for those that are only in the page cache."""
    rows = []
    for name, is_synced in (("files that were just written", False), ("files that are on the disk", True)):
        ratios = sorted(_ratios(Path(folder), is_synced=is_synced))
        rows.append((name, f"{median(ratios):.2f}", f"{ratios[0]:.2f}", f"{ratios[-1]:.2f}"))
    return [
        "## Deleting on local disk",
        "",
        f"{N_FILES:,} files of 1,000 bytes in the folders of nodes, deleted by us and by `rm`, {N_TURNS} turns each:"
        " our time divided by that of `rm`.",
        "",
        *table(["files", "median", "min", "max"], rows),
    ]


class OperationRecorder(StorageWrapper):
    """Records file operations, so that they can be repeated with system calls alone."""

    def __init__(self, inner: Storage):
        super().__init__(inner)
        self.recorded: list[tuple[str, str, bytes]] = []

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        self.recorded.append(("read", path, b""))
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    def create(self, path: str, data: bytes) -> None:
        self.recorded.append(("write", path, data))
        self.inner.create(path, data)

    def write(self, path: str, data: bytes) -> None:
        self.recorded.append(("write", path, data))
        self.inner.write(path, data)

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        self.recorded.extend(("delete", path, b"") for path in paths)
        return self.inner.delete_batch(paths)


def _repeat_by_calls(folder: Path, recorded: Sequence[tuple[str, str, bytes]]) -> float:
    """Return the seconds of the same reads, writes and deletes in one thread, without decoding or checks."""
    started = time.perf_counter()
    for kind, path, data in recorded:
        target = folder / path
        if kind == "delete":
            target.unlink(missing_ok=True)
        elif kind == "read":
            with suppress(FileNotFoundError):
                target.read_bytes()
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            temporary = target.with_name(f"{target.name}.new")
            temporary.write_bytes(data)
            temporary.replace(target)
    return time.perf_counter() - started


def _reclaim(folder: Path) -> tuple[list[float], float, Counter[str]]:
    """Reclaim all versions except the latest.

    Returns:
        The seconds of each step, the seconds of the file operations alone, and the number of operations by kind.
    """
    local = LocalStorage(f"file://{folder}/", fsync=False)
    lake = filled(local, N_SMALL)
    for number in range(N_RECLAIMED):
        change_tables(lake, [number % N_SMALL])
    copy = folder.with_name(f"{folder.name}-copy")
    shutil.copytree(folder, copy)
    recorder = OperationRecorder(local)
    policy = operations.RetentionPolicy(maximum_age_ms=0, minimum_versions=1, protected_ms=0)
    marks = [time.perf_counter()]
    expiration = operations.plan_expiration(Lakehouse(LaterStorage(recorder, 1)), policy)
    marks.append(time.perf_counter())
    expiration.execute()
    marks.append(time.perf_counter())
    purge = operations.plan_purge(Lakehouse(LaterStorage(recorder, 2)))
    marks.append(time.perf_counter())
    purge.execute()
    marks.append(time.perf_counter())
    numbers = Counter(kind for kind, _, _ in recorder.recorded)
    return [end - begin for begin, end in pairwise(marks)], _repeat_by_calls(copy, recorder.recorded), numbers


def measure_reclaim(folder: str) -> list[str]:
    """Measure the four steps that reclaim versions, and their file operations alone."""
    turns = [_reclaim(Path(folder) / f"turn-{turn}") for turn in range(N_RECLAIM_TURNS)]
    steps = [median(seconds[step] for seconds, _, _ in turns) for step in range(4)]
    by_calls, numbers = median(calls for _, calls, _ in turns), turns[0][2]
    names = ("plan the expiration", "execute it", "plan the purge", "execute it")
    rows = [(name, f"{1000 * seconds:.0f}") for name, seconds in zip(names, steps, strict=True)]
    rows += [("all four", f"{1000 * sum(steps):.0f}"), ("the file operations alone", f"{1000 * by_calls:.0f}")]
    return [
        f"## Reclaiming {N_RECLAIMED:,} versions",
        "",
        f"Commits of one table each among {N_SMALL:,}, unsynced, medians of {N_RECLAIM_TURNS} turns. The four steps"
        f" need {numbers['read']:,} reads, {numbers['write']:,} writes, most of them sealed roots, and"
        f" {numbers['delete']:,} deletes. The last row repeats these with system calls alone.",
        "",
        *table(["step", "ms"], rows),
    ]


def count_s3_deletion() -> list[str]:
    """Count the requests of an orphan removal on radosgw."""
    with radosgw() as server:
        return _delete_orphans(server)


def _delete_orphans(server: S3Server) -> list[str]:
    storage = open_storage(server.fresh_root("expiry"), server.storage_options)
    filled(storage, 100)
    storage.create_many({new_node_path(): b"x" for _ in range(N_ORPHANS)})
    report = operations.plan_orphan_removal(Lakehouse(LaterStorage(storage))).execute()
    assert report.files == N_ORPHANS
    return [
        "## Deleting on S3",
        "",
        f"Removing {N_ORPHANS:,} orphans on radosgw: {report.cost.requests['delete']} requests delete them,"
        f" {report.cost.total_requests} requests in all.",
    ]


def main() -> None:
    """Measure, print and write the results."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        sections = [
            measure_planning(folder),
            measure_reclaim(folder),
            measure_local_deletion(folder),
            count_s3_deletion(),
        ]
    lines = [
        "# Reclaiming space",
        "",
        f"Generated by `benchmarks/expiry.py`; the lakehouse has {N_VERSIONS:,} versions.",
    ]
    for section in sections:
        lines += ["", *section]
    write_result("expiry", lines)


if __name__ == "__main__":
    main()
