"""Compressed node files: they decode to equal nodes, are not larger, and damaged ones take bounded memory."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.format.decoding import corruption_error
from tests.format.strategies import node_files
from trinitylake_ops.errors import CorruptFileError, FileMissingError, InvalidDefinitionError
from trinitylake_ops.format import arrow_ipc, node_file
from trinitylake_ops.format.arrow_ipc import MAX_DECOMPRESSED_BYTES, decompressed_bytes
from trinitylake_ops.format.keys import TextColumn
from trinitylake_ops.format.node_file import (
    NODE_COMPRESSIONS,
    NodeFile,
    decode_node,
    decode_system_rows,
    encode_node,
    encoded_size_bytes,
)
from trinitylake_ops.storage import MemoryStorage, drop_memory_root
from trinitylake_ops.tree.store import NodeStore

PATH = "0000/0000/0000/00000000-node.arrow"
CODECS = [name for name in NODE_COMPRESSIONS if name]
ORDER = 16
N_KEYS = 12
NODE = NodeFile(
    [f"C==={number:<96}" for number in range(10, 10 + N_KEYS)],
    [f"table-{number}" for number in range(N_KEYS)],
    [f"node-{number}" for number in range(N_KEYS + 1)],
    {"C===5": "table-5", "C===6": None},
    {"created_at_millis": "5"},
)
codecs = pytest.mark.parametrize("codec", CODECS)


def test_codecs_of_arrow_are_supported() -> None:
    assert set(CODECS) == {"lz4", "zstd"}


@given(node_files(), st.integers(0, 30), st.sampled_from(CODECS))
def test_compressed_node_round_trips_and_is_not_larger(node: NodeFile, n_spare: int, codec: str) -> None:
    order = len(node.keys) + 1 + n_spare
    data = encode_node(node, order, codec)
    decoded = decode_node(data, PATH)
    assert decoded == node
    assert list(decoded.buffer.items()) == list(node.buffer.items())
    assert decode_system_rows(data, PATH) == {**node.system, "n_keys": str(len(node.keys))}
    children_bytes = sum(len(child.encode()) for child in node.children)
    limit_bytes = encoded_size_bytes(order, node.keys, node.values, children_bytes, node.buffer, node.system)
    assert len(data) <= limit_bytes
    assert decompressed_bytes(data) or data == encode_node(node, order), (
        "the file is uncompressed if compression saves nothing"
    )


@codecs
def test_compressed_node_is_smaller_and_decoded_as_columns(codec: str) -> None:
    plain, data = encode_node(NODE, ORDER), encode_node(NODE, ORDER, codec)
    assert len(data) < 0.6 * len(plain)
    assert 0 == decompressed_bytes(plain) < decompressed_bytes(data) < len(plain)
    reader = pa.ipc.open_file(data)
    assert (reader.num_record_batches, reader.get_batch(0)) == (1, pa.ipc.open_file(plain).get_batch(0))
    node = decode_node(data, PATH)
    assert node == decode_node(plain, PATH) == NODE
    assert all(isinstance(column, TextColumn) for column in (node.keys, node.values, node.children))


@codecs
def test_incompressible_node_is_written_uncompressed(codec: str) -> None:
    text = "".join(random.Random(1).choices([chr(code) for code in range(0x20, 0x7F)], k=4))
    for node in (NodeFile(system={"created_at_millis": "5"}), NodeFile(system={"created_at_millis": "5", "x": text})):
        assert encode_node(node, 3, codec) == encode_node(node, 3)


def test_unknown_codec_is_rejected() -> None:
    for name in ("none", "LZ4", "gzip", "brotli"):
        with pytest.raises(InvalidDefinitionError, match=rf"node_compression is '{name}'.*'lz4' or 'zstd'"):
            encode_node(NODE, ORDER, name)


# Damaged files


@codecs
def test_truncated_compressed_file_is_corrupt(codec: str) -> None:
    data = encode_node(NODE, ORDER, codec)
    for size_bytes in range(len(data)):
        for decode in (decode_node, decode_system_rows):
            error = corruption_error(decode, data[:size_bytes], PATH)
            assert error is not None
            assert error.path == PATH


@codecs
def test_flipped_bit_gives_different_node_or_corrupt_file_error(codec: str) -> None:
    data = encode_node(NODE, ORDER, codec)
    rng = random.Random(7)
    n_rejected = 0
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << rng.randrange(8)
        error = corruption_error(decode_node, bytes(damaged), PATH)
        assert error is None or error.path == PATH
        n_rejected += error is not None
    assert n_rejected > len(data) / 3


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(CODECS))
def test_damaged_bytes_raise_only_corrupt_file_error(data: st.DataObject, codec: str) -> None:
    damaged = bytearray(encode_node(NODE, ORDER, codec))
    for _ in range(data.draw(st.integers(1, 8))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    error = corruption_error(decode_node, bytes(damaged), PATH)
    assert error is None or error.path == PATH


# Incorrect declared sizes


def _declared_size_offsets(data: bytes) -> Iterator[int]:
    """Yield the offsets of the declared sizes of compressed buffers that are as long as all keys."""
    text_bytes = len("".join(NODE.keys)) + len("".join(NODE.buffer)) + len("created_at_millis") + len("n_keys")
    declared_size = struct.pack("<q", text_bytes)
    offset = data.find(declared_size)
    while offset >= 0:
        changed = bytearray(data)
        struct.pack_into("<q", changed, offset, text_bytes + 1)
        if decompressed_bytes(bytes(changed)) == decompressed_bytes(data) + 1:  # not in the middle of a buffer
            yield offset
        offset = data.find(declared_size, offset + 1)


@codecs
@pytest.mark.parametrize("declared_bytes", [MAX_DECOMPRESSED_BYTES + 1, 2**40, 2**62])
def test_excessive_declared_size_is_rejected_before_allocation(codec: str, declared_bytes: int) -> None:
    data = bytearray(encode_node(NODE, ORDER, codec))
    (offset,) = _declared_size_offsets(bytes(data))
    struct.pack_into("<q", data, offset, declared_bytes)
    for decode in (decode_node, decode_system_rows):
        with pytest.raises(CorruptFileError, match="268435456") as caught:
            decode(bytes(data), PATH)
        assert caught.value.path == PATH


@codecs
@pytest.mark.parametrize("declared_bytes", [-(2**63), -5, -1, 0, 7, 2_000, 1_000_000])
def test_false_declared_size_is_rejected(codec: str, declared_bytes: int) -> None:
    data = bytearray(encode_node(NODE, ORDER, codec))
    (offset,) = _declared_size_offsets(bytes(data))
    struct.pack_into("<q", data, offset, declared_bytes)
    with pytest.raises(CorruptFileError):
        decode_node(bytes(data), PATH)


def _file(batch: pa.RecordBatch, n_batches: int = 1, **options: object) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, batch.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        for _ in range(n_batches):
            writer.write_batch(batch)
    return bytes(sink.getvalue())


@codecs
@pytest.mark.parametrize("as_dictionary", [False, True])
def test_excessive_compression_ratio_is_rejected(
    codec: str, as_dictionary: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = pa.array(["\0" * 4_000_000])
    data = _file(
        pa.record_batch({"key": texts.dictionary_encode() if as_dictionary else texts, "pvalue": ["v"]}),
        compression=codec,
    )
    assert 4_000_000 < decompressed_bytes(data) < 4_000_200
    assert len(data) < 20_000
    monkeypatch.setattr(arrow_ipc, "MAX_DECOMPRESSED_BYTES", 1_000_000)
    with pytest.raises(CorruptFileError, match="4000"):
        decode_node(data, PATH)


@codecs
def test_size_limit_applies_to_all_batches_together(codec: str) -> None:
    batch = pa.record_batch({"key": ["\0" * 10_000], "pvalue": ["v"]})
    assert decompressed_bytes(_file(batch, 5, compression=codec)) == 5 * decompressed_bytes(
        _file(batch, compression=codec)
    )
    assert decompressed_bytes(_file(batch, 5)) == 0
    assert decompressed_bytes(_file(batch, 0, compression=codec)) == 0


def test_compression_marker_of_early_arrow_versions_is_recognized() -> None:
    batch = pa.record_batch({"key": ["\xff" * 100], "pvalue": ["v"], "pnode": ["c"]})
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(metadata_version=pa.ipc.MetadataVersion.V4)
    with pa.ipc.new_file(sink, batch.schema, options=options) as writer:
        writer.write_batch(batch, custom_metadata={"ARROW:experimental_compression": "zstd"})
    with pytest.raises(CorruptFileError):
        decode_node(bytes(sink.getvalue()), PATH)


@codecs
def test_too_large_node_is_written_uncompressed(codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_file, "MAX_DECOMPRESSED_BYTES", 1_000)
    assert encode_node(NODE, ORDER, codec) == encode_node(NODE, ORDER)


@codecs
@pytest.mark.parametrize(
    ("field", "reason"),
    [("metadata", "its messages overlap its footer"), ("buffers", "2147483648 items, which do not fit")],
)
def test_excessive_ipc_metadata_is_rejected(codec: str, field: str, reason: str) -> None:
    data = encode_node(NODE, ORDER, codec)
    start = 8 + 8 + struct.unpack_from("<i", data, 12)[0]  # after the magic and the message of the schema
    metadata_bytes = 8 + struct.unpack_from("<i", data, start + 4)[0]
    before, after = {
        "metadata": (struct.pack("<qi", start, metadata_bytes), struct.pack("<qi", start, len(data) + 8)),
        "buffers": (struct.pack("<Iq", 9, 0), struct.pack("<Iq", 2**31, 0)),
    }[field]
    assert data.count(before) == 1
    with pytest.raises(ValueError, match=reason):
        decompressed_bytes(data.replace(before, after))
    assert corruption_error(decode_node, data.replace(before, after), PATH)


# Memory


@codecs
def test_cache_counts_decompressed_size(codec: str) -> None:
    storage = MemoryStorage("memory://node-compression/")
    try:
        node = NodeFile([f"C==={'x' * 40_000}{n:02}" for n in range(20)], ["v"] * 20, system={"created_at_millis": "5"})
        data = encode_node(node, 32, codec)
        assert len(data) < 50_000
        decoded = decode_node(data, PATH)
        assert decoded.file_size_bytes == len(data)
        assert 800_000 < decoded.memory_bytes < 810_000
        for cache_bytes, is_cached in (
            (8_000_000, True),
            (1_000_000, False),
        ):  # a node is cached if it takes at most an eighth of the cache
            storage.create(PATH, data)
            store = NodeStore(storage, cache_bytes)
            assert store.load(PATH) == node
            storage.delete(PATH)
            if is_cached:
                assert store.load(PATH) == node
            else:
                with pytest.raises(FileMissingError):
                    store.load(PATH)
    finally:
        drop_memory_root("memory://node-compression/")
