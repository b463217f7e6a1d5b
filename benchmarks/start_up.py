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


@dataclass(frozen=True)
class Place:
    """A Python with this package, and a folder from which nothing else is imported."""

    name: str
    python: str
    folder: str

    def cpu_s(self, words: Sequence[str]) -> float:
        """Run a command in a process of its own; return the CPU seconds of all its threads."""
        process = subprocess.Popen([self.python, "-c", _PROGRAM, *words], stdout=subprocess.DEVNULL, cwd=self.folder)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise RuntimeError(f"trinitylake {' '.join(words)} ended with {process.returncode}")
        return usage.ru_utime + usage.ru_stime

    def loaded(self, words: Sequence[str]) -> str:
        """Return which heavy packages a command loads."""
        command = [self.python, "-c", _LOADED, *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=self.folder)
        return ", ".join(ran.stderr.rpartition("LOADED")[2].split()) or "none"


def made(folder: str) -> str:
    """Make a lakehouse of some versions; returns its root."""
    lake = Lakehouse.create(f"{folder}/lake", {"fsync": "false"})
    rows = pa.table({"id": [1, 2]})
    catalog = catalog_at(lake)
    catalog.create_namespace("sales")
    orders = catalog.create_table("sales.orders", rows.schema)
    for _ in range(N_COMMITS):
        orders.append(rows)
    return lake.root


def main() -> None:
    """Measure all commands by turns in both places, and write the result."""
    with tempfile.TemporaryDirectory() as folder:
        root = made(folder)
        core = make_environment(Path(folder) / "core")
        places = (Place(CORE, str(core.folder / "bin" / "python"), folder), Place("all", sys.executable, folder))
        cases = [(place, command) for place in places for command in COMMANDS]
        words = {command: ("--root", root, *command.words) for command in COMMANDS}
        heavy = {(place, command): place.loaded(words[command]) for place, command in cases}  # and bytecode is there
        found: dict[tuple[Place, Command], list[float]] = {case: [] for case in cases}
        for _ in range(N_RUNS):
            for place, command in cases:
                found[place, command].append(place.cpu_s(words[command]))
    spreads = {case: Spread.of(values) for case, values in found.items()}
    bounds = {case: case[1].bound_s if case[0].name == CORE else None for case in cases}
    cells = [
        [
            f"`{' '.join(command.words)}`",
            place.name,
            "-" if (bound_s := bounds[place, command]) is None else f"{bound_s:.2f}",
            *spread.cells(),
            heavy[place, command],
        ]
        for (place, command), spread in spreads.items()
    ]
    write_result(
        "start_up",
        [
            "# What a command costs before it does anything",
            "",
            f"CPU seconds, user and system, of a process from its start to its end: {N_RUNS} runs of each command, by",
            f"turns, on a lakehouse of {N_COMMITS + 2} versions on local disk. Heavy are {', '.join(HEAVY)}.",
            "`core` is a fresh environment with the core alone, for which the bounds are. `all` is that of",
            "`make setup`, where numpy is installed, which pyarrow then loads.",
            "",
            *table(["`trinitylake`", "installed", "bound", "median", "mean", "p99", "heavy packages"], cells),
        ],
    )
    over = [case for case, bound_s in bounds.items() if bound_s is not None and spreads[case].median > bound_s]
    if over:
        sys.exit(f"above its bound: {', '.join(' '.join(command.words) for _, command in over)}")


if __name__ == "__main__":
    main()
