"""A stored lakehouse in the current layout, which must stay readable after changes to the format code."""

from __future__ import annotations

import shutil
from itertools import product
from pathlib import Path

import pytest

from tests.lakes import DATA, Lakes, check_version, expected_objects, listed, objects, table
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import VersionNotFoundError
from trinitylake_ops.format.file_names import root_path
from trinitylake_ops.storage import LocalStorage
from trinitylake_ops.tree.shape import walk
from trinitylake_ops.versions.history import Change

EXPECTED = expected_objects("small-lake")
VERSIONS = sorted(EXPECTED)


@pytest.fixture(scope="module")
def stored_lakehouse() -> Lakehouse:
    return Lakehouse.open(str(DATA / "small-lake"))


def test_fixture_covers_buffers_and_levels(stored_lakehouse: Lakehouse) -> None:
    assert stored_lakehouse.latest_version() == 3
    snapshot = stored_lakehouse.snapshot(2)
    visited = list(walk(stored_lakehouse.files.nodes, snapshot.root, snapshot.location))
    assert max(node.depth for node in visited) == 2, "the tree has three levels"
    assert None in snapshot.root.buffer.values(), "a deletion is buffered"
    for is_leaf in (False, True):
        assert any(node.node.buffer for node in visited if node.depth > 0 and node.node.is_leaf == is_leaf)
    assert stored_lakehouse.snapshot(3).root.system["rollback_from_root"] == root_path(2)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_readable(stored_lakehouse: Lakehouse, version: int) -> None:
    created_at_ms, expected = EXPECTED[version]
    snapshot = check_version(stored_lakehouse, version)
    assert objects(snapshot).keys() == expected
    assert snapshot.created_at_ms == created_at_ms
    assert snapshot.definition.order == 4
    assert snapshot.namespaces() == sorted(name[0] for name in expected if len(name) == 1)


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_found_by_name(version: int) -> None:
    snapshot = Lakehouse.open(str(DATA / "small-lake")).snapshot(version)
    _, expected = EXPECTED[version]
    all_names = set().union(*(names for _, names in EXPECTED.values()))
    for name in [*sorted(all_names), ("ns9",), ("ns1", "t99")]:
        exists = snapshot.has_namespace(name[0]) if len(name) == 1 else snapshot.has_table(*name)
        assert exists == (name in expected), name


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_are_found_by_time(stored_lakehouse: Lakehouse, version: int) -> None:
    created_at_ms, _ = EXPECTED[version]
    assert stored_lakehouse.snapshot(timestamp=created_at_ms).version == version
    if version:
        assert stored_lakehouse.snapshot(timestamp=created_at_ms - 1).version == version - 1
    else:
        with pytest.raises(VersionNotFoundError):
            stored_lakehouse.snapshot(timestamp=created_at_ms - 1)


@pytest.mark.parametrize(("before", "after"), list(product(VERSIONS, VERSIONS)))
def test_diff_of_two_versions_lists_changes(stored_lakehouse: Lakehouse, before: int, after: int) -> None:
    old, new = _locations(stored_lakehouse, before), _locations(stored_lakehouse, after)
    expected = {
        Change("added" if name not in old else "removed" if name not in new else "changed", *name)
        for name in old.keys() | new.keys()
        if old.get(name) != new.get(name)
    }
    changes = stored_lakehouse.diff(before, after)
    assert set(changes) == expected
    assert len(changes) == len(expected)


def _locations(lake: Lakehouse, version: int) -> dict[tuple[str, ...], str]:
    snapshot = lake.snapshot(version)
    locations = {}
    for name in EXPECTED[version][1]:
        key = snapshot.keys.namespace_key(*name) if len(name) == 1 else snapshot.keys.table_key(*name)
        location = snapshot.entry(key)
        assert location is not None
        locations[name] = location
    return locations


def test_history_is_complete(stored_lakehouse: Lakehouse) -> None:
    infos = list(stored_lakehouse.history())
    assert [info.version for info in infos] == [3, 2, 1, 0]
    assert [info.rollback_from for info in infos] == [2, None, None, None]
    assert {info.commit_id for info in infos} == {None}, "another program wrote these versions"


def test_commits_to_a_copy_keep_earlier_versions(tmp_path: Path, lakes: Lakes) -> None:
    shutil.copytree(DATA / "small-lake", tmp_path / "copy")
    original = LocalStorage(f"file://{tmp_path}/copy/", fsync=False)
    files = {path: original.read(path) for path in listed(original)}
    lake = lakes.watch(Lakehouse.open(str(tmp_path / "copy"), {"fsync": "false"}))
    with lake.transaction(message="ours") as txn:
        txn.create_namespace("new")
        for number in range(20):
            txn.create_table("new", f"t{number}", table())
        txn.drop_namespace("ns0", cascade=True)
    assert txn.committed_version == 4
    added = {("new",), *(("new", f"t{number}") for number in range(20))}
    assert objects(lake.snapshot()).keys() == added
    root = lake.snapshot().root
    assert root.system["previous_root"] == root_path(3)
    assert "rollback_from_root" not in root.system
    for version in VERSIONS:
        assert objects(lake.snapshot(version)).keys() == EXPECTED[version][1]
    lake.close()
    changed = [path for path, data in files.items() if original.read(path) != data]
    assert changed == ["_latest_hint.txt"]


def test_objects_of_deep_tree_can_be_dropped(tmp_path: Path, lakes: Lakes) -> None:
    """The test commits to version 2 as if version 3 did not exist."""
    shutil.copytree(DATA / "small-lake", tmp_path / "copy")
    storage = LocalStorage(f"file://{tmp_path}/copy/", fsync=False)
    storage.delete(root_path(3))
    lake = lakes.watch(Lakehouse(storage))
    expected = set(EXPECTED[2][1])
    for name in sorted(expected, reverse=True):
        with lake.transaction() as txn:
            if len(name) == 1:
                txn.drop_namespace(*name)
            else:
                txn.drop_table(*name)
        expected.discard(name)
        assert objects(lake.snapshot()).keys() == expected
