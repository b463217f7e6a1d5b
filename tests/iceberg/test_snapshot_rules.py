"""Snapshots, branches and column types that engines cannot read are rejected before a commit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.schema import Schema
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import (
    AddSchemaUpdate,
    AddSnapshotUpdate,
    SetCurrentSchemaUpdate,
    SetSnapshotRefUpdate,
    TableUpdate,
)
from pyiceberg.types import DecimalType, IntegerType, LongType, NestedField, StringType

from trinitylake_ops.errors import InvalidDefinitionError
from trinitylake_ops.iceberg.catalog import TrinityLakeCatalog

ROWS = pa.table({"id": pa.array([1, 2, 3], pa.int64())})


def with_snapshot_fields(update: TableUpdate, fields: dict[str, Any]) -> TableUpdate:
    """Return an update with these snapshot fields replaced. A reference update refers to the new snapshot id."""
    if isinstance(update, AddSnapshotUpdate):
        return update.model_copy(update={"snapshot": update.snapshot.model_copy(update=fields)})
    if isinstance(update, SetSnapshotRefUpdate) and "snapshot_id" in fields:
        return update.model_copy(update={"snapshot_id": fields["snapshot_id"]})
    return update


@pytest.mark.parametrize(
    "fields",
    [
        {"snapshot_id": -1},
        {"snapshot_id": 0},
        {"snapshot_id": -(2**63)},
        {"snapshot_id": 5, "parent_snapshot_id": 5},
        {"schema_id": 99},
    ],
)
def test_unreadable_snapshot_is_rejected(catalog: TrinityLakeCatalog, fields: dict[str, Any]) -> None:
    txn = catalog.create_table("ns.t", ROWS.schema).transaction()
    txn.append(ROWS)
    updates = tuple(with_snapshot_fields(update, fields) for update in txn._updates)
    with pytest.raises(InvalidDefinitionError):
        catalog.commit_table(txn._table, txn._requirements, updates)
    catalog.load_table("ns.t").append(ROWS)
    assert len(catalog.load_table("ns.t").snapshots()) == 1


def test_cyclic_snapshots_are_rejected(catalog: TrinityLakeCatalog) -> None:
    txn = catalog.create_table("ns.t", ROWS.schema).transaction()
    txn.append(ROWS)
    (added,) = (update for update in txn._updates if isinstance(update, AddSnapshotUpdate))
    cyclic_updates = [
        with_snapshot_fields(added, {"snapshot_id": number, "parent_snapshot_id": parent, "sequence_number": number})
        for number, parent in ((1, 2), (2, 1))
    ]
    with pytest.raises(InvalidDefinitionError):
        catalog.commit_table(txn._table, txn._requirements, tuple(cyclic_updates))


def test_main_must_be_a_branch(catalog: TrinityLakeCatalog) -> None:
    table = catalog.create_table("ns.t", ROWS.schema)
    table.append(ROWS)
    table.append(ROWS)
    tag = SetSnapshotRefUpdate(ref_name="main", type=SnapshotRefType.TAG, snapshot_id=table.snapshots()[0].snapshot_id)
    with pytest.raises(InvalidDefinitionError):
        catalog.commit_table(table, (), (tag,))


@pytest.mark.parametrize(
    ("old_type", "new_type", "is_accepted"),
    [
        (IntegerType(), LongType(), True),
        (DecimalType(9, 2), DecimalType(12, 2), True),
        (LongType(), StringType(), False),
        (LongType(), IntegerType(), False),
        (DecimalType(9, 2), DecimalType(9, 3), False),
    ],
)
def test_incompatible_type_change_is_rejected(
    catalog: TrinityLakeCatalog, old_type: Any, new_type: Any, is_accepted: bool
) -> None:
    table = catalog.create_table("ns.t", Schema(NestedField(1, "a", old_type, required=False)))
    updates = (
        AddSchemaUpdate(schema=Schema(NestedField(1, "a", new_type, required=False), schema_id=1)),
        SetCurrentSchemaUpdate(schema_id=-1),
    )
    if is_accepted:
        catalog.commit_table(table, (), updates)
    else:
        with pytest.raises(InvalidDefinitionError):
            catalog.commit_table(table, (), updates)
    assert str(catalog.load_table("ns.t").schema().find_type("a")) == str(new_type if is_accepted else old_type)
