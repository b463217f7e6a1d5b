"""Times of this tree beside those of an earlier revision, by turns in one run.

Run from the project's root: ``.venv/bin/python -m benchmarks.against REVISION``; it writes
``benchmarks/results/against.md``. Both run in processes of their own, with the same libraries. Beside a synced commit
stands one file that is created and synced.
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
N_COMMITS = 20  # in a turn
N_LISTS = 9

#: Reads a line for each turn, does it and answers the milliseconds of each call, and of the CPU.
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
def one(what):
    if what == "list":
        lake = Lakehouse(LocalStorage(f"file://{folder}/listed/", fsync=False), cache="off")
        assert len(lake.snapshot().tables("ns")) == n_listed
    else:
        change_tables(lakes[what], [random.randrange(n_tables)])
print("ready", flush=True)
for line in sys.stdin:
    what, n = json.loads(line)
    took, cpu = [], time.process_time()
    for _ in range(n):
        begun = time.perf_counter()
        one(what)
        took.append(1000 * (time.perf_counter() - begun))
    print(json.dumps([took, 1000 * (time.process_time() - cpu) / n]), flush=True)
"""


class Tree:
    """A process that works with the code of one tree."""

    def __init__(self, code: Path, folder: Path):
        command = [sys.executable, "-c", _WORKER, str(folder), str(N_TABLES), str(N_LISTED)]
        environment = {**os.environ, "PYTHONPATH": str(code)}
        self._process = subprocess.Popen(
            command, cwd=code, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._answer() == "ready"
        self.ms: dict[str, list[float]] = {}
        self.cpu_ms: dict[str, list[float]] = {}

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with {self._process.wait()}; its error is above")
        return line.strip()

    def turn(self, what: str, n: int) -> None:
        """Do something so many times."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([what, n]) + "\n")
        self._process.stdin.flush()
        took, cpu = json.loads(self._answer())
        self.ms.setdefault(what, []).extend(took)
        self.cpu_ms.setdefault(what, []).append(cpu)

    def ms_of(self, what: str) -> float:
        """Return the median milliseconds of a call."""
        return median(self.ms[what])

    def cpu_of(self, what: str) -> float:
        """Return the median of the turns' milliseconds of CPU a call."""
        return median(self.cpu_ms[what])

    def end(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """Yield a folder with the tree of a revision."""
    place = folder / "earlier"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), revision], check=True)
    try:
        yield place
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(place)], check=True)


def measured(earlier: Tree, now: Tree, folder: Path) -> list[list[str]]:
    """Let both work by turns; returns a row for each piece of work, the earlier tree, this one, and their ratio."""
    created_ms = []
    for turn in range(N_TURNS):
        for what in ("unsynced", "synced"):
            for tree in (earlier, now) if turn % 2 else (now, earlier):
                tree.turn(what, N_COMMITS)
        for number in range(N_COMMITS):
            create = partial(create_synced, folder / f"{turn}-{number}", random.randbytes(3_000))
            created_ms.append(1000 * seconds(create))
    for turn in range(N_LISTS):
        for tree in (earlier, now) if turn % 2 else (now, earlier):
            tree.turn("list", 1)
    rows = []
    for what, shown in (
        ("unsynced", f"a commit among {N_TABLES:,} tables"),
        ("synced", "the same, synced"),
        ("list", f"a cold list of {N_LISTED:,} tables"),
    ):
        for kind, of in (("", Tree.ms_of), (", CPU", Tree.cpu_of)):
            before, after = of(earlier, what), of(now, what)
            rows.append([f"{shown}{kind}", f"{before:.2f}", f"{after:.2f}", f"{after / before:.2f}"])
    bare, synced = median(created_ms), median(now.ms["synced"])
    rows.append(
        ["one file of 3 kB, created and synced", "", f"{bare:.2f}", f"a synced commit takes {synced / bare:.2f} x"]
    )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description="Times beside a revision's.")
    parser.add_argument("revision", help="an earlier commit of this repository")
    given = parser.parse_args(arguments)
    described = subprocess.run(
        ["git", "log", "-1", "--format=%h, %s", given.revision], check=True, capture_output=True, text=True
    ).stdout.strip()
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as temporary, ExitStack() as stack:
        folder = Path(temporary)
        code = stack.enter_context(checked_out(given.revision, folder))
        trees = [Tree(place, folder / name) for place, name in ((code, "before"), (Path.cwd(), "after"))]
        for tree in trees:
            stack.callback(tree.end)
        (folder / "bare").mkdir()
        rows = measured(trees[0], trees[1], folder / "bare")
    write_result(
        "against",
        [
            "# Beside an earlier revision",
            "",
            f"Made by `benchmarks/against.py` against {described}. Medians in milliseconds, by turns, on local disk.",
            "",
            *table(["work", "before", "now", "now / before"], rows),
        ],
    )


if __name__ == "__main__":
    main()
