"""Check the records and leftovers of operations: exports, expired versions, leases, plans and orphans."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager

from trinitylake_ops.errors import (
    CorruptFileError,
    FileMissingError,
    InvalidLocationError,
    MaintenanceBlockedError,
    StorageError,
    TrinityLakeError,
)
from trinitylake_ops.format.checksums import MAX_FILE_LIST_BYTES, MAX_NOTE_BYTES
from trinitylake_ops.format.definitions import (
    ExpirationState,
    ExportLevel,
    ExportRecord,
    ExportState,
    LakehouseDef,
    SavedTransaction,
)
from trinitylake_ops.format.file_names import (
    MAINTENANCE_STATE_PATH,
    OPERATIONS_PREFIX,
    ORPHAN_BARRIER_PATH,
    is_operation_path,
    lease_path,
    parse_lease_path,
)
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.format.sealed_files import decode_sealed_json
from trinitylake_ops.operations.export_records import EXPORT, check_manifest, kind_of, record_of
from trinitylake_ops.operations.gc.listing import list_without, may_be_lakehouse_file
from trinitylake_ops.operations.gc.mark import Mark, retained_roots
from trinitylake_ops.operations.gc.orphan_search import Orphans, find_orphans, find_table_root_orphans
from trinitylake_ops.operations.gc.plan_files import PlanFile
from trinitylake_ops.operations.gc.survey import Survey, expired_versions, pinned_versions
from trinitylake_ops.operations.gc.table_files import TableWalk
from trinitylake_ops.operations.retention import protected_ms
from trinitylake_ops.operations.verification.report import Findings, Report
from trinitylake_ops.operations.verification.storage import KnownFilesStorage
from trinitylake_ops.operations.verification.versions import VersionVerifier
from trinitylake_ops.storage import TEMPORARY_PREFIX, FileInfo, Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.time_to_live import recorded_barrier_ms
from trinitylake_ops.versions.snapshot import Snapshot, utc_of
from trinitylake_ops.versions.table_names import TableNames

#: Reports a warning by its code, message, path, version and fix.
Warn = Callable[[str, str, str | None, int | None, str | None], None]

_NO_ORPHANS = Orphans(sizes_bytes={}, owners={}, unowned_files=0, unowned_bytes=0)
_UNKNOWN = "an operation"
_LEFTOVERS = (
    (f"{OPERATIONS_PREFIX}plan-", "plan-left", "plan files that no batch of expired versions refers to"),
    (f"{OPERATIONS_PREFIX}txn-", "transaction-left", "saved transactions older than txn_ttl_millis"),
    (f"{OPERATIONS_PREFIX}export-", "export-left", "export manifests without a record"),
    ("_export_", "export-left", "export roots without a record"),
)


def running_operation(storage: Storage, listing: Mapping[str, FileInfo], warn: Warn) -> str | None:
    """Return the operation that holds the lease, or None. Warn about an interrupted operation.

    If the lease was taken over since the listing or cannot be read, the operation is unknown.

    Args:
        storage: The storage of the lakehouse.
        listing: The listed files by path.
        warn: Reports a warning.
    """
    newest = max((parse_lease_path(path) or 0 for path in listing), default=0)
    if not newest:
        return None
    path = lease_path(newest)
    try:
        content = json.loads(storage.read(path, limit_bytes=MAX_NOTE_BYTES))
        operation, expires_at_ms = str(content["operation"]), int(content["expires_at_ms"])
    except FileMissingError:
        return _UNKNOWN
    except (CorruptFileError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
        warn("lease-stale", "the newest lease cannot be read; it expires by its age", path, None, None)
        return None
    except StorageError as error:
        warn("lease-unreadable", f"the newest lease cannot be read: {error.message}", path, None, None)
        return _UNKNOWN
    if expires_at_ms > storage.now_ms():
        return operation
    if expires_at_ms:
        ended = f"{utc_of(expires_at_ms):%Y-%m-%d %H:%M:%S} UTC"
        message = f"{operation} was interrupted or could not release its lease, which expired at {ended}"
        warn("lease-stale", message, path, None, operation)
    return None


def check_barrier(latest: Snapshot, warn: Warn) -> None:
    """Warn if the recorded time of an orphan removal is in the future."""
    definition, now_ms = latest.definition, latest.files.storage.now_ms()
    if recorded_barrier_ms(definition, now_ms) != definition.orphans_removed_before_millis:
        message = (
            f"an orphan removal with a wrong clock recorded a barrier at"
            f" {utc_of(definition.orphans_removed_before_millis):%Y-%m-%d %H:%M:%S} UTC, which is in the future:"
            " transactions that take longer than a minute fail"
        )
        warn("barrier-in-future", message, latest.definition_location, latest.version, "orphans")


def check_expirations(latest: Snapshot, report: Report) -> None:
    """Report batches of expired versions that cannot be read or contain versions that cannot have expired."""
    for batch in latest.definition.expirations:
        try:
            ranges = batch.ranges().ranges
        except CorruptFileError as error:
            report("definition-unreadable", error.message, latest.definition_location, latest.version)
            continue
        if ranges and ranges[-1][1] >= latest.version:
            message = f"expiration {batch.id!r} has versions {batch.versions}, but the latest is {latest.version}"
            report("definition-unreadable", message, latest.definition_location, latest.version)


def check_purges(latest: Snapshot, running: str | None, warn: Warn) -> None:
    """Warn about interrupted purges.

    Args:
        latest: The latest version.
        running: The operation that holds the lease, if any.
        warn: Reports a warning.
    """
    for batch in latest.definition.expirations:
        if batch.state == ExpirationState.PURGING and running not in ("purge", _UNKNOWN):
            message = f"the purge of versions {batch.versions} was interrupted"
            warn("purge-unfinished", message, batch.plan_path or None, batch.expired_at_version, "purge")


def check_plans(
    storage: Storage, latest: Snapshot, newest: Callable[[], LakehouseDef], listing: Container[str], warn: Warn
) -> None:
    """Warn about expired versions whose plan file is missing.

    Args:
        storage: The storage of the lakehouse.
        latest: The latest version.
        newest: Reads the latest definition again, because a purge may have finished in the meantime.
        listing: The paths of the listed files.
        warn: Reports a warning.
    """
    states = (ExpirationState.EXPIRED, ExpirationState.PURGING)
    missing = [
        batch
        for batch in latest.definition.expirations
        if batch.state in states
        and batch.plan_path
        and batch.plan_path not in listing
        and isinstance(storage.read_available([batch.plan_path], limit_bytes=MAX_FILE_LIST_BYTES)[0], FileMissingError)
    ]
    referenced = {batch.plan_path for batch in newest().expirations} if missing else set()
    for batch in missing:
        if batch.plan_path in referenced:
            message = (
                f"the plan file of the expired versions {batch.versions} is missing; a purge leaves their files as"
                " orphans"
            )
            warn("plan-missing", message, batch.plan_path, batch.expired_at_version, "purge")


def check_pins(survey: Survey, findings: Findings) -> None:
    """Report exports and clones that need the files of purged versions."""
    purged = expired_versions(survey.definition, (ExpirationState.PURGING, ExpirationState.PURGED))
    for version, pins in sorted(pinned_versions(survey, survey.lake.storage.now_ms()).items()):
        if version in purged:
            message = f"version {version} was purged but is needed by {', '.join(pins)}"
            kinds = {"clone" if pin.startswith("clone ") else "export" for pin in pins}
            fix = " and ".join(f"drop-{kind}" for kind in sorted(kinds))
            findings.error("export-unpinned", message, None, version, fix)


def check_reconciled(survey: Survey, warn: Warn) -> bool:
    """Warn about an unreconciled change to the lakehouse definition. Return whether there is no such change."""
    try:
        survey.check_reconciled()
    except MaintenanceBlockedError as error:
        path = None if error.version is None else survey.lake.files.roots.path(error.version)
        warn("reconcile-needed", error.message, path, error.version, "reconcile")
        return False
    return True


def check_leftovers(survey: Survey, listing: Mapping[str, FileInfo], warn: Warn) -> None:
    """Warn about operation files that no definition refers to and that are too old to be in use.

    Args:
        survey: The roots of the lakehouse.
        listing: The listed files by path.
        warn: Reports a warning.

    Raises:
        StorageError: A storage request failed.
    """
    before_ms = survey.lake.storage.now_ms() - protected_ms(survey.definition)
    old = [path for path, info in listing.items() if info.last_modified_ms < before_ms and is_operation_path(path)]
    kept = retained_roots(survey).paths if old else ()
    for prefix, code, description in _LEFTOVERS:
        leftovers = sorted(path for path in old if path.startswith(prefix) and path not in kept)
        if leftovers:
            more = f", {leftovers[0]!r} and {len(leftovers) - 1} more" if len(leftovers) > 1 else ""
            warn(code, f"{len(leftovers)} {description}{more}", leftovers[0], None, "orphans")


def orphans_of(survey: Survey, listing: Mapping[str, FileInfo], walk: TableWalk) -> Orphans:
    """Find the orphans at a version, using a listing of all files.

    Args:
        survey: The roots of the lakehouse.
        listing: The listed files by path.
        walk: Yields the files of a table without reading checked files again.

    Raises:
        MaintenanceBlockedError: A purge is unfinished.
        TrinityLakeError: A file required for marking cannot be read.
    """
    _check_no_purge(survey)
    storage = survey.lake.storage
    before_ms = storage.now_ms() - protected_ms(survey.definition)
    listed: Iterable[FileInfo] = [*listing.values(), *storage.list(TEMPORARY_PREFIX)]
    is_any_old = any(info.last_modified_ms < before_ms and may_be_lakehouse_file(info.path) for info in listed)
    if not is_any_old and not survey.definition.table_root:
        return _NO_ORPHANS
    return _all_orphans(survey, Mark(survey, walk=walk), listed)


def relisted_orphans(survey: Survey) -> Orphans:
    """Find the orphans at a version without a complete listing. The executor lists only unreached files.

    Raises:
        MaintenanceBlockedError: A purge is unfinished.
        TrinityLakeError: A file required for marking cannot be read.
    """
    _check_no_purge(survey)
    storage, executor = survey.lake.storage, survey.executor
    before_ms = storage.now_ms() - protected_ms(survey.definition)
    try:
        mark = Mark(survey)
    except TrinityLakeError:
        if any(info.last_modified_ms < before_ms for info in list_without(storage, executor, ())):
            raise
        return _NO_ORPHANS  # all files are too new
    return _all_orphans(survey, mark, list_without(storage, executor, mark.catalog.paths))


def _all_orphans(survey: Survey, mark: Mark, listed: Iterable[FileInfo]) -> Orphans:
    """Return the orphans under the root, based on a listing, and the orphans under the table root."""
    now_ms, age_ms = survey.lake.storage.now_ms(), protected_ms(survey.definition)
    orphans = find_orphans(survey.lake, mark, listed, now_ms - age_ms)
    return Orphans.of_all(orphans, find_table_root_orphans(mark, now_ms, age_ms))


def check_names(latest: Snapshot, warn: Warn) -> None:
    """Warn about tables that have several names in the latest version. Raises StorageError."""
    for names in TableNames().shared(latest):
        text = ", ".join(map(str, names[:3]))
        message = f"{text} are names of one table: they share its id, its files and its access rights"
        warn("table-has-two-names", message, latest.location, latest.version, None)


def _check_no_purge(survey: Survey) -> None:
    for batch in survey.definition.expirations:
        if batch.state == ExpirationState.PURGING:
            raise MaintenanceBlockedError(f"the purge of versions {batch.versions} is unfinished")


_BATCH_FILES = 256


def check_operation_files(known_files: KnownFilesStorage, listing: Mapping[str, FileInfo], findings: Findings) -> None:
    """Read all operation files, and report files that are damaged or have the name of another file.

    Args:
        known_files: Reads the files.
        listing: The listed files by path.
        findings: Receives the errors.
    """
    paths = sorted(path for path in listing if _decoder_of(path) is not None)
    for start in range(0, len(paths), _BATCH_FILES):
        batch = paths[start : start + _BATCH_FILES]
        errors = run_parallel(lambda path: _error_in(known_files, path), batch, known_files.concurrency)
        for path, error in zip(batch, errors, strict=True):
            if error is not None:
                findings.error("operation-file-damaged", error.message, path, None)


def _error_in(known_files: KnownFilesStorage, path: str) -> StorageError | None:
    decode = _decoder_of(path)
    assert decode is not None
    try:
        data = known_files.read(path, limit_bytes=_limit_bytes(path))
        decode(data, path)
    except FileMissingError:  # the operation has finished since the listing
        return None
    except StorageError as error:
        return error
    known_files.count_checksum(path, data)
    return None


def _limit_bytes(path: str) -> int:
    is_note = path in (MAINTENANCE_STATE_PATH, ORPHAN_BARRIER_PATH) or parse_lease_path(path) is not None
    return MAX_NOTE_BYTES if is_note else MAX_FILE_LIST_BYTES


def _decoder_of(path: str) -> Callable[[bytes, str], object] | None:
    """Return the decoder of an operation file, or None for other files.

    Records of verify have no decoder here, because they are read anyway.
    """
    if not path.startswith(OPERATIONS_PREFIX) or path.startswith(TEMPORARY_PREFIX):
        return None
    if path.endswith(".binpb"):
        return SavedTransaction.from_bytes
    if path.startswith(f"{OPERATIONS_PREFIX}plan-"):
        return PlanFile.from_bytes
    return decode_sealed_json if path.endswith(".json") else None


#: The age at which an incomplete export counts as interrupted.
_INTERRUPTED_AFTER_MS = 7 * 24 * 3600 * 1000


class ExportVerifier:
    """Check the exports and clones that a lakehouse definition records."""

    def __init__(self, lake: Lakehouse, versions: VersionVerifier, findings: Findings):
        self._lake = lake
        self._versions = versions
        self._findings = findings
        #: The number of exports with a root.
        self.exports = 0
        #: The number of clones.
        self.clones = 0

    def check(self, definition: LakehouseDef) -> None:
        """Check all exports and clones."""
        now_ms = self._lake.storage.now_ms()
        for record in definition.exports:
            if record.state == ExportState.COPYING and now_ms - record.created_at_millis > _INTERRUPTED_AFTER_MS:
                kind = kind_of(record)
                message = f"{kind} {record.name!r} was interrupted more than 7 days ago; finish or drop it"
                fix = f"{kind} or drop-{kind}"
                self._findings.warn("export-cut-off", message, record.manifest_path, record.version, fix)
            elif record.state == ExportState.COPYING:
                self._check_incomplete(record)
            elif record.state == ExportState.COMPLETE:
                with self._unless_dropped(record.name, definition):
                    self._check_complete(record, definition.exported_snapshots)
        self._check_names(definition)
        clones: set[str] = set()
        for name, location in sorted(definition.exported_snapshots.items()):
            recorded = record_of(definition, name)
            if recorded is not None and recorded.clone_id:
                clones.add(recorded.clone_id)  # a refresh adds another record for the same clone
            else:
                self.exports += 1
            if self._is_external(location):
                continue
            with self._unless_dropped(name, definition):
                try:
                    self._versions.check_content(self._lake.snapshot(name))
                except TrinityLakeError as error:
                    self._error(name, "export-unreadable", error.message, error.path or location)
        self.clones = len(clones)

    def _check_names(self, definition: LakehouseDef) -> None:
        """Report names that several records share: operations use only one of the records, but a drop removes all."""
        for name, count in Counter(record.name for record in definition.exports).items():
            if count > 1:
                fix = f"drop-{kind_of(record_of(definition, name))}"
                message = f"{count} exports or clones have the name {name!r}; dropping it drops all of them"
                self._findings.error("name-taken-twice", message, None, None, fix)

    @contextmanager
    def _unless_dropped(self, name: str, definition: LakehouseDef) -> Iterator[None]:
        """Discard findings from the block if the export has been dropped, because its files may have been deleted.

        An export with the same name may have been created since. The next run checks the new export.
        """

        def is_dropped() -> bool:
            try:
                return _locations(self._lake.snapshot().definition, name) != _locations(definition, name)
            except TrinityLakeError:
                return False

        with self._findings.unless(is_dropped) as are_discarded:
            yield
        if are_discarded():
            self._versions.tree.reset_broken()

    def _is_external(self, location: str) -> bool:
        """Whether a location is outside this root. An invalid location counts as inside, so that it is checked."""
        try:
            return is_uri(to_location(self._lake.root, location))
        except InvalidLocationError:
            return False

    def _check_incomplete(self, record: ExportRecord) -> None:
        """Warn if an incomplete export within this root has no manifest that protects its copies."""
        if not record.manifest_path or record.target_uri or record.level == ExportLevel.MINIMAL:
            return
        (content,) = self._lake.storage.read_available([record.manifest_path], limit_bytes=MAX_FILE_LIST_BYTES)
        if isinstance(content, FileMissingError):
            message = (
                f"export {record.name!r} is incomplete and has no manifest: it began just now, or the file is missing;"
                " its copies are orphans until it is finished"
            )
            self._findings.warn(
                "manifest-missing", message, record.manifest_path, record.version, "export or drop-export"
            )

    def _check_complete(self, record: ExportRecord, exported: Mapping[str, str]) -> None:
        if record.name not in exported:
            message = "it is complete, but there is no exported snapshot with its name"
            self._error(record.name, "export-unreadable", message, record.root_location, kind_of(record))
        if record.manifest_path:
            try:
                check_manifest(self._lake.storage, record)
            except TrinityLakeError as error:
                path = error.path or record.manifest_path
                self._error(record.name, "export-damaged", error.message, path, kind_of(record))

    def _error(self, name: str, code: str, message: str, path: str, kind: str = EXPORT) -> None:
        self._findings.error(code, f"{kind} {name!r}: {message}", path, None, f"drop-{kind}")


def _locations(definition: LakehouseDef, name: str) -> tuple[str | None, set[tuple[str, str]]]:
    """Return the locations of an export, which distinguish it from other exports with the same name."""
    records = [record for record in definition.exports if record.name == name]
    locations = {(record.root_location, record.manifest_path) for record in records}
    return definition.exported_snapshots.get(name), locations
