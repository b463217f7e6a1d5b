"""Request budgets: how many storage requests and sequential round trips each operation may send.

``tests/test_request_budgets.py`` measures every row and requires exact equality; the workloads are in
``tests/request_workloads.py``. Other tests refer to a row by its name with :func:`budget`, so that each number is
defined once. A row with the name of a workload in ``benchmarks/request_counts.py`` measures that workload.

Background requests, for example the update of the hint after a commit, are not included because no caller waits for
them. A *cold* process has read nothing; a *warm* process has run the same operation before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from trinitylake_ops.storage import RequestCounts


class StorageKind(StrEnum):
    """The kinds of storage for which the number of requests can differ."""

    #: Files in the memory of this process. Requests are sent one after the other.
    MEMORY = "memory"
    #: A folder on a local disk, without fsync.
    FOLDER = "folder"
    #: A storage service with high latency: the requests of a round trip are sent in parallel, as are the files of an
    #: Iceberg change.
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Budget:
    """The exact cost of an operation on one kind of storage."""

    #: Number of requests by kind.
    requests: Mapping[str, int]
    #: Number of sequential round trips, summed over threads.
    rounds: int
    #: Reason for the numbers, unless it is obvious.
    reason: str = ""
    #: Total bytes that reads return. None: no budget.
    bytes_read: int | None = None

    def with_counts(self, counts: RequestCounts) -> Budget:
        """Return this budget with measured counts. It equals this budget if the counts match exactly."""
        bytes_read = None if self.bytes_read is None else counts.bytes_read
        return Budget(dict(counts.requests), counts.rounds, self.reason, bytes_read)


Row = Mapping[StorageKind, Budget]


def _on_all(requests: Mapping[str, int], rounds: int, reason: str = "", bytes_read: int | None = None) -> Row:
    """Return a row with the same budget on all kinds of storage."""
    return dict.fromkeys(StorageKind, Budget(requests, rounds, reason, bytes_read))


def _by_kind(memory: Budget, folder: Budget, server: Budget) -> Row:
    return {StorageKind.MEMORY: memory, StorageKind.FOLDER: folder, StorageKind.SERVER: server}


def _server_or_local(server: Budget, local: Budget) -> Row:
    return _by_kind(memory=local, folder=local, server=server)


def _in_memory(requests: Mapping[str, int], rounds: int, reason: str = "") -> Row:
    """Return a row that is measured only in memory."""
    return {StorageKind.MEMORY: Budget(requests, rounds, reason)}


def budget(operation: str, kind: StorageKind = StorageKind.MEMORY) -> Budget:
    """Return the budget of an operation on one kind of storage."""
    return BUDGETS[operation][kind]


_LISTED_OPEN = Budget(
    {"list": 1, "read": 6},
    2,
    "the hint, its root, the next root and its names in three other schemes; the names of version 0",
)

#: Operation -> kind of storage -> budget.
BUDGETS: Mapping[str, Row] = {
    # Opening and beginning
    "open": _by_kind(
        memory=_LISTED_OPEN,
        folder=Budget(
            {"read": 10}, 2, "probes the possible names of version 0, because a listing would read all names"
        ),
        server=_LISTED_OPEN,
    ),
    "open by Lakehouse.open and begin, cold": _by_kind(
        memory=Budget({"list": 1, "read": 7}, 3, "like open; then the settings"),
        folder=Budget({"read": 11}, 3, "like open; then the settings"),
        server=Budget({"list": 1, "read": 7}, 3, "like open; then the settings"),
    ),
    "begin right after open": _on_all({"read": 1}, 1, "the settings; open has just found the latest version"),
    "begin, cold": _on_all({"read": 4}, 3, "the hint; its root and the next one; the settings"),
    "begin, warm": _on_all(
        {"read": 3}, 1, "the hint (1 byte), the commit_id of the known root (36), and the next root", bytes_read=37
    ),
    "begin, without cache": _on_all({"read": 3}, 2, "the hint; its root and the next one"),
    # Finding a version
    "open version 1, cold": _on_all({"read": 4}, 2, "the hint; its root, the next one, and the root of version 1"),
    "open version 1 and its settings, cold": _on_all({"read": 5}, 3),
    "open version 1 and its settings, warm": _on_all({"read": 4}, 1, "like begin, and the root of version 1"),
    "open version 1, cold, after the settings were changed": _on_all(
        {"read": 5}, 3, "also the latest settings, which determine whether the version expired"
    ),
    "open version 1 and its settings, cold, after they were changed": _on_all({"read": 6}, 4),
    "open the latest version by number, cold": _on_all({"read": 3}, 2, "the hint; its root and the next one"),
    "open a missing version, cold": _on_all({"read": 4}, 2),
    "find the latest version, cold": _on_all({"read": 3}, 2, "the hint; its root and the next one"),
    "find the latest version, hint one behind": _on_all({"read": 5}, 3),
    "find the latest version, hint 7 behind": _on_all({"read": 4, "stat": 5}, 8, "a search for the last root"),
    "find the latest version, hint ahead": _on_all(
        {"read": 18, "stat": 5}, 9, "the search also tries all naming schemes"
    ),
    "find the latest version, no hint": _on_all({"read": 4, "stat": 5}, 8, "a search from version 0"),
    # Reading a snapshot
    "look a table up, cold": _on_all({"read": 5}, 4, "begin; the definition of the table"),
    "look a table up, warm": _on_all({"read": 3}, 1, "begin; everything else is cached"),
    "look a table up, cold (7,000 tables)": _in_memory({"read": 6}, 4, "the first node is read with the settings"),
    "list the tables, cold": _on_all({"read": 4}, 3, "begin; the names are in the root"),
    "list the tables, cold (7,000 tables)": _in_memory({"read": 67}, 3, "begin, with all 63 nodes below the root"),
    # Committing, without beginning the transaction
    "commit a namespace": _on_all({"create": 2}, 2, "the definition; the root"),
    "commit a changed table": _on_all({"create": 2}, 2),
    "commit a new table": _on_all({"create": 2}, 2, "the definition of its namespace is cached"),
    "commit a new table, namespace not cached": _on_all(
        {"create": 2, "read": 1}, 2, "the definition of the namespace is read in parallel with the write"
    ),
    "commit a new table with a file": _on_all({"create": 3}, 2, "the file is written in parallel with the definition"),
    "commit without changes": _on_all({}, 0),
    "commit after a conflict": _server_or_local(
        local=Budget({"create": 3, "read": 5}, 4, "files; the rejected root; the newer root; the root"),
        server=Budget({"create": 3, "read": 6}, 4, "a server is also probed for the hint in parallel"),
    ),
    "commit while probing": _server_or_local(
        local=Budget(
            {"create": 2, "read": 4},
            2,
            "after a recent commit of another process, each write also reads two next roots",
        ),
        server=Budget({"create": 2, "read": 6}, 2, "also reads the hint with each write"),
    ),
    "commit after a repeated conflict": _server_or_local(
        local=Budget({"create": 2, "read": 4}, 2, "the probe finds the newer root while the files are written"),
        server=Budget({"create": 2, "read": 6}, 2),
    ),
    "commit after three conflicts in a row": _on_all(
        {"create": 5, "read": 10}, 5, "files; three rejected roots, each read back along with the next one; the root"
    ),
    "group commit of 16": _on_all({"create": 17}, 17, "16 definitions, written in parallel by their threads; a root"),
    "group commit of 3 with a file each": _on_all({"create": 7}, 4),
    "update the hint": _on_all({"write": 1}, 1, "in the background, after a commit"),
    # Iceberg tables that the catalog has loaded and appended to
    "set a table property": _on_all(
        {"create": 3, "read": 3}, 3, "begin; the metadata file and the definition; the root"
    ),
    "append": _server_or_local(
        server=Budget(
            {"create": 5, "read": 3, "write": 1}, 4, "data, manifest and manifest list; then like setting a property"
        ),
        local=Budget({"create": 5, "read": 3, "write": 1}, 6, "files are written one after the other"),
    ),
    "overwrite": _server_or_local(
        server=Budget({"create": 7, "read": 4, "write": 1}, 5, "reads a manifest that another catalog wrote"),
        local=Budget({"create": 7, "read": 4, "write": 1}, 9),
    ),
    "load a table and append": _server_or_local(
        server=Budget({"create": 5, "read": 6, "write": 1}, 5, "begin; then like an append"),
        local=Budget({"create": 5, "read": 6, "write": 1}, 7),
    ),
    "create a table": _on_all(
        {"create": 4, "read": 4},
        3,
        "begin; the owner, metadata and definition, and the namespace, which contains the views; the root",
    ),
    "create a table and append": _server_or_local(
        server=Budget({"create": 6, "read": 7, "write": 1}, 6, "like both operations, with one commit"),
        local=Budget({"create": 6, "read": 7, "write": 1}, 8),
    ),
    "scan, first time": _on_all({"read": 3}, 3, "manifest list; manifest; data"),
    "scan again": _on_all({"read": 1}, 1, "data; the catalog has cached the metadata that it read"),
    "scan after an append": _on_all({"read": 1}, 1, "data; the catalog has cached the metadata that it wrote"),
    "write a table file": _on_all({"create": 1}, 1),
    "read a table file": _on_all({"read": 1}, 1, "the response includes the size"),
    "list the files of a table after 5 appends": _on_all(
        {"read": 11}, 11, "the metadata file, 5 manifest lists, and each of 5 manifests once"
    ),
    # Operations on a lakehouse of 8 versions with a flat tree, whose latest version is known
    "roll back one version": _on_all({"create": 1, "list": 1, "read": 7}, 8),
    "verify": _on_all({"list": 2, "read": 72}, 67),
    "compact, nothing to do": _on_all({"list": 1, "read": 4}, 4),
    "plan the expiration of 6 versions": _on_all({"list": 2, "read": 17}, 7, "reads each root once"),
    "expire 6 versions": _on_all({"create": 3, "read": 10}, 10),
    "plan the purge of 6 versions": _on_all({"list": 1, "read": 14, "stat": 1}, 7),
    "purge 6 versions": _by_kind(
        memory=Budget(
            {"create": 5, "delete": 6, "list": 9, "read": 36, "stat": 5, "write": 7}, 42, "deletes in batches of one"
        ),
        folder=Budget({"create": 5, "delete": 2, "list": 5, "read": 36, "stat": 1, "write": 7}, 30, "one batch"),
        server=Budget({"create": 5, "delete": 6, "list": 5, "read": 36, "stat": 1, "write": 7}, 30),
    ),
    "maintain, nothing to do": _on_all({"list": 1, "read": 32, "write": 1}, 23, "each step reads the latest version"),
    "space, the first run": _on_all(
        {"create": 4, "list": 1, "read": 98},
        26,
        "each root, definition, metadata file, manifest list and manifest once",
    ),
    "space, nothing committed since": _on_all(
        {"list": 1, "read": 7}, 6, "begin; the listing of roots; the index and two parts of the summary"
    ),
    "space after an append": _on_all(
        {"create": 4, "list": 1, "read": 13}, 15, "also the known root, the new files, and the files of tables"
    ),
    "export by reference": _on_all({"create": 5, "read": 16, "stat": 1, "write": 1}, 18),
}
