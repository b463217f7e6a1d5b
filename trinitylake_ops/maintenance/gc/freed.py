"""The files that an expiry frees: those that only expiring versions and exports reach (docs/protocol.md, "Expiry")."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TypeVar

from trinitylake_ops.format.definitions import ExpirationState
from trinitylake_ops.format.file_names import is_operation_path
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.maintenance.gc.unreached import unreached
from trinitylake_ops.maintenance.reach.mark import CatalogReach, Mark, exported_roots, is_deletable, owned_tables
from trinitylake_ops.maintenance.reach.own_files import freed_table_files
from trinitylake_ops.maintenance.reach.survey import Progress, Survey
from trinitylake_ops.maintenance.reach.table_files import table_id_in
from trinitylake_ops.maintenance.reach.table_root import named_standing

Key = TypeVar("Key", str, int)


@dataclass(frozen=True, slots=True)
class FreedFiles:
    """The files that only expiring versions and exports reach, by path: sizes, kinds, and versions that wrote them.

    ``damaged`` are tables whose files cannot all be read, by their metadata files, with the reason: all files in their
    folders stay. A file counts to the first version whose root was written no earlier, by the storage's clock. For
    files copied from elsewhere, this says little.
    """

    sizes_bytes: Mapping[str, int]
    kinds: Mapping[str, str]
    writers: Mapping[str, int]
    damaged: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of all of them."""
        return sum(self.sizes_bytes.values())

    def counts(self) -> dict[str, int]:
        """Return the number of files by kind."""
        return dict(sorted(Counter(self.kinds[path] for path in self.sizes_bytes).items()))

    def bytes_by(self, key_of: Mapping[str, Key]) -> dict[Key, int]:
        """Return the bytes by kind, or by the version that wrote them."""
        sums: Counter[Key] = Counter()
        for path, size_bytes in self.sizes_bytes.items():
            sums[key_of[path]] += size_bytes
        return dict(sums)

    def within(self, other: FreedFiles) -> FreedFiles:
        """Return the files that another one has, too."""
        sizes_bytes = {path: size for path, size in self.sizes_bytes.items() if path in other.sizes_bytes}
        return replace(self, sizes_bytes=sizes_bytes)


def freed_files(survey: Survey, expiring: Iterable[int], exports: Sequence[str], progress: Progress) -> FreedFiles:
    """Return the files that only these versions and exports reach.

    Raises MaintenanceBlockedError before a reconcile, StorageError. Raises FileMissingError and CorruptFileError for a
    file that a kept root needs.
    """
    leaving = set(expiring)
    if not leaving and not exports:
        return FreedFiles({}, {}, {})
    lake = survey.lake
    # Files of versions that expired before are not kept here: no plan would name the files that they share with these.
    # A purge spares it.
    before = survey.expired(ExpirationState.EXPIRED)
    mark = Mark(survey, without=leaving.union(before), without_exports=exports, progress=progress)
    gone = CatalogReach(lake.files, mark.catalog, skips_damaged=True, executor=survey.executor)
    export_paths = [
        path
        for record in survey.definition.exports
        if record.name in exports
        for path in (record.root_location, record.manifest_path)
        if path and is_operation_path(path)
    ]
    gone.add([*(survey.roots[version] for version in leaving), *exported_roots(survey, exports)], progress)
    table_root = None if mark.table_root is None or mark.table_root.refusal else mark.table_root
    root = "" if table_root is None else table_root.root
    files = freed_table_files(lake, sorted(gone.tables), survey.executor, root)
    if files:
        mark.add_tables()
    kind_of = {
        **dict.fromkeys(gone.nodes, "node"),
        **dict.fromkeys(gone.tables | gone.others, "definition"),
        **{path: str(file.kind) for path, file in files.items()},
        **dict.fromkeys(export_paths, "export"),
    }
    candidates = unreached(mark, dict.fromkeys(kind_of, 0)).keys()
    defined = {table_id for path in files if (table_id := table_id_in(path)) is not None}
    owned = owned_tables(lake.storage, defined, survey.definition.id, defined)
    writers = _Writers(survey)
    sizes_bytes: dict[str, int] = {}
    writer_of: dict[str, int] = {}
    for info in named_standing(lake.storage, survey.executor, candidates, table_root):
        if is_uri(info.path) or info.path in export_paths or is_deletable(info.path, owned):
            sizes_bytes[info.path] = info.size_bytes
            writer_of[info.path] = writers.at(info.last_modified_ms)
    return FreedFiles(
        dict(sorted(sizes_bytes.items())),
        {path: kind_of[path] for path in sorted(sizes_bytes)},
        writer_of,
        dict(sorted(mark.tables.damaged.items())),
    )


class _Writers:
    """Finds the version that wrote a file, by its time: the first one whose root was written no earlier."""

    def __init__(self, survey: Survey):
        # A purge wrote roots anew that were sealed since.
        self._versions = [version for version, root in sorted(survey.roots.items()) if not root.is_sealed]
        self._written_ms = list(accumulate((survey.written_ms[version] for version in self._versions), max))

    def at(self, written_ms: int) -> int:
        return self._versions[min(bisect_left(self._written_ms, written_ms), len(self._versions) - 1)]
