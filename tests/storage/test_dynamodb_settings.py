"""Roots, keys, options and items of DynamoDB storages, without requests."""

from __future__ import annotations

import pickle

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.dynamodb import items
from trinitylake_ops.storage.dynamodb.items import MAX_ITEM_BYTES, PART_BYTES, StoredFile, Upload
from trinitylake_ops.storage.dynamodb.settings import MAX_PARTITION_KEY_BYTES, DynamoDBLocation, DynamoDBSettings
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.registry import environment_of

SECRETS = {"access_key_id": "hush-key-id", "secret_access_key": "hush-secret", "session_token": "hush-token"}


@pytest.mark.parametrize(
    ("root", "table", "partition"),
    [
        ("dynamodb://table/", "table", "/"),
        ("dynamodb://my.table_1-x/a/b%20c?/", "my.table_1-x", "/a/b%20c?/"),
        ("dynamodb://table/a@b:c/", "table", "/a@b:c/"),
    ],
)
def test_root_is_split_into_its_parts(root: str, table: str, partition: str) -> None:
    location = DynamoDBLocation.of(root)
    assert (location.table, location.partition) == (table, partition)
    assert location.key("x/y?a=1") == {"root": {"S": partition}, "path": {"S": "x/y?a=1"}}
    assert location.listed("x/") == "x/"


@pytest.mark.parametrize(
    "root",
    [
        "dynamodb://AKID:hush@table/", "dynamodb://hush@table/a/", "dynamodb://hush-host:8000/table/",
        "dynamodb:///hush/", "dynamodb://hu/", "dynamodb://" + "hush" * 64 + "/", "dynamodb://hush?x=1/",
        "dynamodb://hush hush/", "dynamodb://hush\n/", "dynamodb://hüsh/",
    ],
)  # fmt: skip
def test_invalid_roots_are_not_shown_in_messages(root: str) -> None:
    with pytest.raises(InvalidLocationError, match="dynamodb://TABLE/PREFIX/") as caught:
        DynamoDBLocation.of(root)
    assert "hush" not in str(caught.value)
    assert caught.value.path is None


@pytest.mark.parametrize("root", ["dynamodb://table", "dynamodb://table/a", "dynamodb://table/a//b/"])
def test_unnormalized_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError):
        DynamoDBLocation.of(root)


def test_keys_of_parts_and_uploads_are_valid_and_separate() -> None:
    longest = "x" * (MAX_PARTITION_KEY_BYTES - 51)
    location = DynamoDBLocation.of(f"dynamodb://table/{longest}/")
    upload = Upload.fresh("file", (1 << 40) * PART_BYTES, 0)
    keys = [location.part_key(upload.id, 9_999_999_999), location.upload_key(upload.id)]
    for key in keys:
        assert not key["root"]["S"].endswith("/"), "the partition key of every root ends in a slash"
        assert len(key["root"]["S"].encode()) <= MAX_PARTITION_KEY_BYTES
    with pytest.raises(InvalidLocationError):
        DynamoDBLocation.of(f"dynamodb://table/{longest}x/")


def test_paths_have_at_most_1024_bytes() -> None:
    location = DynamoDBLocation.of("dynamodb://table/prefix/")
    for longest in ("x" * 1024, "ü" * 512):
        assert location.key(longest)["path"] == {"S": longest}
        assert location.listed(longest) == longest
        for make_key in (location.key, location.listed):
            with pytest.raises(InvalidLocationError, match="1024"):
                make_key(f"{longest}x")


def test_fits_counts_the_size_of_the_whole_item() -> None:
    for path in ("p", "ü" * 512):
        key = DynamoDBLocation.of("dynamodb://table/prefix/").key(path)
        max_body_bytes = MAX_ITEM_BYTES - len(path.encode()) - len("/prefix/rootpathsize_bytesmodified_msbody") - 42
        assert items.fits(key, b"x" * max_body_bytes)
        assert not items.fits(key, b"x" * (max_body_bytes + 1))


def test_files_and_uploads_round_trip_as_items() -> None:
    key = DynamoDBLocation.of("dynamodb://table/").key("a/b")
    assert StoredFile.of_item(items.whole_file(key, b"abc", 7)) == StoredFile("a/b", 3, 7, body=b"abc")
    assert StoredFile.of_item(items.whole_file(key, b"", 7)) == StoredFile("a/b", 0, 7)
    upload = Upload.fresh("a/b", 2 * PART_BYTES + 1, 5)
    assert upload.n_parts == 3
    stored = StoredFile.of_item(items.file_of_parts(key, 2 * PART_BYTES + 1, 7, upload))
    assert stored.parts == Upload(upload.id, "a/b", 3, 7)
    record = upload.record(DynamoDBLocation.of("dynamodb://table/").upload_key(upload.id))
    assert Upload.of_item(record) == upload


def test_options_are_validated() -> None:
    settings = DynamoDBSettings.of(StorageOptions({}))
    assert settings == DynamoDBSettings(None, None, 5, 30, False)
    valid_options = {"endpoint": "http://localhost:8000", "region": "eu-west-1", "create_table": "true", **SECRETS}
    assert DynamoDBSettings.of(StorageOptions(valid_options)).create_table
    for invalid_options, message in (
        ({"create_table": "yes"}, "'create_table' must be 'true' or 'false'"),
        ({"endpoint": "http://user:hush@host"}, "without credentials"),
        ({"access_key_id": "hush-key-id"}, "'access_key_id' requires 'secret_access_key'"),
        ({"read_timeout_seconds": "soon"}, "must be a number"),
        ({"addressing_style": "path"}, "unknown storage option 'addressing_style': dynamodb:// supports"),
    ):
        with pytest.raises(InvalidInputError, match=message) as caught:
            open_storage("dynamodb://table/", invalid_options)
        assert "hush" not in str(caught.value)


def test_storage_pickles_and_hides_its_credentials() -> None:
    storage = open_storage("dynamodb://table/lake/", SECRETS)
    copy = pickle.loads(pickle.dumps(storage))
    assert (copy.root, copy.inner.options) == (storage.root, StorageOptions(SECRETS))
    assert "hush" not in repr(copy.inner)
    assert "AWS_ENDPOINT_URL_DYNAMODB" in environment_of("dynamodb://table/lake/")
