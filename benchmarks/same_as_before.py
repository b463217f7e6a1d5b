"""Check that this tree behaves like an earlier revision.

Run from the project's root: ``.venv/bin/python -m benchmarks.same_as_before REVISION...``. It writes
``benchmarks/results/same_as_before.md``. Each tree runs about 1,000 steps on local lakehouses at the same path, with
the same clock, UUIDs and random numbers: every command with and without ``--json``, and its errors. The comparison
covers exit codes, JSON, digests, numbers in texts, written files, requests and round trips, and the results of
``benchmarks/request_counts.py`` in each tree. Wording may differ and is listed separately. The exit code is 1 if there
is any other difference that is not among the expected differences in ``benchmarks/sameness/reasons.py``.
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
    merged,
    short_diff,
)
from benchmarks.sameness.reasons import REASONS, Reason, reason_for
from benchmarks.sameness.steps import steps

HERE = Path(__file__).resolve().parents[1]
_DRIVER = HERE / "benchmarks" / "sameness" / "driver.py"
#: Settings with which `request_counts` takes only some seconds.
_COUNT_SETTINGS: Mapping[str, object] = {
    "TABLE_COUNTS": [100, 7_000],
    "N_COMMITS": 150,
    "N_SETTLING": 500,
    "N_DIFFS": 40,
    "N_WARM": 40,
}
_MAX_TEXTS_SHOWN = 12


@contextmanager
def work_tree(revision: str, folder: Path) -> Iterator[Path]:
    """Check out a revision into a temporary work tree and yield its folder.

    Raises:
        CalledProcessError: If the revision does not exist.
    """
    tree = folder / "tree"
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), revision], cwd=HERE, check=True)
    try:
        yield tree
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True)


def run_tree(tree: Path, folder: Path) -> dict[str, Any]:
    """Run all steps and count requests with the package of a tree.

    The lakehouses of all trees have the same path, because files contain it.

    Args:
        tree: The folder of the tree.
        folder: The working folder.

    Returns:
        The results of the steps, the checksums of the files, and the request counts.

    Raises:
        CalledProcessError: If the driver fails.
    """
    lakes = folder / "lakes"
    shutil.rmtree(lakes, ignore_errors=True)
    lakes.mkdir()
    results = run_driver(tree, folder, {"kind": "scenario", "folder": str(lakes), "steps": steps(lakes)})
    counts = run_driver(tree, folder, {"kind": "counts", "settings": _COUNT_SETTINGS})
    return {"steps": results, "files": checksums(lakes), "counts": counts}


def run_driver(tree: Path, folder: Path, job: Mapping[str, object]) -> Any:
    """Run a job with the package of a tree, in a new process of this Python environment, and return its result.

    Args:
        tree: The folder of the tree.
        folder: The working folder.
        job: The job, as described in ``sameness/driver.py``.
    """
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
    """Return the checksums of all files below a folder by path, without the files of the external catalog."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "outside" not in path.relative_to(folder).parts[:1]
    }


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> Comparison:
    """Compare the results of two trees."""
    return merged(
        [
            compare_steps(before["steps"], after["steps"]),
            compare_files(before["files"], after["files"]),
            compare_counts(before["counts"], after["counts"]),
        ]
    )


def unexpected(differences: Sequence[Difference], reasons: Sequence[Reason] = REASONS) -> list[Difference]:
    """Return the differences that no reason explains, except differences in wording."""
    return [
        difference for difference in differences if difference.part != WORDS and reason_for(difference, reasons) is None
    ]


def report(revision: str, comparison: Comparison) -> Iterator[str]:
    """Yield the lines of the report for one revision."""
    unexpected_differences = unexpected(comparison.differences)
    yield from ("", f"## Compared with {revision}", "")
    yield from table(["part", "equal", "different", "of these expected"], part_rows(comparison, unexpected_differences))
    verdict = (
        f"**{len(unexpected_differences):,} unexpected differences.**"
        if unexpected_differences
        else "**No unexpected differences.**"
    )
    yield from ("", verdict)
    for difference in unexpected_differences:
        yield from ("", f"- `{difference}`", *indented(short_diff(difference)))
    reasons = {
        reason.explanation: reason
        for difference in comparison.differences
        if (reason := reason_for(difference, REASONS)) is not None
    }
    if reasons:
        yield from (
            "",
            "Expected differences:",
            "",
            *(f"- {reason.field} of `{reason.command}`: {reason.explanation}" for reason in reasons.values()),
        )
    texts = [difference for difference in comparison.differences if difference.part == WORDS]
    if texts:
        yield from ("", f"Wording, the first {_MAX_TEXTS_SHOWN} of {len(texts):,} texts:")
    for difference in texts[:_MAX_TEXTS_SHOWN]:
        yield from ("", f"- `{difference.step}`", *indented(short_diff(difference)))


def part_rows(comparison: Comparison, unexpected_differences: Sequence[Difference]) -> list[list[object]]:
    """Return the number of equal, different and expectedly different values of each part."""
    rows: list[list[object]] = []
    for part in PARTS:
        n_different = sum(difference.part == part for difference in comparison.differences)
        n_expected = n_different - sum(difference.part == part for difference in unexpected_differences)
        rows.append([part, f"{comparison.equal[part]:,}", n_different, "-" if part == WORDS else n_expected])
    return rows


def indented(lines: Sequence[str]) -> list[str]:
    """Return lines as a code block in a list item."""
    return ["", *(f"      {line}" for line in lines)] if lines else []


def main() -> int:
    """Compare with each revision, print and write the result, and return the exit code."""
    if len(sys.argv) < 2:
        print("usage: python -m benchmarks.same_as_before REVISION...", file=sys.stderr)
        return 2
    folder = Path(tempfile.mkdtemp(prefix="same-as-before-"))
    try:
        current = run_tree(HERE, folder)
        comparisons = {}
        for revision in sys.argv[1:]:
            with work_tree(revision, folder) as tree:
                comparisons[revision] = compare(run_tree(tree, folder), current)
    finally:
        shutil.rmtree(folder)
    n_steps, n_commands = len(current["steps"]), sum(step["action"] == "command" for step in current["steps"])
    n_written = sum(len(step["written"]) for step in current["steps"])
    write_result(
        "same_as_before",
        [
            "# Comparison with earlier revisions",
            "",
            f"Generated by `benchmarks/same_as_before.py`: {n_steps:,} steps in each tree, {n_commands:,} of them"
            f" commands of the command line, which wrote {n_written:,} files. Clock, UUIDs and random numbers are the"
            " same, so that files and digests are compared byte for byte. Wording may differ.",
            *(line for revision, comparison in comparisons.items() for line in report(revision, comparison)),
        ],
    )
    return int(any(unexpected(comparison.differences) for comparison in comparisons.values()))


if __name__ == "__main__":
    sys.exit(main())
