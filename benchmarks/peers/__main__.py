"""The command. Run from the project's root, with the extra ``bench``: ``.venv/bin/python -m benchmarks.peers``.

It writes ``benchmarks/results/peers.md`` and its pictures; ``--quick`` shows within seconds that all works. A radosgw
of its own is started (the packages of ``deploy/debian-packages.txt``). Times are only worth as ratios within the run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.measure import QUICK, Options, Run
from benchmarks.peers.report import lines
from benchmarks.report import RESULTS, write_result
from benchmarks.s3 import radosgw


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="The engine beside its peers.")
    parser.add_argument("--quick", action="store_true", help="few objects and turns: nothing but a trial")
    parser.add_argument("--sizes", help="numbers of objects, with commas between them")
    parser.add_argument("--versions", type=int, help="versions to open and to free")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PEER", help="measure this one, and others so named"
    )
    parser.add_argument("--no-s3", action="store_true", help="leave S3 out")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--keep", type=Path, help="folder for the data, which stays; by default one that is removed")
    given = parser.parse_args(arguments)
    given.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as temporary:
        run = Run(given.keep or Path(temporary), _options(given), given.only)
        run.local()
        if not given.no_s3:
            with radosgw() as server:
                run.on_s3(server)
        write_result("peers", lines(run.measured, given.to), given.to)


def _options(given: argparse.Namespace) -> Options:
    options = QUICK if given.quick else Options()
    if given.sizes:
        options = replace(options, sizes=tuple(map(int, given.sizes.split(","))))
    return replace(options, versions=given.versions or options.versions)


if __name__ == "__main__":
    main()
