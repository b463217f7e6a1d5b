"""The report of verify: what it checked, its findings, and what it did not check."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

from trinitylake_ops.format.file_names import OPERATIONS_PREFIX, TABLES_PREFIX
from trinitylake_ops.format.keys import ObjectName
from trinitylake_ops.operations.base import Cost
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.version_records import VersionRecord
from trinitylake_ops.versions.snapshot import Snapshot

Severity = Literal["error", "warning", "past"]

#: Called with code, message, path and version of an error.
Report = Callable[[str, str, str | None, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault that verify found. ``mend`` names the operation that repairs it, if one does.

    An error means that something cannot be read, or will be lost. A warning costs time or space. A past finding was an
    error once, in a version that is purged, or that an operator acknowledged (``reconcile --acknowledge``).
    """

    severity: Severity
    code: str
    message: str
    path: str | None = None
    version: int | None = None
    mend: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Document):
    """The checked files of verify and its findings.

    ``known_files`` of those counted were not read again: a record says that they were verified, and the listing shows
    them unchanged. ``damaged_versions`` are the versions, as ranges, whose tree, definitions or files of tables are not
    whole. If the latest one is among them, ``damaged_objects`` are its damaged namespaces and tables. There are none if
    its tree is not sound. ``orphan_files`` and ``orphan_bytes`` are None if they are unknown. ``stopped`` says why it
    ended early, if it did. ``unchecked`` says what was not checked, for that or another reason. ``unanswered`` are
    files with errors that the storage refused or failed to return: they may be whole. ``not_allowed`` are tables of
    others that may not be read, by name, and why. This is no failure, as their files are not ours. ``record_path`` is
    the record that this run wrote. In a deep run ``checked_files`` counts the files that were compared with checksums
    of their own. ``without_checksum`` counts files without one, by kind. In these a flipped bit is found if it breaks a
    rule, or if a record knows the file.
    """

    latest_version: int
    versions: int
    nodes: int
    definitions: int
    table_files: int
    exports: int
    clones: int = 0
    known_files: int = 0
    damaged_versions: str = ""
    damaged_objects: tuple[ObjectName, ...] = ()
    orphan_files: int | None = None
    orphan_bytes: int | None = None
    findings: tuple[Finding, ...]
    stopped: str | None = None
    unchecked: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()
    not_allowed: Mapping[str, str] = field(default_factory=dict)
    record_path: str | None = None
    checked_files: int = 0
    without_checksum: Mapping[str, int] = field(default_factory=dict)
    cost: Cost
    _root: str = field(repr=False, compare=False)
    _records: tuple[VersionRecord, ...] = field(repr=False, compare=False)
    _latest: Snapshot | None = field(repr=False, compare=False)
    _unclaimed: tuple[str, ...] = field(repr=False, compare=False)

    @property
    def root(self) -> str:
        """The root URI of the lakehouse."""
        return self._root

    @property
    def records(self) -> tuple[VersionRecord, ...]:
        """The records of the roots of all versions that were looked at, ascending."""
        return self._records

    @property
    def latest(self) -> Snapshot | None:
        """The latest version when it began, read past all caches. None if its root was not read, or cannot be."""
        return self._latest

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """The ids of managed tables whose folders have no owner file, ascending."""
        return self._unclaimed

    @property
    def is_clean(self) -> bool:
        """Whether there is no error. Warnings, such as a stale hint, are part of normal life."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        """Whether no limit ended it early."""
        return self.stopped is None

    def table(self) -> Table:
        """Return a row for each finding, under a title with what was checked, and what was not."""
        verdict = "Clean" if self.is_clean else "Not clean"
        if not self.is_complete:
            verdict = f"Not finished, as {self.stopped}; {'no error' if self.is_clean else 'errors'} so far"
        known = f", {self.known_files} of these files known from before" if self.known_files else ""
        skipped = f"; not looked at: {'; '.join(self.unchecked)}" if self.unchecked else ""
        checksums = f"; {self.checksums}" if self.checksums else ""
        damaged = f" (damaged are versions {self.damaged_versions})" if self.damaged_versions else ""
        clones = f", {self.clones} clones" if self.clones else ""
        title = (
            f"{verdict}: {self.versions} versions{damaged}, {self.nodes} nodes,"
            f" {self.definitions} definitions, {self.table_files} table files, {self.exports} exports{clones}{known};"
            f" {self.cost.total_requests} requests, {self.cost.duration_ms / 1000:.1f} s{checksums}{skipped}"
        )
        rows: list[tuple[object, ...]] = [
            (finding.severity, finding.code, finding.message, finding.version, finding.path, finding.mend)
            for finding in self.findings
        ]
        rows += [
            ("not looked at", "root-not-allowed", f"table {name}: {message}", None, None, None)
            for name, message in self.not_allowed.items()
        ]
        return new_table(title, "severity", "finding", "what", "version", "path", "mended by", rows=rows)

    @property
    def checksums(self) -> str:
        """Return the files with and without checksums in a deep run, as text. It is empty for another run."""
        if not self.checked_files and not self.without_checksum:
            return ""
        rest = f", {kinds_text(self.without_checksum)} without one" if self.without_checksum else ""
        return f"{self.checked_files} files checked by their checksums{rest}"


#: Findings that say that a version cannot be read in full.
_DAMAGE = frozenset(
    {
        "root-corrupt",
        "node-corrupt",
        "node-missing",
        "pointer-damaged",
        "tree-invariant",
        "definition-unreadable",
        "namespace-missing",
        "table-file-missing",
        "table-file-size",
        "table-file-corrupt",
        "table-unreadable",
    }
)

#: The code of a data file that a snapshot lists more than once, so that each of its rows counts as often.
REPEATED_FILE = "table-file-repeated"

#: The code of manifests with bounds that are no values of their columns. Our own readers repair them.
FAULTY_BOUNDS = "table-bounds"

#: Findings of which one file may have several.
_SEVERAL = frozenset({"pointer-damaged", "tree-invariant", "namespace-missing", "key-malformed"})


class Findings:
    """Collects findings: each error of a file once, with the oldest version that shows it."""

    def __init__(self) -> None:
        self._found: list[Finding] = []
        self._reported: set[tuple[str, str | None, str]] = set()

    def error(self, code: str, message: str, path: str | None, version: int | None, mend: str | None = None) -> None:
        """Report an error, unless that file has one of the kind already.

        Several faults in one file, or a fault in no file, differ by their messages.
        """
        reported = (code, path, message if path is None or code in _SEVERAL else "")
        if reported not in self._reported:
            self._reported.add(reported)
            self._add("error", code, message, path, version, mend)

    def warn(self, code: str, message: str, path: str | None, version: int | None, mend: str | None) -> None:
        """Report a warning."""
        self._add("warning", code, message, path, version, mend)

    def warn_once(self, code: str, message: str, path: str | None, version: int | None, mend: str | None) -> None:
        """Report a warning unless there is one of its kind."""
        self._add_once("warning", code, message, path, version, mend)

    def past_once(self, code: str, message: str, path: str | None, version: int | None, mend: str | None) -> None:
        """Report a warning of which one is enough, or a past finding for a purged version."""
        self._add_once("past", code, message, path, version, mend)

    def _add_once(
        self, severity: Severity, code: str, message: str, path: str | None, version: int | None, mend: str | None
    ) -> None:
        if (code, None, severity) not in self._reported:
            self._reported.add((code, None, severity))
            self._add(severity, code, message, path, version, mend)

    def past(self, code: str, message: str, path: str | None, version: int | None) -> None:
        """Report a former error that is settled."""
        self._add("past", code, message, path, version, None)

    def _add(
        self, severity: Severity, code: str, message: str, path: str | None, version: int | None, mend: str | None
    ) -> None:
        self._found.append(
            Finding(severity=severity, code=code, message=message, path=path, version=version, mend=mend)
        )

    @contextmanager
    def unless(self, is_excused: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """Forget findings of the block if it is excused after all. Yields a function that tells whether it was."""
        n_found, reported = len(self._found), set(self._reported)
        has_forgotten = False
        yield lambda: has_forgotten
        if len(self._found) > n_found and is_excused():
            del self._found[n_found:]
            self._reported = reported
            has_forgotten = True

    def wrong_paths(self) -> set[str]:
        """Return the paths of files with errors or faulty bounds, which each run reads and reports again."""
        return {
            finding.path
            for finding in self._found
            if finding.path and (finding.severity == "error" or finding.code == FAULTY_BOUNDS)
        }

    def all(self, *, can_go_back: bool) -> tuple[Finding, ...]:
        """Return all findings. If the latest version is damaged and a commit can repair that, it is named."""
        return tuple(
            replace(one, mend=one.mend or (_repair_command(one.code) if can_go_back else None)) for one in self._found
        )


def _repair_command(code: str) -> str | None:
    """Return the command that repairs damage of a latest version. Only a deep check sees a data file's."""
    if code not in _DAMAGE:
        return None
    return "repair --deep --to-last-good" if code == "table-file-corrupt" else "repair --to-last-good"


class ChecksumTally:
    """Counts files that were read whole, each once, by whether they carry a checksum."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, bool]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Count nothing from now on: files that are read again, or not for their own check, do not count."""
        self._is_closed = True

    def count(self, kind: str, path: str, has_checksum: bool) -> None:
        """Count a file that was read whole and found in order. ``kind`` is a word for it, in the singular."""
        if self._is_closed:
            return
        with self._lock:
            self._seen[path] = (kind, has_checksum)

    @property
    def checked_files(self) -> int:
        """How many files were compared with their checksums."""
        return sum(has_checksum for _, has_checksum in self._seen.values())

    @property
    def without_checksum(self) -> Mapping[str, int]:
        """How many files carry none, by their kind, in the order of these."""
        counts = Counter(kind for kind, has_checksum in self._seen.values() if not has_checksum)
        return dict(sorted(counts.items()))


def kind_of(path: str) -> str:
    """Return the word for a file of the catalog."""
    if path.startswith((OPERATIONS_PREFIX, TABLES_PREFIX)):
        return "operation file"
    return "definition" if path.endswith(".binpb") else "node"


def kinds_text(without_checksum: Mapping[str, int]) -> str:
    """Return the numbers of files by kind as text."""
    return ", ".join(f"{count} {kind if count == 1 else _plural(kind)}" for kind, count in without_checksum.items())


def _plural(kind: str) -> str:
    return f"{kind}s"
