"""Deletes what a mark does not reach, under the root and under the table root."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.format.places import cut
from trinitylake_ops.maintenance.gc.sweep import Deletion, delete_files
from trinitylake_ops.maintenance.plans.budget import NO_LIMITS, Budget, Spending
from trinitylake_ops.maintenance.plans.executor import Fence
from trinitylake_ops.maintenance.reach.mark import Mark, owned_tables
from trinitylake_ops.maintenance.reach.survey import Progress, no_progress
from trinitylake_ops.maintenance.reach.table_files import table_id_in
from trinitylake_ops.maintenance.reach.table_root import TableRoot
from trinitylake_ops.maintenance.state.lease import Lease
from trinitylake_ops.storage import Storage


def delete_unreached(
    storage: Storage,
    sizes_bytes: Mapping[str, int],
    mark: Mark,
    held: Lease,
    budget: Budget | Spending = NO_LIMITS,
    progress: Progress = no_progress,
) -> Deletion:
    """Delete files that a mark does not reach, under a lease. Before each batch both are checked again.

    Files under the table root are given by URIs. They go last. Before each batch of these it is looked whether this
    lakehouse still frees them. Raises MaintenanceBlockedError if not, if the lease is
    lost or another program changed the settings, and PlanChangedError.
    """
    roots = mark.survey.lake.files.roots

    def look() -> Fence:
        held.check()
        before = mark.base
        mark.look()
        if mark.base is not before:  # the mark may take longer than the lease lasts
            held.check()
        return Fence(storage, held.number, held.expires_at_ms, roots.path(mark.base.version + 1))

    spending = Spending.of(budget)
    own = {path: size for path, size in sizes_bytes.items() if not is_uri(path)}
    executor = mark.survey.executor
    done = delete_files(storage, own, spending, before_batch=look, spared=mark, progress=progress, executor=executor)
    there = {uri: size for uri, size in sizes_bytes.items() if uri not in own}
    if not there or done.stopped is not None or mark.table_root is None:
        return done
    done.stopped = spending.exhausted() if own else None
    if done.stopped is None:
        done.add(_delete_there(mark.table_root, there, mark, look, spending, progress), mark.table_root.root)
    return done


def _delete_there(
    table_root: TableRoot,
    sizes_bytes: Mapping[str, int],
    mark: Mark,
    look: Callable[[], Fence],
    spending: Spending,
    progress: Progress,
) -> Deletion:
    """Delete files under the table root, given by their URIs. Leases and versions stand beside the lakehouse."""

    def look_there() -> Fence:
        table_root.check()
        return replace(look(), guard=table_root)

    paths = {uri.removeprefix(table_root.root): size for uri, size in sizes_bytes.items()}
    return delete_files(
        table_root.storage,
        paths,
        spending,
        before_batch=look_there,
        spared=mark.tables.there,
        progress=progress,
        executor=mark.survey.executor,
    )


def unreached(mark: Mark, sizes_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that a mark does not reach and that may be deleted, by location with their sizes.

    Under the table root these are files in folders that have the owner file of this lakehouse. There are none if it is
    not freed from here. Whoever made the plan may have named anything. Raises StorageError.
    """
    found = {path: size for path, size in sizes_bytes.items() if path not in mark}
    uris = {uri for uri in found if is_uri(uri)}
    table_root = mark.table_root
    if table_root is not None and not table_root.refusal and uris:
        paths = {uri: uri.removeprefix(table_root.root) for uri in table_root.within(uris)}
        ids = {table_id for path in paths.values() if (table_id := table_id_in(path)) is not None}
        owned = owned_tables(table_root.storage, ids, table_root.lakehouse_id)
        uris -= {uri for uri, path in paths.items() if table_id_in(path) in owned}
    return {path: size for path, size in found.items() if path not in uris}


def damaged_tables(damaged: Mapping[str, str]) -> str:
    """Return what a title adds about tables whose files cannot all be read, empty if there are none."""
    if not damaged:
        return ""
    n_tables = f"{len(damaged)} damaged tables" if len(damaged) > 1 else "a damaged table"
    return f"; all files in the folder of {n_tables} stay, which verify reports: {next(iter(damaged.values()))}"


def left_table_root(mark: Mark) -> str:
    """Return why no file under the table root is deleted, for people. It is empty if they may be."""
    if mark.table_root is None or not mark.table_root.refusal:
        return ""
    return f"files under the table root {cut(mark.table_root.root)} stay: {mark.table_root.refusal}"
