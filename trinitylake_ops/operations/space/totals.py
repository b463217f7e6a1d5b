"""Compute a report from a summary and the uses of versions, without requests."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from heapq import nlargest

from trinitylake_ops.format.file_names import OPERATIONS_PREFIX
from trinitylake_ops.operations.base import Cost
from trinitylake_ops.operations.policy.document import DEFAULT_POLICY
from trinitylake_ops.operations.retention import protected_ms
from trinitylake_ops.operations.space.model import CatalogKind, Counts, TableSums
from trinitylake_ops.operations.space.presence import Presence, export_number, first_of, intersects
from trinitylake_ops.operations.space.report import (
    Amount,
    NamespaceSpace,
    Reclaimable,
    SpaceAdvice,
    SpaceByUse,
    SpaceReport,
    TableSpace,
    UnreachedSpace,
    VersionSpace,
)
from trinitylake_ops.operations.space.update import UpdatedSummary
from trinitylake_ops.operations.space.uses import SpaceUse, VersionUses, root_version
from trinitylake_ops.storage import FileInfo
from trinitylake_ops.versions.snapshot import Snapshot, epoch_ms, utc_of

#: The numbers from which small files and delete files are worth a compaction.
_SMALL_FILES = DEFAULT_POLICY.targets.small_files
_DELETE_FILES = DEFAULT_POLICY.targets.delete_files


_USES = tuple(SpaceUse)
_POSITIONS = {use: position for position, use in enumerate(_USES)}


class _Tally:
    """Files and bytes by use, added in place because there may be many tables."""

    __slots__ = ("bytes", "files")

    def __init__(self) -> None:
        self.files = [0] * len(_USES)
        self.bytes = [0] * len(_USES)

    def add(self, use: SpaceUse, files: int, size_bytes: int) -> None:
        position = _POSITIONS[use]
        self.files[position] += files
        self.bytes[position] += size_bytes

    def add_all(self, other: _Tally) -> None:
        for position in range(len(_USES)):
            self.files[position] += other.files[position]
            self.bytes[position] += other.bytes[position]

    def amounts(self) -> SpaceByUse:
        amounts = zip(self.files, self.bytes, strict=True)
        return SpaceByUse.of({use: Amount(*amount) for use, amount in zip(_USES, amounts, strict=True)})


class _TableTally:
    """The sums of a table, or of several."""

    __slots__ = ("current", "table", "tables", "trimmable", "use")

    def __init__(self, table: TableSums | None = None) -> None:
        self.table = table
        self.tables = 0
        self.use = _Tally()
        #: The files of the current snapshot.
        self.current = Counts()
        #: The number of files that a trim would drop, and their bytes.
        self.trimmable = [0, 0]

    def add_all(self, other: _TableTally) -> None:
        self.tables += 1
        self.use.add_all(other.use)
        self.current.add(other.current)
        self.trimmable[0] += other.trimmable[0]
        self.trimmable[1] += other.trimmable[1]

    @property
    def data(self) -> Amount:
        return Amount(self.current.data_files, self.current.data_bytes)

    @property
    def small(self) -> Amount:
        return Amount(self.current.small_files, self.current.small_bytes)

    @property
    def deletes(self) -> Amount:
        return Amount(self.current.delete_files, self.current.delete_bytes)

    def table_space(self) -> TableSpace:
        """Return the report on a single table."""
        assert self.table is not None
        space = TableSpace(
            namespace=self.table.namespace,
            table=self.table.name,
            is_dropped=not self.table.definition,
            use=self.use.amounts(),
            data=self.data,
            small=self.small,
            deletes=self.deletes,
            trimmable=Amount(*self.trimmable),
            damage=self.table.damage,
            advice=(),
        )
        return replace(space, advice=_advice(space))

    def namespace_space(self, namespace: str) -> NamespaceSpace:
        """Return the report on the tables of a namespace."""
        return NamespaceSpace(
            namespace=namespace,
            tables=self.tables,
            use=self.use.amounts(),
            small=self.small,
            deletes=self.deletes,
            trimmable=Amount(*self.trimmable),
        )


class SpaceTotals:
    """Computes the report on a summary.

    Args:
        updated: The summary.
        uses: The uses of versions.
        base: The summarized version.
        listed: The files with names that begin with ``_``, by path.
    """

    def __init__(self, updated: UpdatedSummary, uses: VersionUses, base: Snapshot, listed: Mapping[str, FileInfo]):
        self._updated = updated
        self._summary = updated.summary
        self._uses = uses
        self._base = base
        self._listed = listed
        self._files_by_reach: Counter[Presence] = Counter()
        self._bytes_by_reach: Counter[Presence] = Counter()
        self._purges: Counter[datetime] = Counter()
        self._purged_files: Counter[datetime] = Counter()

    def report(self, top: int, last: int, now: datetime) -> SpaceReport:
        """Return the report, without files that no version needs and without the cost.

        Args:
            top: The number of largest tables.
            last: The number of newest versions.
            now: The storage's time.
        """
        summary = self._summary
        counted = (self._table(table) for table in summary.tables.values() if table.is_counted)
        tables = [tally for tally in counted if any(tally.use.files)]
        everything, by_namespace = _TableTally(), dict[str, _TableTally]()
        for tally in tables:
            assert tally.table is not None
            everything.add_all(tally)
            by_namespace.setdefault(tally.table.namespace, _TableTally()).add_all(tally)
        namespaces = [tally.namespace_space(name) for name, tally in by_namespace.items()]
        catalog = self._catalog()
        use = everything.use.amounts() + catalog
        return SpaceReport(
            root=self._base.files.storage.root,
            version=self._base.version,
            now=now,
            use=use,
            catalog=catalog,
            operations=self._operations(),
            unreached=UnreachedSpace(),
            reclaimable=self._reclaimable(Amount(*everything.trimmable), use, now),
            data=everything.data,
            small=everything.small,
            deletes=everything.deletes,
            namespaces=tuple(sorted(namespaces, key=lambda space: (-space.use.total.bytes, space.namespace))),
            tables=tuple(tally.table_space() for tally in nlargest(top, tables, key=_size_and_name)),
            n_tables=len(tables),
            uncounted_tables=sum(not table.is_counted for table in summary.tables.values()),
            damaged={
                f"{table.namespace}.{table.name}": table.damage for table in summary.tables.values() if table.damage
            },
            unreadable_definitions=sum(
                file.kind == CatalogKind.TABLE and not file.table for file in summary.catalog.values()
            ),
            growth=self._growth(last),
            from_version=self._updated.from_version,
            tables_read=self._updated.tables_read,
            is_stored=self._updated.is_stored,
            cost=Cost(requests={}, rounds=0, bytes_read=0, bytes_written=0, duration_ms=0),
        )

    def _add(self, tally: _Tally, reach: Presence, files: int, size_bytes: int) -> SpaceUse | None:
        use = self._uses.of(reach)
        if use is None:
            return None
        tally.add(use, files, size_bytes)
        self._files_by_reach[reach] += files
        self._bytes_by_reach[reach] += size_bytes
        if use == SpaceUse.EXPIRED:
            purgeable_at = self._uses.purgeable_at(reach)
            self._purges[purgeable_at] += size_bytes
            self._purged_files[purgeable_at] += files
        return use

    def _table(self, table: TableSums) -> _TableTally:
        tally = _TableTally(table)
        for group, counts in table.groups.items():
            files, size_bytes = counts.files, counts.bytes
            use = self._add(tally.use, group.reach, files, size_bytes)
            if use is not SpaceUse.CURRENT or not table.definition:
                continue
            if group.is_current:
                tally.current.add(counts)
            if not self._uses.is_kept_by_trim(group.use):
                tally.trimmable[0] += files
                tally.trimmable[1] += size_bytes
        return tally

    def _catalog(self) -> SpaceByUse:
        tally = _Tally()
        counts: dict[Presence, list[int]] = {}
        for file in self._summary.catalog.values():
            if file.size_bytes >= 0:
                numbers = counts.setdefault(file.presence, [0, 0])
                numbers[0] += 1
                numbers[1] += file.size_bytes
        for reach, (files, size_bytes) in counts.items():
            self._add(tally, reach, files, size_bytes)
        for path, info in self._listed.items():
            version = root_version(path)
            if version in self._summary.created_ms and version is not None:
                self._add(tally, ((version, version),), 1, info.size_bytes)
        for path, position in self._summary.exports.items():
            if path in self._listed:
                use = self._uses.of(((export_number(position), export_number(position)),)) or SpaceUse.EXPORTS
                tally.add(use, 1, self._listed[path].size_bytes)
        return tally.amounts()

    def _operations(self) -> Amount:
        return _sum(
            Amount(1, info.size_bytes) for path, info in self._listed.items() if path.startswith(OPERATIONS_PREFIX)
        )

    def _reclaimable(self, trimmable: Amount, use: SpaceByUse, now: datetime) -> tuple[Reclaimable, ...]:
        items = [
            Reclaimable(
                command="purge",
                amount=Amount(self._purged_files[time], size_bytes),
                deletable_at=time,
                is_runnable=time <= now,
                why="only expired versions need the files",
            )
            for time, size_bytes in sorted(self._purges.items())
        ]
        if use.expirable.files:
            items.append(
                Reclaimable(
                    command="expire",
                    amount=use.expirable,
                    deletable_at=utc_of(epoch_ms(now) + protected_ms(self._base.definition)),
                    is_runnable=True,
                    why="only versions that no rule keeps need the files; a purge deletes them after the grace period",
                )
            )
        if trimmable.files:
            items.append(
                Reclaimable(
                    command="trim",
                    amount=trimmable,
                    deletable_at=None,
                    is_runnable=True,
                    why="only old snapshots need the files, once the versions from before the trim are purged",
                )
            )
        return tuple(items)

    def _growth(self, last: int) -> tuple[VersionSpace, ...]:
        existing = sorted(self._summary.created_ms)
        versions = existing[-last:] if last else []
        added: dict[int | None, list[Presence]] = {}
        for reach in self._bytes_by_reach:
            added.setdefault(first_of(reach, existing), []).append(reach)
        return tuple(
            VersionSpace(
                version=version,
                created_at=utc_of(self._summary.created_ms[version]),
                needed=self._amount(reach for reach in self._bytes_by_reach if intersects(reach, (version,))),
                added=self._amount(added.get(version, ())),
            )
            for version in versions
        )

    def _amount(self, reaches: Iterable[Presence]) -> Amount:
        files = size_bytes = 0
        for reach in reaches:
            files += self._files_by_reach[reach]
            size_bytes += self._bytes_by_reach[reach]
        return Amount(files, size_bytes)


def _sum(amounts: Iterable[Amount]) -> Amount:
    files = size_bytes = 0
    for amount in amounts:
        files += amount.files
        size_bytes += amount.bytes
    return Amount(files, size_bytes)


def _size_and_name(tally: _TableTally) -> tuple[int, str, str]:
    assert tally.table is not None
    return sum(tally.use.bytes), tally.table.namespace, tally.table.name


def _advice(space: TableSpace) -> tuple[SpaceAdvice, ...]:
    """Return what would help, the commands that reclaim most first, and then a compaction."""
    use, name = space.use, shlex.quote(space.name)
    candidates = (
        SpaceAdvice(command="purge", why="only expired versions need the files", bytes=use.expired.bytes),
        SpaceAdvice(command="expire", why="only versions that can expire need the files", bytes=use.expirable.bytes),
        SpaceAdvice(command=f"trim {name}", why="only old snapshots need the files", bytes=space.trimmable.bytes),
        SpaceAdvice(command="drop-export", why="only exports need the files", bytes=use.exports.bytes),
        SpaceAdvice(command="drop-clone", why="only clones need the files", bytes=use.clones.bytes),
    )
    reclaiming = sorted((advice for advice in candidates if advice.bytes), key=lambda advice: -advice.bytes)
    if space.is_dropped or (space.small.files < _SMALL_FILES and space.deletes.files < _DELETE_FILES):
        return tuple(reclaiming)
    why = f"{space.small.files:,} small files and {space.deletes.files:,} delete files"
    return (*reclaiming, SpaceAdvice(command=f"compact-tables {name}", why=why))
