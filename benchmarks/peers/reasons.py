"""Explanations of metrics in which peers are as fast as we are or faster. The report marks others as unexplained."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_FILE = "it writes all objects as rows of one file; we create a definition file for each table, and the nodes"
_ONE_COLUMN = "it reads one column of one file; we open, verify and decode the Arrow files of all leaves"
_READ_TWICE = (
    "both plan and execution read the root of every version and mark the kept files, because other writers may"
    " commit in the meantime; and a root is overwritten by a sealed root, so that its name stays taken"
)

#: By metric and the beginning of the peer's name.
REASONS: Mapping[tuple[str, str], str] = {
    ("commit", "Lance, append"): (
        "an append does not search or replace a row, so both cost as much as their files: in a trace of system calls,"
        " a commit of ours has 5 opens, 2 links and 2 unlinks for two new files, and one of Lance has 7 opens, 1 link"
        " and 1 unlink for three"
    ),
    ("commit", "slatedb"): (
        "a flush writes one log file and creates no named version; with a single writer, it does not read the commits"
        " of others"
    ),
    (
        "commit",
        "pyiceberg + SQLite",
    ): "SQLite changes one page in place, and syncs once or twice; we sync each new file",
    ("expire", ""): _READ_TWICE,
    ("freed", ""): _READ_TWICE,
    ("list", "Lance"): _ONE_COLUMN,
    ("list", "delta"): _ONE_COLUMN,
    ("list", "DuckLake, rows"): _ONE_COLUMN,
    ("load", "icechunk"): "it stores all groups in one snapshot file, which each commit rewrites",
    (
        "load",
        "DuckLake, tables",
    ): "its tables are rows of one database file; we create a definition file for each table",
    ("load", "Lance"): _ONE_FILE,
    ("load", "delta"): _ONE_FILE,
    ("load", "slatedb"): _ONE_FILE,
    ("load", "DuckLake, rows"): _ONE_FILE,
    ("old_version", "Lance"): "its manifest names all files; ours reads one node of each level after the root",
    ("threads", "slatedb"): "its single writer puts the keys of all tasks into one log file",
    ("processes", "pyiceberg + SQLite"): (
        "its processes write their metadata files in parallel and contend only for one page of SQLite; our versions are"
        " sequential, so processes wait for each other, and each reads the root of the previous version"
    ),
    ("s3 lookup", "icechunk"): ("the same number of round trips as ours, with one request less"),
    ("s3 lookup", "pyiceberg + SQLite"): (
        "its catalog is a file on a local disk; only the table's metadata file is read from S3"
    ),
    ("s3 list", "pyiceberg + SQLite"): ("its catalog is a file on a local disk; it sends no requests to S3"),
    ("s3 commit", "slatedb"): "one request, because there are no other writers",
}


def reason(metric: str, peer: str) -> str:
    """Return the explanation of a ratio, or a text that says that there is none yet."""
    for (explained_metric, peer_prefix), explanation in REASONS.items():
        if metric == explained_metric and peer.startswith(peer_prefix):
            return explanation
    return "not explained yet"
