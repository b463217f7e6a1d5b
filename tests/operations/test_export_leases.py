"""Test how long exports keep their files."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.clock import AgingStorage
from tests.foreign import ForeignLake
from tests.lakes import Lakes, check_lake, listed, objects
from tests.operations.aging import DAY_MS, Aging, grow, keeping
from tests.operations.changes import ROWS, append_rows, create, drop
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    ExportNotFoundError,
    MaintenanceBlockedError,
    StorageError,
    StoragePermissionError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.storage import LocalStorage, Storage, StorageWrapper

LEVELS: dict[str, dict[str, Any]] = {
    "minimal": {"level": "minimal"},
    "partial": {"level": "partial"},
    "definitions": {"level": "partial", "definitions": True},
    "full": {"level": "full"},
}
each_level = pytest.mark.parametrize("arguments", LEVELS.values(), ids=list(LEVELS))


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse of many versions with an Iceberg table."""
    storage = LocalStorage(f"file://{lakes.folder}/source/", fsync=False)
    aging = Aging.on(storage)
    grow(aging, 4)
    append_rows(aging.lake)
    return aging


def content(lake: Lakehouse, version: int | str | None = None) -> object:
    with catalog_at(lake, version) as catalog:
        rows = catalog.load_table("ns.t").scan().to_arrow()["id"].to_pylist()
    return objects(lake.snapshot(version)), sorted(rows)


def replace_objects(aging: Aging) -> None:
    """Drop all namespaces and create another one."""
    for namespace in aging.lake.snapshot().namespaces():
        drop(aging.lake, namespace)
    create(aging.lake, "later", "t")


@each_level
@pytest.mark.parametrize("is_at_another_root", [False, True], ids=["same-root", "another-root"])
def test_export_is_readable_until_its_retention_ends(
    aging: Aging, tmp_path: Path, arguments: dict[str, Any], is_at_another_root: bool
) -> None:
    lake, target = aging.lake, str(tmp_path / "target")
    expected = content(lake)
    options = {**arguments, "target": target} if is_at_another_root else arguments
    report = operations.plan_export(lake, "kept", retain_for=30 * DAY_MS, **options).execute()
    replace_objects(aging)
    for _ in range(2):
        aging.clean_up()
        assert content(Lakehouse(lake.storage), "kept") == expected
        assert operations.verify(lake).is_clean
    if arguments["level"] == "full":
        with pytest.raises(VersionExpiredError):
            lake.snapshot(report.version)
    else:
        assert lake.snapshot(report.version).version == report.version
    if is_at_another_root:
        assert content(Lakehouse.open(target)) == expected
    aging.later(30 * DAY_MS)
    for _ in range(2):
        aging.clean_up()
    with pytest.raises(ExportNotFoundError):
        lake.snapshot("kept")
    assert not [path for path in listed(lake.storage) if path.startswith(("tables/", "_export_", "_ops/export-"))]
    if is_at_another_root and arguments["level"] != "full":
        with pytest.raises(StorageError):
            content(Lakehouse(Lakehouse.open(target).storage))
    elif is_at_another_root:
        assert content(Lakehouse.open(target)) == expected


@each_level
def test_export_is_readable_after_rollback_by_another_program(aging: Aging, arguments: dict[str, Any]) -> None:
    """The other program restores a definition without the export."""
    lake = aging.lake
    before = lake.latest_version()
    expected = content(lake)
    operations.plan_export(lake, "kept", **arguments).execute()
    replace_objects(aging)
    ForeignLake(lake.storage).rollback(before, keeps_unknown=False)
    assert operations.list_exports(lake) == []
    aging.later()
    with pytest.raises(MaintenanceBlockedError):
        operations.plan_expiration(lake, keeping(1)).execute()
    assert operations.reconcile(lake).restored_exports == ("kept",)
    replace_objects(aging)
    for _ in range(2):
        aging.clean_up()
    assert content(Lakehouse(lake.storage), "kept") == expected
    assert operations.verify(lake).is_clean


def test_independent_reader_reads_export_at_another_root(aging: Aging, tmp_path: Path) -> None:
    operations.plan_export(aging.lake, "away", "full", target=str(tmp_path / "target")).execute()
    other = Lakehouse.open(str(tmp_path / "target"))
    foreign = ForeignLake(other.storage)
    names = {f"{name}.{table}" for name in other.snapshot().namespaces() for table in other.snapshot().tables(name)}
    assert (foreign.latest(), foreign.tables()) == (0, names)
    foreign.commit_table("n0", "theirs")
    assert other.snapshot().has_table("n0", "theirs")
    append_rows(other)
    assert foreign.tables() == {*names, "n0.theirs"}
    check_lake(other)


def test_orphan_removal_deletes_files_of_dropped_export(aging: Aging) -> None:
    lake = aging.lake
    before = {path for path in listed(lake.storage) if path.startswith("tables/")}
    operations.plan_export(lake, "kept", "full").execute()
    assert {path for path in listed(lake.storage) if path.startswith("tables/")} > before
    operations.drop_export(lake, "kept")
    aging.later()
    aging.remove_orphans()
    assert {path for path in listed(lake.storage) if path.startswith("tables/")} == before
    assert content(lake)[1] == ROWS["id"].to_pylist()  # type: ignore[index]


class LimitedCreatesStorage(StorageWrapper):
    """A storage that fails after a number of creates."""

    def __init__(self, inner: Storage, n_creates: int):
        super().__init__(inner)
        self.n_remaining = n_creates

    def create(self, path: str, data: bytes) -> None:
        self.n_remaining -= 1
        if self.n_remaining < 0:
            raise StoragePermissionError("injected: too many creates", path=path)
        self.inner.create(path, data)


def test_copies_of_interrupted_export_are_not_orphans(aging: Aging) -> None:
    """This includes copied nodes, regardless of the age of the interrupted run."""
    lake = aging.lake
    create(lake, "big", *(f"t{number}" for number in range(40)))
    expected = content(lake)
    n_files = operations.plan_export(lake, "counted", "full").execute().files
    operations.drop_export(lake, "counted")
    aging.later()
    aging.remove_orphans()
    with pytest.raises(StoragePermissionError):
        failing_lake = Lakehouse(LimitedCreatesStorage(lake.storage, n_files))
        operations.plan_export(failing_lake, "kept", "full").execute()
    before = listed(lake.storage)
    aging.later()
    assert operations.plan_orphan_removal(lake).paths == []
    report = operations.plan_export(lake, "kept", "full").execute()
    assert (report.resumed, report.copied_files < 10) == (True, True)
    assert before <= listed(lake.storage)
    assert content(lake, "kept") == expected


def test_old_copies_at_another_root_are_not_reused(aging: Aging, lakes: Lakes) -> None:
    """A concurrent orphan removal could delete the old copies, so the new copies get other names."""
    lake, root = aging.lake, f"file://{lakes.folder}/target/"
    operations.plan_export(lake, "first", "full", target=root).execute()
    append_rows(lake)
    target_storage = LocalStorage(root, fsync=False)
    failing_target = mock.patch.object(
        export_module, "open_storage", return_value=LimitedCreatesStorage(target_storage, 3)
    )
    with failing_target, pytest.raises(TrinityLakeError):
        operations.plan_export(lake, "second", "full", target=root).execute()
    before = listed(target_storage)
    later_storage = AgingStorage(target_storage, target_storage.now_ms() + 2 * DAY_MS)
    with mock.patch.object(export_module, "open_storage", return_value=later_storage):
        operations.plan_export(lake, "second", "full", target=root).execute()
    assert {path.split("/")[2][:7] for path in listed(target_storage) - before if path.startswith("tables/")} == {
        "export-"
    }
    operations.plan_orphan_removal(Lakehouse(later_storage)).execute()
    assert content(Lakehouse.open(root)) == content(lake)
    check_lake(Lakehouse.open(root))


def test_restored_source_files_get_new_names_at_target(aging: Aging, lakes: Lakes) -> None:
    """The old names belong to a version at the target that can be purged during the export."""
    lake, root = aging.lake, f"file://{lakes.folder}/target/"
    before = lake.latest_version()
    operations.plan_export(lake, "first", "full", target=root).execute()
    drop(lake, "n0")
    append_rows(lake)
    operations.plan_export(lake, "second", "full", target=root).execute()
    operations.rollback(lake, before)
    target_storage = LocalStorage(root, fsync=False)
    later_storage = AgingStorage(target_storage, target_storage.now_ms() + 2 * DAY_MS)
    with mock.patch.object(export_module, "open_storage", return_value=later_storage):
        operations.plan_export(lake, "third", "full", target=root).execute()
    other = Lakehouse(later_storage)
    assert content(other) == content(lake)
    target = Aging(other, later_storage)
    for _ in range(2):
        target.clean_up()
        assert content(Lakehouse(target_storage)) == content(lake)
    assert operations.verify(other).is_clean
