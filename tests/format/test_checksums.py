"""Seals: every bit of a sealed file counts, and so does its name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.checksums import check_seals, open_seal, sealed

PATH = "0000/0000/0000/00000000-node-6fcb514b-b878-4c9d-95b7-8dc3a7ce6fd8.arrow"


def _file(body: bytes, path: str = PATH) -> bytes:
    seal = open_seal(path).encode()
    return sealed(b"<" + seal + b">" + body + b"<" + seal + b">", path)


def _seals(data: bytes) -> list[str | None]:
    size = len(open_seal(PATH))
    return [part.decode("latin-1") if part else None for part in (data[1 : 1 + size], data[-1 - size : -1])]


def test_a_sealed_file_is_whole() -> None:
    data = _file(b"rows")
    assert len(data) == len(b"<><>rows") + 2 * len(open_seal(PATH))
    assert check_seals(data, _seals(data), PATH)


@given(body=st.binary(max_size=50), at=st.integers(min_value=0), bit=st.integers(0, 7))
def test_every_flipped_bit_is_found(body: bytes, at: int, bit: int) -> None:
    data = bytearray(_file(body))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(CorruptFileError):
        check_seals(bytes(data), _seals(bytes(data)), PATH)


def test_a_file_in_the_place_of_another_is_told() -> None:
    other = PATH.replace("6fcb", "7fcb")
    data = _file(b"rows", other)
    with pytest.raises(CorruptFileError):
        check_seals(data, _seals(data), PATH)


def test_a_seal_that_another_program_carried_on_means_nothing() -> None:
    other = PATH.replace("6fcb", "7fcb")
    data = _file(b"rows", other).replace(b"rows", b"other rows")
    assert not check_seals(data, _seals(data), PATH)


def test_one_seal_alone_is_damage_and_none_is_a_file_of_others() -> None:
    data = _file(b"rows")
    assert not check_seals(b"rows", [None, None], PATH)
    with pytest.raises(CorruptFileError):
        check_seals(data, [_seals(data)[0], None], PATH)
