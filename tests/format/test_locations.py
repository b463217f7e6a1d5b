"""Locations: paths, URIs and roots."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.strategies import names
from trinitylake_ops.errors import InvalidLocationError
from trinitylake_ops.format.locations import (
    is_uri,
    normalize_root_uri,
    to_location,
    to_uri,
    validate_location,
    validate_path,
)

ROOT = "s3://bucket/lake/"
AZURE_ROOT = "abfss://box@account.dfs.core.windows.net/lake/"
segments = names.map(lambda name: name.replace("/", "-")).filter(lambda name: name not in (".", ".."))
paths = st.lists(segments, min_size=1, max_size=4).map("/".join)


@given(paths)
def test_path_and_uri_round_trip(path: str) -> None:
    assert validate_path(path) == path
    uri = to_uri(ROOT, path)
    assert uri == ROOT + path
    assert is_uri(uri)
    assert to_location(ROOT, uri) == path
    assert to_uri(ROOT, uri) == uri


@pytest.mark.parametrize(
    ("root", "uri", "location"),
    [
        (ROOT, "s3a://bucket/lake/a", "a"),
        (ROOT, "s3n://bucket/lake/a", "a"),
        (ROOT, "s3a://other/a", "s3a://other/a"),
        ("file:///lake/", "file:/lake/a", "a"),
        ("file:///lake/", "file:///other/a", "file:///other/a"),
        ("memory://lake/", "s3a://lake/a", "s3a://lake/a"),
        (AZURE_ROOT, f"{AZURE_ROOT}a", "a"),
        (AZURE_ROOT, f"{AZURE_ROOT}a".replace("abfss", "abfs"), "a"),
        (
            AZURE_ROOT,
            "abfs://other@account.dfs.core.windows.net/lake/a",
            "abfs://other@account.dfs.core.windows.net/lake/a",
        ),
    ],
)
def test_hadoop_uri_forms_are_recognized_under_root(root: str, uri: str, location: str) -> None:
    """URIs outside the root are unchanged."""
    assert to_location(root, uri) == location


@pytest.mark.parametrize("path", ["a%20b", "a#b", "a?b=c", "a*b", "a[b]", "a b", "...", "..a", "a..", "~", "C:\\x"])
def test_characters_of_segment_are_literal(path: str) -> None:
    assert validate_path(path) == path
    assert to_uri(ROOT, path) == ROOT + path


@pytest.mark.parametrize("path", ["", "/", "/a", "a/", "a//b", ".", "..", "a/.", "../a", "a/../b", "./a", "a\0b"])
def test_error_of_invalid_path_names_it(path: str) -> None:
    with pytest.raises(InvalidLocationError) as caught:
        validate_path(path)
    assert caught.value.path == path


@pytest.mark.parametrize("uri", ["s3://b", "s3://b/", "s3://b/a", "s3://b/a/", "file:///a/b", "hdfs://host:9000/x"])
def test_valid_uri_is_unchanged(uri: str) -> None:
    assert validate_location(uri) == uri


@pytest.mark.parametrize("uri", ["s3://b//a", "s3://b/..", "s3://../a", "file:///a/./b", "s3://b/a//", "file:////a"])
def test_invalid_uri_is_rejected(uri: str) -> None:
    with pytest.raises(InvalidLocationError):
        validate_location(uri)


@pytest.mark.parametrize(
    "root",
    [
        "",
        "relative/path",
        "./lake",
        "s3:/bucket",
        "s3://",
        "s3:///lake",
        "file://host/lake",
        "/data/../lake",
        "/data//lake",
        "//data",
        "s3://bucket/a/../b",
        "s3://../lake",
        "/data/./lake",
        "1s3://b",
    ],
)
def test_error_of_invalid_root_quotes_it(root: str) -> None:
    with pytest.raises(InvalidLocationError) as caught:
        normalize_root_uri(root)
    assert repr(root) in str(caught.value)


def test_top_level_of_storage_is_a_valid_root() -> None:
    assert normalize_root_uri("s3://bucket") == "s3://bucket/"
    assert normalize_root_uri("/") == "file:///"


@pytest.mark.parametrize(
    "root",
    [
        "s3://key:se/cret@bucket/lake",
        "s3:/key:secret@bucket",
        "key:secret@bucket",
        "s3://secret@bucket/lake",
        "hdfs://secret@host/lake",
        "abfss://box:secret@account.dfs.core.windows.net/lake",
        "abfss://Secret+key==@account.dfs.core.windows.net/lake",
        "abfss://secret@box@account.dfs.core.windows.net/",
        "abfss://@secret/lake",
        "abfss://a-secret-that-is-far-too-long-for-a-container-but-has-its-letters-x@account.x/",
    ],
)
def test_error_of_root_with_credentials_does_not_quote_it(root: str) -> None:
    with pytest.raises(InvalidLocationError) as caught:
        normalize_root_uri(root)
    assert "cret" not in f"{caught.value!r} {vars(caught.value)}"


@pytest.mark.parametrize(
    "root", ["s3://bucket/a:b@c/", "file:///a:b@c/", "hdfs://host:8020/a@b/", "abfs://box@account.host/a/", AZURE_ROOT]
)
def test_colon_and_at_sign_in_path_are_allowed(root: str) -> None:
    assert normalize_root_uri(root) == root
