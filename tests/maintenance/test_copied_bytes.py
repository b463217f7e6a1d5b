"""Exports, restores, promotions, refreshes and relocations keep the bytes of data files: they rewrite no rows."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from tests.tables.nested import nested_rows
from trinitylake_ops import Lakehouse, maintenance
from trinitylake_ops.tables import catalog_at

ROWS = nested_rows(3)


def created(folder: Path, table_root: str = "") -> Lakehouse:
    """Return a new lakehouse with a table of nested columns."""
    lake = Lakehouse.create(f"file://{folder}/lake", {"fsync": "false"}, table_root=table_root)
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema).append(ROWS)
    return lake


@pytest.fixture
def lake(tmp_path: Path) -> Lakehouse:
    return created(tmp_path)


def data(lake: Lakehouse) -> list[bytes]:
    """Return the bytes of the data files of the table."""
    table = catalog_at(lake).load_table("ns.t")
    with_io = [table.io.new_input(task.file.file_path) for task in table.scan().plan_files()]
    return sorted(file.open().read() for file in with_io)


def append(lake: Lakehouse) -> None:
    rows: pa.Table = ROWS.slice(2, 3)
    catalog_at(lake).load_table("ns.t").append(rows)


def test_a_full_export_and_its_restore(lake: Lakehouse, tmp_path: Path) -> None:
    before = data(lake)
    maintenance.plan_export(lake, "backup", "full", target=f"file://{tmp_path}/backup").execute()
    assert data(Lakehouse.open(f"file://{tmp_path}/backup")) == before
    catalog_at(lake).drop_table("ns.t")
    maintenance.plan_restore(lake, "backup").execute()
    assert data(lake) == before


def test_a_promotion_and_a_refresh(lake: Lakehouse, tmp_path: Path) -> None:
    maintenance.plan_clone(lake, f"file://{tmp_path}/clone", "clone").execute()
    clone = Lakehouse.open(f"file://{tmp_path}/clone")
    append(clone)
    cloned = data(clone)
    maintenance.plan_promotion(lake, "clone").execute()
    assert data(lake) == cloned
    append(lake)
    maintenance.plan_refresh(lake, "clone").execute()
    assert data(clone) == data(lake)
    assert len(data(lake)) == 3


def test_appends_on_both_sides(lake: Lakehouse, tmp_path: Path) -> None:
    maintenance.plan_clone(lake, f"file://{tmp_path}/clone", "clone").execute()
    clone = Lakehouse.open(f"file://{tmp_path}/clone")
    append(clone)
    append(lake)
    before = {*data(clone), *data(lake)}
    maintenance.plan_promotion(lake, "clone").execute()
    assert (len(data(lake)), {*data(lake)}) == (3, before)


def test_a_relocation(tmp_path: Path) -> None:
    lake = created(tmp_path, f"file://{tmp_path}/data/")
    before = data(lake)
    (tmp_path / "data").rename(tmp_path / "moved")
    maintenance.plan_relocation(lake, f"file://{tmp_path}/moved/").execute()
    assert data(lake) == before
