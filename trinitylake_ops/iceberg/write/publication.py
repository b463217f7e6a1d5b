"""Publish exactly once: a publication has an id, and the history contains at most one commit of it.

The id is that of the transaction. It is among the ``members`` of the version that commits it, and stays there when the
version is purged. Before each attempt, a worker looks for the id in the versions since the tables were staged. An
attempt can only land right on the version that was looked through last (docs/internals/protocol.md, C). So workers that
are started again after a kill, and workers that race, get the version that one of them committed.
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
    """The outcome of a publication: the version that holds it, and whether an earlier attempt had committed it.

    ``tables`` are the staged tables as this attempt committed them, on the newest ones. They are empty if an earlier
    attempt did.
    """

    version: int
    was_published: bool
    tables: tuple[StagedTable, ...] = ()


def publication_id(*names: str) -> str:
    """Return the id of the publication that has these names, such as a run's id and the published object."""
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

    Where other writers changed one of the tables since, the staged files are put on the newer table, with new metadata
    (:mod:`rebasing.rebase`). Appended files always are. Files that replace partitions are, unless data changed there.
    The namespaces that new tables need are created. Tables that the latest version holds as they were staged, from
    another publication, are left as they are. Without changes there is no commit, and the latest version is returned.

    Args:
        lake: The lakehouse.
        staged: The staged tables, each of another table.
        publication: The id of the publication. It must identify these staged tables, or a unit of work that
            publishes once even if it stages again.
        isolation: The isolation level, by default the lakehouse's own.
        run_id: The run that the commit names.
        message: The message of the commit.
        properties: The properties of the commit.
        operation: The operation of the commit.
        require: Raises a typed error if the version on which the commit would be created does not fit.
        since: The version after which the publication can have been committed, if tables may have been staged again.
        reads: What the tables were made of. A serializable commit requires that these tables are as they were read.
        staged_reads: Tables that were read as the reader had staged them. They must be among ``staged``, or be
            published. A serializable commit also requires that no other writer has changed them.
        own: Tables that the reader staged. A table that only its own publications changed is as it was read.
        was_published: Returns whether a table of ``staged_reads`` was published, where its history was trimmed.
        replaces_latest: Those of ``staged`` that replace the rows of the latest version even if other writers changed
            them, as if their files were staged now. Reads of these tables count at every isolation level.
        superseded: Earlier appends of the same work, whose files those of ``staged`` replace.

    Raises:
        InvalidInputError: There are no tables, or two of them are of one table.
        CommitConflictError: Other writers changed what a staged table replaces, or a table that was read.
        TransactionExpiredError: A table was staged too long ago.
        VersionNotFoundError: A missing root leaves open whether the publication was committed.
        TrinityLakeError: The other errors of a commit.
    """
    _check_distinct(staged)
    searched_to = min(table.base_version for table in staged)
    if since is not None:
        searched_to = min(searched_to, since)
    search = _Search(publication, searched_to)
    replacing = {(table.namespace, table.table) for table in replaces_latest}
    # An append that removes files was staged without those that it repeats.
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

    def commit(ours: Sequence[StagedTable]) -> int:
        transaction = lake.transaction(
            isolation, message, properties, operation=operation, run_id=run_id, transaction_id=publication
        )
        with transaction as txn:
            txn.require(search.must_be_unpublished)
            if require is not None:
                txn.require(require)
            # Tables that a run took over from an earlier publication are there. Only the rest can be published again.
            left = {
                given.metadata_location: table
                for table, given in zip(ours, staged, strict=True)
                if not is_latest_change(lake, txn.base, given)
            }
            if reads or staged_reads:
                check = reads_check(txn.isolation)
                publishing = {location: table.metadata_location for location, table in left.items()}
                txn.require(lambda latest: check(latest, publishing))
            published = list(left.values()) or ours
            new = {table.namespace for table in published if table.base_metadata_location is None}
            created_namespaces[:] = [name for name in sorted(new) if not txn.has_namespace(name)]
            publish(txn, published)
        assert transaction.committed_version is not None
        return transaction.committed_version

    ours = list(staged)
    created_namespaces: list[str] = []  # by the latest attempt
    while True:
        try:
            if superseded and ours == list(staged) and not all(table.removed_files for table in superseding):
                ours = _on_the_latest(lake, staged, ours, replacing, superseded)
            return Publication(commit(ours), search.was_published, tuple(ours))
        except CommittedByOtherError as error:
            return Publication(error.committed_version, was_published=True)
        except CommitConflictError:
            # The same tables are in a faster worker's commit. So this one conflicts before it looks for that one.
            version = published_version(lake, publication, search.searched_to)
            if version is not None:
                return Publication(version, was_published=True)
            now = _on_the_latest(lake, staged, ours, replacing, superseded)
            if now == ours and not any(map(lake.snapshot().has_namespace, created_namespaces)):
                raise
            ours = now


def _check_distinct(staged: Sequence[StagedTable]) -> None:
    """Raise InvalidInputError if there is no table, or a table occurs twice."""
    if not staged:
        raise InvalidInputError("there is nothing to publish: no table was staged")
    names = [f"{table.namespace}.{table.table}" for table in staged]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidInputError(
            f"table {twice[0]} was staged twice for one publication: one commit takes one change of a table; publish"
            " each change by a publication of its own, or write both by one asset"
        )


@dataclass
class _Search:
    """The search for a publication in the history, before each attempt and on each rebase of its transaction."""

    publication: str
    searched_to: int
    was_published: bool = False

    def must_be_unpublished(self, latest: Snapshot) -> None:
        version = version_of(latest.files, self.publication, self.searched_to, latest.version)
        if version is not None:
            self.was_published = True
            raise CommittedByOtherError(
                f"publication {self.publication} was committed before", committed_version=version
            )
        self.searched_to = latest.version


def _on_the_latest(
    lake: Lakehouse,
    staged: Sequence[StagedTable],
    ours: Sequence[StagedTable],
    replacing: Collection[tuple[str, str]],
    superseded: Sequence[StagedTable],
) -> list[StagedTable]:
    """Return staged tables as they are on the latest version: those that were attempted, where that did not move.

    What others published since stays, and ours goes on top, until the staged files are too old to be published. Raises
    CommitConflictError, StorageError.
    """
    latest = lake.snapshot()
    earlier = {(table.namespace, table.table): table for table in superseded}
    found: list[StagedTable] = []
    for given, attempted in zip(staged, ours, strict=True):
        name = (given.namespace, given.table)
        is_attempted = name not in earlier or attempted != given or given.removed_files > 0
        if is_latest_change(lake, latest, given):
            found.append(given)
        elif is_attempted and _location(latest, attempted) == attempted.base_metadata_location:
            found.append(attempted)
        else:
            found.append(rebase(lake, given, replaces_latest=name in replacing, superseded=earlier.get(name)))
    return found


def _location(version: Snapshot, staged: StagedTable) -> str | None:
    """Return the metadata of a table in a version, None if it has none."""
    name = (staged.namespace, staged.table)
    if not (version.has_namespace(staged.namespace) and version.has_table(*name)):
        return None
    return version.table(*name).format_properties.get(METADATA_LOCATION)


def published_version(lake: Lakehouse, publication: str, after: int) -> int | None:
    """Return the version above ``after`` that holds a publication, None where none does.

    Raises VersionNotFoundError if that cannot be told, StorageError.
    """
    return version_of(lake.files, publication, after, lake.latest_version())


def published_versions(lake: Lakehouse, publications: Collection[str], after: int) -> dict[str, int]:
    """Return the versions above ``after`` that hold publications, by the ids of those that were committed.

    The ids are in the roots, which outlive the content of their versions and the snapshots of their tables.

    Raises VersionNotFoundError if a missing root leaves it open, StorageError.
    """
    return versions_of(lake.files, publications, after, lake.latest_version())


def version_before(lake: Lakehouse, moment: datetime) -> int:
    """Return the newest version that existed at a time, even if it cannot be read now. -1 if there is none.

    Raises StorageError.
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
    """Send the lineage of a publication, where OpenLineage's variables say so. It began when staging did.

    ``reads`` finds out what was read. Told again for a run that is repeated, the events are the same but for their end.
    A failure is logged, and fails nothing.
    """
    if not staged or not is_wanted():
        return
    try:
        found = list(reads())
    except Exception as error:  # noqa: BLE001 - whatever finds it out; the tables are published
        logger.warning("the lineage of version %s was not sent, as its reads are unknown: %s", version, error)
        return
    began = utc_of(min(table.begun_at_ms for table in staged))
    origin = Origin(integration, job, run_id, began, max(datetime.now(UTC), began))
    read = {(one.root, f"{one.namespace}.{one.table}"): one.version for one in found if one.location is not None}
    send_publication(
        lake.root,
        version,
        origin,
        [_published_table(table) for table in staged],
        [ReadTable(root, name, at) for (root, name), at in read.items()],
    )


def _published_table(table: StagedTable) -> PublishedTable:
    columns = tuple((column.name, column.type_name) for column in table.table_def.schema.columns)
    name = f"{table.namespace}.{table.table}"
    return PublishedTable(name, columns, table.added_rows, table.added_bytes, table.added_files)
