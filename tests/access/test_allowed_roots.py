"""Lakehouse content may refer only to files under allowed roots."""

from __future__ import annotations

import pickle
import uuid

import pytest

from trinitylake_ops.access.allowed_roots import AllowedRoots, NamedRoots, allowed_roots
from trinitylake_ops.errors import InvalidInputError, InvalidLocationError, LocationNotAllowedError
from trinitylake_ops.format.definitions import ExportLevel, ExportRecord, LakehouseDef, SourceRecord
from trinitylake_ops.format.file_names import new_lakehouse_def_path, new_node_path
from trinitylake_ops.storage.registry import roots_nest

ROOT = "s3://bucket/lake/"
SOURCE = "s3://other/source/"
FILE = "tables/an-id/data/f.parquet"


def make_roots(
    *, root: str = ROOT, allowed: tuple[str, ...] = (), moves: bool = True, **fields: object
) -> AllowedRoots:
    named_roots = NamedRoots()
    named_roots.note(LakehouseDef(id="x", **fields))  # type: ignore[arg-type]
    return AllowedRoots(root, pickle.loads(pickle.dumps(named_roots)), allowed, ("s3://given/",), moves, roots_nest)


def is_rejected(roots: AllowedRoots, uri: str) -> bool:
    try:
        roots.find(uri)
    except LocationNotAllowedError as error:
        assert "--allow-root" in error.message
        assert len(error.message) < 900
        return True
    return False


def test_files_under_known_roots_are_allowed() -> None:
    roots = make_roots(allowed=("s3://operator/x/", "file:///local/"))
    addresses = [roots.find(f"{root}a") for root in (ROOT, "s3://given/", "s3://operator/x/", "file:///local/")]
    assert [(address.root, address.path) for address in addresses] == [
        (ROOT, "a"),
        ("s3://given/", "a"),
        ("s3://operator/x/", "a"),
        ("file:///local/", "a"),
    ]
    assert [address.is_writable for address in addresses] == [True, False, True, True]
    assert roots.find("/local/a").path == "a"
    for uri in ("s3://operator/y", "file:///etc/passwd", "/etc/passwd", "s3://bucket/lake2/a", "http://h/a?b=c"):
        assert is_rejected(roots, uri), uri


def test_roots_in_definitions_allow_only_lakehouse_paths() -> None:
    roots = make_roots(table_root="s3://tables", sources=(SourceRecord(root=SOURCE),), moves=False)
    assert roots.find(f"s3://tables/{FILE}").is_writable
    node, definition = new_node_path(uuid.uuid4()), new_lakehouse_def_path(uuid.uuid4())
    for path in (FILE, node, definition):
        address = roots.find(SOURCE + path)
        assert (address.root, address.path, address.is_writable) == (SOURCE, path, False)
    for uri in (f"s3://tables/{node}", "s3://tables/x", f"{SOURCE}secret", f"{SOURCE}_latest_hint.txt", SOURCE):
        assert is_rejected(roots, uri), uri


def test_export_targets_are_readable() -> None:
    record = ExportRecord(name="e", version=1, level=ExportLevel.FULL, target_uri=SOURCE)
    assert make_roots(exports=(record,), moves=False).find(SOURCE + FILE).root == SOURCE


@pytest.mark.parametrize("local", ["file:///data/me/", "memory://x/"])
def test_remote_lakehouse_cannot_refer_to_local_files(local: str) -> None:
    roots_in_definition = {"table_root": local, "sources": (SourceRecord(root=local),)}
    assert is_rejected(make_roots(moves=False, **roots_in_definition), local + FILE)
    assert make_roots(root="file:///lake/", **roots_in_definition).find(local + FILE).root == local
    assert make_roots(allowed=(local,), **roots_in_definition).find(local + FILE).root == local
    with pytest.raises(LocationNotAllowedError):
        make_roots(**roots_in_definition).check_root(local)
    make_roots(allowed=(local,)).check_root(local)


def test_file_of_moved_lakehouse_is_read_at_current_root() -> None:
    address = make_roots().find(f"file:///old/place/{FILE}")
    assert (address.root, address.path, address.is_moved) == (ROOT, FILE, True)
    assert not address.is_writable
    path = f"tables/{uuid.UUID(int=0)}/data/tables/f.parquet"
    for old_root in ("file:///old/place/", "s3://bucket/tables/", "s3://bucket/tables/x/tables/"):
        assert make_roots().find(f"{old_root}{path}").path == path, "a root may itself end in 'tables/'"
    assert is_rejected(make_roots().strict(), f"file:///old/place/{FILE}")
    assert is_rejected(make_roots(), "file:///old/place/tables/")
    assert is_rejected(make_roots(), "file:///old/place/tables/x")


def test_long_or_invalid_location_is_rejected() -> None:
    assert is_rejected(make_roots(), f"file:///{'x' * 5000}/y")
    with pytest.raises(InvalidLocationError):
        make_roots().find("relative")
    named_roots = NamedRoots()
    named_roots.note(LakehouseDef(id="x", table_root="../no root", sources=(SourceRecord(root=""),)))
    assert (named_roots.table_roots, named_roots.sources) == ((), ())


@pytest.mark.parametrize(
    ("uri", "advice"),
    [
        (f"s3://other/lake/{FILE}", "allow a root that contains it, such as 's3://other/lake/tables/an-id/',"),
        (
            f"dynamodb://t/lake/{FILE}",
            "allow the root of the lakehouse that contains it, such as 'dynamodb://t/lake/',",
        ),
        (
            f"dynamodb://t/tables/lake/tables/{uuid.UUID(int=0)}/data/tables/f.parquet",
            "allow the root of the lakehouse that contains it, such as 'dynamodb://t/tables/lake/',",
        ),
        ("dynamodb://t/lake/0101/x.binpb", "allow the root of the lakehouse that contains it,"),
    ],
)
def test_error_suggests_root_to_allow(uri: str, advice: str) -> None:
    """Roots in DynamoDB do not nest, so the advice names the root of the lakehouse instead of the table's folder."""
    with pytest.raises(LocationNotAllowedError) as caught:
        make_roots(moves=False).find(uri)
    assert advice in caught.value.message


def test_allowed_roots_option_is_parsed() -> None:
    assert allowed_roots(" s3://a/b\n/data/x s3://a/b/ ") == ("s3://a/b/", "file:///data/x/")
    with pytest.raises(InvalidInputError, match="allowed_roots"):
        allowed_roots("nothing")
