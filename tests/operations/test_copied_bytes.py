"""Test that exports, restores, promotions, refreshes and relocations copy data files byte for byte."""

from __future__ import annotations

import itertools
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.iceberg.nested import nested_rows
from tests.operations.format_v3_tables import puffin, vector_blob
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import ContentChangedError
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.copied_deletes import parquet_deletes, puffin_vectors
from trinitylake_ops.iceberg.io.parquet_writer import SealingWriter

ROWS = nested_rows(3)


def create_lake(folder: Path, table_root: str = "") -> Lakehouse:
    """Return a new lakehouse with a table of nested columns."""
    lake = Lakehouse.create(f"file://{folder}/lake", {"fsync": "false"}, table_root=table_root)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema).append(ROWS)
    return lake


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    return create_lake(tmp_path)


def read_data_files(lake: Lakehouse) -> list[bytes]:
    """Return the bytes of the data files of the table."""
    table = catalog_at(lake).load_table("ns.t")
    files = [table.io.new_input(task.file.file_path) for task in table.scan().plan_files()]
    return sorted(file.open().read() for file in files)


def append(lake: Lakehouse) -> None:
    rows: pa.Table = ROWS.slice(2, 3)
    catalog_at(lake).load_table("ns.t").append(rows)


def test_full_export_and_restore_keep_bytes(lake: Lakehouse, tmp_path: Path) -> None:
    before = read_data_files(lake)
    operations.plan_export(lake, "backup", "full", target=f"file://{tmp_path}/backup").execute()
    assert read_data_files(Lakehouse.open(f"file://{tmp_path}/backup")) == before
    catalog_at(lake).drop_table("ns.t")
    operations.plan_restore(lake, "backup").execute()
    assert read_data_files(lake) == before


def test_promotion_and_refresh_keep_bytes(lake: Lakehouse, tmp_path: Path) -> None:
    operations.plan_clone(lake, f"file://{tmp_path}/clone", "clone").execute()
    clone = Lakehouse.open(f"file://{tmp_path}/clone")
    append(clone)
    files_of_clone = read_data_files(clone)
    operations.plan_promotion(lake, "clone").execute()
    assert read_data_files(lake) == files_of_clone
    append(lake)
    operations.plan_refresh(lake, "clone").execute()
    assert read_data_files(clone) == read_data_files(lake)
    assert len(read_data_files(lake)) == 3


def test_combined_appends_keep_bytes(lake: Lakehouse, tmp_path: Path) -> None:
    operations.plan_clone(lake, f"file://{tmp_path}/clone", "clone").execute()
    clone = Lakehouse.open(f"file://{tmp_path}/clone")
    append(clone)
    append(lake)
    before = {*read_data_files(clone), *read_data_files(lake)}
    operations.plan_promotion(lake, "clone").execute()
    assert (len(read_data_files(lake)), {*read_data_files(lake)}) == (3, before)


def test_relocation_keeps_bytes(tmp_path: Path) -> None:
    lake = create_lake(tmp_path, f"file://{tmp_path}/data/")
    before = read_data_files(lake)
    (tmp_path / "data").rename(tmp_path / "moved")
    operations.plan_relocation(lake, f"file://{tmp_path}/moved/").execute()
    assert read_data_files(lake) == before


def position_deletes(*rows: tuple[str, int]) -> bytes:
    """Return a Parquet file of position deletes."""
    sink = pa.BufferOutputStream()
    columns = pa.table(
        {"file_path": [path for path, _ in rows], "pos": pa.array([position for _, position in rows], pa.int64())}
    )
    pq.write_table(columns, sink)
    return sink.getvalue().to_pybytes()


def test_copied_position_deletes_delete_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    source = position_deletes(("a", 4), ("b", 1), ("a", 2), ("b", 1))
    copied = parquet_deletes(source, "deletes", "copy.parquet", str.upper)
    assert pq.read_table(pa.BufferReader(copied)).to_pylist() == [
        {"file_path": path, "pos": position} for path, position in [("A", 2), ("A", 4), ("B", 1), ("B", 1)]
    ]
    assert (
        pq.read_table(pa.BufferReader(parquet_deletes(position_deletes(), "deletes", "copy.parquet", str))).num_rows
        == 0
    )
    with pytest.raises(ContentChangedError):
        parquet_deletes(source, "deletes", "copy.parquet", lambda _: "one")
    write = SealingWriter.write_table
    with monkeypatch.context() as patch, pytest.raises(ContentChangedError):
        patch.setattr(SealingWriter, "write_table", lambda self, table: write(self, table.slice(1)))
        parquet_deletes(source, "deletes", "copy.parquet", str)


def test_copied_deletion_vectors_are_equal() -> None:
    source, _ = puffin(("a", vector_blob(1, 3)), ("b", vector_blob(2)))
    puffin_vectors(source, "vectors", str.upper)
    numbers = itertools.count()
    with pytest.raises(ContentChangedError):
        puffin_vectors(source, "vectors", lambda path: f"{path}{next(numbers)}")
