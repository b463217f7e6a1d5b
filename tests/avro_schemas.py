"""A cache of Avro schemas and readers. PyIceberg builds them for each file, although tests use only a few schemas."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from pyiceberg.avro import file as avro
from pyiceberg.avro.reader import Reader
from pyiceberg.schema import Schema
from pyiceberg.utils.schema_conversion import AvroSchemaConversion

_KEY = "avro.schema"
_MAX_READERS = 256
_parse, _resolve = avro.AvroFileHeader.get_schema, avro.resolve_reader
_header_reader = avro.construct_reader(avro.META_SCHEMA, {-1: avro.AvroFileHeader})
#: Readers by the ids of their schemas. The values also reference the schemas, so that their ids are not reused.
_readers: dict[tuple[object, ...], tuple[Reader, Schema, Schema]] = {}


@lru_cache(maxsize=_MAX_READERS)
def _schema(text: str) -> Schema:
    return AvroSchemaConversion().avro_to_iceberg(json.loads(text))


def _cached_schema(header: avro.AvroFileHeader) -> Schema:
    return _schema(header.meta[_KEY]) if _KEY in header.meta else _parse(header)


def _cached_reader(
    file_schema: Schema, read_schema: Schema, types: dict[int, Callable[..., Any]], enums: dict[int, Callable[..., Any]]
) -> Reader:
    key = (id(file_schema), id(read_schema), *types.items(), *enums.items())
    if key not in _readers:
        while len(_readers) >= _MAX_READERS:
            _readers.pop(next(iter(_readers)), None)
        _readers[key] = (_resolve(file_schema, read_schema, types, enums), file_schema, read_schema)
    return _readers[key][0]


def _read_header(file: avro.AvroFile[Any]) -> avro.AvroFileHeader:
    return _header_reader.read(file.decoder)


def cache_avro_schemas() -> None:
    """Make PyIceberg build each schema and each reader only once in this process."""
    avro.AvroFile._read_header = _read_header
    avro.AvroFileHeader.get_schema = _cached_schema
    avro.resolve_reader = _cached_reader
