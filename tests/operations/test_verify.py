"""Test verify: intact lakehouses have no findings, and damage is reported with its path."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.clock import ClockStorage
from tests.faults import FaultyStorage
from tests.lakes import DATA, Lakes, local_storage, seal, table
from tests.operations.changes import (
    append_rows,
    create,
    flip,
    node_bytes,
    node_columns,
    small_sizes,
    truncate,
)
from tests.operations.test_export import interrupt_export
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import LakehouseNotFoundError
from trinitylake_ops.format.definitions import ExportState
from trinitylake_ops.format.file_names import HINT_PATH, OWNER_NAME, parse_root_path, root_path
from trinitylake_ops.format.node_file import NodeFile, decode_node, encode_node
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import FileKind, files_of
from trinitylake_ops.operations import Finding
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://verify/"
LATEST = 5
EXPORT = "kept"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """All files of an intact lakehouse with a deep tree, a table with two snapshots, and an export of version 3."""
    storage = MemoryStorage(ROOT)
    lake = Lakehouse.create(ROOT, storage=storage, order=3, **small_sizes(3))
    with lake.transaction(message="m" * 3_400) as txn:
        txn.create_namespace("big")
        for number in range(12):
            txn.create_table("big", f"t{number}", table())
    append_rows(lake)
    append_rows(lake)
    assert lake.latest_version() == LATEST
    operations.plan_export(lake, EXPORT, version=3).execute()
    contents = {info.path: storage.read(info.path) for info in storage.list()}
    drop_memory_root(ROOT)
    return contents


@pytest.fixture
def damaged_lake(files: dict[str, bytes]) -> Iterator[Lakehouse]:
    """A copy of the lakehouse for tests to damage. It has the same root, because Iceberg's paths are absolute."""
    storage = MemoryStorage(ROOT)
    for path, data in files.items():
        storage.create(path, data)
    yield Lakehouse(storage)
    drop_memory_root(ROOT)


def findings(lake: Lakehouse) -> list[Finding]:
    """Verify without caches, and return all findings."""
    return list(operations.verify(Lakehouse(lake.storage)).findings)


def error_paths(reported: list[Finding]) -> set[str | None]:
    return {finding.path for finding in reported if finding.severity == "error"}


def table_file(lake: Lakehouse, kind: FileKind) -> str:
    table_files = files_of(lake.snapshot().table("ns", "t"), StorageFileIO.on(lake.storage))
    return next(file.location for file in table_files if file.kind == kind)


def definition_path(lake: Lakehouse, namespace: str, name: str | None = None) -> str:
    snapshot = lake.snapshot()
    key = snapshot.keys.namespace_key(namespace) if name is None else snapshot.keys.table_key(namespace, name)
    location = snapshot.entry(key)
    assert location is not None
    return location


FILES: dict[str, Callable[[Lakehouse], str]] = {
    "old root": lambda _: root_path(1),
    "root": lambda lake: root_path(lake.latest_version()),
    "node": lambda lake: lake.snapshot().root.children[0],
    "lakehouse definition": lambda lake: lake.snapshot().definition_location,
    "namespace definition": lambda lake: definition_path(lake, "big"),
    "table definition": lambda lake: definition_path(lake, "big", "t7"),
    "managed table's definition": lambda lake: definition_path(lake, "ns", "t"),
    "metadata": lambda lake: table_file(lake, FileKind.METADATA),
    "manifest list": lambda lake: table_file(lake, FileKind.MANIFEST_LIST),
    "manifest": lambda lake: table_file(lake, FileKind.MANIFEST),
    "data": lambda lake: table_file(lake, FileKind.DATA),
    "exported root": lambda lake: lake.snapshot(EXPORT).location,
    "export manifest": lambda lake: lake.snapshot().definition.exports[0].manifest_path,
}


def delete_file(lake: Lakehouse, path: str) -> None:
    lake.storage.delete(path)


def cut_in_half(lake: Lakehouse, path: str) -> None:
    truncate(lake.storage, path)


def make_empty(lake: Lakehouse, path: str) -> None:
    truncate(lake.storage, path, 0)


def replace_with_garbage(lake: Lakehouse, path: str) -> None:
    lake.storage.write(path, b"\xff\x00 neither Arrow, protobuf, JSON nor Avro \xff" * 20)


def flip_end(lake: Lakehouse, path: str) -> None:
    flip(lake.storage, path, -1)


# Damage that a shallow verify cannot detect: a missing latest root, and damaged data files, which it does not read.
UNDETECTABLE = {("root", delete_file), ("data", flip_end), ("data", replace_with_garbage)}


@pytest.mark.parametrize("damage", [delete_file, cut_in_half, make_empty, replace_with_garbage, flip_end])
@pytest.mark.parametrize("kind", FILES)
def test_every_damaged_file_is_reported(
    damaged_lake: Lakehouse, kind: str, damage: Callable[[Lakehouse, str], None]
) -> None:
    path = FILES[kind](damaged_lake)
    size_bytes = damaged_lake.storage.stat(path).size_bytes
    damage(damaged_lake, path)
    reported = findings(damaged_lake)
    if (kind, damage) in UNDETECTABLE and not (
        damage is replace_with_garbage and damaged_lake.storage.stat(path).size_bytes != size_bytes
    ):
        assert path not in error_paths(reported)
        return
    assert path in error_paths(reported), reported
    assert all("\n" not in finding.message for finding in reported)


def test_intact_lakehouse_has_no_findings(damaged_lake: Lakehouse) -> None:
    report = operations.verify(damaged_lake)
    assert report.findings == ()
    assert report.is_clean
    assert (report.latest_version, report.versions, report.exports) == (LATEST + 2, LATEST + 3, 1)
    assert report.nodes > 3
    assert report.definitions > 14
    assert report.table_files == 9, "three metadata files, and two of manifest lists, manifests and data files each"
    assert str(report).startswith("Clean: 8 versions")
    assert json.loads(report.to_json())["findings"] == []


def test_verify_does_not_fail_on_random_damage(files: dict[str, bytes], damaged_lake: Lakehouse) -> None:
    rng = random.Random(20_260_101)
    for path in sorted(files):
        for _ in range(3):
            flip(damaged_lake.storage, path, rng.randrange(len(files[path])))
            findings(damaged_lake)
            damaged_lake.storage.write(path, files[path])
    assert findings(damaged_lake) == []


def test_each_immutable_file_is_read_once(damaged_lake: Lakehouse) -> None:
    storage_with_log = FaultyStorage(damaged_lake.storage)
    assert operations.verify(Lakehouse(storage_with_log)).findings == ()
    existing_paths = {info.path for info in damaged_lake.storage.list()}
    reads = Counter(
        request.path for request in storage_with_log.log if request.kind == "read" and request.path in existing_paths
    )
    roots = {path for path in reads if parse_root_path(path) is not None}
    exported = damaged_lake.snapshot(EXPORT).location  # read for its checksum and for its tree
    repeated = {path for path, count in reads.items() if count > 1}
    assert repeated <= {exported, HINT_PATH, root_path(LATEST + 2)}, "only files that locate the latest version"
    assert roots == {root_path(version) for version in range(LATEST + 3)}
    assert set(reads) == {path for path in existing_paths if not path.endswith((".parquet", OWNER_NAME))}


def test_data_file_with_wrong_size_is_reported(damaged_lake: Lakehouse) -> None:
    path = table_file(damaged_lake, FileKind.DATA)
    damaged_lake.storage.write(path, damaged_lake.storage.read(path) + b"x")
    (finding,) = findings(damaged_lake)
    assert (finding.code, finding.path, finding.severity) == ("table-file-size", path, "error")
    assert not operations.verify(damaged_lake).is_clean


def rewrite_node(lake: Lakehouse, path: str, change: Callable[[dict[str, list[str | None]]], None]) -> None:
    columns = node_columns(lake.storage.read(path))
    change(columns)
    lake.storage.write(path, node_bytes(columns))


def _set_system(columns: dict[str, list[str | None]], name: str, value: str) -> None:
    columns["pvalue"][columns["key"].index(name)] = value


def _swap_keys(columns: dict[str, list[str | None]]) -> None:
    row = columns["key"].index(None)
    columns["key"][row + 1], columns["key"][row + 2] = columns["key"][row + 2], columns["key"][row + 1]


def _child(value: str | None) -> Callable[[dict[str, list[str | None]]], None]:
    def change(columns: dict[str, list[str | None]]) -> None:
        columns["pnode"][columns["key"].index(None)] = value

    return change


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda columns: _set_system(columns, "n_keys", "9"), "root-corrupt"),
        (lambda columns: _set_system(columns, "n_keys", "x"), "root-corrupt"),
        (lambda columns: _set_system(columns, "created_at_millis", "yesterday"), "root-corrupt"),
        (lambda columns: _set_system(columns, "created_at_millis", "7"), "time-not-rising"),
        (lambda columns: _set_system(columns, "previous_root", root_path(0)), "chain-broken"),
        (lambda columns: _set_system(columns, "previous_root", "nonsense"), "chain-broken"),
        (lambda columns: _set_system(columns, "lakehouse_def", "missing/file.binpb"), "definition-unreadable"),
        (lambda columns: _set_system(columns, "lakehouse_def", "../outside"), "definition-unreadable"),
        (_child("missing/file.arrow"), "node-missing"),
        (_child("../outside.arrow"), "node-corrupt"),
        (_child("memory://other/node.arrow"), "node-missing"),
        (_child(None), "root-corrupt"),
    ],
)
def test_inconsistent_roots_are_reported(
    damaged_lake: Lakehouse, change: Callable[[dict[str, list[str | None]]], None], code: str
) -> None:
    rewrite_node(damaged_lake, root_path(2), change)
    reported = findings(damaged_lake)
    assert code in {finding.code for finding in reported}
    assert {finding.version for finding in reported if finding.code == code} == {2}


def test_inconsistent_nodes_are_reported(lakes: Lakes) -> None:
    lake = lakes.local(order=8, **small_sizes(8))
    with lake.transaction(message="m" * 3_400) as txn:
        txn.create_namespace("ns")
        for number in range(40):
            txn.create_table("ns", f"t{number}", table())
    path = lake.snapshot().root.children[0]
    data = lake.storage.read(path)
    changes: list[tuple[Callable[[dict[str, list[str | None]]], None], str]] = [
        (_swap_keys, "node-corrupt"),
        (lambda columns: _set_system(columns, "n_keys", "1"), "node-corrupt"),
        (lambda columns: _set_system(columns, "n_keys", "0"), "node-corrupt"),
        (_child(path), "node-corrupt"),
    ]
    for change, code in changes:
        rewrite_node(lake, path, change)
        assert (code, path) in {(finding.code, finding.path) for finding in findings(lake)}
        lake.storage.write(path, data)
    root = lake.snapshot().location
    root_data = lake.storage.read(root)
    rewrite_node(lake, root, _child(lake.snapshot().root.children[1]))  # makes a child occur twice
    assert ("tree-invariant", lake.snapshot().root.children[1]) in {
        (finding.code, finding.path) for finding in findings(lake)
    }
    lake.storage.write(root, root_data)
    assert findings(lake) == []


def test_node_below_itself_is_reported(damaged_lake: Lakehouse) -> None:
    snapshot = damaged_lake.snapshot()
    path = snapshot.root.children[0]
    columns = node_columns(damaged_lake.storage.read(path))
    first = columns["key"].index(None)
    n_keys = int(columns["pvalue"][columns["key"].index("n_keys")] or 0)
    for row in range(first, first + n_keys + 1):
        columns["pnode"][row] = path
    damaged_lake.storage.write(path, node_bytes(columns))
    assert path in error_paths(findings(damaged_lake))


def test_root_after_missing_version_is_reported(damaged_lake: Lakehouse) -> None:
    damaged_lake.storage.write(root_path(LATEST + 9), damaged_lake.storage.read(root_path(LATEST + 2)))
    (finding,) = findings(damaged_lake)
    assert (finding.code, finding.path, finding.version) == ("root-beyond-gap", root_path(LATEST + 9), LATEST + 9)


def test_wrong_hint_is_a_warning(damaged_lake: Lakehouse) -> None:
    for hint in (b"0", b"99", b"garbage", None):
        damaged_lake.storage.delete(HINT_PATH) if hint is None else damaged_lake.storage.write(HINT_PATH, hint)
        report = operations.verify(damaged_lake)
        (finding,) = report.findings
        assert (finding.severity, finding.code, finding.path) == ("warning", "hint-wrong", HINT_PATH)
        assert finding.fix is not None
        assert finding.fix.endswith("repair-hint")
        assert finding.fix.startswith("a backup of that root") == (hint == b"99")
        assert report.is_clean


def test_export_interrupted_long_ago_is_a_warning(damaged_lake: Lakehouse) -> None:
    interrupt_export(damaged_lake, "incomplete")
    assert findings(damaged_lake) == []
    later = ClockStorage(damaged_lake.storage, damaged_lake.storage.now_ms() + 8 * 24 * 3600 * 1000)
    report = operations.verify(Lakehouse(later))
    (finding,) = report.findings
    assert (finding.severity, finding.code) == ("warning", "export-cut-off")
    assert "'incomplete'" in finding.message
    assert report.is_clean


def test_invalid_export_records_are_reported(damaged_lake: Lakehouse) -> None:
    definition = damaged_lake.snapshot().definition
    (record,) = definition.exports
    invalid_records = [
        replace(record, name="lost", state=ExportState.COMPLETE),
        replace(record, name="outside", state=ExportState.COMPLETE, manifest_path="../x"),
        replace(record, name="nothing", state=ExportState.COMPLETE, manifest_path=""),
    ]
    damaged_lake.alter_definition(
        exports=(record, *invalid_records),
        exported_snapshots={**definition.exported_snapshots, "missing": "_export_missing.arrow", "up": "../up.arrow"},
    )
    reported = findings(damaged_lake)
    assert all(
        any(f"'{name}'" in finding.message for finding in reported) for name in ("lost", "outside", "missing", "up")
    )


def test_changed_settings_are_reported(damaged_lake: Lakehouse) -> None:
    path = damaged_lake.snapshot(2).definition_location
    changed_definition = replace(damaged_lake.snapshot(2).definition, order=9)
    damaged_lake.storage.write(path, changed_definition.to_bytes())
    assert findings(damaged_lake)
    lake = Lakehouse(damaged_lake.storage)
    damaged_lake.storage.write(
        lake.snapshot().definition_location, replace(lake.snapshot().definition, id="x").to_bytes()
    )
    assert "definition-changed" in {finding.code for finding in findings(damaged_lake)}


def test_sealed_versions_are_skipped(damaged_lake: Lakehouse) -> None:
    seal(damaged_lake, 2)
    report = operations.verify(Lakehouse(damaged_lake.storage))
    assert report.findings == ()
    assert report.versions == LATEST + 2


def test_progress_is_reported_and_missing_lakehouse_fails(damaged_lake: Lakehouse) -> None:
    calls: list[tuple[int, int]] = []
    operations.verify(damaged_lake, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(number, LATEST + 3) for number in range(1, LATEST + 4)]
    with pytest.raises(LakehouseNotFoundError):
        operations.verify(Lakehouse(MemoryStorage("memory://missing/")))


def test_committed_fixture_is_clean(tmp_path: Path) -> None:
    shutil.copytree(DATA / "small-lake", tmp_path / "lake")
    report = operations.verify(Lakehouse(local_storage(tmp_path / "lake")))
    assert [finding for finding in report.findings if finding.severity == "error"] == []
    assert report.versions == 4


def test_version_from_the_future_is_a_warning_until_next_commit(lake: Lakehouse) -> None:
    later_lake = Lakehouse(ClockStorage(lake.storage, lake.storage.now_ms() + 3_600_000))
    create(later_lake, "early")
    version = lake.latest_version()
    report = operations.verify(lake)
    assert [(finding.severity, finding.code, finding.version) for finding in report.findings] == [
        ("warning", "time-in-future", version)
    ]
    assert report.is_clean
    assert operations.verify(later_lake).findings == ()
    create(lake, "next")
    report = operations.verify(lake)
    assert [(finding.severity, finding.code, finding.version) for finding in report.findings] == [
        ("past", "time-in-future", version),
        ("past", "clock-set-back", version + 1),
    ]
    assert [info.is_clock_reset for info in lake.history(2)] == [True, False]


def test_children_swapped_in_later_version_are_reported(tmp_path: Path) -> None:
    lake = Lakehouse.create(str(tmp_path / "damaged"), {"fsync": "false"}, order=4, **small_sizes(4))
    create(lake, "n", *(f"t{number:02}" for number in range(30)))
    create(lake, "m")
    path = root_path(2)
    root = decode_node(lake.storage.read(path), path)
    earlier = decode_node(lake.storage.read(root_path(1)), root_path(1))
    shared_children = [child for child in root.children if child in earlier.children]
    assert len(shared_children) >= 2, "the versions share at least two children"
    assert operations.verify(lake).is_clean
    swaps = dict(zip(shared_children[:2], reversed(shared_children[:2]), strict=True))
    children = [swaps.get(child, child) for child in root.children]
    damaged_root = NodeFile(root.keys, root.values, children, root.buffer, root.system)
    lake.storage.write(path, encode_node(damaged_root, 4))
    report = operations.verify(Lakehouse(lake.storage))
    assert {(finding.code, finding.path, finding.version) for finding in report.findings} == {
        ("tree-invariant", path, 2)
    }
