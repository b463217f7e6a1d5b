"""Node files: Arrow IPC files of three sections (FORMAT.md, "Node files")."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from trinitylake_ops.errors import CorruptFileError, InvalidDefinitionError
from trinitylake_ops.format.arrow_ipc import MAX_DECOMPRESSED_BYTES, SCHEMA, surrounding_bytes, write_file
from trinitylake_ops.format.file_names import RootNaming
from trinitylake_ops.format.keys import (
    CLOCK_RESET,
    COMMIT_ID,
    COMMIT_INFO,
    CREATED_AT_MILLIS,
    N_KEYS,
    PREVIOUS_ROOT,
    SEALED_AT_MILLIS,
    STAMPED_VERSION,
    TextColumn,
    built_texts,
    decode_commit_info,
    own_rows,
    text_array,
)
from trinitylake_ops.format.node_sections import MalformedError, Rows, ascend, not_ascending

#: The values of ``node_compression``: none, and the codecs that Arrow has for IPC files.
NODE_COMPRESSIONS = ("", "lz4", "zstd")


@dataclass(slots=True)
class NodeFile:
    """The content of one node file.

    ``keys`` ascend strictly by UTF-8 bytes. ``values[i]`` belongs to ``keys[i]``. ``children`` has ``len(keys) + 1``
    entries: ``children[i]`` holds the keys between ``keys[i - 1]`` and ``keys[i]``. In a leaf it is empty. ``buffer``
    maps a key to its newest message, a location or None for a deletion, in order of arrival. ``system`` holds the
    system rows except ``n_keys``.

    ``is_flat`` says that the node's file had no row without a key. It was a leaf of the older layout, which may hold
    more keys than the order allows. This flag is no part of the content. Keys, values and children that were read from
    a file are views of its bytes (:class:`TextColumn`), decompressed where need be. ``file_size_bytes`` is the size of
    the file, and ``memory_bytes`` the memory that the views hold. Both are 0 for a node that was not read.
    """

    keys: Sequence[str] = field(default_factory=list)
    values: Sequence[str] = field(default_factory=list)
    children: Sequence[str] = field(default_factory=list)
    buffer: dict[str, str | None] = field(default_factory=dict)
    system: dict[str, str] = field(default_factory=dict)
    is_flat: bool = field(default=False, compare=False)
    file_size_bytes: int = field(default=0, compare=False)
    memory_bytes: int = field(default=0, compare=False)

    def rebased(self, place: Callable[[str], str]) -> NodeFile:
        """Return the node with other locations: those that ``place`` makes of each."""
        return NodeFile(
            list(self.keys),
            [place(value) for value in self.values],
            [place(child) for child in self.children],
            {key: None if value is None else place(value) for key, value in self.buffer.items()},
            self.system,
            self.is_flat,
        )

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def is_sealed(self) -> bool:
        return SEALED_AT_MILLIS in self.system

    @property
    def created_at_ms(self) -> int:
        return int(self.system[CREATED_AT_MILLIS])


def encode_node(
    node: NodeFile, order: int, compression: str = "", path: str = "", max_bytes: int | None = None
) -> bytes:
    """Return the bytes of a node file with exactly ``order`` pointer rows, sealed for the name of ``path``.

    It has no seal without a path, or if it would take more than ``max_bytes`` with one.

    With a ``compression`` the body is compressed if that makes the file smaller. So it never takes more than
    :func:`encoded_size_bytes`. Raises InvalidDefinitionError for a ``compression`` that is not in
    ``NODE_COMPRESSIONS``.
    """
    check_node_compression(compression)
    n_keys = len(node.keys)
    spare = order - 1 - n_keys
    if spare < 0:
        raise ValueError(f"{n_keys} keys do not fit a node of order {order}")
    children: list[str | None] = list(node.children) if node.children else [None] * (n_keys + 1)
    blank: list[str | None] = [None] * spare
    system = {**node.system, N_KEYS: str(n_keys)}
    key = [*system, None, *node.keys, *blank, *node.buffer]
    pvalue = [*system.values(), None, *node.values, *blank, *node.buffer.values()]
    pnode = [*[None] * len(system), *children, *blank, *[None] * len(node.buffer)]
    batch = pa.record_batch([text_array(key), text_array(pvalue), text_array(pnode)], schema=SCHEMA)
    data = _smallest_file(batch, compression, path)
    return data if not path or max_bytes is None or len(data) <= max_bytes else _smallest_file(batch, compression, "")


def _smallest_file(batch: pa.RecordBatch, compression: str, path: str) -> bytes:
    if compression:
        batch_bytes = pa.ipc.get_record_batch_size(batch)
        compressed = write_file(batch, compression, path) if batch_bytes <= MAX_DECOMPRESSED_BYTES else None
        if compressed is not None and len(compressed) < surrounding_bytes(path) + batch_bytes:
            return compressed
    return write_file(batch, "", path)


def check_node_compression(compression: str) -> None:
    """Raise InvalidDefinitionError for a ``node_compression`` that this program cannot write."""
    if compression not in NODE_COMPRESSIONS:
        raise InvalidDefinitionError(
            f"node_compression is {compression!r}, this program writes '' (none), 'lz4' or 'zstd';"
            " choose one of these, in an existing lakehouse with alter_definition"
        )


def encoded_size_bytes(
    order: int,
    keys: Sequence[str],
    values: Sequence[str],
    children_bytes: int,
    buffer: Mapping[str, str | None],
    system: Mapping[str, str],
) -> int:
    """Return the exact size of the file that :func:`encode_node` makes of these rows, without making it.

    The size is that of the uncompressed file without its seals, for which :func:`seal_room_bytes` are left. Arrow pads
    each of a column's three buffers (validity, offsets, text) to 8 bytes; all else is constant.
    """
    return size_of_rows_bytes(
        len(system) + 1 + order + len(buffer),
        text_bytes(keys) + text_bytes(buffer) + text_bytes(system) + len(N_KEYS),
        text_bytes(values) + text_bytes(buffer.values()) + text_bytes(system.values()) + len(str(len(keys))),
        children_bytes,
    )


def size_of_rows_bytes(rows: int, key_bytes: int, pvalue_bytes: int, pnode_bytes: int) -> int:
    """Return the size of an uncompressed node file from the number of its rows and the text in each column."""
    return (
        _framing_bytes()
        + 3 * (_pad8((rows + 7) // 8) + _pad8(4 * (rows + 1)))
        + _pad8(key_bytes)
        + _pad8(pvalue_bytes)
        + _pad8(pnode_bytes)
    )


def text_bytes(texts: Iterable[str | None]) -> int:
    """Return the size of all texts together, in bytes of UTF-8."""
    joined = "".join(filter(None, texts))
    return len(joined) if joined.isascii() else len(joined.encode("utf-8"))


def _pad8(size_bytes: int) -> int:
    return (size_bytes + 7) & ~7


@functools.cache
def seal_room_bytes() -> int:
    """Return the most bytes that the seals of a node file take, those of a root whose name has 64 digits."""
    return surrounding_bytes(RootNaming(64).path(0)) - surrounding_bytes("")


@functools.cache
def _framing_bytes() -> int:
    """Return the bytes of a node file that do not depend on its rows: schema, batch header, footer, magic."""
    two_rows_body_bytes = 3 * (_pad8(1) + _pad8(12)) + _pad8(len(N_KEYS)) + _pad8(len("0"))
    return len(encode_node(NodeFile(), order=1)) - two_rows_body_bytes


#: The operations whose properties a sealed root keeps.
_KEEP_PROPERTIES = ("export", "rollback", "restore")


def encode_sealed_root(system: Mapping[str, str], sealed_at_ms: int, path: str = "") -> bytes:
    """Return the sealed root that replaces, at ``path``, a root with these system rows (FORMAT.md).

    The commit's id, its place in the chain, its operation and its members remain. So the name stays taken. The
    properties of an export remain for the next export, and those of a rollback or restore for the marks of the
    versions that it undid.
    """
    kept = {name: system[name] for name in (CREATED_AT_MILLIS, PREVIOUS_ROOT, COMMIT_ID, CLOCK_RESET) if name in system}
    info = decode_commit_info(system)
    names = [
        STAMPED_VERSION,
        "operation",
        "members",
        *(["properties"] if info.get("operation") in _KEEP_PROPERTIES else []),
    ]
    fields = {name: info[name] for name in names if name in info}
    if fields:
        kept[COMMIT_INFO] = json.dumps(fields, ensure_ascii=False, separators=(",", ":"))
    rows = {**kept, N_KEYS: "0", SEALED_AT_MILLIS: str(sealed_at_ms)}
    columns = [
        built_texts(rows),
        built_texts(rows.values()),
        pa.nulls(len(rows), pa.utf8()),
    ]
    return write_file(pa.record_batch(columns, schema=SCHEMA), "", path)


def decode_node(data: bytes, path: str) -> NodeFile:
    """Return the content of a node file.

    The forms of older writers are read too (FORMAT.md, "What is read beyond what is written"). If a root's stamp was
    written for another version than ``path`` names, ``system`` lacks the stamp. Raises CorruptFileError, naming
    ``path``, for bytes that are no Arrow IPC file, and for other columns. Raises it also for rows that break the order
    of sections.
    """
    node, keys = _decoded(data, path)
    if not ascend([keys]):
        raise not_ascending(keys).of(path)
    return node


def decode_nodes(files: Sequence[tuple[bytes, str]]) -> list[NodeFile | CorruptFileError]:
    """Return what :func:`decode_node` does for each file, or the error that it raises.

    Whether keys ascend is checked in one pass over all nodes. Where that fails, each node is looked at by itself.
    """
    found: list[NodeFile | CorruptFileError] = []
    columns = []
    for data, path in files:
        try:
            node, keys = _decoded(data, path)
        except CorruptFileError as error:
            found.append(error)
        else:
            found.append(node)
            columns.append(keys)
    return found if ascend(columns) else [_decoded_or_error(data, path) for data, path in files]


def _decoded_or_error(data: bytes, path: str) -> NodeFile | CorruptFileError:
    try:
        return decode_node(data, path)
    except CorruptFileError as error:
        return error


def _decoded(data: bytes, path: str) -> tuple[NodeFile, TextColumn]:
    """Return the node in a file, and its keys, which are not yet compared with each other. Raises CorruptFileError."""
    rows = Rows.read(data, path)
    del rows.system[N_KEYS]
    try:
        keys, children, buffer = rows.keys(), rows.children(), rows.buffer()
    except MalformedError as error:
        raise error.of(path) from error
    node = NodeFile(keys, rows.values(), children, buffer, own_rows(rows.system, path), rows.is_flat, len(data))
    # Columns of an uncompressed file are views of its bytes, which they keep as a whole.
    node.memory_bytes = max(len(data), rows.batch.get_total_buffer_size())
    return node, keys


def decode_system_rows(data: bytes, path: str) -> dict[str, str]:
    """Return the system rows of a node file alone, as :func:`decode_node` does.

    Raises CorruptFileError, naming ``path``.
    """
    return own_rows(Rows.read(data, path).system, path)
