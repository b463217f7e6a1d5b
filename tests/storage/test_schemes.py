"""Schemes that other packages register with entry points."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from trinitylake_ops import Lakehouse
from trinitylake_ops.access.external_files import ExternalStorages
from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.gcs.settings import GcsSettings
from trinitylake_ops.storage.opening import with_environment
from trinitylake_ops.storage.options import StorageOptions, is_secret
from trinitylake_ops.storage.registry import OWN_SCHEMES, Scheme, environment_of
from trinitylake_ops.storage.s3.settings import S3Settings

_MODULE = """
from trinitylake_ops.storage import LocalStorage
from trinitylake_ops.storage.options import Kind, Option
from trinitylake_ops.storage.registry import Scheme

SLOW = Option("slow", "sync each file", Kind.FLAG, default=False)
API_TOKEN = Option("api_token", "token", Kind.TOKEN, is_secret=True)

def open_shelf(root, options):
    return LocalStorage(root.replace("shelf://", "file:///"), fsync=SLOW.value(options))

SCHEME = Scheme("shelf", (SLOW, API_TOKEN), open_shelf, ("SHELF_USER",))
OTHER = Scheme("drawer", (), open_shelf)
"""
_ENTRY_POINTS = """
[trinitylake_ops.storages]
shelf = shelves:SCHEME
file = shelves:SCHEME
box = shelves:OTHER
bag = shelves:open_shelf
"""


@pytest.fixture(autouse=True)
def empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the environment variables of storages."""
    for name in {name for scheme in OWN_SCHEMES.values() for name in scheme.environment}:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package that registers storage schemes."""
    site = tmp_path / "site"
    dist_info = site / "shelves-1.0.dist-info"
    dist_info.mkdir(parents=True)
    (dist_info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n")
    (dist_info / "entry_points.txt").write_text(_ENTRY_POINTS)
    (site / "shelves.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(site))


def test_lakehouse_uses_a_storage_of_another_package(tmp_path: Path) -> None:
    root = f"shelf://{str(tmp_path).removeprefix('/')}/lake/"
    lake = Lakehouse.create(root, {"slow": "false", "cache_bytes": "0"})
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    assert (tmp_path / "lake").is_dir()
    assert Lakehouse.open(root).snapshot().namespaces() == ["ns"]
    assert environment_of(root) == ("SHELF_USER",)


def test_options_of_another_package_are_checked_and_credentials_hidden() -> None:
    with pytest.raises(InvalidInputError, match="shelf://"):
        open_storage("shelf://x/", {"fast": "true"})
    with pytest.raises(InvalidInputError, match="'slow' must be 'true' or 'false'"):
        open_storage("shelf://x/", {"slow": "yes"})
    with pytest.raises(InvalidInputError, match="'api_token'") as caught:
        open_storage("shelf://x/", {"api_token": "abc 123"})
    assert "abc" not in str(caught.value)
    options = StorageOptions({"api_token": "abc123", "slow": "true"})
    assert "abc123" not in repr(options)
    assert options.redact("rejected for abc123") == "rejected for ***"


def test_entry_points_cannot_replace_own_schemes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'slow'"):
        open_storage(f"file://{tmp_path}/", {"slow": "true"})


@pytest.mark.parametrize("scheme", ["box", "bag"])
def test_invalid_entry_point_is_rejected(scheme: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"the entry point '{scheme}' .* must be a Scheme with that name"):
        open_storage(f"{scheme}://x/")


def test_message_lists_known_schemes() -> None:
    with pytest.raises(InvalidLocationError, match=r"shelf://"):
        open_storage("crate://x/")
    assert environment_of("crate://x/") == ()


@pytest.mark.parametrize("scheme", OWN_SCHEMES.values(), ids=OWN_SCHEMES)
def test_documentation_lists_every_scheme_and_its_environment_variables(scheme: Scheme) -> None:
    page = (Path(__file__).parents[2] / "docs" / "storages" / "README.md").read_text()
    assert f"{scheme.name}://" in page
    assert [variable for variable in scheme.environment if f"`{variable}`" not in page] == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("azure.endpoint", "the part before the dot must be a scheme, for example file, memory, s3"),
        ("s3.endpont", r"unknown storage option 'endpont': s3:// supports"),
        ("gs.fsync", r"unknown storage option 'fsync': gs:// supports"),
    ],
)
def test_unknown_option_of_another_scheme_is_rejected(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidInputError, match=message) as caught:
        open_storage(f"file://{tmp_path}/", {name: "hidden-value"})
    assert "hidden-value" not in str(caught.value)


def test_options_of_other_schemes_are_passed_unchanged(tmp_path: Path) -> None:
    assert open_storage(f"file://{tmp_path}/", {"shelf.slow": "true"}).root == f"file://{tmp_path}/"


_ACCOUNT_KEY = {"type": "service_account", "private_key": "key-in-environment", "client_email": "a"}
#: Environment variables and the options that they set, by root.
_ENVIRONMENTS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "s3://bucket/lake/": (
        {
            "AWS_ACCESS_KEY_ID": "hush1",
            "AWS_SECRET_ACCESS_KEY": "hush2",
            "AWS_REGION": "eu-1",
            "AWS_ENDPOINT_URL": "http://a",
        },
        {"access_key_id": "hush1", "secret_access_key": "hush2", "region": "eu-1", "endpoint": "http://a"},
    ),
    "dynamodb://table/lake/": (
        {"AWS_ENDPOINT_URL": "http://a", "AWS_ENDPOINT_URL_DYNAMODB": "http://b", "AWS_DEFAULT_REGION": "eu-2"},
        {"endpoint": "http://b", "region": "eu-2"},
    ),
    "az://box/lake/": (
        {"AZURE_STORAGE_ACCOUNT_NAME": "account", "AZURE_STORAGE_ACCOUNT_KEY": "aHVzaA=="},
        {"account_name": "account", "account_key": "aHVzaA=="},
    ),
    "redis://host/0/lake/": ({"REDIS_PASSWORD": "hush"}, {"password": "hush"}),
    "gs://bucket/lake/": ({"STORAGE_EMULATOR_HOST": "a:1"}, {"endpoint": "http://a:1", "credentials": "anonymous"}),
}


@pytest.mark.parametrize("root", _ENVIRONMENTS)
def test_pickled_storage_contains_options_of_the_environment(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, expected = _ENVIRONMENTS[root]
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    storage = open_storage(root)
    pickled, pickled_external = pickle.dumps(storage), pickle.dumps(ExternalStorages("memory://x/", StorageOptions()))
    for name in variables:
        monkeypatch.delenv(name)
    assert pickle.loads(pickled).inner.options == expected
    scheme = root.partition("://")[0]
    options = pickle.loads(pickled_external).options.beyond("memory://x/", root)
    assert options.of_scheme(scheme, is_own=False) == expected
    assert not any(value in repr(options) for name, value in expected.items() if is_secret(name))


def test_pickle_contains_the_content_of_the_credentials_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key.json"
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))
    for content, expected in (
        (json.dumps(_ACCOUNT_KEY), {"credentials": json.dumps(_ACCOUNT_KEY)}),
        (json.dumps({"type": "external_account"}), {}),
        ("{", {}),
        ("{" * 70_000, {}),
    ):
        file.write_text(content)
        assert with_environment("gs://bucket/", {}) == expected
    file.unlink()
    assert with_environment("gs://bucket/", {}) == {}
    assert with_environment("gs://bucket/", {"credentials": "anonymous"}) == {"credentials": "anonymous"}


def test_emulator_receives_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GcsSettings.of(StorageOptions()).credentials is None
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "a:1")
    assert GcsSettings.of(StorageOptions()).credentials == "anonymous"
    assert GcsSettings.of(StorageOptions({"endpoint": "http://b"})).credentials is None
    assert GcsSettings.of(StorageOptions({"credentials": "/key.json"})).credentials == "/key.json"


def test_region_is_read_from_each_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Botocore reads only one of the variables."""
    monkeypatch.setenv("AWS_REGION", "eu-1")
    assert S3Settings.of(StorageOptions()).region == "eu-1"
    assert S3Settings.of(StorageOptions({"region": "eu-2"})).region == "eu-2"
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-3")
    assert S3Settings.of(StorageOptions()).region is None, "botocore resolves the region itself"
