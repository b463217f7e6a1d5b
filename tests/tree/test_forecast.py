"""Forecasts of the shape of a tree, compared with measured trees."""

from __future__ import annotations

import random

import pytest

from trinitylake_ops import Lakehouse, TableDef
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.storage import MemoryStorage, MeteredStorage, drop_memory_root
from trinitylake_ops.tree import node
from trinitylake_ops.tree.bulk import FILL
from trinitylake_ops.tree.forecast import forecast_tree, mean_flush_messages

pytestmark = pytest.mark.usefixtures("fixed_requests")

ROOT = "memory://forecast/"


@pytest.mark.parametrize("n_tables", [100, 3_000])
def test_forecast_matches_measured_tree(n_tables: int) -> None:
    storage = MeteredStorage(MemoryStorage(ROOT))
    lake = Lakehouse.create(ROOT, storage=storage)
    with lake.transaction() as txn:
        txn.create_namespace("n" * 10)
        for number in range(n_tables):
            txn.create_table("n" * 10, f"t{number:09}", TableDef())
    snapshot = lake.snapshot()
    forecast = forecast_tree(snapshot.definition, n_tables, fill=FILL)
    shape = snapshot.tree_shape()
    assert shape.height == forecast.height
    assert shape.nodes == pytest.approx(forecast.nodes, rel=0.1, abs=1)
    generator = random.Random(n_tables)

    def change_tables(n_commits: int) -> None:
        for _ in range(n_commits):
            with lake.transaction() as txn:
                name = f"t{generator.randrange(n_tables):09}"
                txn.alter_table("n" * 10, name, TableDef(properties={"at": str(generator.random())}))

    change_tables(200)  # fill the buffer of the root
    with storage.measure() as measurement:
        change_tables(200)
    drop_memory_root(ROOT)
    nodes = measurement.counts.requests["create"] / 200 - 2  # without the root and the definition
    assert nodes == pytest.approx(forecast.nodes_per_commit, rel=0.25, abs=0.01)
    definition_bytes = 120
    written = measurement.counts.bytes_written / 200 - definition_bytes
    assert written == pytest.approx(forecast.bytes_per_commit, rel=0.15)


def test_forecast_matches_measured_tree_with_full_inner_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tree has two levels below the root, and buffers of 16 messages."""
    target_bytes = 5_000
    monkeypatch.setattr(node, "DEFAULT_BUFFER_TARGET_BYTES", target_bytes)
    meter = MeteredStorage(MemoryStorage(ROOT))
    lake = Lakehouse.create(ROOT, storage=meter, order=16)
    with lake.transaction() as txn:
        txn.create_namespace("n" * 10)
        for number in range(1_500):
            txn.create_table("n" * 10, f"t{number:09}", TableDef())
    forecast = forecast_tree(lake.snapshot().definition, 1_500, fill=FILL, buffer_target_bytes=target_bytes)
    assert lake.snapshot().tree_shape().height == forecast.height == 2
    generator = random.Random(1)

    def change_tables(n_commits: int) -> None:
        for _ in range(n_commits):
            with lake.transaction() as txn:
                name = f"t{generator.randrange(1_500):09}"
                txn.alter_table("n" * 10, name, TableDef(properties={"at": str(generator.random())}))

    change_tables(600)
    with meter.measure() as measurement:
        change_tables(400)
    drop_memory_root(ROOT)
    nodes = measurement.counts.requests["create"] / 400 - 2  # without the root and the definition
    assert nodes == pytest.approx(forecast.nodes_per_commit, rel=0.2)


def test_forecast_height_grows_with_objects() -> None:
    heights = [forecast_tree(LakehouseDef(id=""), 10**exponent).height for exponent in range(10)]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (0, 4)
    assert forecast_tree(LakehouseDef(id=""), 0).nodes == 1


def test_flushes_move_more_messages_to_fewer_children() -> None:
    assert mean_flush_messages(100, 1) == 101
    assert 1 <= mean_flush_messages(0, 50) < 2
    assert mean_flush_messages(164, 8) > mean_flush_messages(164, 80) > 1
