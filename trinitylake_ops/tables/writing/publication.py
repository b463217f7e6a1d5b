"""Publishing exactly once: a publication has an id, and the history holds at most one commit of it.

The id is that of the transaction. It is among the ``members`` of the version that commits it, and stays there when the
version is purged. Before each attempt, a worker looks for the id in the versions since the tables were staged. An
attempt can only land right on the version that was looked through last (docs/protocol.md, C). So workers that are
started again after a kill, and workers that race, get the version that one of them committed.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from trinitylake_ops.errors import CommitConflictError, InvalidInputError, VersionNotFoundError
from trinitylake_ops.format.definitions import METADATA_LOCATION, IsolationLevel
from trinitylake_ops.tables.writing.reads import TableRead, check_unchanged
from trinitylake_ops.tables.writing.rebasing.rebase import is_there, rebase
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import publish
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import CommittedElsewhereError, version_of
from trinitylake_ops.versions.roots import ProbedRoots
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms
from trinitylake_ops.versions.time_travel import find_version_before

_PUBLICATIONS = uuid.UUID("5e6d3a8e-7a55-4d6a-9a7d-6f3c1b1f2c77")

PUBLISH = "publish"

#: The most by which the clocks of an orchestrator's processes, its database and the lakehouse's storage may differ.
CLOCK_SKEW = timedelta(hours=1)


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
    own: Sequence[StagedTable] = (),
    is_anew: bool = False,
) -> Publication:
    """Commit staged tables as one version, unless ``publication`` was committed since they were staged.

    Where others changed one of the tables since, the staged files are put on the newer table, with new metadata
    (:mod:`rebasing.rebase`). Appended files always are. Files that replace partitions are if nobody changed data there.
    With ``is_anew`` they are in any case, as if they were staged now.

    A caller that may have staged the tables again passes the version ``since`` which the publication can have been
    committed, exclusive. ``require`` raises a typed error if the version on which the commit would land is not as
    needed. A serializable commit lands only if all ``reads`` are as they were read. A table that is there as one of
    ``own`` was staged is allowed: the same reader published it before. With snapshot isolation, reads do not count. The
    namespaces that new tables need are created. Some of the tables may be there as they were staged, by another
    publication. They stay. Without changes there is no commit, and the latest version is returned. Raises
    InvalidInputError without tables. Raises CommitConflictError if others changed what a staged table replaces, or a
    table that was read, and what a commit raises. Raises VersionNotFoundError if a missing root leaves open whether it
    was committed.
    """
    if not staged:
        raise InvalidInputError("there is nothing to publish: no table was staged")
    looked_through = min(table.base_version for table in staged)
    if since is not None:
        looked_through = min(looked_through, since)
    search = _Search(publication, looked_through)

    def is_ours(version: Snapshot, table: StagedTable) -> bool:
        return is_there(lake, version, table)

    def commit(ours: Sequence[StagedTable]) -> int:
        transaction = lake.transaction(
            isolation, message, properties, operation=operation, run_id=run_id, transaction_id=publication
        )
        with transaction as txn:
            txn.require(search.must_be_unpublished)
            if require is not None:
                txn.require(require)
            if reads and txn.isolation != IsolationLevel.SNAPSHOT:
                txn.require(lambda latest: check_unchanged(latest, reads, [*own, *staged], is_ours))
            # Tables that a run took over from an earlier publication are there. Only the rest can be published again.
            left = [one for one, given in zip(ours, staged, strict=True) if not is_ours(txn.base, given)]
            publish(txn, left or ours)
        assert transaction.committed_version is not None
        return transaction.committed_version

    ours = list(staged)
    while True:
        try:
            return Publication(commit(ours), search.was_published, tuple(ours))
        except CommittedElsewhereError as error:
            return Publication(error.committed_version, was_published=True)
        except CommitConflictError:
            # The same tables are in a faster worker's commit. So this one conflicts before it looks for that one.
            version = published_version(lake, publication, search.looked_through)
            if version is not None:
                return Publication(version, was_published=True)
            now = _on_the_latest(lake, staged, ours, is_anew=is_anew)
            if now == ours:
                raise
            ours = now


@dataclass
class _Search:
    """The search for a publication in the history, before each attempt and on each rebase of its transaction."""

    publication: str
    looked_through: int
    was_published: bool = False

    def must_be_unpublished(self, latest: Snapshot) -> None:
        version = version_of(latest.files, self.publication, self.looked_through, latest.version)
        if version is not None:
            self.was_published = True
            raise CommittedElsewhereError(
                f"publication {self.publication} was committed before", committed_version=version
            )
        self.looked_through = latest.version


def _on_the_latest(
    lake: Lakehouse, staged: Sequence[StagedTable], ours: Sequence[StagedTable], *, is_anew: bool
) -> list[StagedTable]:
    """Return staged tables as they are on the latest version: those that were attempted, where that did not move.

    What others published since stays, and ours goes on top, until the staged files are too old to be published. Raises
    CommitConflictError, StorageError.
    """
    latest = lake.snapshot()
    found: list[StagedTable] = []
    for given, attempted in zip(staged, ours, strict=True):
        if is_there(lake, latest, given):
            found.append(given)
        elif _location(latest, attempted) == attempted.base_metadata_location:
            found.append(attempted)
        else:
            found.append(rebase(lake, given, is_anew=is_anew))
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


def version_before(lake: Lakehouse, moment: datetime) -> int:
    """Return the newest version that existed at a time, even if it cannot be read now. -1 if there is none.

    Raises StorageError.
    """
    try:
        return find_version_before(lake.files.roots, epoch_ms(moment), lake.latest_version(), ProbedRoots(lake.storage))
    except VersionNotFoundError:
        return -1
