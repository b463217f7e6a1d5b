"""A struct with a long name and many fields is rejected, because readers build the full path of every field."""

from __future__ import annotations

import io
import json

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.iceberg.validation.avro import decompress
from trinitylake_ops.iceberg.validation.files import footer_of, read_footer
from trinitylake_ops.iceberg.validation.thrift import Thrift, full_name_chars, parquet_name_chars, structs

_NAMES = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=1, max_size=5)


def columns_of(
    types: st.SearchStrategy[pa.DataType], max_size: int
) -> st.SearchStrategy[list[tuple[str, pa.DataType]]]:
    return st.lists(st.tuples(_NAMES, types), min_size=1, max_size=max_size, unique_by=lambda column: column[0])


_TYPES = st.recursive(st.just(pa.int32()), lambda inner: columns_of(inner, 3).map(pa.struct), max_leaves=8)


def parquet(schema: pa.Schema) -> bytes:
    sink = io.BytesIO()
    with pq.ParquetWriter(sink, schema, store_schema=False):
        pass
    return sink.getvalue()


def test_parquet_file_with_long_nested_names_is_rejected() -> None:
    columns = [pa.field(f"f{number}", pa.int32()) for number in range(3_000)]
    data = parquet(pa.schema([pa.field("A" * 200_000, pa.struct(columns))]))
    assert len(data) < 300_000
    with pytest.raises(CorruptFileError):
        read_footer(data, "x.parquet")
    assert read_footer(parquet(pa.schema(columns)), "x.parquet").num_columns == 3_000


@given(columns_of(_TYPES, 4))
def test_parquet_name_length_matches_arrow(columns: list[tuple[str, pa.DataType]]) -> None:
    data = parquet(pa.schema(columns))
    elements = structs(Thrift(footer_of(data)).struct(last=2)[2])
    leaves = [pq.ParquetFile(io.BytesIO(data)).schema.column(index).path for index in range(len(columns))]
    root_chars = len(elements[0][4]) + 1  # type: ignore[arg-type]  # the name of the schema root, which is not part of column paths
    assert parquet_name_chars(elements[:1]) == root_chars
    assert parquet_name_chars(elements) >= sum(map(len, leaves))
    assert full_name_chars([{"name": name} for name, _ in columns]) == sum(len(name) + 1 for name, _ in columns)


def test_avro_file_with_long_nested_names_is_rejected() -> None:
    fields = [{"name": f"f{number}", "type": ["null", "int"], "default": None} for number in range(4_000)]
    inner = {"type": "record", "name": "inner", "fields": fields}
    field = {"name": "A" * 400_000, "type": ["null", inner], "default": None}
    schema = {"type": "record", "name": "row", "fields": [field]}
    out = io.BytesIO()
    fastavro.writer(out, fastavro.parse_schema(schema), [{}])
    with pytest.raises(CorruptFileError):
        decompress(out.getvalue(), "x.avro")
    assert full_name_chars(json.loads(json.dumps(schema))) > 4_000 * 400_000
