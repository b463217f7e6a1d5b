"""The part of Thrift that the footers of Parquet files need, and bounds of nested names.

Each reader of schemas writes out the full name of every column. So a long name around many columns becomes gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_DEEPEST = 8

Value: TypeAlias = "int | bytes | list[Value] | dict[int, Value] | None"


@dataclass
class Thrift:
    """Reads the types of Thrift that page headers and footers need. Raises ValueError for other bytes."""

    data: bytes
    at: int = 0

    def struct(self, depth: int = 0, last: int | None = None) -> dict[int, Value]:
        """Return the fields of a struct by their numbers, up to a last one. Values that are no integers are None."""
        if depth > _DEEPEST:
            raise ValueError("too deep")
        found: dict[int, Value] = {}
        field = 0
        while (head := self.take(1)[0]) & 0x0F != _STOP:
            field = field + (head >> 4) if head >> 4 else self._number()
            found[field] = None if head & 0x0F in (_TRUE, _FALSE) else self._value(head & 0x0F, depth)
            if field == last:
                break
        return found

    def take(self, length: int) -> bytes:
        """Return so many bytes."""
        if not 0 <= length <= len(self.data) - self.at:
            raise ValueError("beyond the end")
        self.at += length
        return self.data[self.at - length : self.at]

    def _varint(self) -> int:
        value = 0
        for n in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * n)
            if byte < 0x80:
                return value
        raise ValueError("a number that is too long")

    def _number(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _value(self, kind: int, depth: int) -> Value:
        if kind in (_I16, _I32, _I64):
            return self._number()
        if kind == _BINARY:
            return self.take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            return self._list(depth)
        if kind in _FIXED_BYTES:
            self.take(_FIXED_BYTES[kind])
            return None
        raise ValueError("what no footer has")

    def _list(self, depth: int) -> list[Value]:
        head = self.take(1)[0]
        n_items = self._varint() if head >> 4 == _LONG_LIST else head >> 4
        if n_items > len(self.data) - self.at:
            raise ValueError("more items than bytes")
        return [self._value(head & 0x0F, depth) for _ in range(n_items)]


#: In lists, truth values take a byte each.
_FIXED_BYTES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
_LONG_LIST = 15


def structs(values: object) -> list[dict[int, Value]]:
    """Return values that must be structs. Raises ValueError for others."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("another type than Parquet has there")
    return values


#: The characters of the full names of all columns. The names of outer columns are counted again for each column in
#: them.
MAX_NAME_CHARS = 32 << 20
_CHARS_OF_A_PART = 8  # such as ".element"
_NAME, _CHILDREN = 4, 5  # fields of Parquet's SchemaElement


def full_name_chars(schema: Any) -> int:
    """Return how many characters the full names in a schema have. The schema is one of Iceberg or Avro, in JSON."""
    n_chars = 0
    rest: list[tuple[Any, int]] = [(schema, 0)]
    while rest:
        found, around = rest.pop()
        if isinstance(found, list):
            rest += [(item, around) for item in found if isinstance(item, dict | list)]
        elif isinstance(found, dict):
            name = found.get("name")
            inside = around + (len(name) + 1 if isinstance(name, str) else _CHARS_OF_A_PART)
            n_chars += inside
            rest += [(item, inside) for item in found.values() if isinstance(item, dict | list)]
    return n_chars


def parquet_name_chars(elements: Sequence[dict[int, Value]]) -> int:
    """Return how many bytes the full names in a Parquet schema have.

    ``elements`` come before the elements within them.
    """
    n_chars = 0
    around: list[tuple[int, int]] = []  # the bytes of a name, and the number of its elements to come
    for element in elements:
        name, children = element.get(_NAME), element.get(_CHILDREN)
        inside = (around[-1][0] if around else 0) + (len(name) + 1 if isinstance(name, bytes) else 0)
        n_chars += inside
        if around:
            around[-1] = (around[-1][0], around[-1][1] - 1)
        if isinstance(children, int) and children > 0:
            around.append((inside, children))
        while around and around[-1][1] <= 0:
            around.pop()
    return n_chars
