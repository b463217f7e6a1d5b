"""Copy lakehouses as files, and maintain them."""

from __future__ import annotations

from tests.lakes import listed
from tests.operations.aging import Aging
from tests.operations.changes import append_rows
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import Storage


def copy_lakehouse(lake: Lakehouse, target: Storage) -> Lakehouse:
    """Copy all files, as ``cp -r`` does."""
    lake.close()
    for info in lake.storage.list():
        target.create(info.path, lake.storage.read(info.path))
    return Lakehouse(target)


def rows(lake: Lakehouse) -> list[int]:
    return sorted(catalog_at(lake).load_table("ns.t").scan().to_arrow()["id"].to_pylist())


def files(lake: Lakehouse) -> set[str]:
    return listed(lake.storage)


def delete_all_files(lake: Lakehouse) -> None:
    for path in files(lake):
        lake.storage.delete(path)


def clean_up(aging: Aging) -> None:
    append_rows(aging.lake)
    operations.plan_compact_tables(aging.lake, min_input_files=2).execute()
    operations.plan_trim_tables(aging.lake).execute()
    aging.clean_up()
