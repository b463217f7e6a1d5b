"""Reads of files under a table root, and the registration of lakehouses that use it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.lakes import Lakes
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.access.table_owners import TableUser, add_user, claim_table_root, retention_reason, users_of
from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.definitions import LakehouseDef
from trinitylake_ops.storage.options import StorageOptions

TABLE_ROOT = "memory://table-root/"


def test_concurrent_readers_wait_for_the_definition() -> None:
    """Otherwise a second thread would treat the table root as unknown and search below the lakehouse's root."""

    def load_definition() -> LakehouseDef:
        time.sleep(0.05)
        return LakehouseDef(id="x", table_root=TABLE_ROOT)

    external_storages = ExternalStorages("memory://own/", StorageOptions(), load_definition=load_definition)
    with ThreadPoolExecutor(8) as pool:
        uris = [f"{TABLE_ROOT}tables/t/data/{number}" for number in range(8)]
        addresses = list(pool.map(external_storages.find, uris))
    assert {address.root for address in addresses} == {TABLE_ROOT}


def test_unknown_roots_cause_bounded_definition_reads() -> None:
    reads: list[int] = []

    def load_definition() -> LakehouseDef:
        reads.append(1)
        return LakehouseDef(id="x")

    external_storages = ExternalStorages("memory://own/", StorageOptions(), load_definition=load_definition)
    for number in (*range(100), *range(100)):
        assert external_storages.find(f"memory://root-{number}/tables/t/data/1").root == "memory://own/"
    assert 1 < len(reads) < 10


def test_table_users_are_identified_by_id_and_root(lakes: Lakes) -> None:
    storage = lakes.storage()
    assert users_of(storage, "a") == []
    assert "it is not claimed for the lakehouse" in retention_reason(storage, "a", "memory://a/")
    add_user(storage, "a", "memory://a/")
    add_user(storage, "a", "memory://a/")
    assert users_of(storage, "a") == [TableUser("a", "memory://a/")]
    assert "it is not claimed for the lakehouse" in retention_reason(storage, "a", "memory://a/")
    claim_table_root(storage, "a", "memory://a/")
    add_user(storage, "a", "memory://a/")
    assert users_of(storage, "a") == [TableUser("a", "memory://a/", frees=True)]
    assert retention_reason(storage, "a", "memory://a/") == ""
    claim_table_root(storage, "b", "memory://b/")
    assert retention_reason(storage, "a", "memory://a/") == ""
    add_user(storage, "a", "memory://copy/")
    assert "memory://copy/" in retention_reason(storage, "a", "memory://a/")
    assert "memory://a/" in retention_reason(storage, "a", "memory://copy/")
    claim_table_root(storage, "a", "memory://copy/", replaces_others=True)
    assert "memory://copy/" in retention_reason(storage, "a", "memory://a/")
    assert retention_reason(storage, "a", "memory://copy/") == ""
    assert users_of(storage, "b") == [TableUser("b", "memory://b/", frees=True)]


def test_table_user_file_is_decoded_and_invalid_content_is_rejected() -> None:
    user = TableUser("an id of any kind/\u00e9", "s3://bucket/lake/", frees=True)
    assert user.path.startswith("tables/_lakehouse-")
    assert user.path.count("/") == 1, "the file is not in a table's folder"
    assert TableUser.from_bytes(user.to_bytes(), user.path) == user
    for data in (
        b"",
        b"[]",
        b"{}",
        b'{"lakehouse_id": "a", "root": "b"}',
        b'{"lakehouse_id": 1, "root": 2, "frees": 3}',
    ):
        with pytest.raises(CorruptFileError) as caught:
            TableUser.from_bytes(data, user.path)
        assert caught.value.path == user.path
