"""Test that a deep verify without a record reports any damage to a catalog file that this library wrote."""

from __future__ import annotations

import contextlib
import functools
import random
import re
from dataclasses import replace

import pyarrow as pa
import pytest

from tests.clock import AgingStorage
from tests.faults import FaultyStorage, fail
from tests.lakes import entries, table
from tests.operations.aging import Aging, grow
from tests.operations.changes import append_rows, create
from tests.operations.generated_lakes import generated_files, memory_lake, nodes_of, random_step
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import FileMissingError, StoragePermissionError, VersionExpiredError
from trinitylake_ops.format.file_names import HINT_PATH, new_node_path
from trinitylake_ops.format.keys import CREATED_AT_MILLIS, PREVIOUS_ROOT
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.operations import VerifyReport
from trinitylake_ops.storage import Storage
from trinitylake_ops.tree.shape import holder_of

pytestmark = pytest.mark.usefixtures("fixed_requests")

#: A pattern of the paths of each kind of file.
PATTERNS = {
    "root": r"_[01]{32}\.arrow",
    "node": r"[01/]+-node-.*\.arrow",
    "exported root": r"_export_.*\.arrow",
    "lakehouse definition": r"_lakehouse_def_.*\.binpb",
    "namespace definition": r"[01/]+-namespace-.*\.binpb",
    "table definition": r"[01/]+-table-.*\.binpb",
    "hint": re.escape(HINT_PATH),
    "plan": r"_ops/plan-.*\.json",
    "export manifest": r"_ops/export-.*\.json",
    "lease": r"_ops/lease-.*\.json",
    "saved transaction": r"_ops/txn-.*\.binpb",
    "orphan barrier": r"_ops/orphan-barrier\.json",
    "owner": r"tables/.*/_owner\.json",
}
#: Kinds of files whose deletion is not reported: expired leases, saved transactions, the orphan barrier, whose number
#: is also in the lakehouse definition, and owner files, which other programs do not write.
DELETABLE = {"lease", "saved transaction", "orphan barrier", "owner"}
CLOCK_CODES = {"time-in-future"}
EXPORTS = ("first", "second", "third")
INCOMPLETE_EXPORT = "incomplete"
#: Kinds of files with the same content in all folders of a lakehouse.
IDENTICAL = {"owner"}


def verify_deep(storage: Storage) -> VerifyReport:
    return operations.verify(Lakehouse(storage), deep=True)


@functools.cache
def files_of_all_kinds() -> dict[str, bytes]:
    """Return all files of a lakehouse in which all operations were run."""
    with memory_lake({}) as storage:
        aging = Aging.on(storage)
        lake = aging.lake
        grow(aging, 6)
        append_rows(lake, "managed.t")
        append_rows(lake, "managed.u")
        storage.write(new_node_path(), b"an orphan")
        aging.clean_up()
        grow(aging, 4, "m")
        for name in EXPORTS[:2]:
            operations.plan_export(lake, name, "partial", definitions=True).execute()
        operations.plan_export(lake, EXPORTS[2], "minimal").execute()
        aging.later()
        aging.expire()
        create(lake, "last", *(f"t{number}" for number in range(12)))
        aging.expire()
        faulty_lake = Lakehouse(
            FaultyStorage(aging.clock, [fail(1, StoragePermissionError, kind="create", path_part="-node-")])
        )
        with pytest.raises(StoragePermissionError):
            operations.plan_export(faulty_lake, INCOMPLETE_EXPORT, "partial").execute()
        for name in ("x", "y"):
            txn = lake.transaction()
            txn.create_table("last", name, table())
            txn.save()
        return {info.path: storage.read(info.path) for info in storage.list()}


@functools.cache
def superseded_definitions() -> set[str]:
    """Return definitions that nodes refer to but that a buffered message replaces in every version."""
    files = files_of_all_kinds()
    with memory_lake(files) as storage:
        lake = Lakehouse(storage)
        reachable_paths: set[str] = set()
        for version in (*range(lake.latest_version() + 1), *EXPORTS):
            with contextlib.suppress(VersionExpiredError):
                reachable_paths.update(entries(lake, version).values())
    return {path for path in files if re.fullmatch(PATTERNS["table definition"], path)} - reachable_paths


def paths_of_kind(kind: str, files: dict[str, bytes]) -> list[str]:
    matches = sorted(path for path in files if re.fullmatch(PATTERNS[kind], path))
    return [path for path in matches if path not in superseded_definitions()]


def is_reported(path: str, report: VerifyReport) -> bool:
    return any(path == finding.path or path in finding.message for finding in report.findings)


def check_damage_is_reported(kind: str, path: str, data: bytes | None) -> None:
    """Replace the content of a file, or delete it, and check that a deep verify reports the file."""
    with memory_lake(files_of_all_kinds()) as storage:
        storage.delete(path) if data is None else storage.write(path, data)
        report = verify_deep(storage)
        assert is_reported(path, report), (kind, path, report.findings)


def check_flips(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        path = rng.choice(paths_of_kind(kind, files))
        data = bytearray(files[path])
        position = rng.randrange(len(data))
        data[position] ^= 1 << rng.randrange(8)
        check_damage_is_reported(kind, path, bytes(data))


def check_truncations(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        path = rng.choice(paths_of_kind(kind, files))
        check_damage_is_reported(kind, path, files[path][: rng.randrange(len(files[path]))])


def check_deletions(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        check_damage_is_reported(kind, rng.choice(paths_of_kind(kind, files)), None)


def check_swaps(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        first, other = rng.sample(paths_of_kind(kind, files), 2)
        check_damage_is_reported(kind, first, files[other])


kinds = pytest.mark.parametrize("kind", PATTERNS)


def test_files_of_every_kind_have_checksums() -> None:
    files = files_of_all_kinds()
    for kind in PATTERNS:
        assert paths_of_kind(kind, files), kind
    known_paths = [path for kind in PATTERNS for path in paths_of_kind(kind, files)]
    assert {path for path in files if not path.startswith("tables/")} <= {*known_paths, *superseded_definitions()}
    with memory_lake(files) as storage:
        report = verify_deep(storage)
        assert [finding for finding in report.findings if finding.severity == "error"] == []
        assert set(report.without_checksum) <= {"metadata file", "manifest list", "manifest", "data file"}
        assert report.checked_files >= len(known_paths) - 1, "all files except the hint have a checksum"


@kinds
def test_few_flips_truncations_deletions_and_swaps_are_reported(kind: str) -> None:
    check_flips(kind, 4, 1)
    check_truncations(kind, 2, 1)
    if kind not in DELETABLE:
        check_deletions(kind, 1, 1)
    if kind not in IDENTICAL and len(paths_of_kind(kind, files_of_all_kinds())) > 1:
        check_swaps(kind, 2, 1)


def test_missing_operation_files_are_reported_by_shallow_verify() -> None:
    """This includes plan files of expired versions and manifests of incomplete exports."""
    with memory_lake(files_of_all_kinds()) as storage:
        definition = Lakehouse(storage).snapshot().definition
        plans = {batch.plan_path for batch in definition.expirations if batch.plan_path}
        (manifest,) = [record.manifest_path for record in definition.exports if record.name == INCOMPLETE_EXPORT]
        assert plans
        assert not {finding.code for finding in verify_deep(storage).findings} & {"plan-missing", "manifest-missing"}
        for path in (*plans, manifest):
            storage.delete(path)
        findings = {
            (finding.path, finding.code, finding.fix) for finding in operations.verify(Lakehouse(storage)).findings
        }
        assert findings >= {(path, "plan-missing", "purge") for path in plans}
        assert (manifest, "manifest-missing", "export or drop-export") in findings


@pytest.mark.soak
@kinds
def test_30_flips_truncations_deletions_and_swaps_are_reported(kind: str) -> None:
    check_flips(kind, 30, 2)
    check_truncations(kind, 30, 2)
    if kind not in DELETABLE:
        check_deletions(kind, 30, 2)
    if kind not in IDENTICAL and len(paths_of_kind(kind, files_of_all_kinds())) > 1:
        check_swaps(kind, 30, 2)


# Intact lakehouses


def check_intact(seed: int) -> None:
    """Check that a lakehouse has no findings after random operations, commits of another program and cleanup."""
    rng = random.Random(seed)
    with memory_lake(generated_files(seed)) as storage:
        lake = Lakehouse(storage)
        for _ in range(3):
            random_step(lake, rng)
        if rng.random() < 0.5:
            operations.compact(lake)
        if rng.random() < 0.5:
            foreign_commit(lake)
        clock = AgingStorage(storage, storage.now_ms())
        aging = Aging(Lakehouse(clock), clock)
        if rng.random() < 0.6:
            aging.clean_up()
        report = operations.verify(aging.lake, deep=True)
        assert [finding for finding in report.findings if finding.code not in CLOCK_CODES] == [], seed
        assert operations.verify(aging.lake, deep=True, incremental=True).is_clean


def foreign_commit(lake: Lakehouse) -> None:
    """Commit like an engine that preserves schema metadata and unknown fields but writes no checksums."""
    latest = lake.snapshot()
    path = lake.files.roots.path(latest.version + 1)
    before = decode_node(lake.storage.read(latest.location), latest.location)
    changes = {CREATED_AT_MILLIS: str(before.created_at_ms + 1), PREVIOUS_ROOT: latest.location}
    data = encode_node(replace(before, system={**before.system, **changes}), latest.definition.order)
    schema = pa.ipc.open_file(lake.storage.read(latest.location)).schema
    table = pa.ipc.open_file(data).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_table(table)
    lake.storage.create(path, bytes(sink.getvalue()))
    lake.storage.write(HINT_PATH, str(latest.version + 1).encode())


def test_intact_lakehouses_have_no_findings() -> None:
    for seed in range(5):
        check_intact(seed)


@pytest.mark.soak
def test_100_intact_lakehouses_have_no_findings() -> None:
    for seed in range(100, 200):
        check_intact(seed)


# Pointers


@pytest.mark.parametrize("kind", ["node", "table definition"])
def test_flipped_bit_in_pointer_is_reported_for_its_node(kind: str) -> None:
    """This includes nodes of other programs, which have no checksum."""
    with memory_lake(generated_files(1)) as storage:
        lake = Lakehouse(storage)
        latest = lake.snapshot()
        if kind == "node":
            location, node = latest.location, latest.root
            original_path, changed_paths = damage_last_pointer(list(node.children))
            change = {"children": changed_paths}
        else:
            key = latest.keys.table_key("last", "t3")
            location = holder_of(latest.files.nodes, latest.root, latest.location, key)
            node = decode_node(storage.read(location), location)
            values_by_key = dict(zip(node.keys, node.values, strict=True))
            original_path, changed_paths = damage_last_pointer([node.buffer.get(key) or values_by_key[key]])
            assert key in node.buffer or key in values_by_key
            if key in node.buffer:
                change = {"buffer": {**node.buffer, key: changed_paths[0]}}
            else:
                change = {"values": [*({**values_by_key, key: changed_paths[0]}).values()]}
        data = encode_node(replace(node, **change), lake.snapshot().definition.order)
        storage.write(location, data)
        findings = verify_deep(storage).findings
        assert (location, "pointer-damaged") in {(finding.path, finding.code) for finding in findings}
        assert not {changed_paths[-1], original_path} & {
            finding.path for finding in findings if finding.severity == "error"
        }
        plan = operations.plan_repair(Lakehouse(storage))
        assert "pointer-damaged" in {finding.code for finding in plan.remaining}


def damage_last_pointer(pointers: list[str]) -> tuple[str, list[str]]:
    """Return the last pointer, and all pointers with a changed digit in the UUID of the last pointer."""
    original = pointers[-1]
    return original, [*pointers[:-1], change_digit(original)]


def change_digit(path: str) -> str:
    return f"{path[:-10]}{'0' if path[-10] != '0' else '1'}{path[-9:]}"


def test_readers_report_damaged_pointer() -> None:
    with memory_lake(generated_files(1)) as storage:
        lake = Lakehouse(storage)
        path = new_node_path()
        with pytest.raises(FileMissingError):
            lake.snapshot().table_at(change_digit(path))
        with pytest.raises(FileMissingError) as raised:
            lake.snapshot().table_at(path)
        assert "pointer" not in raised.value.message


# Files without checksums


def test_deep_verify_reports_files_without_checksum() -> None:
    with memory_lake(generated_files(1)) as storage:
        lake = Lakehouse(storage)
        report_before = verify_deep(storage)
        assert f"{report_before.checked_files} files compared with their checksums" in str(report_before.table().title)
        nodes = [node.path for node in nodes_of(lake)][:2]
        for path in nodes:
            storage.write(path, encode_node(decode_node(storage.read(path), path), lake.snapshot().definition.order))
        report = verify_deep(storage)
        assert report.findings == report_before.findings
        assert report.without_checksum["node"] == len(nodes)
        assert "2 nodes without a checksum" in str(report.table().title).replace(", ", " ").replace("  ", " ")
        assert report.to_dict()["without_checksum"]["node"] == len(nodes)
        assert report.checked_files == report_before.checked_files - len(nodes)
        shallow_report = operations.verify(Lakehouse(storage))
        assert (shallow_report.checked_files, shallow_report.without_checksum) == (0, {})
