"""Compare the times of this tree with those of an earlier revision. Both trees run in alternating turns.

Run from the project's root: ``.venv/bin/python -m benchmarks.against REVISION``. It writes
``benchmarks/results/against.md``. Each tree runs in a separate process, with the same libraries. A synced commit is
also compared with the creation of one synced file.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.report import seconds, table, write_result
from benchmarks.times import create_synced

N_TABLES = 10_000
N_LISTED = 100_000
N_TURNS = 40
N_COMMITS = 20  # per turn
N_LISTS = 9

#: A program that reads one line per turn, runs the turn, and prints the milliseconds of each call and the CPU
#: milliseconds per call.
_WORKER = """
import json, random, statistics, sys, time
from benchmarks.lakes import change_tables, filled
from trinitylake_ops import Lakehouse
from trinitylake_ops.storage import LocalStorage
folder, n_tables, n_listed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
lakes = {}
for name, fsync in (("unsynced", False), ("synced", True)):
    filled(LocalStorage(f"file://{folder}/{name}/", fsync=False), n_tables)
    lakes[name] = Lakehouse(LocalStorage(f"file://{folder}/{name}/", fsync=fsync))
    for _ in range(200):
        change_tables(lakes[name], [random.randrange(n_tables)])
filled(LocalStorage(f"file://{folder}/listed/", fsync=False), n_listed)
def run(operation):
    if operation == "list":
        lake = Lakehouse(LocalStorage(f"file://{folder}/listed/", fsync=False), cache="off")
        assert len(lake.snapshot().tables("ns")) == n_listed
    else:
        change_tables(lakes[operation], [random.randrange(n_tables)])
print("ready", flush=True)
for line in sys.stdin:
    operation, n = json.loads(line)
    times_ms, cpu = [], time.process_time()
    for _ in range(n):
        started = time.perf_counter()
        run(operation)
        times_ms.append(1000 * (time.perf_counter() - started))
    print(json.dumps([times_ms, 1000 * (time.process_time() - cpu) / n]), flush=True)
"""


class Tree:
    """A process that runs the code of one tree."""

    def __init__(self, code: Path, folder: Path):
        command = [sys.executable, "-c", _WORKER, str(folder), str(N_TABLES), str(N_LISTED)]
        environment = {**os.environ, "PYTHONPATH": str(code)}
        self._process = subprocess.Popen(
            command, cwd=code, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._read_line() == "ready"
        self.ms: dict[str, list[float]] = {}
        self.cpu_ms: dict[str, list[float]] = {}

    def _read_line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process exited with code {self._process.wait()}; its error is above")
        return line.strip()

    def run_turn(self, operation: str, n_calls: int) -> None:
        """Run an operation a number of times."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([operation, n_calls]) + "\n")
        self._process.stdin.flush()
        times_ms, cpu_ms = json.loads(self._read_line())
        self.ms.setdefault(operation, []).extend(times_ms)
        self.cpu_ms.setdefault(operation, []).append(cpu_ms)

    def median_ms(self, operation: str) -> float:
        """Return the median milliseconds of a call."""
        return median(self.ms[operation])

    def median_cpu_ms(self, operation: str) -> float:
        """Return the median over the turns of the CPU milliseconds per call."""
        return median(self.cpu_ms[operation])

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Check out a revision and yield its folder."""
    checkout = folder / "earlier"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(checkout), revision], check=True)
    try:
        yield checkout
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(checkout)], check=True)


def measure(earlier: Tree, current: Tree, folder: Path) -> list[list[str]]:
    """Run both trees in turns. Return rows with the times of the earlier and the current tree, and their ratio."""
    create_ms = []
    for turn in range(N_TURNS):
        for operation in ("unsynced", "synced"):
            for tree in (earlier, current) if turn % 2 else (current, earlier):
                tree.run_turn(operation, N_COMMITS)
        for number in range(N_COMMITS):
            create = partial(create_synced, folder / f"{turn}-{number}", random.randbytes(3_000))
            create_ms.append(1000 * seconds(create))
    for turn in range(N_LISTS):
        for tree in (earlier, current) if turn % 2 else (current, earlier):
            tree.run_turn("list", 1)
    rows = []
    for operation, description in (
        ("unsynced", f"commit among {N_TABLES:,} tables"),
        ("synced", "the same, synced"),
        ("list", f"cold list of {N_LISTED:,} tables"),
    ):
        for suffix, metric in (("", Tree.median_ms), (", CPU", Tree.median_cpu_ms)):
            before, after = metric(earlier, operation), metric(current, operation)
            rows.append([f"{description}{suffix}", f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"])
    bare, synced = median(create_ms), median(current.ms["synced"])
    rows.append(
        ["one 3 kB file, created and synced", "", f"{bare:.2f}", f"a synced commit takes {synced / bare:.2f} x"]
    )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("revision", help="an earlier commit of this repository")
    options = parser.parse_args(arguments)
    revision = subprocess.run(
        ["git", "log", "-1", "--format=%h, %s", options.revision], check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        code = stack.enter_context(checked_out(options.revision, folder))
        trees = [Tree(checkout, folder / name) for checkout, name in ((code, "before"), (Path.cwd(), "after"))]
        for tree in trees:
            stack.callback(tree.end)
        (folder / "bare").mkdir()
        rows = measure(trees[0], trees[1], folder / "bare")
    write_result(
        "against",
        [
            "# Compared with an earlier revision",
            "",
            f"Generated by `benchmarks/against.py` against {revision}. Medians in milliseconds,",
            "in turns, on local disk.",
            "",
            *table(["operation", "before", "now", "now / before"], rows),
        ],
    )


if __name__ == "__main__":
    main()
