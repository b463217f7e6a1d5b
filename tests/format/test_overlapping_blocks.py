"""Arrow files that refer to the same bytes repeatedly are rejected before they take memory."""

from __future__ import annotations

import struct
import time
import tracemalloc

import pyarrow as pa
import pytest

from trinitylake_ops.errors import CorruptFileError
from trinitylake_ops.format.arrow_ipc import check_body
from trinitylake_ops.format.node_file import decode_node, decode_system_rows

_BLOCK_BYTES = 24
_PATH = "node"


def _file(n_batches: int, text_bytes: int = 100_000) -> bytearray:
    """Return a file with one large batch and many tiny batches, which have blocks in the footer."""
    schema = pa.schema([("key", pa.utf8()), ("pvalue", pa.utf8()), ("pnode", pa.utf8())])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        for number in range(n_batches):
            text = "x" * (0 if number else text_bytes)
            columns = [pa.array(["created_at_millis"]), pa.array([text]), pa.array([None], pa.utf8())]
            writer.write_batch(pa.record_batch(columns, schema=schema))
    return bytearray(sink.getvalue())


def _blocks(data: bytes, n_batches: int) -> int:
    """Return the offset of the blocks in the footer."""
    start = len(data) - 10 - struct.unpack("<i", data[-10:-6])[0]
    for offset in range(start + 4, len(data) - _BLOCK_BYTES * n_batches):
        is_vector = struct.unpack_from("<I", data, offset - 4)[0] == n_batches
        if is_vector and 0 < struct.unpack_from("<q", data, offset)[0] < len(data):
            return offset
    raise AssertionError("the footer contains no blocks")


@pytest.mark.parametrize("decode", [decode_node, decode_system_rows])
def test_repeated_block_is_rejected_immediately(decode: object) -> None:
    assert callable(decode)
    n_batches = 500
    data = _file(n_batches)
    first = _blocks(data, n_batches)
    blocks = [data[first + _BLOCK_BYTES * number :][:_BLOCK_BYTES] for number in range(n_batches)]
    large = max(blocks, key=lambda block: struct.unpack("<qi4xq", block)[2])
    data[first : first + _BLOCK_BYTES * n_batches] = large * n_batches
    allocated_bytes, started = pa.total_allocated_bytes(), time.process_time()
    tracemalloc.start()
    with pytest.raises(CorruptFileError):
        decode(bytes(data), _PATH)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes + pa.total_allocated_bytes() - allocated_bytes < 10 * len(data)
    assert time.process_time() - started < 5


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda start, meta, body: (start, meta, body + 10**6), "overlap|footer"),
        (lambda start, meta, body: (start, meta, -body), "overlap"),
        (lambda start, meta, body: (start + 8, meta, body), "overlap|footer"),
        (lambda start, meta, body: (-start, meta, body), "overlap"),
        (lambda start, meta, body: (start, -meta, body), "overlap"),
    ],
)
def test_overlapping_blocks_are_rejected(change: object, reason: str) -> None:
    assert callable(change)
    data = _file(3)
    first = _blocks(data, 3)
    for number in range(3):
        offset = first + _BLOCK_BYTES * number
        block = struct.unpack_from("<qi4xq", data, offset)
        if block[2] > 1_000:
            struct.pack_into("<qi4xq", data, offset, *change(*block))
    with pytest.raises(ValueError, match=reason):
        check_body(bytes(data))


def test_overlapping_buffers_are_rejected() -> None:
    schema = pa.schema([("key", pa.utf8()), ("value", pa.utf8())])
    texts = pa.array(["a" * 4_000])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as writer:
        writer.write_batch(pa.record_batch([texts, texts], schema=schema))
    data = bytes(sink.getvalue())
    check_body(data)
    lengths = struct.pack("<q", 4_000)
    assert data.count(lengths) == 2
    with pytest.raises(ValueError, match="its buffers overlap"):
        check_body(data.replace(lengths, struct.pack("<q", 8_000)))


def test_ignored_column_is_not_decoded() -> None:
    """Columns of other types, such as dictionaries, nested lists and views, could take more memory than the file."""
    texts = pa.array(["created_at_millis", "n_keys"]), pa.array(["5", "0"])
    nested = pa.array([[["x"]], None], pa.list_(pa.list_(pa.dictionary(pa.int32(), pa.utf8()))))
    table = pa.table({"key": texts[0], "pvalue": texts[1], "txn": nested})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    assert decode_node(bytes(sink.getvalue()), _PATH).system == {"created_at_millis": "5"}


@pytest.mark.parametrize("kind", [pa.string_view(), pa.dictionary(pa.int32(), pa.utf8()), pa.list_(pa.utf8())])
def test_column_of_other_type_is_rejected_before_decoding(kind: pa.DataType) -> None:
    table = pa.table({"key": pa.nulls(1, kind), "pvalue": pa.nulls(1, pa.utf8())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(CorruptFileError):
        decode_node(bytes(sink.getvalue()), _PATH)
