"""Advice on findings that repair leaves."""

from __future__ import annotations

_RESTORE = "restore the file from a backup of the storage"
_OLDER = f"{_RESTORE}; else versions that need it stay damaged until they expire"

_LEFT = "run orphans"

_ADVICE = {
    "root-missing": _RESTORE,
    "root-corrupt": f"{_RESTORE}; other versions do not need it",
    "latest-sealed": f"{_RESTORE}; else move it away",
    "root-beyond-gap": "restore the missing root from a backup; commit nothing before",
    "root-naming-mixed": "find out which program wrote it, then move it away",
    "node-corrupt": _OLDER,
    "node-missing": _OLDER,
    "pointer-damaged": _OLDER,
    "tree-invariant": _OLDER,
    "definition-unreadable": _OLDER,
    "definition-changed": f"{_RESTORE}; else let the program that wrote it commit the settings of creation",
    "key-malformed": "find the program that wrote it, then roll back to a version before",
    "namespace-missing": "create the namespace again, or roll back to a version before",
    "chain-broken": "find the program that wrote it; then reconcile --acknowledge its versions",
    "time-not-rising": "find the clock that is wrong; then reconcile --acknowledge its versions",
    "time-in-future": "set the clock right",
    "clock-set-back": "nothing to do: times before that version were ahead; set the clock right that made them",
    "barrier-in-future": "set the clock right; the next removal of files that no version reaches replaces the barrier",
    "table-file-missing": _OLDER,
    "table-file-size": _OLDER,
    "table-file-corrupt": _OLDER,
    "table-unreadable": _OLDER,
    "table-names-code": "find out who wrote it; any commit to the table leaves the property out",
    "table-file-repeated": "overwrite the rows of that file, or roll the table back; later snapshots list it once then",
    "name-shared": "rename the table, or drop the view",
    "table-has-two-names": "find out which name is right, and drop the other one; the files stay",
    "table-names-connection": "find out who wrote it; any commit to the table leaves the property out",
    "table-bounds": "run compact-tables; older versions keep the bounds until they expire",
    "file-changed": _RESTORE,
    "export-unreadable": "drop the export and make it again",
    "export-damaged": "drop the export and make it again",
    "export-unpinned": "drop the export or clone",
    "export-cut-off": "export or clone again, or drop it",
    "name-taken-twice": "drop that name, which forgets all that have it; then make again what is needed",
    "zombie-root": "find the program that wrote it; seal it by restoring the file that the purge wrote",
    "purge-unfinished": "run purge",
    "lease-stale": "run the operation again",
    "lease-unreadable": "allow verify to read it",
    "operation-file-damaged": "run the operation that writes it again; what it says is not relied on",
    "owner-damaged": "move the file away, if the folder is this lakehouse's; repair then writes it anew",
    "owner-other": "find that lakehouse before anything is removed; if it has no such table, do as with a damaged one",
    "owner-missing": "read the definition of the lakehouse again first; repair then writes it",
    "owner-missing-there": "write to the table: each write makes it first",
    "table-root-kept": "if the table root is this lakehouse's, run relocate --table-root with it",
    "record-damaged": "run verify --incremental, which writes a new one",
    "record-not-written": "allow verify to create files under _ops/, or run it without --incremental",
    "external-unreadable": "ask the owner of the table; else drop it, or register it again",
    "moved": "run relocate",
    "hint-wrong": "run hint --repair; where it is ahead, restore the root that it names first",
    "reconcile-needed": "run reconcile",
    "manifest-missing": "run the export again, or drop it",
    "plan-missing": "run purge, then orphans",
    "plan-left": _LEFT,
    "transaction-left": _LEFT,
    "export-left": _LEFT,
    "orphans": _LEFT,
}


def advice_on(code: str) -> str:
    """Return what an operator can do about findings of this code."""
    return _ADVICE.get(code, "see the findings of verify in docs/operations.md")
