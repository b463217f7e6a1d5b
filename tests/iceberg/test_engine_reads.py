"""DuckDB, Polars and Arrow read a table at two versions, partly through the lakehouse's storage."""

from __future__ import annotations

import polars as pl
import pytest

from tests.iceberg.test_catalog import SCHEMA, rows
from tests.lakes import Lakes
from tests.request_budgets import budget
from trinitylake_ops import Lakehouse
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at
from trinitylake_ops.storage import MeteredStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture
def versions(lake: Lakehouse, catalog: TrinityLakeCatalog) -> tuple[int, int]:
    """Two versions with 3 and 5 rows of ``ns.t``."""
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1, 2, 3))
    before = lake.latest_version()
    table.append(rows(4, 5))
    return before, lake.latest_version()


def test_duckdb_reads_both_versions(lake: Lakehouse, versions: tuple[int, int], meter: MeteredStorage) -> None:
    counts = []
    for version in versions:
        table = catalog_at(lake, version).load_table("ns.t")
        with meter.measure() as measured:
            connection = table.scan().to_duckdb("t")
        assert measured.counts.requests["read"] >= 3
        counts.append(connection.execute("select count(*), max(id) from t").fetchone())
        connection.close()
    assert counts == [(3, 3), (5, 5)]


def test_polars_reads_both_versions_through_the_storage(
    lake: Lakehouse, versions: tuple[int, int], meter: MeteredStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    for version, expected in zip(versions, (3, 5), strict=True):
        n_data_files = len(list(catalog_at(lake, version).load_table("ns.t").scan().plan_files()))
        for read in (
            lambda table: table.scan().to_polars(),
            lambda table: pl.from_arrow(table.scan().to_arrow()),
            lambda table: pl.scan_iceberg(table, reader_override="pyiceberg").collect(),
        ):
            table = catalog_at(lake, version).load_table("ns.t")
            with meter.measure() as measured:
                assert read(table).height == expected
            # Manifest list, manifests, data files.
            assert measured.counts.requests["read"] >= 1 + 2 * n_data_files


@pytest.mark.local_only("Polars opens data files directly on file:// roots only")
def test_polars_native_reader_opens_data_files_directly(lakes: Lakes, monkeypatch: pytest.MonkeyPatch) -> None:
    """This works only for ``file://`` roots, and the data file reads are not metered (see ``io/file_io``)."""
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    lake = lakes.local()
    meter = MeteredStorage(lake.storage)
    catalog = catalog_at(Lakehouse(meter, lake.storage_options))
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", SCHEMA).append(rows(1, 2, 3))
    table = catalog_at(Lakehouse(meter, lake.storage_options)).load_table("ns.t")
    with meter.measure() as measured:
        assert table.to_polars().filter(pl.col("id") > 1).collect().height == 2
    assert measured.counts.requests == {"read": budget("scan, first time").requests["read"] - 1}, "no data file"


def test_batches_are_streamed_through_the_storage(
    lake: Lakehouse, versions: tuple[int, int], meter: MeteredStorage
) -> None:
    table = catalog_at(lake, versions[1]).load_table("ns.t")
    with meter.measure() as measured:
        reader = table.scan(row_filter="id >= 3", selected_fields=("id",)).to_arrow_batch_reader()
        assert sorted(reader.read_all()["id"].to_pylist()) == [3, 4, 5]
    assert measured.counts.requests["read"] >= 5
