"""Run random steps on a lakehouse and its copies with a simulated clock, and check the content of each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.table import Table

from tests.operations.aging import DAY_MS, keeping
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import FileMissingError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import MemoryStorage, background, drop_memory_root

#: The method before ``Recorder`` replaces it.
_UNRECORDED_READ = MemoryStorage.read

SCHEMA = pa.schema([("id", pa.int64())])
TABLES = ("a", "b", "c")

#: The content of a version: table -> its rows, ascending.
Content = dict[str, list[int]]


@dataclass
class Clock:
    """The clock of all memory storages."""

    now_ms: int = 1_700_000_000_000

    def later(self, duration_ms: int) -> None:
        self.now_ms += duration_ms


@dataclass(frozen=True)
class Origin:
    """The source and options of an exported lakehouse; ``version`` is the last version that an export created in it."""

    root: str
    level: str
    definitions: bool
    version: int


@dataclass
class Copy:
    """One lakehouse: the content of each version, and the roots whose files it needs.

    ``exports`` maps the name of each export to its level.
    """

    root: str
    versions: dict[int, Content]
    needs: frozenset[str] = frozenset()
    exports: dict[str, str] = field(default_factory=dict)
    origin: Origin | None = None

    def open(self) -> Lakehouse:
        return Lakehouse.open(self.root)

    def copied_to(self, root: str) -> Copy:
        """Return the expected content of a copy of all files at another root."""
        return Copy(root, dict(self.versions), self.needs, dict(self.exports))


@dataclass(frozen=True)
class Scan:
    """The rows of a table, and the bytes of each file that the scan read, by storage root and path."""

    rows: list[int]
    files: dict[tuple[str, str], bytes]

    def is_valid(self) -> bool:
        """Whether all files are unchanged, so that a new scan would return the same rows."""
        return all(_stored_bytes(*file) is data for file, data in self.files.items())


class Recorder:
    """Record the files that are read from memory storages between ``begin`` and ``end``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._read: dict[tuple[str, str], bytes] | None = None

        def recording_read(storage: MemoryStorage, path: str, **options: Any) -> bytes:
            if self._read is not None:
                self._read[storage.root, path] = _UNRECORDED_READ(storage, path)
            return _UNRECORDED_READ(storage, path, **options)

        monkeypatch.setattr(MemoryStorage, "read", recording_read)

    def begin(self) -> None:
        self._read = {}

    def end(self) -> dict[tuple[str, str], bytes]:
        read, self._read = self._read, None
        assert read
        return read


class CopyWorld:
    """Lakehouses that were copied from each other, and a journal of all steps."""

    def __init__(self, seed: int, clock: Clock, recorder: Recorder):
        self._recorder = recorder
        self._scans: dict[tuple[str, str], Scan] = {}
        self.rng = random.Random(seed)
        self.clock = clock
        self.name = f"memory://copies-{seed}"
        self.next_row = 0
        self.n_roots = 0
        self.journal: list[str] = []
        first = Copy(self._new_root(), {0: {}})
        Lakehouse.create(first.root, txn_ttl_millis=60_000)
        self.copies = [first]
        self._create_namespace(first)

    def close(self) -> None:
        for number in range(self.n_roots):
            drop_memory_root(f"{self.name}-{number}/")

    def step(self) -> None:
        """Run one random step in one of the lakehouses, and check that none of them lost anything."""
        copy = self.rng.choice(self.copies)
        steps: dict[Callable[[Copy], None], int] = {
            self._write: 8,
            self._drop_table: 1,
            self._roll_back: 1,
            self._compact_nodes: 1,
            self._compact_tables: 2,
            self._trim: 2,
            self._expire_and_purge: 4,
            self._expire_and_undelete: 1,
            self._remove_orphans: 4,
            self._relocate: 1,
            self._export: 4,
            self._export_again: 3,
            self._drop_export: 1,
            self._copy_files: 2,
            self._move: 1,
        }
        (action,) = self.rng.choices(list(steps), list(steps.values()))
        self.clock.later(self.rng.choice([1_000, 10_000, DAY_MS]))
        self.journal.append(f"{action.__name__[1:]} {copy.root}")
        action(copy)
        self.check_latest()

    def check_latest(self) -> None:
        for copy in self.copies:
            self._check(copy, max(copy.versions))

    def check_all(self) -> None:
        """Check that every live version has its original content, and that verify finds nothing."""
        for copy in self.copies:
            for version in sorted(_live(copy.open()) & copy.versions.keys()):
                self._check(copy, version)
            report = operations.verify(copy.open(), deep=True)
            # Findings about orphans, and about lakehouses that were moved but not relocated, are expected.
            findings = [
                finding
                for finding in report.findings
                if finding.severity == "error" or finding.fix not in ("relocate", "orphans")
            ]
            assert not findings, f"{findings} in {copy.root} after {self.journal}"

    def _check(self, copy: Copy, version: int) -> None:
        catalog = catalog_at(copy.open(), version)
        names = catalog.list_tables("n") if catalog.namespace_exists("n") else []
        content = {name[1]: self._rows(copy, version, catalog.load_table(name)) for name in names}
        assert content == copy.versions[version], f"version {version} of {copy.root} after {self.journal}"

    def _rows(self, copy: Copy, version: int, table: Table) -> list[int]:
        """Scan a table, or return the rows of an earlier scan if all files that it read are unchanged.

        The scan uses another catalog, because a catalog caches the files that it read.
        """
        metadata_file = (copy.root, table.metadata_location)
        scan = self._scans.get(metadata_file)
        if scan is None or not scan.is_valid():
            self._recorder.begin()
            fresh = catalog_at(copy.open(), version).load_table(table.name())
            rows = sorted(fresh.scan().to_arrow()["id"].to_pylist())
            scan = self._scans[metadata_file] = Scan(rows, self._recorder.end())
        return scan.rows

    # Steps of users

    def _create_namespace(self, copy: Copy) -> None:
        with copy.open().transaction() as txn:
            txn.create_namespace("n")
        self._record_versions(copy, {})

    def _write(self, copy: Copy) -> None:
        table = self.rng.choice(TABLES)
        content = self._latest(copy)
        rows = [self.next_row, self.next_row + 1]
        self.next_row += 2
        catalog = catalog_at(copy.open())
        if table not in content:
            catalog.create_table(("n", table), SCHEMA)
            self._record_versions(copy, {**content, table: []})
            content = {**content, table: []}
        data = pa.table({"id": rows}, SCHEMA)
        if self.rng.random() < 0.3:
            catalog.load_table(("n", table)).overwrite(data)  # commits up to two versions: a delete and an append
            self._record_versions(
                copy, {**content, table: rows}, contents=[{**content, table: []}, {**content, table: rows}]
            )
        else:
            catalog.load_table(("n", table)).append(data)
            self._record_versions(copy, {**content, table: [*content[table], *rows]})

    def _drop_table(self, copy: Copy) -> None:
        content = self._latest(copy)
        if content:
            table = self.rng.choice(sorted(content))
            catalog_at(copy.open()).drop_table(("n", table))
            self._record_versions(copy, {name: rows for name, rows in content.items() if name != table})

    def _roll_back(self, copy: Copy) -> None:
        version = self.rng.choice(sorted(_live(copy.open()) & copy.versions.keys()))
        if "n" in copy.open().snapshot(version).namespaces():
            operations.rollback(copy.open(), version)
            self._record_versions(copy, copy.versions[version])

    def _compact_nodes(self, copy: Copy) -> None:
        operations.compact(copy.open())
        self._record_versions(copy, self._latest(copy))

    def _compact_tables(self, copy: Copy) -> None:
        operations.plan_compact_tables(copy.open()).execute()
        self._record_versions(copy, self._latest(copy))

    def _trim(self, copy: Copy) -> None:
        operations.plan_trim_tables(copy.open(), keeping(1)).execute()
        self._record_versions(copy, self._latest(copy))

    def _expire_and_purge(self, copy: Copy) -> None:
        lake = copy.open()
        self.clock.later(DAY_MS)
        operations.plan_expiration(lake, keeping(1)).execute()
        self.clock.later(DAY_MS)
        operations.plan_purge(lake).execute()
        self._record_versions(copy, self._latest(copy))
        copy.versions = {version: copy.versions[version] for version in _live(lake) & copy.versions.keys()}

    def _expire_and_undelete(self, copy: Copy) -> None:
        lake = copy.open()
        self.clock.later(DAY_MS)
        operations.plan_expiration(lake, keeping(1)).execute()
        expired = sorted(info.version for info in lake.history() if info.state == "expired")
        if expired:
            operations.undelete(lake, ",".join(map(str, expired)))
        self._record_versions(copy, self._latest(copy))

    def _remove_orphans(self, copy: Copy) -> None:
        self.clock.later(DAY_MS)
        operations.plan_orphan_removal(copy.open()).execute()
        self._record_versions(copy, self._latest(copy))

    def _relocate(self, copy: Copy) -> None:
        operations.plan_relocation(copy.open()).execute()
        self._record_versions(copy, self._latest(copy))

    # Steps that create copies

    def _export(self, copy: Copy) -> None:
        level, definitions = self.rng.choice(
            [("minimal", False), ("partial", False), ("partial", True), ("full", False)]
        )
        name = f"e{self.n_roots}"
        version = self.rng.choice(sorted(_live(copy.open()) & copy.versions.keys()))
        target = self._new_root()
        plan = operations.plan_export(copy.open(), name, level, version=version, target=target, definitions=definitions)
        plan.execute()
        self.journal.append(f"  {level} of version {version} to {target}")
        self._record_versions(copy, self._latest(copy))
        copy.exports[name] = level
        needs = frozenset() if level == "full" else copy.needs | {copy.root}
        origin = Origin(copy.root, level, definitions, 0)
        copy_at_target = Copy(target, {0: copy.versions[version]}, needs, origin=origin)
        self.copies.append(copy_at_target)
        if "n" not in copy_at_target.open().snapshot().namespaces():
            self._create_namespace(copy_at_target)

    def _export_again(self, copy: Copy) -> None:
        """Export into a lakehouse that an export created and that has had no other commits since."""
        targets = [
            target
            for target in self.copies
            if target.origin and target.origin.root == copy.root and target.origin.version == max(target.versions)
        ]
        if not targets:
            return
        target = self.rng.choice(targets)
        assert target.origin is not None
        level, name = target.origin.level, f"again{self.next_row}-{len(self.journal)}"
        version = self.rng.choice(sorted(_live(copy.open()) & copy.versions.keys()))
        if "n" not in copy.open().snapshot(version).namespaces():
            return
        plan = operations.plan_export(
            copy.open(), name, level, version=version, target=target.root, definitions=target.origin.definitions
        )
        plan.execute()
        self.journal.append(f"  {level} of version {version} to {target.root} again")
        self._record_versions(copy, self._latest(copy))
        copy.exports[name] = level
        self._record_versions(target, copy.versions[version])
        target.origin = replace(target.origin, version=max(target.versions))

    def _drop_export(self, copy: Copy) -> None:
        """Drop an export, unless another lakehouse needs its files."""
        is_needed = any(copy.root in other.needs for other in self.copies)
        names = sorted(name for name, level in copy.exports.items() if level == "full" or not is_needed)
        if names:
            name = self.rng.choice(names)
            operations.drop_export(copy.open(), name)
            self.journal.append(f"  {name}")
            del copy.exports[name]
            self._record_versions(copy, self._latest(copy))

    def _copy_files(self, copy: Copy) -> None:
        root = self._new_root()
        _copy_files(copy.root, root)
        self.journal.append(f"  to {root}")
        self.copies.append(copy.copied_to(root))

    def _move(self, copy: Copy) -> None:
        """Move a lakehouse. Lakehouses that need its files at the former root are removed."""
        if any(copy.root in other.needs for other in self.copies):
            return
        root = self._new_root()
        _copy_files(copy.root, root)
        drop_memory_root(copy.root)
        self.journal.append(f"  to {root}")
        self.copies[self.copies.index(copy)] = copy.copied_to(root)

    # Helpers

    def _new_root(self) -> str:
        self.n_roots += 1
        return f"{self.name}-{self.n_roots - 1}/"

    def _latest(self, copy: Copy) -> Content:
        return copy.versions[max(copy.versions)]

    def _record_versions(self, copy: Copy, content: Content, contents: list[Content] | None = None) -> None:
        """Record the content of the versions that a step created: ``content`` for all, or the items of ``contents``."""
        latest = copy.open().latest_version()
        new = range(max(copy.versions) + 1, latest + 1)
        contents = contents[-len(new) :] if contents and new else [content] * len(new)
        copy.versions.update(zip(new, contents, strict=True))


def _stored_bytes(root: str, path: str) -> bytes | None:
    """Return the stored object with the content of a file. It is replaced when the file is written again."""
    try:
        return _UNRECORDED_READ(MemoryStorage(root), path)
    except FileMissingError:
        return None


def _live(lake: Lakehouse) -> set[int]:
    return {info.version for info in lake.history() if info.state == "live"}


def _copy_files(source: str, target: str) -> None:
    background.drain()
    source_storage, target_storage = MemoryStorage(source), MemoryStorage(target)
    for info in list(source_storage.list()):
        target_storage.create(info.path, source_storage.read(info.path))
