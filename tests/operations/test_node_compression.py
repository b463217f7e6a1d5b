"""Test compressed nodes: every commit and operation uses the setting of its version."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.lakes import Lakes, entries, listed, objects, table
from tests.operations.changes import create, drop, make_untidy, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.format.arrow_ipc import decompressed_bytes
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.format.node_file import decode_node, encode_node
from trinitylake_ops.transaction.publish import CommitResolution
from trinitylake_ops.tree.shape import walk

codecs = pytest.mark.parametrize("codec", ["lz4", "zstd"])


def node_paths(lake: Lakehouse) -> set[str]:
    return {path for path in listed(lake.storage) if path.endswith(".arrow")}


def assert_written_with(lake: Lakehouse, codec: str, paths: set[str]) -> None:
    """Check that these nodes are encoded with a codec and within the size limit."""
    definition = lake.snapshot().definition
    n_compressed = 0
    for path in paths:
        data = lake.storage.read(path)
        assert data == encode_node(decode_node(data, path), definition.order, codec, path), path
        assert len(data) <= definition.node_file_max_size_bytes
        n_compressed += decompressed_bytes(data) > 0
    assert paths
    assert (n_compressed > 0) == bool(codec)


def with_codec(lake: Lakehouse, codec: str) -> Lakehouse:
    """Return the lakehouse with a codec in its latest definition, as another program could write it."""
    snapshot = Lakehouse(lake.storage).snapshot()
    definition = replace(snapshot.definition, node_compression=codec)
    lake.storage.write(snapshot.definition_location, definition.to_bytes())
    return Lakehouse(lake.storage)


@codecs
def test_operations_write_compressed_nodes(lakes: Lakes, codec: str) -> None:
    lake = lakes.memory(order=4, node_compression=codec, **small_sizes(4))
    make_untidy(lake)
    before, ids, latest = entries(lake), objects(lake.snapshot()), lake.latest_version()
    assert operations.plan_export(lake, "kept").execute().version == latest
    drop(lake, "a")
    assert {str(change.namespace) for change in lake.diff("kept", lake.latest_version())} == {"a"}
    operations.rollback(lake, "kept")
    assert entries(lake) == entries(lake, "kept") == before
    report = operations.compact(lake)
    assert report.before.messages > report.after.messages == 0
    snapshot = lake.snapshot()
    paths = [node.location for node in walk(lake.files.nodes, snapshot.root, snapshot.location)]
    assert report.after.file_bytes == sum(len(lake.storage.read(path)) for path in paths), (
        "the sizes of compressed files"
    )
    assert objects(lake.snapshot()) == ids
    resolution = lake.resolve_commit(lake.latest_version() + 1, str(uuid.uuid4()), fence=True)
    assert resolution == CommitResolution.LOST
    assert [info.operation for info in lake.history(3)] == ["fence", "compact", "rollback"]
    assert operations.verify(lake).is_clean
    assert_written_with(lake, codec, node_paths(lake))


@codecs
def test_bulk_load_writes_compressed_nodes(lakes: Lakes, codec: str) -> None:
    lake = lakes.memory(node_compression=codec, order=32)
    with lake.transaction() as txn:
        txn.create_namespace("ns")
        for number in range(1_000):
            txn.create_table("ns", f"t{number}", table())
    snapshot = lake.snapshot()
    paths = [node.location for node in walk(lake.files.nodes, snapshot.root, "root") if node.depth > 0]
    sizes_bytes = [len(lake.storage.read(path)) for path in paths]
    assert len(sizes_bytes) > 30
    assert max(sizes_bytes) < 6_000, "an eighth of the size of keys and locations"
    assert_written_with(lake, codec, node_paths(lake))


def test_changed_codec_applies_from_its_version(lakes: Lakes) -> None:
    lake = lakes.memory(order=4, **small_sizes(4))
    make_untidy(lake)
    txn = lake.transaction()
    txn.create_namespace("late")
    uncompressed = node_paths(lake)
    version = lake.alter_definition(node_compression="zstd")
    assert_written_with(lake, "", uncompressed)
    assert node_paths(lake) - uncompressed == {root_path(version)}
    assert decompressed_bytes(lake.storage.read(root_path(version))) > 0
    assert txn.commit() == version + 1, "it started with the old setting, and commits with the new one"
    create(lake, "d", *(f"t{number}" for number in range(12)))
    drop(lake, "a", "t1", "t2")
    compressed = node_paths(lake) - uncompressed
    assert_written_with(lake, "zstd", compressed)
    paths = {node.location for node in walk(lake.files.nodes, lake.snapshot().root, root_path(lake.latest_version()))}
    assert paths & uncompressed, "the tree contains nodes of both kinds"
    assert paths & compressed
    assert operations.verify(lake).is_clean
    version = lake.alter_definition(node_compression="")
    create(lake, "e", "t1", "t2", "t3")
    assert node_paths(lake) - uncompressed - compressed > {root_path(version)}
    assert_written_with(lake, "", node_paths(lake) - uncompressed - compressed)
    assert_written_with(lake, "", uncompressed)
    operations.rollback(lake, version - 1)
    assert entries(lake) == entries(lake, version - 1)
    assert operations.verify(lake).is_clean


def test_transaction_that_changes_codec_uses_it_for_all_nodes(lakes: Lakes) -> None:
    lake = lakes.memory(order=4, **small_sizes(4))
    uncompressed = node_paths(lake)
    with lake.transaction() as txn:
        txn.alter_definition(replace(txn.definition, node_compression="zstd"))
        txn.create_namespace("ns")
        for number in range(20):
            txn.create_table("ns", f"t{number}", table())
    assert len(node_paths(lake)) > 5
    assert_written_with(lake, "zstd", node_paths(lake) - uncompressed)


def test_compaction_is_not_needed_for_changed_codec(lakes: Lakes) -> None:
    lake = lakes.memory(order=4, **small_sizes(4))
    make_untidy(lake)
    operations.compact(lake)
    lake.alter_definition(node_compression="zstd")
    files = listed(lake.storage)
    assert not operations.compact(lake).has_changed
    assert listed(lake.storage) == files


def test_unknown_codec_is_rejected(lakes: Lakes) -> None:
    storage = lakes.storage("new")
    with pytest.raises(InvalidDefinitionError, match="node_compression"):
        Lakehouse.create(storage.root, storage=storage, node_compression="gzip")
    assert listed(storage) == set()
    lake = lakes.memory()
    with pytest.raises(InvalidDefinitionError, match="node_compression"):
        lake.alter_definition(node_compression="gzip")
    assert lake.latest_version() == 0


WRITERS: dict[str, Callable[[Lakehouse], object]] = {
    "commit": lambda lake: create(lake, "new", "t"),
    "alter definition": lambda lake: lake.alter_definition(properties={"a": "b"}),
    "rollback": lambda lake: operations.rollback(lake, 1),
    "compact": operations.compact,
    "export": lambda lake: operations.plan_export(lake, "copy").execute(),
    "fence": lambda lake: lake.resolve_commit(lake.latest_version() + 1, str(uuid.uuid4()), fence=True),
}


@pytest.fixture
def unsupported_lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse with a codec that this package does not support."""
    lake = lakes.memory(order=4, **small_sizes(4))
    make_untidy(lake)
    return with_codec(lake, "brotli")


def test_lakehouse_with_unknown_codec_is_readable(unsupported_lake: Lakehouse) -> None:
    latest = unsupported_lake.latest_version()
    assert unsupported_lake.snapshot().definition.node_compression == "brotli"
    assert len(objects(unsupported_lake.snapshot())) == 3 + 12 + 2 + 12
    assert unsupported_lake.diff(1, latest)
    assert len(list(unsupported_lake.history())) == latest + 1
    assert operations.verify(unsupported_lake).is_clean


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())
def test_writes_with_unknown_codec_are_rejected(
    unsupported_lake: Lakehouse, write: Callable[[Lakehouse], object]
) -> None:
    files = listed(unsupported_lake.storage)
    with pytest.raises(InvalidDefinitionError, match="node_compression"):
        write(unsupported_lake)
    assert listed(unsupported_lake.storage) == files


def test_lakehouse_is_writable_after_codec_is_corrected(unsupported_lake: Lakehouse) -> None:
    before = node_paths(unsupported_lake)
    version = unsupported_lake.alter_definition(node_compression="zstd")
    create(unsupported_lake, "new", "t")
    assert node_paths(unsupported_lake) - before >= {root_path(version), root_path(version + 1)}
    assert_written_with(unsupported_lake, "zstd", node_paths(unsupported_lake) - before)


def test_commit_fails_after_concurrent_change_to_unknown_codec(lakes: Lakes) -> None:
    lake = lakes.memory(order=4, **small_sizes(4))
    txn = lake.transaction()
    txn.create_namespace("late")
    Lakehouse(lake.storage).alter_definition(properties={"a": "b"})
    with_codec(lake, "brotli")
    files = listed(lake.storage)
    with pytest.raises(InvalidDefinitionError):
        txn.commit()
    assert listed(lake.storage) == files
