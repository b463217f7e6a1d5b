"""Operations where others deleted, dropped or damaged something around them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.faults import FaultyStorage
from tests.lakes import Lakes, table
from tests.operations.changes import append_rows, create, drop, small_sizes
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import (
    CorruptFileError,
    ExportExistsError,
    ExportNotFoundError,
    FileMissingError,
    InvalidDefinitionError,
)
from trinitylake_ops.format.file_names import HINT_PATH, root_path
from trinitylake_ops.format.node_file import NodeFile, decode_node, encode_node
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.reach import files_of
from trinitylake_ops.operations.exports import export as export_module
from trinitylake_ops.storage import LocalStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")


def unwatched(tmp_path: Path, **fields: object) -> Lakehouse:
    """A lakehouse that a test damages."""
    return Lakehouse.create(str(tmp_path / "damaged"), {"fsync": "false"}, **fields)  # type: ignore[arg-type]


def test_a_gap_among_the_roots_stops_rollback_and_drop(tmp_path: Path) -> None:
    lake = unwatched(tmp_path)
    for number in range(4):
        create(lake, f"n{number}")
    lake.storage.delete(root_path(2))
    lake.storage.delete(HINT_PATH)
    lake = Lakehouse(lake.storage)  # who knows the latest version finds it beyond the gap
    for plan in (lambda: operations.plan_rollback(lake, 0), lambda: operations.plan_drop_namespace(lake, "n0")):
        with pytest.raises(CorruptFileError) as caught:
            plan()
        assert caught.value.path == root_path(2)
    assert not lake.storage.exists(root_path(2))


def test_children_swapped_in_a_later_version_are_found(tmp_path: Path) -> None:
    lake = unwatched(tmp_path, order=4, **small_sizes(4))
    create(lake, "n", *(f"t{number:02}" for number in range(30)))
    create(lake, "m")
    path = root_path(2)
    root = decode_node(lake.storage.read(path), path)
    earlier = decode_node(lake.storage.read(root_path(1)), root_path(1))
    shared = [child for child in root.children if child in earlier.children]
    assert len(shared) >= 2, "the versions share what is swapped"
    assert operations.verify(lake).is_clean
    swapped = dict(zip(shared[:2], reversed(shared[:2]), strict=True))
    children = [swapped.get(child, child) for child in root.children]
    damaged = NodeFile(root.keys, root.values, children, root.buffer, root.system)
    lake.storage.write(path, encode_node(damaged, 4))
    report = operations.verify(Lakehouse(lake.storage))
    assert {(finding.code, finding.path, finding.version) for finding in report.findings} == {
        ("tree-invariant", path, 2)
    }


def test_two_runs_begin_one_export_at_once(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.memory()
    create(lake, "n")
    first, second = (operations.plan_export(lake, "e") for _ in range(2))
    begun: list[bool] = []
    begin = export_module.begin

    def begin_after_the_other(on: Lakehouse, *arguments: Any) -> object:
        if not begun:
            begun.append(True)
            begin(Lakehouse(lake.storage), second.record, lambda _base: None)
        return begin(on, *arguments)

    monkeypatch.setattr(export_module, "begin", begin_after_the_other)
    report = first.execute()
    assert report.resumed
    assert [record.name for record in lake.snapshot().definition.exports] == ["e"]
    with pytest.raises(ExportExistsError):
        second.execute()
    assert operations.verify(lake).is_clean


def test_an_export_dropped_while_it_is_copied_leaves_nothing(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = lakes.memory()
    create(lake, "n")
    begin = export_module.begin

    def begin_and_lose(*arguments: Any) -> object:
        begun = begin(*arguments)
        operations.drop_export(Lakehouse(lake.storage), "e")
        return begun

    monkeypatch.setattr(export_module, "begin", begin_and_lose)
    with pytest.raises(ExportNotFoundError):
        operations.plan_export(lake, "e").execute()
    assert [info.path for info in lake.storage.list("_export_")] == []
    assert [info.path for info in lake.storage.list("_ops/")] == []


def test_an_export_dropped_during_verify_is_no_finding(lakes: Lakes) -> None:
    lake = lakes.memory()
    create(lake, "n")
    report = operations.plan_export(lake, "e").execute()
    faulty = FaultyStorage(lake.storage)
    read = faulty.read

    def read_and_drop(
        path: str, *, offset: int = 0, length: int | None = None, limit_bytes: int | None = None
    ) -> bytes:
        if path == report.manifest_path:
            operations.drop_export(Lakehouse(lake.storage), "e")
        return read(path, offset=offset, length=length, limit_bytes=limit_bytes)

    faulty.read = read_and_drop  # type: ignore[method-assign]
    assert operations.verify(Lakehouse(faulty)).findings == ()


def test_a_rollback_needs_every_file_of_the_tables(tmp_path: Path) -> None:
    lake = unwatched(tmp_path)
    target = append_rows(lake)
    drop(lake, "ns", "t")
    definition = lake.snapshot(target).table("ns", "t")
    kinds = {
        str(file.kind): file.location for file in files_of(definition, StorageFileIO.on(lake.storage)) if file.live
    }
    assert {"metadata", "manifest list", "manifest", "data"} <= kinds.keys()
    latest = lake.latest_version()
    for path in kinds.values():
        saved = lake.storage.read(path)
        lake.storage.delete(path)
        with pytest.raises(FileMissingError, match=f"cannot go back to version {target}") as caught:
            operations.rollback(lake, target)
        assert caught.value.path == path
        lake.storage.create(path, saved)
    assert lake.latest_version() == latest
    operations.rollback(lake, target)
    assert lake.snapshot().has_table("ns", "t")


def test_verify_follows_a_table_root_outside_the_lakehouse(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    lake = unwatched(tmp_path, table_root=str(elsewhere))
    with catalog_at(lake) as catalog:
        catalog.create_namespace("ns")
        rows = pa.table({"id": pa.array([1], pa.int64())})
        catalog.create_table("ns.t", rows.schema).append(rows)
    assert operations.verify(lake).findings == ()
    (data,) = elsewhere.rglob("*.parquet")
    data.unlink()
    (finding,) = operations.verify(lake).findings
    assert (finding.code, finding.path) == ("table-file-missing", f"file://{data}")


def test_a_table_root_that_is_no_root_is_refused(tmp_path: Path) -> None:
    for table_root in ("a//b", "../x", "s3://", "."):
        with pytest.raises(InvalidDefinitionError, match="table_root"):
            unwatched(tmp_path, table_root=table_root)


@pytest.mark.local_only("a symbolic link in the place of the hint: S3 has none")
def test_an_unreadable_hint_is_garbage_and_can_be_repaired(lakes: Lakes, tmp_path: Path) -> None:
    lake = lakes.local()
    create(lake, "n")
    hint = tmp_path / "lake" / HINT_PATH
    hint.unlink()
    hint.symlink_to(hint)  # every read of it fails, whoever reads
    assert lake.snapshot().namespaces() == ["n"]
    assert operations.inspect_hint(lake).state == "garbage"
    assert operations.repair_hint(lake).repaired
    assert hint.read_text() == "1"


def test_a_namespace_of_any_length_can_be_dropped(lakes: Lakes) -> None:
    lake = lakes.memory(
        namespace_name_max_size_bytes=6000, table_name_max_size_bytes=6000, node_file_max_size_bytes=10_000_000
    )
    name = "q" * 5000
    create_only = lake.transaction()
    create_only.create_namespace(name)
    create_only.create_table(name, "t" * 5000, table())
    create_only.commit()
    operations.plan_drop_namespace(lake, name, cascade=True).execute()
    assert lake.snapshot().namespaces() == []


def test_storage_at_the_top_of_the_file_system() -> None:
    storage = LocalStorage("file:///", fsync=False)
    storage._make_folder(b"/")
    assert b"/" not in storage._known_folders
