"""The report on the space of a lakehouse: sums by use, namespace and table, and what would help."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from trinitylake_ops.operations.base import Cost
from trinitylake_ops.operations.rendering import Document, Table, new_table
from trinitylake_ops.operations.space.uses import SpaceUse

#: Rounded to one digit, a size of this number of units is a thousand of them.
_NEXT_UNIT = 999.95
_UNITS = ("kB", "MB", "GB", "TB", "PB", "EB")


def size_text(size_bytes: int) -> str:
    """Format a size in decimal units, such as ``4.4 MB``."""
    if size_bytes < 1_000:
        return "1 byte" if size_bytes == 1 else f"{size_bytes} bytes"
    size, position = size_bytes / 1_000, 0
    while size >= _NEXT_UNIT and position < len(_UNITS) - 1:
        size, position = size / 1_000, position + 1
    return f"{size:,.1f} {_UNITS[position]}"


@dataclass(frozen=True, slots=True)
class Amount:
    """A number of files, and their size."""

    files: int = 0
    bytes: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.files + other.files, self.bytes + other.bytes)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.files - other.files, self.bytes - other.bytes)


NOTHING = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceByUse:
    """Files by the reason for which they are kept. No file counts twice."""

    #: Needed by the latest version.
    current: Amount = NOTHING
    #: Needed only by older versions that the retention rules keep.
    older: Amount = NOTHING
    #: Needed only by exports.
    exports: Amount = NOTHING
    #: Needed only by clones.
    clones: Amount = NOTHING
    #: Needed only by versions that can expire now.
    expirable: Amount = NOTHING
    #: Needed only by expired versions, which a purge deletes.
    expired: Amount = NOTHING

    @classmethod
    def of(cls, amounts: Mapping[SpaceUse, Amount]) -> SpaceByUse:
        """Return the amounts by use."""
        return cls(**{use.value: amounts.get(use, NOTHING) for use in SpaceUse})

    @property
    def total(self) -> Amount:
        """All files."""
        return sum((self.of_use(use) for use in SpaceUse), NOTHING)

    def of_use(self, use: SpaceUse) -> Amount:
        """Return the files of one use."""
        amount: Amount = getattr(self, use.value)
        return amount

    def __add__(self, other: SpaceByUse) -> SpaceByUse:
        return SpaceByUse(**{use.value: self.of_use(use) + other.of_use(use) for use in SpaceUse})

    def __sub__(self, other: SpaceByUse) -> SpaceByUse:
        return SpaceByUse(**{use.value: self.of_use(use) - other.of_use(use) for use in SpaceUse})


@dataclass(frozen=True, slots=True, kw_only=True)
class SpaceAdvice:
    """A command that reduces the space or the number of files of a table."""

    #: The command, without the root.
    command: str
    why: str
    #: The bytes that it makes reclaimable; 0 if it only reduces the number of files.
    bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSpace:
    """The files of one table."""

    namespace: str
    table: str
    #: Whether the latest version does not have the table.
    is_dropped: bool
    use: SpaceByUse
    #: The data files of the current snapshot.
    data: Amount
    #: Those of them that are smaller than three quarters of the target size.
    small: Amount
    #: The delete files of the current snapshot.
    deletes: Amount
    #: The files that only snapshots need which a trim would drop.
    trimmable: Amount
    #: Why not all files are known; empty if they are.
    damage: str
    #: What would help, the most effective first.
    advice: tuple[SpaceAdvice, ...]

    @property
    def name(self) -> str:
        """The table as ``namespace.table``."""
        return f"{self.namespace}.{self.table}"


@dataclass(frozen=True, slots=True, kw_only=True)
class NamespaceSpace:
    """The files of the tables of one namespace."""

    namespace: str
    tables: int
    use: SpaceByUse
    small: Amount
    deletes: Amount
    trimmable: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaimable:
    """Files that a command reclaims, and from when."""

    command: str
    amount: Amount
    #: When the files can be deleted at the earliest; None if that depends on when versions expire.
    deletable_at: datetime | None
    #: Whether the command can run now.
    is_runnable: bool
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpace:
    """The files that a version needs, and those that no earlier one needs."""

    version: int
    created_at: datetime
    needed: Amount
    added: Amount


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreachedSpace:
    """Files that no version needs, as far as they were measured. This takes a listing or an inventory of all files."""

    #: Orphans, which are older than any transaction in progress; None if they were not measured.
    orphans: Amount | None = None
    #: Files that writers have staged, and other files of operations in progress; None if they were not measured.
    staged: Amount | None = None
    #: Up to which time files were checked by the last removal of orphans; None if there was none.
    orphans_removed_before: datetime | None = None
    #: Why files were not measured, although this was requested; empty if they were.
    failure: str = ""


@dataclass(frozen=True, kw_only=True)
class SpaceReport(Document):
    """The space of a lakehouse at its latest version."""

    root: str
    version: int
    #: The storage's time.
    now: datetime
    #: The files of the catalog and of all tables. Files of registered tables and of other lakehouses do not count.
    use: SpaceByUse
    #: The nodes and definitions among them, and the roots.
    catalog: SpaceByUse
    #: Records of operations: leases, plans, manifests of exports, verified files and this summary.
    operations: Amount
    unreached: UnreachedSpace
    reclaimable: tuple[Reclaimable, ...]
    #: The data files of the current snapshots of all tables, the small ones among them, and their delete files.
    data: Amount
    small: Amount
    deletes: Amount
    #: All namespaces, the largest first.
    namespaces: tuple[NamespaceSpace, ...]
    #: The largest tables.
    tables: tuple[TableSpace, ...]
    #: The number of all tables, including those that only older versions have.
    n_tables: int
    #: The number of tables whose files belong to other owners, or that have another format. They are not counted.
    uncounted_tables: int
    #: Tables whose files cannot all be read, with the reason.
    damaged: Mapping[str, str]
    #: Definitions that cannot be read.
    unreadable_definitions: int
    #: The newest versions, oldest first.
    growth: tuple[VersionSpace, ...]
    #: The version of the stored summary that was used; None if everything was read.
    from_version: int | None
    #: The number of tables whose files were read.
    tables_read: int
    #: Whether the summary is stored, so that the next run reads only what changed.
    is_stored: bool
    cost: Cost = field(compare=False)

    @property
    def total(self) -> Amount:
        """All files that are kept."""
        return self.use.total + self.operations

    @property
    def deletable(self) -> Amount:
        """The files that can be deleted now."""
        now = self.now
        items = (item for item in self.reclaimable if item.deletable_at is not None and item.deletable_at <= now)
        return sum((item.amount for item in items), NOTHING)

    @property
    def headline(self) -> str:
        """The space in one sentence."""
        kept, current = self.total, self.use.current
        deletable = self.deletable
        reclaim = (
            f"{size_text(deletable.bytes)} can be deleted now" if deletable.files else "nothing can be deleted now"
        )
        return (
            f"Version {self.version:,}: {size_text(kept.bytes)} in {kept.files:,} files, of which the latest version"
            f" needs {size_text(current.bytes)}; {reclaim}"
        )

    @property
    def commands(self) -> tuple[str, ...]:
        """The commands that help now, with the root."""
        due = [item.command for item in self.reclaimable if item.is_runnable]
        prefix = f"trinitylake --root {shlex.quote(self.root)}"
        return tuple(f"{prefix} {command}" for command in dict.fromkeys(due))

    def to_dict(self) -> dict[str, object]:
        """Return the content as JSON values, with the headline and the commands."""
        return {"headline": self.headline, "next": list(self.commands), **super().to_dict()}

    def table(self) -> Table:
        """Return one row for each of the largest tables, one for the other tables and one for the catalog."""
        rows = [_row(table.name, table.use, table.small, table.deletes, _help(table)) for table in self.tables]
        others = self._others()
        if others is not None:
            rows.append(others)
        rows.append(_row("(catalog)", self.catalog, None, None, ""))
        rows.append(
            _row("(total)", self.use, self.small, self.deletes, "; ".join(map(_reclaimable_text, self.reclaimable)))
        )
        columns = (
            "table",
            "current",
            "older",
            "exports",
            "clones",
            "expirable",
            "expired",
            "small files",
            "delete files",
        )
        return new_table(self._title(), *columns, "what helps", rows=rows)

    def _others(self) -> tuple[object, ...] | None:
        n_others = self.n_tables - len(self.tables)
        if n_others <= 0:
            return None
        use = sum((space.use for space in self.namespaces), SpaceByUse())
        use -= sum((table.use for table in self.tables), SpaceByUse())
        small = self.small - sum((table.small for table in self.tables), NOTHING)
        deletes = self.deletes - sum((table.deletes for table in self.tables), NOTHING)
        return _row(f"({n_others:,} other tables)", use, small, deletes, "")

    def _title(self) -> str:
        parts = [self.headline]
        if self.uncounted_tables:
            parts.append(f"{self.uncounted_tables:,} tables with files of other owners are not counted")
        if self.damaged:
            name, why = next(iter(self.damaged.items()))
            parts.append(f"{len(self.damaged):,} damaged tables are counted in part, such as {name}: {why}")
        if self.unreadable_definitions:
            parts.append(f"{self.unreadable_definitions:,} definitions cannot be read")
        return "; ".join([*parts, *unreached_texts(self.unreached)])


def unreached_texts(unreached: UnreachedSpace) -> list[str]:
    """Return what is known about files that no version needs, for people."""
    texts = []
    if unreached.orphans is not None:
        texts.append(f"orphans have {size_text(unreached.orphans.bytes)} in {unreached.orphans.files:,} files")
    if unreached.staged is not None:
        texts.append(f"staged files have {size_text(unreached.staged.bytes)} in {unreached.staged.files:,} files")
    if unreached.orphans is None:
        removed = unreached.orphans_removed_before
        last = "never checked" if removed is None else f"checked up to {removed:%Y-%m-%d %H:%M} UTC"
        why = f" because {unreached.failure}" if unreached.failure else ""
        texts.append(f"orphans and staged files are not measured{why} ({last})")
    return texts


def _row(name: str, use: SpaceByUse, small: Amount | None, deletes: Amount | None, advice: str) -> tuple[object, ...]:
    sizes = [size_text(amount.bytes) if (amount := use.of_use(kind)).files else "" for kind in SpaceUse]
    numbers = ["" if amount is None or not amount.files else f"{amount.files:,}" for amount in (small, deletes)]
    return (name, *sizes, *numbers, advice)


def _help(table: TableSpace) -> str:
    if table.damage:
        return "verify"
    return "; ".join(advice.command for advice in table.advice)


def _reclaimable_text(item: Reclaimable) -> str:
    when = "" if item.deletable_at is None else f" from {item.deletable_at:%Y-%m-%d %H:%M} UTC"
    return f"{item.command}: {size_text(item.amount.bytes)}{when}"
