"""Roots, names and options of storages on Google Cloud Storage, without requests."""

from __future__ import annotations

import json
import pickle

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage import RetryStorage, open_storage
from trinitylake_ops.storage.gcs.settings import GcsLocation, GcsSettings
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.registry import environment_of

KEY = {"type": "service_account", "private_key": "-----BEGIN-----\nhush-hush-hush\n-----END-----", "client_email": "a"}


@pytest.mark.parametrize(
    ("root", "bucket", "prefix"),
    [
        ("gs://bucket/", "bucket", ""),
        ("gs://my.bucket_1-x/a/b%20c?/", "my.bucket_1-x", "a/b%20c?/"),
        ("gs://bucket/a@b:c/", "bucket", "a@b:c/"),
    ],
)
def test_root_is_split_into_its_parts(root: str, bucket: str, prefix: str) -> None:
    location = GcsLocation.of(root)
    assert (location.bucket, location.key_prefix) == (bucket, prefix)
    assert location.key("x/y?generation=1#2") == f"{prefix}x/y?generation=1#2"
    assert location.path(f"{prefix}x/y") == "x/y"
    assert location.path(f"{prefix}folder/") is None
    assert location.listed("") == prefix


@pytest.mark.parametrize(
    "root",
    [
        "gs://user:hush@bucket/", "gs://hush@bucket/a/", "gs://hush-host:9000/bucket/", "gs:///hush/", "gs://ab/",
        "gs://-hush/", "gs://hush-/", "gs://Hush/", "gs://" + "hush" * 60 + "/", "gs://hush?x=1/", "gs://hush\n/",
    ],
)  # fmt: skip
def test_invalid_roots_are_not_shown_in_messages(root: str) -> None:
    with pytest.raises(InvalidLocationError, match="gs://BUCKET/PREFIX/") as caught:
        open_storage(root)
    assert "hush" not in str(caught.value).lower()


@pytest.mark.parametrize("root", ["gs://bucket", "gs://bucket/a", "gs://bucket/a//b/", "gs://bucket/../"])
def test_unnormalized_roots_are_rejected(root: str) -> None:
    with pytest.raises(InvalidLocationError):
        GcsLocation.of(root)


def test_names_that_the_service_does_not_support_are_rejected() -> None:
    location = GcsLocation.of("gs://bucket/prefix/")
    longest = "x" * (1024 - len("prefix/"))
    assert location.key(longest) == f"prefix/{longest}"
    for too_long in (f"{longest}x", "ü" * 509):
        for make_key in (location.key, location.listed):
            with pytest.raises(InvalidLocationError, match="1024"):
                make_key(too_long)
    for name in ("a\nb", "a\rb"):
        with pytest.raises(InvalidLocationError):
            location.key(name)
    with pytest.raises(InvalidLocationError):
        GcsLocation.of("gs://bucket/").key(".well-known/acme-challenge/x")
    with pytest.raises(InvalidLocationError):
        GcsLocation.of(f"gs://bucket/{'x' * 1024}/")


@pytest.mark.parametrize(
    ("options", "option"),
    [
        ({"endpoint": "http://user:hush@host"}, "endpoint"),
        ({"endpoint": "hush"}, "endpoint"),
        ({"endpoint": "http://hush/storage/v1"}, "endpoint"),
        ({"endpoint": "http://hush:0"}, "endpoint"),
        ({"endpoint": " "}, "endpoint"),
        ({"credentials": ""}, "credentials"),
        ({"credentials": "hush"}, "credentials"),
        ({"credentials": "hush/relative.json"}, "credentials"),
        ({"credentials": '{"type": "hush"}'}, "credentials"),
        ({"credentials": '{"hush": '}, "credentials"),
        ({"credentials": '["hush"]'}, "credentials"),
        ({"credentials": json.dumps({"type": "external_account", "audience": "hush"})}, "credentials"),
        ({"project": "hush hush"}, "project"),
        ({"project": "a\nb"}, "project"),
        ({"connect_timeout_seconds": "0"}, "connect_timeout_seconds"),
        ({"read_timeout_seconds": "soon"}, "read_timeout_seconds"),
        ({"region": "hush"}, "region"),
    ],
)
def test_invalid_options_are_not_shown(options: dict[str, str], option: str) -> None:
    with pytest.raises(InvalidInputError, match=f"storage option '{option}'") as caught:
        open_storage("gs://bucket/", options)
    error: BaseException | None = caught.value
    while error is not None:
        assert "hush" not in str(error)
        error = error.__cause__ or error.__context__


def test_options_are_converted_to_settings() -> None:
    settings = GcsSettings.of(StorageOptions({"endpoint": "http://host:1/", "credentials": json.dumps(KEY)}))
    assert settings.endpoint == "http://host:1"
    assert settings.credentials == KEY
    assert "hush-hush-hush" in settings.secrets
    assert (settings.connect_timeout_seconds, settings.read_timeout_seconds) == (5, 30)
    defaults = GcsSettings.of(StorageOptions({}))
    assert (defaults.endpoint, defaults.project, defaults.credentials, defaults.secrets) == (None, None, None, ())


def test_repr_shows_no_credentials() -> None:
    storage = open_storage("gs://bucket/lake/", {"credentials": json.dumps(KEY)})
    assert isinstance(storage, RetryStorage)
    copy = pickle.loads(pickle.dumps(storage.inner))
    for value in (storage.inner, copy, copy.options, GcsSettings.of(copy.options)):
        assert "hush" not in repr(value)
    assert copy.options == storage.inner.options  # type: ignore[attr-defined]


def test_environment_of_the_scheme_includes_google_variables() -> None:
    assert "GOOGLE_APPLICATION_CREDENTIALS" in environment_of("gs://bucket/")
    assert "STORAGE_EMULATOR_HOST" in environment_of("gs://bucket/")
