"""Names that may refer to the same file on file systems that fold case or normalize Unicode."""

from __future__ import annotations

import unicodedata
import uuid
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.strategies import names
from trinitylake_ops.format.checksums import CompactUuidSet, OtherNames, folded, name_identity
from trinitylake_ops.format.file_names import new_node_path, optimize_path

ID = "6fcb514b-b878-4c9d-95b7-8dc3a7ce6fd8"
Transformation = Callable[[str], str]

#: How file systems may transform names.
TRANSFORMATIONS: list[Transformation] = [
    str.lower,
    str.upper,
    lambda name: unicodedata.normalize("NFD", name),
    lambda name: unicodedata.normalize("NFC", name),
    lambda name: unicodedata.normalize("NFD", name).upper(),
]


@given(names, st.sampled_from(TRANSFORMATIONS))
def test_identity_is_independent_of_case_and_normalization(name: str, transform: Transformation) -> None:
    definition = optimize_path(f"table-{name.replace('/', '-')}-ns-{ID}.binpb")
    data = f"tables/t/data/part={name}/00000-0-{ID}.parquet"
    for path in (definition, data):
        other = transform(path)
        is_plain = path == folded(path)
        assert folded(other) == path if is_plain else other in OtherNames([path])


def test_plain_path_is_not_stored() -> None:
    """Callers compare the path itself, so that it does not take memory."""
    for path in (new_node_path(), f"tables/t/data/{ID}.parquet"):
        assert path not in OtherNames([path])


@pytest.mark.parametrize(
    ("needed", "listed", "is_same"),
    [
        (f"0000/table-größe-{ID}.binpb", f"0000/table-gr??e-{ID}.binpb", True),
        (f"0000/table-Größe-{ID}.binpb", f"0000/table-größe-{uuid.UUID(int=1)}.binpb", False),
        (f"file:///elsewhere/_export_{ID}.arrow", f"_export_{ID.upper()}.arrow", True),
        ("file:///elsewhere/plain.txt", "tables/t/plain.txt", True),
        ("tables/T/data/Überall.parquet", "tables/t/data/überall.parquet", True),
        ("tables/T/data/Überall.parquet", "tables/u/data/überall.parquet", False),
        # Files of one write share its UUID.
        (f"tables/t/A/00000-0-{ID}.parquet", f"tables/t/a/00000-1-{ID}.parquet", False),
    ],
)
def test_identity_is_uuid_or_name(needed: str, listed: str, is_same: bool) -> None:
    assert (listed in OtherNames([needed])) == is_same


def test_identity_of_catalog_file_is_its_uuid() -> None:
    assert name_identity(f"file:///a/b/_export_{ID.upper()}.arrow") == ID
    assert name_identity(f"_ops/export-{ID}.json") == f"export-{ID}.json"
    assert object() not in OtherNames(["A"])


def test_table_ids_are_compared_exactly() -> None:
    ids = CompactUuidSet()
    ids.update(["Größe"])
    assert "Größe" in ids
    assert "größe" not in ids
    assert ids.has_like(unicodedata.normalize("NFD", "größe"))
    assert not ids.has_like("other")
