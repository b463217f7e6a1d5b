"""A pipeline run in plain Spark.

It reads at a pinned version, writes many tables, and publishes them in one commit, once.

::

    run = PipelineRun(spark, lake, run_id="2013-01-31")
    if not run.is_published:
        orders = run.read("raw.orders")                        # as at the version that the run began on
        run.write(orders.groupBy("day").count(), "facts", "daily", mode="replace_table")
        run.write(orders.where("paid"), "facts", "paid", mode="append", partition_by=("day",))
    print(run.publish(message="January").version)

A run that died anywhere and is started again reads the same version as before. It reports the version that it had
committed, or commits its own: never both.
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
    """One run of a pipeline, identified by its ``run_id``. The caller chooses it, and keeps it for repetitions.

    ``version`` is pinned by the first start of the run. It is the latest one then, or the given ``version``. The pin
    does not keep the version: an expired one cannot be read. The pin stays for the lakehouse's ``txn_ttl_millis`` at
    least, until orphans are removed. A later repetition looks for its commit in the versions above ``since``, -1 for
    all. Raises InvalidInputError for an empty id, StorageError, and VersionNotFoundError, also if it is unknown whether
    the run committed.
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
            raise InvalidInputError("run_id is empty: give what tells this run from others, such as its date")
        self._spark = spark
        self._lake = lake
        self.run_id = run_id
        self._id = publication_id(_PIPELINE, run_id)
        self.version = pinned_version(lake.snapshot(version), publication_id("pin", _PIPELINE, run_id))
        self._staged: dict[tuple[str, str], StagedTable] = {}
        self._read: set[tuple[str, str]] = set()
        found = published_version(lake, self._id, self.version if since is None else min(since, self.version))
        self._published = None if found is None else Publication(found, was_published=True)

    @property
    def is_published(self) -> bool:
        """Whether this run has committed, now or when it was started before."""
        return self._published is not None

    @property
    def staged(self) -> tuple[StagedTable, ...]:
        """The tables that this run would publish."""
        return tuple(self._staged.values())

    def read(
        self, table: str, *, row_filter: str | BooleanExpression | None = None, columns: Sequence[str] | None = None
    ) -> DataFrame:
        """Return a table at the pinned version. Other arguments are as in :func:`table_reader.read_table`."""
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
        """Stage a table of this run, as :func:`table_writer.stage_dataframe` does. Each table is staged once.

        Raises the errors of that function, and InvalidInputError for a table that was staged before. Raises
        CommitConflictError if others changed the table since the pinned version.
        """
        name = (namespace, table)
        if name in self._staged:
            raise InvalidInputError(f"this run has staged table {namespace}.{table} already: write all rows at once")
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
        """Add a table to the commit that was staged otherwise, such as by pyiceberg in a ``StagingCatalog``."""
        self._staged[staged.namespace, staged.table] = staged
        return staged

    def publish(
        self,
        *,
        message: str | None = None,
        properties: Mapping[str, str] | None = None,
        isolation: str | None = None,
    ) -> Publication:
        """Commit all staged tables as one version, unless this run had. Returns that version.

        A written table must be as it was at the pinned version. With the isolation ``serializable``, each table that
        was read must be, too. By default the isolation is the lakehouse's own. Raises CommitConflictError if a table is
        not. Begin a new run then, with an id of its own. Raises what :func:`publication.publish_once` raises.
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
        """Raise CommitConflictError if another process with this run's id has committed it, if that is why."""
        found = published_version(self._lake, self._id, self.version)
        if found is not None and self._published is None:
            raise CommitConflictError(
                f"run {self.run_id} was committed as version {found} by another process; nothing is left to do, and"
                " when the run is started again it reports that version",
                base_version=self.version,
                latest_version=found,
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
                f"table {name} changed since version {self.version}, which run {self.run_id} reads; begin a new run",
                conflicts=tuple(f"table {'.'.join(one)}: changed since the run began" for one in changed),
                base_version=self.version,
                latest_version=latest.version,
            )


def _metadata_location(reader: CatalogReader, name: tuple[str, str]) -> str | None:
    if not (reader.has_namespace(name[0]) and reader.has_table(*name)):
        return None
    definition = reader.table(*name)
    return f"{definition.id} {definition.format_properties.get(METADATA_LOCATION)}"
