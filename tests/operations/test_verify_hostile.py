"""Test verify on forged lakehouses, whose files are readable but inconsistent."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from tests.faults import FaultyStorage, fail
from tests.lakes import Lakes, seal, table
from tests.operations.changes import append_rows, create, drop, node_bytes, node_columns, overwrite_rows, small_sizes
from tests.operations.test_folding_file_systems import RemoteExecutor
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import CorruptFileError, StoragePermissionError
from trinitylake_ops.format.definitions import ExpirationBatch, ExpirationState, LakehouseDef
from trinitylake_ops.format.file_names import lease_path, new_node_path, root_path
from trinitylake_ops.format.keys import COMMIT_INFO, PREVIOUS_ROOT
from trinitylake_ops.format.limits import check_readable_sizes
from trinitylake_ops.format.node_file import NodeFile, decode_node, encode_node
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.operations import VerifyReport
from trinitylake_ops.operations.verification import objects as verify_objects
from trinitylake_ops.reports import log_page, verification_page
from trinitylake_ops.storage import MemoryStorage, Storage, drop_memory_root

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://hostile/"
ORDER = 4


@pytest.fixture
def lake() -> Iterator[Lakehouse]:
    """A lakehouse with a tree of several levels and a managed table."""
    lake = Lakehouse.create(ROOT, storage=MemoryStorage(ROOT), order=ORDER, **small_sizes(ORDER))
    with lake.transaction(message="m" * 3_400) as txn:
        txn.create_namespace("big")
        for number in range(12):
            txn.create_table("big", f"t{number}", table())
    append_rows(lake)
    yield lake
    drop_memory_root(ROOT)


def verify(storage: Storage) -> VerifyReport:
    report = operations.verify(Lakehouse(storage))
    assert all("\n" not in finding.message for finding in report.findings)
    return report


def errors(storage: Storage) -> list[tuple[str, str | None, int | None]]:
    findings = verify(storage).findings
    return [(finding.code, finding.path, finding.version) for finding in findings if finding.severity == "error"]


def rewrite_root(lake: Lakehouse, version: int, change: Callable[[NodeFile], None]) -> None:
    path = root_path(version)
    root = decode_node(lake.storage.read(path), path)
    root.keys, root.values, root.children = list(root.keys), list(root.values), list(root.children)
    change(root)
    lake.storage.write(path, encode_node(root, ORDER))


def set_pointer(lake: Lakehouse, key: str, location: str | None) -> None:
    """Map a key to a location in the latest version, or remove it."""
    rewrite_root(lake, lake.latest_version(), lambda root: root.buffer.update({key: location}))


def test_exponentially_growing_tree_is_reported_and_not_followed(lake: Lakehouse) -> None:
    paths = [new_node_path() for _ in range(30)]
    for path, child in zip(paths, [*paths[1:], None], strict=True):
        children = [child] * ORDER if child else []
        node = NodeFile(["B===a", "B===b", "B===c"], ["x"] * 3, children, {}, {"created_at_millis": "1"})
        lake.storage.create(path, encode_node(node, ORDER))

    def change(root: NodeFile) -> None:
        root.children = [paths[0], *root.children[1:]]

    latest = lake.latest_version()
    rewrite_root(lake, latest, change)
    rewrite_root(lake, 0, lambda root: root.__setattr__("children", [paths[0]]))
    reported = errors(lake.storage)
    messages = [(finding.path, finding.message) for finding in verify(lake.storage).findings]
    assert len(messages) == len(set(messages))
    assert {("tree-invariant", paths[1], 0), ("tree-invariant", paths[29], 0)} <= set(reported)
    report = verify(lake.storage)
    assert report.damaged_versions == f"0,{latest}"
    operations.repair(Lakehouse(lake.storage), to_last_good=True)
    assert verify(lake.storage).damaged_versions == f"0,{latest}"


def test_rollbacks_to_and_from_cyclic_tree_fail(lake: Lakehouse) -> None:
    path = lake.snapshot().root.children[0]
    columns = node_columns(lake.storage.read(path))
    first = columns["key"].index(None)
    n_keys = len(decode_node(lake.storage.read(path), path).keys)
    columns["pnode"][first : first + n_keys + 1] = [path] * (n_keys + 1)
    lake.storage.write(path, node_bytes(columns))
    damaged_lake = Lakehouse(lake.storage)
    for version in (0, 1):
        with pytest.raises(CorruptFileError):
            operations.plan_rollback(damaged_lake, version, tables=["big.t0"] if version else None)


def test_missing_namespaces_are_reported_for_every_version(lake: Lakehouse) -> None:
    for name in ("a", "b"):
        create(lake, name, "t")
    version = create(lake, "c")
    keys = lake.snapshot().keys
    set_pointer(lake, keys.namespace_key("a"), None)
    set_pointer(lake, keys.namespace_key("b"), None)
    after = create(Lakehouse(lake.storage), "d")
    findings = [finding for finding in verify(lake.storage).findings if finding.severity == "error"]
    assert [(finding.code, finding.path, finding.version) for finding in findings] == [
        ("namespace-missing", root_path(version), version)
    ] * 2
    assert {"'a'" in finding.message for finding in findings} == {True, False}
    assert verify(lake.storage).damaged_versions == f"{version}-{after}"


@pytest.mark.parametrize("wrong_kind", ["lakehouse", "namespace", "namespace of the table", "table as namespace"])
def test_definition_of_wrong_kind_is_reported(lake: Lakehouse, wrong_kind: str) -> None:
    """Verify has already read the definition as its actual kind, and its bytes also decode as the wrong kind."""
    create(lake, "a", "t")
    version = create(lake, "b", "u")
    snapshot = lake.snapshot()
    keys = snapshot.keys
    key, location = {
        "lakehouse": (keys.table_key("b", "u"), snapshot.definition_location),
        "namespace": (keys.table_key("b", "u"), snapshot.entry(keys.namespace_key("a"))),
        "namespace of the table": (keys.table_key("b", "u"), snapshot.entry(keys.namespace_key("b"))),
        "table as namespace": (keys.namespace_key("b"), snapshot.entry(keys.table_key("a", "t"))),
    }[wrong_kind]
    set_pointer(lake, key, location)
    assert errors(lake.storage) == [("definition-unreadable", location, version)]
    assert verify(lake.storage).damaged_objects == (keys.decode(key),)


def test_root_with_definition_of_wrong_kind_is_reported(lake: Lakehouse) -> None:
    """This includes the oldest version, which all later settings are compared with."""
    location = lake.snapshot().entry(lake.snapshot().keys.namespace_key("big"))
    assert location is not None
    rewrite_root(lake, 0, lambda root: root.system.update(lakehouse_def=location))
    assert errors(lake.storage) == [("definition-unreadable", location, 0)]


@pytest.mark.parametrize(
    "fields",
    [
        {"order": 0},
        {"order": 2**32 - 1},
        {"namespace_name_max_size_bytes": 2**32 - 1},
        {"table_name_max_size_bytes": 2**31},
        {"node_file_max_size_bytes": 0},
        {"namespace_name_max_size_bytes": 2**32 - 1, "node_file_max_size_bytes": 2**63},
    ],
    ids="-".join,
)
def test_invalid_settings_are_reported(lake: Lakehouse, fields: dict[str, int]) -> None:
    """For example, a flipped bit can allow keys of gigabytes."""
    path = lake.snapshot().definition_location
    lake.storage.write(path, replace(lake.snapshot().definition, **fields).to_bytes())
    report = verify(lake.storage)
    assert errors(lake.storage) == [("definition-unreadable", path, 0)]
    assert {finding.fix for finding in report.findings} == {None}
    assert operations.plan_repair(Lakehouse(lake.storage), to_last_good=True).is_empty


def test_rollback_does_not_repair_settings(lake: Lakehouse) -> None:
    """A rollback would keep the wrong settings, which also apply to the trees of older versions."""
    lake.alter_definition(txn_ttl_millis=90_000_000)
    path, definition = lake.snapshot().definition_location, lake.snapshot().definition
    lake.storage.write(path, replace(definition, order=7).to_bytes())
    assert errors(lake.storage) == [("definition-changed", path, lake.latest_version())]
    plan = operations.plan_repair(Lakehouse(lake.storage), to_last_good=True)
    assert plan.is_empty
    assert [(finding.code, finding.path) for finding in plan.remaining] == [("definition-changed", path)]


@pytest.mark.parametrize("times", [1, 2])
def test_repeated_data_file_is_reported_once(lakes: Lakes, times: int) -> None:
    """The file is added again by another manifest, which lists it once or twice."""
    lake = lakes.memory()
    for _ in range(3):
        append_rows(lake)
    overwrite_rows(lake, "ns.t")
    append_rows(lake)
    assert operations.verify(lake).findings == ()
    table = catalog_at(lake).load_table("ns.t")
    file = next(iter(table.scan().plan_files())).file
    with table.transaction() as txn, txn.update_snapshot().fast_append() as append:
        for _ in range(times):
            append.append_data_file(file)
    append_rows(lake)
    path = file.file_path.removeprefix(lake.root)
    for incremental in (False, True, True):
        (finding,) = operations.verify(lake, incremental=incremental).findings
        assert (finding.code, finding.severity) == ("table-file-repeated", "warning")
        assert (finding.path, finding.version) == (path, lake.latest_version() - 1)
    (finding,) = operations.verify(lake, executor=RemoteExecutor()).findings
    assert finding.path == path
    overwrite_rows(lake, "ns.t")
    append_rows(lake)
    assert len(operations.verify(lake).findings) == 1, "an overwrite adds no further finding"


def test_sealed_latest_version_is_reported(lake: Lakehouse) -> None:
    latest = lake.latest_version()
    seal(lake, latest)
    report = verify(lake.storage)
    assert not report.is_clean
    assert errors(lake.storage) == [("latest-sealed", root_path(latest), latest)]
    assert report.damaged_versions == str(latest)


@pytest.mark.parametrize(
    ("versions", "state"),
    [
        ("garbage", ExpirationState.EXPIRED),
        ("3-1", ExpirationState.PURGED),
        ("0-4294967295", ExpirationState.EXPIRED),
        ("5", ExpirationState.PURGING),
    ],
)
def test_invalid_expirations_are_reported(lake: Lakehouse, versions: str, state: ExpirationState) -> None:
    create(lake, "a")
    latest = lake.latest_version()
    assert latest == 5
    path, definition = lake.snapshot().definition_location, lake.snapshot().definition
    expirations = (ExpirationBatch(id="x", versions=versions, state=state),)
    lake.storage.write(path, replace(definition, expirations=expirations).to_bytes())
    assert ("definition-unreadable", path, latest) in errors(lake.storage)
    assert verification_page(verify(lake.storage), 0)


def test_previous_root_can_be_a_uri(lake: Lakehouse) -> None:
    version = lake.latest_version()
    rewrite_root(lake, version, lambda root: root.system.update({PREVIOUS_ROOT: ROOT + root_path(version - 1)}))
    assert errors(lake.storage) == []
    rewrite_root(lake, version, lambda root: root.system.update({PREVIOUS_ROOT: ROOT + root_path(version)}))
    assert errors(lake.storage) == [("chain-broken", root_path(version), version)]
    rewrite_root(lake, version, lambda root: root.system.update({PREVIOUS_ROOT: "../x"}))
    assert errors(lake.storage) == [("chain-broken", root_path(version), version)]


def test_unreadable_lease_does_not_stop_verify(lake: Lakehouse) -> None:
    lake.storage.write(lease_path(3), json.dumps({"operation": "purge", "expires_at_ms": 1}).encode())
    faulty_storage = FaultyStorage(lake.storage, [fail(1, StoragePermissionError, path_part="lease-3", times=99)])
    report = verify(faulty_storage)
    assert [(finding.severity, finding.code, finding.path) for finding in report.findings] == [
        ("warning", "lease-unreadable", lease_path(3))
    ]
    assert report.unchecked == ()
    assert report.versions == lake.latest_version() + 1


@pytest.mark.parametrize("info", ["[" * 2_000, '{"":' * 1_000, '{"operation":NaN}', '{"message":"\\ud800"}'])
def test_arbitrary_root_metadata_does_not_fail_verify(lake: Lakehouse, info: str) -> None:
    version = lake.latest_version()
    rewrite_root(lake, version, lambda root: root.system.update({COMMIT_INFO: info}))
    report = verify(lake.storage)
    assert report.findings == ()
    assert (report.records[version].operation, report.records[version].message) == (None, None)
    (newest,) = Lakehouse(lake.storage).history(1)
    assert (newest.operation, newest.message) == (None, None)


def test_smaller_node_size_limit_is_accepted() -> None:
    """Other programs can use a smaller limit than this library."""
    definition = LakehouseDef(id="x", order=3, node_file_max_size_bytes=600)
    assert check_readable_sizes(definition, "x") == definition


INVALID_INFOS = [
    '{"operation":["x"],"message":{"a":1},"run_id":3,"user":[],"host":{},"counts":{"set":"y"},"cost":{"bytes":"abc"}}',
    '{"message":"\\ud800","operation":"\\udfff<script>","user":"\\ud801","run_id":"\\ud800"}',
    '{"counts":{"set":1e999},"cost":{"bytes":NaN,"attempts":{}}}',
    '{"counts":"x","cost":{"bytes":-1e308,"attempts":null},"members":[1,{}],"properties":{"to_version":7,"a":{}}}',
    '{"operation":"commit","members":["a"],"transactions":[{"operation":{},"message":[],"counts":{"set":[]}}]}',
    '{"cost":{"bytes":' + "9" * 400 + ',"requests":true},"counts":{"set":1e308}}',
    '{"operation":"\\u0041\\uD83D\\uDE00","message":"<script>"}',
    "[" * 2_000,
]


def test_history_and_reports_show_valid_parts_of_foreign_metadata(lake: Lakehouse) -> None:
    infos = {create(lake, f"n{number}"): info for number, info in enumerate(INVALID_INFOS)}
    for version, info in infos.items():
        rewrite_root(lake, version, lambda root, info=info: root.system.update({COMMIT_INFO: info}))
    damaged_lake = Lakehouse(lake.storage)
    history = list(damaged_lake.history())
    for snapshot in history[: len(infos)]:
        assert all(
            text is None or isinstance(text, str)
            for text in (
                snapshot.operation,
                snapshot.message,
                snapshot.run_id,
                snapshot.user,
                snapshot.host,
                snapshot.engine,
            )
        )
        assert {type(number) for number in (*snapshot.counts.values(), *snapshot.cost.values())} <= {int}
        assert snapshot.bytes_written == snapshot.root_bytes
    assert (history[1].operation, history[1].message) == ("A\U0001f600", "<script>")
    report = verify(lake.storage)
    assert report.findings == ()
    for page in (log_page(damaged_lake.snapshot(), history, 0), verification_page(report, 0)):
        page.encode()
        assert "<script" not in page


def test_partly_read_version_does_not_affect_later_versions(lake: Lakehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of a version that can be read only partly are not used as the state before the next version."""
    monkeypatch.setattr(verify_objects, "BATCH_CHANGES", 1)
    readable_version, hostile_version, _ = (create(lake, name) for name in "xyz")
    last_child = decode_node(lake.storage.read(root_path(hostile_version)), root_path(hostile_version)).children[-1]
    empty_path, outer_path, repeating_path = (new_node_path() for _ in range(3))
    system = {"created_at_millis": "1"}
    lake.storage.create(empty_path, encode_node(NodeFile([], [], [], {}, system), ORDER))
    lake.storage.create(outer_path, encode_node(NodeFile(["~"], ["x"], [last_child, empty_path], {}, system), ORDER))
    lake.storage.create(
        repeating_path, encode_node(NodeFile(["~~"], ["x"], [outer_path, last_child], {}, system), ORDER)
    )
    rewrite_root(lake, readable_version, lambda root: root.children.__setitem__(-1, outer_path))
    for version in range(hostile_version):
        rewrite_root(lake, version, lambda root: root.children.__setitem__(slice(0, 1), [new_node_path()]))
    rewrite_root(lake, hostile_version, lambda root: root.children.__setitem__(-1, repeating_path))
    drop(Lakehouse(lake.storage), "big")
    reported = errors(lake.storage)
    assert ("tree-invariant", last_child, hostile_version) in reported, (
        "the repeated node is reported only if the whole tree is read"
    )
    assert max(version for _, _, version in reported if version is not None) == hostile_version
    assert verify(lake.storage).damaged_versions == f"0-{hostile_version}"
