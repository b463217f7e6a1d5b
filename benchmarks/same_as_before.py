"""Whether this tree does what an earlier revision did: the same steps in both, compared field by field, byte by byte.

Run from the project's root: ``.venv/bin/python -m benchmarks.same_as_before REVISION...``; it writes
``benchmarks/results/same_as_before.md``. Each tree does some 1,000 steps on local lakehouses at the same place, with
the same clock, uuids and random numbers: every command with and without ``--json``, and what goes wrong with it.
Compared are exit codes, JSON, digests, the figures in texts, each file that was written, requests and rounds, and
the figures of the trees' own ``benchmarks/request_counts.py``. Words may differ: they are shown apart. The exit code
is 1 where anything else differs that is not among the reasoned differences of `benchmarks/sameness/reasons.py`.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.report import table, write_result
from benchmarks.sameness.compare import (
    PARTS,
    WORDS,
    Comparison,
    Difference,
    compare_counts,
    compare_files,
    compare_steps,
    joined,
    short_diff,
)
from benchmarks.sameness.reasons import REASONS, Reason, reason_for
from benchmarks.sameness.steps import steps

HERE = Path(__file__).resolve().parents[1]
_DRIVER = HERE / "benchmarks" / "sameness" / "driver.py"
#: Sizes of `request_counts` that take seconds.
_COUNT_SETTINGS: Mapping[str, object] = {
    "TABLE_COUNTS": [100, 7_000],
    "N_COMMITS": 150,
    "N_SETTLING": 500,
    "N_DIFFS": 40,
    "N_WARM": 40,
}
_MOST_WORDS_SHOWN = 12


@contextmanager
def work_tree(revision: str, folder: Path) -> Iterator[Path]:
    """Check a revision out beside this tree, for a block. Raises CalledProcessError where there is none."""
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=HERE, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True)


def noted(tree: Path, folder: Path) -> dict[str, Any]:
    """Do all steps, and count requests, by the package of a tree; returns what came of it.

    Lakehouses stand at the same place for all trees, as their files hold it. Raises CalledProcessError where a
    step breaks off.
    """
    lakes = folder / "lakes"
    shutil.rmtree(lakes, ignore_errors=True)
    lakes.mkdir()
    done = run_driver(tree, folder, {"kind": "scenario", "folder": str(lakes), "steps": steps(lakes)})
    counts = run_driver(tree, folder, {"kind": "counts", "settings": _COUNT_SETTINGS})
    return {"steps": done, "files": checksums(lakes), "counts": counts}


def run_driver(tree: Path, folder: Path, job: Mapping[str, object]) -> Any:
    """Let a process of its own do a job by a tree's package, in this environment of Python; returns its result."""
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    (out / "job.json").write_text(json.dumps({**job, "tree": str(tree), "out": str(out)}), encoding="utf-8")
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": str(tree),
        "PYTHONHASHSEED": "0",
        "HOME": str(folder),
        "TZ": "UTC",
        "LC_ALL": "C.UTF-8",
        "COLUMNS": "110",
        "PYICEBERG_MAX_WORKERS": "1",
    }
    command = [sys.executable, "-P", str(_DRIVER), str(out / "job.json")]
    subprocess.run(command, env=environment, cwd=folder, check=True)
    return json.loads((out / "result.json").read_text(encoding="utf-8"))


def checksums(folder: Path) -> dict[str, str]:
    """Return the checksums of all files below a folder by their paths, without those of another catalog."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "outside" not in path.relative_to(folder).parts[:1]
    }


def compared(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare what two trees noted."""
    return joined(
        [
            compare_steps(before["steps"], after["steps"]),
            compare_files(before["files"], after["files"]),
            compare_counts(before["counts"], after["counts"]),
        ]
    )


def unreasoned(differences: Sequence[Difference], reasons: Sequence[Reason] = REASONS) -> list[Difference]:
    """Return the differences, other than words, that no reason names."""
    return [one for one in differences if one.part != WORDS and reason_for(one, reasons) is None]


def report(revision: str, found: Comparison) -> Iterator[str]:
    """Give the lines that say what was compared with a revision, and what differs."""
    without_reason = unreasoned(found.differences)
    yield from ("", f"## Compared with {revision}", "")
    yield from table(["part", "equal", "different", "of these with a reason"], part_rows(found, without_reason))
    verdict = f"**{len(without_reason):,} differ without a reason.**" if without_reason else "**Nothing else differs.**"
    yield from ("", verdict)
    for difference in without_reason:
        yield from ("", f"- `{difference}`", *indented(short_diff(difference)))
    used = {reason.why: reason for one in found.differences if (reason := reason_for(one, REASONS)) is not None}
    if used:
        yield from (
            "",
            "Reasons:",
            "",
            *(f"- {reason.field} of `{reason.command}`: {why}" for why, reason in used.items()),
        )
    words = [difference for difference in found.differences if difference.part == WORDS]
    if words:
        yield from ("", f"Words, the first {_MOST_WORDS_SHOWN} of {len(words):,} texts:")
    for difference in words[:_MOST_WORDS_SHOWN]:
        yield from ("", f"- `{difference.what}`", *indented(short_diff(difference)))


def part_rows(found: Comparison, without_reason: Sequence[Difference]) -> list[list[object]]:
    """Return how many of each part are equal, differ, and differ for a reason."""
    rows: list[list[object]] = []
    for part in PARTS:
        n_different = sum(one.part == part for one in found.differences)
        n_reasoned = n_different - sum(one.part == part for one in without_reason)
        rows.append([part, f"{found.equal[part]:,}", n_different, "-" if part == WORDS else n_reasoned])
    return rows


def indented(lines: Sequence[str]) -> list[str]:
    """Return lines as a block of code within a list."""
    return ["", *(f"      {line}" for line in lines)] if lines else []


def main() -> int:
    """Compare with each revision, print and write the result; returns the exit code."""
    if len(sys.argv) < 2:
        print("give the revisions to compare with", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="same-as-before-"))
    try:
        now = noted(HERE, folder)
        comparisons = {}
        for revision in sys.argv[1:]:
            with work_tree(revision, folder) as tree:
                comparisons[revision] = compared(noted(tree, folder), now)
    finally:
        shutil.rmtree(folder)
    n_steps, n_commands = len(now["steps"]), sum(step["deed"] == "command" for step in now["steps"])
    n_written = sum(len(step["written"]) for step in now["steps"])
    write_result(
        "same_as_before",
        [
            "# The same as before",
            "",
            f"Made by `benchmarks/same_as_before.py`: {n_steps:,} steps in each tree, {n_commands:,} of them calls of"
            f" the command line; they wrote {n_written:,} files. Clock, uuids and random numbers were the same, so"
            " files and digests are compared byte for byte. Words may differ.",
            *(line for revision, found in comparisons.items() for line in report(revision, found)),
        ],
    )
    return int(any(unreasoned(found.differences) for found in comparisons.values()))


if __name__ == "__main__":
    sys.exit(main())
