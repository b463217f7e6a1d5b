"""Changes of several tables in one version."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError

from tests.iceberg.test_catalog import SCHEMA, ids_of, rows
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import CommitConflictError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at, catalog_for

TABLES = [f"t{number}" for number in range(5)]


def test_transaction_changes_several_tables_in_one_version(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    for name in TABLES[:3]:
        catalog.create_table(("ns", name), SCHEMA).append(rows(1))
    version = lake.latest_version()
    with lake.transaction(message="five tables") as txn:
        txn_catalog = catalog_for(txn)
        txn_catalog.load_table("ns.t0").append(rows(2))
        txn_catalog.load_table("ns.t1").overwrite(rows(3))
        with txn_catalog.load_table("ns.t2").update_schema() as update:
            update.delete_column("name")
        for name in TABLES[3:]:
            txn_catalog.create_table(("ns", name), SCHEMA).append(rows(4))
        txn_catalog.load_table("ns.t0").append(rows(5))
        assert ids_of(txn_catalog.load_table("ns.t0")) == [1, 2, 5]
        assert lake.latest_version() == version
        assert ids_of(catalog.load_table("ns.t0")) == [1]
    assert txn.committed_version == lake.latest_version() == version + 1
    changes = [(change.kind, change.table) for change in lake.diff(version, version + 1)]
    assert sorted(changes) == [
        ("added", "t3"),
        ("added", "t4"),
        ("changed", "t0"),
        ("changed", "t1"),
        ("changed", "t2"),
    ]
    assert [ids_of(catalog.load_table(("ns", name))) for name in TABLES] == [[1, 2, 5], [3], [1], [4], [4]]
    earlier_catalog = catalog_at(lake, version)
    assert [ids_of(earlier_catalog.load_table(("ns", name))) for name in TABLES[:3]] == [[1], [1], [1]]
    assert earlier_catalog.list_tables("ns") == [("ns", name) for name in TABLES[:3]]


def test_exception_publishes_no_table(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t0", SCHEMA).append(rows(1))
    version = lake.latest_version()
    with pytest.raises(RuntimeError, match="audit"), lake.transaction() as txn:
        txn_catalog = catalog_for(txn)
        txn_catalog.load_table("ns.t0").append(rows(2))
        txn_catalog.create_table("ns.t1", SCHEMA)
        raise RuntimeError("audit failed")
    assert lake.latest_version() == version
    assert ids_of(catalog.load_table("ns.t0")) == [1]
    assert catalog.list_tables("ns") == [("ns", "t0")]


def test_two_handles_of_a_table_share_a_transaction(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    catalog.create_table("ns.t0", SCHEMA)
    with lake.transaction() as txn:
        txn_catalog = catalog_for(txn)
        first, second = txn_catalog.load_table("ns.t0"), txn_catalog.load_table("ns.t0")
        first.append(rows(1))
        second.append(rows(2))  # stale: PyIceberg refreshes from the transaction and retries
        with pytest.raises(TableAlreadyExistsError):
            txn_catalog.create_table("ns.t0", SCHEMA)
        stale = txn_catalog.load_table("ns.t0")
        first.refresh().transaction().set_properties({"a": "b"}).commit_transaction()
        txn_catalog.rename_table("ns.t0", "ns.t1")
        with pytest.raises(CommitFailedException):
            stale.transaction().set_properties({"c": "d"}).commit_transaction()
    assert ids_of(catalog.load_table("ns.t1")) == [1, 2]


def test_concurrent_change_of_one_table_fails_the_transaction(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    for name in TABLES:
        catalog.create_table(("ns", name), SCHEMA)
    txn = lake.transaction()
    txn_catalog = catalog_for(txn)
    for name in TABLES:
        txn_catalog.load_table(("ns", name)).append(rows(1))
    catalog.load_table("ns.t3").append(pa.table({"id": [7], "name": ["other"]}))
    version = lake.latest_version()
    with pytest.raises(CommitConflictError, match=r"ns\.t3"):
        txn.commit()
    assert lake.latest_version() == version
    assert [ids_of(catalog.load_table(("ns", name))) for name in TABLES] == [[], [], [], [7], []]


def test_changes_of_different_tables_do_not_conflict(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    for name in TABLES[:2]:
        catalog.create_table(("ns", name), SCHEMA)
    with lake.transaction() as txn:
        catalog_for(txn).load_table("ns.t0").append(rows(1))
        catalog.load_table("ns.t1").append(rows(2))
    assert [ids_of(catalog.load_table(("ns", name))) for name in TABLES[:2]] == [[1], [2]]
