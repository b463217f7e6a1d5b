"""Verify: one pass over all versions that reads every immutable file once (docs/protocol.md, "Invariants").

What is wrong becomes a finding; verify itself fails only where the storage does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from rich.table import Table

from trinitylake_ops.errors import CorruptFileError, StorageError, TrinityLakeError, VersionNotFoundError
from trinitylake_ops.format.definitions import ExportRecord, ExportState
from trinitylake_ops.format.file_names import HINT_PATH, parse_root_path, root_naming
from trinitylake_ops.format.limits import IMMUTABLE_SETTINGS
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.format.node_file import PREVIOUS_ROOT, NodeFile, decode_node
from trinitylake_ops.maintenance.export import check_manifest
from trinitylake_ops.maintenance.hint import HintState, inspect_hint
from trinitylake_ops.maintenance.report import Cost, Document, MeteredLakehouse, new_table
from trinitylake_ops.maintenance.verify_objects import ObjectVerifier
from trinitylake_ops.maintenance.verify_tree import TreeVerifier
from trinitylake_ops.maintenance.version_record import VersionRecord
from trinitylake_ops.storage.interface import CLOCK_MARGIN_MS
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.snapshot import Snapshot, utc_datetime
from trinitylake_ops.transaction.versions import find_latest, versions_beyond_gap

_STALE_EXPORT_MS = 7 * 24 * 3600 * 1000
_BATCH = 64

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that is not as it must be. ``mend`` names the operation that puts it right, where one does.

    An error means that something cannot be read, or will be lost; a warning costs time or space.
    """

    severity: Severity
    code: str
    message: str
    path: str | None = None
    version: int | None = None
    mend: str | None = None


@dataclass(frozen=True, kw_only=True)
class VerifyReport(Document):
    """What verify looked at and found."""

    latest_version: int
    versions: int
    nodes: int
    definitions: int
    table_files: int
    exports: int
    findings: tuple[Finding, ...]
    cost: Cost
    _root: str = field(repr=False, compare=False)
    _records: tuple[VersionRecord, ...] = field(repr=False, compare=False)
    _latest: Snapshot | None = field(repr=False, compare=False)

    @property
    def root(self) -> str:
        """The root URI of the lakehouse."""
        return self._root

    @property
    def records(self) -> tuple[VersionRecord, ...]:
        """What the roots say of all versions, ascending."""
        return self._records

    @property
    def latest(self) -> Snapshot | None:
        """The latest version when it began, read past all caches; None where its root cannot be read."""
        return self._latest

    @property
    def is_clean(self) -> bool:
        """Whether there is no error; warnings, such as a stale hint, are part of normal life."""
        return all(finding.severity != "error" for finding in self.findings)

    def table(self) -> Table:
        """Return a row for each finding, under a title that says what was looked at."""
        title = (
            f"{'Clean' if self.is_clean else 'Not clean'}: {self.versions} versions, {self.nodes} nodes,"
            f" {self.definitions} definitions, {self.table_files} table files, {self.exports} exports;"
            f" {self.cost.total_requests} requests, {self.cost.duration_ms / 1000:.1f} s"
        )
        rows = [
            (finding.severity, finding.code, finding.message, finding.version, finding.path, finding.mend)
            for finding in self.findings
        ]
        return new_table(title, "severity", "finding", "what", "version", "path", "mended by", rows=rows)


def verify(lake: Lakehouse, progress: Callable[[int, int], None] | None = None) -> VerifyReport:
    """Check all live versions of a lakehouse and the files they reach.

    ``progress`` is told how many versions are done, and of how many. Raises LakehouseNotFoundError,
    and StorageError where the storage refuses to list or read at all.
    """
    metered = MeteredLakehouse(lake)
    return _Verification(metered.lake).run(progress or (lambda _done, _all: None), metered)


class _Verification:
    """One run of verify, up to the version that is the latest when it begins; the listing comes after it."""

    def __init__(self, lake: Lakehouse):
        self.lake = lake
        self.latest = find_latest(lake.files.roots)[0]
        self._now_ms = lake.storage.now_ms()
        self.findings: list[Finding] = []
        self._reported: set[tuple[str, str | None]] = set()
        self.listing: dict[str, int] = {}
        self.tree = TreeVerifier(lake.files, self._error)
        self.objects = ObjectVerifier(lake, self.listing, self._error)
        self.records: list[VersionRecord] = []
        self.latest_snapshot: Snapshot | None = None
        self.versions = 0
        self.n_exports = 0
        self._settings: dict[str, object] = {}

    def run(self, progress: Callable[[int, int], None], metered: MeteredLakehouse) -> VerifyReport:
        self.listing.update((info.path, info.size_bytes) for info in self.lake.storage.list())
        self._check_names()
        self._check_versions(progress)
        self._check_exports()
        self._check_hint()
        return VerifyReport(
            latest_version=self.latest,
            versions=self.versions,
            nodes=self.tree.nodes,
            definitions=self.objects.definitions,
            table_files=self.objects.table_files,
            exports=self.n_exports,
            findings=tuple(self.findings),
            cost=metered.cost(),
            _root=self.lake.root,
            _records=tuple(self.records),
            _latest=self.latest_snapshot,
        )

    def _error(self, code: str, message: str, path: str | None, version: int | None) -> None:
        """Report an error once, with the oldest version that shows it."""
        if (code, path) not in self._reported or code == "tree-invariant":
            self._reported.add((code, path))
            self.findings.append(Finding(severity="error", code=code, message=message, path=path, version=version))

    def _check_names(self) -> None:
        """Root names are of one naming and contiguous; one missing, or beyond the latest, was tampered with."""
        roots = self.lake.files.roots
        versions = []
        for path in sorted(self.listing):
            naming = root_naming(path)
            if naming == roots.naming:
                versions += self._version_named(path)
            elif naming is not None:
                message = f"a root file of another naming than this lakehouse's, such as {roots.path(self.latest)!r}"
                self._error("root-naming-mixed", message, path, None)
        for version in versions_beyond_gap(roots, self.latest, versions):
            self._error("root-beyond-gap", "a root stands beyond a missing version", roots.path(version), version)

    def _version_named(self, path: str) -> list[int]:
        """Return the version of a root file; none, but a finding, where no version can have its number."""
        try:
            version = parse_root_path(path)
        except VersionNotFoundError as error:
            self._error("root-beyond-gap", error.message, path, error.version)
            return []
        return [] if version is None else [version]

    def _check_versions(self, progress: Callable[[int, int], None]) -> None:
        before_ms = -1
        for start in range(0, self.latest + 1, _BATCH):
            versions = range(start, min(start + _BATCH, self.latest + 1))
            contents = self.lake.storage.read_available([self.lake.files.roots.path(version) for version in versions])
            for version, data in zip(versions, contents, strict=True):
                root = self._decoded_root(version, data)
                if root is None:
                    self.records.append(VersionRecord(version=version, is_readable=False))
                else:
                    self.records.append(VersionRecord.of(version, root.system))
                    before_ms = self._check_root(version, root, before_ms)
                progress(version + 1, self.latest + 1)

    def _decoded_root(self, version: int, data: bytes | StorageError) -> NodeFile | None:
        path = self.lake.files.roots.path(version)
        if isinstance(data, StorageError):
            self._error("root-missing", f"the root of version {version} cannot be read: {data.message}", path, version)
            return None
        try:
            return decode_node(data, path)
        except CorruptFileError as error:
            self._error("root-corrupt", error.message, path, version)
            return None

    def _check_root(self, version: int, root: NodeFile, before_ms: int) -> int:
        """Check one version; returns its time."""
        roots = self.lake.files.roots
        path = roots.path(version)
        expected = roots.path(version - 1) if version > 0 else None
        if root.system.get(PREVIOUS_ROOT) != expected:
            message = f"previous_root is {root.system.get(PREVIOUS_ROOT)!r}, not {expected!r}"
            self._error("chain-broken", message, path, version)
        if root.created_at_ms <= before_ms:
            message = f"created at {root.created_at_ms} ms, not after its predecessor at {before_ms} ms"
            self._error("time-not-rising", message, path, version)
        if root.created_at_ms > self._now_ms + CLOCK_MARGIN_MS:
            self._check_future(path, version, root.created_at_ms)
        if not root.is_sealed:
            self.versions += 1
            snapshot = Snapshot(self.lake.files, version, path, root)
            self.latest_snapshot = snapshot if version == self.latest else None
            self._check_content(snapshot)
        return root.created_at_ms

    def _check_future(self, path: str, version: int, created_at_ms: int) -> None:
        """Warn, once, of a writer whose clock was wrong: later versions take its time and one millisecond more."""
        if ("time-in-future", None) not in self._reported:
            self._reported.add(("time-in-future", None))
            message = f"created at {utc_datetime(created_at_ms):%Y-%m-%d %H:%M:%S} UTC, which is still to come"
            self._warn("time-in-future", message, path, version, "find the clock that is wrong")

    def _check_content(self, snapshot: Snapshot) -> None:
        try:
            limits = snapshot.limits
        except TrinityLakeError as error:
            self._error("definition-unreadable", error.message, error.path or snapshot.location, snapshot.version)
            return
        self.objects.count_lakehouse_def(snapshot.definition_location)
        self._check_settings(snapshot)
        if self.tree.check(snapshot, limits):
            self.objects.check(snapshot)

    def _check_settings(self, snapshot: Snapshot) -> None:
        """Settings that are fixed at creation are those of the oldest version."""
        settings = {name: getattr(snapshot.definition, name) for name in IMMUTABLE_SETTINGS}
        self._settings = self._settings or settings
        changed = [name for name, value in settings.items() if value != self._settings[name]]
        if changed:
            message = f"{', '.join(changed)} of the lakehouse changed, which is fixed at creation"
            self._error("definition-changed", message, snapshot.definition_location, snapshot.version)

    def _check_exports(self) -> None:
        """Roots and manifests of exports are there, and what an exported root reaches is too."""
        try:
            definition = self.lake.snapshot().definition
        except TrinityLakeError:
            return  # reported with the latest version
        now_ms = self.lake.storage.now_ms()
        for record in definition.exports:
            if record.state == ExportState.COPYING and now_ms - record.created_at_millis > _STALE_EXPORT_MS:
                message = f"export {record.name!r} was cut off more than 7 days ago; finish or drop it"
                self._warn("export-cut-off", message, record.manifest_path, record.version, "export or drop-export")
            elif record.state == ExportState.COMPLETE:
                self._check_complete_export(record, definition.exported_snapshots)
        for name, location in sorted(definition.exported_snapshots.items()):
            self.n_exports += 1
            if is_uri(location):
                continue
            try:
                self._check_content(self.lake.snapshot(name))
            except TrinityLakeError as error:
                self._export_error(name, "export-unreadable", error.message, error.path or location)

    def _export_error(self, name: str, code: str, message: str, path: str) -> None:
        """Report an error of an export, unless the export was dropped while it was looked at."""
        definition = self.lake.snapshot().definition
        if name in definition.exported_snapshots or any(record.name == name for record in definition.exports):
            self._error(code, f"export {name!r}: {message}", path, None)

    def _check_complete_export(self, record: ExportRecord, exported: Mapping[str, str]) -> None:
        if record.name not in exported:
            message = "it is complete, but no exported snapshot has its name"
            self._export_error(record.name, "export-unreadable", message, record.root_location)
        if record.manifest_path:
            try:
                check_manifest(self.lake.storage, record)
            except TrinityLakeError as error:
                self._export_error(record.name, "export-damaged", error.message, error.path or record.manifest_path)

    def _check_hint(self) -> None:
        hint = inspect_hint(self.lake)
        if hint.state != HintState.RIGHT:
            message = f"the hint is {hint.state}: it names {hint.hinted}, the latest version is {hint.latest}"
            self._warn("hint-wrong", message, HINT_PATH, hint.latest, "hint --repair")

    def _warn(self, code: str, message: str, path: str, version: int | None, mend: str) -> None:
        self.findings.append(
            Finding(severity="warning", code=code, message=message, path=path, version=version, mend=mend)
        )
