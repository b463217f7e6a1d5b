"""Staged tables expire, because orphan removal may have deleted their files."""

from __future__ import annotations

import pytest

from tests.clock import ClockStorage
from tests.iceberg.test_catalog import SCHEMA, ids_of, rows
from tests.iceberg.test_data_files import FLIGHTS, flights
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TransactionExpiredError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.write.plan import plan_write
from trinitylake_ops.iceberg.write.staged_table import StagedTable
from trinitylake_ops.iceberg.write.staging import StagingCatalog, publish, stage_data_files

START_MS = 1_900_000_000_000
TTL_MS = 10_000


@pytest.fixture
def clock(lakes: Lakes) -> ClockStorage:
    lake = lakes.memory(txn_ttl_millis=TTL_MS)
    return ClockStorage(lake.storage, START_MS)


@pytest.fixture
def lake(clock: ClockStorage) -> Lakehouse:
    return Lakehouse(clock)


def stage(lake: Lakehouse, clock: ClockStorage, *, write_duration_ms: int) -> StagedTable:
    """Stage a new table whose data files take some time to write."""
    write = plan_write(lake, "flights", "daily", FLIGHTS)
    files = write.write([flights(1, 2)])
    clock.time_ms += write_duration_ms
    return stage_data_files(lake, write, files)


def test_age_is_measured_from_start_of_staging(lake: Lakehouse, clock: ClockStorage) -> None:
    staged = stage(lake, clock, write_duration_ms=3_000)
    assert staged.begun_at_ms == START_MS
    assert StagedTable.from_json(staged.to_json()).begun_at_ms == START_MS
    catalog = StagingCatalog(lake)
    clock.time_ms += 1_000
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    assert catalog.staged("ns.t").begun_at_ms == START_MS + 3_000


@pytest.mark.parametrize(("age_ms", "is_published"), [(TTL_MS, True), (TTL_MS + 1, False)])
def test_expired_staged_table_is_rejected(
    lake: Lakehouse, clock: ClockStorage, age_ms: int, is_published: bool
) -> None:
    staged = stage(lake, clock, write_duration_ms=6_000)
    clock.time_ms = START_MS + age_ms
    version = lake.latest_version()
    if is_published:
        with lake.transaction() as txn:
            publish(txn, [staged])
        assert catalog_at(lake).load_table("flights.daily").scan().to_arrow().num_rows == 2
        return
    expected = pytest.raises(TransactionExpiredError, match=r"flights\.daily")
    with expected, lake.transaction() as txn:
        publish(txn, [staged])
    assert lake.latest_version() == version


def test_publishing_transaction_is_backdated_to_staging(lake: Lakehouse, clock: ClockStorage) -> None:
    staged = stage(lake, clock, write_duration_ms=6_000)
    txn = lake.transaction()
    publish(txn, [staged])
    assert txn.begun_at_ms == START_MS
    clock.time_ms = START_MS + TTL_MS + 1  # the transaction itself is 4 seconds old
    with pytest.raises(TransactionExpiredError):
        txn.commit()
    assert not lake.snapshot().has_namespace("flights")


def test_resumed_transaction_is_backdated_to_staging(lake: Lakehouse, clock: ClockStorage) -> None:
    staged = stage(lake, clock, write_duration_ms=6_000)
    txn = lake.transaction()
    publish(txn, [staged])
    saved = txn.save()
    assert lake.resume_transaction(saved).begun_at_ms == START_MS
    clock.time_ms = START_MS + TTL_MS + 1
    with pytest.raises(TransactionExpiredError):
        lake.resume_transaction(saved)


def test_newer_staged_table_does_not_reset_transaction_age(lake: Lakehouse, clock: ClockStorage) -> None:
    txn = lake.transaction()
    clock.time_ms += 1_000
    publish(txn, [stage(lake, clock, write_duration_ms=0)])
    assert txn.begun_at_ms == START_MS
    txn.commit()
    assert months_of(lake) == [1, 2]


def test_oldest_staged_table_determines_age(lake: Lakehouse, clock: ClockStorage) -> None:
    catalog = StagingCatalog(lake)
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    old = catalog.staged("ns.t")
    clock.time_ms += 5_000
    txn = lake.transaction()
    publish(txn, [stage(lake, clock, write_duration_ms=0), old])
    assert txn.begun_at_ms == START_MS
    txn.commit()
    assert ids_of(catalog_at(lake).load_table("ns.t")) == [1]


def months_of(lake: Lakehouse) -> list[int]:
    return sorted(catalog_at(lake).load_table("flights.daily").scan().to_arrow()["month"].to_pylist())
