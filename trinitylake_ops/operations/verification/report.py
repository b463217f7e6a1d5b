"""The report of verify: the checked files, the findings, and the parts that were not checked."""

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

#: Reports an error by its code, message, path and version.
Report = Callable[[str, str, str | None, int | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A fault that verify found."""

    #: "error": data cannot be read or will be lost. "warning": the fault only costs time or space. "past": a former
    #: error in a version that was purged or acknowledged (``reconcile --acknowledge``).
    severity: Severity
    #: The kind of the fault.
    code: str
    #: A description of the fault.
    message: str
    #: The path of the file, if any.
    path: str | None = None
    #: The version, if any.
    version: int | None = None
    #: The command that fixes the fault, if any.
    fix: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Document):
    """The checks and findings of verify."""

    #: The latest version.
    latest_version: int
    #: The number of live versions.
    versions: int
    #: The number of nodes.
    nodes: int
    #: The number of definitions.
    definitions: int
    #: The number of files of managed tables.
    table_files: int
    #: The number of exports.
    exports: int
    #: The number of clones.
    clones: int = 0
    #: The number of these files that were not read again because they are recorded as verified and unchanged according
    #: to the listing.
    known_files: int = 0
    #: The versions, as ranges, whose tree, definitions or table files are damaged.
    damaged_versions: str = ""
    #: The damaged namespaces and tables of a damaged latest version; empty if its tree is damaged.
    damaged_objects: tuple[ObjectName, ...] = ()
    #: The number of orphans; None if unknown.
    orphan_files: int | None = None
    #: The total size of the orphans; None if unknown.
    orphan_bytes: int | None = None
    #: The findings.
    findings: tuple[Finding, ...]
    #: Why verify ended early; None if it did not.
    stopped: str | None = None
    #: The parts that were not checked, with the reason for each.
    unchecked: tuple[str, ...] = ()
    #: Files that the storage failed to return; they may be intact.
    unanswered: tuple[str, ...] = ()
    #: External tables whose files must not be read, with the reason. This is not a failure.
    not_allowed: Mapping[str, str] = field(default_factory=dict)
    #: The record that this run wrote; None if it wrote none.
    record_path: str | None = None
    #: The number of files that a deep run compared with their checksums.
    checked_files: int = 0
    #: The number of files without a checksum, by kind. In these files, a flipped bit is found only if it breaks a rule
    #: or the file is in a record.
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
        """The records of the roots of all checked versions, in ascending order."""
        return self._records

    @property
    def latest(self) -> Snapshot | None:
        """The latest version when verify began, read without caches; None if its root was not read or is unreadable."""
        return self._latest

    @property
    def unclaimed(self) -> tuple[str, ...]:
        """The ids of managed tables whose folders have no owner file, in ascending order."""
        return self._unclaimed

    @property
    def is_clean(self) -> bool:
        """Whether there are no errors. Warnings, for example about a stale hint, are normal."""
        return all(finding.severity != "error" for finding in self.findings)

    @property
    def is_complete(self) -> bool:
        """Whether verify did not end early."""
        return self.stopped is None

    def table(self) -> Table:
        """Return one row for each finding, with a title that summarizes what was and was not checked."""
        verdict = "Clean" if self.is_clean else "Not clean"
        if not self.is_complete:
            verdict = f"Incomplete ({self.stopped}), {'no errors' if self.is_clean else 'errors'} so far"
        verified_earlier = f", {self.known_files} of these files verified earlier" if self.known_files else ""
        skipped = f"; not checked: {'; '.join(self.unchecked)}" if self.unchecked else ""
        checksums = f"; {self.checksums}" if self.checksums else ""
        damaged = f" (damaged: {self.damaged_versions})" if self.damaged_versions else ""
        clones = f", {self.clones} clones" if self.clones else ""
        title = (
            f"{verdict}: {self.versions} versions{damaged}, {self.nodes} nodes,"
            f" {self.definitions} definitions, {self.table_files} table files,"
            f" {self.exports} exports{clones}{verified_earlier};"
            f" {self.cost.total_requests} requests, {self.cost.duration_ms / 1000:.1f} s{checksums}{skipped}"
        )
        rows: list[tuple[object, ...]] = [
            (finding.severity, finding.code, finding.message, finding.version, finding.path, finding.fix)
            for finding in self.findings
        ]
        rows += [
            ("not checked", "root-not-allowed", f"table {name}: {message}", None, None, None)
            for name, message in self.not_allowed.items()
        ]
        return new_table(title, "severity", "finding", "message", "version", "path", "fixed by", rows=rows)

    @property
    def checksums(self) -> str:
        """The number of files with and without checksums in a deep run, as text; empty for other runs."""
        if not self.checked_files and not self.without_checksum:
            return ""
        rest = f", {kinds_text(self.without_checksum)} without a checksum" if self.without_checksum else ""
        return f"{self.checked_files} files compared with their checksums{rest}"


#: Codes of findings that prevent a version from being read in full.
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

#: The code for a data file that a snapshot lists more than once, so that its rows are counted repeatedly.
REPEATED_FILE = "table-file-repeated"

#: The code for manifests with bounds that are not values of their columns. This library's readers tolerate them.
FAULTY_BOUNDS = "table-bounds"

#: Codes that can be reported several times for one file.
_REPEATABLE = frozenset({"pointer-damaged", "tree-invariant", "namespace-missing", "key-malformed"})


class Findings:
    """Collect findings: each error in a file once, with the oldest version that contains the file."""

    def __init__(self) -> None:
        self._findings: list[Finding] = []
        self._reported: set[tuple[str, str | None, str]] = set()

    def error(self, code: str, message: str, path: str | None, version: int | None, fix: str | None = None) -> None:
        """Report an error, unless one with this code has already been reported for the same file.

        Several faults in one file, and faults without a file, are distinguished by their messages.

        Args:
            code: The kind of the fault.
            message: A description of the fault.
            path: The path of the file, if any.
            version: The version, if any.
            fix: The command that fixes the fault, if any.
        """
        reported = (code, path, message if path is None or code in _REPEATABLE else "")
        if reported not in self._reported:
            self._reported.add(reported)
            self._add("error", code, message, path, version, fix)

    def warn(self, code: str, message: str, path: str | None, version: int | None, fix: str | None) -> None:
        """Report a warning.

        Args:
            code: The kind of the fault.
            message: A description of the fault.
            path: The path of the file, if any.
            version: The version, if any.
            fix: The command that fixes the fault, if any.
        """
        self._add("warning", code, message, path, version, fix)

    def warn_once(self, code: str, message: str, path: str | None, version: int | None, fix: str | None) -> None:
        """Report a warning, unless there already is one with this code. See :meth:`warn` for the parameters."""
        self._add_once("warning", code, message, path, version, fix)

    def past_once(self, code: str, message: str, path: str | None, version: int | None, fix: str | None) -> None:
        """Report a former error, unless there already is one with this code. See :meth:`warn` for the parameters."""
        self._add_once("past", code, message, path, version, fix)

    def _add_once(
        self, severity: Severity, code: str, message: str, path: str | None, version: int | None, fix: str | None
    ) -> None:
        if (code, None, severity) not in self._reported:
            self._reported.add((code, None, severity))
            self._add(severity, code, message, path, version, fix)

    def past(self, code: str, message: str, path: str | None, version: int | None) -> None:
        """Report a former error. See :meth:`warn` for the parameters."""
        self._add("past", code, message, path, version, None)

    def _add(
        self, severity: Severity, code: str, message: str, path: str | None, version: int | None, fix: str | None
    ) -> None:
        self._findings.append(
            Finding(severity=severity, code=code, message=message, path=path, version=version, fix=fix)
        )

    @contextmanager
    def unless(self, is_excused: Callable[[], bool]) -> Iterator[Callable[[], bool]]:
        """Discard the findings reported in the block if they turn out to be excused.

        Yields a function that returns whether findings were discarded.
        """
        n_findings, reported = len(self._findings), set(self._reported)
        are_discarded = False
        yield lambda: are_discarded
        if len(self._findings) > n_findings and is_excused():
            del self._findings[n_findings:]
            self._reported = reported
            are_discarded = True

    def wrong_paths(self) -> set[str]:
        """Return the paths of files with errors or faulty bounds. Every run reads and reports these files again."""
        return {
            finding.path
            for finding in self._findings
            if finding.path and (finding.severity == "error" or finding.code == FAULTY_BOUNDS)
        }

    def all(self, *, can_repair: bool) -> tuple[Finding, ...]:
        """Return all findings. ``can_repair`` adds the repair command to findings about a damaged latest version."""
        return tuple(
            replace(finding, fix=finding.fix or (_repair_command(finding.code) if can_repair else None))
            for finding in self._findings
        )


def _repair_command(code: str) -> str | None:
    """Return the command that repairs damage in the latest version, if any.

    Damaged data files are found only by a deep check.
    """
    if code not in _DAMAGE:
        return None
    return "repair --deep --to-last-good" if code == "table-file-corrupt" else "repair --to-last-good"


class ChecksumTally:
    """Count files that were read in full, with and without a checksum. Each file is counted once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, tuple[str, bool]] = {}
        self._is_closed = False

    def close(self) -> None:
        """Stop counting, because later reads serve other purposes than checking the files."""
        self._is_closed = True

    def count(self, kind: str, path: str, has_checksum: bool) -> None:
        """Count a file that was read in full and is intact.

        Args:
            kind: The kind of the file, in the singular.
            path: The path of the file.
            has_checksum: Whether the file has a checksum.
        """
        if self._is_closed:
            return
        with self._lock:
            self._seen[path] = (kind, has_checksum)

    @property
    def checked_files(self) -> int:
        """The number of files that were compared with their checksums."""
        return sum(has_checksum for _, has_checksum in self._seen.values())

    @property
    def without_checksum(self) -> Mapping[str, int]:
        """The number of files without a checksum, by kind."""
        counts = Counter(kind for kind, has_checksum in self._seen.values() if not has_checksum)
        return dict(sorted(counts.items()))


def kind_of(path: str) -> str:
    """Return the kind of a catalog file, as text."""
    if path.startswith((OPERATIONS_PREFIX, TABLES_PREFIX)):
        return "operation file"
    return "definition" if path.endswith(".binpb") else "node"


def kinds_text(without_checksum: Mapping[str, int]) -> str:
    """Return the numbers of files by kind as text."""
    return ", ".join(f"{count} {kind if count == 1 else _plural(kind)}" for kind, count in without_checksum.items())


def _plural(kind: str) -> str:
    return f"{kind}s"
