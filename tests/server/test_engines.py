"""pyiceberg, DuckDB and Polars read and write a lakehouse through the server."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pyarrow as pa
import pytest
from pyiceberg.exceptions import (
    CommitFailedException,
    ForbiddenError,
    NamespaceAlreadyExistsError,
    NamespaceNotEmptyError,
    NoSuchNamespaceError,
    NoSuchTableError,
    TableAlreadyExistsError,
)
from pyiceberg.expressions import EqualTo
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import NestedField, StringType

from tests.iceberg.test_totals import live_totals, totals_in
from tests.lakes import Lakes
from tests.server.live_server import LiveServer, attach, duckdb_with_iceberg
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.iceberg import catalog_at
from trinitylake_ops.iceberg.io.file_io import StorageFileIO
from trinitylake_ops.iceberg.write.data_files import write_data_files

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64()), "name": ["a", "b", "c"]})


def test_pyiceberg_reads_and_writes(server: LiveServer, lake: Lakehouse) -> None:
    catalog = server.catalog()
    catalog.create_namespace("ns", {"owner": "me"})
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    table.delete("id = 2")
    table.upsert(pa.table({"id": pa.array([1], pa.int64()), "name": ["z"]}), ["id"])
    with table.update_schema() as update:
        update.add_column("note", StringType())
    with table.transaction() as txn:
        txn.set_properties(a="1", b="2")
        txn.remove_properties("b")
    with catalog.create_table_transaction("ns.u", ROWS.schema) as txn:
        txn.append(ROWS)
    catalog.rename_table("ns.u", "ns.v")
    rows_read = catalog.load_table("ns.t").scan().to_arrow().sort_by("id")
    assert rows_read.to_pylist() == [{"id": 1, "name": "z", "note": None}, {"id": 3, "name": "c", "note": None}]
    assert catalog.load_table("ns.v").scan("id > 1").to_arrow().num_rows == 2
    assert catalog_at(lake).load_table("ns.t").scan().to_arrow().num_rows == 2
    assert catalog.load_namespace_properties("ns") == {"owner": "me"}
    assert catalog.list_tables("ns") == [("ns", "t"), ("ns", "v")]
    assert catalog.list_views("ns") == []
    old_catalog = server.catalog("v3")
    assert old_catalog.load_table("ns.t").scan().to_arrow().num_rows == 3
    catalog.drop_table("ns.v")
    assert not catalog.table_exists("ns.v")
    assert operations.verify(lake, deep=True).findings == ()


def test_pyiceberg_raises_its_own_exceptions(server: LiveServer) -> None:
    catalog = server.catalog()
    catalog.create_namespace("ns")
    table = catalog.create_table("ns.t", ROWS.schema)
    with pytest.raises(NamespaceAlreadyExistsError):
        catalog.create_namespace("ns")
    with pytest.raises(TableAlreadyExistsError):
        catalog.create_table("ns.t", ROWS.schema)
    with pytest.raises(NamespaceNotEmptyError):
        catalog.drop_namespace("ns")
    with pytest.raises(NoSuchNamespaceError):
        catalog.list_tables("none")
    with pytest.raises(NoSuchTableError):
        catalog.load_table("ns.none")
    with pytest.raises(ForbiddenError):
        server.catalog("v2").drop_table("ns.t")
    stale = catalog.load_table("ns.t")
    table.append(ROWS)
    with pytest.raises(CommitFailedException), stale.update_schema() as update:
        table.update_schema().add_column("first", StringType()).commit()
        update.add_column("second", StringType())


def rows(connection: duckdb.DuckDBPyConnection, query: str) -> list[Any]:
    return connection.execute(query).fetchall()


def test_duckdb_reads_and_writes(server: LiveServer, lake: Lakehouse, lakes: Lakes) -> None:
    """Run DDL, DML, a transaction over two tables that commits one version, time travel and a rejected write in SQL."""
    catalog_at(lake).create_namespace("ns")
    catalog_at(lake).create_table("ns.t", ROWS.schema)
    with duckdb_with_iceberg() as connection:
        attach(connection, server, "main", "l")
        connection.execute("INSERT INTO l.ns.t VALUES (1, 'a'), (2, 'b')")
        first = catalog_at(lake).load_table("ns.t").current_snapshot()
        assert first is not None
        connection.execute("CREATE SCHEMA l.more")
        connection.execute("CREATE TABLE l.more.item AS SELECT 7 AS n, 'x' AS s")
        before = lake.latest_version()
        connection.execute("BEGIN; INSERT INTO l.ns.t VALUES (3, 'c'); INSERT INTO l.more.item VALUES (8, 'y'); COMMIT")
        assert lake.latest_version() == before + 1
        connection.execute("DELETE FROM l.ns.t WHERE id = 1")
        connection.execute("UPDATE l.ns.t SET name = 'z' WHERE id = 2")
        connection.execute(
            "MERGE INTO l.ns.t t USING (SELECT 3 AS id, 'd' AS name) s ON t.id = s.id"
            " WHEN MATCHED THEN UPDATE SET name = s.name WHEN NOT MATCHED THEN INSERT VALUES (s.id, s.name)"
        )
        connection.execute("ALTER TABLE l.ns.t ADD COLUMN more INTEGER")
        assert rows(connection, "SELECT id, name FROM l.ns.t ORDER BY id") == [(2, "z"), (3, "d")]
        assert rows(connection, "SELECT * FROM l.more.item ORDER BY n") == [(7, "x"), (8, "y")]
        assert rows(connection, f"SELECT count(*) FROM l.ns.t AT (VERSION => {first.snapshot_id})") == [(2,)]
        timestamp = f"make_timestamptz({first.timestamp_ms}000)"
        assert rows(connection, f"SELECT count(*) FROM l.ns.t AT (TIMESTAMP => {timestamp})") == [(2,)]
        attach(connection, server, f"v{before}", "old")
        assert rows(connection, "SELECT id FROM old.ns.t ORDER BY id") == [(1,), (2,)]
        with pytest.raises(duckdb.Error, match="warehouse main"):
            connection.execute("INSERT INTO old.ns.t VALUES (9, 'q')")
        connection.execute("DROP TABLE l.more.item")
    assert lake.snapshot().tables("more") == []
    assert server.catalog().load_table("ns.t").scan().to_arrow().num_rows == 2
    assert operations.verify(lake, deep=True).findings == ()
    check_delete_files_are_exported_and_applied(lake, lakes.root("copy"))


def check_delete_files_are_exported_and_applied(lake: Lakehouse, copy: str) -> None:
    """DuckDB wrote position delete files: a full export copies them with new paths, and compaction applies them."""
    operations.plan_export(lake, "away", "full", target=copy).execute()
    for lakehouse in (lake, Lakehouse.open(copy)):
        assert int(total_delete_files(lakehouse)) > 0
        operations.plan_compact_tables(lakehouse).execute()
        assert total_delete_files(lakehouse) == "0"
        rows_read = catalog_at(lakehouse).load_table("ns.t").scan().to_arrow().sort_by("id").to_pylist()
        assert [(row["id"], row["name"]) for row in rows_read] == [(2, "z"), (3, "d")]
        assert operations.verify(lakehouse, deep=True).findings == ()


def total_delete_files(lake: Lakehouse) -> str:
    snapshot = catalog_at(lake).load_table("ns.t").current_snapshot()
    assert snapshot is not None and snapshot.summary is not None
    return snapshot.summary["total-delete-files"]


def test_bounds_truncated_within_character_are_repaired(server: LiveServer, lake: Lakehouse) -> None:
    """DuckDB truncates lower bounds of text at 16 bytes, and cannot read these bounds itself."""
    catalog, truncated = server.catalog(), "A" * 15 + "\u2022 bullet"
    catalog.create_namespace("ns")
    columns = Schema(
        NestedField(1, "k", StringType(), required=False), NestedField(2, "text", StringType(), required=False)
    )
    catalog.create_table("ns.t", columns)
    catalog.create_table(
        "ns.p", columns, partition_spec=PartitionSpec(PartitionField(2, 1000, IdentityTransform(), "text"))
    )
    with duckdb_with_iceberg() as connection:
        attach(connection, server, "main", "l")
        for table in ("l.ns.t", "l.ns.p"):
            connection.execute(f"INSERT INTO {table} VALUES ('k1', '{truncated}'), ('k2', 'zzzz')")
            connection.execute("BEGIN")
            connection.execute(f"INSERT INTO {table} VALUES ('k3', '{truncated}')")
            connection.execute(f"INSERT INTO {table} VALUES ('k4', '{truncated}')")
            connection.execute(f"DELETE FROM {table} WHERE k = 'k1'")
            connection.execute("COMMIT")
            keys = rows(connection, f"SELECT k FROM {table} WHERE text = '{truncated}' ORDER BY k")
            assert keys == [("k3",), ("k4",)]
    for name in ("ns.t", "ns.p"):
        assert totals_in(catalog_at(lake).load_table(name)) == live_totals(catalog_at(lake).load_table(name))
        rows_read = catalog_at(lake).load_table(name).scan(EqualTo("text", truncated)).to_arrow()["k"].to_pylist()
        assert sorted(rows_read) == ["k3", "k4"]
    assert operations.verify(lake, deep=True).findings == ()


def test_commit_with_repaired_bounds_is_applied_once(server: LiveServer, lake: Lakehouse) -> None:
    server.catalog().create_namespace("ns")
    table = server.catalog().create_table("ns.t", ROWS.schema)
    io = catalog_at(lake).load_table("ns.t").io
    assert isinstance(io, StorageFileIO)
    (file,) = write_data_files(io, table.metadata, ROWS.to_batches())
    file.lower_bounds[2] = b"a\xe2"
    txn = table.transaction()
    with txn.update_snapshot().fast_append() as append:
        append.append_data_file(file)
    for _ in range(2):
        server.catalog().commit_table(table, txn._requirements, txn._updates)
    after = catalog_at(lake).load_table("ns.t")
    assert after.scan("name >= 'b'").to_arrow().num_rows == 2
    assert len(after.metadata.snapshots) == 1
    assert operations.verify(lake, deep=True).findings == ()


def test_duckdb_and_pyiceberg_write_concurrently(server: LiveServer, lake: Lakehouse) -> None:
    """Each engine writes to its own table. No row is lost, and no write conflicts."""
    catalog = server.catalog()
    catalog.create_namespace("ns")
    for name in ("t", "u"):
        catalog.create_table(f"ns.{name}", ROWS.schema)
    failures: list[BaseException] = []

    def write_with_duckdb() -> None:
        with duckdb_with_iceberg() as connection:
            attach(connection, server, "main", "l")
            for number in range(5):
                connection.execute(f"INSERT INTO l.ns.t VALUES ({number}, 'a')")

    def write_with_pyiceberg() -> None:
        table = server.catalog().load_table("ns.u")
        for _ in range(5):
            table.append(ROWS)

    def collect_failure(function: Any) -> None:
        try:
            function()
        except BaseException as error:  # noqa: BLE001 - reported by the assertion below
            failures.append(error)

    threads = [
        threading.Thread(target=collect_failure, args=(function,))
        for function in (write_with_duckdb, write_with_pyiceberg)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert catalog.load_table("ns.t").scan().to_arrow().num_rows == 5
    assert catalog.load_table("ns.u").scan().to_arrow().num_rows == 15


def test_polars_reads_and_writes(server: LiveServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    catalog = server.catalog()
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", ROWS.schema)
    pl.from_arrow(ROWS).write_iceberg(catalog.load_table("ns.t"), mode="append")  # type: ignore[union-attr]
    rows_read = pl.scan_iceberg(catalog.load_table("ns.t")).filter(pl.col("id") > 1).collect()
    assert rows_read["name"].to_list() == ["b", "c"]
    old_table = server.catalog("v2").load_table("ns.t")
    assert pl.scan_iceberg(old_table).collect().height == 0
    with pytest.raises(ForbiddenError, match="read-only"):
        pl.from_arrow(ROWS).write_iceberg(old_table, mode="append")  # type: ignore[union-attr]
