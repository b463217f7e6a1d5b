"""Streams that read the appended rows of tables, version by version."""

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
    """A table whose appended rows a stream reads. Its state is the one at ``version``, when the stream was loaded."""

    #: The table's namespace.
    namespace: str
    #: The table name.
    table: str
    #: The version of the lakehouse at which the stream was loaded.
    version: int
    #: Iceberg's UUID of the table.
    table_uuid: UUID
    #: All columns of the table.
    table_schema: Schema
    #: The columns to read.
    schema: Schema
    #: The rows to read.
    row_filter: BooleanExpression
    #: The number of tasks to aim for.
    parallelism: int

    @property
    def kind(self) -> str:
        return "table"  # not the name, because table_id identifies the table even if it is renamed

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
        opened = open_iceberg_table(lake, snapshot, self.namespace, self.table)
        current = opened.metadata.current_snapshot_id
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
        # The filter refers to the columns that had these names when the stream was loaded, even if other columns have
        # them now. The other schemas are needed for the columns of equality deletes.
        other_schemas = [schema for schema in batch.metadata.schemas if schema.schema_id != self.table_schema.schema_id]
        loaded = {"schemas": [*other_schemas, self.table_schema], "current_schema_id": self.table_schema.schema_id}
        metadata = without_history(batch.metadata).model_copy(update=loaded)
        job = pickle.dumps(ReadJob(batch.io, metadata, self.schema, self.row_filter))
        return [AppendedPart(job, group) for group in group_files(tasks, self.parallelism)]

    def _check_fits(self, metadata: TableMetadata, start: Offset, end: Offset) -> None:
        """Check that the stream's columns can represent the rows of a batch.

        A stream that lags was loaded after the batch was committed. Its columns may then be wider than the columns of
        the batch, and required where the latter are optional. The rows must be readable as the stream's columns.

        Args:
            metadata: The table's metadata at the end of the batch.
            start: The offset before the batch.
            end: The offset of the batch.

        Raises:
            CommitConflictError: If the columns do not match.
        """
        lags = end["version"] < self.version
        if metadata.table_uuid != self.table_uuid:
            mismatch: str | None = "the name refers to another table"
        else:
            mismatch = self._mismatch(self.schema.fields, index_by_id(metadata.schema()), lags=lags)
        if mismatch is None:
            return
        remedy = "restart the stream, or if that does not help, start a new stream with a new checkpoint"
        if lags:
            remedy = "exclude that column with the option 'columns', or start a new stream with a new checkpoint"
        since = f"in versions {start['version'] + 1} to {end['version']}" if lags else "since the stream was loaded"
        raise CommitConflictError(
            f"cannot read table {self.namespace}.{self.table} as a stream: {since} {mismatch}; {remedy}",
            latest_version=end["version"],
        )

    def _mismatch(
        self, fields: Iterable[NestedField], of_batch: Mapping[int, NestedField], *, lags: bool
    ) -> str | None:
        for field in fields:
            name = self.table_schema.find_column_name(field.field_id)
            written_type = of_batch.get(field.field_id)
            if written_type is None:
                if not field.required or (lags and field.initial_default is not None):
                    continue  # a null or the default
                return f"required column {name!r} {'did not exist' if lags else 'was dropped'}"
            if field.required and not written_type.required and not lags:
                return f"column {name!r} became optional"
            kind = field.field_type
            if kind.is_primitive:
                if not _is_readable_as(written_type.field_type, kind):
                    return f"column {name!r} {'had type' if lags else 'was changed to type'} {written_type.field_type}"
            elif mismatch := self._mismatch(_fields_within(kind), of_batch, lags=lags):
                return mismatch
        return None


def _fields_within(kind: IcebergType) -> Sequence[NestedField]:
    if isinstance(kind, ListType):
        return (kind.element_field,)
    if isinstance(kind, MapType):
        return (kind.key_field, kind.value_field)
    assert isinstance(kind, IcebergStructType)
    return kind.fields


def _is_readable_as(written_type: IcebergType, target: IcebergType) -> bool:
    """Whether values of a type can be read as another type: the same, or one that Iceberg can promote it to."""
    if written_type == target:
        return True
    try:
        promote(written_type, target)
    except ResolveError:
        return False
    return True


@dataclass(frozen=True)
class AppendedPart:
    """Data files of a batch, for one task."""

    pickled_job: bytes
    tasks: tuple[FileScanTask, ...]

    def batches(self, schema: SparkStructType) -> Iterator[pa.RecordBatch]:
        return read_tasks(pickle.loads(self.pickled_job), self.tasks, schema)


class _Batch:
    """The rows that were appended to a table between two offsets."""

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
        """Return the files. Raises VersionExpiredError for a gap, or CommitConflictError if rows were replaced."""
        start, end = self._start, self._end
        if start["table_id"] not in (_NONE, end["table_id"]):
            self._refuse_overwrite("the name refers to another table, or to none")
        if end["snapshot_id"] == _NONE:
            return []
        current = self._snapshot(int(end["snapshot_id"]))
        if current is None:
            raise self._gap()
        if start["version"] < 0:
            scan = DataScan(self._metadata_with(current), self.io, snapshot_id=current.snapshot_id)
            return planned(scan)
        base = int(start["snapshot_id"]) if start["snapshot_id"] and start["table_id"] == end["table_id"] else None
        added = self._since(current, base)
        return [FileScanTask(file) for snapshot in reversed(added) for file in self._appended_by(snapshot)]

    def _since(self, current: TableSnapshot, base: int | None) -> list[TableSnapshot]:
        """Return the snapshots after ``base`` up to ``current``, newest first."""
        chain: list[TableSnapshot] = []
        step: TableSnapshot | None = current
        while step is not None and step.snapshot_id != base:
            chain.append(step)
            parent = self._parent(step)
            if parent is None and base is not None and not step.sequence_number and self._snapshot(base) is None:
                parent = _TRIMMED  # whether or not it is the table's first snapshot, base is older
            if parent == base:
                return chain
            if parent is None:
                return self._since_fork(chain, base)
            step = None if parent == _TRIMMED else self._snapshot(parent)
            if step is None and self._options.on_gap == "fail":
                raise self._gap()
        return chain

    def _parent(self, snapshot: TableSnapshot) -> int | None:
        """Return the parent of a snapshot, None for the first one, or _TRIMMED if no version contains the parent."""
        parent, number = snapshot.parent_snapshot_id, snapshot.sequence_number or 0
        if parent is not None or number == 1:
            return parent
        # After a trim, the oldest remaining snapshot no longer names its parent.
        for metadata in self._all_histories():
            known_snapshot = metadata.snapshot_by_id(snapshot.snapshot_id)
            if known_snapshot is not None and known_snapshot.parent_snapshot_id is not None:
                return known_snapshot.parent_snapshot_id
        return _TRIMMED if number else None  # snapshots of Iceberg format version 1 have no sequence numbers

    def _since_fork(self, chain: Sequence[TableSnapshot], base: int | None) -> list[TableSnapshot]:
        """Return the newest snapshots of a chain that does not contain ``base``, because the table was rolled back."""
        self._refuse_overwrite("the table was rolled back to an earlier state")
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
            self._refuse_overwrite("rows were replaced or deleted")
            return
        for manifest in manifests_in(snapshot, self.io):
            if manifest.added_snapshot_id != snapshot.snapshot_id or manifest.content != ManifestContent.DATA:
                continue
            for entry in entries_in(manifest, self.io):
                if entry.status == ManifestEntryStatus.ADDED:
                    yield entry.data_file

    def _snapshot(self, snapshot_id: int) -> TableSnapshot | None:
        """Return a snapshot of the table from the newest metadata that still contains it, or None."""
        matches = (metadata.snapshot_by_id(snapshot_id) for metadata in self._all_histories())
        return next((snapshot for snapshot in matches if snapshot is not None), None)

    def _all_histories(self) -> Iterator[TableMetadata]:
        """Yield each distinct metadata of the table in the batch's versions, newest first. Each is read once."""
        yield from self._histories
        for metadata in self._versions:
            self._histories.append(metadata)
            yield metadata

    def _metadata_with(self, snapshot: TableSnapshot) -> TableMetadata:
        return next(
            metadata for metadata in self._histories if metadata.snapshot_by_id(snapshot.snapshot_id) is not None
        )

    def _readable_versions(self) -> Iterator[TableMetadata]:
        """Yield the table's metadata at the end of the batch, and then each distinct metadata of other versions."""
        latest = self._lake.snapshot()
        first, last = max(self._start["version"], 0), self._end["version"]
        expired = set(expired_between(latest, first - 1, last))
        visited: set[str] = set()
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
            if uri not in visited:
                visited.add(uri)
                yield table_metadata(definition, self.io)

    def _gap(self) -> VersionExpiredError:
        return gap_error(
            f"rows of table {'.'.join(self._name)}", max(self._start["version"] + 1, 0), self._end["version"]
        )

    def _refuse_overwrite(self, how: str) -> None:
        if self._options.on_overwrite == "fail":
            raise CommitConflictError(
                f"cannot read table {'.'.join(self._name)} as a stream of appended rows: in versions"
                f" {self._start['version'] + 1} to {self._end['version']} {how}; start a new stream with a new"
                " checkpoint, or set the option on_overwrite to 'skip' to ignore such commits",
                base_version=max(self._start["version"], 0),
                latest_version=self._end["version"],
            )


_FOLLOWED = ("versions", "changes")


@dataclass(frozen=True)
class LakehouseAt:
    """The location of a lakehouse."""

    #: The options of the source, with the root and the storage options.
    options: SourceOptions

    def open(self) -> Lakehouse:
        """Open the lakehouse. Raises LakehouseNotFoundError, or StorageError."""
        return Lakehouse.open(self.options.root, self.options.storage_options)


def stream_reader(options: Mapping[str, str], opened: OpenedTable, schema: StructType) -> StreamReader:
    """Return the reader of a stream.

    Args:
        options: The options of the source.
        opened: The opened table.
        schema: The columns in Spark's form.

    Raises:
        InvalidInputError: If the table cannot be read as a stream, or an option does not apply to streams.
    """
    source = SourceOptions.parse(options, STREAM_OPTIONS)
    request = source.request
    if request.time is not None:
        raise InvalidInputError(f"option {request.time!r} is not supported for streams; use 'starting_version'")
    if request.first_version is not None or request.last_version is not None:
        raise InvalidInputError("options 'from' and 'to' are not supported for streams; use 'starting_version'")
    followed = _follow(opened, request.parallelism)
    stream_options = {name.lower(): value for name, value in options.items()}
    return StreamReader(LakehouseAt(source), followed, StreamOptions.parse(stream_options), schema)


def _follow(opened: OpenedTable, parallelism: int) -> Followed:
    if isinstance(opened, OpenedMetadata):
        if opened.name not in _FOLLOWED:
            raise InvalidInputError(
                f"metadata table {opened.name!r} cannot be read as a stream; use {' or '.join(_FOLLOWED)}"
            )
        return FollowedHistory(opened, parallelism)
    assert isinstance(opened, OpenedData)

    plan: DataPlan = pickle.loads(opened.pickled_plan)
    loaded = plan.found.metadata
    assert plan.found.version is not None  # streams do not read exports, so the version is set
    return FollowedTable(
        *plan.name,
        plan.found.version.version,
        loaded.table_uuid,
        loaded.schema(),
        plan.schema,
        plan.row_filter,
        parallelism,
    )
