"""Text of a node file that is read in place, without making Python strings of all of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import pyarrow as pa
from pyarrow.lib import StringBuilder

_FEW_TEXTS = 64  # for more strings, the builder takes longer than pa.array
_MAX_UTF8_BYTES = 2**31 - 1  # offsets of utf8 are 32-bit numbers


class TextColumn(Sequence[str]):
    """An unchanging list of strings: an Arrow array of ``utf8`` without nulls.

    Taking one string makes only that string, and slices and iterations make theirs anew each time. Only the bytes of
    the file are kept. Equal to a list or column of the same strings.
    """

    __slots__ = ("array",)

    def __init__(self, array: pa.StringArray):
        self.array = array

    def __len__(self) -> int:
        return len(self.array)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found: str | list[str] = (
            self.array[index].to_pylist() if isinstance(index, slice) else self.array[index].as_py()
        )
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self.array.to_pylist())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, (list, TextColumn)) and len(self) == len(other) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def text_array(texts: Sequence[str | None]) -> pa.StringArray:
    """Return strings as an Arrow array of ``utf8``, those of a column without a copy."""
    if isinstance(texts, TextColumn):
        return texts.array
    return built_texts(texts) if len(texts) <= _FEW_TEXTS else pa.array(texts, pa.utf8())


def built_texts(texts: Iterable[str | None]) -> pa.StringArray:
    """Return strings as an Arrow array of ``utf8``. ``pa.array`` would load pandas for any list, if installed."""
    builder = StringBuilder()
    builder.append_values(texts)
    return builder.finish()


def joined_texts(arrays: Sequence[pa.StringArray]) -> pa.StringArray:
    """Return arrays one after the other, as ``large_utf8`` if they hold more text than ``utf8`` can count."""
    if not arrays:
        return built_texts([])
    if any(is_large_text(array) for array in arrays) or _is_too_much(pa.chunked_array(arrays, pa.utf8())):
        return pa.concat_arrays([array.cast(pa.large_utf8()) for array in arrays])
    return pa.concat_arrays(arrays)


def _is_too_much(texts: pa.ChunkedArray) -> bool:
    # Whole buffers are a bound that takes far less time than the parts of them that are shown.
    return bool(texts.get_total_buffer_size() > _MAX_UTF8_BYTES and texts.nbytes > _MAX_UTF8_BYTES)


def is_large_text(array: pa.StringArray) -> bool:
    """Whether a column of text counts it by 64-bit numbers."""
    return bool(pa.types.is_large_string(array.type))
