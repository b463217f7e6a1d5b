"""A stored lakehouse in the earlier layout, which must stay readable and writable.

The layout has 64-digit ``.ipc`` roots, the columns ``key`` and ``value``, and no row without a key. New commits keep
the naming of roots, and write nodes in the current layout.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import uuid
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.lakes import (
    DATA,
    Lakes,
    check_version,
    entries,
    expected_objects,
    listed,
    local_storage,
    objects,
    reachable_paths,
    table,
)
from tests.processes import fork
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.cli import main
from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError, VersionNotFoundError
from trinitylake_ops.format.file_names import HINT_PATH, ROOT_NAMINGS, RootNaming, root_naming
from trinitylake_ops.format.node_file import decode_node
from trinitylake_ops.tree.shape import walk
from trinitylake_ops.versions.history import Change

FOLDER = DATA / "legacy-lake"
NAMING = RootNaming(64, ".ipc")
EXPECTED = expected_objects("legacy-lake")
VERSIONS = sorted(EXPECTED)
LATEST = VERSIONS[-1]


@pytest.fixture(scope="module")
def stored_lakehouse() -> Lakehouse:
    return Lakehouse.open(str(FOLDER))


@pytest.fixture
def copy(tmp_path: Path, lakes: Lakes) -> Lakehouse:
    """A copy that tests may change. All its versions are checked after the test."""
    shutil.copytree(FOLDER, tmp_path / "copy")
    return lakes.watch(Lakehouse.open(str(tmp_path / "copy"), {"fsync": "false"}))


def arrow(lake: Lakehouse, path: str) -> pa.Table:
    return pa.ipc.open_file(lake.storage.read(path)).read_all()


def test_fixture_has_earlier_layout(stored_lakehouse: Lakehouse) -> None:
    assert (stored_lakehouse.latest_version(), stored_lakehouse.files.roots.naming) == (LATEST, NAMING)
    tables = {version: arrow(stored_lakehouse, NAMING.path(version)) for version in VERSIONS}
    assert all(rows.schema.names == ["key", "value"] for rows in tables.values())
    assert all(rows["key"].null_count == 0 for rows in tables.values()), "no row without a key"
    assert len(stored_lakehouse.snapshot(2).root.keys) > 2 * stored_lakehouse.snapshot(2).definition.order, (
        "more keys than this package writes into a node"
    )


@pytest.mark.parametrize("version", VERSIONS)
def test_every_version_is_readable(stored_lakehouse: Lakehouse, version: int) -> None:
    created_at_ms, expected = EXPECTED[version]
    snapshot = check_version(stored_lakehouse, version)
    assert objects(snapshot).keys() == expected
    assert snapshot.created_at_ms == created_at_ms
    assert snapshot.location == NAMING.path(version)
    assert snapshot.definition.file_path_max_size_bytes == 100
    assert snapshot.namespaces() == sorted(name[0] for name in expected if len(name) == 1)
    all_names = set().union(*(names for _, names in EXPECTED.values()))
    for name in [*sorted(all_names), ("ns9",), ("ns1", "t999")]:
        exists = snapshot.has_namespace(name[0]) if len(name) == 1 else snapshot.has_table(*name)
        assert exists == (name in expected), name


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_are_found_by_time(stored_lakehouse: Lakehouse, version: int) -> None:
    created_at_ms, _ = EXPECTED[version]
    for timestamp_ms in (created_at_ms, created_at_ms + 1):
        assert stored_lakehouse.snapshot(timestamp=timestamp_ms).version == version
    if version:
        assert stored_lakehouse.snapshot(timestamp=created_at_ms - 1).version == version - 1
    else:
        with pytest.raises(VersionNotFoundError):
            stored_lakehouse.snapshot(timestamp=created_at_ms - 1)


@pytest.mark.parametrize(("before", "after"), list(product(VERSIONS, VERSIONS)))
def test_diff_of_two_versions_lists_changes(stored_lakehouse: Lakehouse, before: int, after: int) -> None:
    old, new = entries(stored_lakehouse, before), entries(stored_lakehouse, after)
    keys = stored_lakehouse.snapshot().keys
    expected = set()
    for key in old.keys() | new.keys():
        name = keys.decode(key)
        assert name is not None
        if old.get(key) != new.get(key):
            expected.add(
                Change(
                    "added" if key not in old else "removed" if key not in new else "changed",
                    name.namespace,
                    name.table,
                )
            )
    changes = stored_lakehouse.diff(before, after)
    assert set(changes) == expected
    assert len(changes) == len(expected)
    removed = {
        (change.namespace,) if change.table is None else (change.namespace, change.table)
        for change in changes
        if change.kind == "removed"
    }
    assert removed == EXPECTED[before][1] - EXPECTED[after][1]


def test_history_is_complete_and_verify_finds_no_errors(stored_lakehouse: Lakehouse) -> None:
    infos = list(stored_lakehouse.history())
    assert [info.version for info in infos] == VERSIONS[::-1]
    assert {(info.commit_id, info.rollback_from, info.state) for info in infos} == {(None, None, "live")}
    report = operations.verify(stored_lakehouse)
    assert report.findings == ()
    assert (report.versions, report.definitions) == (len(VERSIONS), len(list(FOLDER.rglob("*.binpb"))))


def test_first_commit_keeps_root_names_and_writes_current_nodes(copy: Lakehouse) -> None:
    files = {path: copy.storage.read(path) for path in listed(copy.storage)}
    with copy.transaction(message="ours") as txn:
        txn.create_namespace("new")
        txn.create_table("new", "t", table())
        txn.drop_table("ns1", "t101")
    assert txn.committed_version == LATEST + 1
    assert objects(copy.snapshot()).keys() == EXPECTED[LATEST][1] - {("ns1", "t101")} | {("new",), ("new", "t")}
    root = copy.snapshot().root
    assert root.system["previous_root"] == NAMING.path(LATEST)
    written = listed(copy.storage) - files.keys()
    names = sorted(Path(path).name for path in written if not path.endswith(".binpb"))
    assert [name for name in names if name.startswith("_")] == [NAMING.path(LATEST + 1)]
    visited = list(walk(copy.files.nodes, root, copy.snapshot().location))
    assert max(node.depth for node in visited) == 1, "the leaf with too many keys was split"
    for node in visited:
        rows = arrow(copy, node.location)
        assert rows.schema == pa.schema([(name, pa.utf8()) for name in ("key", "pvalue", "pnode")])
        assert not decode_node(copy.storage.read(node.location), node.location).is_flat
        assert node.location.endswith(".arrow") or node.depth == 0
        first = rows["key"].to_pylist().index(None)
        assert len(rows) - first - len(node.node.buffer) == copy.snapshot().definition.order
    for version in VERSIONS:
        assert objects(copy.snapshot(version)).keys() == EXPECTED[version][1]
    assert [path for path, data in files.items() if copy.storage.read(path) != data] == [HINT_PATH]
    assert operations.verify(copy).findings == ()


def test_setting_changes_and_rollbacks_rewrite_tree(copy: Lakehouse) -> None:
    copy.alter_definition(properties={"owner": "me"})
    assert copy.snapshot().definition == replace(copy.snapshot(0).definition, properties={"owner": "me"})
    assert objects(copy.snapshot()).keys() == EXPECTED[LATEST][1]
    with pytest.raises(InvalidDefinitionError):
        copy.alter_definition(order=256)
    for target in (2, 0, 1, 3):
        version = operations.rollback(copy, target)
        snapshot = copy.snapshot(version)
        assert objects(snapshot).keys() == EXPECTED[target][1]
        assert snapshot.definition.properties == {"owner": "me"}
        assert snapshot.root.system["rollback_from_root"] == NAMING.path(version - 1)
        assert not snapshot.root.is_flat
    assert operations.verify(copy).findings == ()
    assert {root_naming(path) for path in listed(copy.storage)} - {None} == {NAMING}


def test_fence_and_export_of_version_in_earlier_layout(copy: Lakehouse) -> None:
    assert copy.resolve_commit(LATEST + 1, str(uuid.uuid4()), fence=True) == "lost"
    assert objects(copy.snapshot()).keys() == EXPECTED[LATEST][1]
    report = operations.plan_export(copy, "old", version=2).execute()
    assert copy.storage.read(report.location) == copy.storage.read(NAMING.path(2)), (
        "the root of the export is an exact copy"
    )
    assert objects(copy.snapshot("old")).keys() == EXPECTED[2][1]
    copy.alter_definition(exported_snapshots={"old": report.location, "foreign": NAMING.path(1)})
    assert copy.snapshot("foreign").version == 1, "the version is parsed from the name of the root in any naming"
    assert operations.verify(copy).is_clean
    operations.rollback(copy, "foreign")
    assert objects(copy.snapshot()).keys() == EXPECTED[1][1]


def _create_tables(folder: Path, worker: int) -> Callable[[Callable[[str], None]], None]:
    def create_tables(report: Callable[[str], None]) -> None:
        lake = Lakehouse(local_storage(folder))
        for number in range(25):
            with lake.transaction() as txn:
                txn.create_table("ns1", f"w{worker}-{number:03d}", table())
            report(f"{txn.committed_version} {worker}")

    return create_tables


def test_two_processes_commit_to_earlier_layout(tmp_path: Path, copy: Lakehouse) -> None:
    children = [fork(_create_tables(tmp_path / "copy", worker)) for worker in range(2)]
    results = [child.finish() for child in children]
    assert [exit_code for exit_code, _ in results] == [0, 0]
    acknowledged = dict(line.split() for _, lines in results for line in lines)
    assert sorted(map(int, acknowledged)) == list(range(LATEST + 1, LATEST + 51)), "each version is acknowledged once"
    added = {("ns1", f"w{worker}-{number:03d}") for worker in range(2) for number in range(25)}
    assert objects(copy.snapshot()).keys() == EXPECTED[LATEST][1] | added
    order = [acknowledged[str(version)] for version in range(LATEST + 1, LATEST + 51)]
    assert any(first != second for first, second in itertools.pairwise(order)), "the processes ran concurrently"
    roots = {path for path in listed(copy.storage) if root_naming(path) is not None}
    assert roots == {NAMING.path(version) for version in range(LATEST + 51)}
    unreferenced = listed(copy.storage) - reachable_paths(copy) - {HINT_PATH}
    assert unreferenced == set(), "attempts with conflicts left no files"


OUTPUT_CHECKS: dict[str, Callable[[Any], bool]] = {
    "log": lambda output: [info["version"] for info in output] == VERSIONS[::-1],
    "ls": lambda output: output == ["ns1", "ns2"],
    "ls ns1 --version 2": lambda output: len(output) == sum(name[0] == "ns1" for name in EXPECTED[2][1]) - 1,
    "show": lambda output: output["version"] == LATEST,
    "show ns1 --version 1": lambda output: output["namespace"] == "ns1",
    "show ns2.t70": lambda output: output["table"] == "t70",
    "show --timestamp 2023-11-14T22:15:20Z": lambda output: output["version"] == 1,
    "diff 0 1": lambda output: len(output) == 2,
    "exports": lambda output: output == [],
    "repair-hint --check-only": lambda output: output["state"] == "right",
    "verify": lambda output: output["findings"] == [] and output["versions"] == len(VERSIONS),
    "rollback 1": lambda output: len(output["changes"]) == len(EXPECTED[LATEST][1]) - 2,
    "drop-namespace ns2 --cascade": lambda output: output["namespace"] == "ns2",
    "resolve-commit 4 7c52cec4-43e3-4f73-91a3-87cfd94da1f0": lambda output: output["resolution"] == "undecided",
}


@pytest.mark.parametrize("command", OUTPUT_CHECKS)
def test_every_read_command_succeeds(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["trinitylake", "--root", str(FOLDER), *command.split(), "--json"])
    with pytest.raises(SystemExit) as results:
        main()
    captured = capsys.readouterr()
    assert results.value.code == (1 if command.startswith("resolve") else 0), captured
    assert "Error" not in captured.err
    assert OUTPUT_CHECKS[command](json.loads(captured.out)), captured.out[:500]


@pytest.mark.parametrize("other_naming", [naming for naming in ROOT_NAMINGS if naming != NAMING], ids=str)
@pytest.mark.parametrize("version", [0, LATEST])
def test_open_rejects_roots_with_mixed_names(copy: Lakehouse, other_naming: RootNaming, version: int) -> None:
    path = other_naming.path(version)
    copy.storage.create(path, copy.storage.read(NAMING.path(version)))
    with pytest.raises(CorruptFileError) as caught:
        Lakehouse.open(copy.root)
    assert path in caught.value.message
    copy.storage.delete(path)


def test_hint_with_whitespace_is_accepted(copy: Lakehouse) -> None:
    copy.close()
    copy.storage.write(HINT_PATH, b"\n 3\t\r\n")
    assert operations.inspect_hint(copy).is_right
    assert Lakehouse.open(copy.root).latest_version() == LATEST
