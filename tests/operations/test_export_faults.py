"""Test exports that are interrupted, cleaned up, replaced, damaged or run concurrently."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from tests.clock import AgingStorage
from tests.lakes import Lakes, allowing, listed
from tests.operations.aging import LONG_MS, Aging, grow, keeping, needed_files
from tests.operations.changes import ROWS, append_rows, create, drop, expire
from tests.operations.test_export_leases import LimitedCreatesStorage, content
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    ExportExistsError,
    ExportNotFoundError,
    FileMissingError,
    InvalidInputError,
    StorageError,
    StoragePermissionError,
    TrinityLakeError,
    VersionExpiredError,
)
from trinitylake_ops.format.definitions import TableDef
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.operations import ExportReport
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.storage import LocalStorage, MemoryStorage, Storage, StorageWrapper, background, drop_memory_root


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse of a few versions with an Iceberg table."""
    aging = Aging.on(LocalStorage(f"file://{lakes.folder}/source/", fsync=False))
    grow(aging, 2)
    append_rows(aging.lake)
    return aging


@pytest.fixture
def target(aging: Aging, lakes: Lakes) -> AgingStorage:
    """Another root with a clock that tests set."""
    storage = LocalStorage(f"file://{lakes.folder}/target/", fsync=False)
    return AgingStorage(storage, storage.now_ms())


def patch_target_storage(storage: Storage) -> AbstractContextManager[object]:
    """Make exports open their target as this storage."""
    return mock.patch.object(export_module, "open_storage", return_value=storage)


def export_to(storage: Storage, lake: Lakehouse, name: str, level: str = "full", **arguments: object) -> ExportReport:
    with patch_target_storage(storage):
        return operations.plan_export(lake, name, level, target=storage.root, **arguments).execute()  # type: ignore[arg-type]


class RejectingStorage(StorageWrapper):
    """A storage that rejects the creation of files that match a rule."""

    def __init__(self, inner: Storage, rule: Callable[[str], bool]):
        super().__init__(inner)
        self.rule = rule

    def create(self, path: str, data: bytes) -> None:
        if self.rule(path):
            raise StoragePermissionError("injected: rejected", path=path)
        self.inner.create(path, data)


class ActionStorage(StorageWrapper):
    """A storage that runs an action once, before the first deletion."""

    def __init__(self, inner: Storage, action: Callable[[], object]):
        super().__init__(inner)
        self.actions = [action]

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        while self.actions:
            self.actions.pop()()
        return self.inner.delete_batch(paths)


def interrupt_before_commit(lake: Lakehouse, target: AgingStorage, name: str) -> None:
    """Export everything except the root of version 1 at the target."""
    rejecting_storage = RejectingStorage(target, lambda path: path.startswith("_1"))
    with pytest.raises(StoragePermissionError):
        export_to(rejecting_storage, lake, name)


def test_old_copies_of_interrupted_runs_are_not_reused(aging: Aging, target: AgingStorage) -> None:
    """An orphan removal that is already running could delete the copies, because it may have listed their names."""
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    for _ in range(2):
        interrupt_before_commit(lake, target, "second")
        target.time_ms += LONG_MS
    action_storage = ActionStorage(target, lambda: export_to(target, lake, "second"))
    operations.plan_orphan_removal(Lakehouse(action_storage)).execute()
    assert action_storage.actions == []
    assert operations.verify(Lakehouse(target)).is_clean
    assert content(Lakehouse(target)) == content(lake)


def test_copies_of_later_generations_are_reused(aging: Aging, target: AgingStorage) -> None:
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    interrupt_before_commit(lake, target, "second")
    target.time_ms += LONG_MS
    report = export_to(target, lake, "second")
    assert report.copied_files > 4
    report_again = export_to(target, lake, "third", version=report.version)
    assert (report_again.target_version, report_again.copied_files) == (report.target_version, 0)
    assert operations.plan_restore(lake, "second").changes == ()


@pytest.mark.parametrize("n_creates", range(3, 15, 3))
def test_interrupted_first_export_does_not_block_others(aging: Aging, target: AgingStorage, n_creates: int) -> None:
    """The record of the interrupted export exists at first, and is then dropped."""
    lake = aging.lake
    with pytest.raises(TrinityLakeError):
        export_to(LimitedCreatesStorage(target, n_creates), lake, "first")
    export_to(target, lake, "second", "full")
    operations.drop_export(lake, "first")
    append_rows(lake)
    export_to(target, lake, "third")
    assert content(Lakehouse(target)) == content(lake)
    other = Aging(Lakehouse(target), target)
    other.later()
    assert other.remove_orphans().files == 1  # the definition that the first export wrote
    assert content(other.lake) == content(lake)


def test_target_accepts_exports_after_purging_old_versions(aging: Aging, target: AgingStorage) -> None:
    """Only a sealed root remains of the version that an export created."""
    lake = aging.lake
    export_to(target, lake, "first")
    other = Aging(Lakehouse(target), target)
    for stamp in range(3):
        other.lake.alter_definition(properties={"stamp": str(stamp)})
        other.clean_up()
    assert [info.state for info in other.lake.history()][-1] == "sealed"
    append_rows(lake)
    export_to(target, lake, "second")
    assert content(Lakehouse(target)) == content(lake)
    with pytest.raises(InvalidInputError):
        export_to(target, lake, "third", "partial")
    foreign = Lakehouse.create("memory://export-dangers/", storage=MemoryStorage("memory://export-dangers/"))
    with pytest.raises(InvalidInputError, match="source_id"):
        export_to(target, foreign, "theirs", "partial")
    drop_memory_root("memory://export-dangers/")


def test_selections_of_namespaces_are_distinguished(lakes: Lakes, target: AgingStorage) -> None:
    lake = lakes.local("many")
    names = [f"n{number:02}{'x' * 90}" for number in range(60)]
    with lake.transaction() as txn:
        for name in ("a", "b", "a,b", *names):
            txn.create_namespace(name)
    export_to(target, lake, "two", namespaces=["a", "b"])
    with pytest.raises(InvalidInputError):
        export_to(target, lake, "one", namespaces=["a,b"])
    other = LocalStorage(f"file://{lakes.folder}/other/", fsync=False)
    export_to(other, lake, "many", namespaces=names)
    assert Lakehouse(other).snapshot().namespaces() == names
    with pytest.raises(InvalidInputError):
        export_to(other, lake, "fewer", namespaces=names[1:])


def test_missing_files_at_target_are_copied_again_or_reported(aging: Aging, target: AgingStorage) -> None:
    """A completed export has all files that it needs."""
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    (data,) = (path for path in listed(target) if path.endswith(".parquet"))
    target.delete(data)
    export_to(target, lake, "second")
    assert operations.verify_export(lake, "second", deep=True).is_clean
    namespace = next(path for path in listed(target) if "-namespace-" in path)
    target.delete(namespace)
    with pytest.raises(FileMissingError) as raised:
        export_to(target, lake, "third")
    assert raised.value.path == namespace


@pytest.fixture
def incremental(aging: Aging, target: AgingStorage) -> AgingStorage:
    """A target with two exports, of which the second changed only nodes and a few definitions."""
    export_to(target, aging.lake, "first")
    create(aging.lake, "more", *(f"t{number}" for number in range(40)))
    export_to(target, aging.lake, "second")
    assert operations.verify_export(aging.lake, "second", deep=True).is_clean
    return target


@pytest.mark.parametrize("file_kind", ["_10000", "node-", ".parquet", "-m0.avro", ".metadata.json", "table-"])
def test_verify_export_finds_each_missing_file(aging: Aging, incremental: AgingStorage, file_kind: str) -> None:
    """The file may have been copied by this export or an earlier one, or written by the commit."""
    needed = needed_files(Lakehouse(incremental))
    paths = [path for path in needed if file_kind in path] or [
        path for path in listed(incremental) if file_kind in path
    ]
    for path in paths:
        data = incremental.read(path)
        incremental.delete(path)
        assert path in operations.verify_export(aging.lake, "second").missing
        incremental.create(path, data)
    assert paths
    assert operations.verify_export(aging.lake, "second").is_clean


def test_verify_export_ignores_leftovers_of_interrupted_run(aging: Aging, target: AgingStorage) -> None:
    """Copies in the manifest of an interrupted run can be orphans of the target."""
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    interrupt_before_commit(lake, target, "second")
    target.time_ms += LONG_MS
    export_to(target, lake, "second")
    target.time_ms += LONG_MS
    assert operations.plan_orphan_removal(Lakehouse(target)).execute().files > 3
    assert operations.verify_export(lake, "second", deep=True).is_clean


def test_verify_export_fails_when_version_expired_at_target(aging: Aging, incremental: AgingStorage) -> None:
    expire(Lakehouse(incremental), "0")
    with pytest.raises(VersionExpiredError):
        operations.verify_export(aging.lake, "first")
    assert operations.verify_export(aging.lake, "second").is_clean


def test_restore_fails_when_another_lakehouse_replaced_the_export(
    aging: Aging, target: AgingStorage, lakes: Lakes
) -> None:
    """A restore from the new lakehouse would drop all objects."""
    export_to(target, aging.lake, "away")
    background.drain()
    shutil.rmtree(lakes.folder / "target")
    create(Lakehouse.create(target.root), "theirs")
    for operation in (operations.plan_restore, operations.verify_export):
        with pytest.raises(InvalidInputError, match=r"/target/"):
            operation(aging.lake, "away")


class ConcurrentCommitStorage(StorageWrapper):
    """A storage that runs a concurrent commit before each new lakehouse definition is written."""

    def __init__(self, inner: Storage, concurrent_actions: Sequence[Callable[[], object]]):
        super().__init__(inner)
        self.concurrent_actions = list(concurrent_actions)

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("_lakehouse_def_") and self.concurrent_actions:
            self.concurrent_actions.pop(0)()
        self.inner.create(path, data)


def test_concurrent_exports_and_drops_do_not_conflict(aging: Aging) -> None:
    """A long copy must not fail at its last commit."""
    lake = aging.lake
    for number in range(4):
        operations.plan_export(lake, f"old{number}").execute()

    def concurrent_actions(number: int) -> list[Callable[[], object]]:
        return [
            lambda: operations.drop_export(lake, f"old{number}"),
            lambda: lake.alter_definition(properties={"stamp": str(number)}),
            lambda: operations.plan_export(lake, f"new{number}", "full").execute(),
        ]

    for number in range(2):
        racing_storage = ConcurrentCommitStorage(aging.clock, concurrent_actions(number))
        operations.plan_export(Lakehouse(racing_storage), f"kept{number}", "full").execute()
        assert racing_storage.concurrent_actions == []
    racing_storage = ConcurrentCommitStorage(aging.clock, concurrent_actions(2))
    operations.drop_export(Lakehouse(racing_storage), "old3")
    assert racing_storage.concurrent_actions == []
    states = {info.name: info.state for info in operations.list_exports(lake)}
    assert states == dict.fromkeys(("kept0", "kept1", "new0", "new1", "new2"), "complete")
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("level", ["minimal", "partial"])
def test_export_succeeds_after_source_files_of_earlier_export_were_deleted(
    aging: Aging, target: AgingStorage, level: str
) -> None:
    lake = aging.lake
    export_to(target, lake, "first", level)
    operations.drop_export(lake, "first")
    drop(lake, "n0")
    append_rows(lake)
    aging.clean_up()
    export_to(target, lake, "second", level)
    assert content(Lakehouse(target, cache="off")) == content(lake)


class DroppingStorage(StorageWrapper):
    """A storage that drops an export before its root is read."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path.startswith("_export_"):
            operations.drop_export(Lakehouse(self.inner), "kept")
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)


@pytest.mark.parametrize("operation", [Lakehouse.snapshot, operations.plan_restore], ids=["snapshot", "restore"])
def test_opening_an_export_dropped_concurrently_fails(
    aging: Aging, operation: Callable[[Lakehouse, str], object]
) -> None:
    operations.plan_export(aging.lake, "kept", "full").execute()
    with pytest.raises(ExportNotFoundError, match="'kept'"):
        operation(Lakehouse(DroppingStorage(aging.clock)), "kept")


def test_opening_an_export_without_root_fails(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", "full").execute()
    location = aging.lake.snapshot().definition.exported_snapshots["kept"]
    aging.clock.delete(location)
    with pytest.raises(ExportNotFoundError, match="'kept'"):
        operations.plan_restore(aging.lake, "kept")


def test_drop_keeps_new_export_with_the_same_name(aging: Aging) -> None:
    lake = aging.lake
    operations.plan_export(lake, "kept").execute()

    def replace_export() -> None:
        operations.drop_export(lake, "kept")
        operations.plan_export(lake, "kept", "full").execute()

    with pytest.raises(ExportNotFoundError):
        operations.drop_export(Lakehouse(ConcurrentCommitStorage(aging.clock, [replace_export])), "kept")
    assert [info.level for info in operations.list_exports(lake)] == ["full"]


@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
def test_export_of_export_dropped_during_copy_fails(aging: Aging, level: str) -> None:
    """The files of the dropped export are no longer kept."""
    lake = aging.lake
    operations.plan_export(lake, "old", "full").execute()
    drop(lake, "ns")

    def drop_old(_what: str, done: int, _total: int) -> None:
        if done == 1:
            operations.drop_export(lake, "old")
            aging.clean_up()

    with pytest.raises((ExportNotFoundError, FileMissingError)):
        operations.plan_export(lake, "new", level, version="old").execute(progress=drop_old)
    assert operations.verify(lake).is_clean
    # A full export cannot be resumed, because the source files are missing.
    expected_records = [] if level == "full" else [("new", "copying")]
    assert [(info.name, info.state) for info in operations.list_exports(lake)] == expected_records
    operations.plan_export(lake, "kept", "full").execute()
    operations.plan_export(lake, "of-kept", level, version="kept").execute()
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("has_changed", [False, True], ids=["compacted", "changed"])
def test_minimal_export_is_independent_of_earlier_exports(
    aging: Aging, target: AgingStorage, has_changed: bool
) -> None:
    """Nodes that only the earlier version uses are deleted with it."""
    lake = aging.lake
    grow(aging, 8, "m")
    export_to(target, lake, "first", "minimal")
    if has_changed:
        grow(aging, 8, "k")
    operations.compact(lake)
    expected = content(lake)
    report = export_to(target, lake, "second", "minimal")
    assert (report.target_version, report.copied_files) == (1, 0)
    operations.drop_export(lake, "first")
    aging.clean_up()
    target_lake = Lakehouse(target, cache="off")
    assert content(target_lake) == expected
    assert export_to(target, lake, "same-once-more", "minimal").target_version == 1


def test_opening_an_incomplete_export_fails(aging: Aging, target: AgingStorage) -> None:
    with pytest.raises(StoragePermissionError):
        export_to(RejectingStorage(target, lambda path: True), aging.lake, "incomplete")
    for operation in (operations.plan_restore, operations.plan_rollback):
        with pytest.raises(ExportNotFoundError, match="'incomplete'"):
            operation(aging.lake, "incomplete")


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"files": [{"target": 1}]}', "odd", "sizes"], ids=repr)
def test_damaged_manifest_is_reported(aging: Aging, damage: bytes | str) -> None:
    """An interrupted export with a damaged manifest can still be dropped."""
    lake = aging.lake
    operations.plan_export(lake, "kept", "full").execute()
    rejecting_lake = Lakehouse(RejectingStorage(aging.clock, lambda path: path.startswith("_export_")))
    with pytest.raises(StoragePermissionError):
        operations.plan_export(rejecting_lake, "incomplete", "full").execute()
    for record in lake.snapshot().definition.exports:
        manifest = json.loads(lake.storage.read(record.manifest_path))
        for file in manifest["files"]:
            file.update({"odd": 1} if damage == "odd" else {"size_bytes": "1"})
        data = damage if isinstance(damage, bytes) else json.dumps(manifest).encode()
        lake.storage.write(record.manifest_path, data)
    with pytest.raises(CorruptFileError):
        operations.verify_export(lake, "kept")
    with pytest.raises((CorruptFileError, ExportExistsError)):
        operations.plan_export(lake, "incomplete", "full").execute()
    operations.drop_export(lake, "incomplete")
    operations.plan_export(lake, "incomplete", "full").execute()
    assert operations.verify_export(lake, "incomplete", deep=True).is_clean


def test_namespaces_with_dots_are_restored_by_table(lakes: Lakes) -> None:
    lake = lakes.local()
    for namespace in ("a.b", "a", "c"):
        create(lake, namespace, "t", "u")
    for name, target in (("here", None), ("away", lakes.root("target"))):
        operations.plan_export(lake, name, "full", target=target, namespaces=["a.b"]).execute()
        drop(lake, "a.b", "t")
        operations.restore_export(lake, name, tables=["a.b.t"])
        assert lake.snapshot().tables("a.b") == ["t", "u"]
        for selection in ({"tables": ["a.t"]}, {"namespaces": ["a"]}, {"namespaces": ["c"]}):
            with pytest.raises(InvalidInputError, match=r"a\.b"):
                operations.plan_restore(lake, name, **selection)


def test_full_export_rejects_files_of_other_formats(lakes: Lakes, target: AgingStorage) -> None:
    """A full export is independent of its source, so files that cannot be copied are rejected."""
    lake = lakes.local()
    create(lake, "ns", "empty")
    table_id = str(uuid.uuid4())
    data = f"tables/{table_id}/part-{uuid.uuid4()}.lance"
    lake.storage.create(data, b"data")
    with lake.transaction() as txn:
        txn.create_table("ns", "other", TableDef(id=table_id, table_type="MANAGED", table_format="LANCE"))
    with pytest.raises(InvalidInputError, match=f"table {table_id} of format 'LANCE' cannot be copied"):
        export_to(target, lake, "away")
    assert operations.list_exports(lake) == []
    export_to(target, lake, "partial", "partial")
    operations.plan_export(lake, "here", "full").execute()
    drop(lake, "ns", "other")
    operations.restore_export(lake, "here")
    assert lake.snapshot().table("ns", "other").id == table_id
    assert lake.storage.read(data) == b"data"


@pytest.mark.parametrize("codec", ["gzip", "zstd", "bzip2"])
def test_manifests_of_every_codec_are_copied(lakes: Lakes, target: AgingStorage, codec: str) -> None:
    lake = lakes.local()
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        properties = {"write.avro.compression-codec": codec}
        catalog.create_table("ns.t", ROWS.schema, properties=properties).append(ROWS)
    export_to(target, lake, "away")
    assert content(Lakehouse(target)) == content(lake)
    assert operations.verify(Lakehouse(target), deep=True).is_clean


def test_external_data_file_with_long_name_is_copied(lakes: Lakes, target: AgingStorage) -> None:
    lake = allowing(lakes.local(), lakes.folder)
    append_rows(lake)
    long_name = lakes.folder / f"{'é' * 120}.parquet"
    pq.write_table(ROWS, long_name)
    with catalog_at(lake) as catalog:
        catalog.load_table("ns.t").add_files([long_name.as_posix()])
    export_to(target, lake, "away")
    operations.plan_export(lake, "here", "full").execute()
    long_name.unlink()
    assert content(Lakehouse(target)) == content(lake, "here")
    with pytest.raises(FileNotFoundError):
        content(lake)


@pytest.mark.local_only("uses local paths")
@pytest.mark.parametrize("spelling", ["{root}", "file:{folder}/", "file://{folder}-link/"])
def test_drop_keeps_root_that_another_export_spells_differently(lakes: Lakes, spelling: str) -> None:
    """Other programs can record the root as a URI, in Hadoop's spelling, or through a link."""
    lake = lakes.local()
    create(lake, "n")
    operations.plan_export(lake, "ours").execute()
    definition = lake.snapshot().definition
    path, folder = definition.exported_snapshots["ours"], lake.root.removeprefix("file://").rstrip("/")
    os.symlink(folder, f"{folder}-link")
    alias = spelling.format(root=lake.root, folder=folder) + path
    lake.alter_definition(exported_snapshots={**definition.exported_snapshots, "theirs": alias})
    operations.drop_export(lake, "ours")
    assert path in listed(lake.storage)
    if "link" not in spelling:
        assert lake.snapshot("theirs").namespaces() == ["n"]
        operations.drop_export(lake, "theirs")
    assert list_names(lake) == ([] if "link" not in spelling else ["theirs"])


@pytest.mark.local_only("uses local paths")
def test_version_exported_by_uri_does_not_expire(lakes: Lakes) -> None:
    lake = lakes.local()
    create(lake, "n")
    create(lake, "m")
    folder = lake.root.removeprefix("file://")
    lake.alter_definition(exported_snapshots={"theirs": f"file:{folder}{lake.files.roots.path(1)}"})
    later_aging = Aging(lake, AgingStorage(lake.storage, lake.storage.now_ms() + LONG_MS))
    plan = operations.plan_expiration(Lakehouse(later_aging.clock), keeping(1))
    assert [verdict.version for verdict in plan.verdicts if verdict.expires] == [0, 2]


def list_names(lake: Lakehouse) -> list[str]:
    return [info.name for info in operations.list_exports(lake)]


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_concurrent_run_of_same_export_is_resumed(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.memory()
    create(lake, "n")
    first, second = (operations.plan_export(lake, "e") for _ in range(2))
    has_begun: list[bool] = []
    begin = export_module.begin

    def begin_after_other_run(lake_of_run: Lakehouse, *arguments: Any) -> object:
        if not has_begun:
            has_begun.append(True)
            begin(Lakehouse(lake.storage), second.record, lambda _base: None)
        return begin(lake_of_run, *arguments)

    monkeypatch.setattr(export_module, "begin", begin_after_other_run)
    report = first.execute()
    assert report.resumed
    assert [record.name for record in lake.snapshot().definition.exports] == ["e"]
    with pytest.raises(ExportExistsError):
        second.execute()
    assert operations.verify(lake).is_clean


@pytest.mark.usefixtures("fixed_requests_of_test")
def test_export_dropped_during_copy_leaves_no_files(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.memory()
    create(lake, "n")
    begin = export_module.begin

    def begin_and_drop(*arguments: Any) -> object:
        result = begin(*arguments)
        operations.drop_export(Lakehouse(lake.storage), "e")
        return result

    monkeypatch.setattr(export_module, "begin", begin_and_drop)
    with pytest.raises(ExportNotFoundError):
        operations.plan_export(lake, "e").execute()
    assert [info.path for info in lake.storage.list("_export_")] == []
    assert [info.path for info in lake.storage.list("_ops/")] == []
