"""Which tables a publication made of which others, for OpenLineage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime

from trinitylake_ops.tables.writing.reads import TableRead
from trinitylake_ops.tables.writing.staged_table import StagedTable
from trinitylake_ops.telemetry.lineage import MadeTable, Origin, ReadTable, is_wanted, send_publication
from trinitylake_ops.transaction.lakehouse import Lakehouse
from trinitylake_ops.versions.snapshot import utc_of

logger = logging.getLogger(__name__)


def tell_lineage(
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
        [_made(table) for table in staged],
        [ReadTable(root, name, at) for (root, name), at in read.items()],
    )


def _made(table: StagedTable) -> MadeTable:
    columns = tuple((column.name, column.type_name) for column in table.table_def.schema.columns)
    name = f"{table.namespace}.{table.table}"
    return MadeTable(name, columns, table.added_rows, table.added_bytes, table.added_files)
