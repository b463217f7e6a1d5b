"""Streams that read tables: appended rows, version by version."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING
from uuid import UUID

from pyiceberg.exceptions import ResolveError
from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import DataFile, ManifestContent, ManifestEntryStatus
from pyiceberg.schema import Schema, index_by_id, promote
from pyiceberg.table import DataScan, FileScanTask
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.snapshots import Snapshot as TableSnapshot
from pyiceberg.types import IcebergType, ListType, MapType, NestedField
from pyiceberg.types import StructType as IcebergStructType
from pyspark.sql.types import StructType

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, VersionExpiredError
from trinitylake_ops.iceberg.io.file_io import reading_io
from trinitylake_ops.iceberg.managed import metadata_uri, without_history
from trinitylake_ops.iceberg.metadata import table_metadata
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.spark.metadata.reader import OpenedMetadata
from trinitylake_ops.spark.source.opened_table import OpenedData, OpenedTable
from trinitylake_ops.spark.source.options import STREAM_OPTIONS, SourceOptions, StreamOptions
from trinitylake_ops.spark.source.stream_reader import (
    Followed,
    FollowedHistory,
    Offset,
    StreamReader,
    expired_between,
    gap_error,
)
from trinitylake_ops.spark.tables.reader import check_reachable, group_files, open_iceberg_table, planned
from trinitylake_ops.spark.tables.tasks import ReadJob, read_tasks
from trinitylake_ops.transaction.lakehouse import Lakehouse

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType as SparkStructType

    from trinitylake_ops.spark.tables.reader import DataPlan

_NONE = ""
_TRIMMED = -1  # no snapshot has this id


@dataclass(frozen=True)
class FollowedTable:
    """A table whose appended rows a stream reads.

    ``table_uuid`` is Iceberg's, and ``table_schema`` has the columns, both as they were at ``version``, when the stream
    was loaded. ``schema`` has the columns that are read.
    """

    namespace: str
    table: str
    version: int
    table_uuid: UUID
    table_schema: Schema
    schema: Schema
    row_filter: BooleanExpression
    parallelism: int

    @property
    def kind(self) -> str:
        return "table"  # table_id identifies the table: it may be renamed

    def is_offset(self, offset: Offset) -> bool:
        table_id, snapshot_id = offset.get("table_id"), offset.get("snapshot_id")
        is_snapshot = snapshot_id == _NONE or (isinstance(snapshot_id, str) and snapshot_id.lstrip("-").isdecimal())
        return offset["version"] >= -1 and isinstance(table_id, str) and is_snapshot

    def before(self, lake: Lakehouse, version: int) -> Offset:
        if version == 0:
            return {"version": -1, "table_id": _NONE, "snapshot_id": _NONE}
        return self.at(lake, version - 1)

    def at(self, lake: Lakehouse, version: int) -> Offset:
        snapshot = lake.snapshot(version)
        if not (snapshot.has_namespace(self.namespace) and snapshot.has_table(self.namespace, self.table)):
            return {"version": version, "table_id": _NONE, "snapshot_id": _NONE}
        found = open_iceberg_table(lake, snapshot, self.namespace, self.table)
        current = found.metadata.current_snapshot_id
        return {
            "version": version,
            "table_id": snapshot.table(self.namespace, self.table).id,
            "snapshot_id": _NONE if current is None else str(current),
        }

    def parts(self, lake: Lakehouse, start: Offset, end: Offset, options: StreamOptions) -> Sequence[object]:
        check_reachable(lake)
        batch = _Batch(self, lake, start, end, options)
        tasks = batch.tasks()
        if not tasks:
            return []
        self._check_fits(batch.metadata, start, end)
        # The filter means the columns that had these names at load, even if others have them now. Other schemas tell
        # which columns equality deletes are by.
        others = [schema for schema in batch.metadata.schemas if schema.schema_id != self.table_schema.schema_id]
        loaded = {"schemas": [*others, self.table_schema], "current_schema_id": self.table_schema.schema_id}
        metadata = without_history(batch.metadata).model_copy(update=loaded)
        job = pickle.dumps(ReadJob(batch.io, metadata, self.schema, self.row_filter))
        return [AppendedPart(job, group) for group in group_files(tasks, self.parallelism)]

    def _check_fits(self, metadata: TableMetadata, start: Offset, end: Offset) -> None:
        """Raise CommitConflictError if the columns of the stream cannot contain the rows of a batch.

        A stream that lags was loaded after the batch was committed. Then its columns may be wider than those of the
        batch, and required where those are not: the rows are read as the stream's columns, and cannot be otherwise.

        Args:
            metadata: The table's metadata at the end of the batch.
            start: The offset before the batch.
            end: The offset of the batch.

        Raises:
            CommitConflictError: The rows do not fit.
        """
        lags = end["version"] < self.version
        if metadata.table_uuid != self.table_uuid:
            misfit: str | None = "another table has its name"
        else:
            misfit = self._misfit(self.schema.fields, index_by_id(metadata.schema()), lags=lags)
        if misfit is None:
            return
        remedy = "start it again, or where that does not help, begin a new stream"
        if lags:
            remedy = "read them without that column by the option 'columns', or begin a new stream"
        since = f"in versions {start['version'] + 1} to {end['version']}" if lags else "since that was loaded"
        raise CommitConflictError(
            f"table {self.namespace}.{self.table} is read as a stream, and {since} {misfit}; {remedy}",
            latest_version=end["version"],
        )

    def _misfit(self, fields: Iterable[NestedField], of_batch: Mapping[int, NestedField], *, lags: bool) -> str | None:
        for field in fields:
            name = self.table_schema.find_column_name(field.field_id)
            written = of_batch.get(field.field_id)
            if written is None:
                if not field.required or (lags and field.initial_default is not None):
                    continue  # a null or the default
                return f"its required column {name!r} {'did not exist' if lags else 'was dropped'}"
            if field.required and not written.required and not lags:
                return f"its column {name!r} became optional"
            kind = field.field_type
            if kind.is_primitive:
                if not _is_readable_as(written.field_type, kind):
                    return f"its column {name!r} {'was' if lags else 'became'} {written.field_type}"
            elif misfit := self._misfit(_fields_within(kind), of_batch, lags=lags):
                return misfit
        return None


def _fields_within(kind: IcebergType) -> Sequence[NestedField]:
    if isinstance(kind, ListType):
        return (kind.element_field,)
    if isinstance(kind, MapType):
        return (kind.key_field, kind.value_field)
    assert isinstance(kind, IcebergStructType)
    return kind.fields


def _is_readable_as(written: IcebergType, wanted: IcebergType) -> bool:
    """Whether values of a type are read as another one: the same type, or a wider one that Iceberg promotes it to."""
    if written == wanted:
        return True
    try:
        promote(written, wanted)
    except ResolveError:
        return False
    return True


@dataclass(frozen=True)
class AppendedPart:
    """Data files of a batch."""

    pickled_job: bytes
    tasks: tuple[FileScanTask, ...]

    def batches(self, schema: SparkStructType) -> Iterator[pa.RecordBatch]:
        return read_tasks(pickle.loads(self.pickled_job), self.tasks, schema)


class _Batch:
    """The rows that a table gained between two offsets."""

    def __init__(self, followed: FollowedTable, lake: Lakehouse, start: Offset, end: Offset, options: StreamOptions):
        self._name = (followed.namespace, followed.table)
        self._lake = lake
        self._start, self._end = start, end
        self._options = options
        self.io = reading_io(lake)
        self._histories: list[TableMetadata] = []
        self._versions = self._readable_versions()

    @property
    def metadata(self) -> TableMetadata:
        """The newest metadata that was read."""
        return self._histories[0]

    def tasks(self) -> list[FileScanTask]:
        """Return the files. Raises VersionExpiredError for a gap, CommitConflictError where rows were replaced."""
        start, end = self._start, self._end
        if start["table_id"] not in (_NONE, end["table_id"]):
            self._refuse_overwrite("another table has its name, or none")
        if end["snapshot_id"] == _NONE:
            return []
        tip = self._snapshot(int(end["snapshot_id"]))
        if tip is None:
            raise self._gap()
        if start["version"] < 0:
            scan = DataScan(self._holding(tip), self.io, snapshot_id=tip.snapshot_id)
            return planned(scan)
        base = int(start["snapshot_id"]) if start["snapshot_id"] and start["table_id"] == end["table_id"] else None
        added = self._since(tip, base)
        return [FileScanTask(file) for snapshot in reversed(added) for file in self._appended_by(snapshot)]

    def _since(self, tip: TableSnapshot, base: int | None) -> list[TableSnapshot]:
        """Return the snapshots after ``base`` up to ``tip``, newest first."""
        chain: list[TableSnapshot] = []
        step: TableSnapshot | None = tip
        while step is not None and step.snapshot_id != base:
            chain.append(step)
            parent = self._parent(step)
            if parent is None and base is not None and not step.sequence_number and self._snapshot(base) is None:
                parent = _TRIMMED  # it may be the table's first snapshot or not, but base came before it
            if parent == base:
                return chain
            if parent is None:
                return self._since_fork(chain, base)
            step = None if parent == _TRIMMED else self._snapshot(parent)
            if step is None and self._options.on_gap == "fail":
                raise self._gap()
        return chain

    def _parent(self, snapshot: TableSnapshot) -> int | None:
        """Return the snapshot before one. None for a table's first, and _TRIMMED if no version knows any more."""
        parent, number = snapshot.parent_snapshot_id, snapshot.sequence_number or 0
        if parent is not None or number == 1:
            return parent
        # After a trim, the oldest remaining snapshot does not name the one before it.
        for metadata in self._all_histories():
            known = metadata.snapshot_by_id(snapshot.snapshot_id)
            if known is not None and known.parent_snapshot_id is not None:
                return known.parent_snapshot_id
        return _TRIMMED if number else None  # the snapshots of Iceberg's format version 1 have no numbers

    def _since_fork(self, chain: Sequence[TableSnapshot], base: int | None) -> list[TableSnapshot]:
        """Return the newest snapshots of a chain that forked before ``base``: the table was rolled back since."""
        self._refuse_overwrite("it was taken back to an earlier state")
        ancestors: set[int] = set()
        step = None if base is None else self._snapshot(base)
        while step is not None:
            ancestors.add(step.snapshot_id)
            parent = self._parent(step)
            step = None if parent is None else self._snapshot(parent)
        cut = next((at for at, snapshot in enumerate(chain) if snapshot.snapshot_id in ancestors), len(chain))
        return list(chain[:cut])

    def _appended_by(self, snapshot: TableSnapshot) -> Iterable[DataFile]:
        operation = None if snapshot.summary is None else snapshot.summary.operation
        if operation == Operation.REPLACE:
            return
        if operation != Operation.APPEND:
            self._refuse_overwrite("rows of it were replaced or deleted")
            return
        for manifest in manifests_in(snapshot, self.io):
            if manifest.added_snapshot_id != snapshot.snapshot_id or manifest.content != ManifestContent.DATA:
                continue
            for entry in entries_in(manifest, self.io):
                if entry.status == ManifestEntryStatus.ADDED:
                    yield entry.data_file

    def _snapshot(self, snapshot_id: int) -> TableSnapshot | None:
        """Return a snapshot of the table, from the newest metadata of a version that still lists it."""
        found = (metadata.snapshot_by_id(snapshot_id) for metadata in self._all_histories())
        return next((snapshot for snapshot in found if snapshot is not None), None)

    def _all_histories(self) -> Iterator[TableMetadata]:
        """Yield the table's metadata of each version where it differs, newest first. Each is read once."""
        yield from self._histories
        for metadata in self._versions:
            self._histories.append(metadata)
            yield metadata

    def _holding(self, snapshot: TableSnapshot) -> TableMetadata:
        return next(one for one in self._histories if one.snapshot_by_id(snapshot.snapshot_id) is not None)

    def _readable_versions(self) -> Iterator[TableMetadata]:
        """Yield the table's metadata at the end, and then each different one of other versions."""
        latest = self._lake.snapshot()
        first, last = max(self._start["version"], 0), self._end["version"]
        expired = set(expired_between(latest, first - 1, last))
        seen: set[str] = set()
        for version in [*range(last, first - 1, -1), latest.version]:
            if version in expired:
                continue
            snapshot = self._lake.snapshot(version)
            if not (snapshot.has_namespace(self._name[0]) and snapshot.has_table(*self._name)):
                continue
            definition = snapshot.table(*self._name)
            if not definition.is_iceberg or definition.id not in (self._end["table_id"], self._start["table_id"]):
                continue
            self.io = self.io.for_table(definition)
            uri = metadata_uri(definition, self._lake.root)
            if uri not in seen:
                seen.add(uri)
                yield table_metadata(definition, self.io)

    def _gap(self) -> VersionExpiredError:
        return gap_error(
            f"rows of table {'.'.join(self._name)}", max(self._start["version"] + 1, 0), self._end["version"]
        )

    def _refuse_overwrite(self, how: str) -> None:
        if self._options.on_overwrite == "fail":
            raise CommitConflictError(
                f"table {'.'.join(self._name)} is read as a stream of appended rows, and in versions"
                f" {self._start['version'] + 1} to {self._end['version']} {how}; begin a new stream, or let this one"
                " pass such commits by with the option on_overwrite 'skip'",
                base_version=max(self._start["version"], 0),
                latest_version=self._end["version"],
            )


_FOLLOWED = ("versions", "changes")


@dataclass(frozen=True)
class LakehouseAt:
    """A lakehouse by its root and options."""

    options: SourceOptions

    def open(self) -> Lakehouse:
        """Return the lakehouse. Raises LakehouseNotFoundError, StorageError."""
        return Lakehouse.open(self.options.root, self.options.storage_options)


def stream_reader(options: Mapping[str, str], opened: OpenedTable, schema: StructType) -> StreamReader:
    """Return the reader of a stream. Raises InvalidInputError for a table that cannot be a stream."""
    source = SourceOptions.parse(options, STREAM_OPTIONS)
    request = source.request
    if request.time is not None:
        raise InvalidInputError(f"a stream begins by 'starting_version', and knows no option {request.time!r}")
    if request.first_version is not None or request.last_version is not None:
        raise InvalidInputError("a stream begins by 'starting_version', and knows no options 'from' and 'to'")
    followed = _followed(opened, request.parallelism)
    given = {name.lower(): value for name, value in options.items()}
    return StreamReader(LakehouseAt(source), followed, StreamOptions.parse(given), schema)


def _followed(opened: OpenedTable, parallelism: int) -> Followed:
    if isinstance(opened, OpenedMetadata):
        if opened.name not in _FOLLOWED:
            raise InvalidInputError(f"{opened.name!r} cannot be read as a stream; {' and '.join(_FOLLOWED)} can")
        return FollowedHistory(opened, parallelism)
    assert isinstance(opened, OpenedData)

    plan: DataPlan = pickle.loads(opened.pickled_plan)
    loaded = plan.found.metadata
    assert plan.found.version is not None  # a stream reads no export, so this is a version of the lakehouse itself
    return FollowedTable(
        *plan.name,
        plan.found.version.version,
        loaded.table_uuid,
        loaded.schema(),
        plan.schema,
        plan.row_filter,
        parallelism,
    )
