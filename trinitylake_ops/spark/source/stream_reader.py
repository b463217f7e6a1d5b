"""``spark.readStream.format("trinitylake")``: commits, as ``changes`` and ``versions``, and appended rows of a table.

A helper process of the driver lives as long as the query. It says up to which version a batch goes, and plans the reads
of tasks. An offset holds a version of the lakehouse, and of a table the Iceberg snapshot that it has there. So a query
that is started again goes on exactly where its checkpoint says. It also names the lakehouse and the target of the read:
a checkpoint of another stream is refused.
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
_LONGEST_SHOWN_CHARS = 300


class Followed(Protocol):
    """The target of a stream. It is pickled with the source, and opened by the helper that plans."""

    @property
    def kind(self) -> str:
        """The entries of an offset that identify its stream."""
        ...

    def is_offset(self, offset: Offset) -> bool:
        """Whether an offset has the same entries as this stream's offsets, besides its version."""
        ...

    def before(self, lake: Lakehouse, version: int) -> Offset:
        """Return the offset before a version, at which a new stream begins. Version 0 stands for everything."""
        ...

    def at(self, lake: Lakehouse, version: int) -> Offset:
        """Return the offset of a version."""
        ...

    def parts(self, lake: Lakehouse, start: Offset, end: Offset, options: StreamOptions) -> Sequence[object]:
        """Return the inputs of a batch's tasks: after ``start``, up to ``end``, inclusive. Each has ``batches``."""
        ...


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """A helper of the driver makes the reader and plans. Other helpers only send ``read`` to the tasks."""

    def __init__(self, lakehouse: OpensLakehouse, followed: Followed, options: StreamOptions, schema: StructType):
        self._lakehouse = lakehouse
        self._followed = followed
        self._options = options
        self._schema = schema
        self._until: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Tasks need only the content of a partition.
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
                f"the stream has read version {start['version']}, and the latest one of {self._lake.root} is {latest}:"
                " it is another lakehouse, or an older one; begin a new stream"
            )
        end = latest
        if isinstance(limit, ReadMaxRows):  # a limit of versions: Spark has no other kind of limit for them
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
        """The entries of every offset of this stream. Checkpoints of earlier releases lack them."""
        return {_LAKEHOUSE: self._lake.snapshot().definition.id, _OF: self._followed.kind}

    def _marked(self, offset: Offset) -> Offset:
        return {**offset, **self._marks}

    def _check(self, offset: object) -> None:
        """Raise InvalidInputError for an offset of another stream."""
        if (
            isinstance(offset, dict)
            and type(offset.get("version")) is int
            and self._followed.is_offset(offset)
            and all(offset.get(name, mark) == mark for name, mark in self._marks.items())
        ):
            return
        raise InvalidInputError(
            f"the checkpoint holds {json.dumps(offset)[:_LONGEST_SHOWN_CHARS]}, which is no place in"
            f" {self._followed.kind} of lakehouse {self._marks[_LAKEHOUSE]} at {self._lake.root}: it is damaged, or"
            " another stream's; give each stream a checkpoint of its own"
        )


class OpensLakehouse(Protocol):
    """The place of the lakehouse. Options with credentials are looked up where it is opened."""

    def open(self) -> Lakehouse:
        """Return the lakehouse."""
        ...


def _next_live(lake: Lakehouse, version: int, latest: int) -> int:
    """Return the first version from ``version`` on that did not expire. The latest one never does."""
    expired = lake.snapshot().definition.expirations
    while version < latest and any(batch.contains(version) for batch in expired):
        version += 1
    return version


def expired_between(latest: Snapshot, start: int, end: int) -> list[int]:
    """Return the versions above ``start``, up to ``end``, that expired."""
    batches = latest.definition.expirations
    return [version for version in range(start + 1, end + 1) if any(batch.contains(version) for batch in batches)]


def gap_error(what: str, first: int, last: int) -> VersionExpiredError:
    """Return the error for versions that a stream cannot read any more."""
    return VersionExpiredError(
        f"versions {first} to {last} hold {what} and expired before the stream came to them; undelete them while that"
        " is possible, or let the stream go on without them by the option on_gap 'skip'",
        version=first,
    )


@dataclass(frozen=True)
class FollowedHistory:
    """The rows of ``changes`` or ``versions`` for each version."""

    opened: OpenedMetadata
    parallelism: int

    @property
    def kind(self) -> str:
        return self.opened.name

    def is_offset(self, offset: Offset) -> bool:
        return int(offset["version"]) >= -1

    def before(self, lake: Lakehouse, version: int) -> Offset:
        if version > 0:
            return {"version": version - 1}
        # Version 0 changes nothing. A version that expired before a stream began is no gap in it.
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
    """A share of the versions of a batch."""

    opened: OpenedMetadata
    share: object

    def batches(self, schema: StructType) -> Iterator[pa.RecordBatch]:
        from trinitylake_ops.spark.metadata.reader import metadata_batches

        return metadata_batches(self.opened, self.opened.table.rows(self.share), schema)
