"""Measure the CPU seconds of commands, and list the heavy packages that they load.

Run from the project's root: ``.venv/bin/python -m benchmarks.start_up``. It writes ``benchmarks/results/start_up.md``
and fails if a median exceeds its bound. Each run is a new process with compiled bytecode. The benchmark measures the
CPU time of the whole process, because CPU time hardly depends on other load on the machine.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from benchmarks.report import Spread, table, write_result
from tests.environments import make_environment
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg import catalog_at

N_RUNS = 15
N_COMMITS = 20
CORE = "core"
HEAVY = ("dagster", "jinja2", "obstore", "pandas", "pyarrow", "pydantic", "pyiceberg", "pyspark", "rich", "s3fs")

_PROGRAM = "from trinitylake_ops.cli import main\nmain()"
_PRINT_LOADED = f"""
import sys
from trinitylake_ops.cli import main
try:
    main()
finally:
    print("LOADED", *[name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""


@dataclass(frozen=True)
class Command:
    """A command and the upper bound of its CPU seconds. A command without a bound serves as a comparison."""

    arguments: tuple[str, ...]
    bound_s: float | None


COMMANDS = (
    Command(("--help",), 0.25),
    Command(("log",), 0.5),
    Command(("ls",), 0.5),
    Command(("hint",), 0.5),
    Command(("show", "sales.orders"), None),
    Command(("verify",), None),
)


@dataclass(frozen=True)
class Installation:
    """A Python environment with this package, and a working folder without other modules."""

    name: str
    python: str
    folder: str

    def cpu_s(self, arguments: Sequence[str]) -> float:
        """Run a command in a new process and return the CPU seconds of all its threads."""
        process = subprocess.Popen(
            [self.python, "-c", _PROGRAM, *arguments], stdout=subprocess.DEVNULL, cwd=self.folder
        )
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"trinitylake {' '.join(arguments)} exited with code {process.returncode}")
        return usage.ru_utime + usage.ru_stime

    def heavy_packages(self, arguments: Sequence[str]) -> str:
        """Return the heavy packages that a command loads."""
        command = [self.python, "-c", _PRINT_LOADED, *arguments]
        process = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder)
        return ", ".join(process.stderr.rpartition("LOADED")[2].split()) or "none"


def create_lake(folder: str) -> str:
    """Create a lakehouse with some versions and return its root."""
    lake = Lakehouse.create(f"{folder}/lake", {"fsync": "false"})
    rows = pa.table({"id": [1, 2]})
    catalog = catalog_at(lake)
    catalog.create_namespace("sales")
    orders = catalog.create_table("sales.orders", rows.schema)
    for _ in range(N_COMMITS):
        orders.append(rows)
    return lake.root


def main() -> None:
    """Measure all commands in turns in both environments, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        root = create_lake(folder)
        core = make_environment(Path(folder) / "core")
        installations = (
            Installation(CORE, str(core.folder / "bin" / "python"), folder),
            Installation("all", sys.executable, folder),
        )
        cases = [(installation, command) for installation in installations for command in COMMANDS]
        arguments = {command: ("--root", root, *command.arguments) for command in COMMANDS}
        # These runs also compile the bytecode.
        heavy = {
            (installation, command): installation.heavy_packages(arguments[command]) for installation, command in cases
        }
        cpu_s_by_case: dict[tuple[Installation, Command], list[float]] = {case: [] for case in cases}
        for _ in range(N_RUNS):
            for installation, command in cases:
                cpu_s_by_case[installation, command].append(installation.cpu_s(arguments[command]))
    spreads = {case: Spread.of(values) for case, values in cpu_s_by_case.items()}
    bounds = {case: case[1].bound_s if case[0].name == CORE else None for case in cases}
    cells = [
        [
            f"`{' '.join(command.arguments)}`",
            installation.name,
            "-" if (bound_s := bounds[installation, command]) is None else f"{bound_s:.2f}",
            *spread.cells(),
            heavy[installation, command],
        ]
        for (installation, command), spread in spreads.items()
    ]
    write_result(
        "start_up",
        [
            "# Startup cost of commands",
            "",
            f"User and system CPU seconds of a whole process: {N_RUNS} runs of each command, in turns, on a lakehouse",
            f"of {N_COMMITS + 2} versions on local disk. Heavy packages are {', '.join(HEAVY)}.",
            "The bounds apply to `core`, a fresh environment with the core alone. `all` is the environment of",
            "`make setup`, which contains numpy, so that pyarrow loads it.",
            "",
            *table(["`trinitylake`", "installed", "bound", "median", "mean", "p99", "heavy packages"], cells),
        ],
    )
    over = [case for case, bound_s in bounds.items() if bound_s is not None and spreads[case].median > bound_s]
    if over:
        sys.exit(f"above the bound: {', '.join(' '.join(command.arguments) for _, command in over)}")


if __name__ == "__main__":
    main()
