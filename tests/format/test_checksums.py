"""Checksums, which cover every bit of a file and its name."""

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


def test_file_with_checksum_is_valid() -> None:
    data = _file(b"rows")
    assert len(data) == len(b"<><>rows") + 2 * len(open_seal(PATH))
    assert check_seals(data, _seals(data), PATH)


@given(body=st.binary(max_size=50), position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_every_flipped_bit_is_detected(body: bytes, position: int, bit: int) -> None:
    data = bytearray(_file(body))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CorruptFileError):
        check_seals(bytes(data), _seals(bytes(data)), PATH)


def test_swapped_file_is_detected() -> None:
    other = PATH.replace("6fcb", "7fcb")
    data = _file(b"rows", other)
    with pytest.raises(CorruptFileError):
        check_seals(data, _seals(data), PATH)


def test_checksum_copied_by_another_program_is_ignored() -> None:
    other = PATH.replace("6fcb", "7fcb")
    data = _file(b"rows", other).replace(b"rows", b"other rows")
    assert not check_seals(data, _seals(data), PATH)


def test_file_needs_both_checksums_or_none() -> None:
    data = _file(b"rows")
    assert not check_seals(b"rows", [None, None], PATH)
    with pytest.raises(CorruptFileError):
        check_seals(data, [_seals(data)[0], None], PATH)
