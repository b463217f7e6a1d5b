"""Kinds of storage that other packages add by an entry point."""

from __future__ import annotations

from pathlib import Path

import pytest

from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import InvalidInputError, InvalidLocationError
from trinitylake_ops.storage import open_storage
from trinitylake_ops.storage.options import StorageOptions
from trinitylake_ops.storage.scheme import Scheme
from trinitylake_ops.storage.schemes import OWN_SCHEMES, environment_of

_MODULE = """
from trinitylake_ops.storage import LocalStorage
from trinitylake_ops.storage.scheme import Scheme

def open_shelf(root, options):
    return LocalStorage(root.replace("shelf://", "file:///"), fsync=options.flag("slow", default=False))

SCHEME = Scheme("shelf", frozenset({"slow", "api_token"}), open_shelf, ("SHELF_USER",))
OTHER = Scheme("drawer", frozenset(), open_shelf)
"""
_POINTS = """
[trinitylake_ops.storages]
shelf = shelves_of_others:SCHEME
file = shelves_of_others:SCHEME
box = shelves_of_others:OTHER
bag = shelves_of_others:open_shelf
"""


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a package of somebody else."""
    site = tmp_path / "site"
    info = site / "shelves-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shelves\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(_POINTS)
    (site / "shelves_of_others.py").write_text(_MODULE)
    monkeypatch.syspath_prepend(str(site))


def test_a_lakehouse_stands_on_a_storage_of_another_package(tmp_path: Path) -> None:
    root = f"shelf://{str(tmp_path).removeprefix('/')}/lake/"
    lake = Lakehouse.create(root, {"slow": "false", "cache_bytes": "0"})
    with lake.transaction() as txn:
        txn.create_namespace("ns")
    assert (tmp_path / "lake").is_dir()
    assert Lakehouse.open(root).snapshot().namespaces() == ["ns"]
    assert environment_of(root) == ("SHELF_USER",)


def test_its_options_are_checked_and_its_credentials_hidden() -> None:
    with pytest.raises(InvalidInputError, match=r"unknown storage option 'fast': shelf:// supports .*slow"):
        open_storage("shelf://x/", {"fast": "true"})
    options = StorageOptions({"api_token": "abc123", "slow": "true"})
    assert "abc123" not in repr(options)
    assert options.redact("refused for abc123") == "refused for ***"


def test_none_takes_the_place_of_our_own(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match="'slow'"):
        open_storage(f"file://{tmp_path}/", {"slow": "true"})


@pytest.mark.parametrize("scheme", ["box", "bag"])
def test_an_entry_point_that_leads_elsewhere_is_refused(scheme: str) -> None:
    with pytest.raises(InvalidInputError, match=rf"the entry point '{scheme}' .* is no Scheme of that name"):
        open_storage(f"{scheme}://x/")


def test_what_there_is_is_named() -> None:
    with pytest.raises(InvalidLocationError, match=r"'crate' is not supported: roots start with file://, .*shelf://"):
        open_storage("crate://x/")
    assert environment_of("crate://x/") == ()


@pytest.mark.parametrize("scheme", OWN_SCHEMES.values(), ids=OWN_SCHEMES)
def test_the_documentation_has_every_scheme_and_what_it_takes_of_the_environment(scheme: Scheme) -> None:
    page = (Path(__file__).parents[2] / "docs" / "storage.md").read_text()
    assert f"{scheme.name}://" in page
    assert [variable for variable in scheme.environment if f"`{variable}`" not in page] == []
