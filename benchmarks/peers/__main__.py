"""Command line. Run from the project's root, with the extra ``bench``: ``.venv/bin/python -m benchmarks.peers``.

It writes ``benchmarks/results/peers.md`` and its charts, and starts a radosgw (packages in
``deploy/debian-packages.txt``). ``--quick`` is a smoke test of some seconds. Of the times, only the ratios within one
run are meaningful.
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
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers", description="Compare the engine with its peers."
    )
    parser.add_argument("--quick", action="store_true", help="few objects and turns, as a smoke test")
    parser.add_argument("--sizes", help="comma-separated numbers of objects")
    parser.add_argument("--versions", type=int, help="number of versions to open and to reclaim")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PEER", help="measure only this peer; repeatable"
    )
    parser.add_argument("--no-s3", action="store_true", help="skip S3")
    parser.add_argument("--to", type=Path, default=RESULTS, help="folder for the results")
    parser.add_argument("--keep", type=Path, help="keep the data in this folder (default: a temporary folder)")
    args = parser.parse_args(arguments)
    args.to.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="trinitylake-bench-") as temporary:
        run = Run(args.keep or Path(temporary), _options(args), args.only)
        run.local()
        if not args.no_s3:
            with radosgw() as server:
                run.on_s3(server)
        write_result("peers", lines(run.measured, args.to), args.to)


def _options(args: argparse.Namespace) -> Options:
    options = QUICK if args.quick else Options()
    if args.sizes:
        options = replace(options, sizes=tuple(map(int, args.sizes.split(","))))
    return replace(options, versions=args.versions or options.versions)


if __name__ == "__main__":
    main()
