"""Exports: a version kept under a name, in its own lakehouse or as another one (docs/protocol.md, "Export").

An export takes three steps, each of which can be repeated. A commit records it as COPYING, which keeps the version from
expiring. The files are copied, the root last. A commit records it as COMPLETE. An export that was cut off goes on where
it stopped when it is executed again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, ExportState
from trinitylake_ops.format.file_names import new_export_root_path, new_manifest_path
from trinitylake_ops.format.keys import MAX_TIME_MS
from trinitylake_ops.operations.base import Plan, PlannedOperation, digest_of
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.operations.export_records import EXPORT, check_name, check_unused, is_cut_off, record_of
from trinitylake_ops.operations.exports.content import Choice, Content
from trinitylake_ops.operations.exports.copy import check_contains_no_source, target_root
from trinitylake_ops.operations.exports.outcome import ExportReport, left_out, reasons, uncopied_note
from trinitylake_ops.operations.exports.work import ExportWork, Opened
from trinitylake_ops.operations.gc.survey import Progress, no_progress
from trinitylake_ops.operations.rendering import Table, new_table
from trinitylake_ops.operations.retention import duration_ms
from trinitylake_ops.transaction.lakehouse import Lakehouse, options_for
from trinitylake_ops.versions.snapshot import Snapshot

LEVELS = tuple(level.name.lower() for level in ExportLevel)


@dataclass(frozen=True, kw_only=True)
class ExportPlan(Plan):
    """The copies that an export would make. ``files`` includes the root, but not nodes, which are built anew.

    ``bytes`` counts the sizes known before: the root of a minimal export, else data files and manifests. ``resumes``
    says that a cut-off export of this name goes on. ``into_version`` is the present version of the lakehouse at the
    target, None if there is none. ``registered`` names tables of a full export whose files another catalog keeps. The
    export has their definitions, and points to their files.
    """

    base_version: int
    name: str
    version: int
    level: str
    namespaces: tuple[str, ...]
    definitions: bool
    target: str | None
    into_version: int | None
    retain_for_ms: int | None
    files: int
    bytes: int
    resumes: bool
    registered: tuple[str, ...]
    damaged: Mapping[str, str]
    record: ExportRecord = field(repr=False, compare=False)
    content: Content = field(repr=False, compare=False)
    operation: Export = field(repr=False, compare=False)

    @property
    def digest(self) -> str:
        """Return ``<base version>-<sha256>`` of the name, the version, the copied files and their targets."""
        choice = (self.version, self.level, list(self.namespaces), self.definitions, self.target, self.into_version)
        return digest_of(self.base_version, EXPORT, self.name, *choice, self.retain_for_ms, self.files, self.bytes)

    @property
    def is_empty(self) -> bool:
        """Always False: an export is recorded in any case."""
        return False

    def table(self) -> Table:
        """Return one row."""
        where = self.target or "its own lakehouse"
        state = "goes on" if self.resumes else "new"
        row = (self.name, self.version, self.level, ", ".join(self.namespaces), where, self.files, self.bytes, state)
        columns = ("name", "version", "level", "namespaces", "to", "files", "bytes", "state")
        title = f"Export plan{uncopied_note(self.registered)}{left_out(self.damaged)}"
        return new_table(title, *columns, rows=[row])

    def execute(self, approved_digest: str | None = None, *, progress: Progress = no_progress) -> ExportReport:
        """Export, or finish an export that was cut off. The run that finishes it says how long it is retained.

        Raises PlanChangedError when an approved digest is not that of the plan made again now. Raises CorruptFileError
        when a copy is not the source, ExportExistsError, VersionExpiredError, CommitConflictError, StorageError.
        """
        return replace(self.operation, progress=progress).execute(self, approved_digest)


@dataclass(frozen=True, kw_only=True)
class Export(PlannedOperation[ExportPlan, ExportReport]):
    """An export of a version, None for the latest. ``opened`` is what planning opened for the copies."""

    telemetry_name = "export"

    name: str
    level: str
    version: int | str | None
    target: str | None
    retain_for: timedelta | int | None
    namespaces: tuple[str, ...]
    definitions: bool
    target_options: Mapping[str, str] | None
    executor: Executor
    opened: Opened | None = None
    progress: Progress = no_progress

    def plan(self) -> ExportPlan:
        """Plan on the latest version. Raises what :func:`plan_export` raises."""
        check_name(self.name)
        choice = _choice(self.level, self.namespaces, self.definitions)
        retain_for_ms = retained_ms(self.lake, self.retain_for)
        latest = self.lake.snapshot()
        existing = record_of(latest.definition, self.name)
        source = self._source(latest, existing)
        target_uri = target_root(self.lake, self.target, latest.definition, source.definition)
        wanted = ExportRecord(
            name=self.name,
            version=source.version,
            level=choice.level,
            target_uri=target_uri,
            root_location="" if target_uri else new_export_root_path(),
            namespaces=choice.namespaces,
            manifest_path=new_manifest_path(),
        )
        resumes = existing is not None and is_cut_off(existing, wanted)
        if not resumes:
            check_unused(latest.definition, self.name)
        options = self.target_options if self.target_options is not None else options_for(self.lake, target_uri)
        record = existing if resumes and existing else wanted
        work = ExportWork.on(self.lake, source, record, choice, options, self.executor)
        if target_uri:
            check_contains_no_source(target_uri, work.content, self.lake.root)
        return ExportPlan(
            base_version=latest.version,
            name=self.name,
            version=source.version,
            level=self.level,
            namespaces=choice.namespaces,
            definitions=choice.with_definitions,
            target=target_uri or None,
            into_version=work.into_version,
            retain_for_ms=retain_for_ms,
            files=work.content.n_files + 1,
            bytes=work.known_bytes,
            resumes=resumes,
            registered=tuple(sorted(work.content.registered)),
            damaged=reasons(work.content.damaged),
            record=record,
            content=work.content,
            operation=replace(self, target_options=options, opened=work.opened),
        )

    def _source(self, latest: Snapshot, existing: ExportRecord | None) -> Snapshot:
        version = self.version
        if version is None and existing is not None and existing.state == ExportState.COPYING:
            version = existing.version
        source = latest if version is None else self.lake.snapshot(version)
        if source.files is not self.lake.files:
            raise InvalidInputError(f"export {version!r} is a lakehouse of its own; export from there")
        return source

    def work(self, plan: ExportPlan) -> ExportWork:
        """Return the copies of a plan, ready to be made."""
        assert self.opened is not None
        choice = _choice(plan.level, plan.namespaces, plan.definitions)
        return ExportWork(self.opened, plan.record, choice, plan.content, self.executor)

    def run(self, plan: ExportPlan, approved_digest: str | None) -> ExportReport:
        """Export, or finish an export."""
        retain_for_ms = plan.retain_for_ms
        plan = replace(self, version=plan.version).checked(plan, approved_digest)
        return plan.operation.work(plan).run(self.lake, retain_for_ms, self.progress)


def plan_export(
    lake: Lakehouse,
    name: str,
    level: str = "minimal",
    version: int | str | None = None,
    target: str | None = None,
    retain_for: timedelta | int | None = None,
    *,
    namespaces: Sequence[str] = (),
    definitions: bool = False,
    target_options: Mapping[str, str] | None = None,
    executor: Executor = LOCAL,
) -> ExportPlan:
    """Plan an export of a version, by default the latest. Only reads.

    ``level`` "minimal" copies the root. "partial" copies the nodes, too, and with ``definitions`` these. "full" copies
    everything, with the files of managed tables. Partial and full ones can be limited to ``namespaces``. ``target`` is
    another root, where the export becomes a lakehouse of its own. ``target_options`` are for its storage. By default
    they are those of this storage if the scheme is the same. If earlier exports of this lakehouse made one there, it
    gets one more version, and only new files are copied. ``retain_for``, a timedelta or milliseconds, is how long the
    export keeps its version from expiring. None means until it is dropped. A full export keeps it until it is complete,
    whatever is given.
    ``executor`` finds the files to copy, and copies them when the plan is executed.

    Raises InvalidNameError, ExportExistsError, NamespaceNotFoundError, VersionNotFoundError, VersionExpiredError,
    StorageError. Raises InvalidInputError for an impossible export.
    """
    return Export(
        lake=lake,
        name=name,
        level=level,
        version=version,
        target=target,
        retain_for=retain_for,
        namespaces=tuple(namespaces),
        definitions=definitions,
        target_options=target_options,
        executor=executor,
    ).plan()


def _choice(level: str, namespaces: Sequence[str], definitions: bool) -> Choice:
    if level not in LEVELS:
        raise InvalidInputError(f"level {level!r} cannot be exported; levels: {', '.join(LEVELS)}")
    if level == "minimal" and namespaces:
        raise InvalidInputError("a minimal export is that of all namespaces; choose some for a partial or full one")
    if level != "partial" and definitions:
        raise InvalidInputError(f"only for partial exports there is a choice of definitions, not for a {level} one")
    return Choice(ExportLevel[level.upper()], tuple(sorted(set(namespaces))), definitions)


def retained_ms(lake: Lakehouse, retain_for: timedelta | int | None) -> int | None:
    """Return how long an export keeps its version, None for ever. Raises InvalidInputError."""
    if retain_for is None:
        return None
    retain_for_ms = duration_ms(retain_for, "retain_for")
    if retain_for_ms == 0:
        raise InvalidInputError(f"an export is retained for more than 0 ms, not for {retain_for_ms}")
    if lake.storage.now_ms() + retain_for_ms > MAX_TIME_MS:
        raise InvalidInputError("an export is retained until the year 9999 at most; leave the duration out for ever")
    return retain_for_ms
