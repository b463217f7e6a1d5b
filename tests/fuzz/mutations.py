"""Mutators, which return damaged and hostile variants of valid files.

Each mutator takes the bytes of a file and a random generator, and returns the same variant for the same seed.
Structural mutators decode the file, change a value, a length, a count or a type, and encode it again, so that code
behind the outermost checks is reached. Checksums are recomputed afterwards (:mod:`reseal`).
"""

from __future__ import annotations

import gzip
import io
import json
import random
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import orc

Mutator = Callable[[bytes, random.Random], bytes]

_NUMBERS = (
    0,
    1,
    2,
    7,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**64 - 1,
)
_TEXTS = (
    "",
    " ",
    "\0",
    "..",
    "/",
    "a//b",
    "../../etc/passwd",
    "file:///etc/passwd",
    "s3://other/file",
    "\x1b[2J",
    "\u202e",
    "\ud800",
    "é" * 300,
    "9" * 5000,
    "1e400",
    "x" * 20_000,
    "tables/" + "a/" * 200,
    "_11111111111111111111111111111111.arrow",
    "http://[::1",
    "%00%ff",
)
_LARGE = 10**4500  # as text, it has more digits than Python converts to a number


def hostile_value(rng: random.Random) -> Any:
    """Return a value of any JSON type, usually not of the expected one."""
    kind = rng.randrange(7)
    if kind == 0:
        return rng.choice(_TEXTS)
    if kind == 1:
        return rng.choice(_NUMBERS) * rng.choice((1, -1))
    if kind == 2:
        return rng.choice((None, True, False))
    if kind == 3:
        return rng.choice((float("nan"), float("inf"), 1e308, -0.0, 0.5))
    if kind == 4:
        return rng.choice(([], [[]], [None], [1, "a"], ["a"] * 50))
    if kind == 5:
        return rng.choice(({}, {"": None}, {"a": {}}, {"type": "struct", "fields": 7}))
    return nested(rng.choice((50, 2000)))


def nested(depth: int) -> Any:
    """Return lists nested to a depth."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Change bits, bytes, numbers, lengths and the order of bytes anywhere."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        position = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(8)
        if kind == 0 and changed:
            changed[position] ^= 1 << rng.randrange(8)
        elif kind == 1 and changed:
            changed[position] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            width = rng.choice((2, 4, 8))
            position -= position % width
            number = rng.choice(_NUMBERS) & (2 ** (8 * width) - 1)
            changed[position : position + width] = number.to_bytes(width, "little")
        elif kind == 3:
            del changed[position : position + rng.choice((1, 4, 64, len(changed)))]
        elif kind == 4:
            changed[position:position] = rng.choice((b"\0", b"\xff" * 8, b"\xff" * 9 + b"\x01", rng.randbytes(16)))
        elif kind == 5:
            start = rng.randrange(len(changed) + 1)
            changed[position:position] = changed[start : start + rng.choice((4, 32, 256))]
        elif kind == 6:
            start = rng.randrange(len(changed) + 1)
            piece = changed[start : start + 16]
            changed[position : position + len(piece)] = piece
        elif changed:
            step = rng.choice((-1, 1))
            changed[position] = (changed[position] + step) % 256
    return bytes(changed)


def mutate_bytes_in_place(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes but not the length, to reach types, offsets and counts in binary metadata."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 4, 8, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def mutate_value(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one item changed, removed, duplicated or renamed."""
    items: list[tuple[Any, Any]] = []
    _collect(value, items)
    if not items:
        return hostile_value(rng)
    container, index = rng.choice(items)
    kind = rng.randrange(6)
    if kind == 0:
        del container[index]
    elif kind == 1 and isinstance(container, list):
        container.insert(index, container[rng.randrange(len(container))])
    elif kind == 2 and isinstance(container, dict):
        container[rng.choice(_TEXTS)] = container.pop(index)
    elif kind == 3:
        other, other_index = rng.choice(items)
        is_same = index == other_index
        container[index] = [container[index]] if is_same else json.loads(json.dumps(other[other_index], default=str))
    elif kind == 4 and isinstance(container[index], str) and container[index]:
        container[index] = mutate_bytes(container[index].encode(errors="surrogatepass"), rng).decode(errors="replace")
    else:
        container[index] = hostile_value(rng)
    return value


def _collect(value: Any, items: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict):
        for name in value:
            items.append((value, name))
            _collect(value[name], items)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            items.append((value, index))
            _collect(item, items)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change the content of a JSON file, or rarely its text."""
    kind = rng.randrange(12)
    if kind == 0:
        return b"[" * rng.choice((10, 100_000))
    if kind == 1:
        return data.replace(b":", b":" + rng.choice((b"1" * 5000, b"-", b"NaN", b"1e999", b'{"a":' * 3000)), 1)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = mutate_value(value, rng)
    # Without spaces, like the writers of this package, so that the checksums of metadata are found.
    return json.dumps(value, ensure_ascii=rng.random() < 0.9, separators=(",", ":")).encode(errors="surrogatepass")


def mutate_gzip_json(data: bytes, rng: random.Random) -> bytes:
    """Change the content of a gzip-compressed JSON file, or truncate it."""
    changed = _copy_gzip_header(data, gzip.compress(mutate_json(gzip.decompress(data), rng), mtime=0))
    if rng.random() < 0.2:
        changed = changed[: rng.randrange(len(changed))]
    return changed if rng.random() < 0.9 else changed + changed


def _copy_gzip_header(data: bytes, changed: bytes) -> bytes:
    """Return the changed gzip file with the extra field of the original, which contains the checksum."""
    if len(data) < 12 or not data[3] & 4:
        return changed
    return changed[:3] + b"\x04" + changed[4:10] + data[10 : 12 + int.from_bytes(data[10:12], "little")] + changed[10:]


def mutate_gzip_text(data: bytes, rng: random.Random) -> bytes:
    """Change the content of a gzip-compressed text file."""
    return gzip.compress(mutate_bytes(gzip.decompress(data), rng), mtime=0)


def mutate_text(data: bytes, rng: random.Random) -> bytes:
    """Change a short text."""
    other = rng.choice(_TEXTS).encode(errors="surrogatepass")
    return rng.choice((other, data + other, other + data, mutate_bytes(data, rng), str(rng.choice(_NUMBERS)).encode()))


def mutate_protobuf(data: bytes, rng: random.Random) -> bytes:
    """Change fields of a protobuf message: their numbers, wire types, lengths, values, order and nesting."""
    fields = _fields_of(data)
    if not fields:
        return mutate_bytes(data, rng)
    index = rng.randrange(len(fields))
    tag, content = fields[index]
    number, wire = tag >> 3, tag & 7
    kind = rng.randrange(9)
    if kind == 0:
        fields.pop(index)
    elif kind == 1:
        fields.insert(index, rng.choice(fields))
    elif kind == 2:
        fields[index] = ((rng.choice((number + 1, number + 999, 1000, 1001, 2**28)) << 3) | wire, content)
    elif kind == 3:
        fields[index] = ((number << 3) | rng.randrange(8), content)
    elif kind == 4:
        rng.shuffle(fields)
    elif wire == 0:
        fields[index] = (tag, _varint(rng.choice(_NUMBERS)))
    elif wire == 2:
        body = _body_of(content)
        other = rng.choice(_TEXTS).encode(errors="surrogatepass")
        nested_body = _nested_field(number, body, rng.choice((20, 95, 200)))
        changed = rng.choice((other, mutate_protobuf(body, rng), mutate_protobuf(body, rng), body * 3, nested_body))
        length = len(changed) if rng.random() < 0.95 else rng.choice(_NUMBERS)
        fields[index] = (tag, _varint(length) + changed)
    return b"".join(_varint(tag) + content for tag, content in fields)


def _nested_field(number: int, body: bytes, depth: int) -> bytes:
    for _ in range(depth):
        body = _varint(number << 3 | 2) + _varint(len(body)) + body
    return body


def _varint(number: int) -> bytes:
    parts = bytearray()
    while number > 0x7F:
        parts.append(number & 0x7F | 0x80)
        number >>= 7
    parts.append(number)
    return bytes(parts)


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    number = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position
    raise ValueError("invalid varint")


def _fields_of(data: bytes) -> list[tuple[int, bytes]]:
    """Return (tag, content with its length) of each field, or an empty list for an invalid message."""
    fields, position = [], 0
    try:
        while position < len(data):
            tag, start = _read_varint(data, position)
            if tag & 7 == 0:
                position = _read_varint(data, start)[1]
            elif tag & 7 == 2:
                length, body = _read_varint(data, start)
                position = body + length
            elif tag & 7 in (1, 5):
                position = start + (8 if tag & 7 == 1 else 4)
            else:
                return []
            if position > len(data):
                return []
            fields.append((tag, data[start:position]))
    except ValueError:
        return []
    return fields


def _body_of(content: bytes) -> bytes:
    return content[_read_varint(content, 0)[1] :]


def mutate_arrow_file(data: bytes, rng: random.Random) -> bytes:
    """Change rows, columns, batches or compression of an Arrow IPC file."""
    table = _mutate_table(pa.ipc.open_file(data).read_all(), rng)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, None, "zstd", "lz4")))
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((None, None, 3)))
    return _maybe_mutate_bytes(bytes(sink.getvalue()), rng)


def mutate_arrow_stream(data: bytes, rng: random.Random) -> bytes:
    """Change rows, columns, batches or compression of an Arrow IPC stream."""
    table = _mutate_table(pa.ipc.open_stream(data).read_all(), rng)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, "zstd")))
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((None, 2)))
    return _maybe_mutate_bytes(bytes(sink.getvalue()), rng)


def _maybe_mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Return a file unchanged or with changed bytes."""
    mutate = rng.choice((None, mutate_bytes, mutate_bytes_in_place, mutate_bytes_in_place))
    return mutate(data, rng) if mutate else data


def mutate_puffin(data: bytes, rng: random.Random) -> bytes:
    """Change the footer of a Puffin file, or the bytes of its blobs."""
    end = len(data) - 12
    start = end - int.from_bytes(data[end : end + 4], "little")
    footer = data[start:end]
    if rng.random() < 0.5:
        footer = mutate_json(footer, rng)
    else:
        blobs = mutate_bytes(data[4 : start - 4], rng)
        data = data[:4] + blobs + data[start - 4 :]
        start += len(blobs) - (start - 8)
    return data[:start] + footer + len(footer).to_bytes(4, "little") + data[-8:]


def mutate_parquet(data: bytes, rng: random.Random) -> bytes:
    """Change rows and columns of a Parquet file."""
    sink = pa.BufferOutputStream()
    table = _mutate_table(pq.read_table(io.BytesIO(data)), rng)
    all_metadata = pq.read_metadata(io.BytesIO(data)).metadata or {}
    metadata = {name: text for name, text in all_metadata.items() if b"seal" in name}
    with pq.ParquetWriter(sink, table.schema, compression=rng.choice(("none", "zstd"))) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(metadata)
    return _maybe_mutate_bytes(bytes(sink.getvalue()), rng)


def mutate_orc(data: bytes, rng: random.Random) -> bytes:
    """Change rows and columns of an ORC file."""
    sink = pa.BufferOutputStream()
    orc.write_table(_mutate_table(orc.read_table(io.BytesIO(data)), rng), sink)
    return _maybe_mutate_bytes(bytes(sink.getvalue()), rng)


def _mutate_table(table: pa.Table, rng: random.Random) -> pa.Table:
    table.validate(full=True)  # after an earlier mutation, it may refer to bytes outside of the buffers
    columns = {name: table[name].to_pylist() for name in table.schema.names}
    types = {name: table.schema.field(name).type for name in table.schema.names}
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(list(columns))
        rows = columns[name]
        kind = rng.randrange(8)
        if kind < 3 and rows:
            order = list(range(len(rows)))
            index = rng.randrange(len(rows))
            if kind == 0:
                order.pop(index)
            elif kind == 1:
                order.insert(index, index)
            else:
                rng.shuffle(order)
            columns = {column: [cells[row] for row in order] for column, cells in columns.items()}
        elif kind == 3:
            types[name] = rng.choice((pa.large_utf8(), pa.binary(), pa.int64(), pa.utf8(), pa.list_(pa.utf8())))
        elif kind == 4:
            other = rng.choice(("txn", "value", "pnode", "", name))
            columns, types = _renamed(columns, name, other), _renamed(types, name, other)
        elif rows:
            index = rng.randrange(len(rows))
            rows[index] = rng.choice(
                (None, rng.choice(_TEXTS), str(rng.choice(_NUMBERS)), rng.choice(rows), b"\xff\xfe")
            )
    metadata = table.schema.metadata if rng.random() < 0.9 else None
    arrays = [_array(columns[name], types[name]) for name in columns]
    fields = [
        pa.field(name, array.type, metadata=table.schema.field(name).metadata if name in table.schema.names else None)
        for name, array in zip(columns, arrays, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def _renamed(columns: dict[str, Any], name: str, other: str) -> dict[str, Any]:
    return {other if column == name else column: cells for column, cells in columns.items()}


def _array(cells: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(cells, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        texts = [None if cell is None else str(cell).encode(errors="replace").decode() for cell in cells]
        if pa.types.is_large_string(kind):
            return pa.array(texts, kind)
        return pa.array(texts, pa.utf8())


def mutate_avro(data: bytes, rng: random.Random) -> bytes:
    """Change records, schema, properties, codec or the size and count of blocks of an Avro file."""
    kind = rng.randrange(6)
    reader = fastavro.reader(io.BytesIO(data), return_record_name=False)
    header = dict(reader.metadata)
    if kind == 0:
        schema = mutate_value(json.loads(header["avro.schema"]), rng)
        return _avro_file(data, {**header, "avro.schema": json.dumps(schema)})
    if kind == 1:
        name = rng.choice(list(header))
        return _avro_file(data, {**header, name: rng.choice((*_TEXTS, "deflate", "null", "zstandard", "bzip2", "xz"))})
    if kind == 2:
        return _avro_blocks(data, header, rng)
    schema = json.loads(header["avro.schema"], object_pairs_hook=_without_logical_type)
    records = list(fastavro.reader(io.BytesIO(_avro_file(data, {**header, "avro.schema": json.dumps(schema)}))))
    metadata = {name: value for name, value in header.items() if not name.startswith("avro.")}
    for _ in range(rng.choice((1, 1, 3))):
        records = _mutate_record(records, rng)
    sink = io.BytesIO()
    try:
        fastavro.writer(sink, schema, records, codec=rng.choice(("null", "deflate")), metadata=metadata)
    except Exception:  # noqa: BLE001 - the value does not fit the schema
        return mutate_bytes(data, rng)
    return _avro_file(sink.getvalue(), {"avro.schema": header["avro.schema"]})


def _without_logical_type(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name != "logicalType"}


def _mutate_record(records: list[Any], rng: random.Random) -> list[Any]:
    """Change a value to another value of the same type, which the schema allows."""
    if rng.random() < 0.1 and records:
        return records * 3
    items: list[tuple[Any, Any]] = []
    _collect(records, items)
    if not items:
        return records
    container, index = rng.choice(items)
    value = container[index]
    if isinstance(value, str):
        container[index] = rng.choice((*_TEXTS, value[:-1], value.upper())).encode(errors="replace").decode()
    elif isinstance(value, bytes):
        container[index] = mutate_bytes(value, rng)
    elif isinstance(value, bool):
        container[index] = not value
    elif isinstance(value, int):
        container[index] = rng.choice((0, -1, 1, 3, 99, 2**31 - 1, 2**63 - 1, -(2**63)))
    elif value is None:
        container[index] = rng.choice((0, 1, "x", b"", [], {}))
    else:
        container[index] = None if rng.random() < 0.5 else type(value)()
    return records


_HEADER = fastavro.parse_schema(
    {
        "type": "record",
        "name": "Header",
        "fields": [
            {"name": "magic", "type": {"type": "fixed", "name": "magic", "size": 4}},
            {"name": "meta", "type": {"type": "map", "values": "bytes"}},
            {"name": "sync", "type": {"type": "fixed", "name": "sync", "size": 16}},
        ],
    }
)


def _avro_file(data: bytes, changes: Mapping[str, str]) -> bytes:
    """Return an Avro file with changed header entries and the same blocks."""
    blocks = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(blocks, _HEADER, None)
    meta = {**header["meta"], **{name: text.encode(errors="surrogatepass") for name, text in changes.items()}}
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, _HEADER, {**header, "meta": meta})
    return sink.getvalue() + data[blocks.tell() :]


def _avro_blocks(data: bytes, header: Mapping[str, str], rng: random.Random) -> bytes:
    """Return an Avro file whose block declares other counts or decompresses to other bytes."""
    blocks = io.BytesIO(data)
    sync = fastavro.schemaless_reader(blocks, _HEADER, None)["sync"]  # type: ignore[index,call-overload]
    head = data[: blocks.tell()]
    rest = data[blocks.tell() :]
    try:
        count, position = _read_varint(rest, 0)
        size, position = _read_varint(rest, position)
    except ValueError:
        return mutate_bytes(data, rng)
    body = rest[position : position + (size >> 1)]
    if header.get("avro.codec") == "deflate":
        compressor = zlib.compressobj(wbits=-15)
        plain = mutate_bytes(zlib.decompress(body, wbits=-15), rng)
        body = compressor.compress(plain) + compressor.flush()
    else:
        body = mutate_bytes(body, rng)
    count = count if rng.random() < 0.6 else rng.choice(_NUMBERS)
    size = len(body) << 1 if rng.random() < 0.8 else rng.choice(_NUMBERS)
    return head + _varint(count) + _varint(size) + body + sync


def mutate_file(data: bytes, mutate: Mutator, rng: random.Random) -> bytes:
    """Return a variant of a file, usually a structural one, otherwise with changed bytes."""
    if rng.random() < 0.3:
        return mutate_bytes(data, rng)
    try:
        return mutate(data, rng)
    except RecursionError:
        return mutate_bytes(data, rng)
