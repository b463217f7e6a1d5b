"""Profiles of a commit, a list and a lookup, taken with py-spy, a sampling profiler.

Run from the project's root: ``.venv/bin/python -m benchmarks.profiles``. It writes ``benchmarks/results/profiles.md``.
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
    """Run a kind of work under py-spy. Return the number of samples by stack below its loop, outermost frame first."""
    py_spy = Path(sys.executable).with_name("py-spy")
    with tempfile.NamedTemporaryFile("r") as output:
        command = [py_spy, "record", "--rate", "500", "--format", "raw", "--output", output.name, "--"]
        command += [sys.executable, "-m", "benchmarks.workload", work, str(N_SECONDS)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        samples: Counter[tuple[str, ...]] = Counter()
        for line in output:
            stack, _, count = line.rpartition(" ")
            frames = stack.split(";")
            loop = next((index for index, frame in enumerate(frames) if frame.startswith(_LOOP)), None)
            if loop is not None:
                samples[tuple(_FRAME.sub(r"\2: \1", frame) for frame in frames[loop + 1 :])] += int(count)
    return samples


def tables(work: str) -> list[str]:
    """Return a profile: the functions of the package by cumulative time, and the files by own time."""
    samples = stacks(work)
    total = samples.total()
    cumulative: Counter[str] = Counter()
    own: Counter[str] = Counter()
    for frames, count in samples.items():
        cumulative.update({frame: count for frame in set(frames) if frame.startswith("trinitylake_ops/")})
        own[frames[-1].partition(":")[0] if frames else "the loop"] += count
    return [
        f"## {work}",
        "",
        f"{WORKS[work].__doc__ or ''} {total:,} samples.".strip(),
        "",
        *table(
            ["function", "% of time, including callees"],
            ([f"`{frame}`", f"{100 * count / total:.1f}"] for frame, count in cumulative.most_common(25)),
        ),
        "",
        *table(
            ["file", "% of time, excluding callees"],
            ([f"`{file}`", f"{100 * count / total:.1f}"] for file, count in own.most_common(12)),
        ),
        "",
    ]


def main() -> None:
    """Measure, print and write the results."""
    lines = [
        "# Profiles",
        "",
        f"Made by `benchmarks/profiles.py` with py-spy, 500 samples per second for {N_SECONDS} seconds of each kind of"
        f" work; {N_TABLES:,} tables on local disk without fsync. Other threads are not counted.",
        "",
    ]
    for work in WORKS:
        lines += tables(work)
    write_result("profiles", lines[:-1])


if __name__ == "__main__":
    main()
