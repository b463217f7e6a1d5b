"""Publish exactly once: each publication has an id, and the history contains at most one commit with this id.

The publication id is used as the transaction id. It is among the ``members`` of the version that contains the
publication, and stays there when the version is purged. Before each attempt, a worker searches for the id in the
versions since the tables were staged. An attempt can only be committed directly on the last version that was searched
(docs/internals/protocol.md, C). Workers that are restarted after a kill, and workers that race, therefore return the
version that one of them committed.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, VersionNotFoundError
from trinitylake_ops.format.definitions import METADATA_LOCATION, IsolationLevel
from trinitylake_ops.iceberg.write.presence import is_latest_change
from trinitylake_ops.iceberg.write.rebase import rebase
from trinitylake_ops.iceberg.write.replacement import ReadsCheck, StagedRead, TableRead
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import publish
from trinitylake_ops.telemetry.lineage import Origin, PublishedTable, ReadTable, is_wanted, send_publication
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import CommittedByOtherError, version_of, versions_of
from trinitylake_ops.versions.root_files import ProbedRoots
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms, utc_of
from trinitylake_ops.versions.time_travel import find_version_before

_PUBLICATIONS = uuid.UUID("5e6d3a8e-7a55-4d6a-9a7d-6f3c1b1f2c77")

PUBLISH = "publish"


@dataclass(frozen=True, slots=True)
class Publication:
    """The outcome of a publication."""

    #: The version that contains the publication.
    version: int
    #: Whether an earlier attempt committed the publication.
    was_published: bool
    #: The staged tables as committed by this attempt, possibly rebased. Empty if an earlier attempt committed them.
    tables: tuple[StagedTable, ...] = ()


def publication_id(*names: str) -> str:
    """Return the id of the publication with these names, for example a run id and the published object."""
    return str(uuid.uuid5(_PUBLICATIONS, "\n".join(f"{len(name)}:{name}" for name in names)))


def publish_once(
    lake: Lakehouse,
    staged: Sequence[StagedTable],
    publication: str,
    *,
    isolation: str | None = None,
    run_id: str | None = None,
    message: str | None = None,
    properties: Mapping[str, str] | None = None,
    operation: str = PUBLISH,
    require: Callable[[Snapshot], None] | None = None,
    since: int | None = None,
    reads: Sequence[TableRead] = (),
    staged_reads: Sequence[StagedRead] = (),
    own: Sequence[StagedTable] = (),
    was_published: Callable[[StagedTable], bool] = lambda _: False,
    replaces_latest: Sequence[StagedTable] = (),
    superseded: Sequence[StagedTable] = (),
) -> Publication:
    """Commit staged tables as one version, unless ``publication`` was committed since they were staged.

    If other writers changed one of the tables, the staged files are added to the newer table, with new metadata
    (:func:`trinitylake_ops.iceberg.write.rebase.rebase`). Appends can always be rebased; replaced partitions can be
    rebased only if their data did not change. Namespaces of new tables are created. Tables that the latest version
    already contains as staged, from another publication, are skipped. Without changes there is no commit, and the
    latest version is returned.

    Args:
        lake: The lakehouse.
        staged: The staged tables, at most one per table.
        publication: Id of the publication. It must identify these staged tables, or a unit of work that publishes once
            even if it stages again.
        isolation: Isolation level; by default the lakehouse's isolation level.
        run_id: Run id of the commit.
        message: Message of the commit.
        properties: Properties of the commit.
        operation: Operation of the commit.
        require: Raises a typed error if the commit must not be based on a version.
        since: Version after which the publication may have been committed, if tables may have been staged again.
        reads: Tables that the staged tables were computed from. A serializable commit requires that they did not change
            since they were read.
        staged_reads: Staged tables that were read before their publication. They must be in ``staged`` or be published.
            A serializable commit also requires that other writers have not changed them.
        own: Tables that the reader staged. Changes made by publishing these tables do not count.
        was_published: Returns whether a table of ``staged_reads`` was published. Used for tables whose history was
            trimmed.
        replaces_latest: Tables of ``staged`` that replace the rows of the latest version even if other writers changed
            these rows, as if the files had just been staged. Reads of these tables count at every isolation level.
        superseded: Earlier appends of the same unit of work, whose files are replaced by the files of ``staged``.

    Returns:
        The version, and whether an earlier attempt committed it.

    Raises:
        InvalidInputError: There are no tables, or a table occurs twice.
        CommitConflictError: Other writers changed data that a staged table replaces, or a table that was read.
        TransactionExpiredError: A table was staged too long ago.
        VersionNotFoundError: Whether the publication was committed is unknown, because a root is missing.
        TrinityLakeError: Other errors of a commit.
    """
    _check_distinct(staged)
    searched_to = min(table.base_version for table in staged)
    if since is not None:
        searched_to = min(searched_to, since)
    search = _Search(publication, searched_to)
    replacing = {(table.namespace, table.table) for table in replaces_latest}
    # Superseding appends that already remove files were staged without the files that they repeat.
    repeated = {(table.namespace, table.table) for table in superseded}
    superseding = [table for table in staged if (table.namespace, table.table) in repeated]

    def reads_check(isolation: IsolationLevel) -> ReadsCheck:
        is_serializable = isolation != IsolationLevel.SNAPSHOT
        return ReadsCheck(
            lake=lake,
            reads=[read for read in reads if is_serializable or (read.namespace, read.table) in replacing],
            staged_reads=staged_reads,
            own=[*own, *staged],
            strict=lambda table: is_serializable or (table.namespace, table.table) in replacing,
            was_published=was_published,
        )

    def commit(attempted: Sequence[StagedTable]) -> int:
        transaction = lake.transaction(
            isolation, message, properties, operation=operation, run_id=run_id, transaction_id=publication
        )
        with transaction as txn:
            txn.require(search.must_be_unpublished)
            if require is not None:
                txn.require(require)
            # Tables that the run adopted from an earlier publication are already published. Only the other tables can
            # be unpublished.
            unpublished = {
                original.metadata_location: table
                for table, original in zip(attempted, staged, strict=True)
                if not is_latest_change(lake, txn.base, original)
            }
            if reads or staged_reads:
                check = reads_check(txn.isolation)
                publishing = {location: table.metadata_location for location, table in unpublished.items()}
                txn.require(lambda latest: check(latest, publishing))
            published = list(unpublished.values()) or attempted
            new_namespaces = {table.namespace for table in published if table.base_metadata_location is None}
            created_namespaces[:] = [name for name in sorted(new_namespaces) if not txn.has_namespace(name)]
            publish(txn, published)
        assert transaction.committed_version is not None
        return transaction.committed_version

    attempted = list(staged)
    created_namespaces: list[str] = []  # namespaces that the last attempt created
    while True:
        try:
            if superseded and attempted == list(staged) and not all(table.removed_files for table in superseding):
                attempted = _rebase_all(lake, staged, attempted, replacing, superseded)
            return Publication(commit(attempted), search.was_published, tuple(attempted))
        except CommittedByOtherError as error:
            return Publication(error.committed_version, was_published=True)
        except CommitConflictError:
            # A faster worker may have committed the same tables, and the conflict was detected before its commit was
            # found.
            version = published_version(lake, publication, search.searched_to)
            if version is not None:
                return Publication(version, was_published=True)
            rebased = _rebase_all(lake, staged, attempted, replacing, superseded)
            if rebased == attempted and not any(map(lake.snapshot().has_namespace, created_namespaces)):
                raise
            attempted = rebased


def _check_distinct(staged: Sequence[StagedTable]) -> None:
    """Raise InvalidInputError if there is no table, or a table occurs twice."""
    if not staged:
        raise InvalidInputError("publication is empty: no table was staged; stage at least one table")
    names = [f"{table.namespace}.{table.table}" for table in staged]
    duplicates = sorted({name for name in names if names.count(name) > 1})
    if duplicates:
        raise InvalidInputError(
            f"table {duplicates[0]} was staged twice for one publication: a commit takes one change per table; publish"
            " each change separately, or write both in one asset"
        )


@dataclass
class _Search:
    """Searches the history for a publication before each attempt and each rebase of its transaction."""

    publication: str
    searched_to: int
    was_published: bool = False

    def must_be_unpublished(self, latest: Snapshot) -> None:
        version = version_of(latest.files, self.publication, self.searched_to, latest.version)
        if version is not None:
            self.was_published = True
            raise CommittedByOtherError(
                f"publication {self.publication} was already committed", committed_version=version
            )
        self.searched_to = latest.version


def _rebase_all(
    lake: Lakehouse,
    staged: Sequence[StagedTable],
    attempted_tables: Sequence[StagedTable],
    replacing: Collection[tuple[str, str]],
    superseded: Sequence[StagedTable],
) -> list[StagedTable]:
    """Rebase staged tables onto the latest version, unless the base of the last attempt has not changed.

    Changes of other writers are kept, and the staged changes are applied on top, until the staged files are too old to
    be published. Raises CommitConflictError, StorageError.
    """
    latest = lake.snapshot()
    earlier = {(table.namespace, table.table): table for table in superseded}
    rebased: list[StagedTable] = []
    for original, attempted in zip(staged, attempted_tables, strict=True):
        name = (original.namespace, original.table)
        is_attempted = name not in earlier or attempted != original or original.removed_files > 0
        if is_latest_change(lake, latest, original):
            rebased.append(original)
        elif is_attempted and _location(latest, attempted) == attempted.base_metadata_location:
            rebased.append(attempted)
        else:
            rebased.append(rebase(lake, original, replaces_latest=name in replacing, superseded=earlier.get(name)))
    return rebased


def _location(version: Snapshot, staged: StagedTable) -> str | None:
    """Return the metadata location of a table in a version, or None if it does not exist."""
    name = (staged.namespace, staged.table)
    if not (version.has_namespace(staged.namespace) and version.has_table(*name)):
        return None
    return version.table(*name).format_properties.get(METADATA_LOCATION)


def published_version(lake: Lakehouse, publication: str, after: int) -> int | None:
    """Return the version that contains a publication, or None.

    Args:
        lake: The lakehouse.
        publication: Id of the publication.
        after: Search only versions after this one.

    Raises:
        VersionNotFoundError: The result is unknown, because a root is missing.
        StorageError: A root cannot be read.
    """
    return version_of(lake.files, publication, after, lake.latest_version())


def published_versions(lake: Lakehouse, publications: Collection[str], after: int) -> dict[str, int]:
    """Return the versions that contain publications, by the ids of committed publications.

    The ids are stored in the roots, which outlive the contents of their versions and the snapshots of their tables.

    Args:
        lake: The lakehouse.
        publications: Ids of publications.
        after: Search only versions after this one.

    Raises:
        VersionNotFoundError: The result is unknown, because a root is missing.
        StorageError: A root cannot be read.
    """
    return versions_of(lake.files, publications, after, lake.latest_version())


def version_before(lake: Lakehouse, moment: datetime) -> int:
    """Return the newest version that existed at a time, even if it is no longer readable. Return -1 if there is none.

    Args:
        lake: The lakehouse.
        moment: The time.

    Raises:
        StorageError: A root cannot be read.
    """
    try:
        return find_version_before(lake.files.roots, epoch_ms(moment), lake.latest_version(), ProbedRoots(lake.storage))
    except VersionNotFoundError:
        return -1


logger = logging.getLogger(__name__)


def emit_lineage(
    lake: Lakehouse,
    version: int,
    staged: Sequence[StagedTable],
    reads: Callable[[], Iterable[TableRead]],
    *,
    integration: str,
    job: str,
    run_id: str,
) -> None:
    """Emit OpenLineage events for a publication, if OpenLineage is configured. Failures are logged and not raised.

    If a run is repeated, its events differ only in their end time.

    Args:
        lake: The lakehouse.
        version: The published version.
        staged: The published tables. The run started when their staging started.
        reads: Returns the tables that were read.
        integration: Name of the integration.
        job: Name of the job.
        run_id: Id of the run.
    """
    if not staged or not is_wanted():
        return
    try:
        table_reads = list(reads())
    except Exception as error:  # noqa: BLE001 - the tables are published, so no failure may escape
        logger.warning("could not emit the lineage of version %s, because its reads are unknown: %s", version, error)
        return
    began = utc_of(min(table.begun_at_ms for table in staged))
    origin = Origin(integration, job, run_id, began, max(datetime.now(UTC), began))
    read = {
        (table_read.root, f"{table_read.namespace}.{table_read.table}"): table_read.version
        for table_read in table_reads
        if table_read.location is not None
    }
    send_publication(
        lake.root,
        version,
        origin,
        [_published_table(table) for table in staged],
        [ReadTable(root, name, read_version) for (root, name), read_version in read.items()],
    )


def _published_table(table: StagedTable) -> PublishedTable:
    columns = tuple((column.name, column.type_name) for column in table.table_def.schema.columns)
    name = f"{table.namespace}.{table.table}"
    return PublishedTable(name, columns, table.added_rows, table.added_bytes, table.added_files)
