"""Checks exports and clones: roots, manifests and pins exist, and so do the files that exported roots reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from trinitylake_ops.errors import FileMissingError, InvalidLocationError, TrinityLakeError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState, LakehouseDef
from trinitylake_ops.format.file_sizes import MAX_FILE_LIST_BYTES
from trinitylake_ops.format.locations import is_uri, to_location
from trinitylake_ops.maintenance.state.export_manifest import check_manifest
from trinitylake_ops.maintenance.state.export_records import EXPORT, kind_of, record_of
from trinitylake_ops.maintenance.verification.report import Findings
from trinitylake_ops.maintenance.verification.versions import VersionVerifier
from trinitylake_ops.transaction.lakehouse import Lakehouse

_STALE_EXPORT_MS = 7 * 24 * 3600 * 1000


class ExportVerifier:
    """Checks the exports and clones that a lakehouse definition records.

    ``exports`` and ``clones`` count those with a root, a clone once.
    """

    def __init__(self, lake: Lakehouse, versions: VersionVerifier, findings: Findings):
        self._lake = lake
        self._versions = versions
        self._findings = findings
        self.exports = 0
        self.clones = 0

    def check(self, definition: LakehouseDef) -> None:
        """Check all exports."""
        now_ms = self._lake.storage.now_ms()
        for record in definition.exports:
            if record.state == ExportState.COPYING and now_ms - record.created_at_millis > _STALE_EXPORT_MS:
                kind = kind_of(record)
                message = f"{kind} {record.name!r} was cut off more than 7 days ago; finish or drop it"
                mend = f"{kind} or drop-{kind}"
                self._findings.warn("export-cut-off", message, record.manifest_path, record.version, mend)
            elif record.state == ExportState.COPYING:
                self._check_begun(record)
            elif record.state == ExportState.COMPLETE:
                with self._unless_dropped(record.name, definition):
                    self._check_complete(record, definition.exported_snapshots)
        self._check_names(definition)
        clones: set[str] = set()
        for name, location in sorted(definition.exported_snapshots.items()):
            recorded = record_of(definition, name)
            if recorded is not None and recorded.clone_id:
                clones.add(recorded.clone_id)  # a refresh keeps one more version for the same clone
            else:
                self.exports += 1
            if self._is_elsewhere(location):
                continue
            with self._unless_dropped(name, definition):
                try:
                    self._versions.check_content(self._lake.snapshot(name))
                except TrinityLakeError as error:
                    self._error(name, "export-unreadable", error.message, error.path or location)
        self.clones = len(clones)

    def _check_names(self, definition: LakehouseDef) -> None:
        """Tell names that several records have: an operation finds one of them, and a drop takes all."""
        for name, count in Counter(record.name for record in definition.exports).items():
            if count > 1:
                mend = f"drop-{kind_of(record_of(definition, name))}"
                message = f"{count} exports or clones have the name {name!r}; a drop forgets all of them"
                self._findings.error("name-taken-twice", message, None, None, mend)

    @contextmanager
    def _unless_dropped(self, name: str, definition: LakehouseDef) -> Iterator[None]:
        """Forget findings of the block if the export was dropped meanwhile, as its files may be gone.

        An export of the same name may have been made since. The next run checks it.
        """

        def is_dropped() -> bool:
            try:
                return _places(self._lake.snapshot().definition, name) != _places(definition, name)
            except TrinityLakeError:
                return False

        with self._findings.unless(is_dropped) as has_forgotten:
            yield
        if has_forgotten():
            self._versions.tree.forget_broken()

    def _is_elsewhere(self, location: str) -> bool:
        """Whether a location lies beyond this root. A location that breaks the rules does not, and is checked."""
        try:
            return is_uri(to_location(self._lake.root, location))
        except InvalidLocationError:
            return False

    def _check_begun(self, record: ExportRecord) -> None:
        """Warn if nothing names the copies of an unfinished export. It copies within this root."""
        if not record.manifest_path or record.target_uri or record.level == ExportLevel.MINIMAL:
            return
        (found,) = self._lake.storage.read_available([record.manifest_path], limit_bytes=MAX_FILE_LIST_BYTES)
        if isinstance(found, FileMissingError):
            message = (
                f"export {record.name!r} is unfinished and has no manifest; it began just now, or the file is lost;"
                " its copies are orphans until it is finished"
            )
            self._findings.warn(
                "manifest-missing", message, record.manifest_path, record.version, "export or drop-export"
            )

    def _check_complete(self, record: ExportRecord, exported: Mapping[str, str]) -> None:
        if record.name not in exported:
            message = "it is complete, but no exported snapshot has its name"
            self._error(record.name, "export-unreadable", message, record.root_location, kind_of(record))
        if record.manifest_path:
            try:
                check_manifest(self._lake.storage, record)
            except TrinityLakeError as error:
                path = error.path or record.manifest_path
                self._error(record.name, "export-damaged", error.message, path, kind_of(record))

    def _error(self, name: str, code: str, message: str, path: str, kind: str = EXPORT) -> None:
        self._findings.error(code, f"{kind} {name!r}: {message}", path, None, f"drop-{kind}")


def _places(definition: LakehouseDef, name: str) -> tuple[str | None, set[tuple[str, str]]]:
    """Return the location of an export that no other one shares, by a lakehouse definition."""
    records = [record for record in definition.exports if record.name == name]
    places = {(record.root_location, record.manifest_path) for record in records}
    return definition.exported_snapshots.get(name), places
