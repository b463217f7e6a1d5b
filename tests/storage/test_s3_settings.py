"""Roots, keys and options of S3, without requests."""

from __future__ import annotations

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.s3.settings import S3Location, S3Settings


@pytest.mark.parametrize(
    ("root", "bucket", "key_prefix"),
    [
        ("s3://bucket/", "bucket", ""),
        ("s3://my.bucket_1-x/a/b%20c?/", "my.bucket_1-x", "a/b%20c?/"),
        ("s3://bucket/a@b:c/", "bucket", "a@b:c/"),
    ],
)
def test_root_is_split_into_its_parts(root: str, bucket: str, key_prefix: str) -> None:
    location = S3Location.of(root)
    assert (location.bucket, location.key_prefix) == (bucket, key_prefix)
    assert location.key("x/y?versionId=1") == f"{key_prefix}x/y?versionId=1"
    assert location.path(f"{key_prefix}x/y") == "x/y"
    assert location.listed("") == key_prefix


@pytest.mark.parametrize(
    "root",
    [
        "s3://AKID:hush@bucket/", "s3://AKID:hush/more@bucket/", "s3://hush@bucket/a/", "s3://AKID:hush@bucket",
        "s3://hush-host:9000/bucket/", "s3:///hush/", "s3://ab/", "s3://-hush/", "s3://hush-/",
        "s3://" + "hush" * 20 + "/", "s3://hush?x=1/", "s3://hush#x/", "s3://hush%20/", "s3://hush hush/", "s3://hush\n/",
    ],
)  # fmt: skip
def test_invalid_roots_are_not_shown_in_messages(root: str) -> None:
    with pytest.raises(InvalidLocationError, match="s3://BUCKET/PREFIX/") as caught:
        S3Location.of(root)
    assert "hush" not in str(caught.value)
    assert caught.value.path is None


@pytest.mark.parametrize(
    "root", ["s3://bucket", "s3://bucket/a", "s3://bucket/a//b/", "s3://bucket/../", "s3://bucket/\0/"]
)
def test_unnormalized_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError):
        S3Location.of(root)


def test_keys_have_at_most_1024_bytes_with_the_prefix_of_the_root() -> None:
    location = S3Location.of("s3://bucket/prefix/")
    longest = "x" * (1024 - len("prefix/"))
    assert location.key(longest) == f"prefix/{longest}"
    assert location.listed(longest) == f"prefix/{longest}"
    for too_long in (f"{longest}x", "ü" * 509):
        for make_key in (location.key, location.listed):
            with pytest.raises(InvalidLocationError, match="1024"):
                make_key(too_long)
    with pytest.raises(InvalidLocationError):
        S3Location.of(f"s3://bucket/{'x' * 1024}/")


@pytest.mark.parametrize("key", ["p/", "p/folder/", "p/a//b", "p/./a", "p/a/..", "p//a"])
def test_listed_keys_without_valid_paths_are_ignored(key: str) -> None:
    assert S3Location.of("s3://bucket/p/").path(key) is None


def test_options_are_converted_to_settings() -> None:
    assert S3Settings.of(StorageOptions()) == S3Settings(None, None, 5, 30, "auto")
    valid_options = {
        "endpoint": "https://host:9000",
        "region": "eu-1",
        "addressing_style": "path",
        "read_timeout_seconds": "0.5",
    }
    assert S3Settings.of(StorageOptions(valid_options)) == S3Settings("https://host:9000", "eu-1", 5, 0.5, "path")
    S3Settings.of(StorageOptions({"access_key_id": "a", "secret_access_key": "b", "session_token": "c"}))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"access_key_id": "hush"}, "'access_key_id' requires 'secret_access_key'"),
        ({"region": "hush\u202e"}, "'region' must be a name of letters"),
        ({"region": "hush.example/x"}, "'region' must be a name of letters"),
        ({"secret_access_key": "hush"}, "'secret_access_key' requires 'access_key_id'"),
        ({"session_token": "hush"}, "'session_token' requires 'access_key_id'"),
        ({"region": ""}, "'region' is empty"),
        ({"endpoint": ""}, "'endpoint' is empty"),
        ({"endpoint": "hush:9000"}, "'endpoint' must be http://HOST"),
        ({"endpoint": "ftp://hush"}, "'endpoint' must be http://HOST"),
        ({"endpoint": "http://hush:x"}, "'endpoint' must be http://HOST"),
        ({"endpoint": "http://"}, "'endpoint' must be http://HOST"),
        ({"endpoint": "http://user:hush@host"}, "without credentials"),
        ({"endpoint": "http://host/?key=hush"}, "'endpoint' must be http://HOST"),
        ({"endpoint": "http://[hush"}, "'endpoint' must be http://HOST"),
        ({"addressing_style": "odd"}, "'addressing_style' must be one of auto, path, virtual"),
        ({"connect_timeout_seconds": "0"}, "'connect_timeout_seconds' must be a number"),
        ({"read_timeout_seconds": "nan"}, "'read_timeout_seconds' must be a number"),
        ({"read_timeout_seconds": "inf"}, "'read_timeout_seconds' must be a number"),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        S3Settings.of(StorageOptions(options))
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("name", ["connect_timeout_seconds", "read_timeout_seconds"])
@pytest.mark.parametrize("value", ["1e20", "1e308", "86401"])
def test_durations_above_one_day_are_rejected(name: str, value: str) -> None:
    with pytest.raises(InvalidInputError, match=f"{name}.*from 0.001 to 86400"):
        S3Settings.of(StorageOptions({name: value}))


@pytest.mark.parametrize("value", ["a\nb", "a b", "ab\n", "\x00"])
def test_invalid_header_values_are_rejected_and_not_shown(value: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        S3Settings.of(StorageOptions({"access_key_id": value, "secret_access_key": "s"}))
    assert value not in str(caught.value)
