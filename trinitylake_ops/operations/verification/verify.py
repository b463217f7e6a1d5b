"""Verify a lakehouse in one pass that reads every immutable file once (docs/internals/protocol.md, "Verify").

Faults are reported as findings. Verify itself fails only if the storage fails.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from trinitylake_ops.errors import InvalidInputError, StorageError, TrinityLakeError, VersionNotFoundError
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_naming
from trinitylake_ops.format.keys import clock_reset
from trinitylake_ops.format.version_ranges import VersionRanges
from trinitylake_ops.operations.base import MeteredLakehouse, operation_span, uncached_on
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, BudgetSpentError, Spending
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.gc.delete import delete_operation_files
from trinitylake_ops.operations.gc.listing import acknowledged_versions, list_existing
from trinitylake_ops.operations.gc.orphan_search import Orphans
from trinitylake_ops.operations.gc.survey import Survey, expired_versions
from trinitylake_ops.operations.hint import HintState, inspect_hint
from trinitylake_ops.operations.relocate import moved_tables
from trinitylake_ops.operations.verification import state as verify_state
from trinitylake_ops.operations.verification.read_ahead import ReadAhead
from trinitylake_ops.operations.verification.report import Finding, Findings, VerifyReport
from trinitylake_ops.operations.verification.state import ExportVerifier, check_operation_files
from trinitylake_ops.operations.verification.storage import (
    KnownFilesStorage,
    TableRootVerifier,
    check_owners,
    warn_of_missing,
)
from trinitylake_ops.operations.verification.tables import TableVerifier
from trinitylake_ops.operations.verification.versions import VersionVerifier
from trinitylake_ops.operations.verified_files import Records, read_records, write_record
from trinitylake_ops.storage import FileInfo, Storage
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.roots import find_latest, versions_beyond_gap
from trinitylake_ops.versions.snapshot import Snapshot

__all__ = ["Finding", "VerifyReport", "verify"]

_BATCH_ROOTS = 64


def verify(
    lake: Lakehouse,
    progress: Callable[[int, int], None] | None = None,
    *,
    deep: bool = False,
    incremental: bool = False,
    budget: Budget | Spending = NO_LIMITS,
    executor: Executor = LOCAL,
) -> VerifyReport:
    """Check all live versions of a lakehouse, the files they reach, and the records and leftovers of operations.

    Args:
        lake: The lakehouse.
        progress: Called with the number of checked versions and their total.
        deep: Also read data files, and files that are recorded as verified.
        incremental: Keep a record of the verified files in the lakehouse. Files in the record of an earlier run are not
            read again as long as they are unchanged according to the listing. Files that are read are compared with the
            record.
        budget: Limits that end the run early; the report states what was not checked. With ``incremental``, the next
            run continues. All requests count, but finding the latest version and writing the record are never skipped.
        executor: Lists and reads files. An executor that prefetches, like the Spark executor, does not support a
            budget.

    Raises:
        LakehouseNotFoundError: The lakehouse does not exist.
        InvalidInputError: The budget has a request rate, or the executor does not support a budget.
        StorageError: The storage cannot be listed, or no file can be read.
    """
    spending = Spending.of(budget)
    if spending.budget.requests_per_second is not None:
        raise InvalidInputError("verify does not support a request rate; limit the number of requests or the time")
    run = _Verification(lake, executor, spending, deep=deep, incremental=incremental)
    with operation_span("verify"):
        return run.run(progress or (lambda _done, _total: None))


class _Verification:
    """One run of verify, up to the version that is the latest when it begins. The files are listed after that."""

    def __init__(self, lake: Lakehouse, executor: Executor, spending: Spending, *, deep: bool, incremental: bool):
        self._metered = MeteredLakehouse(lake, spending)
        self._plain: Storage = self._metered.lake.storage
        self._limited_executor = executor.limited(self._plain, spending)
        self._has_limits = spending.budget != NO_LIMITS
        self._incremental = incremental
        self._executor = executor
        self._is_deep = deep
        latest = find_latest(self._metered.lake.files.roots)[0]
        self.listing: dict[str, FileInfo] = {}
        self._records = Records({})
        self._stopped: str | None = None
        try:
            listed = list_existing(self._limited_executor, executor, with_catalog=incremental)
            listing = {info.path: info for info in listed}
            self._records = read_records(self._limited_executor, listing.values())
            self.listing = listing
        except BudgetSpentError as spent:
            self._stopped = spent.message
        self._known = KnownFilesStorage(
            self._limited_executor, self.listing, self._records.files, reads_all=deep or not incremental, is_deep=deep
        )
        self.lake = uncached_on(self._known, lake.storage_options)
        self.lake.files.roots.known_naming = self._metered.lake.files.roots.naming
        self.latest = latest
        self.findings = Findings()
        self.tables = TableVerifier(self._known, lake.storage_options, self.listing, self.findings, is_deep=deep)
        self.versions = VersionVerifier(self.lake, self._known, self._plain, self.tables, self.findings)
        self.exports = ExportVerifier(self.lake, self.versions, self.findings)
        self._definition: LakehouseDef | None = None
        self._has_read_ahead = False
        self._orphans: tuple[int, int] | None = None
        self._unclaimed: tuple[str, ...] = ()
        self._table_root: TableRootVerifier | None = None
        self._unchecked: list[str] = []

    def run(self, progress: Callable[[int, int], None]) -> VerifyReport:
        has_listed = self._stopped is None
        steps: dict[str, Callable[[], None]] = {
            "names of roots, records": self._check_listed,
            "settings, leases and purges": self._check_state,
            "hint": self._check_hint,
            "tables under the table root": self._list_table_root,
            "versions": lambda: self._check_versions(progress),
            "exports": self._check_exports,
            "files of operations": self._check_operation_files,
            "owner files of tables": self._check_owners,
            "leftovers of operations": self._check_leftovers,
            "moved tables": self._check_moved,
            "orphans": self._check_orphans,
        }
        for name, step in steps.items():
            try:
                if self._stopped is None:
                    step()
                    continue
            except BudgetSpentError as spent:
                self._stopped = spent.message
            remaining = f" {VersionRanges(((self.versions.done, self.latest),))}" if name == "versions" else ""
            self._unchecked.append(name + remaining)
        for message, path, version in self.tables.unreadable_external:
            self.findings.warn("external-unreadable", message, path, version, None)
        self._check_changed()
        record_path = self._write_record() if self._incremental and has_listed else None
        return self._report(record_path)

    def _report(self, record_path: str | None) -> VerifyReport:
        damaged = VersionRanges.of(self.versions.damaged)
        return VerifyReport(
            latest_version=self.latest,
            versions=self.versions.versions,
            nodes=self.versions.tree.nodes,
            definitions=self.versions.objects.definitions,
            table_files=self.tables.files,
            exports=self.exports.exports,
            clones=self.exports.clones,
            known_files=self._known.n_known,
            damaged_versions=str(damaged),
            damaged_objects=self.versions.damaged_objects if self.latest in damaged else (),
            orphan_files=None if self._orphans is None else self._orphans[0],
            orphan_bytes=None if self._orphans is None else self._orphans[1],
            findings=self.findings.all(can_repair=self.latest in damaged and self._definition is not None),
            stopped=self._stopped,
            unchecked=tuple(self._unchecked),
            unanswered=tuple(sorted(self._known.unanswered)),
            not_allowed=dict(sorted(self.tables.not_allowed.items())),
            record_path=record_path,
            checked_files=self._known.tally.checked_files,
            without_checksum=self._known.tally.without_checksum,
            cost=self._metered.cost(),
            _root=self.lake.root,
            _records=self.versions.records(),
            _unclaimed=self._unclaimed,
            _latest=self._latest_snapshot(),
        )

    def _latest_snapshot(self) -> Snapshot | None:
        """Return the latest version, read from the storage without known files, or None if its root was not read."""
        root = self.versions.last_root
        if root is None or self.versions.done <= self.latest:
            return None
        files = self._metered.lake.files
        return Snapshot(files, self.latest, files.roots.path(self.latest), root)

    def _check_listed(self) -> None:
        """Check the listed root names, and report damaged records."""
        self._check_names()
        for path, message in sorted(self._records.damaged.items()):
            self.findings.warn("record-damaged", f"{message}; it is ignored", path, None, "verify --incremental")

    def _check_names(self) -> None:
        """Check that root names follow one scheme and are contiguous. Anything else indicates tampering."""
        roots = self.lake.files.roots
        versions = []
        for path in sorted(self.listing):
            naming = root_naming(path)
            if naming == roots.naming:
                versions += self._version_named(path)
            elif naming is not None:
                message = f"a root file with another naming scheme than {roots.path(self.latest)!r}"
                self.findings.error("root-naming-mixed", message, path, None)
        for version in versions_beyond_gap(roots, self.latest, versions):
            self.findings.error(
                "root-beyond-gap", "a root exists after a missing version", roots.path(version), version
            )

    def _version_named(self, path: str) -> list[int]:
        """Return the version of a root file. If the number is not valid, report a finding and return nothing."""
        try:
            version = parse_root_path(path)
        except VersionNotFoundError as error:
            self.findings.error("root-beyond-gap", error.message, path, error.version)
            return []
        return [] if version is None else [version]

    def _check_state(self) -> None:
        """Check the operation records in the latest version, and which operation is running."""
        running = verify_state.running_operation(self.lake.storage, self.listing, self.findings.warn)
        definition = self._read_definition()
        if definition is not None:
            latest = Snapshot.of(self.lake.files, self.latest)
            verify_state.check_barrier(latest, self.findings.warn)
            verify_state.check_expirations(latest, self.findings.error)
            verify_state.check_purges(latest, running, self.findings.warn)
            verify_state.check_plans(
                self.lake.storage,
                latest,
                lambda: self._metered.lake.snapshot().definition,
                self.listing,
                self.findings.warn,
            )
        else:
            self._unchecked.append("purges, because the latest definition cannot be read")

    def _read_definition(self) -> LakehouseDef | None:
        """Return the latest lakehouse definition, or None if it is unreadable, which is reported with the version."""
        if self._definition is None:
            with contextlib.suppress(TrinityLakeError):
                latest = Snapshot.of(self.lake.files, self.latest)
                self._definition = latest.definition
                self.versions.clock_reset = clock_reset(latest.root.system, self.latest)
        return self._definition

    def _check_exports(self) -> None:
        definition = self._read_definition()
        if definition is None:
            self._unchecked.append("exports, because the latest definition cannot be read")
        else:
            self.exports.check(definition)

    def _check_versions(self, progress: Callable[[int, int], None]) -> None:
        purged = self._expired_versions(ExpirationState.PURGED)
        self._executor.prefetch(lambda: self._read_ahead(purged))
        if self._definition is not None:
            self.versions.acknowledged = acknowledged_versions(self._definition)
        batch = max(1, self.lake.storage.concurrency) if self._has_limits else _BATCH_ROOTS
        self.versions.check(self.latest, purged, batch, progress)

    def _read_ahead(self, purged: VersionRanges) -> None:
        """Read the files that versions and exports under this root reach, using the executor."""
        read_ahead = ReadAhead(
            self._executor,
            self._plain,
            self.lake.storage_options,
            self._known,
            self.listing,
            keeps_bytes=self._incremental,
        )
        roots = [self.lake.files.roots.path(version) for version in range(self.latest + 1) if version not in purged]
        exported = () if self._definition is None else self._definition.exported_snapshots.values()
        read_ahead.walk([*roots, *(path for path in exported if path in self.listing)], is_deep=self._is_deep)
        self.versions.objects.prefetched = read_ahead.definitions
        self.tables.prefetched = read_ahead.contents
        self.tables.has_seals.update(read_ahead.has_seals)
        self._has_read_ahead = True

    def _expired_versions(self, *states: ExpirationState) -> VersionRanges:
        try:
            return VersionRanges() if self._definition is None else expired_versions(self._definition, states)
        except TrinityLakeError:  # reported with the definition
            return VersionRanges()

    def _survey(self) -> Survey | None:
        """Return the survey of roots that deleting operations use, or None if some roots cannot be read."""
        if self._definition is None or len(self.versions.roots) <= self.latest:
            return None
        purged = self._expired_versions(ExpirationState.PURGED)
        roots = {version: root for version, root in self.versions.roots.items() if version not in purged}
        paths = {version: self.lake.files.roots.path(version) for version in self.versions.roots}
        written_ms = {
            version: self.listing[path].last_modified_ms for version, path in paths.items() if path in self.listing
        }
        lake = self._metered.lake if self._has_read_ahead else self.lake
        return Survey(lake, Snapshot.of(self.lake.files, self.latest), roots, written_ms, self._executor)

    def _check_operation_files(self) -> None:
        """In a deep run, read the operation files."""
        if self._is_deep:
            check_operation_files(self._known, self.listing, self.findings)

    def _list_table_root(self) -> None:
        """List the table files under the table root, so that they need no separate requests."""
        definition = self._read_definition()
        if definition is not None and definition.table_root:
            self._table_root = TableRootVerifier(self._metered.lake, definition)
            self.tables.listing |= self._table_root.listing

    def _check_owners(self) -> None:
        self._unclaimed = check_owners(
            self._known,
            self.listing,
            self.tables.managed_ids,
            self._read_definition(),
            self.findings,
            is_deep=self._is_deep,
        )
        if self._table_root is not None:  # owner files of its tables must not be under this root
            self._unclaimed = tuple(
                table_id for table_id in self._unclaimed if table_id not in self._table_root.table_ids
            )
            self._table_root.check(self.tables.managed_ids, self.findings, is_deep=self._is_deep)
        warn_of_missing(self._unclaimed, self.findings)

    def _check_leftovers(self) -> None:
        """Check pins, changes to the definition by other programs, and files that operations left behind."""
        self._known.tally.close()  # later steps read files for purposes other than checking them
        survey = self._survey()
        if survey is None:
            self._unchecked.append("leftovers of operations, because not all roots can be read")
            return
        try:
            verify_state.check_pins(survey, self.findings)
            verify_state.check_reconciled(survey, self.findings.warn)
            if not self._incremental:  # the check needs all definitions, which an incremental run does not read
                verify_state.check_names(Snapshot.of(self.lake.files, self.latest), self.findings.warn)
            verify_state.check_leftovers(survey, self.listing, self.findings.warn)
        except TrinityLakeError as error:
            self._unchecked.append(f"leftovers of operations: {error.message}")

    def _check_orphans(self) -> None:
        survey = self._survey()
        if survey is None:
            self._unchecked.append("orphans, because not all roots can be read")
            return
        try:
            orphans = self._orphans_of(survey)
        except TrinityLakeError as error:
            self._unchecked.append(f"orphans: {error.message}")
            return
        sizes_bytes = {**orphans.sizes_bytes, **orphans.owners}
        self._orphans = (len(sizes_bytes), sum(sizes_bytes.values()))
        if sizes_bytes:
            path = min(sizes_bytes)
            message = f"{len(sizes_bytes)} orphans with {sum(sizes_bytes.values())} bytes, for example {path!r}"
            self.findings.warn("orphans", message, path, None, "orphans")

    def _orphans_of(self, survey: Survey) -> Orphans:
        if not self._has_read_ahead:
            return verify_state.orphans_of(survey, self.listing, self.tables.walk)
        # Marking reads everything again, so the memory of the prefetched files is freed first.
        self.versions.objects.discard_prefetched()
        if not self._incremental:
            self._known.discard_contents()
        return verify_state.relisted_orphans(survey)

    def _check_moved(self) -> None:
        """Warn once about tables of the latest version that refer to a former location of the lakehouse."""
        latest = self._latest_snapshot() if self.tables.has_moved else None
        if latest is None:
            return
        try:
            moved, damaged = moved_tables(self._metered.lake, latest)
        except TrinityLakeError as error:  # reported with the content
            self._unchecked.append(f"moved tables: {error.message}")
            return
        for damage in damaged.values():  # reported with the table
            self._unchecked.append(f"a table that may have moved: {damage.message}")
        if moved:
            message = (
                f"{len(moved)} tables, for example {moved[0].name}, refer to the location of the lakehouse before it"
                " was copied or moved; this library finds their files, but other engines do not"
            )
            self.findings.warn("moved", message, moved[0].files.metadata, self.latest, "relocate")

    def _check_hint(self) -> None:
        hint = inspect_hint(self.lake)
        if hint.state != HintState.RIGHT:
            fix = "repair-hint"
            message = f"the hint is {hint.state}: it names {hint.hinted}, the latest version is {hint.latest}"
            if hint.state == HintState.AHEAD and hint.hinted is not None:
                message += f"; unless the hint is wrong, {self.lake.files.roots.path(hint.hinted)!r} is missing"
                fix = "a backup of that root; if it never existed, repair-hint"
            self.findings.warn("hint-wrong", message, HINT_PATH, hint.latest, fix)

    def _check_changed(self) -> None:
        """Report files that have changed since they were verified, although file names are never reused."""
        for path in sorted(self._known.changed):
            row = self._records.files[path]
            message = f"it differs from the verified file of {row.size_bytes} bytes with SHA-256 {row.sha256.hex()}"
            self.findings.error("file-changed", message, path, None)

    def _write_record(self) -> str | None:
        try:
            path = write_record(self._plain, self._known.verified(self.findings.wrong_paths()))
            delete_operation_files(self._plain, list(dict.fromkeys((*self._records.paths, *self._records.damaged))))
            return path
        except StorageError as error:
            message = f"the verified files could not be recorded, so the next run reads them again: {error.message}"
            self.findings.warn("record-not-written", message, error.path, None, None)
            return None
