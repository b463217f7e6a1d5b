"""Test that a deep verify without a record finds any damage to a catalog file that this library wrote."""

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
from tests.operations.generated_lakes import generated, memory_lake, nodes_of, random_step
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import FileMissingError, StoragePermissionError, VersionExpiredError
from trinitylake_ops.format.file_names import HINT_PATH, new_node_path
from trinitylake_ops.format.keys import CREATED_AT_MILLIS, PREVIOUS_ROOT
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.operations import VerifyReport
from trinitylake_ops.storage import Storage
from trinitylake_ops.tree.shape import holder_of

pytestmark = pytest.mark.usefixtures("fixed_requests")

#: What each kind of file is called.
KINDS = {
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
#: Files that are not needed: an expired lease, a transaction whose loss its program detects, a number that the
#: lakehouse definition records as well, and owner files of defined tables, which other programs do not write.
EXPENDABLE = {"lease", "saved transaction", "orphan barrier", "owner"}
SLOW_CLOCK = {"time-in-future"}
EXPORTS = ("first", "second", "third")
UNFINISHED = "unfinished"
#: They say the same in every folder of a lakehouse.
ALIKE = {"owner"}


def deep(storage: Storage) -> VerifyReport:
    return operations.verify(Lakehouse(storage), deep=True)


@functools.cache
def files_of_all_kinds() -> dict[str, bytes]:
    """Return all files of a lakehouse in which all operations ran."""
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
        broken = Lakehouse(
            FaultyStorage(aging.clock, [fail(1, StoragePermissionError, kind="create", path_part="-node-")])
        )
        with pytest.raises(StoragePermissionError):
            operations.plan_export(broken, UNFINISHED, "partial").execute()
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
        reachable: set[str] = set()
        for version in (*range(lake.latest_version() + 1), *EXPORTS):
            with contextlib.suppress(VersionExpiredError):
                reachable.update(entries(lake, version).values())
    return {path for path in files if re.fullmatch(KINDS["table definition"], path)} - reachable


def of_kind(kind: str, files: dict[str, bytes]) -> list[str]:
    file = sorted(path for path in files if re.fullmatch(KINDS[kind], path))
    return [path for path in file if path not in superseded_definitions()]


def is_named(path: str, report: VerifyReport) -> bool:
    return any(path == finding.path or path in finding.message for finding in report.findings)


def check_found(kind: str, path: str, data: bytes | None) -> None:
    """Assert that a deep verify reports a file that gets these bytes, or is deleted."""
    with memory_lake(files_of_all_kinds()) as storage:
        storage.delete(path) if data is None else storage.write(path, data)
        report = deep(storage)
        assert is_named(path, report), (kind, path, report.findings)


def flips(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        path = rng.choice(of_kind(kind, files))
        data = bytearray(files[path])
        place = rng.randrange(len(data))
        data[place] ^= 1 << rng.randrange(8)
        check_found(kind, path, bytes(data))


def truncations(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        path = rng.choice(of_kind(kind, files))
        check_found(kind, path, files[path][: rng.randrange(len(files[path]))])


def deletions(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        check_found(kind, rng.choice(of_kind(kind, files)), None)


def swaps(kind: str, count: int, seed: int) -> None:
    files, rng = files_of_all_kinds(), random.Random(f"{kind}{seed}")
    for _ in range(count):
        first, other = rng.sample(of_kind(kind, files), 2)
        check_found(kind, first, files[other])


kinds = pytest.mark.parametrize("kind", KINDS)


def test_files_of_every_kind_have_checksums() -> None:
    files = files_of_all_kinds()
    for kind in KINDS:
        assert of_kind(kind, files), kind
    known = [path for kind in KINDS for path in of_kind(kind, files)]
    assert {path for path in files if not path.startswith("tables/")} <= {*known, *superseded_definitions()}
    with memory_lake(files) as storage:
        report = deep(storage)
        assert [finding for finding in report.findings if finding.severity == "error"] == []
        assert set(report.without_checksum) <= {"metadata file", "manifest list", "manifest", "data file"}
        assert report.checked_files >= len(known) - 1, "only the hint has no checksum; its number is compared"


@kinds
def test_few_flips_truncations_deletions_and_swaps_are_found(kind: str) -> None:
    flips(kind, 4, 1)
    truncations(kind, 2, 1)
    if kind not in EXPENDABLE:
        deletions(kind, 1, 1)
    if kind not in ALIKE and len(of_kind(kind, files_of_all_kinds())) > 1:
        swaps(kind, 2, 1)


def test_lost_operation_files_are_found_at_once() -> None:
    """A shallow verify finds missing plan files of undeletable versions and manifests of incomplete exports."""
    with memory_lake(files_of_all_kinds()) as storage:
        definition = Lakehouse(storage).snapshot().definition
        plans = {batch.plan_path for batch in definition.expirations if batch.plan_path}
        (manifest,) = [record.manifest_path for record in definition.exports if record.name == UNFINISHED]
        assert plans
        assert not {finding.code for finding in deep(storage).findings} & {"plan-missing", "manifest-missing"}
        for path in (*plans, manifest):
            storage.delete(path)
        findings = {
            (finding.path, finding.code, finding.fix) for finding in operations.verify(Lakehouse(storage)).findings
        }
        assert findings >= {(path, "plan-missing", "purge") for path in plans}
        assert (manifest, "manifest-missing", "export or drop-export") in findings


@pytest.mark.soak
@kinds
def test_30_flips_truncations_deletions_and_swaps_are_found(kind: str) -> None:
    flips(kind, 30, 2)
    truncations(kind, 30, 2)
    if kind not in EXPENDABLE:
        deletions(kind, 30, 2)
    if kind not in ALIKE and len(of_kind(kind, files_of_all_kinds())) > 1:
        swaps(kind, 30, 2)


# Healthy lakehouses


def check_healthy(seed: int) -> None:
    """Assert that a randomly used, exported, aged and cleaned lakehouse has no findings."""
    rng = random.Random(seed)
    with memory_lake(generated(seed)) as storage:
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
        assert [finding for finding in report.findings if finding.code not in SLOW_CLOCK] == [], seed
        assert operations.verify(aging.lake, deep=True, incremental=True).is_clean


def foreign_commit(lake: Lakehouse) -> None:
    """Commit like an engine that preserves schema metadata and unknown fields but writes no checksums."""
    latest = lake.snapshot()
    path = lake.files.roots.path(latest.version + 1)
    before = decode_node(lake.storage.read(latest.location), latest.location)
    changes = {CREATED_AT_MILLIS: str(before.created_at_ms + 1), PREVIOUS_ROOT: latest.location}
    data = encode_node(replace(before, system={**before.system, **changes}), latest.definition.order)
    carried = pa.ipc.open_file(lake.storage.read(latest.location)).schema
    table = pa.ipc.open_file(data).read_all()
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, carried) as writer:
        writer.write_table(table)
    lake.storage.create(path, bytes(sink.getvalue()))
    lake.storage.write(HINT_PATH, str(latest.version + 1).encode())


def test_intact_lakehouses_have_no_findings() -> None:
    for seed in range(5):
        check_healthy(seed)


@pytest.mark.soak
def test_100_intact_lakehouses_have_no_findings() -> None:
    for seed in range(100, 200):
        check_healthy(seed)


# Pointers


@pytest.mark.parametrize("kind", ["node", "table definition"])
def test_flipped_bit_in_pointer_is_reported_for_its_node(kind: str) -> None:
    """This includes nodes of other programs, which have no checksum."""
    with memory_lake(generated(1)) as storage:
        lake = Lakehouse(storage)
        latest = lake.snapshot()
        if kind == "node":
            location, node = latest.location, latest.root
            original, changed = damaged(list(node.children))
            change = {"children": changed}
        else:
            key = latest.keys.table_key("last", "t3")
            location = holder_of(latest.files.nodes, latest.root, latest.location, key)
            node = decode_node(storage.read(location), location)
            by_key = dict(zip(node.keys, node.values, strict=True))
            original, changed = damaged([node.buffer.get(key) or by_key[key]])
            assert key in node.buffer or key in by_key
            if key in node.buffer:
                change = {"buffer": {**node.buffer, key: changed[0]}}
            else:
                change = {"values": [*({**by_key, key: changed[0]}).values()]}
        data = encode_node(replace(node, **change), lake.snapshot().definition.order)
        storage.write(location, data)
        findings = deep(storage).findings
        assert (location, "pointer-damaged") in {(finding.path, finding.code) for finding in findings}
        assert not {changed[-1], original} & {finding.path for finding in findings if finding.severity == "error"}
        plan = operations.plan_repair(Lakehouse(storage))
        assert "pointer-damaged" in {row.code for row in plan.remaining}


def damaged(pointers: list[str]) -> tuple[str, list[str]]:
    """Return the last of these pointers, and all of them with another digit in its UUID."""
    original = pointers[-1]
    return original, [*pointers[:-1], misspelt(original)]


def misspelt(path: str) -> str:
    return f"{path[:-10]}{'0' if path[-10] != '0' else '1'}{path[-9:]}"


def test_readers_report_damaged_pointer() -> None:
    with memory_lake(generated(1)) as storage:
        lake = Lakehouse(storage)
        path = new_node_path()
        with pytest.raises(FileMissingError):
            lake.snapshot().table_at(misspelt(path))
        with pytest.raises(FileMissingError) as caught:
            lake.snapshot().table_at(path)
        assert "pointer" not in caught.value.message


# What had no checksum


def test_deep_verify_reports_files_without_checksum() -> None:
    with memory_lake(generated(1)) as storage:
        lake = Lakehouse(storage)
        report_before = deep(storage)
        assert f"{report_before.checked_files} files compared with their checksums" in str(report_before.table().title)
        nodes = [node.path for node in nodes_of(lake)][:2]
        for path in nodes:
            storage.write(path, encode_node(decode_node(storage.read(path), path), lake.snapshot().definition.order))
        report = deep(storage)
        assert report.findings == report_before.findings
        assert report.without_checksum["node"] == len(nodes)
        assert "2 nodes without a checksum" in str(report.table().title).replace(", ", " ").replace("  ", " ")
        assert report.to_dict()["without_checksum"]["node"] == len(nodes)
        assert report.checked_files == report_before.checked_files - len(nodes)
        shallow = operations.verify(Lakehouse(storage))
        assert (shallow.checked_files, shallow.without_checksum) == (0, {})
