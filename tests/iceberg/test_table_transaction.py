"""A transaction computes its metadata once per change, and its metadata always reflects the current updates."""

from __future__ import annotations

import json
import uuid

import pyarrow as pa
import pytest
from pyiceberg.serializers import ToOutputFile
from pyiceberg.table import Table
from pyiceberg.table.update import update_table_metadata
from pyiceberg.types import LongType

from trinitylake_ops import Lakehouse
from trinitylake_ops.format.checksums import SEAL_KEYS
from trinitylake_ops.iceberg import loaded_table
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog, catalog_at

SCHEMA = pa.schema([("id", pa.int64())])


def rows(*ids: int) -> pa.Table:
    return pa.table({"id": pa.array(ids, pa.int64())})


def metadata_without_seal(table: Table, uri: str) -> dict[str, object]:
    content = json.loads(table.io.new_input(uri).open().read())
    return {name: value for name, value in content.items() if name not in SEAL_KEYS}


def test_append_computes_metadata_twice(catalog: TrinityLakeCatalog, monkeypatch: pytest.MonkeyPatch) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    calls: list[int] = []

    def counting(*args: object, **kwargs: object) -> object:
        calls.append(1)
        return update_table_metadata(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(loaded_table, "update_table_metadata", counting)
    table.append(rows(1))
    assert len(calls) == 2, "once before the snapshot is added and once after"


def test_property_change_computes_metadata_once(
    lake: Lakehouse, catalog: TrinityLakeCatalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = catalog.create_table("ns.t", SCHEMA, properties={"b": "2"})
    calls: list[int] = []
    monkeypatch.setattr(loaded_table, "update_table_metadata", lambda *_: calls.append(1))
    txn = table.transaction().set_properties(a="1").remove_properties("b")
    txn.commit_transaction()
    assert calls == [], "the catalog computes the metadata on commit"
    assert table.metadata == catalog_at(lake).load_table("ns.t").metadata
    assert (table.properties["a"], "b" in table.properties) == ("1", False)


def test_metadata_file_matches_pyiceberg(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    table.append(rows(1))
    pyiceberg_location = f"{table.location()}/metadata/00009-{uuid.uuid4()}.metadata.json"
    ToOutputFile.table_metadata(table.metadata, table.io.new_output(pyiceberg_location))
    assert metadata_without_seal(table, table.metadata_location) == metadata_without_seal(table, pyiceberg_location)


def test_metadata_log_matches_pyiceberg(catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA, properties={"write.metadata.previous-versions-max": "3"})
    locations = [table.metadata_location]
    for number in range(5):
        before = table.metadata
        txn = table.transaction()
        txn.set_properties(n=str(number))
        assert txn.table_metadata.metadata_log == before.metadata_log
        txn.commit_transaction()
        locations.append(table.metadata_location)
        assert [entry.metadata_file for entry in table.metadata.metadata_log] == locations[:-1][-3:]
        assert table.metadata.metadata_log[-1].timestamp_ms == before.last_updated_ms
    assert table.metadata == catalog.load_table("ns.t").metadata


def test_metadata_reflects_every_update(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    txn = table.transaction()
    before = txn.table_metadata
    assert txn.table_metadata is before
    txn.set_properties(a="1")
    assert (before.properties.get("a"), txn.table_metadata.properties["a"]) == (None, "1")
    with txn.update_schema() as update:
        update.add_column("more", LongType())
    assert txn.table_metadata.schema().column_names == ["id", "more"]
    txn.append(pa.table({"id": [1], "more": [2]}))
    txn.append(pa.table({"id": [3], "more": [4]}))
    assert len(txn.table_metadata.snapshots) == 2
    txn.commit_transaction()
    assert txn.table_metadata == table.metadata == catalog_at(lake).load_table("ns.t").metadata
    assert table.scan().to_arrow().num_rows == 2


def test_metadata_reflects_refresh(lake: Lakehouse, catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", SCHEMA)
    txn = table.transaction()
    assert txn.table_metadata.snapshots == []
    catalog_at(lake).load_table("ns.t").append(rows(1))
    table.refresh()
    assert len(txn.table_metadata.snapshots) == 1
    txn.append(rows(2))
    txn.commit_transaction()
    assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 2]
