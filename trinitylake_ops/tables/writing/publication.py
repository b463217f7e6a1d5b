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

from trinitylake_ops.errors import CommitConflictError, InvalidInputError
from trinitylake_ops.format.definitions import IsolationLevel
from trinitylake_ops.tables.writing.reads import TableRead, check_unchanged
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.tables.writing.staging import is_published, publish
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.transaction.saved import CommittedElsewhereError, version_of
from trinitylake_ops.versions.snapshot import Snapshot

_PUBLICATIONS = uuid.UUID("5e6d3a8e-7a55-4d6a-9a7d-6f3c1b1f2c77")

PUBLISH = "publish"


@dataclass(frozen=True, slots=True)
class Publication:
    """The outcome of a publication: the version that holds it, and whether an earlier attempt had committed it."""

    version: int
    was_published: bool


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
) -> Publication:
    """Commit staged tables as one version, unless ``publication`` was committed since they were staged.

    A caller that may have staged the tables again passes the version ``since`` which the publication can have been
    committed, exclusive. ``require`` raises a typed error if the version on which the commit would land is not as
    needed. A serializable commit lands only if all ``reads`` are as they were read. A table that is there as one of
    ``own`` was staged is allowed: the same reader published it before. With snapshot isolation, reads do not count. The
    namespaces that new tables need are created. Some of the tables may be there as they were staged, by another
    publication. They stay. Without changes there is no commit, and the latest version is returned. Raises
    InvalidInputError without tables, CommitConflictError when a table moved since it was staged or read, and what a
    commit raises. Raises VersionNotFoundError if a missing root leaves open whether it was committed.
    """
    if not staged:
        raise InvalidInputError("there is nothing to publish: no table was staged")
    looked_through = min(table.base_version for table in staged)
    if since is not None:
        looked_through = min(looked_through, since)
    was_published = False

    def must_be_unpublished(latest: Snapshot) -> None:
        nonlocal looked_through, was_published
        version = version_of(latest.files, publication, looked_through, latest.version)
        if version is not None:
            was_published = True
            raise CommittedElsewhereError(f"publication {publication} was committed before", committed_version=version)
        looked_through = latest.version

    transaction = lake.transaction(
        isolation, message, properties, operation=operation, run_id=run_id, transaction_id=publication
    )
    try:
        with transaction as txn:
            txn.require(must_be_unpublished)
            if require is not None:
                txn.require(require)
            if reads and txn.isolation != IsolationLevel.SNAPSHOT:
                txn.require(lambda latest: check_unchanged(latest, reads, [*own, *staged]))
            # Tables that a run took over from an earlier publication are there. Only the rest can be published again.
            publish(txn, [table for table in staged if not is_published(txn, table)] or staged)
    except CommittedElsewhereError as error:
        return Publication(error.committed_version, was_published=True)
    except CommitConflictError:
        # The same tables are in the commit of a faster worker. So this commit conflicts before it looks for that one.
        version = published_version(lake, publication, looked_through)
        if version is None:
            raise
        return Publication(version, was_published=True)
    assert transaction.committed_version is not None
    return Publication(transaction.committed_version, was_published)


def published_version(lake: Lakehouse, publication: str, after: int) -> int | None:
    """Return the version above ``after`` that holds a publication, None where none does.

    Raises VersionNotFoundError if that cannot be told, StorageError.
    """
    return version_of(lake.files, publication, after, lake.latest_version())
