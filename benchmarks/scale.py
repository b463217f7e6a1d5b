"""A lakehouse of 100,000 tables and 1,000 versions on local disk: verify it, and scan it whole.

Run from the project's root: ``.venv/bin/python -m benchmarks.scale``; it writes ``benchmarks/results/scale.md``. Each
piece of work runs in a process of its own, whose peak memory is read when it ends.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.lakes import change_tables, filled
from benchmarks.report import table, write_result
from trinitylake_ops.storage import LocalStorage

N_TABLES = 100_000
N_VERSIONS = 1_000
_SCAN = """
import sys
from trinitylake_ops import Lakehouse
from trinitylake_ops.tree.search import scan
snapshot = Lakehouse.open(sys.argv[1]).snapshot()
print(len(scan(snapshot.files.nodes, snapshot.root)))
"""
_OPEN = """
import sys
from trinitylake_ops import Lakehouse
print(Lakehouse.open(sys.argv[1]).latest_version())
"""


def generate(root: str) -> None:
    """Make the lakehouse: one commit of all tables, then commits of one to five random ones."""
    lake = filled(LocalStorage(root, fsync=False), N_TABLES)
    generator = random.Random(0)
    while lake.latest_version() < N_VERSIONS - 1:
        change_tables(lake, {generator.randrange(N_TABLES) for _ in range(generator.randint(1, 5))})


def run(*arguments: str) -> tuple[str, float, float]:
    """Run a process; returns what it printed, its seconds, and its peak memory in MB."""
    begun = time.perf_counter()
    with tempfile.TemporaryFile("w+") as output:
        process = subprocess.Popen([sys.executable, *arguments], stdout=output)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        output.seek(0)
        printed = output.read()
    if process.returncode:
        raise SystemExit(f"{' '.join(arguments[:3])} ended with {process.returncode}: {printed}")
    return printed, time.perf_counter() - begun, usage.ru_maxrss / 1000


def main() -> None:
    """Generate, measure, print and write the results."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        root = f"file://{folder}/lake/"
        begun = time.perf_counter()
        generate(root)
        print(f"{N_TABLES:,} tables and {N_VERSIONS:,} versions in {time.perf_counter() - begun:.0f} s", flush=True)
        n_files = sum(path.is_file() for path in Path(folder).rglob("*"))
        opened = run("-c", _OPEN, root)
        verified = run("-m", "trinitylake_ops.cli", "--root", root, "verify", "--json")
        scanned = run("-c", _SCAN, root)
    report = json.loads(verified[0])
    works = {"open it": opened, "scan the latest version whole": scanned, "verify": verified}
    write_result(
        "scale",
        [
            "# A large lakehouse",
            "",
            f"Made by `benchmarks/scale.py`: {N_TABLES:,} tables, {N_VERSIONS:,} versions, {n_files:,} files on local"
            " disk; each piece of work in a process of its own.",
            "",
            *table(
                ["work", "peak memory, MB", "seconds"],
                ([work, f"{memory_mb:.0f}", f"{spent:.1f}"] for work, (_, spent, memory_mb) in works.items()),
            ),
            "",
            f"The scan returned {int(scanned[0]):,} keys. Verify looked at {report['versions']:,} versions,"
            f" {report['nodes']:,} nodes and {report['definitions']:,} definitions:"
            f" {'clean' if report['is_clean'] else 'NOT CLEAN'}, {len(report['findings'])} findings.",
        ],
    )


if __name__ == "__main__":
    main()
