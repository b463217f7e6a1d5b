"""Deletion of unreached files under a lease, and the files that an expiration reclaims."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from trinitylake_ops.access.allowed_roots import cut
from trinitylake_ops.format.definitions import ExpirationState, LakehouseDef
from trinitylake_ops.format.file_names import is_operation_path
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.operations.budget import NO_LIMITS, Budget, Spending
from trinitylake_ops.operations.executor import DeletionFence
from trinitylake_ops.operations.gc.batches import planned_files
from trinitylake_ops.operations.gc.delete import Deletion, delete_files
from trinitylake_ops.operations.gc.mark import CatalogReach, Mark, exported_roots, is_deletable, owned_tables
from trinitylake_ops.operations.gc.survey import Progress, Survey, no_progress
from trinitylake_ops.operations.gc.table_files import table_id_in
from trinitylake_ops.operations.gc.tables import TableRoot, existing_named_files, reclaimed_table_files
from trinitylake_ops.operations.lease import Lease
from trinitylake_ops.storage import Storage
from trinitylake_ops.storage.parallel import run_parallel
from trinitylake_ops.transaction.lakehouse import Lakehouse


def delete_unreached(
    storage: Storage,
    sizes_bytes: Mapping[str, int],
    mark: Mark,
    held: Lease,
    budget: Budget | Spending = NO_LIMITS,
    progress: Progress = no_progress,
) -> Deletion:
    """Delete files that a mark does not reach. The lease and the mark are checked again before each batch.

    Files under the table root are deleted last, after a check that they still belong to this lakehouse.

    Args:
        storage: The storage of the lakehouse.
        sizes_bytes: The sizes of the files, by path, or by URI under the table root.
        mark: The mark, which is extended to new commits.
        held: The lease.
        budget: The budget of the run.
        progress: Called with the unit that is counted, the number done, and the total.

    Raises:
        MaintenanceBlockedError: The lease was lost, another program changed the settings, or the table root no longer
            belongs to this lakehouse.
        PlanChangedError: Another operation deleted a file meanwhile.
    """
    roots = mark.survey.lake.files.roots

    def check_fence() -> DeletionFence:
        held.check()
        before = mark.base
        mark.mark_new_commits()
        if mark.base is not before:  # marking may have taken longer than the lease lasts
            held.check()
        return DeletionFence(storage, held.number, held.expires_at_ms, roots.path(mark.base.version + 1))

    spending = Spending.of(budget)
    own_sizes = {path: size for path, size in sizes_bytes.items() if not is_uri(path)}
    executor = mark.survey.executor
    done = delete_files(
        storage, own_sizes, spending, before_batch=check_fence, spared=mark, progress=progress, executor=executor
    )
    external = {uri: size for uri, size in sizes_bytes.items() if uri not in own_sizes}
    if not external or done.stopped is not None or mark.table_root is None:
        return done
    done.stopped = spending.exhausted() if own_sizes else None
    if done.stopped is None:
        done.add(
            _delete_in_table_root(mark.table_root, external, mark, check_fence, spending, progress),
            mark.table_root.root,
        )
    return done


def _delete_in_table_root(
    table_root: TableRoot,
    sizes_bytes: Mapping[str, int],
    mark: Mark,
    check_fence: Callable[[], DeletionFence],
    spending: Spending,
    progress: Progress,
) -> Deletion:
    """Delete files under the table root, identified by URI. The lease and the roots are in the lakehouse storage."""

    def check_table_root() -> DeletionFence:
        table_root.check()
        return replace(check_fence(), guard=table_root)

    paths = {uri.removeprefix(table_root.root): size for uri, size in sizes_bytes.items()}
    return delete_files(
        table_root.storage,
        paths,
        spending,
        before_batch=check_table_root,
        spared=mark.tables.in_table_root,
        progress=progress,
        executor=mark.survey.executor,
    )


def unreached(mark: Mark, sizes_bytes: Mapping[str, int]) -> dict[str, int]:
    """Return the files that a mark does not reach and that may be deleted.

    The input is untrusted: a plan file can contain any location. Under the table root, only files in folders with an
    owner file of this lakehouse are returned.

    Args:
        mark: The mark.
        sizes_bytes: The sizes of the candidates, by path, or by URI under the table root.

    Raises:
        StorageError: An owner file cannot be read.
    """
    candidates = {path: size for path, size in sizes_bytes.items() if path not in mark}
    uris = {uri for uri in candidates if is_uri(uri)}
    table_root = mark.table_root
    if table_root is not None and not table_root.refusal and uris:
        paths = {uri: uri.removeprefix(table_root.root) for uri in table_root.within(uris)}
        ids = {table_id for path in paths.values() if (table_id := table_id_in(path)) is not None}
        owned = owned_tables(table_root.storage, ids, table_root.lakehouse_id)
        uris -= {uri for uri, path in paths.items() if table_id_in(path) in owned}
    return {path: size for path, size in candidates.items() if path not in uris}


def damaged_tables(damaged: Mapping[str, str]) -> str:
    """Return the part of a title about damaged tables; empty if there are none."""
    if not damaged:
        return ""
    n_tables = f"{len(damaged)} damaged tables" if len(damaged) > 1 else "a damaged table"
    return f"; the folders of {n_tables} are kept, which verify reports: {next(iter(damaged.values()))}"


def left_table_root(mark: Mark) -> str:
    """Return a human-readable reason why no file under the table root is deleted; empty if files may be deleted."""
    if mark.table_root is None or not mark.table_root.refusal:
        return ""
    return f"files under the table root {cut(mark.table_root.root)} are kept: {mark.table_root.refusal}"


Key = TypeVar("Key", str, int)


@dataclass(frozen=True, slots=True)
class ReclaimedFiles:
    """The files that only expiring versions and exports reach, by path."""

    sizes_bytes: Mapping[str, int]
    kinds: Mapping[str, str]
    #: The version that wrote each file: the first version whose root was not written before the file, by the storage's
    #: clock. Copied files have the time of the copy.
    writers: Mapping[str, int]
    #: Why table files cannot be read, by the location of the metadata file. The folders of these tables are kept.
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(self.sizes_bytes.values())

    def counts(self) -> dict[str, int]:
        """Return the number of files by kind."""
        return dict(sorted(Counter(self.kinds[path] for path in self.sizes_bytes).items()))

    def bytes_by(self, key_of: Mapping[str, Key]) -> dict[Key, int]:
        """Return the sizes in bytes, grouped by kind or by the version that wrote the files."""
        sums: Counter[Key] = Counter()
        for path, size_bytes in self.sizes_bytes.items():
            sums[key_of[path]] += size_bytes
        return dict(sums)

    def within(self, other: ReclaimedFiles) -> ReclaimedFiles:
        """Return the files that another result also contains."""
        sizes_bytes = {path: size for path, size in self.sizes_bytes.items() if path in other.sizes_bytes}
        return replace(self, sizes_bytes=sizes_bytes)


def reclaimed_files(
    survey: Survey, expiring: Iterable[int], exports: Sequence[str], progress: Progress
) -> ReclaimedFiles:
    """Return the files that only certain versions and exports reach.

    Args:
        survey: The survey of all versions.
        expiring: The versions.
        exports: The names of the exports.
        progress: Called with the unit that is counted, the number done, and the total.

    Raises:
        MaintenanceBlockedError: A reconcile is required.
        FileMissingError: A file that a kept root needs is missing.
        CorruptFileError: A file that a kept root needs is damaged.
        StorageError: A storage request failed.
    """
    expiring_versions = set(expiring)
    if not expiring_versions and not exports:
        return ReclaimedFiles({}, {}, {})
    lake = survey.lake
    # Versions that expired earlier are not marked. Otherwise, no plan would list the files that they share with the
    # expiring versions. A purge keeps such files while the earlier versions can be undeleted.
    before = survey.expired(ExpirationState.EXPIRED)
    mark = Mark(survey, without=expiring_versions.union(before), without_exports=exports, progress=progress)
    reclaimable = CatalogReach(lake.files, mark.catalog, skips_damaged=True, executor=survey.executor)
    export_paths = [
        path
        for record in survey.definition.exports
        if record.name in exports
        for path in (record.root_location, record.manifest_path)
        if path and is_operation_path(path)
    ]
    reclaimable.add(
        [*(survey.roots[version] for version in expiring_versions), *exported_roots(survey, exports)], progress
    )
    table_root = None if mark.table_root is None or mark.table_root.refusal else mark.table_root
    root = "" if table_root is None else table_root.root
    files = reclaimed_table_files(lake, sorted(reclaimable.tables), survey.executor, root)
    if files:
        mark.add_tables()
    kind_of = {
        **dict.fromkeys(reclaimable.nodes, "node"),
        **dict.fromkeys(reclaimable.tables | reclaimable.others, "definition"),
        **{path: str(file.kind) for path, file in files.items()},
        **dict.fromkeys(export_paths, "export"),
    }
    former = {path for path, file in files.items() if not file.live}
    planned = _planned_earlier(lake, survey.definition) if former else set()
    candidates = unreached(mark, dict.fromkeys(kind_of.keys() - (former & planned), 0)).keys()
    table_ids = {table_id for path in files if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(lake.storage, table_ids, survey.definition.id, table_ids)
    writers = _Writers(survey)
    sizes_bytes: dict[str, int] = {}
    writer_of: dict[str, int] = {}
    for info in existing_named_files(lake.storage, survey.executor, candidates, table_root):
        if is_uri(info.path) or info.path in export_paths or is_deletable(info.path, owned):
            sizes_bytes[info.path] = info.size_bytes
            writer_of[info.path] = writers.at(info.last_modified_ms)
    return ReclaimedFiles(
        dict(sorted(sizes_bytes.items())),
        {path: kind_of[path] for path in sorted(sizes_bytes)},
        writer_of,
        dict(sorted(mark.tables.damaged.items())),
    )


def _planned_earlier(lake: Lakehouse, definition: LakehouseDef) -> set[str]:
    """Return the files in the plans of batches that are not purged.

    The metadata of a table lists its former metadata files, which no version needs, so each later plan would list them
    again, and a purge would report them as deleted again.
    """
    batches = [batch for batch in definition.expirations if batch.state != ExpirationState.PURGED]
    plans = run_parallel(lambda batch: planned_files(lake, batch), batches, lake.storage.concurrency)
    return {path for plan in plans for path in plan or ()}


class _Writers:
    """Finds the version that wrote a file: the first version whose root was not written before the file."""

    def __init__(self, survey: Survey):
        # A purge rewrites the roots that it seals, so the times of sealed roots do not count.
        self._versions = [version for version, root in sorted(survey.roots.items()) if not root.is_sealed]
        self._written_ms = list(accumulate((survey.written_ms[version] for version in self._versions), max))

    def at(self, written_ms: int) -> int:
        return self._versions[min(bisect_left(self._written_ms, written_ms), len(self._versions) - 1)]
