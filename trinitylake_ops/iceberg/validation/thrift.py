"""Decode the Thrift parts of Parquet footers, and limit the total length of nested names.

Schema readers build the full name of every column, so a struct with a long name and many columns takes gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

_STOP, _TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT = range(13)
_MAX_DEPTH = 8

Value: TypeAlias = "int | bytes | list[Value] | dict[int, Value] | None"


@dataclass
class Thrift:
    """Decodes the Thrift types in page headers and footers. Raises ValueError for any other bytes."""

    data: bytes
    #: Offset of the next value.
    at: int = 0

    def struct(self, depth: int = 0, last: int | None = None) -> dict[int, Value]:
        """Return the fields of a struct by number. Values of unsupported types are None.

        Args:
            depth: Depth of nesting.
            last: Number of the last field to decode; None for all fields.

        Raises:
            ValueError: The struct is not valid.
        """
        if depth > _MAX_DEPTH:
            raise ValueError("structs are nested too deeply")
        fields: dict[int, Value] = {}
        field = 0
        while (head := self.take(1)[0]) & 0x0F != _STOP:
            field = field + (head >> 4) if head >> 4 else self._number()
            fields[field] = None if head & 0x0F in (_TRUE, _FALSE) else self._value(head & 0x0F, depth)
            if field == last:
                break
        return fields

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes."""
        if not 0 <= length <= len(self.data) - self.at:
            raise ValueError("a length exceeds the input")
        self.at += length
        return self.data[self.at - length : self.at]

    def _varint(self) -> int:
        value = 0
        for n in range(10):
            byte = self.take(1)[0]
            value |= (byte & 0x7F) << (7 * n)
            if byte < 0x80:
                return value
        raise ValueError("a number is too long")

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
        raise ValueError("a value has an unknown type")

    def _list(self, depth: int) -> list[Value]:
        head = self.take(1)[0]
        n_items = self._varint() if head >> 4 == _LONG_LIST else head >> 4
        if n_items > len(self.data) - self.at:
            raise ValueError("a list declares more items than bytes")
        return [self._value(head & 0x0F, depth) for _ in range(n_items)]


#: Size of values with a fixed size in lists, where booleans take a byte each.
_FIXED_BYTES = {_TRUE: 1, _FALSE: 1, _BYTE: 1, _DOUBLE: 8}
_LONG_LIST = 15


def structs(values: object) -> list[dict[int, Value]]:
    """Return values after checking that they are structs. Raises ValueError for other values."""
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise ValueError("a value is not a struct")
    return values


#: Maximum total length of the full names of all columns. The names of outer columns are counted for each nested column.
MAX_NAME_CHARS = 32 << 20
_UNNAMED_PART_CHARS = 8  # such as ".element"
_NAME, _CHILDREN = 4, 5  # fields of Parquet's SchemaElement


def full_name_chars(schema: Any) -> int:
    """Return the total length of the full names in an Iceberg or Avro schema, in JSON."""
    n_chars = 0
    rest: list[tuple[Any, int]] = [(schema, 0)]
    while rest:
        part, prefix_chars = rest.pop()
        if isinstance(part, list):
            rest += [(item, prefix_chars) for item in part if isinstance(item, dict | list)]
        elif isinstance(part, dict):
            name = part.get("name")
            full_chars = prefix_chars + (len(name) + 1 if isinstance(name, str) else _UNNAMED_PART_CHARS)
            n_chars += full_chars
            rest += [(item, full_chars) for item in part.values() if isinstance(item, dict | list)]
    return n_chars


def parquet_name_chars(elements: Sequence[dict[int, Value]]) -> int:
    """Return the total length in bytes of the full names in a Parquet schema.

    Elements precede their children in ``elements``.
    """
    n_chars = 0
    parents: list[tuple[int, int]] = []  # length of the full name, and number of remaining children
    for element in elements:
        name, children = element.get(_NAME), element.get(_CHILDREN)
        full_chars = (parents[-1][0] if parents else 0) + (len(name) + 1 if isinstance(name, bytes) else 0)
        n_chars += full_chars
        if parents:
            parents[-1] = (parents[-1][0], parents[-1][1] - 1)
        if isinstance(children, int) and children > 0:
            parents.append((full_chars, children))
        while parents and parents[-1][1] <= 0:
            parents.pop()
    return n_chars
