"""Open storages by root and options."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage import LocalStorage, MemoryStorage, RetryStorage, Storage, open_storage
from trinitylake_ops.storage.azure.blob_storage import AzureStorage
from trinitylake_ops.storage.interface import WHOLE_FILE_LIMIT_BYTES
from trinitylake_ops.storage.registry import OWN_SCHEMES
from trinitylake_ops.storage.s3.obstore_storage import ObstoreS3Storage
from trinitylake_ops.storage.s3.s3fs_storage import S3Storage


@pytest.mark.parametrize(
    ("options", "fsync"), [(None, True), ({}, True), ({"fsync": "true"}, True), ({"fsync": "false"}, False)]
)
def test_local_root_opens_a_local_storage(tmp_path: Path, options: dict[str, str] | None, fsync: bool) -> None:
    storage = open_storage(f"file://{tmp_path}/lake/", options)
    assert isinstance(storage, RetryStorage)
    assert isinstance(storage.inner, LocalStorage)
    assert storage.inner.fsync is fsync
    assert storage.root == f"file://{tmp_path}/lake/"
    assert list(tmp_path.iterdir()) == []


def test_memory_root_opens_a_memory_storage() -> None:
    storage = open_storage("memory://opened/")
    assert isinstance(storage, RetryStorage)
    assert isinstance(storage.inner, MemoryStorage)


@pytest.mark.parametrize(
    ("client", "storage_class"), [(None, S3Storage), ("s3fs", S3Storage), ("obstore", ObstoreS3Storage)]
)
def test_s3_root_opens_an_s3_storage(client: str | None, storage_class: type[Storage]) -> None:
    options = {"endpoint": "http://127.0.0.1:9", "access_key_id": "id", "secret_access_key": "hush"}
    storage = open_storage("s3://bucket/lake/", {**options, **({"client": client} if client else {})})
    assert isinstance(storage, RetryStorage)
    assert type(storage.inner) is storage_class
    assert storage.root == "s3://bucket/lake/"
    assert storage.delete_batch_size == 1000
    assert "hush" not in repr(storage.inner)


@pytest.mark.parametrize("root", ["abfss://box@account.dfs.core.windows.net/lake/", "az://box/lake/"])
def test_azure_root_opens_an_azure_storage(root: str) -> None:
    options = {"account_name": "account", "account_key": "aHVzaA==", "endpoint": "http://127.0.0.1:9/account"}
    storage = open_storage(root, options)
    assert isinstance(storage, RetryStorage)
    assert type(storage.inner) is AzureStorage
    assert storage.root == root
    assert storage.delete_batch_size == 256
    assert "aHVzaA" not in repr(storage.inner)


@pytest.mark.parametrize("root", ["file:///missing/", "memory://opened/", "s3://bucket/"])
def test_cache_options_are_valid_for_every_root(root: str) -> None:
    assert open_storage(root, {"cache_bytes": "1", "cache_folder": "cache", "cache_folder_bytes": "2"}).root == root


@pytest.mark.parametrize("root", ["file:///missing/", "memory://opened/", "s3://bucket/"])
@pytest.mark.parametrize("client", ["s3fs", "obstore"])
def test_whole_file_limit_applies_to_every_root(root: str, client: str) -> None:
    options = {"client": client} if root.startswith("s3") else {}
    assert open_storage(root, options).whole_file_limit_bytes == WHOLE_FILE_LIMIT_BYTES
    storage = open_storage(root, {**options, "whole_file_limit_bytes": str(1 << 30)})
    assert storage.whole_file_limit_bytes == 1 << 30
    assert pickle.loads(pickle.dumps(storage)).whole_file_limit_bytes == 1 << 30


def test_client_libraries_are_not_loaded_for_local_and_memory_roots(tmp_path: Path) -> None:
    program = (
        "import sys; from trinitylake_ops.storage import open_storage\n"
        f"open_storage('file://{tmp_path}/'); open_storage('memory://x/')\n"
        "print(sorted({'aiobotocore', 'azure', 'botocore', 's3fs', 'obstore'} & set(sys.modules)))"
    )
    completed = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True, timeout=60)
    assert completed.stdout == "[]\n"


@pytest.mark.parametrize("root", ["", "/tmp/x/", "ftp://user:secret@host/x/", "FILE:///x/", "file", "s4://bucket/"])
def test_unknown_schemes_are_rejected(root: str) -> None:
    *first, last = (f"{name}://" for name in OWN_SCHEMES)
    with pytest.raises(InvalidLocationError, match=f"use {', '.join(first)} or {last}$") as caught:
        open_storage(root)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "root", ["file:///x", "file://host/x/", "file:///a/../", "memory:///", "memory://x", "s3://bucket"]
)
def test_unnormalized_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError):
        open_storage(root)


@pytest.mark.parametrize(
    ("root", "options", "message"),
    [
        ("file:///x/", {"sync": "true"}, r"unknown storage option 'sync': file:// supports .*, fsync"),
        (
            "memory://x/",
            {"fsync": "true"},
            r"unknown storage option 'fsync': memory:// supports allowed_roots, cache_bytes, ",
        ),
        ("file:///x/", {"fsync": "yes"}, r"'fsync' must be 'true' or 'false', not 'yes'"),
        ("file:///x/", {"fsync": ""}, r"'fsync' must be 'true' or 'false', not ''"),
        ("file:///x/", {"region": "eu"}, r"unknown storage option 'region': file:// supports "),
        ("s3://bucket/", {"fsync": "true"}, r"unknown storage option 'fsync': s3:// supports access_key_id, "),
        (
            "memory://x/",
            {"whole_file_limit_bytes": "1000"},
            r"'whole_file_limit_bytes' must be a whole number from 268435",
        ),
        ("s3://bucket/", {"whole_file_limit_bytes": "all"}, r"'whole_file_limit_bytes' must be a whole number"),
        (
            "az://box/",
            {"client": "azure-storage-blob"},
            r"unknown storage option 'client': az:// supports account_key, ",
        ),
        ("s3://bucket/", {"client": "boto3"}, r"'client' must be one of s3fs, obstore, not 'boto3'"),
        ("s3://bucket/", {"secret_access_key": "hush"}, r"'secret_access_key' requires 'access_key_id'"),
    ],
)
def test_invalid_options_are_rejected(root: str, options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        open_storage(root, options)
    assert "hush" not in str(caught.value)
