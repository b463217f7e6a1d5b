"""Test partial and full exports within a lakehouse and at another root, and their restores."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import duckdb
import duckdb_extension_avro
import duckdb_extension_iceberg
import pytest

from tests.lakes import Lakes, check_lake, entries, listed, objects
from tests.operations.changes import ROWS, append_rows, create, drop
from tests.operations.copies import delete_all_files
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    ExportExistsError,
    InvalidInputError,
    MaintenanceBlockedError,
    NamespaceNotFoundError,
    StorageError,
    VersionNotFoundError,
)
from trinitylake_ops.format.locations import is_uri
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import ExportReport, RestorePlan
from trinitylake_ops.storage import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")

NAMES = ("ns.t", "ns.u", "other.v")


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    """A lakehouse with a tree of several levels and three Iceberg tables in two namespaces, with two snapshots each."""
    lake = lakes.local(order=4)
    for name in (*NAMES, *NAMES):
        append_rows(lake, name)
    for number in range(6):
        create(lake, f"filler{number}", "a", "b")
    return lake


@pytest.fixture
def target(lakes: Lakes) -> str:
    return lakes.root("target")


def export(lake: Lakehouse, name: str, level: str, **arguments: Any) -> ExportReport:
    return operations.plan_export(lake, name, level, **arguments).execute()


def ids(lake: Lakehouse, name: str, version: int | str | None = None) -> list[int]:
    """Return the rows of a table."""
    with catalog_at(lake, version) as catalog:
        return sorted(catalog.load_table(name).scan().to_arrow()["id"].to_pylist())


def content(lake: Lakehouse, version: int | str | None = None) -> dict[str, Any]:
    return {"objects": objects(lake.snapshot(version)), "rows": {name: ids(lake, name, version) for name in NAMES}}


def duckdb_ids(metadata_location: str) -> list[int]:
    """Return the rows of a table that DuckDB's Iceberg extension reads from a local metadata file."""
    with duckdb.connect() as connection:
        for package in (duckdb_extension_avro, duckdb_extension_iceberg):
            (extension,) = Path(package.__path__[0]).rglob("*.duckdb_extension")
            connection.load_extension(str(extension))
        rows = connection.execute(
            "SELECT id FROM iceberg_scan(?) ORDER BY id", [unquote(urlsplit(metadata_location).path)]
        )
        return [row[0] for row in rows.fetchall()]


def table_paths(lake: Lakehouse) -> set[str]:
    return {path for path in listed(lake.storage) if path.startswith("tables/")}


LEVELS: dict[str, dict[str, Any]] = {
    "minimal": {"level": "minimal"},
    "partial": {"level": "partial"},
    "definitions": {"level": "partial", "definitions": True},
    "full": {"level": "full"},
}
each_level = pytest.mark.parametrize("arguments", LEVELS.values(), ids=list(LEVELS))


@each_level
def test_later_commits_do_not_change_export_within_lakehouse(lake: Lakehouse, arguments: dict[str, Any]) -> None:
    expected = content(lake)
    report = export(lake, "kept", **arguments)
    append_rows(lake, "ns.t")
    drop(lake, "other")
    assert content(lake, "kept") == expected
    assert report.version == lake.snapshot("kept").version
    assert operations.verify(lake).findings == ()
    exported, live = set(entries(lake, "kept").values()), set(entries(lake, report.version).values())
    assert (exported & live == set()) == (arguments["level"] == "full" or "definitions" in arguments)


@each_level
def test_export_within_lakehouse_is_restored(lake: Lakehouse, arguments: dict[str, Any]) -> None:
    expected = content(lake)
    export(lake, "kept", **arguments)
    append_rows(lake, "ns.t")
    drop(lake, "other")
    version = operations.restore_export(lake, "kept")
    assert (version, content(lake)) == (lake.latest_version(), expected)
    operations.drop_export(lake, "kept")
    append_rows(lake, "other.v")
    assert ids(lake, "other.v") == sorted(3 * ROWS["id"].to_pylist())
    assert operations.verify(lake).findings == ()


def test_full_export_shares_no_file_with_its_version(lake: Lakehouse) -> None:
    before = table_paths(lake)
    report = export(lake, "kept", "full")
    copies = table_paths(lake) - before
    assert {path.split("/")[2].partition("-")[0] for path in copies} == {"export"}
    for path in before:
        if not path.endswith("_owner.json"):
            lake.storage.delete(path)
    assert {name: ids(lake, name, "kept") for name in NAMES} == dict.fromkeys(NAMES, sorted(2 * [1, 2, 3]))
    assert report.copied_bytes > 0
    assert len(operations.list_exports(lake)) == 1


@each_level
def test_export_at_another_root_is_a_lakehouse(lake: Lakehouse, target: str, arguments: dict[str, Any]) -> None:
    expected = content(lake)
    report = export(lake, "away", target=target, **arguments)
    other = Lakehouse.open(target)
    assert (report.target_version, other.latest_version()) == (0, 0)
    assert content(other) == content(lake, "away") == expected
    definition = other.snapshot().definition
    assert (definition.exports, definition.exported_snapshots, definition.expirations) == ((), {}, ())
    assert definition.id != lake.snapshot().definition.id
    append_rows(other, "ns.new")
    assert ids(other, "ns.new") == [1, 2, 3]
    assert content(lake) == expected
    check_lake(other)
    assert operations.verify(other).findings == ()
    assert operations.verify(lake).findings == ()


@pytest.mark.local_only("renames a folder, and DuckDB reads local files")
def test_full_export_is_readable_without_its_source(lake: Lakehouse, target: str, tmp_path: Path) -> None:
    expected = content(lake)
    export(lake, "away", "full", target=target)
    source = Path(lake.root.removeprefix("file://"))
    source.rename(tmp_path / "moved")
    try:
        other = Lakehouse.open(target)
        assert content(other) == expected
        for name in NAMES:
            with catalog_at(other) as catalog:
                location = catalog.load_table(name).metadata_location
            assert location.startswith(other.root)
            assert duckdb_ids(location) == expected["rows"][name]
        append_rows(other, "ns.t")
        assert ids(other, "ns.t") == sorted(3 * [1, 2, 3])
        assert not any(is_uri(location) for location in entries(other).values())
        check_lake(other)
        assert operations.verify(other).findings == ()
    finally:
        (tmp_path / "moved").rename(source)


def test_next_export_copies_only_new_files(lake: Lakehouse, target: str) -> None:
    first = export(lake, "first", "full", target=target)
    append_rows(lake, "ns.t")
    create(lake, "fresh", "a")
    drop(lake, "filler0")
    before = listed(Lakehouse.open(target).storage)
    plan = operations.plan_export(lake, "second", "full", target=target)
    second = plan.execute()
    other = Lakehouse.open(target)
    assert (plan.into_version, second.target_version) == (0, 1)
    assert content(other) == content(lake)
    new_files = {path for path in listed(other.storage) - before if path.startswith("tables/")}
    assert len(new_files) == 4  # a data file, manifest, manifest list and metadata file
    assert second.copied_files < first.copied_files / 3
    assert content(lake, "first")["rows"]["ns.t"] == sorted(2 * [1, 2, 3])
    third = export(lake, "third", "full", version=second.version, target=target)
    assert (third.target_version, third.copied_files) == (1, 0)
    check_lake(other)


def test_selected_namespaces_are_exported(lake: Lakehouse, target: str) -> None:
    expected = content(lake)["rows"]
    for name, arguments in (("here", {}), ("away", {"target": target})):
        export(lake, name, "full", namespaces=["other", "filler1"], **arguments)
        snapshot = lake.snapshot(name)
        assert (snapshot.namespaces(), snapshot.tables("other")) == (["filler1", "other"], ["v"])
    drop(lake, "other")
    append_rows(lake, "ns.t")
    for name in ("here", "away"):
        operations.restore_export(lake, name)
        assert {**expected, "ns.t": sorted(3 * [1, 2, 3])} == content(lake)["rows"]
        drop(lake, "other")
    with pytest.raises(InvalidInputError):
        operations.plan_rollback(lake, "here", namespaces=["ns"])
    with pytest.raises(NamespaceNotFoundError):
        operations.plan_export(lake, "name", "partial", namespaces=["missing"])


@each_level
def test_export_at_another_root_is_restored(lake: Lakehouse, target: str, arguments: dict[str, Any]) -> None:
    expected = content(lake)
    export(lake, "away", target=target, **arguments)
    append_rows(lake, "ns.t")
    drop(lake, "other")
    create(lake, "later")
    plan = operations.plan_restore(lake, "away")
    assert isinstance(plan, RestorePlan)
    assert [(change.kind, change.namespace, change.table) for change in plan.changes] == [
        ("removed", "later", None),
        ("added", "other", None),
        ("changed", "ns", "t"),
        ("added", "other", "v"),
    ]
    with pytest.raises(InvalidInputError):
        operations.plan_rollback(lake, "away")
    version = plan.execute(plan.digest).version
    assert (version, content(lake)) == (lake.latest_version(), expected)
    if arguments["level"] == "full":
        delete_all_files(Lakehouse.open(target))
    append_rows(lake, "other.v")
    assert ids(lake, "other.v") == sorted(3 * [1, 2, 3])
    assert operations.restore_export(lake, "away") != version if arguments["level"] != "full" else True


def test_export_does_not_overwrite_another_lakehouse(lake: Lakehouse, target: str, lakes: Lakes) -> None:
    other = lakes.local("other")
    create(other, "precious")
    with pytest.raises(InvalidInputError):
        operations.plan_export(lake, "away", "full", target=other.root)
    export(lake, "away", "full", target=target)
    create(Lakehouse.open(target), "theirs")
    with pytest.raises(InvalidInputError):
        operations.plan_export(lake, "again", "full", target=target)
    for inner_root in (lake.root, f"{lake.root}exports/", lake.root.rsplit("/", 2)[0]):
        with pytest.raises(InvalidInputError):
            operations.plan_export(lake, "inside", "full", target=inner_root)


def test_export_with_another_selection_is_rejected_at_target(lake: Lakehouse, target: str) -> None:
    export(lake, "away", "full", target=target, namespaces=["ns"])
    for arguments in ({"level": "full"}, {"level": "partial", "namespaces": ["ns"]}):
        with pytest.raises(InvalidInputError):
            operations.plan_export(lake, "again", target=target, **arguments)


def test_interrupted_export_is_resumed_with_the_same_options(lake: Lakehouse) -> None:
    class FullDiskStorage(MeteredStorage):
        n_remaining = 5

        def create(self, path: str, data: bytes) -> None:
            self.n_remaining -= path.startswith("tables/")
            if self.n_remaining < 0:
                raise StorageError("the disk is full", path=path)
            super().create(path, data)

    with pytest.raises(StorageError):
        export(Lakehouse(FullDiskStorage(lake.storage)), "kept", "full")
    with pytest.raises(ExportExistsError):
        operations.plan_export(lake, "kept", "partial")
    before = table_paths(lake)
    plan = operations.plan_export(lake, "kept", "full")
    assert plan.resumes
    report = plan.execute()
    assert report.resumed
    assert before < table_paths(lake)
    assert content(lake, "kept") == content(lake, report.version)
    assert operations.verify(lake).findings == ()


def test_concurrent_exports_into_one_target_are_serialized(lake: Lakehouse, target: str) -> None:
    """The exports can change different tables, but each version at the target equals a version of the source."""
    first = export(lake, "first", "full", target=target)
    append_rows(lake, "ns.t")
    version = lake.latest_version()
    operations.rollback(lake, first.version)
    create(lake, "later", "a")
    plans = [operations.plan_export(lake, "faster", "full", target=target)]

    def run_faster_export(*_: object) -> None:
        if plans:
            plans.pop().execute()

    slower_plan = operations.plan_export(lake, "slower", "full", version, target=target)
    with pytest.raises(MaintenanceBlockedError):
        slower_plan.execute(progress=run_faster_export)
    assert objects(Lakehouse.open(target).snapshot()) == objects(lake.snapshot("faster"))
    export(lake, "slower", "full", version=version, target=target)
    assert content(lake, "slower") == content(lake, version)


@each_level
def test_another_export_succeeds_after_interrupted_first_export(
    lake: Lakehouse, target: str, arguments: dict[str, Any]
) -> None:
    """The first export was interrupted before it created a lakehouse. Its files do not block the second export."""
    export(lake, "first", **arguments, target=target)
    storage = lake.exported("first").files.storage
    for info in list(storage.list("_")):
        storage.delete(info.path)
    operations.drop_export(lake, "first")
    append_rows(lake, "ns.t")
    export(lake, "second", **arguments, target=target)
    assert content(lake, "second")["rows"]["ns.t"] == ids(lake, "ns.t")
    assert operations.verify_export(lake, "second", deep=True).is_clean


def test_export_of_export_at_another_root_is_rejected(lake: Lakehouse, target: str) -> None:
    export(lake, "away", "full", target=target)
    with pytest.raises(InvalidInputError):
        operations.plan_export(lake, "again", version="away")
    with pytest.raises(VersionNotFoundError):
        operations.plan_export(lake, "again", version=10_000)
