"""Scan planning with pyiceberg's own scan, restricted to some of a snapshot's manifests."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError as PydanticError
from pyiceberg.catalog.rest.scan_planning import PlanTableScanRequest
from pyiceberg.expressions import AlwaysTrue, BooleanExpression
from pyiceberg.io import FileIO
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.table import DataScan, FileScanTask, Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation, Snapshot

from trinitylake_ops.errors import CorruptFileError, TrinityLakeError
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import manifests_in
from trinitylake_ops.iceberg.updates import as_invalid_input
from trinitylake_ops.server.responses import RejectedError, bad_request, unsupported
from trinitylake_ops.server.scans.parts import (
    EntryBudget,
    Part,
    TooManyEntriesError,
    WindowedManifest,
    is_too_much,
    n_units,
    no_such_task,
    units_of,
    weaken,
)

#: The maximum number of manifests in a part, so that wrong sizes in the manifest list cannot cause unlimited work.
MAX_MANIFESTS = 100
#: The maximum number of parts in a response; the last one covers all remaining manifests.
MAX_PARTS = 100
#: The maximum number of columns that a request may select, or request statistics for.
_MAX_NAMES = 20_000
#: The maximum number of statistics in one response: columns times files.
MAX_STATISTICS = 500_000
#: The maximum number of data file entries that a request decodes, at 30 microseconds or more each.
MAX_ENTRIES = 20_000
#: A number of entries that is larger than that of any readable manifest.
_MAX_ENTRIES_OF_FILE = 1 << 40
#: The maximum number of delete file entries. Each part of a scan needs all of them.
_MAX_DELETES = 100_000
_EQUALITY = "equality deletes"


class _PartialSnapshot:
    """A snapshot restricted to some of its manifests."""

    def __init__(self, manifests: Sequence[ManifestFile]):
        self._manifests = manifests

    def manifests(self, io: FileIO) -> Sequence[ManifestFile]:
        return self._manifests


class _PartialScan(DataScan):
    """A scan restricted to some manifests of a snapshot."""

    some = _PartialSnapshot([])

    def snapshot(self) -> Any:
        return self.some


@dataclass(frozen=True, slots=True)
class Planned:
    """The result of planning: files to read, and parts to plan later."""

    tasks: Sequence[FileScanTask]
    parts: Sequence[Part]
    #: The residual filter of all files, or None if each file has its own residual.
    residual: BooleanExpression | None = None


class Planner:
    """Plans one scan of a table.

    Args:
        table: The table.
        request: The client's request, as JSON.
        max_files: The maximum number of data files in one response.

    Raises:
        RejectedError: Status 400, 404, 406 or 413 if the request does not describe a valid scan.
    """

    def __init__(self, table: Table, request: dict[str, Any], max_files: int):
        io = table.io
        if not isinstance(io, StorageFileIO):
            raise TypeError(type(io).__name__)
        self._request = request
        self._io = io
        self._units = units_of(request.get("filter", True))
        _check_names(request)
        with as_invalid_input():
            self._scan_request = PlanTableScanRequest.model_validate(request)
        if self._scan_request.end_snapshot_id is not None and self._scan_request.start_snapshot_id is None:
            raise bad_request("an incremental scan needs both start-snapshot-id and end-snapshot-id")
        self._snapshot = _snapshot_of(
            table.metadata, self._scan_request.end_snapshot_id or self._scan_request.snapshot_id
        )
        self._appends = _appends(table.metadata, self._scan_request.start_snapshot_id, self._snapshot)
        self._metadata = _with_schema_of(table.metadata, self._snapshot, self._scan_request)
        schema = self._metadata.schema()
        with as_invalid_input():
            schema.select(*(self._scan_request.select or ()), case_sensitive=self._scan_request.case_sensitive)
            self.stats_fields = {
                schema.find_field(name, self._scan_request.case_sensitive).field_id
                for name in self._scan_request.stats_fields or ()
            }
            list(self._scan(self._filter).plan_files())  # reads no manifest; raises if the filter is invalid
        self._max_files = max(1, min(max_files, MAX_STATISTICS // max(1, len(self.stats_fields))))

    @property
    def metadata(self) -> TableMetadata:
        """The metadata of the table, with the schema of the scan."""
        return self._metadata

    def whole(self) -> Planned:
        """Plan the whole scan: return all files if they fit into one response, otherwise only parts."""
        if self._snapshot is None:
            return Planned([], [])
        data, _ = self._manifests()
        if _n_files(data) <= self._max_files and len(data) <= MAX_MANIFESTS:
            return self.part(self._part(0, len(data)))
        return Planned([], self._parts(data, 0))

    def part(self, part: Part) -> Planned:
        """Plan a part. The result may contain smaller parts."""
        if self._snapshot is None:
            raise no_such_task()
        data, deletes = self._manifests()
        if part.last > len(data):
            raise no_such_task()
        if part.last - part.first > MAX_MANIFESTS:
            return Planned([], self._parts(data[: part.last], part.first))
        if part.after and part.last - part.first != 1:
            raise no_such_task()
        row_filter = self._filter_for([*data[part.first : part.last], *deletes])
        residual = None if row_filter is self._filter else self._filter
        every = EntryBudget(_MAX_DELETES)
        whole = [WindowedManifest.of(manifest, range(_MAX_DELETES + 1), every) for manifest in deletes]
        if part.last - part.first == 1:
            try:
                tasks, rest = self._single(part, data[part.first], whole, row_filter)
            except TooManyEntriesError as error:
                raise unsupported(
                    f"tables with more than {_MAX_DELETES} delete files are not supported by scan planning; compact"
                    " the table, or read the manifests in the client"
                ) from error
            return Planned(tasks, rest, residual)
        budget = EntryBudget(MAX_ENTRIES)
        several = [
            WindowedManifest.of(manifest, range(MAX_ENTRIES + 1), budget) for manifest in data[part.first : part.last]
        ]
        with suppress(TooManyEntriesError):
            tasks = self._tasks(several, whole, row_filter)
            if len(tasks) <= self._max_files:
                return Planned(tasks, [], residual)
        # the manifest list declares fewer files than the manifests contain
        return Planned([], [self._part(at, at + 1) for at in range(part.first, part.last)])

    def _single(
        self, part: Part, manifest: ManifestFile, deletes: list[WindowedManifest], row_filter: BooleanExpression
    ) -> tuple[list[FileScanTask], list[Part]]:
        """Return files of one manifest, starting from an entry, and the part with the remaining entries."""
        tasks_so_far: list[FileScanTask] = []
        begin = part.after
        budget = EntryBudget(_MAX_ENTRIES_OF_FILE)
        windowed = WindowedManifest.of(manifest, range(0), budget)
        while budget.n_taken < MAX_ENTRIES and len(tasks_so_far) < self._max_files:
            windowed.window = range(begin, begin + self._max_files)
            tasks = self._tasks([windowed], deletes, row_filter)
            if len(tasks_so_far) + len(tasks) > self._max_files:
                break
            tasks_so_far += tasks
            begin += self._max_files
            if windowed.n_entries is None or begin >= windowed.n_entries:
                return tasks_so_far, []
        return tasks_so_far, [self._part(part.first, part.last, begin)]

    def _manifests(self) -> tuple[list[ManifestFile], list[ManifestFile]]:
        """Return the data manifests and the delete manifests. Incremental scans ignore delete files."""
        assert self._snapshot is not None
        if self._appends is not None:
            return [item for append in self._appends for item in self._appended_by(append)], []
        manifests = manifests_in(self._snapshot, self._io)
        data = [manifest for manifest in manifests if manifest.content == ManifestContent.DATA]
        return data, [manifest for manifest in manifests if manifest.content != ManifestContent.DATA]

    def _appended_by(self, snapshot: Snapshot) -> list[ManifestFile]:
        return [
            manifest
            for manifest in manifests_in(snapshot, self._io)
            if manifest.content == ManifestContent.DATA and manifest.added_snapshot_id == snapshot.snapshot_id
        ]

    def _part(self, first: int, last: int, after: int = 0) -> Part:
        assert self._snapshot is not None
        uuid = str(self._metadata.table_uuid)
        return Part(uuid, self._snapshot.snapshot_id, self._request, first, last, after)

    def _parts(self, data: Sequence[ManifestFile], first: int) -> list[Part]:
        """Return parts with about as many files as fit into a response, using the file counts in the manifest list."""
        parts: list[Part] = []
        begin, n_files = first, 0
        for at in range(first, len(data)):
            if at > begin and (n_files + _n_files([data[at]]) > self._max_files or at - begin == MAX_MANIFESTS):
                parts.append(self._part(begin, at))
                begin, n_files = at, 0
                if len(parts) == MAX_PARTS - 1 and len(data) - begin > MAX_MANIFESTS:
                    break
            n_files += _n_files([data[at]])
        return [*parts, self._part(begin, len(data))]

    @property
    def _filter(self) -> BooleanExpression:
        return self._scan_request.filter or AlwaysTrue()

    def _filter_for(self, manifests: Sequence[ManifestFile]) -> BooleanExpression:
        """Return the filter to evaluate for files: the requested filter, or a weaker one if that is too much work."""
        n_files, n_specs = _n_files(manifests), len({manifest.partition_spec_id for manifest in manifests})
        if not is_too_much(self._units, n_files, n_specs):
            return self._filter
        schema = self._metadata.schema()
        weaker = weaken(self._filter, schema, case_sensitive=self._scan_request.case_sensitive)
        return AlwaysTrue() if is_too_much(n_units(weaker), n_files, n_specs) else weaker

    def _scan(self, row_filter: BooleanExpression) -> _PartialScan:
        return _PartialScan(
            self._metadata, self._io, row_filter=row_filter, case_sensitive=self._scan_request.case_sensitive
        )

    def _tasks(
        self, data: list[WindowedManifest], deletes: list[WindowedManifest], row_filter: BooleanExpression
    ) -> list[FileScanTask]:
        assert self._snapshot is not None
        scan = self._scan(row_filter)
        scan.some = _PartialSnapshot([*data, *deletes])
        with _reading(self._snapshot):
            tasks = list(scan.plan_files())
        for file in (item for task in tasks for item in (task.file, *task.delete_files)):
            self._io.check_may_have(file.file_path)
        if self._appends is None:
            return tasks
        # An append may rewrite existing manifests, so its manifests may also list files of earlier snapshots.
        added = set().union(*(manifest.added for manifest in data))
        return [task for task in tasks if task.file.file_path in added]


def _check_names(request: dict[str, Any]) -> None:
    for member in ("select", "stats-fields"):
        names = request.get(member)
        if isinstance(names, list) and len(names) > _MAX_NAMES:
            raise RejectedError(413, "BadRequestException", f"{member} has more than {_MAX_NAMES} names")


def check_is_of(part: Part, table: Table) -> None:
    """Raise RejectedError (404) if the part belongs to another table.

    Args:
        part: The part.
        table: The requested table.
    """
    if part.table_uuid != str(table.metadata.table_uuid):
        raise no_such_task()


def _snapshot_of(metadata: TableMetadata, snapshot_id: int | None) -> Snapshot | None:
    if snapshot_id is None:
        return metadata.current_snapshot()
    snapshot = metadata.snapshot_by_id(snapshot_id)
    if snapshot is None:
        raise bad_request(f"snapshot {snapshot_id} does not exist in the table")
    return snapshot


def _appends(metadata: TableMetadata, start_id: int | None, end: Snapshot | None) -> list[Snapshot] | None:
    """Return the append snapshots between two snapshots, oldest first, or None for a scan that is not incremental."""
    if start_id is None:
        return None
    by_id = {snapshot.snapshot_id: snapshot for snapshot in metadata.snapshots}
    newest_first: list[Snapshot] = []
    at = end
    while at is not None and at.snapshot_id != start_id and len(newest_first) <= len(metadata.snapshots):
        newest_first.append(at)
        at = None if at.parent_snapshot_id is None else by_id.get(at.parent_snapshot_id)
    if at is None or at.snapshot_id != start_id:
        raise bad_request(f"snapshot {start_id} is not an ancestor of snapshot {end and end.snapshot_id}")
    return [
        snapshot
        for snapshot in reversed(newest_first)
        if snapshot.summary is not None and snapshot.summary.operation == Operation.APPEND
    ]


def _with_schema_of(metadata: TableMetadata, snapshot: Snapshot | None, request: PlanTableScanRequest) -> TableMetadata:
    if snapshot is None or snapshot.schema_id is None or not request.use_snapshot_schema:
        return metadata
    if all(schema.schema_id != snapshot.schema_id for schema in metadata.schemas):
        raise CorruptFileError(
            f"snapshot {snapshot.snapshot_id} has schema {snapshot.schema_id}, which the table does not have; plan"
            " without the snapshot's schema, or roll the table back to another snapshot",
            path=snapshot.manifest_list,
        )
    return metadata.model_copy(update={"current_schema_id": snapshot.schema_id})


def _n_files(manifests: Sequence[ManifestFile]) -> int:
    return sum((manifest.added_files_count or 0) + (manifest.existing_files_count or 0) for manifest in manifests)


@contextmanager
def _reading(snapshot: Snapshot) -> Iterator[None]:
    """Translate pyiceberg's errors for manifests. For broken manifests, they can be of any type."""
    try:
        yield
    except (TrinityLakeError, PydanticError):
        raise
    except Exception as error:
        if _EQUALITY in str(error):
            raise unsupported(
                "equality deletes are not supported by scan planning; read the manifests in the client"
            ) from (error)
        if isinstance(error, TypeError) and "NoneType" in str(error):
            # pyiceberg compares partition values even if they are null
            raise unsupported(
                "a filter on null partition values is not supported by scan planning; read the manifests in the client"
            ) from (error)
        raise CorruptFileError(
            f"cannot plan manifests of snapshot {snapshot.snapshot_id}: {type(error).__name__}",
            path=snapshot.manifest_list,
        ) from error
