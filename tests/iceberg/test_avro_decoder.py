"""Avro decoding never reads beyond its input, neither in this package nor in PyIceberg's scans."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyiceberg.avro import file as avro_file
from pyiceberg.avro.decoder import StreamingBinaryDecoder
from pyiceberg.avro.encoder import BinaryEncoder

from tests.iceberg.hostile import unsealed
from tests.iceberg.test_catalog import SCHEMA, rows
from tests.lakes import Lakes
from trinitylake_ops import Lakehouse
from trinitylake_ops.errors import TrinityLakeError
from trinitylake_ops.iceberg.catalog import catalog_at
from trinitylake_ops.iceberg.reach import entries_in, manifests_in
from trinitylake_ops.iceberg.validation.avro import BoundedDecoder, decompress

LONGS = st.integers(-(2**63), 2**63 - 1)
VALUES = st.lists(st.one_of(LONGS, st.binary(max_size=300), st.text(max_size=100), st.booleans(), st.floats()))


class _Sink(bytearray):
    def write(self, data: bytes) -> None:
        self.extend(data)


def encoded(values: list[object]) -> tuple[bytes, list[str]]:
    """Return Avro-encoded values and the names of the decoder methods that read them."""
    sink = _Sink()
    encoder, methods = BinaryEncoder(sink), []  # type: ignore[arg-type]
    for value in values:
        if isinstance(value, bool):
            encoder.write_boolean(value)
        elif isinstance(value, int):
            encoder.write_int(value)
        elif isinstance(value, float):
            encoder.write_double(value)
        elif isinstance(value, str):
            encoder.write_utf8(value)
        else:
            encoder.write_bytes(value)  # type: ignore[arg-type]
        kinds = {bool: "read_boolean", int: "read_int", float: "read_double", str: "read_utf8", bytes: "read_bytes"}
        methods.append(kinds[type(value)])
    return bytes(sink), methods


@given(VALUES)
def test_decoder_reads_values_that_pyiceberg_encodes(values: list[object]) -> None:
    data, methods = encoded(values)
    ours, theirs = BoundedDecoder(data), StreamingBinaryDecoder(data)
    for method in methods:
        assert repr(getattr(ours, method)()) == repr(getattr(theirs, method)())
    assert ours.tell() == len(data)


@given(VALUES.filter(bool), st.data())
def test_decoder_rejects_truncated_input(values: list[object], data: st.DataObject) -> None:
    encoded_values, methods = encoded(values)
    decoder = BoundedDecoder(encoded_values[: data.draw(st.integers(0, len(encoded_values) - 1))])
    with pytest.raises((EOFError, UnicodeDecodeError)):
        for method in methods:
            getattr(decoder, method)()


@pytest.mark.parametrize("size", [4, 1 << 20, 1 << 32, (1 << 63) - 1, -1, -(1 << 63)])
def test_decoder_rejects_lengths_beyond_its_input(size: int) -> None:
    sink = _Sink()
    BinaryEncoder(sink).write_int(size)  # type: ignore[arg-type]
    data = bytes(sink) + b"abc"
    for read in ("read_bytes", "read_utf8", "skip_bytes", "skip_utf8"):
        with pytest.raises(EOFError):
            getattr(BoundedDecoder(data), read)()
    for count in (4, 1 << 40):
        with pytest.raises(EOFError):
            BoundedDecoder(b"abc").read_ints(count)
        with pytest.raises(EOFError):
            BoundedDecoder(b"abc").read_int_bytes_dict(count, {})
    with pytest.raises(EOFError):
        BoundedDecoder(b"abc").read(size)
    with pytest.raises(EOFError):
        BoundedDecoder(b"\xff" * 20).read_int()


def test_pyiceberg_uses_bounded_decoder() -> None:
    assert vars(avro_file)["new_decoder"] is BoundedDecoder


@pytest.fixture
def lake(lakes: Lakes) -> Lakehouse:
    lake = lakes.local()
    catalog = catalog_at(lake)
    catalog.create_namespace("ns")
    catalog.create_table("ns.t", SCHEMA).append(rows(1))
    return lake


@pytest.mark.parametrize("kind", ["manifest list", "manifest"])
@pytest.mark.parametrize("length", [b"\xfe\xff\x7f", b"\xfe\xff\xff\xff\x1f", b"\xfe\xff\xff\xff\xff\xff\xff\x7f"])
def test_manifest_with_excessive_length_is_rejected(lake: Lakehouse, kind: str, length: bytes) -> None:
    table = catalog_at(lake).load_table("ns.t")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    io = catalog_at(lake).io
    (manifest,) = manifests_in(
        snapshot, catalog_at(lake).io
    )  # of another catalog instance, because a catalog caches files
    uri = snapshot.manifest_list if kind == "manifest list" else manifest.manifest_path
    path = uri.removeprefix(lake.root)
    data = decompress(unsealed(lake.storage.read(path)), path).data
    start = data.rindex(b"file://" if b"file://" in data else lake.root.encode()[:7])
    (prefix,) = re.findall(rb"[\x80-\xff]*[\x00-\x7f]\Z", data[:start])
    header = data.index(data[-16:]) + 16
    body = data[header : start - len(prefix)] + length + data[start:-16]
    n_records = body[:1]
    block = body[len(re.match(rb"[\x80-\xff]*[\x00-\x7f][\x80-\xff]*[\x00-\x7f]", body)[0]) :]  # type: ignore[index]
    sink = _Sink()
    BinaryEncoder(sink).write_int(len(block))  # type: ignore[arg-type]
    lake.storage.write(path, data[:header] + n_records + bytes(sink) + block + data[-16:])
    with pytest.raises(TrinityLakeError):
        for listed in manifests_in(snapshot, io):
            entries_in(listed, io)
    with pytest.raises((EOFError, TrinityLakeError)):
        catalog_at(lake).load_table("ns.t").scan().to_arrow()
