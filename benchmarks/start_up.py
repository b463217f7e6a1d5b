"""CPU seconds that commands of the command line take, and which heavy packages they load.

Run from the project's root: ``.venv/bin/python -m benchmarks.start_up``; it writes ``benchmarks/results/start_up.md``,
and ends with an error where a median is above its bound. Each run is a process of its own, with its bytecode there;
what counts is the CPU time of the whole process, so that others on the machine matter little.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from benchmarks.report import Spread, table, write_result
from trinitylake_ops import Lakehouse
from trinitylake_ops.tables import catalog_at

N_RUNS = 15
N_COMMITS = 20
HEAVY = ("dagster", "jinja2", "obstore", "pandas", "pyarrow", "pydantic", "pyiceberg", "pyspark", "rich", "s3fs")

_PROGRAM = "from trinitylake_ops.cli import main\nmain()"
_LOADED = f"""
import sys
from trinitylake_ops.cli import main
try:
    main()
finally:
    print("LOADED", *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


@dataclass(frozen=True)
class Command:
    """A command, and the CPU seconds that it may take; without a bound it stands there to be compared."""

    words: tuple[str, ...]
    bound_s: float | None


COMMANDS = (
    Command(("--help",), 0.25),
    Command(("log",), 0.5),
    Command(("ls",), 0.5),
    Command(("hint",), 0.5),
    Command(("show", "sales.orders"), None),
    Command(("verify",), None),
)


def child_cpu_s(words: Sequence[str]) -> float:
    """Run a command in a process of its own; return the CPU seconds of all its threads."""
    process = subprocess.Popen([sys.executable, "-c", _PROGRAM, *words], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"trinitylake {' '.join(words)} ended with {process.returncode}")
    return usage.ru_utime + usage.ru_stime


def loaded(words: Sequence[str]) -> str:
    """Return which heavy packages a command loads."""
    ran = subprocess.run([sys.executable, "-c", _LOADED, *words], capture_output=True, text=True, check=True)
    return ", ".join(ran.stderr.rpartition("LOADED")[2].split()) or "none"


def main() -> None:
    """Measure all commands by turns, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        lake = Lakehouse.create(folder, {"fsync": "false"})
        rows = pa.table({"id": [1, 2]})
        catalog = catalog_at(lake)
        catalog.create_namespace("sales")
        orders = catalog.create_table("sales.orders", rows.schema)
        for _ in range(N_COMMITS):
            orders.append(rows)
        run_words = {command: ("--root", folder, *command.words) for command in COMMANDS}
        heavy = {command: loaded(words) for command, words in run_words.items()}  # and the bytecode is there
        found: dict[Command, list[float]] = {command: [] for command in COMMANDS}
        for _ in range(N_RUNS):
            for command, words in run_words.items():
                found[command].append(child_cpu_s(words))
    spreads = {command: Spread.of(values) for command, values in found.items()}
    header = ["`trinitylake`", "bound", "median", "mean", "p99", "heavy packages"]
    cells = [
        [
            f"`{' '.join(command.words)}`",
            "-" if command.bound_s is None else f"{command.bound_s:.2f}",
            *spread.cells(),
            heavy[command],
        ]
        for command, spread in spreads.items()
    ]
    write_result(
        "start_up",
        [
            "# What a command costs before it does anything",
            "",
            f"CPU seconds, user and system, of a process from its start to its end: {N_RUNS} runs of each command, by",
            f"turns, on a lakehouse of {N_COMMITS + 2} versions on local disk. Heavy are {', '.join(HEAVY)}.",
            "",
            *table(header, cells),
        ],
    )
    if over := [c for c, spread in spreads.items() if c.bound_s is not None and spread.median > c.bound_s]:
        sys.exit(f"above its bound: {', '.join(' '.join(command.words) for command in over)}")


if __name__ == "__main__":
    main()
