"""Where files may be read that content names: by the roots that are known, and nowhere else."""

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


def places(*, root: str = ROOT, allowed: tuple[str, ...] = (), moves: bool = True, **fields: object) -> AllowedRoots:
    names = NamedRoots()
    names.note(LakehouseDef(id="x", **fields))  # type: ignore[arg-type]
    return AllowedRoots(root, pickle.loads(pickle.dumps(names)), allowed, ("s3://given/",), moves, roots_nest)


def refused(found: AllowedRoots, uri: str) -> bool:
    try:
        found.find(uri)
    except LocationNotAllowedError as error:
        assert "--allow-root" in error.message
        assert len(error.message) < 900
        return True
    return False


def test_what_lies_under_the_root_or_a_root_of_the_caller_or_operator() -> None:
    known = places(allowed=("s3://operator/x/", "file:///mine/"))
    found = [known.find(f"{root}a") for root in (ROOT, "s3://given/", "s3://operator/x/", "file:///mine/")]
    assert [(place.root, place.path) for place in found] == [
        (ROOT, "a"),
        ("s3://given/", "a"),
        ("s3://operator/x/", "a"),
        ("file:///mine/", "a"),
    ]
    assert [place.is_writable for place in found] == [True, False, True, True]
    assert known.find("/mine/a").path == "a"
    for uri in ("s3://operator/y", "file:///etc/passwd", "/etc/passwd", "s3://bucket/lake2/a", "http://h/a?b=c"):
        assert refused(known, uri), uri


def test_what_definitions_name_holds_names_of_a_lakehouse_only() -> None:
    known = places(table_root="s3://tables", sources=(SourceRecord(root=SOURCE),), moves=False)
    assert known.find(f"s3://tables/{FILE}").is_writable
    node, definition = new_node_path(uuid.uuid4()), new_lakehouse_def_path(uuid.uuid4())
    for path in (FILE, node, definition):
        place = known.find(SOURCE + path)
        assert (place.root, place.path, place.is_writable) == (SOURCE, path, False)
    for uri in (f"s3://tables/{node}", "s3://tables/x", f"{SOURCE}secret", f"{SOURCE}_latest_hint.txt", SOURCE):
        assert refused(known, uri), uri


def test_where_exports_went_may_be_read() -> None:
    record = ExportRecord(name="e", version=1, level=ExportLevel.FULL, target_uri=SOURCE)
    assert places(exports=(record,), moves=False).find(SOURCE + FILE).root == SOURCE


@pytest.mark.parametrize("local", ["file:///data/me/", "memory://x/"])
def test_content_never_names_a_local_place_for_a_remote_root(local: str) -> None:
    named = {"table_root": local, "sources": (SourceRecord(root=local),)}
    assert refused(places(moves=False, **named), local + FILE)
    assert places(root="file:///lake/", **named).find(local + FILE).root == local
    assert places(allowed=(local,), **named).find(local + FILE).root == local
    with pytest.raises(LocationNotAllowedError):
        places(**named).check_root(local)
    places(allowed=(local,)).check_root(local)


def test_the_file_of_a_table_of_a_lakehouse_that_was_moved_is_read_here() -> None:
    place = places().find(f"file:///old/place/{FILE}")
    assert (place.root, place.path, place.is_moved) == (ROOT, FILE, True)
    assert not place.is_writable
    own = f"tables/{uuid.UUID(int=0)}/data/tables/f.parquet"
    for former in ("file:///old/place/", "s3://bucket/tables/", "s3://bucket/tables/x/tables/"):
        assert places().find(f"{former}{own}").path == own, "a root may end in 'tables/' itself"
    assert refused(places().strict(), f"file:///old/place/{FILE}")
    assert refused(places(), "file:///old/place/tables/")
    assert refused(places(), "file:///old/place/tables/x")


def test_long_and_wrong_locations() -> None:
    assert refused(places(), f"file:///{'x' * 5000}/y")
    with pytest.raises(InvalidLocationError):
        places().find("relative")
    names = NamedRoots()
    names.note(LakehouseDef(id="x", table_root="../no root", sources=(SourceRecord(root=""),)))
    assert (names.table_roots, names.sources) == ((), ())


@pytest.mark.parametrize(
    ("uri", "said"),
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
def test_what_to_allow(uri: str, said: str) -> None:
    """In DynamoDB a root shows nothing of roots above it, so that no folder of a table may be allowed."""
    with pytest.raises(LocationNotAllowedError) as caught:
        places(moves=False).find(uri)
    assert said in caught.value.message


def test_the_operators_roots() -> None:
    assert allowed_roots(" s3://a/b\n/data/x s3://a/b/ ") == ("s3://a/b/", "file:///data/x/")
    with pytest.raises(InvalidInputError, match="allowed_roots"):
        allowed_roots("nothing")
