"""What may go wrong around exports: cut off again and again, cleaned up, replaced, damaged, made at the same time."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from unittest import mock

import pyarrow.parquet as pq
import pytest

from tests.clock import AgingStorage
from tests.lakes import Lakes, allowing, listed
from tests.operations.aging import LONG_MS, Aging, grow, keeping, needed_files
from tests.operations.changes import ROWS, append_rows, create, drop, expire
from tests.operations.test_export_leases import Dying, content
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
from trinitylake_ops.storage import LocalStorage, MemoryStorage, Storage, StorageWrapper, drop_memory_root


@pytest.fixture
def aging(lakes: Lakes) -> Aging:
    """A lakehouse of a few versions with an Iceberg table."""
    aging = Aging.on(LocalStorage(f"file://{lakes.folder}/source/", fsync=False))
    grow(aging, 2)
    append_rows(aging.lake)
    return aging


@pytest.fixture
def target(aging: Aging, lakes: Lakes) -> AgingStorage:
    """Another root, whose clock a test sets."""
    there = LocalStorage(f"file://{lakes.folder}/target/", fsync=False)
    return AgingStorage(there, there.now_ms())


def into(storage: Storage) -> AbstractContextManager[object]:
    """Let exports and what looks at them reach their target through this storage."""
    return mock.patch.object(export_module, "open_storage", return_value=storage)


def export_to(storage: Storage, lake: Lakehouse, name: str, level: str = "full", **arguments: object) -> ExportReport:
    with into(storage):
        return operations.plan_export(lake, name, level, target=storage.root, **arguments).execute()  # type: ignore[arg-type]


class Refusing(StorageWrapper):
    """Refuses to create what a rule says."""

    def __init__(self, inner: Storage, rule: Callable[[str], bool]):
        super().__init__(inner)
        self.rule = rule

    def create(self, path: str, data: bytes) -> None:
        if self.rule(path):
            raise StoragePermissionError("refused", path=path)
        self.inner.create(path, data)


class Interrupted(StorageWrapper):
    """Does something once, right before it deletes."""

    def __init__(self, inner: Storage, interruption: Callable[[], object]):
        super().__init__(inner)
        self.interruptions = [interruption]

    def delete_batch(self, paths: Sequence[str]) -> dict[str, StorageError]:
        while self.interruptions:
            self.interruptions.pop()()
        return self.inner.delete_batch(paths)


def cut_off_before_its_commit(lake: Lakehouse, target: AgingStorage, name: str) -> None:
    """Export all but the root of version 1 of the target."""
    refusing = Refusing(target, lambda path: path.startswith("_1"))
    with pytest.raises(StoragePermissionError):
        export_to(refusing, lake, name)


def test_copies_of_several_cut_off_runs_are_not_relied_on(aging: Aging, target: AgingStorage) -> None:
    """Whatever names they have: a removal of orphans that has begun may be about to delete them."""
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    for _ in range(2):
        cut_off_before_its_commit(lake, target, "second")
        target.time_ms += LONG_MS
    removing = Interrupted(target, lambda: export_to(target, lake, "second"))
    operations.plan_orphan_removal(Lakehouse(removing)).execute()
    assert removing.interruptions == []
    assert operations.verify(Lakehouse(target)).is_clean
    assert content(Lakehouse(target)) == content(lake)


def test_copies_under_other_names_are_copied_once(aging: Aging, target: AgingStorage) -> None:
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    cut_off_before_its_commit(lake, target, "second")
    target.time_ms += LONG_MS
    report = export_to(target, lake, "second")
    assert report.copied_files > 4
    again = export_to(target, lake, "third", version=report.version)
    assert (again.target_version, again.copied_files) == (report.target_version, 0)
    assert operations.plan_restore(lake, "second").changes == ()


@pytest.mark.parametrize("creates", range(3, 15, 3))
def test_what_a_cut_off_first_export_left_bars_no_other(aging: Aging, target: AgingStorage, creates: int) -> None:
    """Neither while its record stands nor when it was dropped."""
    lake = aging.lake
    with pytest.raises(TrinityLakeError):
        export_to(Dying(target, creates), lake, "first")
    export_to(target, lake, "second", "full")
    operations.drop_export(lake, "first")
    append_rows(lake)
    export_to(target, lake, "third")
    assert content(Lakehouse(target)) == content(lake)
    other = Aging(Lakehouse(target), target)
    other.later()
    assert other.remove_orphans().files == 1  # the definition of the first one
    assert content(other.lake) == content(lake)


def test_a_target_takes_exports_after_its_old_versions_were_purged(aging: Aging, target: AgingStorage) -> None:
    """Also where all that is left of the version that an export made is a sealed root."""
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


def test_namespaces_are_told_apart_however_many_they_are(lakes: Lakes, target: AgingStorage) -> None:
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


def test_what_a_target_has_lost_is_copied_again_or_said(aging: Aging, target: AgingStorage) -> None:
    """An export that ends well has all it needs."""
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
    """A target with two exports, of which the second one changed nodes and a few definitions only."""
    export_to(target, aging.lake, "first")
    create(aging.lake, "more", *(f"t{number}" for number in range(40)))
    export_to(target, aging.lake, "second")
    assert operations.verify_export(aging.lake, "second", deep=True).is_clean
    return target


@pytest.mark.parametrize("lost", ["_10000", "node-", ".parquet", "-m0.avro", ".metadata.json", "table-"])
def test_a_check_finds_each_file_that_an_export_needs(aging: Aging, incremental: AgingStorage, lost: str) -> None:
    """Whether this export copied it, an earlier one did, or its commit wrote it."""
    needed = needed_files(Lakehouse(incremental))
    paths = [path for path in needed if lost in path] or [path for path in listed(incremental) if lost in path]
    for path in paths:
        data = incremental.read(path)
        incremental.delete(path)
        assert path in operations.verify_export(aging.lake, "second").missing
        incremental.create(path, data)
    assert paths
    assert operations.verify_export(aging.lake, "second").is_clean


def test_a_check_does_not_miss_what_a_cut_off_run_left(aging: Aging, target: AgingStorage) -> None:
    """Its copies, which the manifest names, are orphans of the target where others took their place."""
    lake = aging.lake
    export_to(target, lake, "first")
    append_rows(lake)
    cut_off_before_its_commit(lake, target, "second")
    target.time_ms += LONG_MS
    export_to(target, lake, "second")
    target.time_ms += LONG_MS
    assert operations.plan_orphan_removal(Lakehouse(target)).execute().files > 3
    assert operations.verify_export(lake, "second", deep=True).is_clean


def test_an_export_that_expired_at_its_target_is_not_said_to_be_whole(aging: Aging, incremental: AgingStorage) -> None:
    expire(Lakehouse(incremental), "0")
    with pytest.raises(VersionExpiredError):
        operations.verify_export(aging.lake, "first")
    assert operations.verify_export(aging.lake, "second").is_clean


def test_a_lakehouse_that_took_the_place_of_an_export_is_not_restored(
    aging: Aging, target: AgingStorage, lakes: Lakes
) -> None:
    """It would drop all that the lakehouse has."""
    export_to(target, aging.lake, "away")
    shutil.rmtree(lakes.folder / "target")
    create(Lakehouse.create(target.root), "theirs")
    for look in (operations.plan_restore, operations.verify_export):
        with pytest.raises(InvalidInputError, match=r"/target/"):
            look(aging.lake, "away")


class Raced(StorageWrapper):
    """Lets others commit each time right before a new definition of the lakehouse is written."""

    def __init__(self, inner: Storage, others: Sequence[Callable[[], object]]):
        super().__init__(inner)
        self.others = list(others)

    def create(self, path: str, data: bytes) -> None:
        if path.startswith("_lakehouse_def_") and self.others:
            self.others.pop(0)()
        self.inner.create(path, data)


def test_exports_of_other_names_and_their_drops_are_no_conflict(aging: Aging) -> None:
    """Least of all when a long copy is finished."""
    lake = aging.lake
    for number in range(4):
        operations.plan_export(lake, f"old{number}").execute()

    def others(number: int) -> list[Callable[[], object]]:
        return [
            lambda: operations.drop_export(lake, f"old{number}"),
            lambda: lake.alter_definition(properties={"stamp": str(number)}),
            lambda: operations.plan_export(lake, f"new{number}", "full").execute(),
        ]

    for number in range(2):
        racing = Raced(aging.clock, others(number))
        operations.plan_export(Lakehouse(racing), f"kept{number}", "full").execute()
        assert racing.others == []
    racing = Raced(aging.clock, others(2))
    operations.drop_export(Lakehouse(racing), "old3")
    assert racing.others == []
    states = {info.name: info.state for info in operations.list_exports(lake)}
    assert states == dict.fromkeys(("kept0", "kept1", "new0", "new1", "new2"), "complete")
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("level", ["minimal", "partial"])
def test_an_export_goes_on_where_an_earlier_one_lost_what_it_left_at_the_source(
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


class Dropping(StorageWrapper):
    """Lets an export be dropped right before its root is read."""

    def read(self, path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None) -> bytes:
        if path.startswith("_export_"):
            operations.drop_export(Lakehouse(self.inner), "kept")
        return self.inner.read(path, offset=offset, length=length, limit_bytes=limit_bytes)


@pytest.mark.parametrize("look", [Lakehouse.snapshot, operations.plan_restore], ids=["snapshot", "restore"])
def test_an_export_that_is_dropped_while_it_is_opened_is_said_to_be(
    aging: Aging, look: Callable[[Lakehouse, str], object]
) -> None:
    operations.plan_export(aging.lake, "kept", "full").execute()
    with pytest.raises(ExportNotFoundError, match="'kept'"):
        look(Lakehouse(Dropping(aging.clock)), "kept")


def test_an_export_whose_root_is_gone_is_said_to_be(aging: Aging) -> None:
    operations.plan_export(aging.lake, "kept", "full").execute()
    location = aging.lake.snapshot().definition.exported_snapshots["kept"]
    aging.clock.delete(location)
    with pytest.raises(ExportNotFoundError, match="'kept'"):
        operations.plan_restore(aging.lake, "kept")


def test_an_export_that_took_the_name_of_a_dropped_one_stays(aging: Aging) -> None:
    lake = aging.lake
    operations.plan_export(lake, "kept").execute()

    def replace() -> None:
        operations.drop_export(lake, "kept")
        operations.plan_export(lake, "kept", "full").execute()

    with pytest.raises(ExportNotFoundError):
        operations.drop_export(Lakehouse(Raced(aging.clock, [replace])), "kept")
    assert [info.level for info in operations.list_exports(lake)] == ["full"]


@pytest.mark.parametrize("level", ["minimal", "partial", "full"])
def test_an_export_of_an_export_that_is_dropped_meanwhile_is_not_completed(aging: Aging, level: str) -> None:
    """Its files are kept by nobody then."""
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
    left = [] if level == "full" else [("new", "copying")]  # a full one misses files, and would again
    assert [(info.name, info.state) for info in operations.list_exports(lake)] == left
    operations.plan_export(lake, "kept", "full").execute()
    operations.plan_export(lake, "of-kept", level, version="kept").execute()
    assert operations.verify(lake).is_clean


@pytest.mark.parametrize("has_changed", [False, True], ids=["compacted", "changed"])
def test_a_later_minimal_export_needs_nothing_of_an_earlier_one(
    aging: Aging, target: AgingStorage, has_changed: bool
) -> None:
    """Nodes that only the earlier one's version has go with it."""
    lake = aging.lake
    grow(aging, 8, "m")
    export_to(target, lake, "first", "minimal")
    if has_changed:
        grow(aging, 8, "k")
    operations.compact(lake)
    wanted = content(lake)
    report = export_to(target, lake, "second", "minimal")
    assert (report.target_version, report.copied_files) == (1, 0)
    operations.drop_export(lake, "first")
    aging.clean_up()
    there = Lakehouse(target, cache="off")
    assert content(there) == wanted
    assert export_to(target, lake, "same-once-more", "minimal").target_version == 1


def test_an_unfinished_export_is_said_to_be_one(aging: Aging, target: AgingStorage) -> None:
    with pytest.raises(StoragePermissionError):
        export_to(Refusing(target, lambda path: True), aging.lake, "begun")
    for look in (operations.plan_restore, operations.plan_rollback):
        with pytest.raises(ExportNotFoundError, match="'begun'"):
            look(aging.lake, "begun")


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"files": [{"target": 1}]}', "odd", "sizes"], ids=repr)
def test_a_damaged_manifest_is_said_to_be_one(aging: Aging, damage: bytes | str) -> None:
    """Also of an export that was cut off: dropping it is the way out."""
    lake = aging.lake
    operations.plan_export(lake, "kept", "full").execute()
    cut_off = Lakehouse(Refusing(aging.clock, lambda path: path.startswith("_export_")))
    with pytest.raises(StoragePermissionError):
        operations.plan_export(cut_off, "begun", "full").execute()
    for record in lake.snapshot().definition.exports:
        manifest = json.loads(lake.storage.read(record.manifest_path))
        for file in manifest["files"]:
            file.update({"odd": 1} if damage == "odd" else {"size_bytes": "1"})
        data = damage if isinstance(damage, bytes) else json.dumps(manifest).encode()
        lake.storage.write(record.manifest_path, data)
    with pytest.raises(CorruptFileError):
        operations.verify_export(lake, "kept")
    with pytest.raises((CorruptFileError, ExportExistsError)):
        operations.plan_export(lake, "begun", "full").execute()
    operations.drop_export(lake, "begun")
    operations.plan_export(lake, "begun", "full").execute()
    assert operations.verify_export(lake, "begun", deep=True).is_clean


def test_namespaces_with_dots_come_back_table_by_table(lakes: Lakes) -> None:
    lake = lakes.local()
    for namespace in ("a.b", "a", "c"):
        create(lake, namespace, "t", "u")
    for name, target in (("here", None), ("away", lakes.root("target"))):
        operations.plan_export(lake, name, "full", target=target, namespaces=["a.b"]).execute()
        drop(lake, "a.b", "t")
        operations.restore_export(lake, name, tables=["a.b.t"])
        assert lake.snapshot().tables("a.b") == ["t", "u"]
        for named in ({"tables": ["a.t"]}, {"namespaces": ["a"]}, {"namespaces": ["c"]}):
            with pytest.raises(InvalidInputError, match=r"a\.b"):
                operations.plan_restore(lake, name, **named)


def test_files_of_other_formats_are_not_left_behind(lakes: Lakes, target: AgingStorage) -> None:
    """A full export needs nothing of its source, so what cannot be copied is refused; elsewhere it is kept."""
    lake = lakes.local()
    create(lake, "ns", "empty")
    table_id = str(uuid.uuid4())
    data = f"tables/{table_id}/part-{uuid.uuid4()}.lance"
    lake.storage.create(data, b"data")
    with lake.transaction() as txn:
        txn.create_table("ns", "other", TableDef(id=table_id, table_type="MANAGED", table_format="LANCE"))
    with pytest.raises(InvalidInputError, match=f"table {table_id} of format 'LANCE' has files"):
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


def test_a_data_file_elsewhere_with_a_long_name_is_copied(lakes: Lakes, target: AgingStorage) -> None:
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


@pytest.mark.local_only("names files of this machine")
@pytest.mark.parametrize("spelled", ["{root}", "file:{folder}/", "file://{folder}-link/"])
def test_dropping_an_export_spares_a_root_that_another_one_names_in_another_spelling(
    lakes: Lakes, spelled: str
) -> None:
    """As other programs may record it: by its URI, in Hadoop's way of writing one, or by way of a link."""
    lake = lakes.local()
    create(lake, "n")
    operations.plan_export(lake, "ours").execute()
    definition = lake.snapshot().definition
    path, folder = definition.exported_snapshots["ours"], lake.root.removeprefix("file://").rstrip("/")
    os.symlink(folder, f"{folder}-link")
    alias = spelled.format(root=lake.root, folder=folder) + path
    lake.alter_definition(exported_snapshots={**definition.exported_snapshots, "theirs": alias})
    operations.drop_export(lake, "ours")
    assert path in listed(lake.storage)
    if "link" not in spelled:
        assert lake.snapshot("theirs").namespaces() == ["n"]
        operations.drop_export(lake, "theirs")
    assert list_names(lake) == ([] if "link" not in spelled else ["theirs"])


@pytest.mark.local_only("names files of this machine")
def test_a_version_that_an_export_names_by_a_uri_does_not_expire(lakes: Lakes) -> None:
    lake = lakes.local()
    create(lake, "n")
    create(lake, "m")
    folder = lake.root.removeprefix("file://")
    lake.alter_definition(exported_snapshots={"theirs": f"file:{folder}{lake.files.roots.path(1)}"})
    later = Aging(lake, AgingStorage(lake.storage, lake.storage.now_ms() + LONG_MS))
    plan = operations.plan_expiration(Lakehouse(later.clock), keeping(1))
    assert [verdict.version for verdict in plan.verdicts if verdict.expires] == [0, 2]


def list_names(lake: Lakehouse) -> list[str]:
    return [info.name for info in operations.list_exports(lake)]
