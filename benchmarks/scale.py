"""Verify and scan a lakehouse of 100,000 tables and 1,000 versions on local disk.

Run from the project's root: ``.venv/bin/python -m benchmarks.scale``. It writes ``benchmarks/results/scale.md``. Each
kind of work runs in a separate process, whose peak memory is read when it ends.
"""

from __future__ import annotations

import json
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
#: Code that runs before each kind of work: it writes the peak memory of the process to a file at exit.
_MEASURED = """
import atexit, re, sys
from pathlib import Path
_, peak_file, root = sys.argv
def note_peak():
    status = Path("/proc/self/status").read_text()
    Path(peak_file).write_text(re.search(r"VmHWM:\\s+(\\d+)", status).group(1))
atexit.register(note_peak)
"""
_OPEN = """
from trinitylake_ops import Lakehouse
print(Lakehouse.open(root).latest_version())
"""
_SCAN = """
from trinitylake_ops import Lakehouse
from trinitylake_ops.tree.search import scan
snapshot = Lakehouse.open(root).snapshot()
print(len(scan(snapshot.files.nodes, snapshot.root)))
"""
_VERIFY = """
from trinitylake_ops.cli import main
sys.argv[1:] = ["--root", root, "verify", "--json"]
main()
"""


def generate(root: str) -> None:
    """Create the lakehouse: one commit of all tables, then commits of one to five random ones."""
    lake = filled(LocalStorage(root, fsync=False), N_TABLES)
    generator = random.Random(0)
    while lake.latest_version() < N_VERSIONS - 1:
        change_tables(lake, {generator.randrange(N_TABLES) for _ in range(generator.randint(1, 5))})


def run(code: str, root: str) -> tuple[str, float, float]:
    """Run Python code on a lakehouse in a new process. Return its output, its seconds and its peak memory in MB."""
    with tempfile.NamedTemporaryFile("r") as peak:
        started = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", _MEASURED + code, peak.name, root], stdout=subprocess.PIPE, text=True, check=True
        )
        return done.stdout, time.perf_counter() - started, 1.024 * int(peak.read()) / 1000


def main() -> None:
    """Generate, measure, print and write the results."""
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as folder:
        root = f"file://{folder}/lake/"
        started = time.perf_counter()
        generate(root)
        print(f"{N_TABLES:,} tables and {N_VERSIONS:,} versions in {time.perf_counter() - started:.0f} s", flush=True)
        n_files = sum(path.is_file() for path in Path(folder).rglob("*"))
        opened, verified, scanned = run(_OPEN, root), run(_VERIFY, root), run(_SCAN, root)
    report = json.loads(verified[0])
    severities = [finding["severity"] for finding in report["findings"]]
    works = {"open": opened, "scan the whole latest version": scanned, "verify": verified}
    write_result(
        "scale",
        [
            "# A large lakehouse",
            "",
            f"Made by `benchmarks/scale.py`: {N_TABLES:,} tables, {N_VERSIONS:,} versions, {n_files:,} files on local"
            " disk; each kind of work in a separate process.",
            "",
            *table(
                ["work", "peak memory, MB", "seconds"],
                ([work, f"{memory_mb:.0f}", f"{spent:.1f}"] for work, (_, spent, memory_mb) in works.items()),
            ),
            "",
            f"The scan returned {int(scanned[0]):,} keys. Verify checked {report['versions']:,} versions,"
            f" {report['nodes']:,} nodes and {report['definitions']:,} definitions:"
            f" {severities.count('error')} errors, {severities.count('warning')} warnings.",
        ],
    )


if __name__ == "__main__":
    main()
