"""A pipeline run in plain Spark: read at a pinned version, write many tables, and publish them once in one commit.

::

    run = PipelineRun(spark, lake, run_id="2013-01-31")
    if not run.is_published:
        orders = run.read("raw.orders")                        # at the version that was pinned when the run began
        run.write(orders.groupBy("day").count(), "facts", "daily", mode="replace_table")
        run.write(orders.where("paid"), "facts", "paid", mode="append", partition_by=("day",))
    print(run.publish(message="January").version)

A run that was killed at any point and is started again reads the same version as before. If it had already committed,
it returns that version; otherwise it commits. It never commits twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pyiceberg.expressions import BooleanExpression
from pyspark.sql import DataFrame, SparkSession

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import METADATA_LOCATION
from trinitylake_ops.iceberg.write.data_files import TARGET_FILE_SIZE_BYTES
from trinitylake_ops.iceberg.write.partition_key import PartitionValue
from trinitylake_ops.iceberg.write.plan import Evolution
from trinitylake_ops.iceberg.write.publication import (
    Publication,
    emit_lineage,
    publication_id,
    publish_once,
    published_version,
)
from trinitylake_ops.iceberg.write.replacement import TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import Mode
from trinitylake_ops.spark.tables.reader import read_table
from trinitylake_ops.spark.tables.writer import stage_dataframe
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import pinned_version
from trinitylake_ops.versions.snapshot import CatalogReader, Snapshot
from trinitylake_ops.versions.table_names import resolve_table

_PIPELINE = "pipeline"


class PipelineRun:
    """One run of a pipeline, identified by its ``run_id``. Use the same id when the run is repeated.

    The version to read is pinned at the first start of the run. The pin does not protect the version from expiration;
    an expired version cannot be read. The pin itself is kept for at least the lakehouse's ``txn_ttl_millis``, until
    orphans are removed.

    Args:
        spark: The session.
        lake: The lakehouse.
        run_id: The id of the run, chosen by the caller.
        version: The version to pin at the first start, or None for the latest one.
        since: A repeated run searches the versions after this one for its commit; -1 searches all versions.

    Raises:
        InvalidInputError: If the run id is empty.
        VersionNotFoundError: If the version does not exist, or it is unknown whether the run has committed.
        StorageError: If the storage fails.
    """

    def __init__(
        self,
        spark: SparkSession,
        lake: Lakehouse,
        run_id: str,
        *,
        version: int | None = None,
        since: int | None = None,
    ):
        if not run_id:
            raise InvalidInputError("run_id is empty; pass a value that identifies the run, for example its date")
        self._spark = spark
        self._lake = lake
        self.run_id = run_id
        self._id = publication_id(_PIPELINE, run_id)
        self.version = pinned_version(lake.snapshot(version), publication_id("pin", _PIPELINE, run_id))
        self._staged: dict[tuple[str, str], StagedTable] = {}
        self._read: set[tuple[str, str]] = set()
        committed = published_version(lake, self._id, self.version if since is None else min(since, self.version))
        self._published = None if committed is None else Publication(committed, was_published=True)

    @property
    def is_published(self) -> bool:
        """Whether this run has committed, now or in an earlier attempt."""
        return self._published is not None

    @property
    def staged(self) -> tuple[StagedTable, ...]:
        """The tables that this run is going to publish."""
        return tuple(self._staged.values())

    def read(
        self, table: str, *, row_filter: str | BooleanExpression | None = None, columns: Sequence[str] | None = None
    ) -> DataFrame:
        """Return a table at the pinned version.

        Args:
            table: The table, as ``namespace.table``.
            row_filter: An Iceberg filter, see :func:`~trinitylake_ops.spark.tables.reader.read_table`.
            columns: The columns to read, or None for all.

        Raises:
            InvalidInputError: If the name, the filter or a column is invalid. Errors of ``read_table`` are passed on.
        """
        self._read.add(resolve_table(table, self._lake.snapshot(self.version)))
        return read_table(self._spark, self._lake, table, self.version, row_filter=row_filter, columns=columns)

    def write(
        self,
        frame: DataFrame,
        namespace: str,
        table: str,
        *,
        mode: Mode,
        partition_by: Sequence[str] | None = None,
        primary_key: Sequence[str] = (),
        partitions: Sequence[Mapping[str, PartitionValue]] | None = None,
        properties: Mapping[str, str] | None = None,
        evolve: Evolution | None = None,
        target_file_size_bytes: int = TARGET_FILE_SIZE_BYTES,
    ) -> StagedTable:
        """Stage a table of this run. Each table is staged once.

        Arguments and errors are those of :func:`~trinitylake_ops.spark.tables.writer.stage_dataframe`.

        Raises:
            InvalidInputError: If the table was already staged by this run.
            CommitConflictError: If another commit has changed the table since the pinned version.
        """
        name = (namespace, table)
        if name in self._staged:
            raise InvalidInputError(f"this run has already staged table {namespace}.{table}; write all rows at once")
        self._check_unchanged(self._lake.snapshot(), {name})
        try:
            staged = stage_dataframe(
                self._lake,
                frame,
                namespace,
                table,
                partition_by=partition_by,
                primary_key=primary_key,
                mode=mode,
                partitions=partitions,
                properties=properties,
                evolve=evolve,
                target_file_size_bytes=target_file_size_bytes,
            )
        except CommitConflictError:
            self._check_unpublished()
            raise
        return self.add(staged)

    def add(self, staged: StagedTable) -> StagedTable:
        """Add a table that was staged in another way, for example by pyiceberg in a ``StagingCatalog``."""
        self._staged[staged.namespace, staged.table] = staged
        return staged

    def publish(
        self,
        *,
        message: str | None = None,
        properties: Mapping[str, str] | None = None,
        isolation: str | None = None,
    ) -> Publication:
        """Commit all staged tables as one version, unless this run has already committed.

        Each written table must be unchanged since the pinned version. With isolation ``serializable``, each table that
        was read must be unchanged as well.

        Args:
            message: The commit message.
            properties: The commit properties.
            isolation: The isolation level, or None for the lakehouse's default.

        Returns:
            The version that this run committed.

        Raises:
            CommitConflictError: If a table has changed; start a new run with another id. Other errors of
                ``publish_once`` are passed on.
        """
        if self._published is None:
            is_serializable = (
                isolation or self._lake.snapshot().definition.isolation_level.name
            ).lower() == "serializable"
            names = {*self._staged, *(self._read if is_serializable else ())}
            self._published = publish_once(
                self._lake,
                self.staged,
                self._id,
                isolation=isolation,
                run_id=self.run_id,
                message=message,
                properties=properties,
                require=lambda latest: self._check_unchanged(latest, names),
                since=self.version,
            )
            emit_lineage(
                self._lake,
                self._published.version,
                self._published.tables,
                self._reads,
                integration="SPARK",
                job=self._spark.conf.get("spark.app.name") or _PIPELINE,
                run_id=self.run_id,
            )
        return self._published

    def _reads(self) -> list[TableRead]:
        pinned = self._lake.snapshot(self.version)
        return [TableRead.of(pinned, *name) for name in sorted(self._read)]

    def _check_unpublished(self) -> None:
        """Raise CommitConflictError if another process has committed the run with this id."""
        committed = published_version(self._lake, self._id, self.version)
        if committed is not None and self._published is None:
            raise CommitConflictError(
                f"run {self.run_id} was already committed as version {committed} by another process; nothing is left"
                " to do, and a repetition of the run returns that version",
                base_version=self.version,
                latest_version=committed,
            )

    def _check_unchanged(self, latest: Snapshot, names: set[tuple[str, str]]) -> None:
        pinned = self._lake.snapshot(self.version)
        changed = [
            name for name in sorted(names) if _metadata_location(pinned, name) != _metadata_location(latest, name)
        ]
        if changed:
            name = ".".join(changed[0])
            self._check_unpublished()
            raise CommitConflictError(
                f"table {name} changed since version {self.version}, pinned by run {self.run_id}; start a new run",
                conflicts=tuple(f"table {'.'.join(table)}: changed since the run began" for table in changed),
                base_version=self.version,
                latest_version=latest.version,
            )


def _metadata_location(reader: CatalogReader, name: tuple[str, str]) -> str | None:
    if not (reader.has_namespace(name[0]) and reader.has_table(*name)):
        return None
    definition = reader.table(*name)
    return f"{definition.id} {definition.format_properties.get(METADATA_LOCATION)}"
