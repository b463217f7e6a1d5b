"""Repair bounds in manifests that are not valid values of their columns. Some engines write such bounds.

DuckDB truncates the lower bound of a string at 16 bytes, possibly in the middle of a character. No reader can decode
such a bound, so filters on the column fail in every engine. :func:`read_valid_bounds` repairs bounds when PyIceberg
decodes a manifest in this process (decision 13):

- A lower bound of a string is truncated to its last whole character. A prefix of a lower bound is a lower bound.
- Any other bound that is not a value of its type is dropped. Readers then assume that any value is possible. - Both
bounds of a string are dropped if the lower bound is greater than the upper bound.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeVar

from pyiceberg import manifest as pyiceberg_manifest
from pyiceberg.avro.file import AvroFile
from pyiceberg.expressions import visitors
from pyiceberg.manifest import DATA_FILE_TYPE, DEFAULT_READ_VERSION, DataFile, ManifestEntry, ManifestFile
from pyiceberg.typedef import StructProtocol

D = TypeVar("D", bound=StructProtocol)

_SCHEMA = "schema"
_MAX_DECIMAL_BYTES = 16
#: Sizes in bytes of the values of a type, followed by the sizes of types that can be promoted to it.
_SIZES = {
    **dict.fromkeys(("int", "date", "float"), (4,)),
    **dict.fromkeys(("time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), (8,)),
    **dict.fromkeys(("long", "double"), (8, 4)),
    "boolean": (1,),
    "uuid": (16,),
}
_FIRST_SIZES: Mapping[str | None, int] = {kind: sizes[0] for kind, sizes in _SIZES.items()}
_TEXT = "string"
_TYPE_KEYS = (("id", "type"), ("element-id", "element"), ("key-id", "key"), ("value-id", "value"))
_Bounds = Mapping[int, bytes]


_LOWER_FIELD, _UPPER_FIELD = 125, 128
_FIELDS = [field.field_id for field in DATA_FILE_TYPE[DEFAULT_READ_VERSION].fields]
_LOWER, _UPPER = _FIELDS.index(_LOWER_FIELD), _FIELDS.index(_UPPER_FIELD)


class FaultyBounds(DataFile):
    """A data file with invalid bounds in its manifest, or with invalid partition bounds in the manifest list."""


def mark_faulty(file: DataFile) -> None:
    """Change the class of a data file to :class:`FaultyBounds`, which compares equal."""
    object.__setattr__(file, "__class__", FaultyBounds)


def has_faulty_bounds(entries: Iterable[ManifestEntry]) -> bool:
    """Whether entries of a manifest had bounds that are not valid values of their columns."""
    return any(isinstance(entry.data_file, FaultyBounds) for entry in entries)


def has_faulty_summaries(manifest: ManifestFile, entries: Iterable[ManifestEntry]) -> bool:
    """Whether a manifest list has a bound of a string partition field that is not valid UTF-8.

    Args:
        manifest: The entry of the manifest list.
        entries: The entries of the manifest, whose partition values determine the types.
    """
    faulty = [
        index
        for index, field in enumerate(manifest.partitions or ())
        if any(bound is not None and not _is_value(bound, _TEXT) for bound in (field.lower_bound, field.upper_bound))
    ]
    return bool(faulty) and any(
        isinstance(entry.data_file.partition[index], str) for entry in entries for index in faulty
    )


def read_valid_bounds() -> None:
    """Repair bounds in all manifests that PyIceberg decodes in this process, and skip invalid partition summaries."""
    vars(pyiceberg_manifest)["AvroFile"] = _ManifestFile
    evaluator = visitors._ManifestEvalVisitor
    evaluate = evaluator.eval

    @functools.wraps(evaluate)
    def evaluate_or_match(self: visitors._ManifestEvalVisitor, manifest: ManifestFile) -> bool:
        try:
            return evaluate(self, manifest)
        except (UnicodeDecodeError, struct.error):
            return True

    if not hasattr(evaluate, "__wrapped__"):
        evaluator.eval = evaluate_or_match  # type: ignore[method-assign]


class _ManifestFile(AvroFile[D]):
    """Reads an Avro file as PyIceberg does, and repairs the bounds in the entries of a manifest."""

    _types: Mapping[int, str] = {}

    def __enter__(self) -> _ManifestFile[D]:
        super().__enter__()
        self._types = column_types(self.header.meta.get(_SCHEMA))
        return self

    def __next__(self) -> D:
        record = super().__next__()
        if self._types and isinstance(record, ManifestEntry):
            file = record.data_file
            bounds = valid_bounds(file.lower_bounds or {}, file.upper_bounds or {}, self._types)
            if bounds is not None:
                file[_LOWER], file[_UPPER] = bounds
                mark_faulty(file)
        return record


@lru_cache(maxsize=64)
def column_types(schema: bytes | str | None) -> Mapping[int, str]:
    """Return the primitive types of columns by id, from the schema in the header of a manifest.

    The result is empty for a schema that is missing or cannot be parsed. Bounds are then not checked.
    """
    try:
        rest = [json.loads(schema or "{}")]
    except (ValueError, RecursionError):
        return {}
    types: dict[int, str] = {}
    while rest:
        part = rest.pop()
        if isinstance(part, list):
            rest += part
        elif isinstance(part, dict):
            for id_name, type_name in _TYPE_KEYS:
                number, kind = part.get(id_name), part.get(type_name)
                if isinstance(number, int) and isinstance(kind, str):
                    types[number] = kind
            rest += (value for value in part.values() if isinstance(value, dict | list))
    return types


def valid_bounds(lower: _Bounds, upper: _Bounds, types: Mapping[int, str]) -> tuple[_Bounds, _Bounds] | None:
    """Return the bounds of a data file with invalid bounds repaired or dropped.

    Args:
        lower: Lower bounds by column id.
        upper: Upper bounds by column id.
        types: Types of columns, from :func:`column_types`. Bounds of other columns are not checked.

    Returns:
        The repaired lower and upper bounds, or None if all are valid.
    """
    faulty_lower, faulty_upper = _faulty(lower, types), _faulty(upper, types)
    get = types.get
    contradictory = [
        column for column, value in lower.items() if value > upper.get(column, value) and get(column) == _TEXT
    ]
    if not faulty_lower and not faulty_upper and not contradictory:
        return None
    repaired_lower, repaired_upper = dict(lower), dict(upper)
    for column in faulty_lower:
        value = repaired_lower.pop(column)
        if types[column] == _TEXT:
            repaired_lower[column] = _whole_characters(value)
    for column in faulty_upper:
        del repaired_upper[column]
    for column in contradictory:
        repaired_lower.pop(column, None)
        repaired_upper.pop(column, None)
    return repaired_lower, repaired_upper


def repair_record(record: dict[str, Any], types: Mapping[int, str]) -> None:
    """Repair the bounds in a manifest record that fastavro decoded.

    Args:
        record: The record, which is changed in place.
        types: Types of columns, from :func:`column_types`.
    """
    file = record["data_file"]
    lower, upper = (
        {entry["key"]: entry["value"] for entry in file.get(name) or ()} for name in ("lower_bounds", "upper_bounds")
    )
    bounds = valid_bounds(lower, upper, types)
    if bounds is not None:
        for name, repaired in zip(("lower_bounds", "upper_bounds"), bounds, strict=True):
            file[name] = [{"key": column, "value": value} for column, value in repaired.items()]


def _faulty(bounds: _Bounds, types: Mapping[int, str]) -> list[int]:
    """Return the columns with an invalid bound. Common cases are decided inline for speed."""
    get, sizes = types.get, _FIRST_SIZES
    return [
        column
        for column, value in bounds.items()
        if len(value) != sizes.get(kind := get(column), -1)
        and not (kind == _TEXT and value.isascii())
        and not _is_value(value, kind)
    ]


def _is_value(value: bytes, kind: str | None) -> bool:
    if kind is None:
        return True
    if kind == _TEXT:
        return value.isascii() or len(_whole_characters(value)) == len(value)
    sizes = _SIZES.get(kind)
    if sizes is not None:
        return len(value) in sizes
    if kind.startswith("decimal"):
        return 0 < len(value) <= _MAX_DECIMAL_BYTES
    return not kind.startswith("fixed") or kind == f"fixed[{len(value)}]"


def _whole_characters(value: bytes) -> bytes:
    """Return the longest prefix of a byte string that is valid UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return value[: error.start]
    return value
