"""Damaged and hostile variants of valid files: changes of their bytes, and of their decoded content.

Each mutator takes the bytes of a file and a random generator and returns other bytes, which are equal for equal seeds.
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
_LARGE = 10**4500  # as text, more digits than Python converts to a number


def hostile_value(rng: random.Random) -> Any:
    """Return a value of any JSON type, which is mostly not the expected one."""
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
    """Return nested lists."""
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def bytes_changed(data: bytes, rng: random.Random) -> bytes:
    """Change bits, bytes, numbers, lengths and the order of bytes anywhere."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        place = rng.randrange(len(changed)) if changed else 0
        kind = rng.randrange(8)
        if kind == 0 and changed:
            changed[place] ^= 1 << rng.randrange(8)
        elif kind == 1 and changed:
            changed[place] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))
        elif kind == 2:
            width = rng.choice((2, 4, 8))
            place -= place % width
            changed[place : place + width] = (rng.choice(_NUMBERS) & (2 ** (8 * width) - 1)).to_bytes(width, "little")
        elif kind == 3:
            del changed[place : place + rng.choice((1, 4, 64, len(changed)))]
        elif kind == 4:
            changed[place:place] = rng.choice((b"\0", b"\xff" * 8, b"\xff" * 9 + b"\x01", rng.randbytes(16)))
        elif kind == 5:
            start = rng.randrange(len(changed) + 1)
            changed[place:place] = changed[start : start + rng.choice((4, 32, 256))]
        elif kind == 6:
            start = rng.randrange(len(changed) + 1)
            piece = changed[start : start + 16]
            changed[place : place + len(piece)] = piece
        elif changed:
            step = rng.choice((-1, 1))
            changed[place] = (changed[place] + step) % 256
    return bytes(changed)


def bytes_in_place_changed(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes but no length: kinds, offsets and counts of binary metadata, which other checks hide."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8) if changed else 0):
        changed[rng.randrange(len(changed))] = rng.choice((0, 1, 4, 8, 0x80, 0xFF, rng.randrange(256)))
    return bytes(changed)


def value_changed(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one part changed, removed, duplicated or renamed."""
    places: list[tuple[Any, Any]] = []
    _collect(value, places)
    if not places:
        return hostile_value(rng)
    holder, at = rng.choice(places)
    kind = rng.randrange(6)
    if kind == 0:
        del holder[at]
    elif kind == 1 and isinstance(holder, list):
        holder.insert(at, holder[rng.randrange(len(holder))])
    elif kind == 2 and isinstance(holder, dict):
        holder[rng.choice(_TEXTS)] = holder.pop(at)
    elif kind == 3:
        other, there = rng.choice(places)
        holder[at] = json.loads(json.dumps(other[there], default=str)) if at != there else [holder[at]]
    elif kind == 4 and isinstance(holder[at], str) and holder[at]:
        holder[at] = bytes_changed(holder[at].encode(errors="surrogatepass"), rng).decode(errors="replace")
    else:
        holder[at] = hostile_value(rng)
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict):
        for name in value:
            places.append((value, name))
            _collect(value[name], places)
    elif isinstance(value, list):
        for at, part in enumerate(value):
            places.append((value, at))
            _collect(part, places)


def json_changed(data: bytes, rng: random.Random) -> bytes:
    """Change the content of a JSON file, or rarely its text."""
    kind = rng.randrange(12)
    if kind == 0:
        return b"[" * rng.choice((10, 100_000))
    if kind == 1:
        return data.replace(b":", b":" + rng.choice((b"1" * 5000, b"-", b"NaN", b"1e999", b'{"a":' * 3000)), 1)
    value = json.loads(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = value_changed(value, rng)
    # Without spaces, like this package's writers, so that checksums of metadata are found.
    return json.dumps(value, ensure_ascii=rng.random() < 0.9, separators=(",", ":")).encode(errors="surrogatepass")


def gzip_json_changed(data: bytes, rng: random.Random) -> bytes:
    """Change the content of a gzip-compressed JSON file, or truncate it."""
    changed = _with_gzip_header(data, gzip.compress(json_changed(gzip.decompress(data), rng), mtime=0))
    if rng.random() < 0.2:
        changed = changed[: rng.randrange(len(changed))]
    return changed if rng.random() < 0.9 else changed + changed


def _with_gzip_header(data: bytes, changed: bytes) -> bytes:
    """Return a gzip file with the extra field of another one, which contains the checksum."""
    if len(data) < 12 or not data[3] & 4:
        return changed
    return changed[:3] + b"\x04" + changed[4:10] + data[10 : 12 + int.from_bytes(data[10:12], "little")] + changed[10:]


def gzip_text_changed(data: bytes, rng: random.Random) -> bytes:
    """Change the content of a gzip-compressed text file."""
    return gzip.compress(bytes_changed(gzip.decompress(data), rng), mtime=0)


def text_changed(data: bytes, rng: random.Random) -> bytes:
    """Change a short text."""
    other = rng.choice(_TEXTS).encode(errors="surrogatepass")
    return rng.choice((other, data + other, other + data, bytes_changed(data, rng), str(rng.choice(_NUMBERS)).encode()))


def protobuf_changed(data: bytes, rng: random.Random) -> bytes:
    """Change fields of a protobuf message: their numbers, wire types, lengths, values, order and nesting."""
    fields = _fields_of(data)
    if not fields:
        return bytes_changed(data, rng)
    at = rng.randrange(len(fields))
    tag, content = fields[at]
    number, wire = tag >> 3, tag & 7
    kind = rng.randrange(9)
    if kind == 0:
        fields.pop(at)
    elif kind == 1:
        fields.insert(at, rng.choice(fields))
    elif kind == 2:
        fields[at] = ((rng.choice((number + 1, number + 999, 1000, 1001, 2**28)) << 3) | wire, content)
    elif kind == 3:
        fields[at] = ((number << 3) | rng.randrange(8), content)
    elif kind == 4:
        rng.shuffle(fields)
    elif wire == 0:
        fields[at] = (tag, _varint(rng.choice(_NUMBERS)))
    elif wire == 2:
        body = _body_of(content)
        other = rng.choice(_TEXTS).encode(errors="surrogatepass")
        deep = _nested_field(number, body, rng.choice((20, 95, 200)))
        changed = rng.choice((other, protobuf_changed(body, rng), protobuf_changed(body, rng), body * 3, deep))
        length = len(changed) if rng.random() < 0.95 else rng.choice(_NUMBERS)
        fields[at] = (tag, _varint(length) + changed)
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


def _read_varint(data: bytes, place: int) -> tuple[int, int]:
    number = shift = 0
    while place < len(data) and shift < 70:
        byte = data[place]
        number |= (byte & 0x7F) << shift
        place, shift = place + 1, shift + 7
        if byte < 0x80:
            return number, place
    raise ValueError("no varint")


def _fields_of(data: bytes) -> list[tuple[int, bytes]]:
    """Return (tag, content with its length) of each field, or nothing for an invalid message."""
    fields, place = [], 0
    try:
        while place < len(data):
            tag, start = _read_varint(data, place)
            if tag & 7 == 0:
                place = _read_varint(data, start)[1]
            elif tag & 7 == 2:
                length, body = _read_varint(data, start)
                place = body + length
            elif tag & 7 in (1, 5):
                place = start + (8 if tag & 7 == 1 else 4)
            else:
                return []
            if place > len(data):
                return []
            fields.append((tag, data[start:place]))
    except ValueError:
        return []
    return fields


def _body_of(content: bytes) -> bytes:
    return content[_read_varint(content, 0)[1] :]


def arrow_file_changed(data: bytes, rng: random.Random) -> bytes:
    """Change rows, columns, batches or compression of an Arrow IPC file."""
    table = _table_changed(pa.ipc.open_file(data).read_all(), rng)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, None, "zstd", "lz4")))
    with pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((None, None, 3)))
    return _damaged(bytes(sink.getvalue()), rng)


def arrow_stream_changed(data: bytes, rng: random.Random) -> bytes:
    """Change rows, columns, batches or compression of an Arrow IPC stream."""
    table = _table_changed(pa.ipc.open_stream(data).read_all(), rng)
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=rng.choice((None, "zstd")))
    with pa.ipc.new_stream(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice((None, 2)))
    return _damaged(bytes(sink.getvalue()), rng)


def _damaged(data: bytes, rng: random.Random) -> bytes:
    """Return a file unchanged, or with bytes changed, with similar probability."""
    how = rng.choice((None, bytes_changed, bytes_in_place_changed, bytes_in_place_changed))
    return how(data, rng) if how else data


def puffin_changed(data: bytes, rng: random.Random) -> bytes:
    """Change the footer of a Puffin file, or the bytes of its blobs."""
    end = len(data) - 12
    start = end - int.from_bytes(data[end : end + 4], "little")
    footer = data[start:end]
    if rng.random() < 0.5:
        footer = json_changed(footer, rng)
    else:
        blobs = bytes_changed(data[4 : start - 4], rng)
        data = data[:4] + blobs + data[start - 4 :]
        start += len(blobs) - (start - 8)
    return data[:start] + footer + len(footer).to_bytes(4, "little") + data[-8:]


def parquet_changed(data: bytes, rng: random.Random) -> bytes:
    """Change rows and columns of a Parquet file."""
    sink = pa.BufferOutputStream()
    table = _table_changed(pq.read_table(io.BytesIO(data)), rng)
    own = {name: text for name, text in (pq.read_metadata(io.BytesIO(data)).metadata or {}).items() if b"seal" in name}
    with pq.ParquetWriter(sink, table.schema, compression=rng.choice(("none", "zstd"))) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata(own)
    return _damaged(bytes(sink.getvalue()), rng)


def orc_changed(data: bytes, rng: random.Random) -> bytes:
    """Change rows and columns of an ORC file."""
    sink = pa.BufferOutputStream()
    orc.write_table(_table_changed(orc.read_table(io.BytesIO(data)), rng), sink)
    return _damaged(bytes(sink.getvalue()), rng)


def _table_changed(table: pa.Table, rng: random.Random) -> pa.Table:
    table.validate(full=True)  # an earlier mutation may refer to bytes outside of the buffers
    columns = {name: table[name].to_pylist() for name in table.schema.names}
    types = {name: table.schema.field(name).type for name in table.schema.names}
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(list(columns))
        rows = columns[name]
        kind = rng.randrange(8)
        if kind < 3 and rows:
            order = list(range(len(rows)))
            at = rng.randrange(len(rows))
            if kind == 0:
                order.pop(at)
            elif kind == 1:
                order.insert(at, at)
            else:
                rng.shuffle(order)
            columns = {known: [cells[row] for row in order] for known, cells in columns.items()}
        elif kind == 3:
            types[name] = rng.choice((pa.large_utf8(), pa.binary(), pa.int64(), pa.utf8(), pa.list_(pa.utf8())))
        elif kind == 4:
            other = rng.choice(("txn", "value", "pnode", "", name))
            columns, types = _renamed(columns, name, other), _renamed(types, name, other)
        elif rows:
            at = rng.randrange(len(rows))
            rows[at] = rng.choice((None, rng.choice(_TEXTS), str(rng.choice(_NUMBERS)), rng.choice(rows), b"\xff\xfe"))
    metadata = table.schema.metadata if rng.random() < 0.9 else None
    arrays = [_array(columns[name], types[name]) for name in columns]
    fields = [
        pa.field(name, array.type, metadata=table.schema.field(name).metadata if name in table.schema.names else None)
        for name, array in zip(columns, arrays, strict=True)
    ]
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=metadata))


def _renamed(columns: dict[str, Any], name: str, other: str) -> dict[str, Any]:
    return {other if known == name else known: cells for known, cells in columns.items()}


def _array(cells: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(cells, kind)
    except (pa.ArrowException, TypeError, ValueError, OverflowError):
        texts = [None if cell is None else str(cell).encode(errors="replace").decode() for cell in cells]
        if pa.types.is_large_string(kind):
            return pa.array(texts, kind)
        return pa.array(texts, pa.utf8())


def avro_changed(data: bytes, rng: random.Random) -> bytes:
    """Change records, schema, properties, codec or the size and count of blocks of an Avro file."""
    kind = rng.randrange(6)
    reader = fastavro.reader(io.BytesIO(data), return_record_name=False)
    header = dict(reader.metadata)
    if kind == 0:
        schema = value_changed(json.loads(header["avro.schema"]), rng)
        return _avro_file(data, {**header, "avro.schema": json.dumps(schema)})
    if kind == 1:
        name = rng.choice(list(header))
        return _avro_file(data, {**header, name: rng.choice((*_TEXTS, "deflate", "null", "zstandard", "bzip2", "xz"))})
    if kind == 2:
        return _avro_blocks(data, header, rng)
    schema = json.loads(header["avro.schema"], object_pairs_hook=_plain)
    records = list(fastavro.reader(io.BytesIO(_avro_file(data, {**header, "avro.schema": json.dumps(schema)}))))
    own = {name: value for name, value in header.items() if not name.startswith("avro.")}
    for _ in range(rng.choice((1, 1, 3))):
        records = _typed_change(records, rng)
    sink = io.BytesIO()
    try:
        fastavro.writer(sink, schema, records, codec=rng.choice(("null", "deflate")), metadata=own)
    except Exception:  # noqa: BLE001 - such a value has no place in the schema; then its bytes are changed
        return bytes_changed(data, rng)
    return _avro_file(sink.getvalue(), {"avro.schema": header["avro.schema"]})


def _plain(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: value for name, value in pairs if name != "logicalType"}


def _typed_change(records: list[Any], rng: random.Random) -> list[Any]:
    """Change a value to another one of the same type, so that it can be written."""
    if rng.random() < 0.1 and records:
        return records * 3
    places: list[tuple[Any, Any]] = []
    _collect(records, places)
    if not places:
        return records
    holder, at = rng.choice(places)
    value = holder[at]
    if isinstance(value, str):
        holder[at] = rng.choice((*_TEXTS, value[:-1], value.upper())).encode(errors="replace").decode()
    elif isinstance(value, bytes):
        holder[at] = bytes_changed(value, rng)
    elif isinstance(value, bool):
        holder[at] = not value
    elif isinstance(value, int):
        holder[at] = rng.choice((0, -1, 1, 3, 99, 2**31 - 1, 2**63 - 1, -(2**63)))
    elif value is None:
        holder[at] = rng.choice((0, 1, "x", b"", [], {}))
    else:
        holder[at] = None if rng.random() < 0.5 else type(value)()
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
    """Return an Avro file with other header entries and unchanged blocks."""
    blocks = io.BytesIO(data)
    header: Any = fastavro.schemaless_reader(blocks, _HEADER, None)
    meta = {**header["meta"], **{name: text.encode(errors="surrogatepass") for name, text in changes.items()}}
    sink = io.BytesIO()
    fastavro.schemaless_writer(sink, _HEADER, {**header, "meta": meta})
    return sink.getvalue() + data[blocks.tell() :]


def _avro_blocks(data: bytes, header: Mapping[str, str], rng: random.Random) -> bytes:
    """Return an Avro file whose block declares other counts, or decompresses to other bytes."""
    blocks = io.BytesIO(data)
    sync = fastavro.schemaless_reader(blocks, _HEADER, None)["sync"]  # type: ignore[index,call-overload]
    head = data[: blocks.tell()]
    rest = data[blocks.tell() :]
    try:
        count, place = _read_varint(rest, 0)
        size, place = _read_varint(rest, place)
    except ValueError:
        return bytes_changed(data, rng)
    body = rest[place : place + (size >> 1)]
    if header.get("avro.codec") == "deflate":
        packer = zlib.compressobj(wbits=-15)
        plain = bytes_changed(zlib.decompress(body, wbits=-15), rng)
        body = packer.compress(plain) + packer.flush()
    else:
        body = bytes_changed(body, rng)
    count = count if rng.random() < 0.6 else rng.choice(_NUMBERS)
    size = len(body) << 1 if rng.random() < 0.8 else rng.choice(_NUMBERS)
    return head + _varint(count) + _varint(size) + body + sync


def mutated(data: bytes, change: Mutator, rng: random.Random) -> bytes:
    """Return a variant of a file: mostly a structural one, otherwise one with changed bytes."""
    if rng.random() < 0.3:
        return bytes_changed(data, rng)
    try:
        return change(data, rng)
    except RecursionError:
        return bytes_changed(data, rng)
