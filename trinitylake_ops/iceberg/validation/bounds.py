"""Bounds in manifests that are no values of their columns, as some engines write them.

DuckDB cuts the lower bound of a text at 16 bytes, which can be within a character. No reader can decode such a bound:
a filter on the column fails in every engine. :func:`read_valid_bounds` repairs bounds when pyiceberg decodes a manifest
in this process, so that all readers here work (decision 13):

- A lower bound of text is cut back to its last whole character. A prefix of a lower bound is one, too.
- Any other bound that is no value of its type is left out. Readers then expect any value.
- Both bounds of a text are left out if the lower one is greater than the upper one.
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
#: The sizes in bytes of values of a type, the first one for the type itself. Others are of types that were widened.
_SIZES = {
    **dict.fromkeys(("int", "date", "float"), (4,)),
    **dict.fromkeys(("time", "timestamp", "timestamptz", "timestamp_ns", "timestamptz_ns"), (8,)),
    **dict.fromkeys(("long", "double"), (8, 4)),
    "boolean": (1,),
    "uuid": (16,),
}
_USUAL_SIZES: Mapping[str | None, int] = {kind: sizes[0] for kind, sizes in _SIZES.items()}
_TEXT = "string"
_TYPED = (("id", "type"), ("element-id", "element"), ("key-id", "key"), ("value-id", "value"))
_Bounds = Mapping[int, bytes]


_LOWER_FIELD, _UPPER_FIELD = 125, 128
_FIELDS = [field.field_id for field in DATA_FILE_TYPE[DEFAULT_READ_VERSION].fields]
_LOWER, _UPPER = _FIELDS.index(_LOWER_FIELD), _FIELDS.index(_UPPER_FIELD)


class FaultyBounds(DataFile):
    """A data file whose bounds in its manifest, or those of its partition in the manifest list, are faulty."""


def mark_faulty(file: DataFile) -> None:
    """Make a data file a :class:`FaultyBounds`, which is equal to it."""
    object.__setattr__(file, "__class__", FaultyBounds)


def has_faulty_bounds(entries: Iterable[ManifestEntry]) -> bool:
    """Return whether entries of a manifest had bounds that are no values of their columns."""
    return any(isinstance(entry.data_file, FaultyBounds) for entry in entries)


def has_faulty_summaries(manifest: ManifestFile, entries: Iterable[ManifestEntry]) -> bool:
    """Return whether a manifest list has a bound of a text partition field that is no text.

    Args:
        manifest: The entry of the manifest list.
        entries: The entries of the manifest, whose partition values give the types.
    """
    faulty = [
        at
        for at, field in enumerate(manifest.partitions or ())
        if any(bound is not None and not _is_value(bound, _TEXT) for bound in (field.lower_bound, field.upper_bound))
    ]
    return bool(faulty) and any(isinstance(entry.data_file.partition[at], str) for entry in entries for at in faulty)


def read_valid_bounds() -> None:
    """Repair bounds in all manifests that pyiceberg decodes in this process, and evaluate no faulty summary."""
    vars(pyiceberg_manifest)["AvroFile"] = _ManifestFile
    evaluator = visitors._ManifestEvalVisitor
    evaluate = evaluator.eval

    @functools.wraps(evaluate)
    def evaluated(self: visitors._ManifestEvalVisitor, manifest: ManifestFile) -> bool:
        try:
            return evaluate(self, manifest)
        except (UnicodeDecodeError, struct.error):
            return True

    if not hasattr(evaluate, "__wrapped__"):
        evaluator.eval = evaluated  # type: ignore[method-assign]


class _ManifestFile(AvroFile[D]):
    """Reads an Avro file as pyiceberg does, and repairs the bounds in the entries of a manifest."""

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
    """Return the primitive types of columns by their ids, from the schema in the header of a manifest.

    A schema that is missing or cannot be read gives none, because nothing is known about the bounds then.
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
            for id_name, type_name in _TYPED:
                number, kind = part.get(id_name), part.get(type_name)
                if isinstance(number, int) and isinstance(kind, str):
                    types[number] = kind
            rest += (value for value in part.values() if isinstance(value, dict | list))
    return types


def valid_bounds(lower: _Bounds, upper: _Bounds, types: Mapping[int, str]) -> tuple[_Bounds, _Bounds] | None:
    """Return the bounds of a data file with the faulty ones repaired or left out.

    Args:
        lower: The lower bounds, by column id.
        upper: The upper bounds, by column id.
        types: The types of columns, from :func:`column_types`. Bounds of other columns are not checked.

    Returns:
        The repaired lower and upper bounds, None if all are valid.
    """
    faulty_lower, faulty_upper = _faulty(lower, types), _faulty(upper, types)
    get = types.get
    crossed = [column for column, value in lower.items() if value > upper.get(column, value) and get(column) == _TEXT]
    if not faulty_lower and not faulty_upper and not crossed:
        return None
    repaired_lower, repaired_upper = dict(lower), dict(upper)
    for column in faulty_lower:
        value = repaired_lower.pop(column)
        if types[column] == _TEXT:
            repaired_lower[column] = _whole_characters(value)
    for column in faulty_upper:
        del repaired_upper[column]
    for column in crossed:
        repaired_lower.pop(column, None)
        repaired_upper.pop(column, None)
    return repaired_lower, repaired_upper


def repair_record(record: dict[str, Any], types: Mapping[int, str]) -> None:
    """Repair the bounds in a record of a manifest, as fastavro decodes it.

    Args:
        record: The record, which is changed in place.
        types: The types of columns, from :func:`column_types`.
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
    """Return the columns whose bound is no value. Most bounds are decided here, without a call."""
    get, sizes = types.get, _USUAL_SIZES
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
    """Return the longest prefix of some bytes that is UTF-8."""
    try:
        value.decode()
    except UnicodeDecodeError as error:
        return value[: error.start]
    return value
