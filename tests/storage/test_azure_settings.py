"""Roots, options and accounts of Azure: validation, and messages without credentials."""

from __future__ import annotations

import base64

import pytest

from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage.azure.settings import Account, AzureLocation, AzureSettings
from trinitylake_ops.storage.options import StorageOptions

ROOT = "abfss://box@account.dfs.core.windows.net/lake/"
KEY = base64.b64encode(b"hush").decode()
VARIABLES = (
    "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING",
    "AZURE_STORAGE_SAS_TOKEN",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def account_of(root: str, **options: str) -> Account:
    storage_options = StorageOptions(options)
    return Account.of(AzureLocation.of(root), AzureSettings.of(storage_options), storage_options)


@pytest.mark.parametrize(
    ("root", "container", "prefix", "account", "endpoint"),
    [
        (ROOT, "box", "lake/", "account", "https://account.blob.core.windows.net"),
        ("abfss://box@account.dfs.core.windows.net/", "box", "", "account", "https://account.blob.core.windows.net"),
        ("abfss://a-b-1@x24.dfs.core.chinacloudapi.cn/a b/%/", "a-b-1", "a b/%/", "x24",
         "https://x24.blob.core.chinacloudapi.cn"),
        ("abfss://box@account.z27.dfs.storage.azure.net/", "box", "", "account",
         "https://account.z27.blob.storage.azure.net"),
        ("az://box/lake/", "box", "lake/", None, None),
        ("az://$root/", "$root", "", None, None),
    ],
)  # fmt: skip
def test_root_is_split_into_its_parts(
    root: str, container: str, prefix: str, account: str | None, endpoint: str | None
) -> None:
    location = AzureLocation.of(root)
    assert (location.container, location.name_prefix, location.account_name, location.endpoint) == (
        container, prefix, account, endpoint,
    )  # fmt: skip
    assert location.path(location.name("a/b")) == "a/b"


@pytest.mark.parametrize(
    "root",
    [
        "abfss://hush/lake/", "abfss://hush@account/lake/", "abfss://hush@account.example.com/lake/",
        "abfss://hush@account.dfs.core.windows.net.example.com/lake/", "abfss://Hush==@account.dfs.core.windows.net/",
        "abfss://user:hush@account.dfs.core.windows.net/", "abfss://hush@account.blob.core.windows.net/",
        "az://hush@account.dfs.core.windows.net/", "az://hush--x/", "az://hu/", "az://Hush/",
        "az://box/lake?sv=1&sig=hush/", "az://box/lake&SIG=hush/",
        "abfss://box@account:hush@account.dfs.core.windows.net/",
    ],
)  # fmt: skip
def test_invalid_roots_are_rejected_and_not_shown(root: str) -> None:
    with pytest.raises(InvalidLocationError, match="abfss://CONTAINER") as caught:
        AzureLocation.of(root)
    assert "hu" not in str(caught.value).lower()


@pytest.mark.parametrize("name", ["a" * 1025, "a/" * 254 + "a", "a\\b", "a.", "a./b", "tab\t", "\x85", "bell\x07"])
def test_names_that_azure_changes_are_rejected(name: str) -> None:
    location = AzureLocation.of("az://box/")
    with pytest.raises(InvalidLocationError) as caught:
        location.name(name)
    assert "\n" not in str(caught.value)
    assert location.path(name) is None


def test_name_limits_include_the_prefix() -> None:
    assert AzureLocation.of("az://box/").name("a" * 1024)
    assert AzureLocation.of("az://box/").name("a/" * 253 + "a")
    with pytest.raises(InvalidLocationError, match="1025"):
        AzureLocation.of("az://box/lake/").name("a" * 1020)
    assert AzureLocation.of("az://box/lake/").listed("a.") == "lake/a.", "a listed prefix may end in a dot"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"account_key": KEY, "sas_token": "sig=hush"}, "exclude each other"),
        ({"account_key": KEY, "connection_string": f"AccountKey={KEY}"}, "exclude each other"),
        ({"account_key": ""}, "is empty"),
        ({"sas_token": "sig=hush hush"}, "white space"),
        ({"account_name": "Hush=="}, "account_name"),
        ({"endpoint": "https://user:hush@host/"}, "endpoint"),
        ({"endpoint": "https://account.blob.core.windows.net/?sig=hush"}, "endpoint"),
        ({"connect_timeout_seconds": "0"}, "connect_timeout_seconds"),
        ({"read_timeout_seconds": "soon"}, "read_timeout_seconds"),
        ({"account_key": "hush!"}, "Base64"),
        ({"account_key": "schlüssel"}, "Base64"),
        ({"connection_string": "AccountName=hush;EndpointSuffix=x"}, "connection_string"),
        ({"connection_string": f"AccountName=other;AccountKey={KEY}"}, "different accounts"),
        ({"account_name": "other"}, "different accounts"),
        ({"account_name": "account", "connection_string": f"BlobEndpoint=ftp://hush/;AccountKey={KEY}"}, None),
    ],
)
def test_invalid_options_are_rejected(options: dict[str, str], message: str | None) -> None:
    if message is None:
        with pytest.raises(InvalidInputError) as caught:
            account_of("az://box/", **options)
    else:
        with pytest.raises(InvalidInputError, match=message) as caught:
            account_of(ROOT, **options)
    assert "hush" not in str(caught.value).lower()
    assert KEY not in str(caught.value)


@pytest.mark.parametrize(
    ("root", "options", "expected"),
    [
        (ROOT, {"account_key": KEY}, ("https://account.blob.core.windows.net", "account", KEY, None)),
        (ROOT, {"sas_token": "?sv=1&sig=x"}, ("https://account.blob.core.windows.net", "account", None, "sv=1&sig=x")),
        (ROOT, {}, ("https://account.blob.core.windows.net", "account", None, None)),
        (ROOT, {"endpoint": "http://127.0.0.1:1/account/"}, ("http://127.0.0.1:1/account", "account", None, None)),
        ("az://box/", {"account_name": "abc"}, ("https://abc.blob.core.windows.net", "abc", None, None)),
        ("az://box/", {"connection_string": f"AccountName=abc;AccountKey={KEY}"},
         ("https://abc.blob.core.windows.net", "abc", KEY, None)),
        ("az://box/", {"connection_string":
          f"DefaultEndpointsProtocol=http;AccountName=abc;AccountKey={KEY};EndpointSuffix=core.chinacloudapi.cn;"},
         ("http://abc.blob.core.chinacloudapi.cn", "abc", KEY, None)),
        ("az://box/", {"account_name": "abc", "connection_string":
          "BlobEndpoint=http://127.0.0.1:1/abc;SharedAccessSignature=sv=1&sig=x%3D"},
         ("http://127.0.0.1:1/abc", "abc", None, "sv=1&sig=x%3D")),
    ],
)  # fmt: skip
def test_account_comes_from_root_options_or_environment(
    root: str, options: dict[str, str], expected: tuple[str | None, ...]
) -> None:
    account = account_of(root, **options)
    assert (account.endpoint, account.name, account.key, account.sas_token) == expected
    assert KEY not in repr(account)
    assert "sig=" not in repr(account)


def test_account_and_credentials_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidInputError):
        account_of("az://box/")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "fromenvironment")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "sig=x")
    assert (account_of("az://box/").name, account_of("az://box/").sas_token) == ("fromenvironment", "sig=x")
    assert account_of(ROOT).name == "account", "the account in the root takes precedence"
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    assert (account_of(ROOT).key, account_of(ROOT).sas_token) == (KEY, None)
    account = account_of(ROOT, sas_token="sig=option")
    assert (account.key, account.sas_token) == (None, "sig=option"), "options and environment are not mixed"
