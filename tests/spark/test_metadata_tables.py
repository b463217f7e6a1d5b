"""Test metadata tables without Spark: the rows that tasks would read equal the API and need only a few requests."""

from __future__ import annotations

import datetime as dt
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.lakes import Lakes, seal, table
from tests.operations.aging import Aging, files_of_snapshot
from tests.operations.changes import append_rows, create, expire, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ExportNotFoundError, InvalidInputError, VersionExpiredError, VersionNotFoundError
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.spark.metadata import tables as object_rows
from trinitylake_ops.spark.metadata.columns import METADATA_TABLES
from trinitylake_ops.spark.metadata.reader import OpenedMetadata
from trinitylake_ops.spark.source.opened_table import open_metadata
from trinitylake_ops.spark.source.options import OPTIONS, TableRequest
from trinitylake_ops.storage import LocalStorage, MeteredStorage
from trinitylake_ops.storage.cache.storage import clear_process_caches
from trinitylake_ops.tree.shape import walk

pytestmark = [
    pytest.mark.local_only("the Spark tasks of these tests read a folder"),
    pytest.mark.usefixtures("fixed_requests"),
]


@pytest.fixture
def lake(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> Lakehouse:
    """A lakehouse with namespaces ``n00`` to ``n19`` of five tables each, in a deep tree with small ranges."""
    monkeypatch.setattr(object_rows, "OBJECTS_PER_RANGE", 20)
    local_lake = lakes.local(order=4, **small_sizes(4))
    lake = Lakehouse.open(local_lake.root, local_lake.storage_options, storage=MeteredStorage(local_lake.storage))
    with lake.transaction(message="all", operation="fill", run_id="run-1") as txn:
        for number in range(20):
            txn.create_namespace(f"n{number:02}", {"number": str(number)})
            for name in "abcde":
                txn.create_table(f"n{number:02}", name, TableDef(table_type="EXTERNAL", table_format="LANCE"))
    with lake.transaction(operation="drop", run_id="run-2") as txn:
        txn.drop_table("n07", "c")
        txn.alter_table("n08", "d", table(changed="yes"))
    return lake


def open_table(lake: Lakehouse, name: str, **request: Any) -> OpenedMetadata:
    return open_metadata(lake, TableRequest(table=name, parallelism=2, **request))


def rows(
    lake: Lakehouse, name: str, row_filter: str | None = None, *, tasks: list[int] | None = None, **request: Any
) -> list[dict[str, Any]]:
    """Return the rows as Spark receives them."""
    clear_process_caches()
    opened_table = open_table(lake, name, row_filter=row_filter, **request)
    reader = opened_table.reader(opened_table.schema)
    table_rows = []
    for partition in reader.partitions():
        batches = [batch.to_pylist(maps_as_pydicts="strict") for batch in reader.read(partition)]
        table_rows += [row for batch in batches for row in batch]
        if tasks is not None:
            tasks.append(sum(map(len, batches)))
    return table_rows


def count_requests(lake: Lakehouse, action: Callable[[], object]) -> int:
    assert isinstance(lake.storage, MeteredStorage)
    with lake.storage.measure() as measurement:
        action()
    return measurement.counts.total


def version_ranges(table_rows: list[dict[str, Any]]) -> set[tuple[int, int]]:
    """Return each version that has changes, with the version to which it is compared."""
    return {(row["version"], row["since_version"]) for row in table_rows}


def object_names(table_rows: list[dict[str, Any]]) -> list[tuple[str, str | None]]:
    return sorted(((row["namespace"], row["table"]) for row in table_rows), key=str)


def all_object_names(lake: Lakehouse, version: int | None = None) -> list[tuple[str, str | None]]:
    snapshot = lake.snapshot(version)
    tables = [(namespace, name) for namespace in snapshot.namespaces() for name in snapshot.tables(namespace)]
    return sorted([*((namespace, None) for namespace in snapshot.namespaces()), *tables], key=str)


def test_versions_equal_log(lake: Lakehouse) -> None:
    operations.rollback(lake, 1)
    table_rows = rows(lake, "versions")
    for row, info in zip(table_rows, reversed(list(lake.history())), strict=True):
        assert {name: row[name] for name in ("version", "created_at", "operation", "message", "commit_id")} == {
            name: getattr(info, name) for name in ("version", "created_at", "operation", "message", "commit_id")
        }
        assert (row["run_id"], row["user"], row["host"], row["engine"]) == (
            info.run_id, info.user, info.host, info.engine,
        )  # fmt: skip
        assert (row["state"], row["rollback_from"], row["bytes_written"]) == (
            info.state, info.rollback_from, info.bytes_written,
        )  # fmt: skip
        assert (row["counts"], row["properties"], row["members"], row["requests"]) == (
            dict(info.counts), dict(info.properties), list(info.members), info.cost.get("requests"),
        )  # fmt: skip
    assert [row["version"] for row in rows(lake, "versions", version=1)] == [0, 1]
    assert [row["version"] for row in rows(lake, "versions", timestamp=table_rows[2]["created_at"])] == [0, 1, 2]


VERSION_FILTERS: dict[str, list[int]] = {
    "version = 7": [7],
    "version in (3, 9, 400)": [3, 9],
    "version > 3 and version < 6": [4, 5],
    "version between 3 and 4": [3, 4],
    "version in (3, 9) and version < 6": [3],
    "not (version < 11)": [11, 12],
    "version > 12": [],
    "version = 3 and version = 4": [],
    "version is null": [],
}


@pytest.mark.parametrize("row_filter", VERSION_FILTERS)
def test_version_filters_read_no_other_roots(lakes: Lakes, row_filter: str) -> None:
    local_lake = lakes.local()
    lake = Lakehouse.open(local_lake.root, local_lake.storage_options, storage=MeteredStorage(local_lake.storage))
    for number in range(12):
        create(lake, f"n{number}")
    expected = VERSION_FILTERS[row_filter]
    n_open_requests = count_requests(lake, lambda: open_table(lake, "versions"))
    n_requests = count_requests(lake, lambda: rows(lake, "versions", row_filter)) - n_open_requests
    assert [row["version"] for row in rows(lake, "versions", row_filter)] == expected
    assert n_requests <= len(expected) + 2, "the roots, and once the states in the latest version"
    changes = rows(lake, "changes", row_filter)
    assert [row["version"] for row in changes] == expected
    assert all(row["since_version"] == row["version"] - 1 for row in changes)


def test_tasks_share_versions(lakes: Lakes) -> None:
    lake = lakes.local(is_watched=False)
    for number in range(100):
        create(lake, f"n{number}")
    for name in ("versions", "changes"):
        tasks: list[int] = []
        assert len(rows(lake, name, tasks=tasks)) == 101 - (name == "changes")
        assert len(tasks) == 2
        assert max(tasks) <= 51


def test_objects_of_every_version(lake: Lakehouse) -> None:
    for version in (0, 1, 2):
        tasks: list[int] = []
        table_rows = rows(lake, "objects", version=version, tasks=tasks)
        assert object_names(table_rows) == all_object_names(lake, version)
        assert version == 0 or len(tasks) > 3
    snapshot = lake.snapshot()
    for row in table_rows:
        if row["table"] is None:
            namespace = snapshot.namespace(row["namespace"])
            assert (row["kind"], row["id"], row["properties"]) == ("namespace", namespace.id, namespace.properties)
            assert (row["type"], row["format"], row["metadata_location"]) == (None, None, None)
        else:
            definition = snapshot.table(row["namespace"], row["table"])
            assert (row["kind"], row["id"], row["type"]) == ("table", definition.id, definition.table_type)
            assert (row["format"], row["properties"]) == (definition.table_format, definition.properties)
        key = (
            snapshot.keys.namespace_key(row["namespace"])
            if row["table"] is None
            else snapshot.keys.table_key(row["namespace"], row["table"])
        )
        assert row["definition_location"] == snapshot.entry(key)


OBJECT_FILTERS: dict[str, tuple[list[tuple[str, str | None]], int]] = {
    "namespace = 'n07'": ([("n07", "a"), ("n07", "b"), ("n07", "d"), ("n07", "e"), ("n07", None)], 30),
    "namespace is not null and namespace = 'n07' and table = 'b'": ([("n07", "b")], 12),
    "namespace in ('n07', 'n11') and table in ('b', 'c')": ([("n07", "b"), ("n11", "b"), ("n11", "c")], 30),
    "table = 'c' and namespace > 'n17'": ([("n18", "c"), ("n19", "c")], 160),
    "table is null and namespace in ('n03', 'n05')": ([("n03", None), ("n05", None)], 20),
    "namespace = 'n07' and (table is null or table = 'a')": ([("n07", "a"), ("n07", None)], 30),
    "namespace = 'missing'": ([], 20),
    "namespace = 'a b'": ([], 5),
    "namespace = 'n07' and table = 'a\tb'": ([], 5),
    "namespace = 'n07' and namespace = 'n08'": ([], 5),
}


@pytest.mark.parametrize("row_filter", OBJECT_FILTERS)
def test_name_filters_read_no_other_subtrees(lake: Lakehouse, row_filter: str) -> None:
    expected, max_requests = OBJECT_FILTERS[row_filter]
    assert object_names(rows(lake, "objects", row_filter)) == expected
    n_requests = count_requests(lake, lambda: rows(lake, "objects", row_filter))
    n_requests_of_all = count_requests(lake, lambda: rows(lake, "objects"))
    assert n_requests <= max_requests < n_requests_of_all
    changes = rows(lake, "changes", row_filter, first_version=1, last_version=1)
    assert object_names(changes) == object_names(rows(lake, "objects", row_filter, version=1))


def test_filter_may_use_unselected_columns(lake: Lakehouse) -> None:
    table_rows = rows(lake, "objects", "type = 'EXTERNAL' and namespace = 'n01'", columns=("table",))
    assert sorted(row["table"] for row in table_rows) == list("abcde")
    assert [tuple(row) for row in table_rows[:1]] == [("table",)]
    assert object_names(rows(lake, "objects", "namespace = 'n01' and table not in ('a', 'b', 'c', 'd')")) == [
        ("n01", "e"), ("n01", None),
    ]  # fmt: skip
    assert [row["version"] for row in rows(lake, "versions", "run_id like 'run-%' and operation <> 'drop'")] == [1]


def test_filters_on_times(lake: Lakehouse) -> None:
    times = {row["version"]: row["created_at"] for row in rows(lake, "versions")}
    table_rows = rows(lake, "versions", f"created_at >= '{times[1].isoformat()}'")
    assert [row["version"] for row in table_rows] == [1, 2]


def test_names_are_read_without_definitions(lake: Lakehouse) -> None:
    columns = ("table", "namespace")
    table_rows = rows(lake, "objects", columns=columns)
    assert [tuple(row) for row in table_rows[:1]] == [columns]
    assert object_names(table_rows) == all_object_names(lake)
    n_nodes = sum(1 for _ in walk(lake.files.nodes, lake.snapshot().root, "root"))
    n_tasks = len(open_table(lake, "objects").table.partitions())
    n_requests = count_requests(lake, lambda: rows(lake, "objects", columns=columns))
    assert n_requests <= n_nodes + 2 * n_tasks + 10
    assert count_requests(lake, lambda: rows(lake, "objects")) >= n_requests + 119


def test_files_table_lists_all_files_of_version(lakes: Lakes) -> None:
    aging = Aging.on(LocalStorage(f"file://{lakes.folder}/lake/", fsync=False))
    lake = aging.lake
    for _ in range(3):
        append_rows(lake, "ns.t")
    create(lake, "empty", *"abcdefgh")
    append_rows(lake, "ns.u")
    for version in range(lake.latest_version() + 1):
        expected = {path: len(data) for path, data in files_of_snapshot(lake, lake.snapshot(version)).items()}
        sizes = {row["path"]: row["size_bytes"] for row in rows(lake, "files", version=version)}
        assert sizes == expected
    table_rows = rows(lake, "files")
    assert len({row["path"] for row in table_rows}) == len(table_rows)
    kinds = Counter((row["kind"], row["namespace"], row["table"]) for row in table_rows)
    assert kinds[("data", "ns", "t")] == 3
    assert kinds[("manifest list", "ns", "t")] == 3
    assert kinds[("metadata", "ns", "u")] == kinds[("definition", "ns", None)] == 1
    assert kinds[("lakehouse definition", None, None)] == 1
    assert kinds[("node", None, None)] == sum(
        1 for _ in walk(lake.files.nodes, lake.snapshot().root, lake.snapshot().location)
    )


FILE_FILTERS: dict[str, tuple[set[str], Callable[[dict[str, Any]], bool]]] = {
    "kind = 'node'": ({"node"}, lambda row: row["kind"] == "node"),
    "namespace = 'n07'": ({"definition"}, lambda row: row["namespace"] == "n07"),
    "namespace is not null and kind = 'definition'": ({"definition"}, lambda row: row["namespace"] is not None),
    "kind = 'data' and namespace = 'n07'": (set(), lambda row: False),
    "table = 'a'": ({"definition"}, lambda row: row["table"] == "a"),
    "size_bytes > 1000000": (set(), lambda row: row["size_bytes"] > 1_000_000),
}


@pytest.mark.parametrize("row_filter", FILE_FILTERS)
def test_filters_on_files(lake: Lakehouse, row_filter: str) -> None:
    kinds, is_match = FILE_FILTERS[row_filter]
    table_rows = rows(lake, "files", row_filter)
    assert sorted(row["path"] for row in table_rows) == sorted(
        row["path"] for row in rows(lake, "files") if is_match(row)
    )
    assert {row["kind"] for row in table_rows} == kinds
    if "namespace = " in row_filter:
        n_requests = count_requests(lake, lambda: rows(lake, "files", row_filter))
        assert n_requests * 4 < count_requests(lake, lambda: rows(lake, "files"))


def test_changes_equal_diffs(lake: Lakehouse) -> None:
    operations.rollback(lake, 1)
    create(lake, "more", "x")
    table_rows = rows(lake, "changes")
    log = {info.version: info for info in lake.history()}
    for version in range(1, lake.latest_version() + 1):
        expected = {(change.kind, change.namespace, change.table) for change in lake.diff(version - 1, version)}
        version_rows = [row for row in table_rows if row["version"] == version]
        assert {(row["kind"], row["namespace"], row["table"]) for row in version_rows} == expected
        assert len(version_rows) == len(expected)
        for row in version_rows:
            info = log[version]
            assert (row["operation"], row["run_id"], row["committed_at"]) == (
                info.operation, info.run_id, info.created_at,
            )  # fmt: skip
    range_rows = rows(lake, "changes", first_version=2, last_version=3)
    assert range_rows == [row for row in table_rows if row["version"] in (2, 3)]
    removed = [row for row in table_rows if row["kind"] == "removed" and row["version"] != 1]
    assert removed
    assert rows(lake, "changes", "kind = 'removed' and not version = 1") == removed


def test_changes_of_expired_versions_are_reported_at_next_live_version(lakes: Lakes) -> None:
    lake = lakes.local()
    for number in range(1, 9):
        create(lake, f"n{number}")
    expire(lake, "0-2,4-5,7")
    assert version_ranges(rows(lake, "changes")) == {(6, 3), (8, 6)}, "the changes of version 3 are unknown"
    assert version_ranges(rows(lake, "changes", "version in (6, 8)")) == {(6, 3), (8, 6)}
    assert version_ranges(rows(lake, "changes", "version = 5")) == set()
    table_rows = rows(lake, "changes", "version = 6")
    assert object_names(table_rows) == [("n4", None), ("n5", None), ("n6", None)]
    seal(lake, 7)
    seal(lake, 2)
    assert version_ranges(rows(lake, "changes", first_version=8)) == {(8, 6)}
    states = {row["version"]: row["state"] for row in rows(lake, "versions")}
    assert states == {info.version: info.state for info in lake.history()}
    assert (states[5], states[7], states[8]) == ("expired", "sealed", "live")
    with pytest.raises(VersionExpiredError):
        rows(lake, "objects", version=5)


def test_version_purged_after_planning_is_reported(lake: Lakehouse) -> None:
    opened_table = open_table(lake, "objects", version=1)
    seal(lake, 1)
    with pytest.raises(VersionExpiredError):
        opened_table.reader(opened_table.schema).partitions()


def test_exports_are_listed_and_read(lake: Lakehouse, tmp_path: Path) -> None:
    operations.plan_export(lake, "here", "minimal", version=1).execute()
    operations.plan_export(lake, "there", "full", target=f"file://{tmp_path}/other/").execute()
    table_rows = rows(lake, "exports")
    for row, info in zip(table_rows, operations.list_exports(lake), strict=True):
        expected = {name: getattr(info, name) for name in row}
        assert row == {**expected, "namespaces": list(info.namespaces)}
    for name, version in (("here", 1), ("there", None)):
        assert object_names(rows(lake, "objects", export=name)) == all_object_names(lake, version)
    exported_paths = {row["path"] for row in rows(lake, "files", export="there")}
    assert exported_paths
    assert all((tmp_path / "other" / path).is_file() for path in exported_paths)


@pytest.mark.parametrize(
    ("table_name", "request_", "error", "match"),
    [
        ("tables", {}, InvalidInputError, "unknown metadata table 'tables'; use one of versions, objects, files"),
        ("objects", {"columns": ("nam",)}, InvalidInputError, "'nam'.* kind, namespace"),
        ("objects", {"columns": ("kind", "kind")}, InvalidInputError, "duplicate column in kind, kind"),
        ("objects", {"row_filter": "kind ="}, InvalidInputError, "'kind ='.* at column"),
        ("objects", {"row_filter": "nam = 'a'"}, InvalidInputError, "does not match the table: .*nam"),
        ("objects", {"row_filter": "properties = 'a'"}, InvalidInputError, "does not match the table: .*properties"),
        ("versions", {"row_filter": "version = 'one'"}, InvalidInputError, "does not match the table: .*one"),
        ("versions", {"row_filter": "version > 1.5"}, InvalidInputError, "'version' .*1.5 is not an integer"),
        (
            "versions",
            {"row_filter": "not (version in (1.5, 2.5) or version = 1)"},
            InvalidInputError,
            ".\\.5 is not an integer",
        ),
        ("versions", {"row_filter": "version < '1.5'"}, InvalidInputError, "'version' .*1.5 is not an integer"),
        ("objects", {"version": 9}, VersionNotFoundError, "version 9 does not exist; the latest is 2"),
        ("objects", {"export": "x"}, ExportNotFoundError, "no export 'x'"),
        ("objects", {"timestamp": 5}, VersionNotFoundError, "no version is as old as 5 ms"),
        ("objects", {"timestamp": dt.datetime(2020, 1, 1)}, InvalidInputError, "no time zone"),  # noqa: DTZ001
        ("objects", {"first_version": 1}, InvalidInputError, "'from' and 'to'.* 'changes'"),
        ("versions", {"export": "x"}, InvalidInputError, "option 'export'"),
        ("exports", {"version": 1}, InvalidInputError, "option 'version'"),
        ("changes", {"last_version": 3}, InvalidInputError, "range 1 to 3; .* is 2"),
        ("changes", {"first_version": 2, "last_version": 0}, InvalidInputError, "range 2 to 0"),
    ],
    ids=[
        "name",
        "column",
        "duplicate column",
        "filter syntax",
        "unknown column in filter",
        "unsupported column in filter",
        "invalid value in filter",
        "fraction",
        "several fractions",
        "fraction as text",
        "missing version",
        "missing export",
        "time before first version",
        "time without zone",
        "range of another table",
        "versions of export",
        "exports at version",
        "range after latest version",
        "reversed range",
    ],
)
def test_invalid_requests_are_rejected(
    lake: Lakehouse, table_name: str, request_: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        open_table(lake, table_name, **request_)


def test_version_and_export_cannot_be_combined() -> None:
    with pytest.raises(InvalidInputError):
        TableRequest(table="objects", version=1, export="x")


def test_memory_lakehouse_is_rejected(lakes: Lakes) -> None:
    with pytest.raises(InvalidInputError):
        open_table(lakes.memory(), "objects")


def test_docs_list_all_columns_and_options() -> None:
    text = (Path(__file__).parents[2] / "docs" / "spark" / "data-source.md").read_text()
    tables = text.partition("## What is read")[0].splitlines()
    for name, columns in METADATA_TABLES.items():
        (row,) = [line for line in tables if line.startswith(f"| `{name}` | ")]
        documented = [cell.split("`")[1] for cell in row.split("|")[3].split(", ") if cell.strip().startswith("`")]
        assert documented == list(columns)
    for option in OPTIONS:
        assert f"`{option}`" in text
