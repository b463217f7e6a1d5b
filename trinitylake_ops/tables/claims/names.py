"""Bounds nested names.

Each reader of schemas writes out the full name of every column. So a long name around many columns becomes gigabytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trinitylake_ops.tables.claims.thrift import Value

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
