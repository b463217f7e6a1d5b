"""Test that operations have the same results on a storage with unordered listings."""

from __future__ import annotations

import pytest

from tests.lakes import Lakes, listed
from tests.operations.aging import Aging, grow
from tests.operations.changes import append_rows
from tests.unordered_lists import UnorderedStorage, shuffle_listings
from trinitylake_ops import Lakehouse, operations
from trinitylake_ops.errors import MaintenanceBlockedError
from trinitylake_ops.format.file_names import HINT_PATH
from trinitylake_ops.operations.lease import lease
from trinitylake_ops.storage import MemoryStorage

pytestmark = pytest.mark.usefixtures("fixed_requests")


@pytest.fixture(params=range(3))
def aging(request: pytest.FixtureRequest, lakes: Lakes) -> Aging:
    aging = Aging.on(UnorderedStorage(lakes.storage(), request.param))
    lakes.watch(aging.lake)
    grow(aging, 5)
    append_rows(aging.lake)
    return aging


def test_cleanup_does_not_depend_on_listing_order(aging: Aging) -> None:
    lake = aging.lake
    operations.plan_export(lake, "kept", version=2).execute()
    before = lake.snapshot("kept").namespaces()
    orphan = "0000/0000/0000/00000000-node-6fcb514b-b878-4c9d-95b7-8dc3a7ce6fd8.arrow"
    lake.storage.create(orphan, b"x")
    aging.clean_up()
    assert orphan not in listed(lake.storage)
    assert lake.snapshot("kept").namespaces() == before
    assert operations.verify(lake, deep=True).findings == ()
    assert operations.verify(lake, incremental=True).findings == ()
    operations.drop_export(lake, "kept")
    aging.clean_up()
    assert operations.verify(lake, deep=True).findings == ()


def test_latest_version_does_not_depend_on_listing_order(aging: Aging) -> None:
    latest = aging.lake.latest_version()
    aging.lake.storage.delete(HINT_PATH)
    reopened = Lakehouse(aging.lake.storage)
    assert reopened.latest_version() == latest
    assert [info.version for info in reopened.history()] == list(range(latest, -1, -1))
    assert operations.repair_hint(reopened)
    assert operations.inspect_hint(reopened).hinted == latest


def test_lease_does_not_depend_on_listing_order(aging: Aging) -> None:
    storage = aging.lake.storage
    for _ in range(12):
        with lease(storage, "purge"), pytest.raises(MaintenanceBlockedError), lease(storage, "orphans"):
            pass


@pytest.mark.local_only("shuffles listings of memory storages")
def test_listings_of_the_process_can_be_shuffled(monkeypatch: pytest.MonkeyPatch, lakes: Lakes) -> None:
    storage = lakes.storage()
    assert isinstance(storage, MemoryStorage)
    paths = [f"{number:03}" for number in range(50)]
    for path in paths:
        storage.create(path, b"")
    assert [info.path for info in storage.list()] == paths
    shuffle_listings(monkeypatch)
    assert sorted(info.path for info in storage.list()) == paths != [info.path for info in storage.list()]
