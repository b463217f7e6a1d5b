"""Why a peer is as fast as we are or faster; what is lost without a reason here stands in the results as that."""

from __future__ import annotations

from collections.abc import Mapping

_ONE_FILE = "it writes all objects as rows of one file; we create a definition file for each table, and the nodes"
_COLUMN = "it reads one column of one file; we open, check and take apart the Arrow files of all leaves"
_TWICE = (
    "we look before we delete: both plan and execution read the root of every version and mark what is kept, since"
    " others may commit meanwhile; and a root is overwritten by a sealed one, so that its name stays taken"
)

#: By metric and the beginning of the peer's name.
REASONS: Mapping[tuple[str, str], str] = {
    ("commit", "Lance, append"): (
        "an append finds, checks and replaces nothing, and so both are what their files cost: in a trace of system"
        " calls a commit of ours has 5 opens, 2 links and 2 unlinks for two new files, Lance's 7 opens, a link and an"
        " unlink for three"
    ),
    ("commit", "slatedb"): (
        "a flush writes one file of the log, and no version that can be named; its one writer need not ask what others"
        " committed"
    ),
    (
        "commit",
        "pyiceberg + SQLite",
    ): "SQLite changes one page in place, and syncs once or twice; we sync each new file",
    ("expire", ""): _TWICE,
    ("freed", ""): _TWICE,
    ("list", "Lance"): _COLUMN,
    ("list", "delta"): _COLUMN,
    ("list", "DuckLake, rows"): _COLUMN,
    ("load", "icechunk"): "it keeps all groups in one snapshot file, which each commit writes anew",
    (
        "load",
        "DuckLake, tables",
    ): "its tables are rows of one database file; we create a definition file for each table",
    ("load", "Lance"): _ONE_FILE,
    ("load", "delta"): _ONE_FILE,
    ("load", "slatedb"): _ONE_FILE,
    ("load", "DuckLake, rows"): _ONE_FILE,
    ("old_version", "Lance"): "its manifest names all files; ours reads one node of each level after the root",
    ("threads", "slatedb"): "its one writer puts the keys of all tasks into one file of the log",
    ("processes", "pyiceberg + SQLite"): (
        "its processes write their metadata files at the same time, and meet only in one page of SQLite; each version"
        " of ours follows another, so that processes stand in line, and each reads the root of the one before"
    ),
    ("s3 lookup", "icechunk"): ("as many rounds as ours, one request fewer"),
    ("s3 lookup", "pyiceberg + SQLite"): (
        "its catalog is a file on a local disk; only the table's metadata file is asked of S3"
    ),
    ("s3 list", "pyiceberg + SQLite"): ("its catalog is a file on a local disk; nothing is asked of S3"),
    ("s3 commit", "slatedb"): "one request, as there is no other writer to ask about",
}


def reason(metric: str, peer: str) -> str:
    """Return why, or that nobody has found out."""
    for (of_metric, name), why in REASONS.items():
        if metric == of_metric and peer.startswith(name):
            return why
    return "not explained yet"
