"""Test that few unneeded files remain after many overwrites and maintenance."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from tests.clock import AgingStorage
from tests.lakes import Lakes, allowing
from tests.operations.aging import LONG_MS
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.storage import LocalStorage, Storage, background

TABLES = [f"t{number}" for number in range(5)]
ROWS = 10_000


def rows(seed: int) -> pa.Table:
    """Return incompressible rows."""
    values = np.random.default_rng(seed).integers(0, 1 << 62, ROWS)
    return pa.table({"id": pa.array(range(ROWS), pa.int64()), "value": pa.array(values, pa.int64())})


def overwrite_tables(lake: Lakehouse, seed: int) -> None:
    catalog = catalog_at(lake)
    for number, name in enumerate(TABLES):
        catalog.load_table(f"ns.{name}").overwrite(rows(1_000 * number + seed))


def create_lake_with_tables(storage: Storage) -> Lakehouse:
    lake = Lakehouse.create(
        storage.root, storage=storage, minimum_versions_to_keep=1, maximum_version_age_millis=3_600_000
    )
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    for name in TABLES:
        catalog.create_table(f"ns.{name}", rows(0).schema).append(rows(0))
    return lake


def count_bytes(folder: Path) -> int:
    background.drain()
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


@pytest.fixture
def external_folder(tmp_path: Path) -> Path:
    """The folder of an Iceberg table in another catalog."""
    storage = LocalStorage(f"file://{tmp_path}/outside/", fsync=False)
    lake = create_lake_with_tables(storage)
    overwrite_tables(lake, 7)
    return tmp_path / "outside"


def read_files(folder: Path) -> dict[str, bytes]:
    background.drain()
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.local_only("measures disk usage")
@pytest.mark.parametrize("n_overwrites", [10, pytest.param(30, marks=pytest.mark.soak)])
def test_space_after_many_overwrites_is_bounded(
    lakes: Lakes, tmp_path: Path, external_folder: Path, n_overwrites: int
) -> None:
    folder = tmp_path / "lake"
    storage = AgingStorage(LocalStorage(f"file://{folder}/", fsync=False), 1_790_000_000_000)
    lake = create_lake_with_tables(storage)
    stray_files = {"tables/mine/notes.txt": b"mine", "0000/1111/0000/readme.md": b"mine", "data.csv": b"a,b"}
    for path, data in stray_files.items():
        storage.create(path, data)
    external = catalog_at(Lakehouse.open(f"file://{external_folder}/")).load_table("ns.t0")
    lake = allowing(lake, external_folder)
    operations.register_table(lake, "ns", "external", external.metadata_location)
    external_files = read_files(external_folder)
    for seed in range(n_overwrites):
        overwrite_tables(lake, seed)
        storage.time_ms += 60_000
    shutil.copytree(folder, tmp_path / "before")
    tables = {name: catalog_at(lake).load_table(f"ns.{name}").scan().to_arrow() for name in [*TABLES, "external"]}

    trimmed = operations.plan_trim_tables(lake).execute()
    storage.time_ms += LONG_MS
    operations.plan_trim_tables(lake).execute()
    storage.time_ms += LONG_MS
    expired = operations.plan_expiration(lake).execute()
    storage.time_ms += LONG_MS
    purged = operations.plan_purge(lake).execute()

    new_lake = create_lake_with_tables(LocalStorage(f"file://{tmp_path}/fresh/", fsync=False))
    overwrite_tables(new_lake, n_overwrites - 1)
    assert trimmed.version is not None
    assert expired.files >= purged.files > len(TABLES) * (n_overwrites - 1)
    assert purged.is_complete
    assert count_bytes(folder) <= 1.2 * count_bytes(tmp_path / "fresh")
    assert count_bytes(folder) < count_bytes(tmp_path / "before") / (n_overwrites / 2)
    assert read_files(external_folder) == external_files
    assert {path: storage.read(path) for path in stray_files} == stray_files
    for name, before in tables.items():
        assert catalog_at(lake).load_table(f"ns.{name}").scan().to_arrow() == before
    assert operations.verify(lake).is_clean
    lakes.watch(lake)
    for plan in (operations.plan_purge(lake), operations.plan_orphan_removal(lake)):
        assert plan.is_empty
