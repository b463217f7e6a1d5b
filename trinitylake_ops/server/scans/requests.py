"""Requests about scans. Each is answered at once: with files, or with parts to fetch, which hold all they need."""

from __future__ import annotations

from pyiceberg.catalog.rest.scan_planning import FetchScanTasksRequest
from pyiceberg.table import Table

from trinitylake_ops.server.answers import Answer, RefusedError
from trinitylake_ops.server.calls import Call
from trinitylake_ops.server.scans.files import scan_document
from trinitylake_ops.server.scans.parts import no_such_task, part_of
from trinitylake_ops.server.scans.planner import Planner, check_is_of


def plan_scan(call: Call) -> Answer:
    """Plan a scan of a table."""
    planner = Planner(_table(call), call.document(), call.limits.scan_files)
    completed = {"status": "completed"}
    return Answer(200, scan_document(planner.whole(), planner.metadata, planner.stats_fields, completed))


def fetch_tasks(call: Call) -> Answer:
    """Return the files of a part of a scan, and further parts if it has too many."""
    table, part = _table(call), part_of(call.model(FetchScanTasksRequest).plan_task)
    check_is_of(part, table)
    # A scan of the current snapshot stays one of that snapshot.
    pinned = {} if "end-snapshot-id" in part.request else {"snapshot-id": part.snapshot_id}
    try:
        planner = Planner(table, {**part.request, **pinned}, call.limits.scan_files)
    except RefusedError as error:
        raise no_such_task() from error
    return Answer(200, scan_document(planner.part(part), planner.metadata, planner.stats_fields))


def no_such_plan(call: Call) -> Answer:
    """Tell that a plan does not exist: every one is answered whole, and none is kept."""
    _table(call)
    raise RefusedError(404, "NoSuchPlanIdException", "Plan does not exist: each is answered at once, and none is kept")


def _table(call: Call) -> Table:
    found = call.found_table()
    return found.catalog.load_defined(*call.table, found.definition)
