"""Test the options of the data source without Spark: how they are parsed, and where credentials come from."""

from __future__ import annotations

import datetime as dt
import os

import pytest

from trinitylake_ops.errors import InvalidInputError
from trinitylake_ops.spark.source.options import OPTIONS, SourceOptions
from trinitylake_ops.storage.options import OPTIONS_VARIABLE
from trinitylake_ops.storage.registry import OWN_SCHEMES

SECRETS = sorted({option.name for scheme in OWN_SCHEMES.values() for option in scheme.options if option.is_secret})
LOCAL = {"root": "file:///lake/", "path": "objects"}
AZURE = {"root": "abfss://box@account.dfs.core.windows.net/lake/", "path": "ns.t"}
AZURE_VARIABLES = (
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
)  # fmt: skip
S3 = {"root": "s3://bucket/lake/", "path": "ns.t"}
DYNAMODB = {"root": "dynamodb://table/lake/", "path": "ns.t"}


@pytest.fixture(autouse=True)
def _empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (OPTIONS_VARIABLE, "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", *AZURE_VARIABLES):
        monkeypatch.delenv(name, raising=False)


def test_default_options() -> None:
    options = SourceOptions.parse(LOCAL)
    assert (options.root, dict(options.storage_options)) == ("file:///lake/", {})
    request = options.request
    assert (request.table, request.time, request.columns) == ("objects", None, None)
    assert request.parallelism == os.cpu_count()


def test_version_timestamp_and_export_are_parsed() -> None:
    def request(**source: str) -> object:
        return SourceOptions.parse({**LOCAL, **source}).request

    assert request(Version="12") == SourceOptions.parse({**LOCAL, "version": "12"}).request
    by_time = SourceOptions.parse({**LOCAL, "timestamp": "2013-01-31T12:00:00Z"}).request
    assert (by_time.time, by_time.timestamp) == ("timestamp", dt.datetime(2013, 1, 31, 12, tzinfo=dt.UTC))
    assert SourceOptions.parse({**LOCAL, "timestamp": "1359633600000"}).request.timestamp == 1359633600000
    assert SourceOptions.parse({**LOCAL, "export": "12 monkeys"}).request.export == "12 monkeys"
    for invalid in ("noon", "", "9" * 5000):
        with pytest.raises(InvalidInputError, match="'timestamp'"):
            request(timestamp=invalid)
    with pytest.raises(InvalidInputError):
        request(version="1", timestamp="2")


def test_columns_are_parsed() -> None:
    def columns(text: str) -> object:
        return SourceOptions.parse({**LOCAL, "columns": text}).request.columns

    assert columns("a, b ,c") == ("a", "b", "c")
    assert columns('["a, b", "c"]') == ("a, b", "c")
    with pytest.raises(InvalidInputError):
        columns("a,a")
    for invalid in ("", "a,,b", "[", "[1]", "[]"):
        with pytest.raises(InvalidInputError, match="'columns'"):
            columns(invalid)


def test_missing_and_unknown_options_are_rejected() -> None:
    with pytest.raises(InvalidInputError, match="'root'"):
        SourceOptions.parse({"path": "objects"})
    with pytest.raises(InvalidInputError):
        SourceOptions.parse({"root": "file:///lake/"})
    with pytest.raises(InvalidInputError, match=f"'colums'; the options are {', '.join(OPTIONS)}, storage"):
        SourceOptions.parse({**LOCAL, "colums": "a"})
    for name in ("version", "from", "to", "parallelism"):
        with pytest.raises(InvalidInputError, match=f"'-1' of option '{name}'"):
            SourceOptions.parse({**LOCAL, name: "-1"})


@pytest.mark.parametrize("name", SECRETS)
def test_credentials_are_rejected_as_options(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"'storage.{name}'") as raised:
        SourceOptions.parse({**S3, f"storage.{name}": "hush"})
    assert "hush" not in str(raised.value)


def test_storage_options_override_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPTIONS_VARIABLE, "endpoint=https://one.example,region=here,access_key_id=a,secret_access_key=b")
    options = SourceOptions.parse({**S3, "storage.Region": "there"}).storage_options
    assert dict(options) == {
        "endpoint": "https://one.example", "region": "there", "access_key_id": "a", "secret_access_key": "b",
    }  # fmt: skip


def options_of_root(source: dict[str, str]) -> dict[str, str]:
    """Return the storage options for the root, without the options for other roots."""
    options = SourceOptions.parse(source).storage_options
    return {name: value for name, value in options.items() if "." not in name}


@pytest.mark.parametrize("source", [S3, DYNAMODB])
def test_credentials_from_environment_are_used(monkeypatch: pytest.MonkeyPatch, source: dict[str, str]) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    assert options_of_root(source) == {}
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert options_of_root(source) == {"access_key_id": "a", "secret_access_key": "b"}
    assert options_of_root(LOCAL) == {}
    monkeypatch.setenv("AWS_SESSION_TOKEN", "c")
    assert options_of_root(source)["session_token"] == "c"
    monkeypatch.setenv(OPTIONS_VARIABLE, "access_key_id=x,secret_access_key=y")
    assert options_of_root(source) == {"access_key_id": "x", "secret_access_key": "y"}


def test_user_and_password_from_environment_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    source = {"root": "rediss://host/0/lake/", "path": "ns.t"}
    monkeypatch.setenv("REDIS_USERNAME", "writer")
    assert options_of_root(source) == {}, "a user without a password is ignored"
    monkeypatch.setenv("REDIS_PASSWORD", "word")
    assert options_of_root(source) == {"username": "writer", "password": "word"}
    assert options_of_root(S3) == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, "password=secret")
    assert options_of_root(source) == {"password": "secret"}


def test_account_from_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    without_account = {**AZURE, "root": "az://box/lake/"}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    assert options_of_root(AZURE) == {}, "the root contains the account"
    assert options_of_root(without_account) == {"account_name": "account"}
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "c")
    assert options_of_root(AZURE) == {"sas_token": "c"}
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b")
    assert options_of_root(without_account) == {"account_name": "account", "account_key": "b"}
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", "a")
    assert options_of_root(without_account) == {"connection_string": "a"}
    assert options_of_root(S3) == {}
    monkeypatch.setenv(OPTIONS_VARIABLE, "sas_token=secret")
    assert options_of_root(AZURE) == {"sas_token": "secret"}


def test_environment_applies_to_other_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    source = {"root": "redis://host/0/lake/", "path": "ns.t", "storage.s3.endpoint": "https://one.example"}
    options = SourceOptions.parse(source).storage_options
    assert options.beyond(source["root"], "s3://bucket/tables/").of_scheme("s3", is_own=False) == {  # type: ignore[union-attr]
        "endpoint": "https://one.example", "access_key_id": "a", "secret_access_key": "b",
    }  # fmt: skip
    assert options.of_scheme("redis") == {}
    with pytest.raises(InvalidInputError, match=r"'storage\.s3\.secret_access_key'"):
        SourceOptions.parse({**source, "storage.s3.secret_access_key": "hush"})
