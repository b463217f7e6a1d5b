"""Where the time of a commit, a list and a lookup goes, by py-spy, a sampling profiler.

Run from the project's root: ``.venv/bin/python -m benchmarks.profiles``; it writes ``benchmarks/results/profiles.md``.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from benchmarks.report import table, write_result
from benchmarks.workload import N_TABLES, WORKS

N_SECONDS = 15
_LOOP = "repeated (workload.py"
_FRAME = re.compile(r"(.*) \((.*?)(?::\d+)?\)")


def stacks(work: str) -> Counter[tuple[str, ...]]:
    """Run a piece of work under py-spy; returns how often each stack below its loop was met, outermost frame first."""
    py_spy = Path(sys.executable).with_name("py-spy")
    with tempfile.NamedTemporaryFile("r") as output:
        command = [py_spy, "record", "--rate", "500", "--format", "raw", "--output", output.name, "--"]
        command += [sys.executable, "-m", "benchmarks.workload", work, str(N_SECONDS)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        found: Counter[tuple[str, ...]] = Counter()
        for line in output:
            stack, _, count = line.rpartition(" ")
            frames = stack.split(";")
            loop = next((place for place, frame in enumerate(frames) if frame.startswith(_LOOP)), None)
            if loop is not None:
                found[tuple(_FRAME.sub(r"\2: \1", frame) for frame in frames[loop + 1 :])] += int(count)
    return found


def tables(work: str) -> list[str]:
    """Return a profile: the functions of the package with most time, and the files that spend it themselves."""
    found = stacks(work)
    total = found.total()
    inside: Counter[str] = Counter()
    itself: Counter[str] = Counter()
    for frames, count in found.items():
        inside.update({frame: count for frame in set(frames) if frame.startswith("trinitylake_ops/")})
        itself[frames[-1].partition(":")[0] if frames else "the loop"] += count
    return [
        f"## {work}",
        "",
        f"{WORKS[work].__doc__ or ''} {total:,} samples.".strip(),
        "",
        *table(
            ["function", "% of the time, with what it calls"],
            ([f"`{frame}`", f"{100 * count / total:.1f}"] for frame, count in inside.most_common(25)),
        ),
        "",
        *table(
            ["file", "% of the time, without what it calls"],
            ([f"`{file}`", f"{100 * count / total:.1f}"] for file, count in itself.most_common(12)),
        ),
        "",
    ]


def main() -> None:
    """Measure, print and write the results."""
    lines = [
        "# Profiles",
        "",
        f"Made by `benchmarks/profiles.py` with py-spy, 500 samples a second for {N_SECONDS} seconds of each piece of"
        f" work; {N_TABLES:,} tables on local disk without fsync. What other threads do meanwhile is not counted.",
        "",
    ]
    for work in WORKS:
        lines += tables(work)
    write_result("profiles", lines[:-1])


if __name__ == "__main__":
    main()
