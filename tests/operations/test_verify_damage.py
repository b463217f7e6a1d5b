"""Test that every kind of damage to random lakehouses is reported with the right path."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.clock import ClockStorage
from tests.lakes import check_lake
from tests.operations.aging import LONG_MS
from tests.operations.changes import node_bytes, node_columns, small_sizes
from tests.operations.generated_lakes import (
    ReachedNode,
    definitions_of,
    generated_files,
    memory_lake,
    nodes_of,
    random_step,
)
from tests.operations.test_folding_file_systems import RemoteExecutor
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, TrinityLakeError
from trinitylake_ops.format.definitions import NamespaceDef, TableDef
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.operations import Finding
from trinitylake_ops.operations.executor import LOCAL, Executor
from trinitylake_ops.storage import MemoryStorage, drop_memory_root

SEEDS = st.integers(0, 11)
#: Findings that smaller size settings cause in an intact tree.
TREE_CODES = {"tree-invariant", "key-malformed", "namespace-missing"}
Columns = dict[str, list[str | None]]


def verify_errors(storage: MemoryStorage) -> list[Finding]:
    """Verify without caches and return the errors."""
    findings = operations.verify(Lakehouse(storage)).findings
    return [finding for finding in findings if finding.severity == "error"]


def assert_reported(storage: MemoryStorage, path: str, *codes: str) -> None:
    reported = verify_errors(storage)
    assert any(finding.path == path and finding.code in codes for finding in reported), (path, codes, reported)


def inner_nodes(lake: Lakehouse) -> list[ReachedNode]:
    return [node for node in nodes_of(lake) if not node.node.is_leaf]


def nodes_below_roots(lake: Lakehouse) -> list[ReachedNode]:
    return [node for node in nodes_of(lake) if node.visited.depth]


def rewrite_node(storage: MemoryStorage, path: str, change: Callable[[Columns, int], None]) -> None:
    """Change the rows of a node. ``change`` gets the node's columns and the number of the first pointer row."""
    columns = node_columns(storage.read(path))
    change(columns, columns["key"].index(None))
    storage.write(path, node_bytes(columns))


@given(SEEDS, st.data())
def test_truncated_file_is_reported(seed: int, data: st.DataObject) -> None:
    """The exception is a definition that was truncated between two fields, which is a valid smaller definition."""
    with memory_lake(generated_files(seed)) as storage:
        lake = Lakehouse(storage)
        path = data.draw(st.sampled_from([*definitions_of(lake), *(node.path for node in nodes_of(lake))]))
        data_before = storage.read(path)
        size_bytes = data.draw(st.integers(0, len(data_before) - 1))
        storage.write(path, data_before[:size_bytes])
        reported = verify_errors(storage)
        if path.endswith(".arrow"):
            assert path in {finding.path for finding in reported}
        elif "_lakehouse_def_" in path and size_bytes:
            # Definitions differ, so verify cannot know which of them is damaged.
            assert {finding.code for finding in reported} <= {
                "definition-unreadable",
                "definition-changed",
                *TREE_CODES,
            }
        else:
            assert {finding.path for finding in reported} <= {path}
            assert reported or is_definition(path, data_before[:size_bytes])


def is_definition(path: str, data: bytes) -> bool:
    """Whether bytes decode to a non-empty definition."""
    definition_class = TableDef if "-table-" in path else NamespaceDef
    try:
        return bool(data) and bool(definition_class.from_bytes(data, path))
    except CorruptFileError:
        return False


@given(SEEDS, st.data())
def test_missing_file_is_reported(seed: int, data: st.DataObject) -> None:
    with memory_lake(generated_files(seed)) as storage:
        lake = Lakehouse(storage)
        latest = root_path(lake.latest_version())  # if it is missing, the previous version is the latest
        nodes = [node.path for node in nodes_of(lake) if node.path != latest]
        tables = [info.path for info in storage.list("tables/") if info.path.endswith((".parquet", ".avro"))]
        path = data.draw(st.sampled_from([*definitions_of(lake), *nodes, *tables]))
        storage.delete(path)
        codes = ("node-missing", "definition-unreadable", "root-missing", "table-file-missing", "table-unreadable")
        assert_reported(storage, path, *codes)


@given(SEEDS, st.data(), st.sampled_from([-2, -1, 1, 2]))
def test_wrong_key_count_is_reported_or_equivalent(seed: int, data: st.DataObject, off_by: int) -> None:
    """If the count of a leaf is too low by one, the last key is decoded as a message, which maps the same keys to the
    same definitions.
    """
    with memory_lake(generated_files(seed)) as storage:
        node = data.draw(st.sampled_from(nodes_of(Lakehouse(storage))))
        before = node.node

        def change(columns: Columns, _first: int) -> None:
            row = columns["key"].index("n_keys")
            columns["pvalue"][row] = str(len(before.keys) + off_by)

        rewrite_node(storage, node.path, change)
        try:
            after = decode_node(storage.read(node.path), node.path)
        except CorruptFileError:
            assert_reported(storage, node.path, "node-corrupt", "root-corrupt")
            return
        entries = [
            dict(zip(node.keys, node.values, strict=True)) | node.buffer for node in (before, after) if node.is_leaf
        ]
        assert verify_errors(storage) or entries[0] == entries[1]


@given(SEEDS, st.data())
def test_unsorted_keys_are_reported(seed: int, data: st.DataObject) -> None:
    with memory_lake(generated_files(seed)) as storage:
        node = data.draw(st.sampled_from([node for node in nodes_of(Lakehouse(storage)) if len(node.node.keys) > 1]))

        def change(columns: Columns, first: int) -> None:
            keys = columns["key"]
            keys[first + 1], keys[first + 2] = keys[first + 2], keys[first + 1]

        rewrite_node(storage, node.path, change)
        assert_reported(storage, node.path, "node-corrupt", "root-corrupt")


@given(SEEDS, st.data())
def test_swapped_children_are_reported(seed: int, data: st.DataObject) -> None:
    with memory_lake(generated_files(seed)) as storage:
        node = data.draw(st.sampled_from(inner_nodes(Lakehouse(storage))))
        index = data.draw(st.integers(0, len(node.node.children) - 2))

        def change(columns: Columns, first: int) -> None:
            children = columns["pnode"]
            left, right = first + index, first + index + 1
            children[left], children[right] = children[right], children[left]

        rewrite_node(storage, node.path, change)
        reported = [finding for finding in verify_errors(storage) if finding.code == "tree-invariant"]
        swapped_paths = {node.path, node.node.children[index], node.node.children[index + 1]}
        assert reported
        assert {finding.path for finding in reported} & swapped_paths, reported


@given(SEEDS, st.data())
def test_key_outside_range_of_parent_is_reported(seed: int, data: st.DataObject) -> None:
    with memory_lake(generated_files(seed)) as storage:
        nodes = [node for node in nodes_below_roots(Lakehouse(storage)) if node.node.keys]
        node = data.draw(st.sampled_from(nodes))
        is_too_low = node.visited.lower is not None

        def change(columns: Columns, first: int) -> None:
            row = first + 1 if is_too_low else first + len(node.node.keys)
            columns["key"][row] = "!" if is_too_low else "~"

        rewrite_node(storage, node.path, change)
        reported = [finding for finding in verify_errors(storage) if finding.code in ("tree-invariant", "node-corrupt")]
        assert node.path in {finding.path for finding in reported}, reported


@given(SEEDS, st.data())
def test_missing_definition_is_reported(seed: int, data: st.DataObject) -> None:
    with memory_lake(generated_files(seed)) as storage:
        lake = Lakehouse(storage)
        node = data.draw(st.sampled_from([node for node in nodes_of(lake) if node.node.keys]))
        row = data.draw(st.integers(0, len(node.node.keys) - 1))
        key = node.node.keys[row]
        current_location = lake.snapshot(node.version).entry(key)
        assume(current_location == node.node.values[row])  # a newer message may replace the value

        def change(columns: Columns, first: int) -> None:
            columns["pvalue"][first + 1 + row] = "missing/file.binpb"

        rewrite_node(storage, node.path, change)
        assert_reported(storage, "missing/file.binpb", "definition-unreadable")


@settings(max_examples=20)
@given(SEEDS, st.data())
def test_broken_chain_is_reported(seed: int, data: st.DataObject) -> None:
    with memory_lake(generated_files(seed)) as storage:
        version = data.draw(st.integers(1, Lakehouse(storage).latest_version()))
        invalid_root = data.draw(st.sampled_from([root_path(version + 1), root_path(version), "nonsense", ""]))

        def change(columns: Columns, _first: int) -> None:
            columns["pvalue"][columns["key"].index("previous_root")] = invalid_root

        rewrite_node(storage, root_path(version), change)
        assert_reported(storage, root_path(version), "chain-broken")


@settings(max_examples=20)
@given(SEEDS, st.binary(max_size=12))
def test_wrong_hint_is_reported(seed: int, hint: bytes) -> None:
    with memory_lake(generated_files(seed)) as storage:
        assume(hint.strip() != storage.read(HINT_PATH))
        storage.write(HINT_PATH, hint)
        (finding,) = operations.verify(Lakehouse(storage)).findings
        assert (finding.severity, finding.code, finding.path) == ("warning", "hint-wrong", HINT_PATH)


N_WALKS = 72
N_STEPS = 14


@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 8))])
def test_1000_intact_lakehouses_have_no_findings(part: int) -> None:
    """Verify 72 lakehouses after each of 14 random steps: 1,008 states, an eighth of them for each parameter."""
    n_verified = 0
    for seed in range(part, N_WALKS, 8):
        rng = random.Random(seed)
        order = rng.choice([3, 4, 5, 8, 16])
        with memory_lake({}) as storage:
            lake = Lakehouse.create(storage.root, storage=storage, order=order, **small_sizes(order))
            for _ in range(N_STEPS):
                random_step(lake, rng)
                report = operations.verify(Lakehouse(storage), incremental=True)
                assert report.findings == (), (seed, report)
                assert report.damaged_versions == ""
                n_verified += 1
            report = operations.verify(Lakehouse(storage), deep=True)
            assert report.findings == (), (seed, report)
            check_lake(lake)
    assert n_verified == N_WALKS // 8 * N_STEPS


@settings(max_examples=30)
@given(SEEDS, st.booleans(), st.data())
def test_all_executors_report_the_same_findings(seed: int, is_incremental: bool, data: st.DataObject) -> None:
    """The number of checked files is also equal: files that are read ahead below a damaged file do not count."""

    def report(executor: Executor) -> dict[str, object]:
        aged_storage = ClockStorage(storage, storage.now_ms() + LONG_MS)
        result = operations.verify(
            Lakehouse(aged_storage), deep=True, incremental=is_incremental, executor=executor
        ).to_dict()
        if (record := result.pop("record_path")) is not None:
            storage.delete(record)
        return {**result, "cost": None, "findings": sorted(result["findings"], key=str)}

    with memory_lake(generated_files(seed)) as storage:
        nodes = inner_nodes(Lakehouse(storage))
        if data.draw(st.booleans()):
            rewrite_node(storage, data.draw(st.sampled_from(nodes)).path, _repeat_first_child)
        for path in data.draw(st.lists(st.sampled_from(sorted(generated_files(seed))), max_size=3, unique=True)):
            if data.draw(st.booleans()):
                storage.delete(path)
            else:
                storage.write(path, data.draw(st.sampled_from([b"", b"damaged", storage.read(path)[:-9]])))
        try:
            expected = report(LOCAL)
        except TrinityLakeError as error:
            with pytest.raises(type(error)):
                report(RemoteExecutor())
        else:
            assert report(RemoteExecutor()) == expected


def _repeat_first_child(columns: Columns, first: int) -> None:
    columns["pnode"][first:] = [columns["pnode"][first]] * len(columns["pnode"][first:])


@pytest.mark.parametrize("is_missing", [False, True])
def test_damaged_settings_after_damaged_table_are_reported(is_missing: bool) -> None:
    storage = MemoryStorage(f"memory://settings-{is_missing}/")
    lake = Lakehouse.create(storage.root, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        txn.create_table("ns", "t", TableDef())
    table_path = str(lake.snapshot().entry(lake.snapshot().keys.table_key("ns", "t")))
    lake.alter_definition(txn_ttl_millis=3_600_000)
    settings_path = lake.snapshot().definition_location
    for path in (table_path, settings_path):
        storage.delete(path)
        if not is_missing:
            storage.create(path, b"\xff")
    report = operations.verify(Lakehouse(storage))
    assert {finding.path for finding in report.findings} >= {table_path, settings_path}
    assert report.damaged_objects == ()
    drop_memory_root(storage.root)
