"""Object keys: encoding, decoding and order."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.format.strategies import names
from trinitylake_ops.errors import CorruptFileError, InvalidNameError
from trinitylake_ops.format import keys as keys_module
from trinitylake_ops.format.keys import KeyCodec, ObjectName, encode_schema_id, validate_name

SIZE = 32  # eight characters of four bytes
CODEC = KeyCodec(SIZE, SIZE)


@given(names, st.none() | names)
def test_key_round_trips_to_name(namespace: str, table: str | None) -> None:
    key = CODEC.namespace_key(namespace) if table is None else CODEC.table_key(namespace, table)
    assert CODEC.decode(key) == ObjectName(namespace, table)
    assert len(key.encode()) == 4 + SIZE * (1 if table is None else 2)


@given(st.lists(st.tuples(names, names), unique=True, max_size=8))
def test_keys_sort_by_padded_utf8_names(pairs: list[tuple[str, str]]) -> None:
    def padded_bytes(pair: tuple[str, str]) -> bytes:
        return b"".join(name.encode().ljust(SIZE) for name in pair)

    by_key = sorted(pairs, key=lambda pair: CODEC.table_key(*pair))
    assert by_key == sorted(pairs, key=padded_bytes)
    assert by_key == sorted(pairs, key=lambda pair: CODEC.table_key(*pair).encode())


@given(names, names, names)
def test_namespace_prefix_matches_only_its_tables(namespace: str, additional_name: str, table: str) -> None:
    key = CODEC.table_key(additional_name, table)
    assert key.startswith(CODEC.tables_prefix(namespace)) == (namespace == additional_name)


@given(names, st.sampled_from([*map(chr, range(0x21)), "\x7f", "\ud800", "\udfff"]), st.data())
def test_forbidden_character_is_rejected(name: str, char: str, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(name)))
    with pytest.raises(InvalidNameError):
        validate_name(name[:position] + char + name[position:], 100, "table")


@given(names)
def test_name_limit_is_inclusive_in_bytes(name: str) -> None:
    size_bytes = len(name.encode())
    assert validate_name(name, size_bytes, "table") == name
    with pytest.raises(
        InvalidNameError, match=rf"{size_bytes} bytes .* the limit of this lakehouse is {size_bytes - 1}"
    ):
        validate_name(name, size_bytes - 1, "table")


@pytest.mark.parametrize("name", ["\x80", "\x85", "\xa0", "\u200b", "\ufeff", "ﬁ", "e\u0301", "A", "🦆", "\U0010ffff"])
def test_names_are_not_trimmed_folded_or_normalized(name: str) -> None:
    assert CODEC.decode(CODEC.table_key(name, name)) == ObjectName(name, name)


def test_names_that_differ_in_case_or_composition_have_different_keys() -> None:
    assert len({CODEC.namespace_key(name) for name in ["é", "e\u0301", "É", "E\u0301"]}) == 4


@pytest.mark.parametrize("key", ["D===abc", "/===", "BA==x", "", "D" * 200])
def test_key_of_unknown_object_type_has_no_name(key: str) -> None:
    assert CODEC.decode(key) is None


@pytest.mark.parametrize(
    "key",
    [
        "B===",
        "B===short",
        "B===" + "a" * (SIZE + 1),
        "B===a b" + " " * (SIZE - 3),
        "B===" + " " * SIZE,
        "B=== a" + " " * (SIZE - 2),
        "C===" + "a".ljust(SIZE),
        "C===" + "a".ljust(SIZE) + " " * SIZE,
        "C===" + "a" * (SIZE - 1) + "é" + "t".ljust(SIZE),
        "B===a\t" + " " * (SIZE - 2),
    ],
)
def test_invalid_key_is_corrupt(key: str) -> None:
    with pytest.raises(CorruptFileError) as caught:
        CODEC.decode(key, "some/node.arrow")
    assert caught.value.path == "some/node.arrow"


def _column(keys: list[str], kind: pa.DataType, chunk_rows: int) -> pa.ChunkedArray:
    chunks = [keys[start : start + chunk_rows] for start in range(0, len(keys), chunk_rows)]
    return pa.chunked_array(chunks, kind)


@pytest.mark.parametrize("kind", [pa.utf8(), pa.large_utf8()], ids=str)
@pytest.mark.parametrize("batch_size", [40, 10_000])
@pytest.mark.parametrize("additional_name", ["plain", "naïve", "t" * SIZE])
def test_batch_decoding_equals_single_decoding(
    kind: pa.DataType, batch_size: int, additional_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys_module, "KEYS_PER_BATCH", batch_size)
    names = [f"t{number:0{number % 20 + 3}}" for number in range(100)] + [additional_name]
    keys = [CODEC.table_key("ns", name) for name in names]
    decoded = CODEC.table_names(_column(keys, kind, 7))
    assert isinstance(decoded, pa.StringArray | pa.LargeStringArray)
    assert decoded.to_pylist() == names
    assert CODEC.table_names(_column([], kind, 7)).to_pylist() == []


@pytest.mark.parametrize("invalid_name", ["a b", "a\t", "", "a\x7f", " a"])
def test_invalid_key_in_batch_is_corrupt(invalid_name: str) -> None:
    keys = [CODEC.table_key("ns", f"t{number}") for number in range(100)]
    keys.insert(50, CODEC.tables_prefix("ns") + invalid_name.ljust(SIZE))
    with pytest.raises(CorruptFileError):
        CODEC.table_names(_column(keys, pa.utf8(), 7))


@given(st.integers(0, 64**4 - 1))
def test_schema_ids_have_four_characters_and_round_trip(schema_id: int) -> None:
    encoded = encode_schema_id(schema_id)
    assert len(encoded) == 4
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
    value = 0
    for char in encoded.rstrip("="):
        value = value * 64 + alphabet.index(char)
    assert value == schema_id


@pytest.mark.parametrize("schema_id", [-1, 64**4])
def test_schema_id_out_of_range_is_rejected(schema_id: int) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        encode_schema_id(schema_id)
