"""``spark.readStream.format("trinitylake")``: streams of ``changes``, ``versions``, and appended rows of a table.

A helper process of the driver lives as long as the query. It decides where each batch ends, and plans the tasks. An
offset contains a version of the lakehouse and, for a table, the table's Iceberg snapshot in that version. A restarted
query therefore resumes exactly at its checkpoint. An offset also contains the lakehouse and the target of the stream,
so that a checkpoint of another stream is rejected.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from trinitylake_ops._lazy import cached_attribute
from trinitylake_ops.errors import InvalidInputError, VersionExpiredError
from trinitylake_ops.spark.source.options import LATEST, StreamOptions

if TYPE_CHECKING:
    import pyarrow as pa

    from trinitylake_ops.spark.metadata.reader import OpenedMetadata
    from trinitylake_ops.transaction.lakehouse import Lakehouse
    from trinitylake_ops.versions.snapshot import Snapshot

Offset: TypeAlias = dict[str, Any]

_LAKEHOUSE, _OF = "lakehouse", "of"
_MAX_SHOWN_CHARS = 300


class Followed(Protocol):
    """The target of a stream. It is pickled with the source, and opened in the helper process that plans."""

    @property
    def kind(self) -> str:
        """The value of an offset that identifies the target of its stream."""
        ...

    def is_offset(self, offset: Offset) -> bool:
        """Whether an offset has the entries of this stream's offsets, in addition to its version."""
        ...

    def before(self, lake: Lakehouse, version: int) -> Offset:
        """Return the offset before a version, at which a new stream starts. Version 0 means the whole table.

        Args:
            lake: The lakehouse.
            version: The version.
        """
        ...

    def at(self, lake: Lakehouse, version: int) -> Offset:
        """Return the offset of a version.

        Args:
            lake: The lakehouse.
            version: The version.
        """
        ...

    def parts(self, lake: Lakehouse, start: Offset, end: Offset, options: StreamOptions) -> Sequence[object]:
        """Return the inputs of a batch's tasks, which have a method ``batches``.

        Args:
            lake: The lakehouse.
            start: The offset before the batch, exclusive.
            end: The offset of the batch, inclusive.
            options: How the stream reads.
        """
        ...


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a stream. A helper process of the driver creates and plans it. Other helpers send ``read`` to the tasks."""

    def __init__(self, lakehouse: OpensLakehouse, followed: Followed, options: StreamOptions, schema: StructType):
        self._lakehouse = lakehouse
        self._followed = followed
        self._options = options
        self._schema = schema
        self._until: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tasks need only their partition.
        return {"_schema": self._schema}

    @cached_attribute
    def _lake(self) -> Lakehouse:
        return self._lakehouse.open()

    def initialOffset(self) -> Offset:  # noqa: N802 - Spark's name
        start = self._options.starting_version
        if start == LATEST:
            return self._marked(self._followed.at(self._lake, self._lake.latest_version()))
        return self._marked(self._followed.before(self._lake, 0 if start is None else int(start)))

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # noqa: N802 - Spark's name
        self._check(start)
        latest = self._lake.latest_version() if self._until is None else self._until
        if start["version"] > latest:
            raise InvalidInputError(
                f"the stream has read version {start['version']}, but the latest version of {self._lake.root} is"
                f" {latest}: it is another lakehouse, or an older copy; start a new stream with a new checkpoint"
            )
        end = latest
        if isinstance(limit, ReadMaxRows):  # the limit is a number of versions, for which Spark has no type
            end = _next_live(self._lake, min(latest, max(start["version"], 0) + limit.max_rows), latest)
        return start if end == start["version"] else self._marked(self._followed.at(self._lake, end))

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802 - Spark's name
        most = self._options.max_versions
        return ReadAllAvailable() if most is None else ReadMaxRows(most)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 - Spark's name
        self._until = self._lake.latest_version()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._check(start)
        self._check(end)
        if start["version"] == end["version"]:
            return []
        parts = self._followed.parts(self._lake, start, end, self._options)
        return [InputPartition(pickle.dumps(part)) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:
            return iter(())
        batches: Iterator[pa.RecordBatch] = pickle.loads(partition.value).batches(self._schema)
        return batches

    @cached_attribute
    def _marks(self) -> Offset:
        """Entries of every offset of this stream. Checkpoints of earlier releases do not have them."""
        return {_LAKEHOUSE: self._lake.snapshot().definition.id, _OF: self._followed.kind}

    def _marked(self, offset: Offset) -> Offset:
        return {**offset, **self._marks}

    def _check(self, offset: object) -> None:
        """Raise InvalidInputError if an offset belongs to another stream."""
        if (
            isinstance(offset, dict)
            and type(offset.get("version")) is int
            and self._followed.is_offset(offset)
            and all(offset.get(name, mark) == mark for name, mark in self._marks.items())
        ):
            return
        raise InvalidInputError(
            f"the checkpoint contains {json.dumps(offset)[:_MAX_SHOWN_CHARS]}, which is not an offset of"
            f" {self._followed.kind} in lakehouse {self._marks[_LAKEHOUSE]} at {self._lake.root}: it is damaged, or"
            " belongs to another stream; use a separate checkpoint for each stream"
        )


class OpensLakehouse(Protocol):
    """The location of a lakehouse. Options with credentials are resolved in the process that opens it."""

    def open(self) -> Lakehouse:
        """Open the lakehouse."""
        ...


def _next_live(lake: Lakehouse, version: int, latest: int) -> int:
    """Return the first version from ``version`` on that has not expired. The latest version never expires."""
    expired = lake.snapshot().definition.expirations
    while version < latest and any(batch.contains(version) for batch in expired):
        version += 1
    return version


def expired_between(latest: Snapshot, start: int, end: int) -> list[int]:
    """Return the expired versions in a range.

    Args:
        latest: The latest version of the lakehouse.
        start: The start of the range, exclusive.
        end: The end of the range, inclusive.
    """
    batches = latest.definition.expirations
    return [version for version in range(start + 1, end + 1) if any(batch.contains(version) for batch in batches)]


def gap_error(changes: str, first: int, last: int) -> VersionExpiredError:
    """Return the error for versions that expired before a stream read them.

    Args:
        changes: The kind of changes in the versions, in the plural.
        first: The first version.
        last: The last version.
    """
    return VersionExpiredError(
        f"versions {first} to {last} contain {changes}, but expired before the stream read them; undelete them if that"
        " is still possible, or set the option on_gap to 'skip' to continue without them",
        version=first,
    )


@dataclass(frozen=True)
class FollowedHistory:
    """The rows of ``changes`` or ``versions``, for each version."""

    #: The metadata table.
    opened: OpenedMetadata
    #: The number of tasks to aim for.
    parallelism: int

    @property
    def kind(self) -> str:
        return self.opened.name

    def is_offset(self, offset: Offset) -> bool:
        return int(offset["version"]) >= -1

    def before(self, lake: Lakehouse, version: int) -> Offset:
        if version > 0:
            return {"version": version - 1}
        # Version 0 has no changes. Versions that expired before a stream started are not a gap.
        latest = lake.snapshot()
        expired = expired_between(latest, -1, latest.version)
        is_log = self.opened.name == "versions"
        return {"version": -1 if is_log else max(expired, default=0)}

    def at(self, _lake: Lakehouse, version: int) -> Offset:
        return {"version": version}

    def parts(self, lake: Lakehouse, start: Offset, end: Offset, options: StreamOptions) -> Sequence[object]:
        from trinitylake_ops.spark.metadata.reader import PinnedSnapshot
        from trinitylake_ops.spark.metadata.tables import Changes, Versions

        latest = lake.snapshot()
        versions = range(start["version"] + 1, end["version"] + 1)
        pinned = PinnedSnapshot.of(lake, latest)
        table: Changes | Versions
        if self.opened.name == "versions":
            table = Versions(pinned, versions, self.parallelism)
        else:
            expired = expired_between(latest, start["version"], end["version"])
            if expired and options.on_gap == "fail":
                raise gap_error("changes", expired[0], expired[-1])
            table = Changes(pinned, versions, parallelism=self.parallelism)
        return [HistoryPart(self.opened.of(table), share) for share in table.partitions()]


@dataclass(frozen=True)
class HistoryPart:
    """A task's share of the versions in a batch."""

    #: The metadata table.
    opened: OpenedMetadata
    #: The partition of the metadata table.
    share: object

    def batches(self, schema: StructType) -> Iterator[pa.RecordBatch]:
        from trinitylake_ops.spark.metadata.reader import metadata_batches

        return metadata_batches(self.opened, self.opened.table.rows(self.share), schema)
