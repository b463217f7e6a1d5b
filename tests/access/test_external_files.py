"""Concurrent lookups of the roots in a lakehouse's definition."""

from __future__ import annotations

import threading

import pytest

from trinitylake_ops.access.allowed_roots import FileAddress
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import LocationNotAllowedError, TransientError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.storage.options import StorageOptions

ROOT = "redis://host/0/lake/"
TABLES = "s3://bucket/tables/"
FILE = f"{TABLES}tables/an-id/data/a.parquet"
DEFINITION = LakehouseDef(id="an-id", table_root=TABLES)
ADDRESS = FileAddress(TABLES, "tables/an-id/data/a.parquet", is_writable=True)


def test_thread_waits_for_definition_read_by_another_thread() -> None:
    """Otherwise a path that contains ``tables/`` twice would be mistaken for a moved file of this lakehouse."""
    addresses: list[FileAddress] = []
    threads = [threading.Thread(target=lambda: addresses.append(external_storages.locate(FILE))) for _ in range(3)]

    def load_definition() -> LakehouseDef:
        for thread in threads:
            thread.start()
        threads[0].join(0.3)  # a thread that does not wait finishes within this time
        return DEFINITION

    external_storages = ExternalStorages(ROOT, StorageOptions(), load_definition=load_definition)
    addresses.append(external_storages.locate(FILE))
    for thread in threads:
        thread.join()
    assert addresses == [ADDRESS] * 4


def test_definition_is_read_again_after_a_failure() -> None:
    failures = [TransientError("no response")]

    def load_definition() -> LakehouseDef:
        if failures:
            raise failures.pop()
        return DEFINITION

    external_storages = ExternalStorages(ROOT, StorageOptions(), load_definition=load_definition)
    with pytest.raises(TransientError):
        external_storages.locate(FILE)
    assert external_storages.locate(FILE) == ADDRESS


def test_recursive_lookup_does_not_deadlock() -> None:
    outcomes: list[str] = []

    def load_definition() -> LakehouseDef:
        with pytest.raises(LocationNotAllowedError):
            external_storages.locate("s3://others/file")
        outcomes.append("rejected")
        return DEFINITION

    external_storages = ExternalStorages(ROOT, StorageOptions(), load_definition=load_definition)
    assert external_storages.locate(FILE) == ADDRESS
    assert outcomes == ["rejected"]
